"""`ludus probe transfer`: two checkpoints in several worlds, and their loss on dialogues."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from ludus.cli.arguments import recipe_config
from ludus.cli.evaluate.eval import engine_backend
from ludus.cli.ui.load_run import LoadedRun
from ludus.cli.ui.terminal import make_console, print_text
from ludus.config.schema import Config
from ludus.envs.base import World
from ludus.envs.registry import build_world, check_sandbox, closing
from ludus.errors import UserError
from ludus.evaluation.evaluate import check_split
from ludus.evaluation.probes.common import ProbePlan, ProbeReport, roll_out, success_rates
from ludus.evaluation.probes.two_models import BeforeAfter, teacher_forced, transfer_report
from ludus.training.datasets.files import read_dialogues
from ludus.training.datasets.sources import dialogue_segments
from ludus.training.run.session import make_renderer

Pair = tuple[LoadedRun, LoadedRun]


async def measure_transfer(pair: Pair, plan: ProbePlan, args: argparse.Namespace) -> ProbeReport:
    """Return the report of the run's own world, its other --splits, --worlds and --dialogues."""
    own = pair[1].session
    configs = {Path(recipe).stem: recipe_config(recipe, (), ()) for recipe in args.worlds or ()}
    losses = _losses(pair, args.dialogues) if args.dialogues else None
    worlds = {own.world.name: await _success(pair, own.config, own.world, plan)}
    for split in args.splits or ():
        tasks = own.world.tasks(split)[: args.tasks]
        worlds[f"{own.world.name}, {split}"] = await _success(pair, own.config, own.world, replace(plan, tasks=tasks))
    for name, config in configs.items():
        world = build_world(config.env, config.rollout, config.sandbox)
        check_split(world, args.split)
        check_sandbox(config.sandbox, world)
        async with closing(world):
            tasks = world.tasks(args.split)[: args.tasks]
            worlds[name] = await _success(pair, config, world, replace(plan, tasks=tasks))
    return transfer_report(worlds, losses, plan.seed)


async def _success(pair: Pair, config: Config, world: World, plan: ProbePlan) -> BeforeAfter:
    """Return the success rates of both models in a world, with the rollout limits of `config`."""
    rates = []
    for opened in pair:
        renderer = make_renderer(config.env, opened.session.tokenizer)
        session = replace(opened.session, config=config, world=world, renderer=renderer)
        scheduler = engine_backend(world, replace(opened, session=session)).scheduler(plan.sampling)
        rates.append(success_rates(scheduler, await roll_out(scheduler, plan.requests(plan.samples))))
    return rates[0], rates[1]


def _losses(pair: Pair, path: Path) -> BeforeAfter:
    """Return the mean loss of the assistant tokens of each dialogue, in nats."""
    renderer = pair[1].session.renderer
    chains = [dialogue_segments(renderer, dialogue) for dialogue in read_dialogues(path)]
    limit = min(one.engine.context_tokens for one in pair)
    fitting = [chain for chain in chains if sum(len(part.tokens) for part in chain) <= limit]
    if len(fitting) < 2:
        raise UserError(f"{path} has {len(fitting)} dialogues of at most {limit} tokens.", "It needs at least 2.")
    if len(fitting) < len(chains):
        print_text(make_console(), f"{len(chains) - len(fitting)} dialogues exceed {limit} tokens and are left out.")
    before, after = (
        {str(i): -float(teacher_forced(one.session.model, chain).logprobs.mean()) for i, chain in enumerate(fitting)}
        for one in pair
    )
    return before, after
