"""The terminal: consoles and progress bars that also read well in a pipe or a file."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, Task, TaskID, TextColumn, TimeRemainingColumn
from rich.text import Text

PIPE_COLUMNS = 120
"""Width of tables where the output is no terminal."""
PLAIN_EVERY_S = 10.0
"""Seconds between two lines of progress where the output is no terminal."""
_NARROW = 110


def make_console() -> Console:
    """Standard output. Text is printed as it is: square brackets mean nothing, numbers are not coloured."""
    width = None if sys.stdout.isatty() else PIPE_COLUMNS
    return Console(markup=False, highlight=False, width=width)


def say(console: Console, text: str, style: str = "") -> None:
    """Print lines that are never folded, so that paths and commands can be copied."""
    console.print(Text(text, style=style), soft_wrap=True)


@contextmanager
def bars(console: Console, *, passing: bool = False, every_s: float = PLAIN_EVERY_S) -> Iterator[Progress]:
    """Progress bars; a task takes the field `numbers`. `passing` ones leave no trace.

    In a pipe or a file there is a plain line every `every_s`, and a last one at the end unless they pass.
    """
    if not console.is_terminal:
        with _plain_lines(console, every_s, last=not passing) as progress:
            yield progress
        return
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
    """A bar of what a check does at the moment (`ludus.evaluation.env_audit.AuditProgress`)."""

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


@contextmanager
def _plain_lines(console: Console, every_s: float, last: bool) -> Iterator[Progress]:
    """Say where the tasks are now and then, if that has changed, and with `last` also at the end."""
    progress, ended, said = Progress(console=console, disable=True), threading.Event(), ""

    def tell() -> None:
        nonlocal said
        line = "  |  ".join(_task_words(task) for task in progress.tasks)
        if line and line != said:
            said = line
            say(console, line)

    def tell_on() -> None:
        while not ended.wait(every_s):
            tell()

    teller = threading.Thread(target=tell_on, name="progress", daemon=True)
    teller.start()
    try:
        yield progress
    finally:
        ended.set()
        teller.join()
        if last:
            tell()


def _task_words(task: Task) -> str:
    count = "" if task.total is None else f" {task.completed:.0f}/{task.total:.0f}"
    return f"{task.description}{count}  {task.fields['numbers']}".rstrip()


def silence_libraries() -> None:
    """Keep the progress bars of transformers out of ours, and a warning that peft causes within it."""
    import warnings

    from ludus.engines.models.loading import hide_progress

    warnings.filterwarnings("ignore", ".*is_gradient_checkpointing", FutureWarning)
    hide_progress()
