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

from rich.console import Console

from ludus.cli.arguments import environment_config, is_recipe, model_settings
from ludus.cli.evaluate.eval import EvalBackend, open_backend
from ludus.cli.ui.fitted_table import FittedTable, TableColumn, make_table
from ludus.cli.ui.terminal import announce, bars, make_console, print_line, print_text
from ludus.config.paths import check_model_folder
from ludus.config.schema import Config
from ludus.engines.remote.api_adapters import ModelList
from ludus.engines.remote.http_client import check_reachable, get_once
from ludus.envs.base import World
from ludus.envs.registry import FACTORIES, build_world, check_sandbox, closing, plugin_tools
from ludus.errors import EngineError, LudusError, UserError, WorldError, did_you_mean
from ludus.evaluation import readiness
from ludus.evaluation.evaluate import Conditions, Evaluation, EvaluationPlan, check_split, evaluate
from ludus.evaluation.prompt_search import search_prompt, system_prompt, with_system_prompt
from ludus.evaluation.readiness import Alternative, PromptGains, Readiness
from ludus.evaluation.stats import Interval, paired_difference
from ludus.evaluation.tables import format_rate, format_success
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
        one, result, others = self.found, self.found.evaluation, asdict(self)
        episodes = others.pop("found")["episodes"]
        return {
            "success": result.rate,
            "interval": [result.interval.low, result.interval.high],
            "attempts": result.plan.samples,
            "tasks": dict(zip(result.task_ids, result.successes, strict=True)),
            "pass_rates": one.pass_rates,
            "usable_groups": [asdict(share) for share in one.shares],
            "lengths": {**episodes["lengths"], "stopped": episodes["stopped"]},
            "tools": {name: episodes[name] for name in ("calls_per_episode", "errors", "unknown", "unparsed", "dead")},
            "speed": {"episodes": one.episodes.num, **{key: episodes[key] for key in ("seconds", "sampled", "tokens")}},
            "verdict": asdict(one.verdict),
            **others,
        }


