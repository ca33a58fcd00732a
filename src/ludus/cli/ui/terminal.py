"""Consoles and progress bars, with a plain format for pipes and files."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, Task, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Column, Table
from rich.text import Text

PIPE_COLUMNS = 120
"""Width in characters of tables if the output is not a terminal."""
PLAIN_EVERY_S = 10.0
"""Interval of the progress lines, in seconds, if the output is not a terminal."""
_WIDE_COLUMNS = 110


def make_console(quiet: bool = False) -> Console:
    """Return a console on standard output, without markup and highlighting; a `quiet` one prints nothing."""
    width = None if sys.stdout.isatty() else PIPE_COLUMNS
    return Console(markup=False, highlight=False, width=width, quiet=quiet)


def print_line(console: Console, text: str, style: str = "") -> None:
    """Print text without wrapping, so that paths and commands can be copied."""
    console.print(Text(text, style=style), soft_wrap=True)


def make_table(columns: Sequence[str | Column], rows: Iterable[Sequence[object]], title: str | None = None) -> Table:
    """Return a table; None is an empty cell, and other cells are converted by `str`."""
    table = Table(*columns, title=title)
    for row in rows:
        table.add_row(*("" if cell is None else str(cell) for cell in row))
    return table


@contextmanager
def bars(console: Console, *, transient: bool = False, every_s: float = PLAIN_EVERY_S) -> Iterator[Progress]:
    """Show progress bars, whose tasks need a field `numbers`; `transient` bars are erased at the end.

    In a pipe or a file, print a plain line every `every_s` and, unless transient, at the end.
    """
    if not console.is_terminal:
        with _plain_lines(console, every_s, last=not transient) as progress:
            yield progress
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=24 if console.width >= _WIDE_COLUMNS else 8),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[numbers]}"),
    )
    with Progress(*columns, console=console, refresh_per_second=4, transient=transient) as progress:
        yield progress


@contextmanager
def _plain_lines(console: Console, every_s: float, last: bool) -> Iterator[Progress]:
    """Print the progress of the tasks periodically if it changed, and with `last` at the end."""
    progress, ended, printed = Progress(console=console, disable=True), threading.Event(), ""

    def show() -> None:
        nonlocal printed
        line = "  |  ".join(_task_line(task) for task in progress.tasks)
        if line and line != printed:
            printed = line
            print_line(console, line)

    def loop() -> None:
        while not ended.wait(every_s):
            show()

    thread = threading.Thread(target=loop, name="progress", daemon=True)
    thread.start()
    try:
        yield progress
    finally:
        ended.set()
        thread.join()
        if last:
            show()


class PhaseBar:
    """A progress bar for the current phase."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._phase: TaskID | None = None

    def phase(self, name: str, total: int | None) -> None:
        """Start the bar of a phase; without a total its progress is indeterminate."""
        if self._phase is not None:
            self._progress.remove_task(self._phase)
        self._phase = self._progress.add_task(name, total=total, numbers="")

    def done(self, what: str = "") -> None:
        """Advance by one."""
        if self._phase is not None:
            self._progress.update(self._phase, advance=1, numbers=what)


def _task_line(task: Task) -> str:
    count = "" if task.total is None else f" {task.completed:.0f}/{task.total:.0f}"
    return f"{task.description}{count}  {task.fields['numbers']}".rstrip()


def silence_libraries() -> None:
    """Disable the progress bars of transformers, and a warning that peft triggers in it."""
    import warnings

    from ludus.engines.models.loading import hide_progress

    warnings.filterwarnings("ignore", ".*is_gradient_checkpointing", FutureWarning)
    hide_progress()
