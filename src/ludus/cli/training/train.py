"""Train an agent by reinforcement learning.

RECIPE is a recipe name (see `ludus recipes`) or the path of a .toml file. Any setting can be overridden on the command
line: --algorithm.group_size 16. The run is written to a new folder under runs/, or to --run.dir, with its
configuration, metrics, rollouts, evaluations and checkpoints.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

from ludus.cli.arguments import recipe_config, run_config
from ludus.cli.training.training_command import TrainingStage, print_run_done, resumed_folder
from ludus.cli.ui.terminal import bars, load_libraries, make_console
from ludus.config.environment import launched_rank
from ludus.config.schema import Config
from ludus.training.run.run_dir import RunFolder


def prepare(config: Config, new: bool) -> Callable[[RunFolder], None]:
    """Check the configuration and load the model, unless the run has to create it."""
    from ludus.cli.commands.env import AuditBar
    from ludus.cli.ui import progress
    from ludus.training.rl.validate import open_validated_session

    with bars(make_console(), transient=True) as console:
        watch = AuditBar(console)
        watch.phase("loading the model", None)
        session = open_validated_session(config, watch)
    return lambda folder: progress.train(config, folder, session)


STAGE = TrainingStage(
    kind="rl",
    prepare=prepare,
    print_done=print_run_done,
    model_help="train this model instead of the cold start",
    scratch_help="create tokenizer, model and cold start first",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command; settings follow as --section.key value."""
    STAGE.add_arguments(parser)
    where = "sample in other processes, on this machine or a Ray cluster (cluster.kind)"
    parser.add_argument("--cluster", choices=("none", "local", "ray"), help=where)


def run(args: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Start or resume a run; under torchrun rank 0 does, and the other ranks train with it."""
    if args.cluster is not None:
        overrides = ["--cluster.kind", args.cluster, *overrides]
    if not launched_rank():
        return STAGE.run(args, overrides)
    load_libraries()
    from ludus.engines.models.loading import resolve_device
    from ludus.training.rl.rank_worker import run_rank

    if args.resume is not None:
        from ludus.training.resume import is_complete

        folder = resumed_folder(args)
        config = run_config(folder, overrides)
        if is_complete(folder, config, STAGE.kind):
            return 0
    else:
        config = recipe_config(args.recipe, STAGE.shortcuts(args), overrides)
    run_rank(resolve_device(config.model.device), config.training.learner.rank_timeout_s)
    return 0
