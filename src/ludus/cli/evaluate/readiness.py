"""`ludus doctor ENV --model M`: sample before training, and print whether RL can start."""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from pydantic import BaseModel, Field
from rich.console import Console

from ludus.cli.arguments import check_run, is_recipe, model_settings, recipe_config
from ludus.cli.evaluate.eval import EvalBackend, make_backend
from ludus.cli.ui.fitted_table import FittedTable, TableColumn, make_table
from ludus.cli.ui.terminal import announce, bars, make_console, print_line, print_text
from ludus.config.load import load_config
from ludus.config.paths import check_model_folder
from ludus.config.schema import Config
from ludus.engines.remote.http_client import check_reachable, get_once
from ludus.envs.base import World
from ludus.envs.registry import WORLDS, build_world, check_sandbox, closing, plugin_tools
from ludus.errors import EngineError, LudusError, UserError, WorldError, did_you_mean
from ludus.evaluation.evaluate import Conditions, Evaluation, EvaluationPlan, check_split, evaluate
from ludus.evaluation.prompt_search import search_prompt, system_prompt, with_system_prompt
from ludus.evaluation.readiness import (
    LIMITS,
    Alternative,
    PromptGains,
    Readiness,
    alternatives,
    readiness,
    suggested_settings,
)
from ludus.evaluation.stats import Interval, paired_difference
from ludus.evaluation.tables import format_success
from ludus.recipes import list_recipes
from ludus.rewards.base import success
from ludus.rollouts.ledger import RolloutKey
from ludus.rollouts.openai_client import OpenAIClient, OpenAIClientSettings
from ludus.rollouts.scheduler import RolloutRequest, SamplingPlan
from ludus.simulator.costs import LearnerCost
from ludus.simulator.fit import fit
from ludus.training.run.run_dir import RunFolder, latest_checkpoint
from ludus.types import Message, SamplingParams, Task, Trajectory

_SPLIT = "train"


class _ServedModel(BaseModel):
    id: str


class _ServedModels(BaseModel):
    data: list[_ServedModel] = Field(min_length=1)


@dataclass(frozen=True)
class ReadinessReport:
    """The statistics, the estimated step, the suggested command and the alternatives, for printing and JSON."""

    found: Readiness
    step: Mapping[str, float | None]
    command: str
    command_note: str
    alternatives: Sequence[Alternative]
    notices: Sequence[str]
    optimised_prompt: str | None = None

    def data(self) -> dict[str, object]:
        """Return everything as JSON values."""
        one, result = self.found, self.found.evaluation
        return {
            "success": result.rate,
            "interval": [result.interval.low, result.interval.high],
            "attempts": result.plan.samples,
            "tasks": dict(zip(result.task_ids, result.successes, strict=True)),
            "pass_rates": one.pass_rates,
            "usable_groups": [asdict(share) for share in one.shares],
            "lengths": asdict(one.lengths),
            "tools": asdict(one.tools),
            "speed": asdict(one.speed),
            "step": dict(self.step),
            "verdict": asdict(one.verdict),
            "command": self.command,
            "command_note": self.command_note,
            "alternatives": [asdict(way) for way in self.alternatives],
            "notices": list(self.notices),
            "optimised_prompt": self.optimised_prompt,
        }


