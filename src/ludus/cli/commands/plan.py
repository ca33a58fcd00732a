"""What a run would do with other engines, modes and sizes: step time, idle shares and staleness, simulated.

    ludus plan runs/search-1 --engines 1 8 64              costs fitted to a run's own timings
    ludus plan runs/a runs/b --modes async --learners 8    to several, which tells costs apart better
    ludus plan --pass-s 0.02 --learn-token-s 1e-5 --turns 6 --action 200 --engines 1000

The simulation plays the stream, the admission and the scheduler of training on a clock of its own; beside it
stands the closed form, and what it says that the step waits for. A number that is given replaces a fitted
one. docs/use/planning.md says what the model holds and what not.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ludus.cli.arguments import check_run, no_settings
from ludus.errors import UserError

if TYPE_CHECKING:
    from rich.table import Table

    from ludus.planning.costs import Costs, RunLayout
    from ludus.planning.simulate import SimRun

NUMBERS = (
    ("pass_s", "engine", "pass_s", "seconds of a forward pass, however many sequences it has"),
    ("sequence_s", "engine", "sequence_s", "seconds more for each sequence in it"),
    ("read_s", "engine", "read_s", "seconds to read a token of context"),
    ("slots", "engine", "slots", "sequences that run at once in an engine"),
    ("learn_s", "learner", "step_s", "seconds of a learner's step, whatever its size"),
    ("learn_token_s", "learner", "token_s", "seconds more for each token of the batch, on one learner"),
    ("tool_median_s", "tool", "median_s", "median seconds of a call"),
    ("tool_spread", "tool", "spread", "spread of its logarithm"),
    ("stragglers", "tool", "stragglers", "share of slow calls"),
    ("slow", "tool", "slow", "medians that a slow call takes"),
    ("turns", "episode", "turns", "turns of an episode"),
    ("action", "episode", "action", "tokens of a turn"),
    ("read", "episode", "read", "tokens that the engine reads before a turn"),
    ("context", "episode", "context", "tokens of prompt and observations in an episode"),
    ("sync_s", "", "sync_s", "seconds of a transfer of weights"),
    ("transfer_s", "", "transfer_s", "seconds more of it, beside the next step where training is async"),
    ("overlap", "", "overlap", "speed of learner and engine while both work: 1, or 0.5 on one core"),
)
"""Options of the cost model: name, record, field, meaning."""
NEEDED = ("pass_s", "learn_token_s", "turns", "action")
LAYOUT = ("groups", "members", "steps", "max_staleness", "learners", "seed")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's own arguments."""
    parser.add_argument("runs", metavar="RUN", nargs="*", type=Path, help="run folders to fit the costs to")
    parser.add_argument("--engines", type=int, nargs="+", default=[1, 8, 64], help="numbers of engines")
    parser.add_argument("--modes", nargs="+", default=["sync", "one_step", "async"])
    for name in LAYOUT:
        parser.add_argument(f"--{name.replace('_', '-')}", type=int)
    parser.add_argument("--in-flight", type=int, default=0, help="episodes for each engine; 0 measures")
    for name, _, _, meaning in NUMBERS:
        kind = int if name == "slots" else float
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, metavar="N", help=meaning)


