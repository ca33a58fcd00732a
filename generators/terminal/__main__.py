"""Draw the tasks of the world `terminal` and write them to the file that the package ships.

    python -m generators.terminal --write src/ludus/worlds/terminal/data/tasks.jsonl.xz

The same programs write the same file, byte for byte (with the same versions of zlib and liblzma).
"""

from __future__ import annotations

import argparse
from pathlib import Path

from generators.terminal.freeze import packed


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(prog="python -m generators.terminal", description=__doc__)
    parser.add_argument("--write", metavar="FILE", type=Path, required=True)
    file: Path = parser.parse_args().write
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(packed())
    print(f"{file}: {file.stat().st_size} bytes")


if __name__ == "__main__":
    main()
