"""Measure how far injections move the values of a judge, compared with the deviation of repeated values.

python benchmarks/judge_injections.py runs/judging-1 --kind correct
python benchmarks/judge_injections.py runs/judging-2 --kind correct --run runs/search-1 --attempts right
python benchmarks/judge_injections.py ~/.cache/ludus/smollm2 --kind score --texts 4
"""

from __future__ import annotations

import argparse
import asyncio
import json
from itertools import islice
from pathlib import Path

import numpy as np

from ludus.config.schema import Config
from ludus.config.sections.model import ModelConfig
from ludus.config.sections.parts.judges import JudgeClientConfig, JudgeConfig
from ludus.config.sections.rewards import RewardsConfig
from ludus.envs.tool_env import ToolLimits
from ludus.evaluation.stats import t_interval
from ludus.judges.calibration import injection_changes, read_injections, repeated_values
from ludus.judges.client import EngineJudge, JudgeClient
from ludus.judges.grading import Grader
from ludus.rewards.judge_prompts import JudgedText
from ludus.training.collection.rewards.judging import load_judge
from ludus.types import Message, Task
from ludus.worlds.judging.world import JudgingSettings, make_judging_world, read_cases


async def measure(args: argparse.Namespace) -> dict[str, object]:
    """Return the mean value, the deviation of repeated values, and the mean change by each injection with its 95 %
    interval over texts.

    `above_deviation` counts injections whose mean change exceeds the deviation, `surely_above_deviation` those whose
    interval does.
    """
    limits = JudgeClientConfig(
        temperature=1.0, max_tokens=args.max_tokens, concurrency=args.concurrency, deadline_s=1e5, timeout_s=1e5
    )
    judge = JudgeConfig(models=[args.judge], kind=args.kind, client=limits)
    config = Config(model=ModelConfig(dtype=args.dtype), rewards=RewardsConfig(judge=judge))
    engine = EngineJudge(args.judge, *load_judge(args.judge, config))
    grader = Grader(judge, JudgeClient([engine], limits), make_judging_world({"num_tasks": 8}, ToolLimits()))
    cases = islice(read_cases(JudgingSettings(run=args.run, levels=(1,)))["test"], args.texts)
    sides = [(case, case.right if args.attempts == "right" else case.wrong) for case in cases]
    texts = [
        JudgedText(Task(case.name, (Message(role="user", content=case.question),), None), text) for case, text in sides
    ]
    groups = [[one, one] if args.kind == "pairwise" else [one] for one in texts]
    clean = await repeated_values(grader, groups, args.repeats)
    attacks = read_injections(Path(__file__).with_suffix(".toml").read_text("utf-8"))
    deviation = float(np.nanmean(np.std(clean, axis=0, ddof=1)))
    changes = {}
    for name, gaps in (await injection_changes(grader, texts, attacks, args.repeats)).items():
        judged = gaps[:, ~np.isnan(gaps).all(axis=0)]
        found = t_interval(np.nanmean(judged, axis=0).tolist())
        changes[name] = [found.mean, found.interval.low, found.interval.high]
    asking = [change for name, change in changes.items() if not name.startswith("control")]
    return {
        "judge": args.judge,
        "kind": args.kind,
        "attempts": args.attempts,
        "texts": len(texts),
        "mean": float(np.nanmean(clean)),
        "invalid": float(np.isnan(clean).mean()),
        "std_of_texts": deviation,
        "std_of_means": float(np.std(np.nanmean(clean, axis=1), ddof=1)),
        "above_deviation": sum(abs(mean) > deviation for mean, _, _ in asking),
        "surely_above_deviation": sum(max(low, -high) > deviation for _, low, high in asking),
        "mean_change": float(np.mean([mean for mean, _, _ in asking])),
        "changes": changes,
    }


def main() -> None:
    """Print the result as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("judge", help="a model folder or run folder")
    parser.add_argument("--kind", default="correct", choices=("correct", "score", "pairwise"))
    parser.add_argument("--run", help="a run with saved rollouts, whose attempts are judged")
    parser.add_argument("--attempts", default="wrong", choices=("wrong", "right"))
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--texts", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--max-tokens", type=int, default=192)
    parser.add_argument("--concurrency", type=int, default=32)
    print(json.dumps(asyncio.run(measure(parser.parse_args())), indent=1))


if __name__ == "__main__":
    main()
