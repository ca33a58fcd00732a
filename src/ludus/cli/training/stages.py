"""The training methods: each is a command, and a stage of a pipeline; starting a run, and resuming one."""

from __future__ import annotations

import argparse
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar

from ludus.algorithms.spec.resolve import algorithm_of
from ludus.cli.arguments import model_settings, recipe_config
from ludus.cli.commands.config import check_reward_parts
from ludus.cli.signals import handle_interrupts
from ludus.cli.ui.terminal import announce, bars, load_libraries, make_console, print_line, print_text
from ludus.config.environment import launched_rank
from ludus.config.pipeline import StageKind, describe_cuts, quick_cuts
from ludus.config.schema import Config
from ludus.config.toml import changes
from ludus.envs.base import World
from ludus.envs.registry import build_world
from ludus.errors import LudusError, UserError
from ludus.evaluation.evaluate import check_split
from ludus.rewards.registry import added_parts
from ludus.training.resume import check_kind, check_resume, describe_resume, is_complete, steps_done
from ludus.training.run import run_dir
from ludus.training.run.preflight import check_extras, check_new_run, check_plugins
from ludus.training.run.run_dir import RunFolder

log = logging.getLogger(__name__)

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
        warnings = run_dir.changed_files(folder.path, folder.load_config(overrides))
        check_kind(folder, self.kind)
        with run_dir.lock_run(folder):
            config = folder.load_config(overrides)
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
    folder.check()
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


class SftStage(TrainingStage):
    """Fine-tune on demonstrations: the world's own, or dialogues from a file (--sft.data FILE)."""

    kind = "sft"

    def check(self, config: Config, world: World) -> None:
        """Raise UserError for unusable dialogues."""
        from ludus.training.sft import check_sft

        check_sft(config, world)

    def prepare(self, config: Config, new: bool) -> TrainFunction:
        """Load or create the model. Raises UserError for unusable dialogues."""
        from ludus.cli.ui.progress import fine_tune, print_checkpoint
        from ludus.training.sft import SftTraining, make_session

        session = make_session(config)

        def train(folder: RunFolder) -> None:
            tuning = SftTraining(session, folder)
            run_dir.save_config(folder, config)
            print_checkpoint(folder, config, fine_tune(tuning, make_console()))

        return train

    def print_done(self, folder: RunFolder, config: Config) -> None:
        """Print that the fine-tuning is complete, and the next commands."""
        from ludus.cli.ui.progress import use_command

        console, steps, checkpoint = make_console(), config.sft.steps, run_dir.latest_checkpoint(folder)[1]
        print_line(console, f"The fine-tuning is complete: all {steps} steps are done.\nCheckpoint: {checkpoint}")
        print_line(console, f"  continue it:  {run_dir.resume_command(folder)} --sft.steps {2 * steps}")
        print_line(console, f"  use it:       {use_command(folder, config, checkpoint)}")


class RftStage(TrainingStage):
    """Rejection-sampling fine-tuning: sample, keep the successful rollouts, fine-tune on them, repeat."""

    kind = "rft"
    needs_model = "Rejection sampling needs a model that solves some tasks"

    def check(self, config: Config, world: World) -> None:
        """Raise UserError for unusable settings."""
        from ludus.training.rft import check_rft

        check_rft(config, world)

    def prepare(self, config: Config, new: bool) -> TrainFunction:
        """Check the configuration and load the model. Raises UserError and its subclasses."""
        from ludus.cli.ui.progress import ProgressReporter, print_results
        from ludus.training.rft import run_rft
        from ludus.training.rl.validate import check_rollouts
        from ludus.training.run.session import open_session

        session = open_session(config)
        self.check(config, session.world)
        check_rollouts(config, session.world)

        def train(folder: RunFolder) -> None:
            with bars(make_console()) as progress:
                reporter = ProgressReporter(progress, config.rft.rounds, steps_done(folder))
                comparisons = run_rft(session, folder, reporter)
            print_results(make_console(), folder, config, comparisons)

        return train


class PreferenceStage(TrainingStage):
    """Train on pairs of a better and a worse trajectory: DPO, SimPO, KTO, BCO and others (--preference.loss)."""

    kind = "preference"
    needs_model = "Preference training needs a model that can already act"

    def check(self, config: Config, world: World) -> None:
        """Raise UserError for a source of pairs that cannot be read, or a world that cannot be searched."""
        from ludus.rollouts.tree_search import check_searchable
        from ludus.training.preference.ranking import check_ranking

        if config.preference.search.simulations:
            check_searchable(world, "preference.search")
        _check_source(config.preference.data, config.preference.run, pairs=True)
        check_ranking(config.preference.models)

    def prepare(self, config: Config, new: bool) -> TrainFunction:
        """Load the model and, for a new run, gather the pairs. Raises UserError for unusable pairs."""
        from ludus.cli.ui.progress import EpisodeBar, print_checkpoint, train_steps
        from ludus.training.preference.train import PreferenceTraining, gather_pairs
        from ludus.training.run.session import open_session

        session, gathered = open_session(config), None
        if new:
            with bars(make_console()) as progress:
                gathered = gather_pairs(session, EpisodeBar(progress))

        def numbers(metrics: Mapping[str, float]) -> str:
            name = "decisions" if "forks/decisions" in metrics else "accuracy"
            share = metrics["forks/decisions" if name == "decisions" else "preference/accuracy"]
            return f"loss {metrics['loss/total']:.3f}  {name} {share:.0%}"

        def train(folder: RunFolder) -> None:
            training = PreferenceTraining(session, folder, gathered)
            print_line(make_console(), f"{len(training.pairs)} pairs, {training.num_steps} steps")
            run_dir.save_config(folder, config)
            print_checkpoint(folder, config, train_steps(training, make_console(), "preferences", numbers))

        return train

    def print_done(self, folder: RunFolder, config: Config) -> None:
        """Print that the training is complete, and the command that uses the checkpoint."""
        from ludus.cli.ui.progress import print_checkpoint

        print_line(make_console(), "The preference training is complete.")
        print_checkpoint(folder, config, run_dir.latest_checkpoint(folder)[1])


