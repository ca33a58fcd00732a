"""Measure the effect of negatives in fine-tuning on hallucinated and on missing calls, in the world `functions`.

    python benchmarks/negatives.py --page docs/use/stages.md

Two arms with equal steps, batches and seeds: the world's demonstrations of all classes, and those without the
class `negatives`. A call is hallucinated if no call is right for the task; a call is missing if one is right
and the episode has none. Greedy, on the split `test`. Runs are kept in --folder and not repeated.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from cold_start import cold_start
from correction import SEEDS, compare, over
from ludus.cli.evaluate.eval import engine_backend
from ludus.cli.ui.load_run import open_weights
from ludus.config.load import load_config
from ludus.config.schema import Config
from ludus.evaluation.evaluate import EvaluationPlan, evaluate
from ludus.rewards.base import truth_of
from ludus.rollouts.scheduler import Episode, SamplingPlan
from ludus.worlds.functions.grader import Truth

ARMS = {"with negatives": {}, "without negatives": {"sft.classes.negatives": 0}}
SHOWN = {
    "hallucinated": "calls where none is right",
    "decline": "of these: no tool fits",
    "ask": "an argument is missing",
    "answer": "the answer is in the request",
    "refused": "no call where one is right",
    "called": "success where a call is right",
    "solved": "success",
}
Rates = Mapping[str, float]


def settings(args: argparse.Namespace, arm: str, seed: int) -> list[str]:
    """Return the settings of a cold start as command-line words."""
    given = {
        "env.settings.levels": "[1, 2]",
        "env.settings.num_tasks": 4 * args.tasks,
        "env.settings.flaw_rate": 0,
        "model.init.hidden_size": 64,
        "model.init.intermediate_size": 128,
        "model.init.num_layers": 2,
        "sft.steps": args.steps,
        "sft.batch_size": 16,
        "sft.microbatch_tokens": 4096,
        "run.seed": seed,
        **ARMS[arm],
    }
    return [word for key, value in given.items() for word in (f"--{key}", str(value))]


def run(args: argparse.Namespace, arm: str, seed: int) -> Rates:
    """Return the rates of one seed of an arm; measure them if missing."""
    kept = args.folder / f"{arm.replace(' ', '-')}-{args.steps}-seed{seed}.json"
    if not kept.is_file():
        folder, words = kept.with_suffix(""), settings(args, arm, seed)
        weights = cold_start("functions", folder, tuple(words))
        config = load_config("functions", [*words, *weights, "--run.threads", "1"])
        kept.write_text(json.dumps(asyncio.run(measured(config, args.tasks))))
        shutil.rmtree(folder)
    found: Rates = json.loads(kept.read_text())
    return found


async def measured(config: Config, num_tasks: int) -> Rates:
    """Return the rates of greedy episodes on the first tasks of the split `test`."""
    opened = await open_weights(config)
    player = engine_backend(opened.session.world, opened)
    plan = EvaluationPlan("test", num_tasks, 1, 0.0, 0)
    try:
        scheduler = player.scheduler(SamplingPlan("evaluate", 0.0, 0))
        _, episodes = await evaluate(scheduler, player.world.tasks("test"), plan)
    finally:
        await player.close()
    return rates(episodes)


def rates(episodes: Sequence[Episode]) -> Rates:
    """Return the rates of `SHOWN`, each over the episodes that it applies to."""
    right = [truth_of(one.task, Truth).right for one in episodes]
    calls = [any(m.get("tool_calls") for m in one.trajectory.messages) for one in episodes]
    solved = [one.trajectory.rewards.get("solved", 0.0) for one in episodes]
    found = {"solved": mean(solved)}
    where = {name: [i for i, own in enumerate(right) if own == name] for name in dict.fromkeys(right)}
    for name in ("decline", "ask", "answer"):
        found[name] = mean([float(calls[i]) for i in where[name]])
    found["hallucinated"] = mean([float(c) for c, own in zip(calls, right, strict=True) if own != "call"])
    found["refused"] = mean([float(not calls[i]) for i in where["call"]])
    found["called"] = mean([solved[i] for i in where["call"]])
    return found


def mean(values: Sequence[float]) -> float:
    """Return the arithmetic mean."""
    return sum(values) / len(values)


def report(found: Mapping[str, Sequence[Rates]], args: argparse.Namespace) -> str:
    """Return a table with a row for each rate, and the difference paired over seeds."""
    with_, without = (found[arm] for arm in ARMS)
    lines = [f"| % of tasks | {' | '.join(ARMS)} | difference, in points |", "|---|---:|---:|---:|"]
    for name, words in SHOWN.items():
        values = [[one[name] for one in arm] for arm in (with_, without)]
        gaps = [a - b for a, b in zip(*values, strict=True)]
        cells = [over(one, 100.0, "") for one in values]
        lines.append(f"| {words} | {' | '.join(cells)} | {over(gaps, 100.0, '+')} |")
    return "\n".join(lines) + (
        f"\n\nLevels 1 and 2 of functions, {args.steps} steps of 16 dialogues from nothing, {args.tasks} "
        f"tasks of `test`, greedy, {len(SEEDS)} seeds with 95 % intervals over seeds."
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Train and measure the missing runs, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path(".bench/negatives"))
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--tasks", type=int, default=200, help="tasks of the split `test`")
    compare(parser, "negatives", ARMS, run, report, arguments)


if __name__ == "__main__":
    main()
