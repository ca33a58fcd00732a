"""Measure what summaries are worth in episodes that exceed the context: the recipe archive in three arms.

    python benchmarks/long_episodes.py

`trained`: the recipe. `masked`: the tokens of summaries are not in the loss. `truncated`: no summaries, so that an
episode ends at `rollout.max_seq_len`. All arms start from the packaged cold start and have the same seeds, tasks and
number of episodes. The trained models are also evaluated on archives of --long documents. Runs are kept in --folder
and not repeated.
Differences are paired over tasks (bootstrap over tasks of the mean over seeds) and over seeds (t-distribution).
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from learning import by_task, over_seeds
from ludus.diagnostics.trackers import read_metrics
from ludus.evaluation.evaluate import Evaluation, load_evaluation
from ludus.evaluation.stats import paired_difference, t_interval

ARMS = {
    "trained": (),
    "masked": ("--rollout.context.train_summary", "false"),
    "truncated": ("--rollout.context.max_tokens", "0"),
}
SAMPLINGS = {"greedy": "greedy", "t1": "sampled at 1"}
Found = Mapping[str, Sequence[Evaluation]]


def ludus(path: Path, *words: str) -> None:
    """Run a command that writes to a folder, unless it did."""
    if not (path / "done").is_file():
        fixed = ("--run.threads", "1") if words[0] == "train" else ("--out", str(path), "--run.threads", "1")
        subprocess.run([sys.executable, "-m", "ludus", *words, *fixed], check=True, stdout=subprocess.DEVNULL)
        (path / "done").touch()


def train(args: argparse.Namespace, arm: str, seed: int) -> Path:
    """Train one seed of an arm, or resume its run; return the run folder."""
    path = args.folder / f"{arm}-seed{seed}"
    if (path / "config.toml").is_file():
        ludus(path, "train", "--resume", str(path))
        return path
    words = ["--run.dir", str(path), "--run.seed", str(seed), "--run.save_rollouts", "false"]
    words += ["--evaluation.tasks", str(args.tasks), "--evaluation.tasks_before", "0", *ARMS[arm]]
    ludus(path, "train", "archive", *words, "--training.steps", str(args.steps))
    return path


def evaluate(path: Path, *words: str) -> Path:
    """Evaluate a run or a model into a folder."""
    ludus(path, "eval", *words)
    return path


def last(path: Path, sampling: str) -> Evaluation:
    """Return the last evaluation in a folder."""
    return load_evaluation(sorted(path.rglob(f"*-test-{sampling}.json"))[-1])


def tokens(path: Path) -> float:
    """Return the mean number of tokens that an episode of a run sampled."""
    lengths = [row.metrics["response_length/mean"] for row in read_metrics(path / "metrics.jsonl")]
    return sum(lengths) / len(lengths)


def gap(found: Sequence[Evaluation], other: Sequence[Evaluation]) -> str:
    """Return the cells of a difference in points: paired over tasks, and over seeds."""
    tasks = paired_difference(by_task(list(found)), by_task(list(other)))
    low, high = 100 * tasks.interval.low, 100 * tasks.interval.high
    seeds = t_interval([100 * (a.rate - b.rate) for a, b in zip(found, other, strict=True)])
    return (
        f"{100 * tasks.difference:+.1f} [{low:+.1f}, {high:+.1f}] | "
        f"{seeds.mean:+.1f} [{seeds.interval.low:+.1f}, {seeds.interval.high:+.1f}]"
    )


def report(before: Found, after: Found, sampled: Mapping[str, float]) -> str:
    """Return a table with a row for each arm, with the gain and the difference to `trained`."""
    names = "arm", "cold start", "by seed", "over seeds", "gain, over tasks", "over seeds"
    names += "less `trained`, over tasks", "over seeds", "tokens per episode"
    lines = [f"| {' | '.join(names)} |", "|---" * len(names) + "|"]
    for arm, found in after.items():
        rates = ", ".join(f"{100 * one.rate:.1f}" for one in found)
        less = " | " if arm == "trained" else gap(found, after["trained"])
        lines.append(
            f"| {arm} | {100 * before[arm][0].rate:.1f} | {rates} | {over_seeds(list(found))} "
            f"| {gap(found, before[arm])} | {less} | {sampled[arm]:,.0f} |"
        )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Train and evaluate what is missing, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path(".bench/long_episodes"))
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--tasks", type=int, default=200, help="tasks of the split `test`")
    parser.add_argument("--long", type=int, default=300, help="documents of the longest archives")
    parser.add_argument("--long-tasks", type=int, default=30)
    args = parser.parse_args(arguments)
    wide = ("--evaluation.tasks", str(args.tasks))
    begun = {
        name: evaluate(args.folder / f"before-{name}", "archive", *ARMS[arm], *wide)
        for name, arm in {"rewritten": "trained", "truncated": "truncated"}.items()
    }
    paths = {(arm, seed): train(args, arm, seed) for seed in range(args.seeds) for arm in ARMS}
    by_arm = {arm: [paths[arm, seed] for seed in range(args.seeds)] for arm in ARMS}
    sampled = {arm: sum(map(tokens, found)) / args.seeds for arm, found in by_arm.items()}
    for sampling, words in SAMPLINGS.items():
        after = {arm: [last(path, sampling) for path in found] for arm, found in by_arm.items()}
        before = {arm: [last(begun.get(arm, begun["rewritten"]), sampling)] * args.seeds for arm in ARMS}
        print(f"\n{args.tasks} tasks of `test`, {words}:\n\n{report(before, after, sampled)}")
    documents = ("--env.settings.num_documents", str(args.long), "--rollout.max_turns", str(args.long + 20))
    documents += ("--evaluation.tasks", str(args.long_tasks), "--evaluation.temperatures", "[0.0]")
    cold = last(evaluate(args.folder / "long-cold", "archive", *documents), "greedy")
    print(f"\n{args.long} documents, {args.long_tasks} tasks, greedy: cold start {100 * cold.rate:.1f}")
    for arm in ("trained", "masked"):
        made = [evaluate(args.folder / f"long-{p.name}", "--run", str(p), *documents) for p in by_arm[arm]]
        found = [last(path, "greedy") for path in made]
        print(f"{arm}: {over_seeds(found)}, gain {gap(found, [cold] * args.seeds)}")


if __name__ == "__main__":
    main()
