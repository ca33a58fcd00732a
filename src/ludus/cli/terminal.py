"""The terminal: consoles and progress bars that also read well in a pipe or a file."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text

PIPE_COLUMNS = 120
"""Width of tables where the output is no terminal."""
_NARROW = 110


def make_console() -> Console:
    """Standard output. Text is printed as it is: square brackets mean nothing, numbers are not coloured."""
    width = None if sys.stdout.isatty() else PIPE_COLUMNS
    return Console(markup=False, highlight=False, width=width)


def say(console: Console, text: str, style: str = "") -> None:
    """Print lines that are never folded, so that paths and commands can be copied."""
    console.print(Text(text, style=style), soft_wrap=True)


@contextmanager
def bars(console: Console, *, passing: bool = False) -> Iterator[Progress]:
    """The layout of the progress bars; a task takes the field `numbers`. `passing` ones leave no trace."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=24 if console.width >= _NARROW else 8),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[numbers]}"),
    )
    with Progress(*columns, console=console, refresh_per_second=4, transient=passing) as progress:
        yield progress


class CheckBar:
    """A bar of what a check does at the moment (`ludus.evaluation.check.Watch`)."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._phase: TaskID | None = None

    def phase(self, name: str, total: int) -> None:
        """Start the bar anew."""
        if self._phase is not None:
            self._progress.remove_task(self._phase)
        self._phase = self._progress.add_task(name, total=total, numbers="")

    def done(self, what: str = "") -> None:
        """One further."""
        if self._phase is not None:
            self._progress.update(self._phase, advance=1, numbers=what)


def silence_libraries() -> None:
    """Keep the progress bars of transformers out of ours, and a warning that peft causes within it."""
    import warnings

    from ludus.engines.loading import hide_progress

    warnings.filterwarnings("ignore", ".*is_gradient_checkpointing", FutureWarning)
    hide_progress()
