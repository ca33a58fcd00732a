"""How a file of JSON lines is cut."""

from __future__ import annotations


def json_lines(text: str) -> list[str]:
    """The lines of a file of JSON lines, blank ones too, so that their numbers are those of the file.

    Only a line feed ends a line: U+2028, U+2029 and U+0085 may stand in a text of JSON as they are, and
    `str.splitlines` would cut there. A byte order mark at the beginning is no part of the first line.
    """
    return text.removeprefix("\N{ZERO WIDTH NO-BREAK SPACE}").split("\n")
