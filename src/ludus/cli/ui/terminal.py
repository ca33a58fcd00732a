"""Consoles, progress bars with a plain format for pipes and files, and messages of libraries."""

from __future__ import annotations

import io
import logging
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.measure import Measurement
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskID
from rich.table import Column
from rich.text import Text

from ludus.cli.signals import exit_on_interrupt
from ludus.cli.ui.help_text import fill_indented

PIPE_COLUMNS = 120
"""Width in characters of tables if the output is not a terminal."""
PLAIN_EVERY_S = 10.0
"""Interval of the progress lines, in seconds, if the output is not a terminal."""
_WIDE_COLUMNS = 110
_BAR_COLUMNS = 8
_UNKNOWN_ETA = "ETA -:--"
_SPEED_PERIOD_S = 600.0
"""Period over which the ETA averages the speed; a step may take minutes."""


class _PipeConsole(Console):
    """Console that leaves a closed pipe to `ludus.cli.main`, as print does."""

    def on_broken_pipe(self) -> None:
        """Raise BrokenPipeError."""
        raise BrokenPipeError


def make_console(quiet: bool = False) -> Console:
    """Return a console on standard output, without markup and highlighting; a `quiet` one prints nothing."""
    width = None if sys.stdout.isatty() else PIPE_COLUMNS
    return _PipeConsole(markup=False, highlight=False, width=width, quiet=quiet)


def print_line(console: Console, text: str, style: str = "") -> None:
    """Print text without wrapping, so that paths and commands can be copied."""
    console.print(Text(text, style=style), soft_wrap=True)


def print_text(console: Console, text: str, style: str = "") -> None:
    """Print prose, wrapped with its indentation on a terminal; paths and commands in it should not be copied."""
    if console.is_terminal:
        text = "\n".join(fill_indented(line, console.width) for line in text.split("\n"))
    console.print(Text(text, style=style), soft_wrap=not console.is_terminal)


