"""Timings and rates of a step, recorded separately from the metrics, which are reproducible."""

from __future__ import annotations

import json
import math
import statistics
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from ludus.config.schema import Config
from ludus.errors import StorageError
from ludus.rollouts.reward_executor import scoring_concurrency
from ludus.rollouts.rollout_files import RolloutRecord, replaced_file
from ludus.types import Trajectory

STRAGGLER = 5.0
"""A call slower than this many times the median of its tool in the step is a straggler; likewise an episode."""
MUCH_WAITING = 0.25
"""Minimum share of the step between the median and the p99 episode for a hint about stragglers."""
MUCH_WAITING_S = 1.0
"""Minimum seconds between them."""
MUCH_SCORING = 0.25
"""Minimum share of the step spent on computing rewards, and of episode time spent on waiting for them, for a
hint."""


@dataclass
class StepTimings:
    """Wall-clock seconds of the phases of one step.

    `concurrent`: episodes are sampled while the learner trains, so the phase `rollout` is only the time that the
    learner waits for them.
    """

    phases: dict[str, float] = field(default_factory=dict)
    engine: dict[str, float] = field(default_factory=dict)
    """Timings of the engine in the rollouts of the step."""
    concurrent: bool = False

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time of the block to a phase."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.phases[name] = self.phases.get(name, 0.0) + time.perf_counter() - begin

    def metrics(self, trajectories: Sequence[Trajectory], scorers: int = 1) -> dict[str, float]:
        """Return seconds by phase, sampled tokens/s, and times of episodes, rewards and the calls of each tool.

        `scorers` is the number of episodes scored concurrently.
        """
        total = sum(self.phases.values())
        metrics = {f"time/{name}_s": seconds for name, seconds in self.phases.items()}
        metrics["time/step_s"] = total
        metrics |= self.engine
        training_s = total - self.phases.get("evaluate", 0.0)
        if training_s:
            metrics["idle/learner"] = max(0.0, 1 - self.phases.get("train", 0.0) / training_s)
            if "engine/busy_s" in self.engine:  # some servers do not report it
                metrics["idle/engine"] = max(0.0, 1 - self.engine["engine/busy_s"] / training_s)
        metrics |= _episode_metrics(trajectories, scorers * training_s)
        sampled = sum(t.num_action_tokens for t in trajectories)
        sampling_s = training_s if self.concurrent else self.phases.get("rollout", 0.0)
        metrics["speed/sampled_tokens_per_s"] = sampled / sampling_s if sampling_s else 0.0
        calls: dict[str, list[float]] = defaultdict(list)
        for trajectory in trajectories:
            for outcome in (outcome for path in trajectory.attempts() for outcome in path.outcomes):
                if outcome.tool and outcome.seconds:
                    calls[outcome.tool].append(outcome.seconds)
        for tool, own in sorted(calls.items()):
            metrics |= {f"tools/{tool}/{name}": value for name, value in _latencies(own).items()}
        return metrics


def _episode_metrics(trajectories: Sequence[Trajectory], scorers_s: float) -> dict[str, float]:
    """Return mean, median and p99 seconds of an episode, and the use of `scorers_s` seconds of scoring capacity."""
    if not trajectories:
        return {}
    timings = [trajectory.timings for trajectory in trajectories]
    grading_s, total_s = [one.grading_s for one in timings], [one.total_s for one in timings]
    metrics = {
        "episode/median_s": statistics.median(total_s),
        "episode/p99_s": sorted(total_s)[math.ceil(0.99 * len(total_s)) - 1],
        "episode/model_s": sum(one.model_s for one in timings) / len(timings),
        "episode/tools_s": sum(one.tools_s for one in timings) / len(timings),
        "episode/scoring_s": sum(one.scoring_s for one in timings) / len(timings),
        "scoring/total_s": sum(grading_s),
        "scoring/slowest_s": max(grading_s),
    }
    return metrics | ({"scoring/busy": min(1.0, sum(grading_s) / scorers_s)} if scorers_s else {})


