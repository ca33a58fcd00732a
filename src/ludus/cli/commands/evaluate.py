"""Measure held-out success of a run, a model or an endpoint.

    ludus eval --run runs/search-1             the newest checkpoint of a run, in the run's own world
    ludus eval search --model PATH_OR_NAME     a model in the world of a recipe
    ludus eval search --endpoint http://localhost:8000/v1 --model NAME [--api-key-file FILE]
    ludus eval --run runs/search-1 --baseline none    the same model without its tool

Each split of evaluation.splits is played at each of evaluation.temperatures; settings are changed as in
`ludus train`, for example --evaluation.tasks 200 --evaluation.samples 4 (for pass@k). Results and rollouts
of a run go into its folder, others into --out or a new folder under runs/. Nothing is overwritten: where
the same evaluation is there already, the numbers are compared bit for bit.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ludus.cli.arguments import model_settings, policy_config, recipe_config
from ludus.config.schema import Config
from ludus.errors import ConfigError, LudusError, UserError

if TYPE_CHECKING:
    from rich.console import Console

    from ludus.cli.commands.eval_backends import EvalBackend
    from ludus.cli.commands.save_evaluation import SavedEvaluation
    from ludus.cli.ui.tables import EvaluatedEpisodes
    from ludus.envs.base import World
    from ludus.evaluation.evaluate import Evaluation, EvaluationPlan
    from ludus.rollout.scheduler import Episode
    from ludus.training.run.run_dir import RunFolder


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's own arguments; settings follow as --section.key value."""
    parser.add_argument("recipe", nargs="?", help="a recipe's name, or a .toml file")
    parser.add_argument("--run", metavar="RUN", type=Path, help="evaluate the newest checkpoint of this run")
    parser.add_argument("--model", metavar="PATH_OR_NAME", help="evaluate this model")
    parser.add_argument("--endpoint", metavar="URL", help="an OpenAI-compatible server plays; name its --model")
    parser.add_argument("--api-key-file", metavar="FILE", type=Path, help="a file that holds the server's key")
    parser.add_argument(
        "--baseline", choices=("none", "once"), help="no tool at all, or one retrieval before the answer"
    )
    parser.add_argument("--out", metavar="FOLDER", help="write results here")


