"""Help text of the commands, wrapped to the terminal."""

from __future__ import annotations

import argparse
import re
import shutil
import textwrap
from collections.abc import Iterator
from itertools import groupby
from typing import TextIO


class HelpFormatter(argparse.HelpFormatter):
    """Wrap paragraphs, and keep indented lines separate, with a hanging indent."""

    def format_help(self) -> str:
        """Return the help, whose usage may have lines that argparse does not break."""
        return "".join(f"{fill_columns(line, self._width)}\n" for line in super().format_help().splitlines())

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return "\n".join(_wrapped(text.strip("\n"), max(width, 20)))


def _wrapped(text: str, width: int) -> Iterator[str]:
    for is_paragraph, lines in groupby(text.split("\n"), lambda line: bool(line) and not line.startswith(" ")):
        if is_paragraph:
            yield _fill(" ".join(lines), width)
        else:
            yield from (fill_columns(line, width) for line in lines)


def fill_columns(line: str, width: int) -> str:
    """Wrap the second column of a line below itself, or below the first one if that is wide."""
    if len(line) <= width:
        return line
    margin = " " * (len(line) - len(line.lstrip()))
    columns = re.match(r" *\S.*?  +", line)
    if columns is None:
        return _fill(line.strip(), width, margin, f"{margin}    ")
    first, second = columns.group(), line[columns.end() :]
    if len(first) <= width // 2:
        return _fill(second, width, first, " " * len(first))
    below = f"{margin}        "
    return f"{_fill(first.strip(), width, margin, below)}\n{_fill(second, width, below, below)}"


def _fill(text: str, width: int, first: str = "", rest: str = "") -> str:
    return textwrap.fill(
        text, width, initial_indent=first, subsequent_indent=rest, break_long_words=False, break_on_hyphens=False
    )


def fill_indented(line: str, width: int) -> str:
    """Wrap a line below its indentation, or below the text after a label such as `note`; others are unchanged."""
    body = re.sub(r"^ *([a-z]{1,5} {2,})?", "", line)
    first = line[: len(line) - len(body)]
    return _fill(body, width, first, " " * len(first)) if body and first else line


def wrapped(text: str, stream: TextIO) -> str:
    """Wrap the lines of a text at spaces to the width of the terminal; unchanged for a stream that is not one."""
    if not stream.isatty():
        return text
    width = shutil.get_terminal_size().columns
    return "\n".join(_fill(line, width) for line in text.splitlines())