def check_readiness(args: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Sample and print the report; return 1 unless RL can start."""
    check_numbers(args)
    console = make_console(quiet=args.json)
    args = resolved_model(args)
    config = environment_config(args, overrides)
    learner = learner_cost(args)
    announce(f"Building the world {config.env.name} and its tasks ...")
    world = checked_world(config)
    found, gains, prompt, notices = asyncio.run(_measure(args, config, world, console))
    episodes, tokens = config.algorithm.group_size * config.training.prompts_per_step, found.speed.tokens
    learn_s = None if learner is None or tokens is None else learner.seconds(tokens * episodes)
    ways = alternatives(found, config, learn_s, args.price_per_hour, gains)
    command, note = suggested_command(args, found, config, overrides)
    speed = found.speed
    step = {
        "episodes": episodes,
        "sampling_s": speed.hours(episodes) * 3600,
        "learner_s": learn_s,
        "sampled_tokens": None if speed.sampled is None else speed.sampled * episodes,
        "tokens": None if tokens is None else tokens * episodes,
    }
    report = ReadinessReport(found, step, command, note, ways, notices, prompt)
    if args.json:
        print(json.dumps(report.data(), indent=1))
    else:
        print_report(console, report, config)
    return int(report.found.verdict.answer != "RL can start")


def check_numbers(args: argparse.Namespace) -> None:
    """Raise UserError for numbers that cannot be sampled."""
    if args.attempts < 2:
        raise UserError(f"--attempts is {args.attempts}.", "Pass rates of tasks need 2 or more.")
    if args.tasks < 2:
        raise UserError(f"--tasks is {args.tasks}.", "An interval needs 2 or more.")
    if args.optimise_prompt < 0 or (args.optimise_prompt and args.tasks < 4):
        raise UserError("--optimise-prompt needs 4 tasks or more.", "Raise --tasks.")
    if args.reflection and not args.optimise_prompt:
        raise UserError("--reflection needs --optimise-prompt.", "Add it, or remove --reflection.")
    if args.few_shot < 0 or (args.price_per_hour or 0) < 0:
        raise UserError("--few-shot or --price-per-hour is negative.", "Set 0 or more.")


def resolved_model(args: argparse.Namespace) -> argparse.Namespace:
    """Return the arguments as `ludus eval` takes them: a URL is an endpoint, a run folder its newest checkpoint."""
    model, endpoint = args.model, None
    if model.startswith(("http://", "https://")):
        endpoint = model.rstrip("/").removesuffix("/chat/completions")
        model = get_once(endpoint, "/models", _ServedModels).data[0].id
    elif (Path(model) / "config.toml").is_file() and (Path(model) / "run.json").is_file():
        model = str(latest_checkpoint(RunFolder(Path(model)))[1])
    if endpoint is None:
        check_model_folder(model)
    return argparse.Namespace(**vars(args) | {"run": None, "model": model, "endpoint": endpoint, "api_key_file": None})


def environment_config(args: argparse.Namespace, overrides: Sequence[str]) -> Config:
    """Return the configuration of a recipe, or the defaults with another environment."""
    sampling = ["--rollout.max_failure_rate", "1.0"]
    shortcuts = [] if args.endpoint else model_settings(args.model, args.target)
    if is_recipe(args.target):
        return recipe_config(args.target, [*sampling, *shortcuts], overrides)
    if args.target not in WORLDS and not args.target.partition(":")[0].endswith(".py"):
        names = sorted({*WORLDS, *(one.name for one in list_recipes())})
        hint = f"{did_you_mean(args.target, names)}Known: {', '.join(names)}; files end in .toml or .py."
        raise UserError(f"Unknown environment {args.target!r}.", hint)
    return load_config(None, ["--env.name", args.target, *sampling, *shortcuts, *overrides])


def checked_world(config: Config) -> World:
    """Return the world. Raises WorldError that lists every tool, sandbox or world that does not work."""
    errors = []
    for name in config.env.tools:
        try:
            plugin_tools([name])
        except LudusError as error:
            errors.append(f"{name}: {error.message}")
    if len(errors) > 1:
        raise WorldError(f"{len(errors)} tools do not work. {' '.join(errors)}", "Fix or remove them (env.tools).")
    world = build_world(config.env, config.rollout, config.sandbox)
    check_split(world, _SPLIT, "env.name")
    check_sandbox(config.sandbox, world)
    return world


async def _measure(
    args: argparse.Namespace, config: Config, world: World, console: Console
) -> tuple[Readiness, PromptGains, str | None, tuple[str, ...]]:
    """Return the statistics, the gains by other prompts, the optimised prompt if requested, and the notices."""
    tasks, compares = world.tasks(_SPLIT), bool(args.few_shot or args.optimise_prompt)
    drawn = random.Random(config.run.seed).sample(tasks, min(len(tasks), (1 + compares) * args.tasks))
    chosen, held_out = drawn[: args.tasks], drawn[args.tasks :]
    if len(chosen) < 2 or (compares and len(held_out) < 2):
        raise UserError(f"The split {_SPLIT!r} has {len(tasks)} tasks.", "Lower --tasks, or use more tasks.")
    backend = await make_backend(args, config, world)
    async with closing(world):
        try:
            result, tried, seconds = await sample(args, config, backend, chosen, console)
            notices = backend.notices()
        finally:
            await backend.close()
        found = readiness(result, tried, seconds)
        few_shot = await _few_shot(args, config, world, (tried, held_out), console) if args.few_shot else None
        gains, text = PromptGains(few_shot), None
        if args.optimise_prompt:
            text, gain = await _optimised(args, config, world, (chosen, held_out), console)
            gains = replace(gains, optimised=gain, episodes=args.optimise_prompt)
    return found, gains, text, notices


async def sample(
    args: argparse.Namespace, config: Config, backend: EvalBackend, tasks: Sequence[Task], console: Console
) -> tuple[Evaluation, list[Trajectory], float]:
    """Run `--attempts` episodes per task at the temperature of training; return them and the seconds."""
    conditions, temperature = Conditions.of(config), config.rollout.temperature
    plan = EvaluationPlan(_SPLIT, len(tasks), args.attempts, temperature, config.run.seed, conditions=conditions)
    runner = backend.scheduler(SamplingPlan("evaluate", temperature, plan.seed))
    with bars(console, transient=True) as progress:
        task = progress.add_task("sampling", total=plan.episodes_of(tasks), numbers="")
        begin = time.perf_counter()
        result, episodes = await evaluate(runner, tasks, plan, lambda _: progress.advance(task))
        seconds = time.perf_counter() - begin
    return result, [episode.trajectory for episode in episodes], seconds


async def _few_shot(
    args: argparse.Namespace,
    config: Config,
    world: World,
    sampled: tuple[Sequence[Trajectory], Sequence[Task]],
    console: Console,
) -> Interval | None:
    """Return the interval of the gain by examples on held-out tasks; None without a solved attempt."""
    tried, held_out = sampled
    solved: dict[str, Trajectory] = {}  # the shortest solved attempt at each task
    for one in sorted((t for t in tried if success(world.rewards, t)), key=lambda t: len(str(t.messages))):
        solved.setdefault(one.task_id, one)
    shortest = list(solved.values())[: args.few_shot]
    examples = [[m for m in one.messages if m["role"] != "system"] for one in shortest]
    if not examples:
        return None
    length = config.rollout.max_seq_len * (1 + len(examples))
    rollout = config.rollout.model_copy(update={"max_seq_len": length})
    backend = await make_backend(args, config.model_copy(update={"rollout": rollout}), world)
    try:
        plain, _, _ = await sample(args, config, backend, held_out, console)
        shown = [replace(task, prompt=with_examples(task.prompt, examples)) for task in held_out]
        primed, _, _ = await sample(args, config, backend, shown, console)
    finally:
        await backend.close()
    return paired_difference(primed.scores, plain.scores).interval


async def _optimised(
    args: argparse.Namespace,
    config: Config,
    world: World,
    tasks: tuple[Sequence[Task], Sequence[Task]],
    console: Console,
) -> tuple[str, Interval]:
    """Search a system prompt on the first tasks; return it, and the interval of its gain on the others."""
    backend = await make_backend(args, config, world)
    try:
        text = await optimised_prompt(args, config, world, backend, tasks[0])
        plain, _, _ = await sample(args, config, backend, tasks[1], console)
        others = [task if system_prompt(task) == text else with_system_prompt(task, text) for task in tasks[1]]
        changed, _, _ = await sample(args, config, backend, others, console)
    finally:
        await backend.close()
    return text, paired_difference(changed.scores, plain.scores).interval


def with_examples(prompt: Sequence[Message], examples: Sequence[Sequence[Message]]) -> tuple[Message, ...]:
    """Return a prompt with example dialogues after its system messages."""
    first = next((i for i, message in enumerate(prompt) if message["role"] != "system"), len(prompt))
    return (*prompt[:first], *(message for example in examples for message in example), *prompt[first:])


def learner_cost(args: argparse.Namespace) -> LearnerCost | None:
    """Return the learner's cost, fitted to the run of --costs or to that of the model; None if unknown."""
    if args.costs:
        check_run(RunFolder(args.costs))
        return fit([RunFolder(args.costs)]).costs.learner
    folder = RunFolder(Path(args.model).resolve().parent.parent)
    if args.endpoint or not (folder.timings.is_file() and folder.metrics.is_file()):
        return None
    try:
        return fit([folder]).costs.learner
    except UserError:  # too few steps to fit
        return None


def suggested_command(
    args: argparse.Namespace, found: Readiness, config: Config, overrides: Sequence[str]
) -> tuple[str, str]:
    """Return a `ludus train` command and what it needs besides, or ""."""
    settings = suggested_settings(found, config)
    recipe, note = args.target, ""
    if not is_recipe(recipe):
        recipe = f"{Path(recipe.partition(':')[0]).stem}.toml"
        note = f'Needs a file {recipe} with the lines [env] and name = "{config.env.name}".'
    if args.endpoint:
        note = f"{note} An endpoint cannot be trained: --model must name the weights of {args.model}.".strip()
    words = ["ludus", "train", recipe, "--model", args.model, *overrides]
    words += [word for key, value in settings.items() for word in (f"--{key}", str(value))]
    return shlex.join(words), note


def print_report(console: Console, report: ReadinessReport, config: Config) -> None:
    """Print the report in plain words."""
    found = report.found
    result, tools = found.evaluation, found.tools
    tried = f"{len(result.task_ids)} tasks of {_SPLIT}, {result.plan.samples} attempts each"
    print_text(console, f"Success: {format_success(result)} with 95 % interval ({tried}).")
    rates = ", ".join(f"{name}: {count}" for name, count in found.pass_rates.items())
    print_text(console, f"Tasks by pass rate: {rates}.")
    shares = [
        (s.group_size, f"{s.share:.0%} [{s.interval.low:.0%}, {s.interval.high:.0%}]", s.method) for s in found.shares
    ]
    columns = (TableColumn("group size", right=True), "usable groups", "estimate")
    console.print(make_table(columns, shares, "Groups neither all right nor all wrong"))
    console.print(_length_table(found, config))
    for reason, share in found.lengths.stopped.items():
        print_text(console, f"{share:.1%} of the episodes end by {reason}; {LIMITS[reason]} lifts that limit.")
    invalid = f"{tools.unknown:.1%} unknown tools, {tools.unparsed:.1%} not parsed"
    print_text(
        console, f"Tools: {tools.calls_per_episode:.2f} calls per episode, {tools.errors:.1%} errors ({invalid})."
    )
    for name, num in tools.dead.items():
        print_text(console, f"Tool {name}: none of its {num} calls works.", "bold red")
    print_text(console, _step_line(report.step))
    for notice in report.notices:
        print_text(console, notice, "yellow")
    starts = found.verdict.answer == "RL can start"
    verdict = f"\nVerdict: {found.verdict.answer}. {found.verdict.reason}"
    print_text(console, verdict, "green" if starts else "bold yellow")
    print_text(console, "Suggested configuration:" if starts else "Suggested configuration, after that:")
    print_line(console, f"  {report.command}")
    if report.command_note:
        print_text(console, report.command_note)
    console.print(_alternative_table(report.alternatives))
    if report.optimised_prompt is not None:
        print_text(console, f"Optimised system prompt:\n{report.optimised_prompt}")


def _length_table(found: Readiness, config: Config) -> FittedTable:

    one, rollout = found.lengths, config.rollout
    kinds = (
        ("prompt tokens", one.prompt, rollout.max_seq_len),
        ("response tokens", one.response, rollout.max_tokens_per_turn * rollout.max_turns),
        ("all tokens", one.total, rollout.max_seq_len),
        ("turns", one.turns, rollout.max_turns),
    )
    rows = []
    for name, spread, limit in kinds:
        values = (spread.p50, spread.p95, spread.maximum) if spread else ()
        rows.append((name, *([f"{value:.0f}" for value in values] or ("unknown", "", "")), limit))
    numbers = (TableColumn(name, right=True) for name in ("p50", "p95", "max", "limit"))
    return make_table(("per episode", *numbers), rows, "Lengths")


def _step_line(step: Mapping[str, float | None]) -> str:

    def shown(name: str, unit: str) -> str:
        value = step[name]
        return "unknown" if value is None else f"{value:,.1f} s" if unit == "s" else f"{value:,.0f}"

    learner = shown("learner_s", "s") + (" (cost model)" if step["learner_s"] is not None else "")
    return (
        f"A step of {step['episodes']:.0f} episodes: sampling {shown('sampling_s', 's')} (measured), learner "
        f"{learner}, {shown('sampled_tokens', '')} sampled tokens of {shown('tokens', '')}."
    )


def _alternative_table(ways: Sequence[Alternative]) -> FittedTable:
    rows = []
    for one in ways:
        low, high = (None if value is None else f"{100 * value:+.1f}" for value in (one.gain_low, one.gain_high))
        gain = f"{low} to {high}" if low and high else f"up to {high}" if high else "unknown"
        hours, cost = ("unknown" if v is None else f"{v:.2g}" for v in (one.hours, one.cost))
        rows.append((one.name, gain, hours, cost, one.reason))
    columns = ("way", "gain, points", "hours", "cost", TableColumn("reason", wrap=True))
    return make_table(columns, rows, "Is RL worth it here?")


_REFLECTION = SamplingParams(temperature=1.0, max_new_tokens=2048)


async def optimised_prompt(
    args: argparse.Namespace, config: Config, world: World, backend: EvalBackend, tasks: Sequence[Task]
) -> str:
    """Return the best system prompt after about `args.optimise_prompt` episodes on these tasks."""
    runner = backend.scheduler(SamplingPlan("evaluate", config.rollout.temperature, config.run.seed))
    number = 0

    async def sample(batch: Sequence[Task]) -> Sequence[Trajectory]:
        nonlocal number
        number += 1  # the step of the keys, so that repeated tasks have new seeds
        requests = [RolloutRequest(RolloutKey(number, task.id, i), task) for i, task in enumerate(batch)]
        return [episode.trajectory for episode in await runner.run(requests)]

    if args.reflection is None and args.endpoint is None:
        text = "--optimise-prompt needs a model that proposes prompts."
        raise UserError(text, "Add --reflection URL NAME, an OpenAI-compatible server.")
    url, name = args.reflection or (args.endpoint, args.model)
    check_reachable(url)
    async with OpenAIClient(OpenAIClientSettings(url, name)) as client:

        async def reflect(prompt: str) -> str:
            params = replace(_REFLECTION, seed=number)
            answer = await client.chat([{"role": "user", "content": prompt}], [], params, 0)
            if answer is None:
                text = "The reflection prompt exceeds the context of its model."
                raise EngineError(text, "Use another --reflection.")
            return answer.action.message["content"]

        budget, seed = args.optimise_prompt, config.run.seed
        return await search_prompt(tasks, sample, reflect, world.rewards, episodes=budget, seed=seed)