def check_readiness(args: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Sample and print the report; return 1 unless RL can start."""
    check_numbers(args)
    console = make_console(quiet=args.json)
    args = resolved_model(args)
    config = readiness_config(args, overrides)
    learner = learner_cost(args)
    announce(f"Building the world {config.env.name} and its tasks ...")
    world = checked_world(config)
    found, gains, prompt, notices = asyncio.run(_measure(args, config, world, console))
    num, one = config.algorithm.group_size * config.training.prompts_per_step, found.episodes
    learn_s = None if learner is None or one.tokens is None else learner.seconds(one.tokens * num)
    ways = readiness.alternatives(found, config, learn_s, args.price_per_hour, gains)
    command, note = suggested_command(args, found, config, overrides)
    step = {
        "episodes": num,
        "sampling_s": one.hours(num) * 3600,
        "learner_s": learn_s,
        "sampled_tokens": None if one.sampled is None else one.sampled * num,
        "tokens": None if one.tokens is None else one.tokens * num,
    }
    report = ReadinessReport(found, step, command, note, ways, notices, prompt)
    if args.json:
        print(json.dumps(report.data(), indent=1))
    else:
        print_report(console, report, config)
    return int(report.found.verdict.answer != "RL can start")


def check_numbers(args: argparse.Namespace) -> None:
    """Raise UserError for invalid numbers of attempts, tasks or episodes."""
    if args.attempts < 2:
        raise UserError(f"--attempts is {args.attempts}.", "Pass rates of tasks need 2 or more.")
    if args.tasks < 2:
        raise UserError(f"--tasks is {args.tasks}.", "An interval needs 2 or more.")
    if args.optimise_prompt > 0 and args.tasks < 4:
        raise UserError("--optimise-prompt needs 4 tasks or more.", "Raise --tasks.")
    if args.reflection and not args.optimise_prompt:
        raise UserError("--reflection needs --optimise-prompt.", "Add it, or remove --reflection.")
    if min(args.few_shot, args.optimise_prompt, args.price_per_hour or 0) < 0:
        raise UserError("--few-shot, --optimise-prompt or --price-per-hour is negative.", "Set 0 or more.")


def resolved_model(args: argparse.Namespace) -> argparse.Namespace:
    """Return the arguments of `ludus eval`: a URL becomes an endpoint, a run folder its newest checkpoint."""
    model, endpoint = args.model, None
    if model.startswith(("http://", "https://")):
        endpoint = model.rstrip("/").removesuffix("/chat/completions")
        model = get_once(endpoint, "/models", ModelList).data[0].id
    elif (Path(model) / "config.toml").is_file() and (Path(model) / "run.json").is_file():
        model = str(latest_checkpoint(RunFolder(Path(model)))[1])
    if endpoint is None:
        check_model_folder(model)
    return argparse.Namespace(**vars(args) | {"run": None, "model": model, "endpoint": endpoint, "api_key_file": None})


def readiness_config(args: argparse.Namespace, overrides: Sequence[str]) -> Config:
    """Return the configuration of a recipe, or the defaults with another environment."""
    shortcuts = [] if args.endpoint else model_settings(args.model, args.target)
    if not is_recipe(args.target) and args.target not in FACTORIES:
        names = sorted({*FACTORIES, *(one.name for one in list_recipes())})
        hint = f"{did_you_mean(args.target, names)}Known: {', '.join(names)}; files end in .toml or .py."
        raise UserError(f"Unknown environment {args.target!r}.", hint)
    return environment_config(args.target, ["--rollout.max_failure_rate", "1.0", *shortcuts, *overrides])


def checked_world(config: Config) -> World:
    """Return the world. Raises WorldError if tools, listed together, the world or the sandbox do not work."""
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
    async with closing(world):
        async with open_backend(args, config, world) as backend:
            result, tried, seconds = await sample(args, config, backend, chosen, console)
            notices = backend.notices()
            text = await optimised_prompt(args, config, backend, chosen) if args.optimise_prompt else None
        gains = PromptGains(episodes=args.optimise_prompt)
        if examples := solved_examples(tried, world)[: args.few_shot]:
            length = config.rollout.max_seq_len * (1 + len(examples))
            longer = config.model_copy(update={"rollout": config.rollout.model_copy(update={"max_seq_len": length})})
            pairs = [(task, replace(task, prompt=with_examples(task.prompt, examples))) for task in held_out]
            gains = replace(gains, few_shot=await _gain(args, longer, world, pairs, console))
        if text is not None:
            pairs = [(t, t if system_prompt(t) == text else with_system_prompt(t, text)) for t in held_out]
            gains = replace(gains, optimised=await _gain(args, config, world, pairs, console))
    return readiness.readiness(result, tried, seconds), gains, text, notices


async def _gain(
    args: argparse.Namespace, config: Config, world: World, pairs: Sequence[tuple[Task, Task]], console: Console
) -> Interval:
    """Return the interval of the gain in success; each pair is a task with its prompt and with another one."""
    async with open_backend(args, config, world) as backend:
        plain, changed = [
            (await sample(args, config, backend, tasks, console))[0].scores for tasks in zip(*pairs, strict=True)
        ]
    return paired_difference(changed, plain).interval


async def sample(
    args: argparse.Namespace, config: Config, backend: EvalBackend, tasks: Sequence[Task], console: Console
) -> tuple[Evaluation, list[Trajectory], float]:
    """Run `--attempts` episodes per task at the temperature of training; return them and the seconds."""
    conditions, temperature = Conditions.of(config), config.rollout.temperature
    plan = EvaluationPlan(_SPLIT, len(tasks), args.attempts, temperature, config.run.seed, conditions=conditions)
    runner = backend.scheduler(SamplingPlan("evaluate", temperature, plan.seed))
    with bars(console, transient=True) as progress:
        bar = progress.add_task("sampling", total=plan.episodes_of(tasks), numbers="")
        begin = time.perf_counter()
        result, episodes = await evaluate(runner, tasks, plan, lambda _: progress.advance(bar))
        seconds = time.perf_counter() - begin
    return result, [episode.trajectory for episode in episodes], seconds


def solved_examples(tried: Sequence[Trajectory], world: World) -> list[list[Message]]:
    """Return the shortest solved attempt at each task without system messages, the shortest first."""
    solved: dict[str, Trajectory] = {}
    for one in sorted((t for t in tried if success(world.rewards, t)), key=lambda t: len(str(t.messages))):
        solved.setdefault(one.task_id, one)
    return [[m for m in one.messages if m["role"] != "system"] for one in solved.values()]


def with_examples(prompt: Sequence[Message], examples: Sequence[Sequence[Message]]) -> tuple[Message, ...]:
    """Return a prompt with example dialogues after its system messages."""
    first = next((i for i, message in enumerate(prompt) if message["role"] != "system"), len(prompt))
    return (*prompt[:first], *(message for example in examples for message in example), *prompt[first:])


def learner_cost(args: argparse.Namespace) -> LearnerCost | None:
    """Return the learner's cost, fitted to the run of --costs or to the run that made the model; None if unknown."""
    if args.costs:
        RunFolder(args.costs).check()
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
    """Return a `ludus train` command and a note about its requirements ("" if none)."""
    settings = readiness.suggested_settings(found, config)
    recipe, note = args.target, ""
    if not is_recipe(recipe):
        recipe = f"{recipe}.toml"
        note = f'Needs a file {recipe} with the lines [env] and name = "{config.env.name}".'
    if args.endpoint:
        note = f"{note} An endpoint cannot be trained: --model must name the weights of {args.model}.".strip()
    words = ["ludus", "train", recipe, "--model", args.model, *overrides]
    words += [word for key, value in settings.items() for word in (f"--{key}", str(value))]
    return shlex.join(words), note


def print_report(console: Console, report: ReadinessReport, config: Config) -> None:
    """Print the report in plain words."""
    found, one = report.found, report.found.episodes
    result = found.evaluation
    tried = f"{len(result.task_ids)} tasks of {_SPLIT}, {result.plan.samples} attempts each"
    print_text(console, f"Success: {format_success(result)} with 95 % interval ({tried}).")
    rates = ", ".join(f"{name}: {count}" for name, count in found.pass_rates.items())
    print_text(console, f"Tasks by pass rate: {rates}.")
    shares = [(s.group_size, format_rate(s.share, s.interval, ".0%"), s.method) for s in found.shares]
    columns = (TableColumn("group size", right=True), "usable groups", "estimate")
    console.print(make_table(columns, shares, "Usable groups: neither all solved nor all failed"))
    console.print(_length_table(found, config))
    for reason, share in one.stopped.items():
        print_text(console, f"{share:.1%} of the episodes end with {reason}; raise {readiness.LIMITS[reason]}.")
    invalid = f"{one.unknown:.1%} unknown tools, {one.unparsed:.1%} not parsed"
    print_text(console, f"Tools: {one.calls_per_episode:.2f} calls per episode, {one.errors:.1%} errors ({invalid}).")
    for name, num in one.dead.items():
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
    rollout = config.rollout
    limits = {
        "prompt": ("prompt tokens", rollout.max_seq_len),
        "response": ("response tokens", rollout.max_tokens_per_turn * rollout.max_turns),
        "total": ("all tokens", rollout.max_seq_len),
        "turns": ("turns", rollout.max_turns),
    }
    rows = []
    for name, spread in found.episodes.lengths.items():
        values = [f"{value:.0f}" for value in spread.values()] if spread else ["unknown", "", ""]
        rows.append((limits[name][0], *values, limits[name][1]))
    numbers = (TableColumn(name, right=True) for name in ("p50", "p95", "max", "limit"))
    return make_table(("per episode", *numbers), rows, "Lengths")


def _step_line(step: Mapping[str, float | None]) -> str:
    shown = {name: "unknown" if value is None else f"{value:,.0f}" for name, value in step.items()}
    times = {name: step[name] for name in ("sampling_s", "learner_s")}
    seconds = {name: "unknown" if value is None else f"{value:,.1f} s" for name, value in times.items()}
    learner = seconds["learner_s"] + (" (cost model)" if step["learner_s"] is not None else "")
    return (
        f"A step of {shown['episodes']} episodes: sampling {seconds['sampling_s']} (measured), learner {learner}, "
        f"{shown['sampled_tokens']} of {shown['tokens']} tokens are sampled."
    )


def _alternative_table(ways: Sequence[Alternative]) -> FittedTable:
    rows = []
    for one in ways:
        low, high = (None if value is None else f"{100 * value:+.1f}" for value in (one.gain_low, one.gain_high))
        gain = f"{low} to {high}" if low and high else f"up to {high}" if high else "unknown"
        hours, cost = ("unknown" if v is None else f"{v:.2g}" for v in (one.hours, one.cost))
        rows.append((one.name, gain, hours, cost, one.reason))
    columns = ("method", "gain, points", "hours", "cost", TableColumn("reason", wrap=True))
    return make_table(columns, rows, "Is RL worth it here?")


_REFLECTION = SamplingParams(temperature=1.0, max_new_tokens=2048)


async def optimised_prompt(
    args: argparse.Namespace, config: Config, backend: EvalBackend, tasks: Sequence[Task]
) -> str:
    """Return the best system prompt found with about `args.optimise_prompt` episodes on these tasks."""
    runner = backend.scheduler(SamplingPlan("evaluate", config.rollout.temperature, config.run.seed))
    batch_number = 0

    async def sample(batch: Sequence[Task]) -> Sequence[Trajectory]:
        nonlocal batch_number
        batch_number += 1  # the step of the keys, so that repeated tasks have new seeds
        requests = [RolloutRequest(RolloutKey(batch_number, task.id, i), task) for i, task in enumerate(batch)]
        return [episode.trajectory for episode in await runner.run(requests)]

    if args.reflection is None and args.endpoint is None:
        text = "--optimise-prompt needs a model that proposes prompts."
        raise UserError(text, "Add --reflection URL NAME, an OpenAI-compatible server.")
    url, name = args.reflection or (args.endpoint, args.model)
    check_reachable(url)
    async with OpenAIClient(OpenAIClientSettings(url, name)) as client:

        async def reflect(prompt: str) -> str:
            params = replace(_REFLECTION, seed=batch_number)
            answer = await client.chat([{"role": "user", "content": prompt}], [], params, 0)
            if answer is None:
                text = "The reflection prompt exceeds the context of its model."
                raise EngineError(text, "Use another --reflection.")
            return answer.action.message["content"]

        budget, seed = args.optimise_prompt, config.run.seed
        return await search_prompt(tasks, sample, reflect, backend.world.rewards, episodes=budget, seed=seed)
