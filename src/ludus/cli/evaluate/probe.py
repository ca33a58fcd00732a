"""Probe a model: change its episodes, compare two checkpoints, or recombine attempts."""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from ludus.cli.evaluate.eval import EvalBackend, check_arguments, check_world, evaluation_config, open_backend
from ludus.cli.ui.fitted_table import write_result_files
from ludus.cli.ui.tables import report_table
from ludus.cli.ui.terminal import announce, make_console, print_line, print_text
from ludus.config.schema import Config
from ludus.envs.base import World
from ludus.envs.registry import closing
from ludus.errors import UserError
from ludus.evaluation.evaluate import check_split
from ludus.evaluation.probes.common import ProbePlan, ProbeReport, roll_out
from ludus.evaluation.probes.counterfactuals import measure_counterfactuals
from ludus.evaluation.probes.endpoint import diagnose_endpoint
from ludus.evaluation.probes.scaling import measure_scaling
from ludus.rollouts.rollout_files import replaced_file
from ludus.training.run.run_dir import RunFolder

TASKS, SAMPLES = 32, 8


@dataclass(frozen=True)
class ProbeContext:
    """Input of a probe: arguments, configuration, world, model and plan."""

    args: argparse.Namespace
    config: Config
    world: World
    backend: EvalBackend
    plan: ProbePlan


@dataclass(frozen=True)
class ProbeKind:
    """A kind of probe: its measurement, its options out of `OPTIONS`, and its default temperature.

    `endpoint`: whether it can probe an endpoint.
    """

    measure: Callable[[ProbeContext], Awaitable[ProbeReport]]
    options: tuple[str, ...] = ()
    temperature: float = 1.0
    endpoint: bool = True


async def _faithfulness(call: ProbeContext) -> ProbeReport:
    from ludus.chat.parse_json import THINK_CLOSE
    from ludus.evaluation.probes.faithfulness import measure_faithfulness

    tokenizer, marker = call.backend.loaded.session.tokenizer, call.args.answer_marker or THINK_CLOSE
    return await measure_faithfulness(call.backend.scheduler, tokenizer, call.plan, marker)


async def _paraphrase(call: ProbeContext) -> ProbeReport:
    from ludus.evaluation.probes.paraphrase import measure_paraphrase, read_paraphrases

    prompts = read_paraphrases(call.args.paraphrases) if call.args.paraphrases else None
    return await measure_paraphrase(call.backend.scheduler, call.plan, prompts)


async def _forks(call: ProbeContext) -> ProbeReport:
    from ludus.evaluation.probes.two_models import forks_report, teacher_forced, usable

    episodes = usable(await roll_out(call.backend.scheduler(call.plan.sampling), call.plan.requests()))
    async with base_backend(call) as base:
        models = (base.loaded.session.model, call.backend.loaded.session.model)
        first, second = ([teacher_forced(model, one.segments) for one in episodes] for model in models)
        views = list(zip(first, second, strict=True))
    tasks, tokenizer = [one.task_id for one in episodes], call.backend.loaded.session.tokenizer
    return forks_report(tasks, views, tokenizer, call.plan.seed)


async def _swap(call: ProbeContext) -> ProbeReport:
    from ludus.evaluation.probes.two_models import measure_swap

    async with base_backend(call) as base:
        makers = {"A": base.scheduler, "B": call.backend.scheduler}
        engines = {"A": base.loaded.engine, "B": call.backend.loaded.engine}
        return await measure_swap(makers, engines, call.plan)


async def _transfer(call: ProbeContext) -> ProbeReport:
    from ludus.cli.evaluate.probe_transfer import measure_transfer

    async with base_backend(call) as base:
        return await measure_transfer((base.loaded, call.backend.loaded), call.plan, call.args)


@asynccontextmanager
async def base_backend(call: ProbeContext) -> AsyncIterator[EvalBackend]:
    """Open the checkpoint of --base-step. Raises UserError without --run, or if it is the probed checkpoint."""
    if call.args.run is None:
        raise UserError(f"`ludus probe {call.args.kind}` compares checkpoints of a run.", "Add --run.")
    step = call.args.base_step or 0
    if step == call.backend.step:
        raise UserError(f"Both checkpoints are of step {step}.", "Choose others with --step and --base-step.")
    async with open_backend(call.args, call.config, call.world, step) as base:
        yield base


