"""Split JSON-lines files."""

from __future__ import annotations


def json_lines(text: str) -> list[str]:
    """Split a JSON-lines file, keeping blank lines so that line numbers match the file.

    Only a line feed ends a line: JSON text may contain U+2028, U+2029 and U+0085, at which `str.splitlines`
    would split. A leading byte order mark is removed.
    """
    return text.removeprefix("\N{ZERO WIDTH NO-BREAK SPACE}").split("\n")
