"""What the training commands share: arguments, starting a run, and resuming one."""

from __future__ import annotations

import argparse
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar

from ludus.algorithms.spec.resolve import algorithm_of
from ludus.cli.arguments import check_run, model_settings, recipe_config, run_config
from ludus.cli.commands.config import check_plugins, check_reward_parts
from ludus.cli.signals import handle_interrupts
from ludus.cli.ui.terminal import announce, load_libraries, make_console, print_line, print_text
from ludus.config.changes import changes
from ludus.config.pipeline import StageKind
from ludus.config.quick import describe_cuts, quick_cuts
from ludus.config.schema import Config
from ludus.envs.base import World
from ludus.envs.registry import build_world
from ludus.errors import LudusError, UserError
from ludus.evaluation.evaluate import check_split
from ludus.rewards.registry import added_parts
from ludus.training.resume import check_kind, check_resume, describe_resume, is_complete
from ludus.training.run import run_dir
from ludus.training.run.preflight import check_extras, check_new_run
from ludus.training.run.run_dir import RunFolder

log = logging.getLogger("ludus")

TrainFunction = Callable[[RunFolder], None]
"""Trains in a run folder, and prints the results."""


class TrainingStage(ABC):
    """A training method, as a command and as a stage of a pipeline."""

    kind: ClassVar[StageKind]
    needs_model: ClassVar[str] = ""
    """Why model.from_scratch is an error; empty if it is not."""

    @abstractmethod
    def check(self, config: Config, world: World) -> None:
        """Raise UserError for settings or files that cannot be used, before earlier stages of a pipeline run."""

    @abstractmethod
    def prepare(self, config: Config, new: bool) -> TrainFunction:
        """Check the configuration and load models and data, before anything is written; `new`: it is not resumed."""

    def print_done(self, folder: RunFolder, config: Config) -> None:
        """Print that all steps or rounds of a run are complete, and the next commands."""
        from ludus.cli.ui.progress import print_commands

        count = f"{config.rft.rounds} rounds" if self.kind == "rft" else f"{config.training.steps} steps"
        print_line(make_console(), f"The run is complete: all {count} are done and evaluated.")
        print_commands(make_console(), folder, config)

    def run(self, args: argparse.Namespace, overrides: Sequence[str]) -> None:
        """Start or resume a run."""
        if args.resume is not None:
            self.resume(resumed_folder(args), overrides)
            return
        config = recipe_config(args.recipe, self.shortcuts(args), overrides)
        if args.quick:
            cuts = quick_cuts(self.kind, config, overrides)
            print_text(make_console(), describe_cuts(cuts))
            words = [word for cut in cuts for word in cut.words]
            config = recipe_config(args.recipe, [*self.shortcuts(args), *words], overrides)
        stem = Path(args.recipe).stem
        self.start(config, stem if self.kind == "rl" else f"{stem}-{self.kind}", args.recipe)

    def shortcuts(self, args: argparse.Namespace) -> list[str]:
        """Return the options of the command as settings."""
        words = model_settings(args.model, args.recipe)
        if "from_scratch" in args and args.from_scratch:
            words += ["--model.from_scratch", "true", *([] if args.model else ["--model.path", "none"])]
        return words + ([f"--{self.kind.replace('-', '_')}.run", args.run] if "run" in args and args.run else [])

    def start(self, config: Config, name: str, recipe: str | None) -> None:
        """Prepare the training and run it in a new folder."""
        if self.needs_model and config.model.from_scratch:
            hint = "Run `ludus sft` first, and pass its checkpoint with --model."
            raise UserError(f"{self.needs_model}, and model.from_scratch creates a new one.", hint)
        check_new_run(config, self.kind)
        _check_world(config, self.kind)
        load_libraries()
        from ludus.training.learner.learner import explain_out_of_memory

        train = self.prepare(config, True)
        folder = run_dir.new_run(config, name, self.kind, recipe)
        with run_dir.lock_run(folder), resume_hint(folder, new=True), explain_out_of_memory():
            print_line(make_console(), f"Run folder: {folder.path}")
            train(folder)

    def resume(self, folder: RunFolder, overrides: Sequence[str]) -> None:
        """Resume a run, unless it is complete."""
        warnings = run_dir.changed_files(folder.path, run_config(folder, overrides))
        check_kind(folder, self.kind)
        with run_dir.lock_run(folder):
            config = run_config(folder, overrides)
            check_extras(config)
            check_resume(folder, config, self.kind)
            _check_world(config, self.kind)
            load_libraries()
            from ludus.training.learner.learner import explain_out_of_memory

            if is_complete(folder, config, self.kind):
                self.print_done(folder, config)
                return
            train = self.prepare(config, False)
            if changed := ", ".join(map(str, changes(folder.load_config(), config))):
                warnings = [f"Changed from here on: {changed}", *warnings]
                log.info("changed from here on: %s", changed)
            print_line(make_console(), describe_resume(folder, config, self.kind))
            for text in warnings:
                print_line(make_console(), f"! {text}", "yellow")
            print_line(make_console(), f"Run folder: {folder.path}")
            with resume_hint(folder), explain_out_of_memory():
                train(folder)


