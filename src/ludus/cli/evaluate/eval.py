"""Evaluate a run, a model or an endpoint on held-out tasks."""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from ludus.cli.arguments import model_settings, policy_config, raise_first, recipe_config
from ludus.cli.ui.fitted_table import write_result_files
from ludus.cli.ui.tables import evaluation_tables, print_evaluations, report_table
from ludus.cli.ui.terminal import announce, bars, load_libraries, make_console, print_line, print_text
from ludus.config.paths import check_model_folder
from ludus.config.schema import Config
from ludus.config.sections.section import as_names
from ludus.engines.remote.http_client import check_reachable
from ludus.envs.base import World
from ludus.envs.registry import build_world, check_sandbox, closing
from ludus.envs.task_files import read_text
from ludus.errors import ConfigError, LudusError, UserError
from ludus.evaluation import evaluate
from ludus.evaluation.analysis.cost import TokenPrice, checked_price, measure_cost, read_price
from ludus.evaluation.evaluate import Evaluation, EvaluationPlan, SavedEvaluation
from ludus.evaluation.probes.common import ProbeReport
from ludus.evaluation.tables import format_sampling, format_temperature
from ludus.gateway.agents import agent_server
from ludus.rollouts.ledger import Ledger
from ludus.rollouts.openai_client import OpenAIClient, OpenAIClientSettings, TokenUsage, endpoint_chat_factory
from ludus.rollouts.reward_executor import ProcessRewardExecutor
from ludus.rollouts.rollout_files import replaced_file
from ludus.rollouts.scheduler import Episode, SamplingPlan, Scheduler, engine_scheduler, scheduler
from ludus.training.run import run_dir
from ludus.training.run.preflight import model_path
from ludus.training.run.run_dir import RunFolder

if TYPE_CHECKING:
    from ludus.cli.ui.load_run import LoadedRun


