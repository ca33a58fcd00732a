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


WINDOW = 5
"""Steps whose mean a guard compares that learns what to expect."""


@dataclass(frozen=True, slots=True)
class KLGuard:
    """Pauses a run whose `kl` exceeds `factor` times its expected value, or is not finite.

    Without `decay` the expected value is given and stays, and each step is compared. With it the mean of the
    last `WINDOW` steps (`recent`) is compared with what the steps before them predict: `expected` is their
    average, `expected = d expected + (1 - d) kl`, those that paused included, at the step `expected_step`,
    which is the average of their numbers. A run leaves its reference, at most in proportion to its steps, so
    that `expected` times the ratio of the steps is predicted. The first `warmup` steps (`seen`) never pause.
    An expected value below `least` counts as `least`.
    """

    expected: float | None
    factor: float = 2.0
    decay: float | None = None
    least: float = 1e-3
    warmup: int = 20
    recent: tuple[float, ...] = ()
    seen: int = 0
    expected_step: float = 1.0

    def __post_init__(self) -> None:
        if self.expected is None and self.decay is None:
            raise ValueError("without an expected value the guard needs a decay to learn it with")
        if self.factor <= 0 or (self.decay is not None and not 0 <= self.decay < 1):
            raise ValueError("factor must be above 0, decay at least 0 and below 1")

    def compared(self, kl: float) -> float:
        """What is compared with the predicted value in a step with a mean of `kl`."""
        return kl if self.decay is None else math.fsum(self._window(kl)) / len(self._window(kl))

    @property
    def predicted(self) -> float:
        """The value that the next step is expected to have."""
        if self.expected is None:
            return self.least
        growth = 1.0
        if self.decay is not None:
            growth = max(1.0, (self.seen + 1 - (len(self._window(0.0)) - 1) / 2) / self.expected_step)
        return max(self.expected * growth, self.least)

    def pauses(self, kl: float) -> bool:
        """Whether a step with a mean of `kl` pauses the run."""
        if not math.isfinite(kl):
            return True
        if self.expected is None or (self.decay is not None and self.seen < self.warmup):
            return False
        return self.compared(kl) > self.factor * self.predicted

    def update(self, kl: float) -> KLGuard:
        """The state after a step; unchanged by a KL that is not finite."""
        if self.decay is None or not math.isfinite(kl):
            return self
        found = replace(self, recent=self._window(kl), seen=self.seen + 1)
        if len(self.recent) < WINDOW:
            return found
        before, step = self.recent[0], float(found.seen - WINDOW)
        if self.expected is None:
            return replace(found, expected=before, expected_step=step)
        kept, new = self.decay, 1 - self.decay
        expected, at = kept * self.expected + new * before, kept * self.expected_step + new * step
        return replace(found, expected=expected, expected_step=at)

    def _window(self, kl: float) -> tuple[float, ...]:
        return (*self.recent, kl)[-WINDOW:]


def _finite(kl: float) -> float:
    if not math.isfinite(kl):
        raise ValueError(f"kl is {kl}; a controller needs a finite number")
    return kl
