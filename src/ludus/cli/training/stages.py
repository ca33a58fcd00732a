"""The training methods: each is a command, and a stage of a pipeline."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from ludus.cli.arguments import recipe_config, run_config
from ludus.cli.training.training_command import TrainFunction, TrainingStage, resumed_folder
from ludus.cli.ui.terminal import bars, load_libraries, make_console, print_line
from ludus.config.environment import launched_rank
from ludus.config.pipeline import StageKind
from ludus.config.schema import Config
from ludus.envs.base import World
from ludus.training.resume import is_complete, steps_done
from ludus.training.run.run_dir import RunFolder, list_checkpoints, resume_command, save_config


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
            save_config(folder, config)
            print_checkpoint(folder, config, fine_tune(tuning, make_console()))

        return train

    def print_done(self, folder: RunFolder, config: Config) -> None:
        """Print that the fine-tuning is complete, and the next commands."""
        from ludus.cli.ui.progress import use_command

        console, steps, checkpoint = make_console(), config.sft.steps, list_checkpoints(folder.checkpoints)[-1][1]
        print_line(console, f"The fine-tuning is complete: all {steps} steps are done.\nCheckpoint: {checkpoint}")
        print_line(console, f"  continue it:  {resume_command(folder)} --sft.steps {2 * steps}")
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
        """Raise UserError for a source of pairs that cannot be read."""
        _check_source(config.preference.data, config.preference.run, pairs=True)

    def prepare(self, config: Config, new: bool) -> TrainFunction:
        """Load the model and, for a new run, gather the pairs. Raises UserError for unusable pairs."""
        from ludus.cli.ui.progress import EpisodeBar, print_checkpoint, train_steps
        from ludus.training.preference.sources import gather_pairs
        from ludus.training.preference.train import PreferenceTraining
        from ludus.training.run.session import open_session

        session, gathered = open_session(config), None
        if new:
            with bars(make_console()) as progress:
                gathered = gather_pairs(session, EpisodeBar(progress))

        def train(folder: RunFolder) -> None:
            training = PreferenceTraining(session, folder, gathered)
            print_line(make_console(), f"{len(training.pairs)} pairs, {training.num_steps} steps")
            save_config(folder, config)
            print_checkpoint(folder, config, train_steps(training, make_console(), "preferences", _pair_numbers))

        return train

    def print_done(self, folder: RunFolder, config: Config) -> None:
        """Print that the training is complete, and the command that uses the checkpoint."""
        from ludus.cli.ui.progress import print_checkpoint

        print_line(make_console(), "The preference training is complete.")
        print_checkpoint(folder, config, list_checkpoints(folder.checkpoints)[-1][1])


def _pair_numbers(metrics: Mapping[str, float]) -> str:
    return f"loss {metrics['loss/total']:.3f}  accuracy {metrics['preference/accuracy']:.0%}"


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
            save_config(folder, config)
            _print_reward_model(train_steps(training, make_console(), "reward model", numbers))

        return train

    def print_done(self, folder: RunFolder, config: Config) -> None:
        """Print a completion message and the command that uses the reward model."""
        print_line(make_console(), "The reward model is complete.")
        _print_reward_model(list_checkpoints(folder.checkpoints)[-1][1])


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
            config = run_config(folder, overrides)
            if is_complete(folder, config, self.kind):
                return
        else:
            config = recipe_config(args.recipe, self.shortcuts(args), overrides)
        run_rank(resolve_device(config.model.device), config.training.learner.rank_timeout_s)


SFT, RFT, PREFERENCE, REWARD_MODEL, RL = SftStage(), RftStage(), PreferenceStage(), RewardModelStage(), RlStage()
STAGES: Mapping[StageKind, TrainingStage] = {stage.kind: stage for stage in (SFT, RFT, PREFERENCE, REWARD_MODEL, RL)}
