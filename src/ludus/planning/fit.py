"""From a run's own files to what its work costs: least squares over its steps.

The engine's seconds of work are fitted by its passes, the tokens that it sampled and those that it read; the
learner's by the tokens of a batch. Tools are described as they were measured. Steps in which learner and
engine slow each other (one core for both) measure that as well: synchronous runs tell costs apart best.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from ludus.config.load import load_config
from ludus.config.schema import Config
from ludus.diagnostics.trackers import read_metrics
from ludus.errors import UserError
from ludus.planning.costs import Costs, EngineCost, EpisodeShape, LearnerCost, RunLayout, ToolCost
from ludus.training.run.run_dir import RunFolder

Matrix = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class EngineCalls:
    """A tool's calls in a step: how many, median and log-spread of most, the slow ones and their seconds."""

    count: float
    median_s: float
    spread: float
    slow: float
    slow_s: float


@dataclass(frozen=True, slots=True)
class MeasuredRun:
    """One step of a run: the engine's seconds of work, passes and tokens; the learner's; its episodes.

    `transfer_s` is of weights that went beside the step, None where there were none.
    """

    busy_s: float
    passes: float
    decoded: float
    read: float
    learn_s: float
    sync_s: float
    transfer_s: float | None
    episodes: float
    turns: float
    action_tokens: float
    tokens: float
    calls: tuple[EngineCalls, ...]


FEW_STEPS = 5
LARGE_ERROR = 0.3
"""Fewer steps, or a larger relative error, are doubted."""


@dataclass(frozen=True, slots=True)
class FittedCosts:
    """Costs, and how far the fitted seconds are from the measured ones (root mean square, relative)."""

    costs: Costs
    engine_error: float
    learner_error: float
    num_steps: int

    @property
    def doubts(self) -> list[str]:
        """What speaks against these costs, a sentence each."""
        found = []
        if self.num_steps < FEW_STEPS:
            found.append(f"So few steps ({self.num_steps}) say little, also of errors: fit a synchronous run of ten.")
        if max(self.engine_error, self.learner_error) > LARGE_ERROR:
            found.append(
                "The costs do not describe these steps: their run changed its mode or its layout, or it is "
                "not synchronous, and its seconds hold what learner and engine cost each other."
            )
        return found


def measured(folder: RunFolder) -> list[MeasuredRun]:
    """The steps of a run that say what is needed; the first one, which warms up, only where it is alone.

    Raises UserError where there is none.
    """
    metrics = {row.step: row.metrics for row in read_metrics(folder.metrics)}
    timings = {row.step: row.metrics for row in read_metrics(folder.timings)}
    found = [
        _measured({**metrics[step], **timings[step]})
        for step in sorted(metrics.keys() & timings.keys())
        if timings[step].get("engine/busy_s") and metrics[step].get("episodes/finished")
    ]
    if not found:
        raise UserError(
            f"{folder.path} has no step that says what its engine and its learner did.",
            "Give the folder of a run of `ludus train` whose engine is Ludus's own.",
        )
    return found[1:] or found


def _measured(row: Mapping[str, float]) -> MeasuredRun:
    busy_s = row["engine/busy_s"]
    decoded = row["engine/decode_tokens_per_s"] * busy_s
    episodes = row["episodes/finished"]
    return MeasuredRun(
        busy_s=busy_s,
        passes=decoded / max(row["engine/requests_running"], 1.0),
        decoded=decoded,
        read=row["engine/prefill_tokens_per_s"] * busy_s,
        learn_s=row["time/train_s"],
        sync_s=row["time/sync_s"],
        transfer_s=row.get("sync/transfer_s"),
        episodes=episodes,
        turns=episodes * row["turns/mean"],
        action_tokens=episodes * row["response_length/mean"],
        tokens=episodes * row["length/total_tokens/mean"],
        calls=tuple(_calls(row)),
    )


def _calls(row: Mapping[str, float]) -> list[EngineCalls]:
    names = [name.removesuffix("/median_s") for name in row if name.startswith("tools/")]
    return [
        EngineCalls(
            count=round(row[f"{name}/total_s"] / row[f"{name}/mean_s"]),
            median_s=row[f"{name}/median_s"],
            spread=row[f"{name}/spread"],
            slow=row[f"{name}/stragglers"],
            slow_s=row[f"{name}/stragglers_s"],
        )
        for name in names
        if f"{name}/median_s" in row
    ]


