"""Tables that fit the terminal: they wrap text, drop columns by rank, or print rows as blocks, but cut no cell."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from ludus.errors import UserError
from ludus.evaluation.tables import ReportTable, markdown_rows

_TEXT_COLUMNS = 20
"""Minimum width of a column of text."""
_WORD = re.compile(r"\[[^\s\]]+, [^\s\]]+\]\S*|\S+")
"""A word or an interval [low, high], which is not broken."""


@dataclass(frozen=True, slots=True)
class TableColumn:
    """A column. Columns of the highest rank are dropped first; only the cells of `wrap` may be wrapped, at spaces."""

    name: str
    rank: int = 0
    wrap: bool = False
    right: bool = False


def make_table(
    columns: Sequence[str | TableColumn], rows: Iterable[Sequence[object]], title: str | None = None
) -> FittedTable:
    """Return a table; None is an empty cell, and other cells are converted by `str`."""
    cells = [["" if cell is None else str(cell) for cell in row] for row in rows]
    return FittedTable([c if isinstance(c, TableColumn) else TableColumn(c) for c in columns], cells, title)


@dataclass(frozen=True)
class FittedTable:
    """A table whose layout is chosen when it is printed.

    If it is too wide, text is wrapped first, then columns are dropped by rank and named below the table. If the
    columns of the lowest rank do not fit, each row is printed as a block of lines with all columns.
    """

    columns: Sequence[TableColumn]
    rows: Sequence[Sequence[str]]
    title: str | None = None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        kept, widths = self._layout(options.max_width)
        if widths is None:
            yield from self._blocks(options.max_width)
            return
        table = Table(title=self.title)
        for index, width in zip(kept, widths, strict=True):
            column = self.columns[index]
            table.add_column(column.name, width=width, justify="right" if column.right else "left")
        for row in self.rows:
            table.add_row(*(_wrapped(row[index], width) for index, width in zip(kept, widths, strict=True)))
        yield table
        if dropped := [column.name for index, column in enumerate(self.columns) if index not in kept]:
            yield Text(f"Columns that need a wider terminal: {', '.join(dropped)}", style="dim")

    def shows(self, name: str, width: int) -> bool:
        """Return whether a column with a cell that is not empty is visible at a width of the terminal."""
        kept, _ = self._layout(width)
        return any(self.columns[index].name == name and any(row[index] for row in self.rows) for index in kept)

    def to_markdown(self) -> str:
        """Return the whole table as Markdown, with its title as a paragraph above it."""
        title = f"{self.title}\n\n" if self.title else ""
        return f"{title}{markdown_rows([column.name for column in self.columns], self.rows)}\n"

    def _layout(self, available: int) -> tuple[list[int], list[int] | None]:
        """Return the visible columns and their widths; None for the widths if rows are printed as blocks."""
        for rank in sorted({column.rank for column in self.columns}, reverse=True):
            kept = [index for index, column in enumerate(self.columns) if column.rank <= rank]
            if (widths := self._widths(kept, available)) is not None:
                return kept, widths
        return list(range(len(self.columns))), None

    def _widths(self, kept: Sequence[int], available: int) -> list[int] | None:
        """Return the widths of columns, or None if they do not fit."""
        least, wanted = [], []
        for index in kept:
            column, cells = self.columns[index], [line for row in self.rows for line in row[index].split("\n")]
            widest = max(map(cell_len, cells), default=0)
            words = max((cell_len(word) for cell in cells for word in _WORD.findall(cell)), default=0)
            needed = max(words, min(_TEXT_COLUMNS, widest)) if column.wrap else widest
            least.append(max(needed, *map(cell_len, column.name.split())))
            wanted.append(max(widest, cell_len(column.name)))
        room = available - sum(least) - (3 * len(kept) + 1)
        if room < 0:
            return None
        by_want = sorted(range(len(kept)), key=lambda i: wanted[i] - least[i])
        for position, i in enumerate(by_want):
            extra = min(wanted[i] - least[i], room // (len(kept) - position))
            least[i] += extra
            room -= extra
        return least

    def _blocks(self, available: int) -> Iterable[RenderableType]:
        names = max(cell_len(column.name) for column in self.columns) + 2
        if self.title:
            yield Text(self.title, style="italic")
        for row in self.rows:
            block = Table.grid(padding=(0, 2))
            block.add_column(no_wrap=True, style="bold")
            block.add_column()
            for column, cell in zip(self.columns, row, strict=True):
                if cell:
                    block.add_row(column.name, _wrapped(cell, available - names))
            yield block
            yield Text()


def _wrapped(cell: str, width: int) -> Text:
    """Wrap the lines of a cell that are too long at spaces outside intervals."""
    wrapped: list[str] = []
    for line in cell.split("\n"):
        if cell_len(line) <= width:
            wrapped.append(line)
            continue
        wrapped.append("")
        for word in _WORD.findall(line):
            if wrapped[-1] and cell_len(wrapped[-1]) + 1 + cell_len(word) > width:
                wrapped.append("")
            wrapped[-1] += f" {word}" if wrapped[-1] else word
    return Text("\n".join(wrapped))


def write_result_files(args: argparse.Namespace, data: object, tables: Iterable[FittedTable | ReportTable]) -> None:
    """Write the files that --json and --markdown name, replacing existing ones. Raises UserError for a failed write."""
    texts = {args.json: json.dumps(data, indent=1) + "\n"} if args.json is not None else {}
    if args.markdown is not None:
        texts[args.markdown] = "\n".join(f"{table.to_markdown().rstrip()}\n" for table in tables)
    for path, text in texts.items():
        try:
            path.write_text(text, "utf-8", errors="replace")
        except OSError as error:
            raise UserError(f"{path} cannot be written: {error.strerror}.", "Name another file.") from error
