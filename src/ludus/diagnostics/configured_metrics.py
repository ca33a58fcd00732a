"""Metrics that depend on names of the world: judge parts and calls that run tests (`run.diagnostics`)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from ludus.config.schema import DiagnosticsConfig
from ludus.diagnostics.alarms import JUDGE, UNTESTED
from ludus.types import StopReason, Trajectory


def configured_metrics(
    trajectories: Sequence[Trajectory], settings: DiagnosticsConfig, success: str
) -> dict[str, float]:
    """Return the metrics of the finished episodes; `success` names the verifier's reward part.

    `judge/NAME/agreement` is the mean of `1 - |judge - success|`, both limited to [0, 1], for each judge that scored an
    episode. `tools/untested` is the share of answered episodes without a call that ran tests, present if
    `test_calls` is set; 0 without answered episodes.
    """
    finished = [t for t in trajectories if t.failure is None and t.stop_reason is not StopReason.FAILED]
    metrics = {}
    for name in settings.judges:
        gaps = [abs(_unit(t.rewards[name]) - _unit(t.rewards.get(success, 0.0))) for t in finished if name in t.rewards]
        if gaps:
            metrics[f"{JUDGE}{name}/agreement"] = 1 - sum(gaps) / len(gaps)
    if settings.test_calls:
        paths = [path for t in finished for path in t.attempts() if path.stop_reason is StopReason.ANSWERED]
        untested = sum(not _runs_tests(path, settings.test_calls) for path in paths)
        metrics[UNTESTED] = untested / max(1, len(paths))
    return metrics


def _unit(value: float) -> float:
    return min(1.0, max(0.0, value))


def _runs_tests(path: Trajectory, calls: Mapping[str, str]) -> bool:
    """Return whether the model called a tool of `calls` with arguments in which its pattern is found."""
    made = [call["function"] for message in path.messages for call in message.get("tool_calls") or []]
    return any(re.search(calls[one["name"]], one["arguments"]) for one in made if one["name"] in calls)