class RewardModelStage(TrainingStage):
    """Train a reward model on rollouts (--reward_model.kind): pairwise, pointwise or process."""

    kind = "reward-model"
    needs_model = "A reward model starts from a trained model"

    def check(self, config: Config, world: World) -> None:
        """Raise UserError for a source of examples that cannot be read."""
        settings = config.reward_model
        _check_source(settings.data, settings.run, pairs=settings.kind == "pairwise")

    def prepare(self, config: Config, new: bool) -> TrainFunction:
        """Load the model and, for a new run, gather the examples. Raises UserError for unusable examples."""
        from ludus.cli.ui.progress import train_steps
        from ludus.training.reward_model.data import gather_examples
        from ludus.training.reward_model.train import RewardTraining, num_training
        from ludus.training.run.session import open_session
        from ludus.training.value_models.reward_model import make_reward_model

        session = open_session(config)
        examples = gather_examples(session) if new else None
        if new:
            make_reward_model(session)
        latest: dict[str, float] = {}

        def numbers(metrics: Mapping[str, float]) -> str:
            latest.update(metrics)
            named = ((name, latest.get(f"held_out/{name}")) for name in ("accuracy", "auc"))
            held_out = (f"held-out {name} {value:.2f}" for name, value in named if value is not None)
            return "  ".join([f"loss {metrics['loss/total']:.3f}", *held_out])

        def train(folder: RunFolder) -> None:
            training = RewardTraining(session, folder, examples)
            num = num_training(training.examples)
            counts = f"{num} training examples, {len(training.examples) - num} held out, {training.num_steps} steps"
            print_line(make_console(), counts)
            run_dir.save_config(folder, config)
            _print_reward_model(train_steps(training, make_console(), "reward model", numbers))

        return train

    def print_done(self, folder: RunFolder, config: Config) -> None:
        """Print a completion message and the command that uses the reward model."""
        print_line(make_console(), "The reward model is complete.")
        _print_reward_model(run_dir.latest_checkpoint(folder)[1])


def _print_reward_model(checkpoint: Path) -> None:
    text = f"Reward model: {checkpoint}\nUse it: ludus train RECIPE --rewards.model {checkpoint}"
    print_line(make_console(), text)


def _check_source(data: str | None, run: str | None, pairs: bool) -> None:
    """Raise UserError for a file of pairs or rollouts, or a run, that cannot be read."""
    from ludus.training.datasets.files import read_pairs, read_rollout_file
    from ludus.training.preference.pairs import rollout_files

    if data is not None:
        read: Callable[[Path], object] = read_pairs if pairs else read_rollout_file
        read(Path(data))
    elif run is not None:
        rollout_files(Path(run))


class RlStage(TrainingStage):
    """Train an agent by reinforcement learning."""

    kind = "rl"

    def check(self, config: Config, world: World) -> None:
        """Raise UserError for settings or expert dialogues that cannot be used."""
        from ludus.training.datasets.files import read_dialogues
        from ludus.training.rl.validate import check_settings

        check_settings(config, world)
        if config.experts.path is not None:
            read_dialogues(Path(config.experts.path))

    def prepare(self, config: Config, new: bool) -> TrainFunction:
        """Check the configuration and load the model, unless the run has to create it."""
        from ludus.cli.commands.env import AuditBar
        from ludus.cli.ui.progress import print_results, train_policy
        from ludus.training.rl.validate import open_validated_session

        with bars(make_console(), transient=True) as progress:
            watch = AuditBar(progress)
            watch.phase("loading the model", None)
            session = open_validated_session(config, watch)

        def train(folder: RunFolder) -> None:
            console = make_console()
            print_results(console, folder, config, train_policy(config, folder, session, console))

        return train

    def run(self, args: argparse.Namespace, overrides: Sequence[str]) -> None:
        """Start or resume a run; under torchrun rank 0 does, and the other ranks train with it."""
        if args.cluster is not None:
            overrides = ["--cluster.kind", args.cluster, *overrides]
        if not launched_rank():
            super().run(args, overrides)
            return
        load_libraries()
        from ludus.engines.models.loading import resolve_device
        from ludus.training.rl.rank_worker import run_rank

        if args.resume is not None:
            folder = resumed_folder(args)
            config = folder.load_config(overrides)
            if is_complete(folder, config, self.kind):
                return
        else:
            config = recipe_config(args.recipe, self.shortcuts(args), overrides)
        run_rank(resolve_device(config.model.device), config.training.learner.rank_timeout_s)


SFT, RFT, PREFERENCE, REWARD_MODEL, RL = SftStage(), RftStage(), PreferenceStage(), RewardModelStage(), RlStage()
STAGES: Mapping[StageKind, TrainingStage] = {stage.kind: stage for stage in (SFT, RFT, PREFERENCE, REWARD_MODEL, RL)}
