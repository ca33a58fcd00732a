"""Write the tables of benchmarks into pages of the documentation."""

from __future__ import annotations

from pathlib import Path


def fill(page: Path, name: str, text: str) -> None:
    """Replace the text between the page's comments `begin NAME` and `end NAME`."""
    before, after = check_place(page, name)
    begin, end = _marks(name)
    page.write_text(f"{before}{begin}{text}\n{end}{after}", encoding="utf-8")


def check_place(page: Path, name: str) -> tuple[str, str]:
    """Return the text before and after the place of a table. Exit if the page has no such place."""
    begin, end = _marks(name)
    before, _, rest = page.read_text(encoding="utf-8").partition(begin)
    _, found, after = rest.partition(end)
    if not found:
        raise SystemExit(f"{page} has no place for {name}: it needs {begin.strip()} and {end}.")
    return before, after


def _marks(name: str) -> tuple[str, str]:
    return f"<!-- begin {name} -->\n", f"<!-- end {name} -->"
