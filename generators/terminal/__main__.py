"""Write the tasks of the world `terminal` and their difficulty report: python -m generators.terminal.

The tasks are reproducible byte for byte (with the same versions of zlib and liblzma). `--report` writes only the
report, for the existing tasks.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from generators.terminal.difficulty_report import report
from generators.terminal.freeze import packed

from ludus.worlds.terminal.splits import TerminalSettings, splits_of

OUT = Path(__file__).parents[2] / "src/ludus/worlds/terminal/data"


def main() -> None:
    """Write the files."""
    parser = argparse.ArgumentParser(prog="python -m generators.terminal", description=__doc__)
    parser.add_argument("--out", type=Path, default=OUT, help="folder of the data")
    parser.add_argument("--report", action="store_true", help="write only the report")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if not args.report:
        (args.out / "tasks.jsonl.xz").write_bytes(packed())
    (args.out / "difficulty_report.txt").write_text(report(splits_of(TerminalSettings())), "utf-8")


if __name__ == "__main__":
    main()
