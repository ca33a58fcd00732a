"""Reject non-finite numbers, naming the trajectory that they belong to."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ludus.errors import LearnerError
from ludus.training.batches.rows import Microbatch, Row
from ludus.types import Trajectory

HINT = "Nothing was trained on it. Look for extreme rewards or weights."
RECORDED = "recorded log-probability"


def check_trajectories(trajectories: Sequence[Trajectory]) -> None:
    """Raise LearnerError if a reward or a recorded log-probability is not finite."""
    for one in trajectories:
        recorded = tuple(lp for segment in one.segments for lp in segment.logprobs)
        given = {"reward": (one.reward, *one.leaf_rewards), "reward of a turn": one.turn_rewards, RECORDED: recorded}
        for what, values in given.items():
            if fault := fault_of(what, values, one.name):
                raise LearnerError(fault, HINT)


def check_estimates(estimates: Mapping[str, Sequence[Tensor] | None], names: Sequence[str]) -> None:
    """Raise LearnerError if a model estimate is not finite."""
    for what, tables in estimates.items():
        for values, name in zip(tables, names, strict=True) if tables is not None else ():
            if fault := fault_of(what, values.tolist(), name):
                raise LearnerError(fault, HINT)


def fault_of_rows(rows: Sequence[Row]) -> str:
    """Describe the first row with a non-finite advantage or log-probability; "" if there is none."""
    for place, row in enumerate(rows):
        for what, values in (("advantage", row.advantages), (RECORDED, row.behavior)):
            if not math.isfinite(sum(values)):
                trained = [v for v, trains in zip(values, row.trains, strict=True) if trains]
                if fault := fault_of(what, trained, row.name or f"row {place}"):
                    return fault
    return ""


@dataclass
class FiniteChecks:
    """Check a step's microbatches for non-finite numbers, once after the last of them.

    Each check synchronizes with a GPU, so flags accumulate on the device; the row is only searched for on a
    failure.
    """

    _odd: list[Tensor] = field(default_factory=list, init=False)
    _losses: list[Tensor] = field(default_factory=list, init=False)
    _seen: list[tuple[Microbatch, Tensor, dict[str, Tensor]]] = field(default_factory=list, init=False)

    def numbers(self, part: Microbatch, mask: Tensor, given: Mapping[str, Tensor | None]) -> None:
        """Add numbers `[B, L]` of a microbatch, by their names in messages; only those in `mask` count."""
        there = {what: values.detach() for what, values in given.items() if values is not None}
        self._odd.append((mask & _odd_of(there).any(0)).any())
        self._seen.append((part, mask, there))

    def loss(self, loss: Tensor) -> None:
        """Add the loss `[]` of a microbatch."""
        self._losses.append(loss.detach())
        self._odd.append(~loss.detach().isfinite())

    def clear(self) -> None:
        """Reset before the passes are repeated."""
        self._odd.clear()
        self._losses.clear()
        self._seen.clear()

    @property
    def fault(self) -> str:
        """Describe the first row with a non-finite number, or the loss; "" if there is none."""
        if not self._odd or not bool(torch.stack(self._odd).any()):
            return ""
        for part, mask, there in self._seen:
            odd = (mask & _odd_of(there)).nonzero()
            if len(odd):
                field_number, place, column = odd[0].tolist()
                what, values = list(there.items())[field_number]
                name = part.names[place] or f"row {part.index[place]}"
                return fault_of(what, [float(values[place, column])], name)
        odd_loss = next(float(loss) for loss in self._losses if not loss.isfinite())
        return f"The loss is {odd_loss}."


def _odd_of(given: Mapping[str, Tensor]) -> Tensor:
    """Return where the values are not finite, `[K, B, L]`."""
    return torch.stack([~values.isfinite() for values in given.values()])


def fault_of(what: str, values: Sequence[float], name: str) -> str:
    """Describe the first non-finite value; "" if there is none."""
    if math.isfinite(sum(values)):
        return ""
    odd = [value for value in values if not math.isfinite(value)]
    article = "An" if what[0] in "aeiou" else "A"
    return f"{article} {what} of {name} is {odd[0]}." if odd else ""