def fit(folders: Sequence[RunFolder]) -> FittedCosts:
    """What the work of these runs costs, which are of the same model and world. Raises UserError."""
    steps = [step for folder in folders for step in measured(folder)]
    config = run_config(folders[-1])
    engine, engine_error = _least_squares([(s.passes, s.decoded, s.read) for s in steps], [s.busy_s for s in steps])
    if not engine[0] + engine[1]:
        raise UserError(
            f"What a forward pass takes cannot be told from the steps of these runs: {len(steps)}.",
            "Fit a synchronous run of ten steps or more, or two runs with other numbers of episodes a step.",
        )
    learner, learner_error = _least_squares([(1.0, s.tokens) for s in steps], [s.learn_s for s in steps])
    beside = [step.transfer_s for step in steps if step.transfer_s is not None]
    costs = Costs(
        engine=EngineCost(engine[0], engine[1], engine[2], config.rollout.concurrency),
        learner=LearnerCost(learner[0], learner[1]),
        tool=tool_cost([calls for step in steps for calls in step.calls]),
        episode=_shape(steps, config),
        sync_s=float(np.median([step.sync_s for step in steps])),
        transfer_s=float(np.median(beside)) if beside else 0.0,
    )
    return FittedCosts(costs, engine_error, learner_error, len(steps))


def run_config(folder: RunFolder) -> Config:
    """The configuration of a run. Raises UserError where the folder holds none."""
    if not folder.config.is_file():
        raise UserError(f"{folder.path} is no run folder: it has no config.toml.", "Check the path.")
    return load_config(folder.config, ())


def setup_of(config: Config) -> RunLayout:
    """How a run was laid out, on one engine and one learner."""
    training, staleness = config.training, config.staleness
    return RunLayout(
        mode=training.mode,
        groups=training.prompts_per_step,
        members=config.algorithm.group_size,
        steps=max(20, 4 * (staleness.max_staleness + 1)),
        max_staleness=staleness.max_staleness,
        in_flight=staleness.max_concurrent_rollouts,
        concurrency=config.rollout.concurrency,
    )


def tool_cost(calls: Sequence[EngineCalls]) -> ToolCost:
    """One distribution for all calls: the spread is within the steps and between them."""
    total = sum(one.count for one in calls)
    if not total:
        return ToolCost()
    logs = [math.log(max(one.median_s, 1e-9)) for one in calls]
    middle = sum(log * one.count for log, one in zip(logs, calls, strict=True)) / total
    within = sum(one.spread**2 * one.count for one in calls) / total
    between = sum((log - middle) ** 2 * one.count for log, one in zip(logs, calls, strict=True)) / total
    slow, slow_s = sum(one.slow for one in calls), sum(one.slow_s for one in calls)
    median_s = math.exp(middle)
    return ToolCost(median_s, math.sqrt(within + between), slow / total, slow_s / slow / median_s if slow else 1.0)


def _shape(steps: Sequence[MeasuredRun], config: Config) -> EpisodeShape:
    episodes, turns = sum(s.episodes for s in steps), sum(s.turns for s in steps)
    actions, tokens = sum(s.action_tokens for s in steps), sum(s.tokens for s in steps)
    action = actions / turns
    sampled_turns = sum(s.decoded for s in steps) / action
    return EpisodeShape(
        turns=turns / episodes,
        action=action,
        read=sum(s.read for s in steps) / sampled_turns,
        context=(tokens - actions) / episodes,
        most=config.rollout.max_tokens_per_turn,
    )


def _least_squares(rows: Sequence[Sequence[float]], seconds: Sequence[float]) -> tuple[list[float], float]:
    """Non-negative coefficients with the least sum of squared relative errors, and its root mean."""
    target = np.array(seconds, dtype=np.float64)
    matrix = np.array(rows, dtype=np.float64) / target[:, None]
    ones = np.ones(len(target))
    width = matrix.shape[1]
    best, least = np.zeros(width), math.inf
    for size in range(1, width + 1):
        for columns in combinations(range(width), size):
            found = _solve(matrix, ones, columns)
            error = float(np.mean((matrix @ found - ones) ** 2))
            if found.min() >= 0 and error < least - 1e-12:
                best, least = found, error
    return [float(value) for value in best], math.sqrt(least)


def _solve(matrix: Matrix, target: Matrix, columns: Sequence[int]) -> Matrix:
    found = np.zeros(matrix.shape[1])
    found[list(columns)] = np.linalg.lstsq(matrix[:, list(columns)], target, rcond=None)[0]
    return found