def _format_seconds(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def format_eta(task: Task) -> str:
    """Return the ETA of a task, its duration if it is finished, or the elapsed time if it has no total."""
    if task.total is None:
        return f"{_format_seconds(task.elapsed or 0.0)} elapsed"
    if task.finished:
        return f"took {_format_seconds(task.finished_time or 0.0)}"
    left_s, done = task.time_remaining, task.completed - task.fields.get("resumed_at", 0)
    if left_s is None and done > 0:  # rich needs two updates
        left_s = (task.elapsed or 0.0) / done * (task.remaining or 0.0)
    return _UNKNOWN_ETA if left_s is None else f"ETA {_format_seconds(left_s)}"


def _format_count(task: Task) -> str:
    return "" if task.total is None else f"{task.completed:.0f}/{task.total:.0f}"


class _DrawnColumn(ProgressColumn):
    """A column of progress bars that a function of the task draws."""

    def __init__(self, draw: Callable[[Task], RenderableType], table_column: Column | None = None) -> None:
        self._draw = draw
        super().__init__(table_column)

    def render(self, task: Task) -> RenderableType:
        return self._draw(task)


@dataclass(frozen=True, slots=True)
class WholeParts:
    """Text whose parts, separated by two spaces, are left out from the end until it fits; no part is cut."""

    text: str

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        kept, *rest = self.text.split("  ")
        for part in rest:
            if len(kept) + 2 + len(part) > options.max_width:
                break
            kept += f"  {part}"
        yield Text(kept if len(kept) <= options.max_width else "", no_wrap=True)


@dataclass(frozen=True, slots=True)
class WholeWords:
    """Text whose last words are left out until it fits; no word is cut, and words with digits stay."""

    text: str

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        words = self.text.split()
        plain = [index for index in range(1, len(words)) if not any(map(str.isdigit, words[index]))]
        while plain and len(" ".join(words)) > options.max_width:
            del words[plain.pop()]
        yield Text(" ".join(words).rstrip(",:"), no_wrap=True, overflow="crop")

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(1, len(self.text))


@contextmanager
def bars(console: Console, *, transient: bool = False, every_s: float = PLAIN_EVERY_S) -> Iterator[Progress]:
    """Show progress bars, whose tasks need a field `numbers`; `transient` bars are erased at the end.

    The count of a resumed task starts at its field `resumed_at`. Bar, count and ETA are always whole; the name loses
    its last words on a narrow terminal, and the numbers take the rest of the line. In a pipe or a file, print a plain
    line every `every_s` and, unless transient, at the end.
    """
    if not console.is_terminal:
        with _plain_lines(console, every_s, last=not transient) as progress:
            yield progress
        return
    whole = Column(no_wrap=True)
    columns = (
        _DrawnColumn(lambda task: WholeWords(task.description)),
        BarColumn(24 if console.width >= _WIDE_COLUMNS else _BAR_COLUMNS, table_column=whole.copy()),
        _DrawnColumn(lambda task: Text(_format_count(task), style="progress.download"), whole.copy()),
        _DrawnColumn(lambda task: Text(format_eta(task), style="progress.remaining"), whole.copy()),
        _DrawnColumn(lambda task: WholeParts(task.fields["numbers"]), Column(no_wrap=True, ratio=1)),
    )
    shown = Progress(
        *columns,
        console=console,
        refresh_per_second=4,
        transient=transient,
        expand=True,
        speed_estimate_period=_SPEED_PERIOD_S,
    )
    with shown as progress:
        yield progress


@contextmanager
def _plain_lines(console: Console, every_s: float, last: bool) -> Iterator[Progress]:
    """Print the progress of the tasks periodically if it changed, and with `last` at the end."""
    progress, ended = Progress(console=console, disable=True), threading.Event()
    printed: list[str] = []

    def show() -> None:
        nonlocal printed
        state = [f"{task.description} {task.completed} {task.fields['numbers']}" for task in progress.tasks]
        if state and state != printed:  # the ETA of a slow task changes all the time
            printed = state
            print_line(console, _plain_line(progress.tasks))

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


def _plain_line(tasks: Sequence[Task]) -> str:
    """Return name, count and ETA of each task, with the parts of its numbers that fit below `PIPE_COLUMNS`."""
    lines = []
    for task in tasks:
        eta = "" if task.total is None or task.finished else format_eta(task).removesuffix(_UNKNOWN_ETA)
        named = " ".join(filter(None, (task.description, _format_count(task))))
        lines.append("  ".join(filter(None, (named, eta))))
    for index, task in enumerate(tasks):
        for part in filter(None, task.fields["numbers"].split("  ")):
            if len("  |  ".join(lines)) + 2 + len(part) >= PIPE_COLUMNS:
                break
            lines[index] += f"  {part}"
    return "  |  ".join(lines)


def announce(text: str) -> None:
    """Print the name of a step that takes seconds on standard error."""
    print(text, file=sys.stderr, flush=True)


def load_libraries() -> None:
    """Import torch and transformers and silence them, with an announcement unless already imported.

    An interrupt during the import ends the process, since an exception would leave modules half imported.
    """
    if "torch" not in sys.modules:
        announce("Loading torch and the model ...")
    with exit_on_interrupt():
        silence_libraries()


def silence_libraries() -> None:
    """Disable the progress bars of transformers, and a warning that peft triggers in it.

    Log messages of libraries, which would cut through progress bars, are printed above them.
    """
    import warnings

    from ludus.engines.models.loading import hide_progress

    warnings.filterwarnings("ignore", ".*is_gradient_checkpointing", FutureWarning)
    hide_progress()
    for logger in [logging.root, *logging.root.manager.loggerDict.values()]:
        for handler in logger.handlers if isinstance(logger, logging.Logger) else ():
            # a handler without such an attribute finds the current stream itself
            own = vars(handler).get("stream") if isinstance(handler, logging.StreamHandler) else None
            if own in (sys.stderr, sys.__stderr__) and isinstance(handler, logging.StreamHandler):
                handler.setStream(_CurrentStderr())


class _CurrentStderr(io.TextIOBase):
    """The current `sys.stderr`, which rich replaces while it shows bars."""

    def write(self, text: str) -> int:
        return sys.stderr.write(text)

    def flush(self) -> None:
        sys.stderr.flush()
