"""Writer of `data/tasks.zip`, the tasks that ship with a world (`ludus.envs.task_archive`)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from io import BytesIO
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
