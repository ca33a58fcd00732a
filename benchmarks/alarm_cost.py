"""Measure what metrics and alarms cost a step of a run, and apart from it the scoring of template collapse.

    ludus train search --quick --run.dir runs/start
    python benchmarks/alarm_cost.py runs/start/checkpoints/step-000008

The recipe is trained for a few steps from the checkpoint in a temporary folder. The functions that compute metrics and
alarms are timed one by one; the figures are medians over the steps, in milliseconds and as shares of the step without
evaluations. `collapse` is measured in every step and is not part of the sum.
"""

from __future__ import annotations

import argparse
import functools
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from types import ModuleType
from typing import Any, ParamSpec, TypeVar

from ludus.algorithms import objective
from ludus.config.load import load_config
from ludus.training.rl import sync_trainer
from ludus.training.rl.build import train
from ludus.training.rl.sample_metrics import CollapseScoring
from ludus.training.run.run_dir import lock_run, new_run
from ludus.training.run.session import open_session
from watching import Watch

FUNCTIONS: dict[ModuleType | type, tuple[str, ...]] = {
    sync_trainer: (
        "rollout_metrics",
        "configured_metrics",
        "count_untrained",
        "starved_metrics",
        "conflict_share",
        "find_alarms",
    ),
    objective: ("clip_stats", "_mismatch", "mismatch_by_length", "token_statistics"),
    CollapseScoring: ("measure",),
}
COLLAPSE = "measure"
SKIPPED = 1
"""First steps that are left out of the medians."""


P = ParamSpec("P")
R = TypeVar("R")


class TimedWatch(Watch):
    """Records the seconds of the timed functions by step."""

    def __init__(self) -> None:
        super().__init__()
        self.now: dict[str, float] = defaultdict(float)
        self.seconds: list[dict[str, float]] = []

    def step(self, step: int, metrics: Mapping[str, float], timings: Mapping[str, float]) -> None:
        """Record the end of a step."""
        super().step(step, metrics, timings)
        self.seconds.append(dict(self.now))
        self.now.clear()

    def timed(self, name: str, function: Callable[P, R]) -> Callable[P, R]:
        """Return the function with its time added to `now`."""

        @functools.wraps(function)
        def call(*args: P.args, **named: P.kwargs) -> R:
            begin = time.perf_counter()
            try:
                return function(*args, **named)
            finally:
                self.now[name] += time.perf_counter() - begin

        return call


@contextmanager
def replaced(place: ModuleType | type, name: str, wrap: Callable[[str, Any], Any]) -> Iterator[None]:
    """Wrap a function of a module or class for the time of the block."""
    before = vars(place)[name]
    setattr(place, name, wrap(name, before))
    try:
        yield
    finally:
        setattr(place, name, before)


def measure(recipe: str, words: list[str], folder: Path) -> TimedWatch:
    """Train with timed functions; return what was recorded."""
    watch = TimedWatch()
    config = load_config(recipe, [*words, "--run.dir", str(folder / "run"), "--run.diagnostics.collapse_every", "1"])
    with ExitStack() as stack:
        for place, names in FUNCTIONS.items():
            for name in names:
                stack.enter_context(replaced(place, name, watch.timed))
        run = new_run(config, "alarm_cost", "rl")
        with lock_run(run):
            train(open_session(config), run, watch)
    return watch


def table(watch: TimedWatch) -> str:
    """Return the medians by function and of their sum, as a table."""
    timings, seconds = watch.timings[SKIPPED:], watch.seconds[SKIPPED:]
    scoring = [one.get(COLLAPSE, 0.0) for one in seconds]
    pairs = zip(timings, scoring, strict=True)
    steps = [one["time/step_s"] - one.get("time/evaluate_s", 0.0) - price for one, price in pairs]
    names = [name for names in FUNCTIONS.values() for name in names if name != COLLAPSE]
    by_name = {name: [one.get(name, 0.0) for one in seconds] for name in names}
    by_name["metrics and alarms"] = [sum(column) for column in zip(*by_name.values(), strict=True)]
    by_name["collapse, each measurement"] = scoring
    lines = [f"{'median step':28} {1000 * median(steps):10.1f} ms"]
    for name, values in by_name.items():
        share = median(value / step for value, step in zip(values, steps, strict=True))
        lines.append(f"{name:28} {1000 * median(values):10.2f} ms {share:8.2%}")
    return "\n".join(lines)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="folder of a trained model")
    parser.add_argument("--recipe", default="search")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--set", nargs="*", default=[], help="settings of the run, KEY=VALUE")
    args = parser.parse_args()
    given = {"model.path": args.model, "training.steps": str(args.steps), "evaluation.tasks_before": "0"}
    given |= {"evaluation.tasks": "1", "evaluation.every": "1000", "run.threads": "1", "env.check": "false"}
    given |= dict(word.split("=", 1) for word in args.set)
    words = [word for key, value in given.items() for word in (f"--{key}", value)]
    with tempfile.TemporaryDirectory() as folder:
        print(table(measure(args.recipe, words, Path(folder))))


if __name__ == "__main__":
    main()
