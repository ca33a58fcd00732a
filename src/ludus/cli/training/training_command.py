"""What the commands that train have in common: their arguments, a new run, and going on with one.

Such a command is a module with a `TrainingStage`, whose `add_arguments` and `run` are the module's own; a
pipeline takes its `start` and `resume`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from ludus.cli.arguments import check_run, model_settings, recipe_config, recipe_stem, run_config
from ludus.cli.signals import WatchedInterrupts
from ludus.cli.ui.terminal import make_console, say, silence_libraries
from ludus.config.pipeline import StageKind
from ludus.config.schema import Config
from ludus.errors import LudusError, UserError

if TYPE_CHECKING:
    from ludus.training.run.run_dir import RunFolder


@dataclass(frozen=True, slots=True)
class TrainingStage:
    """A way of training, as a command and as a stage of a pipeline.

    `ready` checks a configuration and loads what it needs, before anything is written, and gives what trains
    in a folder; its second argument says whether the run is new. `say_complete` is for a run with nothing
    left to do. The texts are the help of the options: without `scratch_help` there is no --from-scratch, and
    --model says that the model is not made; without `run_help` there is no --run, which sets `run_setting`.
    """

    kind: StageKind
    ready: Callable[[Config, bool], Callable[[RunFolder], None]]
    say_complete: Callable[[RunFolder, Config], None]
    model_help: str
    scratch_help: str = ""
    run_help: str = ""
    run_setting: str = ""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """The command's own arguments; settings follow as --section.key value."""
        parser.set_defaults(from_scratch=False, run=None)
        parser.add_argument("recipe", nargs="?", help="a recipe's name, or a .toml file")
        if self.run_help:
            parser.add_argument("--run", metavar="RUN", help=self.run_help)
        parser.add_argument("--model", metavar="PATH_OR_NAME", help=self.model_help)
        if self.scratch_help:
            parser.add_argument("--from-scratch", action="store_true", help=self.scratch_help)
        parser.add_argument("--resume", metavar="RUN", type=Path, help="go on with the run in this folder")

    def run(self, args: argparse.Namespace, overrides: Sequence[str]) -> int:
        """Start or resume a run."""
        if args.resume is not None:
            return self.resume(resumed_folder(args), overrides)
        config = recipe_config(args.recipe, self.shortcuts(args), overrides)
        stem = recipe_stem(args.recipe)
        self.start(config, stem if self.kind == "rl" else f"{stem}-{self.kind}", args.recipe)
        return 0

    def shortcuts(self, args: argparse.Namespace) -> list[str]:
        """What the command's own options mean, as settings."""
        words = model_settings(args.model, args.recipe)
        words += ["--model.from_scratch", "true"] if args.from_scratch else []
        return words + ([f"--{self.run_setting}", args.run] if args.run else [])

    def start(self, config: Config, name: str, recipe: str | None) -> None:
        """Train in a new folder, once everything that can be checked before it is."""
        from ludus.training.learner.learner import explain_out_of_memory
        from ludus.training.run.run_dir import locked, new_run

        silence_libraries()
        train = self.ready(config, True)
        folder = new_run(config, name, self.kind, recipe)
        with locked(folder), HowToResume(folder, new=True), explain_out_of_memory():
            train(folder)

    def resume(self, folder: RunFolder, overrides: Sequence[str]) -> int:
        """Go on with a run, unless it is complete."""
        from ludus.training.learner.learner import explain_out_of_memory
        from ludus.training.resume import check_kind, check_resume, is_complete, place_of
        from ludus.training.run.run_dir import locked

        silence_libraries()
        check_kind(folder, self.kind)
        with locked(folder):
            config = run_config(folder, overrides)
            check_resume(folder, config, self.kind)
            if is_complete(folder, config, self.kind):
                self.say_complete(folder, config)
                return 0
            train = self.ready(config, False)
            say(make_console(), place_of(folder, config, self.kind))
            with HowToResume(folder), explain_out_of_memory():
                train(folder)
        return 0


def resumed_folder(args: argparse.Namespace) -> RunFolder:
    """The folder of --resume. Raises UserError where it is no run, or more than settings are given."""
    from ludus.training.run.run_dir import RunFolder

    if args.run is not None:
        raise UserError("--resume takes everything from the run folder.", "Leave --run out.")
    if args.recipe or args.model or args.from_scratch:
        raise UserError("--resume takes everything from the run folder.", "Leave recipe and model out.")
    folder = RunFolder(args.resume)
    check_run(folder)
    return folder


class HowToResume:
    """Whatever ends the run inside says how it goes on: an error in its hint, an interrupt in its text.

    `what` is the folder of the run, or the command that goes on with a pipeline. A `new` run that is refused
    before it begins leaves no folder. A second interrupt ends the process at once (`interrupts`).
    """

    def __init__(self, what: RunFolder | str, new: bool = False) -> None:
        from ludus.training.run.run_dir import resume_command

        self._folder = None if isinstance(what, str) else what
        self._new = self._folder if new else None
        if isinstance(what, str):
            self._command, self._hint = what, f"The pipeline goes on with: {what}"
        else:
            self._command = resume_command(what)
            self._hint = f"The run goes on with: {self._command}"
        self._interrupts = WatchedInterrupts(self._hint)

    def __enter__(self) -> None:
        self._interrupts.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        from ludus.training.run.run_dir import remove_unstarted

        self._interrupts.__exit__(kind, error, trace)
        if isinstance(error, LudusError):
            if self._new is not None and remove_unstarted(self._new):
                error.hint = f"{error.hint}\nNothing had begun: the run folder {self._new.path} is removed."
            elif self._command not in error.hint:
                error.hint = f"{error.hint}\n{self._hint}"
        elif isinstance(error, KeyboardInterrupt):
            error.args = (f"{self._from_where()}{self._hint}",)
        elif error is not None:
            error.add_note(self._hint)

    def _from_where(self) -> str:
        """A sentence about what an interrupted run goes on from."""
        from ludus.training.run.checkpoint import list_checkpoints

        if self._folder is None:
            return ""
        if kept := list_checkpoints(self._folder.checkpoints):
            return f"The newest checkpoint is that of step {kept[-1][0]}. "
        return "There is no checkpoint yet. "