def run(args: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Print the costs and the table."""
    from ludus.cli.ui.terminal import make_console, say
    from ludus.planning.simulate import simulate

    no_settings(overrides, "plan")
    costs, setup, source, doubts = what_is_asked(args)
    console = make_console()
    say(console, f"Costs {source}:")
    for line in cost_lines(costs):
        say(console, f"  {line}")
    for doubt in doubts:
        say(console, f"Warning: {doubt}")
    runs = [simulate(costs, one) for one in layouts(args, setup)]
    console.print(plan_table(costs, runs))
    return 0


def what_is_asked(args: argparse.Namespace) -> tuple[Costs, RunLayout, str, list[str]]:
    """Costs and layout, of runs or of given numbers; where the costs are from, and what is to be doubted."""
    from ludus.planning.costs import Costs, EngineCost, EpisodeShape, LearnerCost, RunLayout, ToolCost
    from ludus.planning.fit import fit, run_config, setup_of
    from ludus.training.run.run_dir import RunFolder

    given = {name: value for name, value in vars(args).items() if value is not None}
    doubts: list[str] = []
    if args.runs:
        folders = [RunFolder(path) for path in args.runs]
        for folder in folders:
            check_run(folder)
        found = fit(folders)
        records, setup = asdict(found.costs), setup_of(run_config(folders[-1]))
        doubts = found.doubts
        source = (
            f"fitted to {found.num_steps} steps (rms error: engine {found.engine_error:.0%}, learner "
            f"{found.learner_error:.0%})"
        )
    else:
        if missing := [f"--{name.replace('_', '-')}" for name in NEEDED if name not in given]:
            raise UserError(
                f"There is no run to fit the costs to, and no {', '.join(missing)}.",
                "Name a run folder, or give these numbers; `ludus plan --help` explains them.",
            )
        empty = {"pass_s": 0.0, "sequence_s": 0.0, "read_s": 0.0, "slots": 128}
        records = {"engine": empty, "learner": {"step_s": 0.0, "token_s": 0.0}, "tool": asdict(ToolCost())}
        records |= {"episode": {"turns": 1.0, "action": 1.0}, "sync_s": 0.0, "overlap": 1.0, "transfer_s": 0.0}
        setup, source = RunLayout(), "as given"
    for name, record, field, _ in NUMBERS:
        if name in given:
            (records[record] if record else records)[field] = given[name]
    costs = Costs(
        EngineCost(**records["engine"]),
        LearnerCost(**records["learner"]),
        ToolCost(**records["tool"]),
        EpisodeShape(**records["episode"]),
        records["sync_s"],
        records["overlap"],
        records["transfer_s"],
    )
    return costs, replace(setup, **{name: given[name] for name in LAYOUT if name in given}), source, doubts


def layouts(args: argparse.Namespace, setup: RunLayout) -> list[RunLayout]:
    """One for each number of engines and each mode. Raises UserError for a number below 0."""
    if args.in_flight < 0:
        raise UserError(f"--in-flight is {args.in_flight}.", "Give 0 or more.")
    found = []
    for engines in args.engines:
        for mode in args.modes:
            one = replace(setup, mode=mode, engines=engines, in_flight=0, concurrency=0)
            found.append(replace(one, in_flight=min(one.most, engines * args.in_flight)))
    return found


def cost_lines(costs: Costs) -> list[str]:
    """The cost model in words."""
    engine, learner, tool, shape = costs.engine, costs.learner, costs.tool, costs.episode
    a_pass, more = f"a pass {1e3 * engine.pass_s:.3g} ms", f"{1e3 * engine.sequence_s:.3g} ms a sequence"
    speeds = ", ".join(f"{n}: {engine.speed(n):,.0f}" for n in (1, 8, 64) if n <= engine.slots)
    slow = f"{tool.stragglers:.1%} take {tool.slow:.0f} medians"
    a_step = f"a step {learner.step_s:.3g} s and {1e3 * learner.token_s:.3g} ms a token"
    beside = f", and {costs.transfer_s:.3g} s beside the next step" if costs.transfer_s else ""
    return [
        f"engine: {a_pass} and {more}, a token read {1e3 * engine.read_s:.3g} ms",
        f"engine: sampled tokens/s by sequences at once: {speeds}",
        f"learner: {a_step}; a transfer of weights {costs.sync_s:.3g} s{beside}",
        f"tools: median {tool.median_s:.3g} s, spread {tool.spread:.2f}, {slow}; mean {tool.mean_s:.3g} s",
        f"episodes: {shape.turns:.1f} turns of {shape.action:.0f} tokens, {shape.tokens:.0f} tokens in all",
    ]


def plan_table(costs: Costs, runs: Sequence[SimRun]) -> Table:
    """One row a layout: what the simulation says, and the closed form of its step."""
    from rich.table import Table

    from ludus.planning.estimate import estimate

    table = Table(title="Simulated, the middle of each run")
    table.add_column("engines", justify="right")
    table.add_column("mode")
    columns = ("step, s", "episodes/s", "learner idle", "engines idle", "in flight", "mean age", "oldest")
    for name in (*columns, "bound, s"):
        table.add_column(name, justify="right")
    table.add_column("waits for")
    for one in runs:
        bound = estimate(costs, one.setup)
        table.add_row(
            str(one.setup.engines),
            one.setup.mode,
            f"{one.step_s:.3g}",
            f"{one.episodes_per_s:.3g}",
            f"{one.learner_idle:.0%}",
            f"{one.engine_idle:.0%}",
            f"{one.middle[-1].in_flight:,}",
            f"{one.age:.1f}",
            str(one.oldest),
            f"{bound.step_s:.3g}",
            bound.binds,
        )
    return table
