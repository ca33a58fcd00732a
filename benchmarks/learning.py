"""Measure learning over several seeds: gains, the effect of the observation mask, and training modes.

    python benchmarks/learning.py learns      # 3 seeds of --recipe: cold start against trained, and its curve
    python benchmarks/learning.py mask        # observations masked or in the loss: 3 learning rates x 3 seeds
    python benchmarks/learning.py modes       # synchronous, one step behind and asynchronous: 3 seeds each
    python benchmarks/learning.py modes --only sync async-2 --seeds 10      # some modes, with more seeds

Runs are kept in --folder and not repeated; an interrupted run is resumed. Two runs of one compute thread each
run in parallel. Intervals over seeds use the t-distribution. The paired intervals of the ablation are over
tasks (bootstrap), averaged over seeds; those of the modes are over tasks and over seeds, and the verdict uses
the lower bound of both.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from cold_start import cold_start
from ludus.evaluation.evaluate import Evaluation, load_evaluation
from ludus.evaluation.stats import Estimate, PairedDifference, paired_difference, t_interval

RATES = ("1e-4", "3e-4", "1e-3")
STREAMED = ("--training.mode", "async", "--staleness.max_concurrent_rollouts", "128", "--staleness.max_staleness")
MODES = {
    "sync": ("--training.mode", "sync"),
    "one_step": ("--training.mode", "one_step"),
    "async-2": (*STREAMED, "2"),
    "async-5": (*STREAMED, "5"),
    "async-8": (*STREAMED, "8"),
}
"""Arms of `modes`: `async` with the default bound on staleness, with that of `benchmarks/async.py`, and with the
bound that the concurrent rollouts just reach."""
BELOW = 5.0
"""Points of held-out success that a mode may lose against `sync`."""


@dataclass(frozen=True)
class Arm:
    """A name and the settings of its runs."""

    name: str
    settings: tuple[str, ...] = ()


def run(folder: Path, arm: Arm, seed: int, common: tuple[str, ...], recipe: str) -> Path:
    """Train one arm with one seed, or resume its run; return the run folder."""
    path = folder / f"{arm.name}-seed{seed}"
    command = [sys.executable, "-m", "ludus", "train"]
    if (path / "config.toml").is_file():
        command += ["--resume", str(path)]
    else:
        fixed = ("--run.dir", str(path), "--run.seed", str(seed), "--run.threads", "1")
        fixed += ("--evaluation.tasks_before", "1000000")  # as many as after training
        command += [recipe, *fixed, "--run.save_rollouts", "false", *common, *arm.settings]
    if not list(path.glob("done")):
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        (path / "done").touch()
    return path


def run_all(
    args: argparse.Namespace, arms: list[Arm], common: tuple[str, ...], recipe: str = "search"
) -> dict[str, list[Path]]:
    """Run all arms seed by seed, so that an interrupted benchmark has complete comparisons."""
    jobs = [(arm, seed) for seed in range(args.seeds) for arm in arms]
    with ThreadPoolExecutor(args.parallel) as pool:
        paths = list(pool.map(lambda job: run(args.folder, job[0], job[1], common, recipe), jobs))
    found: dict[str, list[Path]] = {arm.name: [] for arm in arms}
    for (arm, _), path in zip(jobs, paths, strict=True):
        found[arm.name].append(path)
    return found


def results(path: Path, which: str) -> list[Evaluation]:
    """Return the evaluations of whole splits before (`first`) or after (`last`) training."""
    found = [load_evaluation(file) for file in sorted((path / "evaluations").glob("step-*.json"))]
    whole = [r for r in found if r.plan.split in ("test", "composition")]
    step = min(r.plan.step for r in whole) if which == "first" else max(r.plan.step for r in whole)
    return [r for r in whole if r.plan.step == step]


def label(result: Evaluation) -> str:
    """Return the split and the sampling of an evaluation."""
    how = "greedy" if result.plan.temperature == 0 else f"sampled at {result.plan.temperature:g}"
    return f"{result.plan.split}, {how}"


def report_learning(paths: list[Path]) -> None:
    """Print the success before and after training by seed, and the gain with its interval over seeds."""
    before, after = [results(p, "first") for p in paths], [results(p, "last") for p in paths]
    print("| tasks | cold start, by seed | trained, by seed | gain in points, 95 % over seeds |")
    print("|---|---|---|---|")
    for i, result in enumerate(before[0]):
        old, new = [r[i] for r in before], [r[i] for r in after]
        gains = [100 * (n.rate - o.rate) for o, n in zip(old, new, strict=True)]
        gain = t_interval(gains)
        print(
            f"| {label(result)} | {cells(old)} | {cells(new)} | "
            f"{gain.mean:+.1f} [{gain.interval.low:+.1f}, {gain.interval.high:+.1f}] |"
        )


def report_curve(paths: list[Path]) -> None:
    """Print the greedy success on `test` over seeds during training, on the tasks of intermediate evaluations."""
    found = [[load_evaluation(file) for file in sorted((p / "evaluations").glob("step-*.json"))] for p in paths]
    rows = [[r for r in one if r.plan.split == "test" and r.plan.temperature == 0] for one in found]
    print("\n| step | tasks | `test`, greedy, over seeds |\n|---:|---:|---|")
    for at_step in zip(*rows, strict=True):
        print(f"| {at_step[0].plan.step} | {len(at_step[0].task_ids)} | {over_seeds(list(at_step))} |")


def cells(found: list[Evaluation]) -> str:
    """Return the rates with 95 % intervals over tasks, one per seed."""
    return ", ".join(f"{100 * r.rate:.1f} [{100 * r.interval.low:.1f}, {100 * r.interval.high:.1f}]" for r in found)


def report_mask(paths: dict[str, list[Path]]) -> None:
    """Print both arms at each learning rate, and the paired difference."""
    print("| tasks | learning rate | masked | observations in the loss | masked - unmasked, paired over tasks |")
    print("|---|---|---|---|---|")
    for i, first in enumerate(results(paths[f"masked-{RATES[0]}"][0], "last")):
        for rate in RATES:
            masked = [results(p, "last")[i] for p in paths[f"masked-{rate}"]]
            unmasked = [results(p, "last")[i] for p in paths[f"unmasked-{rate}"]]
            gap = paired_difference(by_task(masked), by_task(unmasked))
            low, high = 100 * gap.interval.low, 100 * gap.interval.high
            print(
                f"| {label(first)} | {rate} | {over_seeds(masked)} | {over_seeds(unmasked)} | "
                f"{100 * gap.difference:+.1f} [{low:+.1f}, {high:+.1f}] |"
            )


@dataclass(frozen=True)
class LessSync:
    """Held-out success minus that of `sync`: in points over seeds, and as a fraction paired over tasks."""

    seeds: Estimate
    tasks: PairedDifference

    @property
    def verdict(self) -> str:
        """Return `yes` if both intervals are above `-BELOW` points, `no` if both are below it, else `not shown`."""
        over_tasks, over_seeds = self.tasks.interval, self.seeds.interval
        if min(100 * over_tasks.low, over_seeds.low) >= -BELOW:
            return "yes"
        return "no" if max(100 * over_tasks.high, over_seeds.high) < -BELOW else "not shown"


def less_sync(found: list[Evaluation], plain: list[Evaluation]) -> LessSync:
    """Compare a mode's evaluations with those of `sync`, with the same seeds in the same order."""
    seeds = t_interval([100 * (a.rate - b.rate) for a, b in zip(found, plain, strict=True)])
    return LessSync(seeds, paired_difference(by_task(found), by_task(plain)))