def _latencies(seconds: Sequence[float]) -> dict[str, float]:
    """Return latency statistics of a tool's calls; `spread` is the deviation of the logarithm without stragglers."""
    median_s = statistics.median(seconds)
    slow = [s for s in seconds if s > STRAGGLER * median_s]
    return {
        "total_s": sum(seconds),
        "mean_s": sum(seconds) / len(seconds),
        "median_s": median_s,
        "spread": statistics.pstdev([math.log(s) for s in seconds if s <= STRAGGLER * median_s]),
        "slowest_s": max(seconds),
        "stragglers": float(len(slow)),
        "stragglers_s": sum(slow),
    }


def episode_shares(timings: Mapping[str, float]) -> dict[str, float]:
    """Return the fractions of episode time spent in the model, in tools, and waiting for rewards.

    Empty without timed episodes."""
    seconds = {name: timings.get(f"episode/{name}_s", 0.0) for name in ("model", "tools", "scoring")}
    total = sum(seconds.values())
    return {name: one / total for name, one in seconds.items()} if total else {}


def scoring_hint(timings: Mapping[str, float], config: Config) -> str:
    """Return a hint if both shares reach `MUCH_SCORING`, otherwise ""."""
    busy, share = timings.get("scoring/busy", 0.0), episode_shares(timings).get("scoring", 0.0)
    if min(busy, share) < MUCH_SCORING:
        return ""
    setting, now = "rollout.reward_processes", config.rollout.reward_processes
    if config.cluster.enabled and config.cluster.reward_workers:
        setting, now = "cluster.reward_workers", config.cluster.reward_workers
    return (
        f"Rewards are slow: they take {busy:.0%} of the step ({timings['scoring/total_s']:.3g} s, "
        f"{scoring_concurrency(config)} at a time, the slowest {timings['scoring/slowest_s']:.3g} s), and an episode "
        f"spends {share:.0%} of its time waiting for them. Raise {setting} ({now}), or speed them up."
    )


def straggler_hint(timings: Mapping[str, float], config: Config) -> str:
    """Return a hint if a step waits for a few long episodes (p99 against the median), otherwise ""."""
    median_s, slow_s = timings.get("episode/median_s", 0.0), timings.get("episode/p99_s", 0.0)
    step_s = timings.get("time/step_s", 0.0) - timings.get("time/evaluate_s", 0.0)
    is_short = slow_s - median_s < max(MUCH_WAITING * step_s, MUCH_WAITING_S)
    if config.training.streams or slow_s <= STRAGGLER * median_s or is_short:
        return ""
    return (
        f"Each step waits for a few long episodes: the slowest 1 % take {slow_s:.3g} s or more, the median "
        f"{median_s:.3g} s. Lower rollout.max_turns or rollout.max_tokens_per_turn, set rollout.partial.tokens, or use "
        'training.mode = "async".'
    )


HINTS = (scoring_hint, straggler_hint)
"""Functions of timings and configuration that return a hint or "". A run shows each hint once."""


def write_episode_times(path: Path, records: Iterable[RolloutRecord]) -> None:
    """Write one JSON line per episode: its key, start, seconds of each turn, and of its rewards.

    The times are apart from the rollouts, whose files are reproducible. Raises StorageError if writing fails.
    """
    with replaced_file(path) as file:
        for record in records:
            key = {"task": record.group, "sample": record.trajectory.sample, "attempt": record.attempt}
            file.write((json.dumps(key | asdict(record.trajectory.timings)) + "\n").encode())


def append_json(path: Path, record: Mapping[str, object]) -> None:
    """Append a JSON line. Raises StorageError if that fails."""
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
    except OSError as error:
        raise StorageError(f"{path} could not be written: {error.strerror}.", "Free some space.") from error
