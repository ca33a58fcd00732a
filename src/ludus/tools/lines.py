"""Split texts into lines."""

from __future__ import annotations


def json_lines(text: str) -> list[str]:
    """Split a JSON-lines file, keeping blank lines so that line numbers match the file.

    Only a line feed ends a line: JSON text may contain U+2028, U+2029 and U+0085, at which `str.splitlines`
    would split. A leading byte order mark is removed.
    """
    return text.removeprefix("\N{ZERO WIDTH NO-BREAK SPACE}").split("\n")


def stripped_lines(text: str) -> list[str]:
    """Return the lines of a text without blanks at their ends and without empty lines at the end."""
    lines = [line.rstrip() for line in text.split("\n")]
    while lines and not lines[-1]:
        lines.pop()
    return lines