def _check_world(config: Config, kind: StageKind) -> None:
    """Raise UserError for plug-ins, an algorithm, a world, its rewards or its splits that cannot be used."""
    check_plugins(config)
    added_parts(config.rewards)
    algorithm = algorithm_of(config) if kind == "rl" else None
    announce(f"Building the world {config.env.name} and its tasks ...")
    world = build_world(config.env, config.rollout, config.sandbox)
    if algorithm is not None:
        check_reward_parts(config, algorithm, world)
    if kind in ("rl", "rft"):
        for split in config.evaluation.splits:
            check_split(world, split)
        check_split(world, config.evaluation.split_during, "evaluation.split_during")


def resumed_folder(args: argparse.Namespace) -> RunFolder:
    """Return the folder of --resume. Raises UserError if it is not a run, or if other options are set."""
    options = vars(args)
    source = options.get("run")
    if source is not None or any(options.get(name) for name in ("recipe", "model", "from_scratch", "quick")):
        what = "recipe, model and --quick" if source is None else "--run"
        raise UserError("--resume reads all settings from the run folder.", f"Remove {what}.")
    folder = RunFolder(args.resume)
    check_run(folder)
    return folder


@contextmanager
def resume_hint(what: RunFolder | str, new: bool = False) -> Iterator[None]:
    """Add the resume command to an error or interrupt that ends the run in the block.

    `what` is the run folder, or the command that resumes a pipeline. The folder of a `new` run that fails before it
    begins is removed. A second interrupt ends the process immediately (`handle_interrupts`).
    """
    folder = None if isinstance(what, str) else what
    command = what if isinstance(what, str) else run_dir.resume_command(what)
    hint = f"Resume the {'run' if folder else 'pipeline'} with: {command}"
    try:
        with handle_interrupts(hint):
            yield
    except LudusError as error:
        if folder is not None and new and run_dir.remove_unstarted(folder):
            error.hint = f"{error.hint}\nThe run had not started: its folder {folder.path} was removed."
        elif command not in error.hint:
            error.hint = f"{error.hint}\n{hint}"
        raise
    except KeyboardInterrupt as interrupt:
        interrupt.args = (f"{'' if folder is None else describe_interrupt(folder)}{hint}",)
        raise
    except BaseException as error:
        error.add_note(hint)
        raise


def describe_interrupt(folder: RunFolder) -> str:
    """Describe where a resume of an interrupted run starts: after the newest checkpoint."""
    text = describe_resume(folder, folder.load_config(), run_dir.kind_of(folder))
    return f"The run {text[0].lower()}{text[1:]} "
