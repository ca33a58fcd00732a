"""Controllers of the KL coefficient, and the guard that stops a run whose KL runs away. No torch.

Each is a frozen record of plain numbers and an `update` that gives the next one: `dataclasses.asdict` saves
it, `Class(**numbers)` brings it back.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class AdaptiveKL:
    """`coef *= 1 + clip(kl / target - 1, -0.2, 0.2) num / horizon` (arXiv:1909.08593).

    `target` in nats, the unit of the `kl` that is given; `horizon` in trajectories (10000 in that paper, in
    TRL and verl). The coefficient never turns negative.
    """

    coef: float
    target: float
    horizon: float = 10_000.0

    def __post_init__(self) -> None:
        if self.target <= 0 or self.horizon <= 0 or self.coef < 0:
            raise ValueError("target and horizon must be above 0, coef not below")

    def update(self, kl: float, num: int) -> AdaptiveKL:
        """The state after a step with `num` trajectories and a mean of `kl`. ValueError unless finite."""
        error = min(max(_finite(kl) / self.target - 1, -0.2), 0.2)
        return replace(self, coef=max(self.coef * (1 + error * num / self.horizon), 0.0))


@dataclass(frozen=True, slots=True)
class PIDKL:
    """`coef = clip(base + kp e + ki sum(e) + kd (e - previous e), 0, most)` with `e = kl - target`.

    The integral is held where the coefficient stands at a bound and the error would push it further
    (anti-windup). `base` is the coefficient at zero error; the first step has no derivative. Form of
    arXiv:2007.03964 (PID Lagrangian methods).
    """

    target: float
    base: float
    kp: float
    ki: float = 0.0
    kd: float = 0.0
    most: float = 1.0
    integral: float = 0.0
    previous: float | None = None
    coef: float | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.base <= self.most:
            raise ValueError(f"base must lie between 0 and most = {self.most}, not at {self.base}")

    @property
    def value(self) -> float:
        """The coefficient to use now: `base` before the first update."""
        return self.base if self.coef is None else self.coef

    def update(self, kl: float) -> PIDKL:
        """The state after a step with a mean of `kl`. ValueError unless finite."""
        error = _finite(kl) - self.target
        slope = 0.0 if self.previous is None else error - self.previous
        integral = self.integral + error
        raw = self.base + self.kp * error + self.ki * integral + self.kd * slope
        if (raw > self.most and error > 0) or (raw < 0 and error < 0):
            integral = self.integral
        return replace(self, integral=integral, previous=error, coef=min(max(raw, 0.0), self.most))


RECENT_DECAY = 0.7
"""Of the average of the last steps' KL, which a guard with a learned expectation looks at."""


@dataclass(frozen=True, slots=True)
class KLGuard:
    """Pauses a run whose `kl` exceeds `factor` times its expected value, or is not finite.

    `expected` is given, or follows the run: with `decay` d, `expected = d expected + (1 - d) kl` over all
    steps, those that pause too, the first one setting it where it is None. Then the average of the last steps
    (`recent`, decay 0.7) is compared in the place of the noisy KL of one, after `warmup` steps (`seen` are
    counted), in which a run leaves its reference. Without `decay` the expected value stays, and each step is
    compared. An expected value below `least` counts as `least`.
    """

    expected: float | None
    factor: float = 2.0
    decay: float | None = None
    least: float = 1e-3
    warmup: int = 20
    recent: float | None = None
    seen: int = 0

    def __post_init__(self) -> None:
        if self.expected is None and self.decay is None:
            raise ValueError("without an expected value the guard needs a decay to learn it with")
        if self.factor <= 0 or (self.decay is not None and not 0 <= self.decay < 1):
            raise ValueError("factor must be above 0, decay at least 0 and below 1")

    def compared(self, kl: float) -> float:
        """What is compared with the expected value in a step with a mean of `kl`."""
        if self.decay is None or self.recent is None:
            return kl
        return RECENT_DECAY * self.recent + (1 - RECENT_DECAY) * kl

    def pauses(self, kl: float) -> bool:
        """Whether a step with a mean of `kl` pauses the run."""
        if not math.isfinite(kl):
            return True
        if self.expected is None or (self.decay is not None and self.seen < self.warmup):
            return False
        return self.compared(kl) > self.factor * max(self.expected, self.least)

    def update(self, kl: float) -> KLGuard:
        """The state after a step; unchanged by a KL that is not finite."""
        if self.decay is None or not math.isfinite(kl):
            return self
        old = kl if self.expected is None else self.expected
        expected = self.decay * old + (1 - self.decay) * kl
        return replace(self, expected=expected, recent=self.compared(kl), seen=self.seen + 1)


def _finite(kl: float) -> float:
    if not math.isfinite(kl):
        raise ValueError(f"kl is {kl}; a controller needs a finite number")
    return kl