def run(args: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Evaluate; return 1 if an earlier evaluation of the same weights is not reproduced."""
    return follow(args, overrides) if args.follow else evaluate_newest(args, overrides)


def evaluate_newest(args: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Evaluate the model, or the newest checkpoint of the run; the exit code is that of `run`."""
    check_arguments(args)
    single = [price is not None for price in (args.price_in, args.price_out)]
    raise_first(
        (args.prices and any(single), "--prices excludes --price-in and --price-out.", "Remove one of them."),
        (any(single) and not all(single), "--price-in and --price-out need each other.", "Add the other one."),
    )
    price = checked_price(args.price_in, args.price_out) if any(single) else None
    if args.prices:
        price = read_price(args.prices, str(args.run or args.model or args.recipe))
    shortcuts = ["--env.settings.access", f'"{args.baseline}"'] if args.baseline else []  # quoted: a bare none unsets
    config = evaluation_config(args, [*shortcuts, *overrides])
    _check_selection(config, args)
    if args.run is not None:
        run_dir.latest_checkpoint(RunFolder(args.run))
    elif not args.endpoint:
        check_model_folder(model_path(config))
    announce(f"Building the world {config.env.name} and its tasks ...")
    world = check_world(config, args.baseline)
    console = make_console()
    results, saved, searches = asyncio.run(_evaluate(args, config, world, console, price))
    outcomes = [part.name for part in world.rewards if part.outcome]
    print_evaluations(console, results, outcomes)
    for search in searches:
        console.print(report_table(search))
        print_text(console, " ".join(search.notes))
    data = [*map(evaluate.evaluation_data, results), *(search.to_json() for search in searches)]
    write_result_files(args, data, [*evaluation_tables(results, outcomes), *(search.table for search in searches)])
    for notice in results[-1].notices:
        print_text(console, notice, "yellow")
    reproducible = config.rollout.reproducible and not args.endpoint
    for one in saved:
        print_text(console, _verdict_line(one, reproducible), "yellow" if one.verdict == "differs" else "")
    print_line(console, f"Results: {saved[0].path.parent}")
    return int(reproducible and any(one.verdict == "differs" for one in saved))


def _check_selection(config: Config, args: argparse.Namespace) -> None:
    models, searches = as_names(config.evaluation.select_by), config.evaluation.search.method != "none"
    if args.endpoint and (models or searches):
        name = "search" if searches else "select_by"
        text = f"evaluation.{name} needs the tokens of the attempts, which an endpoint does not return."
        raise UserError(text, "Use --run or --model PATH.")
    if models:
        load_libraries()
        from ludus.training.value_models.reward_model import check_ensemble

        check_ensemble(models)


def check_arguments(args: argparse.Namespace) -> None:
    """Raise UserError for arguments that exclude or require each other."""
    conflict = args.run is not None and (args.recipe or args.model or args.endpoint)
    takes = "--run takes world and weights from the run; it excludes a recipe, --model and --endpoint."
    name = "--endpoint needs --model, the name of the model on the server."
    raise_first(
        (conflict, takes, "Remove them, or remove --run."),
        (args.run is None and not args.recipe, "Name a recipe, or a run with --run.", "`ludus recipes` lists recipes."),
        (args.endpoint and not args.model, name, "Add it."),
        (args.baseline not in (None, "none", "once"), f"Unknown baseline: {args.baseline!r}.", "Use none or once."),
        (args.api_key_file and not args.endpoint, "--api-key-file needs --endpoint.", "Add --endpoint, or remove it."),
    )


def evaluation_config(args: argparse.Namespace, overrides: Sequence[str]) -> Config:
    """Return the configuration of the run or recipe, overridden by the command line."""
    if args.run is not None:
        config = policy_config(RunFolder(args.run), overrides)
    else:
        shortcuts = [] if args.endpoint else model_settings(args.model, args.recipe)
        config = recipe_config(args.recipe, shortcuts, overrides)
    if not config.evaluation.splits or not config.evaluation.temperatures:
        text = "There is nothing to evaluate: evaluation.splits or evaluation.temperatures is empty."
        raise ConfigError(text, "Set them, for example --evaluation.splits '[\"test\"]'.")
    return config


def check_world(config: Config, baseline: str | None) -> World:
    """Return the world. Raises UserError for an unsupported baseline, an empty split or an unusable sandbox."""
    world = build_world(config.env, config.rollout, config.sandbox)
    for split in config.evaluation.splits:
        evaluate.check_split(world, split)
        if baseline and world.environment(world.tasks(split)[0]).tools:
            text = f"The world {world.name!r} has tools despite env.settings.access = {baseline!r}."
            raise UserError(text, "--baseline is for worlds with that setting, such as `search`.")
    check_sandbox(config.sandbox, world)
    return world


def _read_api_key(path: Path) -> str:
    key = read_text(path, "Check --api-key-file.").strip()
    if not key:
        raise UserError(f"The file {path} is empty.", "It must contain the API key.")
    return key


async def _evaluate(
    args: argparse.Namespace, config: Config, world: World, console: Console, price: TokenPrice | None
) -> tuple[list[Evaluation], list[SavedEvaluation], list[ProbeReport]]:
    label = f"baseline-{args.baseline}" if args.baseline else ""
    results, saved, searches, folder = [], [], list[ProbeReport](), None
    try:
        async with open_backend(args, config, world) as backend, closing(world):
            folder = _result_folder(args, config)
            print_text(console, _headline(args, config, backend))
            for plan in evaluate.plans(config, backend.step, policy_name(args)):
                before = backend.usage()
                result, episodes = await run_plan(backend, plan, console)
                after = backend.usage()
                usage = None if before is None or after is None else after - before
                cost = measure_cost(episodes, sum(count > 0 for count in result.successes), usage, price)
                best = _select_best(config, backend, result, episodes)
                results.append(replace(result, notices=backend.notices(), cost=cost, best_of=best))
                saved.append(evaluate.save_or_compare(folder.evaluations, results[-1], episodes, label))
                if config.evaluation.search.method != "none" and plan.temperature > 0:
                    searches.append(await _search(backend, config, plan, episodes, folder))
    except LudusError as error:
        if folder is not None and folder.path != args.run and run_dir.remove_unstarted(folder):
            error.hint = f"{error.hint}\nNo result was saved; the folder {folder.path} was removed."
        raise
    return results, saved, searches


async def _search(
    backend: EvalBackend, config: Config, plan: EvaluationPlan, episodes: Sequence[Episode], folder: RunFolder
) -> ProbeReport:
    """Measure `evaluation.search` on the tasks of an evaluation; store the report and the selected episodes."""
    from ludus.evaluation.search import measure_search

    sampling, settings = SamplingPlan("evaluate", plan.temperature, plan.seed), config.evaluation.search
    report, selected = await measure_search(lambda: backend.scheduler(sampling), plan, episodes, settings)
    path = folder.probes / f"search-{settings.method}-{settings.selector}-{plan.name}.json"
    evaluate.save_episodes(path.with_suffix(".jsonl.gz"), selected)
    with replaced_file(path) as file:
        file.write(json.dumps(report.to_json(), indent=1).encode() + b"\n")
    return report


def _select_best(
    config: Config, backend: EvalBackend, result: Evaluation, episodes: Sequence[Episode]
) -> tuple[int, ...]:
    """Return the success of the attempt that `evaluation.select_by` selects at each task; empty if it is unset."""
    models = as_names(config.evaluation.select_by)
    if not models:
        return ()
    from ludus.training.value_models.reward_model import attempt_scores, check_reward_vocabulary, load_ensemble

    check_reward_vocabulary(models, backend.loaded.session.tokenizer)
    trajectories = [episode.trajectory for episode in episodes]
    scores = attempt_scores(load_ensemble(models, 0.0, config), trajectories, config.training.microbatch_tokens)
    return evaluate.successes_of_best(result, trajectories, scores, backend.world.rewards)


def _headline(args: argparse.Namespace, config: Config, backend: EvalBackend) -> str:
    policy = f"step {backend.step} of {args.run}" if args.run is not None else policy_name(args)
    if args.run is not None and args.baseline:
        policy += f", baseline {args.baseline}"
    settings = config.evaluation
    attempts = "1 attempt" if settings.samples == 1 else f"{settings.samples} attempts"
    sampling = " and ".join(format_temperature(temperature) for temperature in settings.temperatures)
    return (
        f"Evaluating {policy} in the world {backend.world.name}: split {', '.join(settings.splits)}; "
        f"{settings.tasks} tasks per split, {attempts} per task; {sampling}."
    )


@dataclass(frozen=True)
class EvalBackend:
    """Model under evaluation: the training step of its weights, and a factory of its schedulers.

    `notices` returns a sentence for each sampling parameter that a server ignored, `usage` the tokens that an endpoint
    has counted so far. `opened` is None for an endpoint.
    """

    world: World
    step: int
    scheduler: Callable[[SamplingPlan], Scheduler]
    close: Callable[[], Awaitable[None]]
    notices: Callable[[], tuple[str, ...]] = tuple
    usage: Callable[[], TokenUsage | None] = lambda: None
    opened: LoadedRun | None = None

    @property
    def loaded(self) -> LoadedRun:
        """The loaded model. Raises UserError for an endpoint."""
        if self.opened is None:
            raise UserError("An endpoint has no model in this process.", "Use --run or --model PATH.")
        return self.opened


def engine_backend(world: World, opened: LoadedRun) -> EvalBackend:
    """Return a backend for an engine, with the scheduler of training."""
    session = opened.session
    agents = agent_server(world, session.config.rollout.agent)

    def make(play: SamplingPlan) -> Scheduler:
        made = engine_scheduler(world, opened.engine, session.renderer, session.config.rollout, play, Ledger())
        return replace(made, scoring=session.scoring, agents=agents)

    return EvalBackend(world, opened.step, make, opened.engine.close, opened=opened)


def _endpoint_backend(config: Config, world: World, settings: OpenAIClientSettings) -> EvalBackend:
    """Return a backend for a chat-completions endpoint, with the same limits as an engine. Does not import torch."""
    if config.env.rendering != "chat":
        text = f"An endpoint needs chat messages, but env.rendering is {config.env.rendering!r}."
        raise ConfigError(text, "Add --env.rendering chat.")
    client, scoring, parser = OpenAIClient(settings), ProcessRewardExecutor.of(config), config.env.tool_parser
    agents = agent_server(world, config.rollout.agent)

    def make(play: SamplingPlan) -> Scheduler:
        chats = endpoint_chat_factory(client, config.rollout, play, "" if parser == "auto" else parser, world)
        return replace(scheduler(world, chats, config.rollout, Ledger()), scoring=scoring, agents=agents)

    return EvalBackend(world, 0, make, client.close, lambda: tuple(client.accepted.notices()), lambda: client.usage)


@asynccontextmanager
async def open_backend(
    args: argparse.Namespace, config: Config, world: World, step: int | None = None
) -> AsyncIterator[EvalBackend]:
    """Open and close the backend selected by the arguments; `step` chooses a checkpoint other than the newest."""
    if args.endpoint:
        key = _read_api_key(args.api_key_file) if args.api_key_file else ""
        settings = OpenAIClientSettings(args.endpoint, args.model, key, concurrency=config.rollout.concurrency)
        backend = _endpoint_backend(config, world, settings)
        check_reachable(args.endpoint)
    else:
        load_libraries()
        from ludus.cli.ui.load_run import open_weights

        run = RunFolder(args.run) if args.run is not None else None
        backend = engine_backend(world, await open_weights(config, run, step=step))
    try:
        yield backend
    finally:
        await backend.close()


def policy_name(args: argparse.Namespace) -> str:
    """Return the model's name for the record; empty for the weights of a run if the results go into its folder."""
    if args.endpoint:
        name = f"{args.model} at {args.endpoint}"
    elif args.run is not None:
        name = str(args.run) if args.out else ""
    else:
        name = args.model or "the recipe's own model"
    return ", ".join(filter(None, [name, f"baseline {args.baseline}" if args.baseline else ""]))


def _result_folder(args: argparse.Namespace, config: Config) -> RunFolder:
    """Return the folder for results: the run's own, an existing result folder, or a new one."""
    if args.run is not None and not args.out:
        return RunFolder(args.run)
    out = RunFolder(Path(args.out or config.run.dir or ""))
    if (args.out or config.run.dir) and out.config.is_file():
        return out
    settings = config.run.model_copy(update={"dir": args.out or config.run.dir})
    return run_dir.new_run(config.model_copy(update={"run": settings}), "eval", "eval")


async def run_plan(backend: EvalBackend, plan: EvaluationPlan, console: Console) -> tuple[Evaluation, list[Episode]]:
    """Run one evaluation with a progress bar."""
    episode_scheduler = backend.scheduler(SamplingPlan("evaluate", plan.temperature, plan.seed))
    tasks = backend.world.tasks(plan.split)
    with bars(console) as progress:
        if warning := evaluate.short_split(backend.world, plan.split, plan.num_tasks):
            print_text(console, warning)
        name = f"evaluation, {plan.split}, {format_sampling(plan)}"
        bar = progress.add_task(name, total=plan.episodes_of(tasks), numbers="")
        return await evaluate.evaluate(episode_scheduler, tasks, plan, lambda _: progress.advance(bar))


def _verdict_line(saved: SavedEvaluation, reproducible: bool) -> str:
    if saved.verdict != "differs":
        what = "saved" if saved.verdict == "new" else "reproduces the existing evaluation, bit for bit"
        return f"{saved.path.stem}: {what}."
    why = "" if reproducible else " (rollout.reproducible is off, or an endpoint was used)"
    earlier = saved.earlier.stem if saved.earlier else ""
    return f"{saved.path.stem}: does not reproduce {earlier}: {saved.note}{why}."


POLL_S = 2.0
"""Seconds between two looks for a new checkpoint."""


def follow(args: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Evaluate each new checkpoint until the run ends; return the largest exit code.

    Checkpoints written during an evaluation are skipped except the newest. Raises UserError if the run ends without a
    checkpoint.
    """
    if args.run is None:
        raise UserError("--follow needs a run.", "Add --run RUN.")
    folder, console, code, last = RunFolder(args.run), make_console(), 0, -1
    while True:
        running = run_dir.is_running(folder)  # read first: a checkpoint written before the end is evaluated
        found = run_dir.list_checkpoints(folder.checkpoints)
        if found and found[-1][0] > last:
            last = found[-1][0]
            code = max(code, evaluate_newest(args, overrides))
        elif not running:
            break
        else:
            if last < 0:
                print_text(console, f"Waiting for the first checkpoint of {args.run} ...")
                last = 0
            time.sleep(POLL_S)
    if not found:
        raise UserError(f"The run {args.run} ended without a checkpoint.", "See its log.txt.")
    return code
