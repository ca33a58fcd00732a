"""Writer of `data/tasks.zip`, the tasks that ship with a world (`ludus.envs.task_archive`)."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from io import BytesIO
from pathlib import Path
from zipfile import ZIP_LZMA, ZipFile, ZipInfo


def pack(members: Mapping[str, Sequence[object]]) -> bytes:
    """Return an archive with the rows of each member as JSON lines, the same for equal rows."""
    packed = BytesIO()
    with ZipFile(packed, "w", ZIP_LZMA) as archive:
        for name, rows in members.items():
            info = ZipInfo(name)
            info.compress_type = ZIP_LZMA
            archive.writestr(info, "".join(map(as_line, rows)))
    return packed.getvalue()


def as_line(row: object) -> str:
    """Return a row as a line of JSON."""
    return json.dumps(row, ensure_ascii=False, separators=(",", ":")) + "\n"


def write_archive(
    description: str | None, default: Path, members: Callable[[], Mapping[str, Sequence[object]]]
) -> None:
    """Write the archive to `--out` of the command line."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--out", type=Path, default=default)
    out: Path = parser.parse_args().out
    out.write_bytes(pack(members()))
    print(f"{out}: {out.stat().st_size:,} bytes")
