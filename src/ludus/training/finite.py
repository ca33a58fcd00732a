"""Numbers that are not finite are refused where they enter, by the trajectory that they belong to."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ludus.errors import LearnerError
from ludus.training.batch import Microbatch, Row
from ludus.types import Trajectory

HINT = "Nothing was trained on it. Look for extreme rewards or weights."
RECORDED = "recorded log-probability"


def check_trajectories(trajectories: Sequence[Trajectory]) -> None:
    """Raise LearnerError where a reward or a recorded log-probability is not finite."""
    for one in trajectories:
        recorded = tuple(lp for segment in one.segments for lp in segment.logprobs)
        given = {
            "reward": (one.reward, *one.leaf_rewards),
            "reward of a turn": one.turn_rewards,
            RECORDED: recorded,
        }
        for what, values in given.items():
            if fault := fault_of(what, values, one.name):
                raise LearnerError(fault, HINT)


def check_estimates(estimates: Mapping[str, Sequence[Tensor] | None], names: Sequence[str]) -> None:
    """Raise LearnerError where something that a model said of the trajectories is not finite."""
    for what, tables in estimates.items():
        for values, name in zip(tables, names, strict=True) if tables is not None else ():
            if fault := fault_of(what, values.tolist(), name):
                raise LearnerError(fault, HINT)


def fault_of_rows(rows: Sequence[Row]) -> str:
    """A sentence on the first row with an advantage or a recorded log-probability that is not finite."""
    for place, row in enumerate(rows):
        for what, values in (("advantage", row.advantages), (RECORDED, row.behavior)):
            if not math.isfinite(sum(values)):
                trained = [v for v, trains in zip(values, row.trains, strict=True) if trains]
                if fault := fault_of(what, trained, row.name or f"row {place}"):
                    return fault
    return ""


def fault_of_part(part: Microbatch, mask: Tensor, given: Mapping[str, Tensor | None]) -> str:
    """A sentence on the first row that has a number `[B, L]` not finite where `mask` is set; "" without."""
    there = {what: values.detach() for what, values in given.items() if values is not None}
    odd = torch.stack([mask & ~values.isfinite() for values in there.values()])
    if not bool(odd.any()):
        return ""
    field, place, column = odd.nonzero()[0].tolist()
    what, values = list(there.items())[field]
    return fault_of(what, [float(values[place, column])], part.names[place] or f"row {part.index[place]}")


def fault_of(what: str, values: Sequence[float], name: str) -> str:
    """A sentence on the first of the values that is not finite; "" where all are."""
    if math.isfinite(sum(values)):
        return ""
    odd = [value for value in values if not math.isfinite(value)]
    article = "An" if what[0] in "aeiou" else "A"
    return f"{article} {what} of {name} is {odd[0]}." if odd else ""
