"""Predict step time, idle shares and staleness for other numbers of engines, modes and sizes."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import product

from ludus.cli.ui.fitted_table import FittedTable, TableColumn, make_table
from ludus.cli.ui.terminal import make_console, print_line, print_text
from ludus.errors import UserError
from ludus.simulator.costs import Costs, EngineCost, EpisodeShape, LearnerCost, RunLayout, ToolCost
from ludus.simulator.fit import fit, layout_of
from ludus.simulator.simulate import SimRun, simulate
from ludus.training.run.run_dir import RunFolder

COST_OPTIONS = {
    "engine": {"pass_s": "pass_s", "sequence_s": "sequence_s", "read_s": "read_s", "slots": "slots"},
    "learner": {"learn_s": "step_s", "learn_token_s": "token_s"},
    "tool": {"tool_median_s": "median_s", "tool_spread": "spread", "stragglers": "stragglers", "slow": "slow"},
    "episode": {"turns": "turns", "action": "action", "read": "read", "context": "context"},
    "": {"sync_s": "sync_s", "transfer_s": "transfer_s", "overlap": "overlap"},
}
"""Options of the cost model: field by option, for each record of `Costs` and for `Costs` itself."""
REQUIRED = ("pass_s", "learn_token_s", "turns", "action")
LAYOUT = ("groups", "members", "steps", "max_staleness", "learners", "seed")


def run(args: argparse.Namespace, overrides: Sequence[str]) -> None:
    """Print the costs and the table."""
    costs, layout, source, warnings = read_costs(args)
    console = make_console()
    print_line(console, f"Costs {source}:")
    for line in cost_lines(costs):
        print_text(console, f"  {line}")
    for warning in warnings:
        print_text(console, f"Warning: {warning}")
    if args.in_flight < 0:
        raise UserError(f"--in-flight is {args.in_flight}.", "Set 0 or more.")
    runs = []
    for engines, mode in product(args.engines, args.modes):
        one = replace(layout, mode=mode, engines=engines, in_flight=0, concurrency=0)
        one = replace(one, in_flight=min(one.max_in_flight, engines * args.in_flight))
        runs.append(simulate(costs, one))
    console.print(_plan_table(runs))


def read_costs(args: argparse.Namespace) -> tuple[Costs, RunLayout, str, list[str]]:
    """Return costs and layout of runs or from options, a description of their origin, and warnings."""
    options = {name: value for name, value in vars(args).items() if value is not None}
    warnings: list[str] = []
    if args.runs:
        folders = [RunFolder(path) for path in args.runs]
        for folder in folders:
            folder.check()
        found = fit(folders)
        costs, layout, warnings = found.costs, layout_of(folders[-1].load_config()), found.warnings
        errors = f"engine {found.engine_error:.0%}, learner {found.learner_error:.0%}"
        source = f"fitted to {found.num_steps} steps (rms error: {errors})"
    else:
        if missing := [f"--{name.replace('_', '-')}" for name in REQUIRED if name not in options]:
            hint = "Name a run folder, or set these options; `ludus plan --help` explains them."
            raise UserError(f"Missing: a run to fit the costs to, or {', '.join(missing)}.", hint)
        costs = Costs(EngineCost(1.0, 0.0), LearnerCost(0.0, 0.0), ToolCost(), EpisodeShape(1.0, 1.0))
        layout, source = RunLayout(), "as given"
    records = asdict(costs)
    for record, fields in COST_OPTIONS.items():
        given = {field: options[name] for name, field in fields.items() if name in options}
        (records[record] if record else records).update(given)
    nested = {"engine": EngineCost, "learner": LearnerCost, "tool": ToolCost, "episode": EpisodeShape}
    costs = Costs(**records | {name: kind(**records[name]) for name, kind in nested.items()})
    return costs, replace(layout, **{name: options[name] for name in LAYOUT if name in options}), source, warnings


def cost_lines(costs: Costs) -> list[str]:
    """Return lines that describe the cost model."""
    engine, learner, tool, shape = costs.engine, costs.learner, costs.tool, costs.episode
    a_pass = f"a pass {1e3 * engine.pass_s:.3g} ms and {1e3 * engine.sequence_s:.3g} ms per sequence"
    speeds = ", ".join(f"{n}: {n / engine.seconds(n):,.0f}" for n in (1, 8, 64) if n <= engine.slots)
    slow = f"{tool.stragglers:.1%} take {tool.slow:.0f} medians"
    a_step = f"a step {learner.step_s:.3g} s and {1e3 * learner.token_s:.3g} ms per token"
    overlapped = f", and {costs.transfer_s:.3g} s during the next step" if costs.transfer_s else ""
    return [
        f"engine: {a_pass}, prefill {1e3 * engine.read_s:.3g} ms per token",
        f"engine: sampled tokens/s by running sequences: {speeds}",
        f"learner: {a_step}; a weight transfer {costs.sync_s:.3g} s{overlapped}",
        f"tools: median {tool.median_s:.3g} s, spread {tool.spread:.2f}, {slow}; mean {tool.mean_s:.3g} s",
        f"episodes: {shape.turns:.1f} turns of {shape.action:.0f} tokens, {shape.tokens:.0f} tokens in total",
    ]


def _plan_table(runs: Sequence[SimRun]) -> FittedTable:
    ranks = {"learner idle": 1, "engines idle": 1, "in flight": 3, "mean age": 4, "oldest": 4}
    names = ("step, s", "episodes/s", "learner idle", "engines idle", "in flight", "mean age", "oldest")
    engines, *numbers = (TableColumn(name, ranks.get(name, 0), right=True) for name in ("engines", *names))
    rows = []
    for one in runs:
        speed = (one.layout.engines, one.layout.mode, f"{one.step_s:.3g}", f"{one.episodes_per_s:.3g}")
        idle = (f"{one.learner_idle:.0%}", f"{one.engine_idle:.0%}", f"{one.middle[-1].in_flight:,}")
        rows.append((*speed, *idle, f"{one.age:.1f}", one.oldest, one.bottleneck))
    title = "Simulated: means over the middle of each run"
    return make_table((engines, "mode", *numbers, TableColumn("bottleneck", 2)), rows, title)