KINDS: Mapping[str, ProbeKind] = {
    "faithfulness": ProbeKind(_faithfulness, ("answer_marker",), temperature=0.0, endpoint=False),
    "counterfactuals": ProbeKind(
        lambda call: measure_counterfactuals(call.backend.scheduler, call.plan, call.args.turn), ("samples", "turn")
    ),
    "scaling": ProbeKind(lambda call: measure_scaling(call.backend.scheduler, call.plan), ("samples",)),
    "paraphrase": ProbeKind(_paraphrase, ("samples", "paraphrases")),
    "forks": ProbeKind(_forks, ("base_step",), endpoint=False),
    "swap": ProbeKind(_swap, ("samples", "base_step"), endpoint=False),
    "transfer": ProbeKind(_transfer, ("samples", "base_step", "worlds", "splits", "dialogues"), endpoint=False),
    "endpoint": ProbeKind(lambda call: diagnose_endpoint(call.backend.scheduler, call.plan)),
}
OPTIONS = ("samples", "turn", "answer_marker", "paraphrases", "base_step", "worlds", "splits", "dialogues")
"""Options that only some kinds take."""


def run(args: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Measure and print the report; return 1 if it found a failure."""
    kind = check_probe(args)
    args.baseline = None
    check_arguments(args)
    config = evaluation_config(args, [*_settings(args, kind), *overrides])
    announce(f"Building the world {config.env.name} and its tasks ...")
    world = check_world(config, None)
    for split in args.splits or ():
        check_split(world, split, "--splits")
    plan = ProbePlan(
        world.tasks(args.split)[: args.tasks],
        SAMPLES if args.samples is None else args.samples,
        config.evaluation.temperatures[0],
        config.run.seed,
    )
    report, step = asyncio.run(_measure(kind, args, config, world, plan))
    console = make_console()
    console.print(report_table(report))
    for note in report.notes:
        print_text(console, note)
    if args.run is not None:
        path = RunFolder(args.run).probes / f"{args.kind}-step-{step:06d}.json"
        with replaced_file(path) as file:
            file.write(json.dumps(report.to_json(), indent=1).encode() + b"\n")
        print_line(console, f"Written: {path}")
    write_result_files(args, report.to_json(), [report.table])
    for path in filter(None, (args.json, args.markdown)):
        print_line(console, f"Written: {path}")
    return int(report.failed)


def _settings(args: argparse.Namespace, kind: ProbeKind) -> list[str]:
    """Return the options as settings."""
    temperature = kind.temperature if args.temperature is None else args.temperature
    given = {"splits": json.dumps([args.split]), "temperatures": f"[{temperature}]", "tasks": str(args.tasks)}
    return [word for name, value in given.items() for word in (f"--evaluation.{name}", value)]


def check_probe(args: argparse.Namespace) -> ProbeKind:
    """Return the kind. Raises UserError for an unknown one, or an option that it does not take."""
    kind = KINDS.get(args.kind)
    if kind is None:
        raise UserError(f"Unknown probe: {args.kind!r}.", f"Probes: {', '.join(KINDS)}.")
    if args.endpoint and not kind.endpoint:
        text = f"`ludus probe {args.kind}` needs the tokens of the model, which an endpoint does not return."
        raise UserError(text, "Use --run or --model PATH.")
    for name in OPTIONS:
        if vars(args)[name] is not None and name not in kind.options:
            option = name.replace("_", "-")
            raise UserError(f"`ludus probe {args.kind}` does not use --{option}.", "Remove it.")
    if args.step is not None and args.run is None:
        raise UserError("--step needs --run.", "Add --run, or remove --step.")
    if args.turn is not None and args.turn < 1:
        raise UserError(f"--turn is {args.turn}, but turns count from 1.", "Choose a turn from 1.")
    return kind


async def _measure(
    kind: ProbeKind, args: argparse.Namespace, config: Config, world: World, plan: ProbePlan
) -> tuple[ProbeReport, int]:
    """Return the report, and the training step of the probed model."""
    async with open_backend(args, config, world, args.step) as backend, closing(world):
        return await kind.measure(ProbeContext(args, config, world, backend, plan)), backend.step
