"""Fit the cost model to the files of runs by least squares over their steps.

The engine's busy seconds are regressed on its passes, sampled and prefilled tokens, the learner's seconds on the
tokens of a batch. Costs of tools are their measured statistics. If learner and engine share a core, the measured
seconds include their mutual slowdown, so synchronous runs determine the costs best.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ludus.config.schema import Config
from ludus.diagnostics.trackers import read_metrics
from ludus.errors import UserError
from ludus.simulator.costs import Costs, EngineCost, EpisodeShape, LearnerCost, RunLayout, ToolCost
from ludus.training.run.run_dir import RunFolder

_TOOL_MEDIAN = re.compile(r"tools/.+/median_s")
MIN_STEPS = 5
MAX_ERROR = 0.3
"""Thresholds of warnings: minimum number of steps and maximum relative error."""


@dataclass(frozen=True, slots=True)
class FittedCosts:
    """Fitted costs, and the relative root-mean-square errors of the fitted seconds."""

    costs: Costs
    engine_error: float
    learner_error: float
    num_steps: int

    @property
    def warnings(self) -> list[str]:
        """Warnings about the quality of the fit, one sentence each."""
        found = []
        if self.num_steps < MIN_STEPS:
            found.append(f"{self.num_steps} steps are too few for a reliable fit; use a synchronous run of ten.")
        if max(self.engine_error, self.learner_error) > MAX_ERROR:
            found.append(
                "The costs do not describe these steps: the run changed its mode or layout, or it is asynchronous and "
                "its seconds include the mutual slowdown of learner and engine."
            )
        return found


def measured_steps(folder: RunFolder) -> Sequence[Mapping[str, float]]:
    """Return the metrics of the steps of a run with complete measurements. The first is a warm-up and omitted if there
    are others.

    Raises UserError if there are none.
    """
    metrics = {row.step: row.metrics for row in read_metrics(folder.metrics)}
    timings = {row.step: row.metrics for row in read_metrics(folder.timings)}
    found = [
        {**metrics[step], **timings[step]}
        for step in sorted(metrics.keys() & timings.keys())
        if timings[step].get("engine/busy_s") and metrics[step].get("episodes/finished")
    ]
    if not found:
        raise UserError(
            f"{folder.path} has no step with timings of engine and learner.",
            "Pass the folder of a `ludus train` run with the embedded engine.",
        )
    return found[1:] or found


def fit(folders: Sequence[RunFolder]) -> FittedCosts:
    """Fit the costs of runs of the same model and world. Raises UserError if their steps do not determine them."""
    steps = [step for folder in folders for step in measured_steps(folder)]
    config = folders[-1].load_config()

    def sums(rate: str, times: str) -> list[float]:
        """Return a rate of each step times its number or duration."""
        return [step[times] * step[rate] for step in steps]

    busy_s, learn_s = [step["engine/busy_s"] for step in steps], [step["time/train_s"] for step in steps]
    decoded = sums("engine/decode_tokens_per_s", "engine/busy_s")
    read = sums("engine/prefill_tokens_per_s", "engine/busy_s")
    passes = [one / max(step["engine/requests_running"], 1.0) for one, step in zip(decoded, steps, strict=True)]
    tokens = sums("length/total_tokens/mean", "episodes/finished")
    engine, engine_error = _least_squares(list(zip(passes, decoded, read, strict=True)), busy_s)
    if not engine[0] + engine[1]:
        raise UserError(
            f"The {len(steps)} steps of these runs do not determine the seconds of a forward pass.",
            "Use a synchronous run of ten steps or more, or two runs with different numbers of episodes per step.",
        )
    learner, learner_error = _least_squares([(1.0, num) for num in tokens], learn_s)
    transfers = [step["sync/transfer_s"] for step in steps if "sync/transfer_s" in step]
    episodes, turns = sum(step["episodes/finished"] for step in steps), sum(sums("turns/mean", "episodes/finished"))
    actions = sum(sums("response_length/mean", "episodes/finished"))
    shape = EpisodeShape(
        turns=turns / episodes,
        action=actions / turns,
        read=sum(read) / (sum(decoded) / (actions / turns)),
        context=(sum(tokens) - actions) / episodes,
        most=config.rollout.max_tokens_per_turn,
    )
    costs = Costs(
        engine=EngineCost(engine[0], engine[1], engine[2], config.rollout.concurrency),
        learner=LearnerCost(learner[0], learner[1]),
        tool=tool_cost(steps),
        episode=shape,
        sync_s=float(np.median([step["time/sync_s"] for step in steps])),
        transfer_s=float(np.median(transfers)) if transfers else 0.0,
    )
    return FittedCosts(costs, engine_error, learner_error, len(steps))


def layout_of(config: Config) -> RunLayout:
    """Return the layout of a run, with one engine and one learner."""
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


def tool_cost(steps: Sequence[Mapping[str, float]]) -> ToolCost:
    """Return one distribution for the calls of all tools. Its variance is the sum of those within and between steps."""
    tools = [(step, name.removesuffix("median_s")) for step in steps for name in step if _TOOL_MEDIAN.fullmatch(name)]

    def metric(name: str) -> list[float]:
        """Return a metric of each tool in each step."""
        return [step[prefix + name] for step, prefix in tools]

    counts = [round(total / mean) for total, mean in zip(metric("total_s"), metric("mean_s"), strict=True)]
    total = sum(counts)
    if not total:
        return ToolCost()
    logs = [math.log(max(median_s, 1e-9)) for median_s in metric("median_s")]
    mean_log = sum(log * count for log, count in zip(logs, counts, strict=True)) / total
    within = sum(spread**2 * count for spread, count in zip(metric("spread"), counts, strict=True)) / total
    between = sum((log - mean_log) ** 2 * count for log, count in zip(logs, counts, strict=True)) / total
    slow, slow_s = sum(metric("stragglers")), sum(metric("stragglers_s"))
    median_s = math.exp(mean_log)
    return ToolCost(median_s, math.sqrt(within + between), slow / total, slow_s / slow / median_s if slow else 1.0)


def _least_squares(rows: Sequence[Sequence[float]], seconds: Sequence[float]) -> tuple[list[float], float]:
    """Return non-negative coefficients that minimize the squared relative errors, and the root mean square error."""
    from scipy.optimize import nnls

    target = np.array(seconds, dtype=np.float64)
    found, residual = nnls(np.array(rows, dtype=np.float64) / target[:, None], np.ones(len(target)))
    return [float(value) for value in found], float(residual) / math.sqrt(len(target))