def report_modes(paths: dict[str, list[Path]]) -> None:
    """Print the held-out success after the same number of trained episodes, compared with `sync`."""
    print(
        "| tasks | mode | trained, over seeds | less sync, in points, paired over tasks | paired over seeds "
        f"| no more than {BELOW:g} points below sync |\n|---|---|---|---|---|---|"
    )
    for i, first in enumerate(results(paths["sync"][0], "last")):
        plain = [results(p, "last")[i] for p in paths["sync"]]
        for mode in paths:
            found = [results(p, "last")[i] for p in paths[mode]]
            cells = "| | | |" if mode == "sync" else gap_cells(less_sync(found, plain))
            print(f"| {label(first)} | {mode} | {over_seeds(found)} {cells}")


def gap_cells(gap: LessSync) -> str:
    """Return the table cells: both intervals in points, and the verdict."""
    rows = (
        (100 * gap.tasks.difference, 100 * gap.tasks.interval.low, 100 * gap.tasks.interval.high),
        (gap.seeds.mean, gap.seeds.interval.low, gap.seeds.interval.high),
    )
    cells = [f"{mean:+.1f} [{low:+.1f}, {high:+.1f}]" for mean, low, high in rows]
    return f"| {' | '.join([*cells, gap.verdict])} |"


def by_task(found: list[Evaluation]) -> dict[str, float]:
    """Return the mean success of each task over seeds."""
    return {
        task: sum(r.successes[i] for r in found) / sum(r.plan.samples for r in found)
        for i, task in enumerate(found[0].task_ids)
    }


def over_seeds(found: list[Evaluation]) -> str:
    """Return the mean over seeds with its t-interval, in per cent."""
    estimate = t_interval([100 * r.rate for r in found])
    return f"{estimate.mean:.1f} [{estimate.interval.low:.1f}, {estimate.interval.high:.1f}]"


def main() -> None:
    """Run the chosen benchmark and print its table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("what", choices=("learns", "mask", "modes"))
    parser.add_argument("--folder", type=Path, default=Path("runs/learning"))
    parser.add_argument("--recipe", default="search", help="of `learns`")
    parser.add_argument("--parallel", type=int, default=2)
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds, from 0")
    parser.add_argument("--only", nargs="+", choices=tuple(MODES), default=list(MODES), help="of `modes`")
    parser.add_argument("--steps", type=int, help="training steps (default: the recipe's; 20 for mask)")
    args = parser.parse_args()
    if "sync" not in args.only:
        parser.error("modes are compared with `sync`; add it to --only")
    if args.what == "learns":
        common = ("--training.steps", str(args.steps)) if args.steps else ()
        if args.recipe != "search":  # only search ships a cold start
            common += cold_start(args.recipe, args.folder / f"{args.recipe}-cold-start")
        name = "learns" if args.recipe == "search" else args.recipe
        paths = run_all(args, [Arm(name)], common, args.recipe)[name]
        report_learning(paths)
        report_curve(paths)
        return
    if args.what == "modes":
        common = ("--training.steps", str(args.steps)) if args.steps else ()
        arms = [Arm(name, settings) for name, settings in MODES.items() if name in args.only]
        report_modes(run_all(args, arms, common))
        return
    arms = [
        Arm(f"{name}-{rate}", ("--training.mask_observations", flag, "--training.learning_rate", rate))
        for rate in RATES
        for name, flag in (("masked", "true"), ("unmasked", "false"))
    ]
    common = ("--training.steps", str(args.steps or 20), "--evaluation.splits", '["test"]')
    report_mask(run_all(args, arms, common))


if __name__ == "__main__":
    main()
