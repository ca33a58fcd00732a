"""Numbers that change over the steps of a run: KL coefficients, weights of rewards. Imports no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Schedule:
    """From `start` to `end` over `num_steps` steps, then `end`.

    `constant` stays at `start`; `linear` is `start + (end - start) f`; `cosine` is
    `end + (start - end) (1 + cos(pi f)) / 2`, with `f = min(step / num_steps, 1)` (arXiv:1608.03983).
    """

    kind: Literal["constant", "linear", "cosine"]
    start: float
    end: float = 0.0
    num_steps: int = 0

    def __post_init__(self) -> None:
        if self.kind not in ("constant", "linear", "cosine"):
            raise ValueError(f"kind = {self.kind!r} is none of constant, linear, cosine")
        if self.kind != "constant" and self.num_steps < 1:
            raise ValueError(f"num_steps must be at least 1, not {self.num_steps}")

    def at(self, step: int) -> float:
        """The value at `step`, counted from 0."""
        if self.kind == "constant":
            return self.start
        share = min(max(step / self.num_steps, 0.0), 1.0)
        if self.kind == "linear":
            return self.start + (self.end - self.start) * share
        return self.end + (self.start - self.end) * (1 + math.cos(math.pi * share)) / 2
