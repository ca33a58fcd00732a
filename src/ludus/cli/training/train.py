"""Train an agent by reinforcement learning.

RECIPE is the name of a recipe (see `ludus recipes`) or the path of a .toml file. Any setting can be
changed on the command line: --algorithm.group_size 16. The run goes into a new folder under runs/, or into
--run.dir; it holds configuration, metrics, rollouts, evaluations and checkpoints.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ludus.algorithms.spec.resolve import algorithm_of
from ludus.cli.arguments import recipe_config, run_config
from ludus.cli.commands.config import check_rewards
from ludus.cli.training.training_command import TrainingStage, resumed_folder
from ludus.cli.ui.terminal import CheckBar, bars, make_console, silence_libraries
from ludus.config.environment import launched_rank
from ludus.config.schema import Config

if TYPE_CHECKING:
    from ludus.training.run.run_dir import RunFolder


def ready(config: Config, new: bool) -> Callable[[RunFolder], None]:
    """Check a configuration and load its model, unless that is yet to be made."""
    check_rewards(config, algorithm_of(config))  # before torch is imported, which takes seconds
    from ludus.cli.ui import progress
    from ludus.training.rl.validate import open_validated_session

    del new
    with bars(make_console(), passing=True) as console:
        session = open_validated_session(config, CheckBar(console))
    return lambda folder: progress.train(config, folder, session)


def say_complete(folder: RunFolder, config: Config) -> None:
    """That nothing is left to train or to evaluate, and what to type next."""
    from ludus.cli.ui.progress import print_commands
    from ludus.cli.ui.terminal import say

    console = make_console()
    say(console, f"The run is complete: all its {config.training.steps} steps are done and evaluated.")
    print_commands(console, folder, config)


STAGE = TrainingStage(
    kind="rl",
    ready=ready,
    say_complete=say_complete,
    model_help="train this model instead of the cold start",
    scratch_help="make tokenizer, model and cold start first",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's own arguments; settings follow as --section.key value."""
    STAGE.add_arguments(parser)
    parser.add_argument(
        "--cluster",
        choices=("none", "local", "ray"),
        help="have other processes sample: of this machine, or of a Ray cluster (cluster.kind)",
    )


def run(args: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Start or resume a run; under torchrun the first process does, and the others learn with it."""
    if args.cluster is not None:
        overrides = ["--cluster.kind", args.cluster, *overrides]
    if not launched_rank():
        return STAGE.run(args, overrides)
    from ludus.engines.models.loading import resolve_device
    from ludus.training.rl.rank_worker import follow_launched

    silence_libraries()
    if args.resume is not None:
        from ludus.training.resume import is_complete

        folder = resumed_folder(args)
        config = run_config(folder, overrides)
        if is_complete(folder, config, STAGE.kind):
            return 0
    else:
        config = recipe_config(args.recipe, STAGE.shortcuts(args), overrides)
    follow_launched(resolve_device(config.model.device), config.training.learner.rank_timeout_s)
    return 0
