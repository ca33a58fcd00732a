"""Curves in the terminal: one line a metric, drawn with block characters."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.table import Table

from ludus.diagnostics.metrics import ENTROPY, LOGPROB_GAP
from ludus.diagnostics.trackers import MetricsRow

BLOCKS = "▁▂▃▄▅▆▇█"
WIDTH = 40
"""Characters of a curve; a longer one is averaged down."""

CURVES: Mapping[str, str] = {
    "reward/mean": "reward",
    "success/mean": "success in training",
    "rft/kept": "attempts kept for training",
    "groups/zero_variance": "groups of equal rewards",
    ENTROPY: "entropy, nats/token",
    "policy/kl_reference": "KL to the start, nats/token",
    LOGPROB_GAP: "gap learner to engine, nats/token",
    "policy/clip_fraction": "clipped tokens",
    "loss/total": "loss",
    "preference/margin": "margin of chosen over rejected, nats",
    "preference/accuracy": "pairs the right way round",
    "preference/chosen_logprob": "chosen, nats/token",
    "preference/rejected_logprob": "rejected, nats/token",
    "held_out/accuracy": "held-out pairs the right way round",
    "held_out/auc": "held-out area under the curve",
    "held_out/error": "held-out error",
    "optim/grad_norm": "gradient norm",
    "turns/mean": "turns",
    "response_length/mean": "sampled tokens an episode",
    "tools/error_rate": "failed tool calls",
    "speed/sampled_tokens_per_s": "sampled tokens/s",
    "engine/cache_hit_rate": "context tokens from the cache",
    "time/step_s": "seconds a step",
}
"""Metrics that are drawn where a run has them, with what they are called."""


@dataclass(frozen=True, slots=True)
class Curve:
    """One metric over the steps that have it; neither list is empty."""

    name: str
    steps: tuple[int, ...]
    values: tuple[float, ...]


def find_curves(rows: Sequence[MetricsRow]) -> list[Curve]:
    """The curves of the known metrics and of held-out success. Of a step that comes twice the last counts."""
    by_step: dict[int, dict[str, float]] = {}
    for row in rows:
        by_step.setdefault(row.step, {}).update(row.metrics)
    names = dict.fromkeys(name for metrics in by_step.values() for name in metrics)
    held_out = {n: f"held-out success, {n.split('/')[1]} {n.split('/')[2]}" for n in names if _is_held_out(n)}
    titles = dict(list(CURVES.items())[:2]) | held_out | dict(list(CURVES.items())[2:])
    curves = []
    for name, title in titles.items():
        found = [(step, metrics[name]) for step, metrics in sorted(by_step.items()) if name in metrics]
        if found:
            curves.append(Curve(title, *(tuple(column) for column in zip(*found, strict=True))))
    return curves


def _is_held_out(name: str) -> bool:
    parts = name.split("/")
    return len(parts) == 4 and parts[0] == "eval" and parts[3] == "success"


def sparkline(values: Sequence[float], width: int = WIDTH) -> str:
    """Values as block characters between their least and greatest; `x` where one is not a finite number."""
    size = max(1, math.ceil(len(values) / width))
    means = [sum(values[i : i + size]) / len(values[i : i + size]) for i in range(0, len(values), size)]
    finite = [value for value in means if math.isfinite(value)]
    if not finite:
        return "x" * len(means)
    low, span = min(finite), max(finite) - min(finite)
    return "".join(_block((value - low) / span if span else 0.5) for value in means)


def _block(share: float) -> str:
    return BLOCKS[min(len(BLOCKS) - 1, int(share * len(BLOCKS)))] if math.isfinite(share) else "x"


def curve_table(curves: Sequence[Curve]) -> Table:
    """One row a curve, with its first, last, least and greatest value."""
    first, last = min(c.steps[0] for c in curves), max(c.steps[-1] for c in curves)
    table = Table(title=f"Steps {first} to {last}")
    table.add_column("metric")
    table.add_column("curve", no_wrap=True)
    for column in ("first", "last", "min", "max"):
        table.add_column(column, justify="right", no_wrap=True)
    for curve in curves:
        ends = (curve.values[0], curve.values[-1], min(curve.values), max(curve.values))
        table.add_row(curve.name, sparkline(curve.values), *(f"{value:.4g}" for value in ends))
    return table