def run(args: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Evaluate; 1 where an earlier evaluation of the same weights is not reproduced."""
    from ludus.cli.ui.tables import print_evaluations
    from ludus.cli.ui.terminal import make_console, say

    check_arguments(args)
    shortcuts = ["--env.settings.access", f'"{args.baseline}"'] if args.baseline else []  # quoted: a bare none unsets
    config = job_config(args, [*shortcuts, *overrides])
    world = check_world(config, args.baseline)
    console = make_console()
    played, kept = asyncio.run(_evaluate(args, config, world, console))
    print_evaluations(console, played, [part.name for part in world.rewards if part.outcome])
    for notice in played[-1].result.notices:
        say(console, notice, "yellow")
    reproducible = config.rollout.reproducible and not args.endpoint
    for one in kept:
        say(console, verdict(one, reproducible), "yellow" if one.verdict == "differs" else "")
    say(console, f"Results: {kept[0].path.parent}")
    return int(reproducible and any(one.verdict == "differs" for one in kept))


def check_arguments(args: argparse.Namespace) -> None:
    """Raise UserError for arguments that exclude each other, or lack another."""
    if args.run is not None and (args.recipe or args.model or args.endpoint):
        raise UserError(
            "--run takes world and weights from the run; recipe, --model and --endpoint exclude it.",
            "Leave them out, or leave out --run.",
        )
    if args.run is None and not args.recipe:
        raise UserError("Name a recipe, or a run with --run.", "`ludus recipes` lists the recipes.")
    if args.endpoint and not args.model:
        raise UserError("--endpoint needs --model: the name that the server knows it by.", "Add it.")
    if args.api_key_file and not args.endpoint:
        raise UserError("--api-key-file goes with --endpoint.", "Add --endpoint, or leave it out.")


def job_config(args: argparse.Namespace, overrides: Sequence[str]) -> Config:
    """The configuration of the run or the recipe, with the command line laid over it."""
    from ludus.training.run.run_dir import RunFolder

    if args.run is not None:
        config = policy_config(RunFolder(args.run), overrides)
    else:
        model = None if args.endpoint else args.model
        config = recipe_config(args.recipe, model_settings(model, args.recipe), overrides)
    if not config.evaluation.splits or not config.evaluation.temperatures:
        raise ConfigError(
            "There is nothing to evaluate: evaluation.splits or evaluation.temperatures is empty.",
            "Write for example --evaluation.splits '[\"test\"]'.",
        )
    return config


def check_world(config: Config, baseline: str | None) -> World:
    """The world. Raises UserError for a baseline that the world does not have, and an empty split; as
    `check_sandbox` where its sandbox does not answer."""
    from ludus.envs.registry import build_world, check_sandbox
    from ludus.evaluation.evaluate import check_split

    world = build_world(config.env, config.rollout, config.sandbox)
    for split in config.evaluation.splits:
        check_split(world, split)
        if baseline and world.environment(world.tasks(split)[0]).tools:
            raise UserError(
                f"The world {world.name!r} keeps its tools with env.settings.access = {baseline!r}.",
                "--baseline is for worlds with that setting, as `search` is.",
            )
    check_sandbox(config.sandbox, world)
    return world


def read_key(path: Path) -> str:
    """The key in a file, without the newline at its end. Raises UserError where there is none."""
    try:
        key = path.read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"The key cannot be read from {path}: {error}.", "Check --api-key-file.") from error
    if not key:
        raise UserError(f"The file {path} is empty.", "It should hold the API key.")
    return key


async def _evaluate(
    args: argparse.Namespace, config: Config, world: World, console: Console
) -> tuple[list[EvaluatedEpisodes], list[SavedEvaluation]]:
    """Play all plans and keep each as it ends."""
    from ludus.cli.commands.save_evaluation import keep
    from ludus.cli.ui.tables import EvaluatedEpisodes
    from ludus.cli.ui.terminal import say
    from ludus.envs.registry import closing
    from ludus.evaluation.evaluate import plans

    label = f"baseline-{args.baseline}" if args.baseline else ""
    played, kept = [], []
    player = await make_player(args, config, world)
    try:
        folder = result_folder(args, config)
        say(console, what_is_measured(args, config, player))
        async with leaving_no_empty(folder, args.run), closing(world):
            for plan in plans(config, player.step, policy_name(args)):
                result, episodes = await play(player, plan, console)
                result = replace(result, notices=player.notices)
                kept.append(keep(folder.evaluations, result, episodes, label))
                played.append(EvaluatedEpisodes(result, [episode.trajectory for episode in episodes]))
    finally:
        await player.close()
    return played, kept


@asynccontextmanager
async def leaving_no_empty(folder: RunFolder, run: Path | None) -> AsyncIterator[None]:
    """An evaluation that fails before it has a result leaves no folder of its own."""
    from ludus.training.run.run_dir import remove_unstarted

    try:
        yield
    except LudusError as error:
        if folder.path != run and remove_unstarted(folder):
            error.hint = f"{error.hint}\nNothing was played to its end: the folder {folder.path} is removed."
        raise


def what_is_measured(args: argparse.Namespace, config: Config, player: EvalBackend) -> str:
    """Who plays, on which tasks of which splits, and how actions are sampled, on one line."""
    from ludus.cli.ui.tables import sampling

    who = f"step {player.step} of {args.run}" if args.run is not None else policy_name(args)
    if args.run is not None and args.baseline:
        who += f", baseline {args.baseline}"
    settings = config.evaluation
    how = " and ".join(sampling(temperature) for temperature in settings.temperatures)
    return (
        f"Evaluating {who} in the world {player.world.name}: split {', '.join(settings.splits)}; "
        f"{settings.tasks} tasks a split, {settings.samples} attempts a task; {how}."
    )


async def make_player(args: argparse.Namespace, config: Config, world: World) -> EvalBackend:
    """Whoever the arguments name."""
    from ludus.cli.commands.eval_backends import EngineBackend, endpoint_player
    from ludus.rollout.openai_client import OpenAIClientSettings
    from ludus.training.run.run_dir import RunFolder

    if args.endpoint:
        key = read_key(args.api_key_file) if args.api_key_file else ""
        settings = OpenAIClientSettings(args.endpoint, args.model, key, concurrency=config.rollout.concurrency)
        return endpoint_player(config, world, settings)
    from ludus.cli.ui.load_run import open_weights

    run = RunFolder(args.run) if args.run is not None else None
    return EngineBackend(world, await open_weights(config, run))


def policy_name(args: argparse.Namespace) -> str:
    """Who plays, for the record; empty for the weights of a run whose results go into its own folder."""
    if args.endpoint:
        name = f"{args.model} at {args.endpoint}"
    elif args.run is not None:
        name = str(args.run) if args.out else ""
    else:
        name = args.model or "the recipe's own model"
    return ", ".join(filter(None, [name, f"baseline {args.baseline}" if args.baseline else ""]))


def result_folder(args: argparse.Namespace, config: Config) -> RunFolder:
    """Where results go: the run's own folder, one that earlier results lie in, or a new one."""
    from ludus.training.run.run_dir import RunFolder, new_run

    if args.run is not None and not args.out:
        return RunFolder(args.run)
    out = RunFolder(Path(args.out or config.run.dir or ""))
    if (args.out or config.run.dir) and out.config.is_file():
        return out
    settings = config.run.model_copy(update={"dir": args.out or config.run.dir})
    return new_run(config.model_copy(update={"run": settings}), "eval", "eval")


async def play(player: EvalBackend, plan: EvaluationPlan, console: Console) -> tuple[Evaluation, list[Episode]]:
    """One evaluation under a progress bar."""
    from ludus.cli.ui.tables import how_sampled
    from ludus.cli.ui.terminal import bars, say
    from ludus.evaluation.evaluate import evaluate, short_split
    from ludus.rollout.scheduler import SamplingPlan

    scheduler = player.scheduler(SamplingPlan("evaluate", plan.temperature, plan.seed))
    with bars(console) as progress:
        name = f"episodes of {plan.split}, {how_sampled(plan)}"
        tasks = player.world.tasks(plan.split)
        if said := short_split(player.world, plan.split, plan.num_tasks):
            say(console, said)
        task = progress.add_task(name, total=plan.episodes_of(tasks), numbers="")
        return await evaluate(scheduler, tasks, plan, lambda _: progress.advance(task))


def verdict(kept: SavedEvaluation, reproducible: bool) -> str:
    """What became of the results, in a sentence."""
    name = kept.path.stem
    if kept.verdict == "new":
        return f"{name}: saved."
    if kept.verdict == "same":
        return f"{name}: reproduces the evaluation that was there, bit for bit."
    why = "" if reproducible else " (rollout.reproducible is off, or an endpoint played)"
    earlier = kept.earlier.stem if kept.earlier else ""
    return f"{name}: does not reproduce {earlier}: {kept.note}{why}."
