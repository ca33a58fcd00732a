"""KL divergence from a reference, per token; its three placements; control of its coefficient.

With `d = logprobs - ref_logprobs` on tokens sampled from the policy (http://joschu.net/blog/kl-approx.html). In the
*reward* `k1` has the unbiased gradient of the reverse KL. In the *loss* the estimator is differentiated: `k1` has
gradient 0 in expectation (`resolve` warns), `k2` the gradient of the reverse KL, `k3` that of the forward KL.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from typing import Literal

from ludus.algorithms.tensors import Tensor, check_per_row, check_shapes, clamped_ratio, select, torch
from ludus.config.schema import Config
from ludus.config.sections.algorithm import KLControlConfig
from ludus.errors import ConfigError, LearnerError


def k1(*, logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Return `d`: unbiased, may be negative; any shape, as all estimators here."""
    return logprobs - ref_logprobs


def k2(*, logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Return `d^2 / 2`: biased, its gradient is that of the reverse KL."""
    return (logprobs - ref_logprobs).square() / 2


def k3(*, logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Return `exp(-d) + d - 1`: unbiased, never negative; the exponent is clamped to +-20."""
    difference = logprobs - ref_logprobs
    return clamped_ratio(-difference) + difference - 1


def absolute(*, logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Return `|d|` (`algorithm.kl = "abs"`)."""
    return (logprobs - ref_logprobs).abs()


abs = absolute


def k3_k2grad(*, logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Return the value of `k3` with the gradient of `k2` (straight-through)."""
    value = k3(logprobs=logprobs, ref_logprobs=ref_logprobs).detach()
    gradient = k2(logprobs=logprobs, ref_logprobs=ref_logprobs)
    return value + (gradient - gradient.detach())


def full_reverse(*, logits: Tensor, ref_logits: Tensor, temperature: float = 1.0) -> Tensor:
    """Return `KL(policy || reference) = sum_v p (log p - log q)` of the tempered distributions, nats.

    [...] from `logits`, `ref_logits` [..., V]; no sampling noise. Positions are independent: long inputs
    can be split, and only action positions should be passed. A token with logit -inf under the policy
    contributes 0; one with logit -inf only under the reference makes the divergence infinite. Half precision
    is computed and returned in float32. The gradient flows through both.
    """
    return _divergence(_log_softmax(logits, temperature), _log_softmax(ref_logits, temperature))


def full_forward(*, logits: Tensor, ref_logits: Tensor, temperature: float = 1.0) -> Tensor:
    """Return `KL(reference || policy) = sum_v q (log q - log p)`; all else as in `full_reverse`."""
    return _divergence(_log_softmax(ref_logits, temperature), _log_softmax(logits, temperature))


def jensen_shannon(*, logits: Tensor, ref_logits: Tensor, top_k: int = 0, temperature: float = 1.0) -> Tensor:
    """Return `(KL(p || m) + KL(q || m)) / 2` with `m = (p + q) / 2`, at most log 2, [...]; all else as `full_reverse`.

    With `top_k` above 0 only the policy's `top_k` most likely tokens are told apart: all others are one event, in both
    distributions (SDPO, arXiv:2601.20802, 100 tokens).
    """
    own, theirs, _ = likely_tokens(_log_softmax(logits, temperature), _log_softmax(ref_logits, temperature), top_k)
    middle = torch.logaddexp(own, theirs) - math.log(2)
    return (_divergence(own, middle) + _divergence(theirs, middle)) / 2


def likely_tokens(own: Tensor, theirs: Tensor, top_k: int) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the log-probabilities [..., top_k + 1] of the most likely tokens of `own` and of all others, and the ids.

    `own` and `theirs` are log-probabilities [..., V]. Unchanged, without ids, if `top_k` is 0 or at least V - 1.
    """
    if not 0 < top_k < own.shape[-1] - 1:
        return own, theirs, None
    index = own.topk(top_k, -1).indices
    first, second = (
        torch.cat([table.gather(-1, index), table.scatter(-1, index, -torch.inf).logsumexp(-1, keepdim=True)], -1)
        for table in (own, theirs)
    )
    return first, second, index


def penalised_rewards(*, rewards: Tensor, kl: Tensor, mask: Tensor, coef: float) -> Tensor:
    """Return `r_i - coef sum_t m kl`, [N]: placement `reward` for advantages of whole trajectories, as in verl.

    `rewards` [N], `kl` and `mask` [N, L]. Applied before groups are normalised; no gradient flows.
    """
    check_shapes(mask, kl=kl)
    check_per_row(mask, rewards=rewards)
    total = select(kl.detach(), mask).sum(1)
    return rewards.detach() - (coef * total).to(rewards.device, rewards.dtype)


def importance_weighted(*, kl: Tensor, logprobs: Tensor, old_logprobs: Tensor, mask: Tensor) -> Tensor:
    """Return `ratio kl` with `ratio = exp(logprobs - old_logprobs)`, [N, L], 0 where the mask is 0, with gradient.

    For the placement `loss`. The gradient flows through the ratio too, so that with `k3` it is unbiased for
    the reverse KL, and on tokens of an older policy the value is as well (DeepSeek-V3.2, arXiv:2512.02556;
    slime's `use-unbiased-kl`, TRL's `use_bias_correction_kl`).
    """
    check_shapes(mask, kl=kl, logprobs=logprobs, old_logprobs=old_logprobs)
    gap = select(logprobs, mask) - select(old_logprobs, mask).detach()
    return clamped_ratio(gap) * select(kl, mask)


def trajectory_kl(*, kl: Tensor, mask: Tensor) -> Tensor:
    """Return `sum_t m kl`, [N], with gradient: granularity `trajectory` for the placement `loss`.

    `aggregate` takes its mean over the trajectories.
    """
    check_shapes(mask, kl=kl)
    return select(kl, mask).sum(1)


def penalised_advantages(
    *,
    advantages: Tensor,
    kl: Tensor,
    mask: Tensor,
    coef: float,
    granularity: Literal["token", "trajectory"] = "token",
    trains: Tensor | None = None,
) -> Tensor:
    """Return `A - coef (kl - mean of kl over the action tokens)`, [N, L]: placement `advantage`.

    All tensors [N, L], of the whole batch: the mean is global, over those action tokens that are set in
    `trains` (None: all). With `trajectory` each token has the sum of `kl` over its trajectory. 0 where
    the mask is 0; no gradient flows.
    """
    check_shapes(mask, advantages=advantages, kl=kl)
    penalty = select(kl.detach(), mask)
    if granularity == "trajectory":
        penalty = select(penalty.sum(1, keepdim=True).expand(mask.shape), mask)
    counted = mask.bool() if trains is None else mask.bool() & trains.bool()
    centred = penalty - select(penalty, counted).sum() / counted.sum().clamp(min=1)
    return select(advantages.detach() - coef * centred, mask)


def _log_softmax(logits: Tensor, temperature: float) -> Tensor:
    wide = logits if logits.dtype in (torch.float32, torch.float64) else logits.float()
    return torch.log_softmax(wide / temperature, dim=-1)


def _divergence(first: Tensor, second: Tensor) -> Tensor:
    if first.shape != second.shape:
        raise ValueError(f"logits {list(first.shape)} and {list(second.shape)} differ in shape")
    possible = first != -torch.inf
    gap = torch.where(possible, first, 0.0) - torch.where(possible, second, 0.0)
    return (first.exp() * gap).sum(-1)


KLS: dict[str, Callable[..., Tensor]] = {"k1": k1, "k2": k2, "k3": k3, "abs": absolute, "k3_k2grad": k3_k2grad}
FULL_KLS = {"full_reverse": full_reverse, "full_forward": full_forward}
"""Divergences of full distributions, computed in chunks by the learner (`training.learner.full_kl`)."""
FULL_KL_NAMES: tuple[Literal["full_reverse", "full_forward"], ...] = ("full_reverse", "full_forward")
KL_NAMES = (*KLS, *FULL_KL_NAMES)


ControlKind = Literal["constant", "linear", "cosine", "adaptive", "pid"]

_READS: dict[ControlKind, tuple[str, ...]] = {
    "constant": (),
    "linear": ("end", "steps"),
    "cosine": ("end", "steps"),
    "adaptive": ("target", "horizon"),
    "pid": ("target", "kp", "ki", "kd", "max_coef"),
}
"""Settings of the section `kl_control` by kind."""
_GUARD_DECAY, _GUARD_WARMUP = 0.9, 20


@dataclass(frozen=True, slots=True)
class Schedule:
    """A schedule from `start` to `end` over `num_steps` steps, constant afterwards.

    `constant` stays at `start`; `linear` is `start + (end - start) f`; `cosine` is
    `end + (start - end) (1 + cos(pi f)) / 2`, with `f = min(step / num_steps, 1)` (arXiv:1608.03983).
    """

    kind: Literal["constant", "linear", "cosine"]
    start: float
    end: float = 0.0
    num_steps: int = 0

    def __post_init__(self) -> None:
        if self.kind not in ("constant", "linear", "cosine"):
            raise ValueError(f"kind = {self.kind!r} is not one of constant, linear, cosine")
        if self.kind != "constant" and self.num_steps < 1:
            raise ValueError(f"num_steps must be at least 1, not {self.num_steps}")

    def at(self, step: int) -> float:
        """Return the value at `step`, counted from 0."""
        if self.kind == "constant":
            return self.start
        share = min(max(step / self.num_steps, 0.0), 1.0)
        if self.kind == "linear":
            return self.start + (self.end - self.start) * share
        return self.end + (self.start - self.end) * (1 + math.cos(math.pi * share)) / 2

    def update(self, kl: float, num: int) -> Schedule:
        """Return this schedule unchanged; it does not depend on the KL."""
        del kl, num
        return self


@dataclass(frozen=True, slots=True)
class KLState:
    """Checkpointed state of a controller and its guard."""

    kind: str = "constant"
    base: float = 0.0
    coef: float | None = None
    integral: float = 0.0
    previous: float | None = None
    expected: float | None = None
    recent: tuple[float, ...] = ()
    seen: int = 0
    expected_step: float = 1.0


@dataclass(frozen=True, slots=True)
class KLController:
    """Schedule or controller of the KL coefficient, which starts at `base`, and a guard. Immutable."""

    kind: ControlKind
    base: float
    rule: Schedule | AdaptiveKLController | PIDKLController
    guard: KLGuard | None = None

    @property
    def is_active(self) -> bool:
        """Whether any step has a KL term."""
        return self.base > 0 or self.kind != "constant"

    @property
    def needs_reference(self) -> bool:
        """Whether the KL to the reference must be computed."""
        return self.is_active or self.guard is not None

    def coef(self, step: int) -> float:
        """Return the coefficient of a training step, counted from 1."""
        return self.rule.at(step - 1)

    def update(self, kl: float, num: int) -> KLController:
        """Return the controller after a step with `num` trajectories and a mean KL of `kl` nats per token.

        Raises LearnerError if an adaptive or PID controller gets a KL that is not finite.
        """
        try:
            rule = self.rule.update(kl, num)
        except ValueError as error:
            raise LearnerError(f"The KL to the reference is {kl}.", "Lower training.learning_rate.") from error
        return replace(self, rule=rule, guard=None if self.guard is None else self.guard.update(kl))

    def pause_reason(self, kl: float) -> str:
        """Return the reason, in one sentence, if a step with this KL pauses the run, else an empty string."""
        guard = self.guard
        if guard is None or not guard.should_pause(kl):
            return ""
        averaged = "" if guard.decay is None else " over the last steps"
        return (
            f"The KL to the reference is {guard.smoothed(kl):.3g} nats per token{averaged}, more than"
            f" {guard.factor:g} times the expected {guard.predicted:.3g}."
        )

    @property
    def state(self) -> KLState:
        """State to save in a checkpoint."""
        found = asdict(self.rule) | (asdict(self.guard) if self.guard is not None else {})
        saved = {one.name: found[one.name] for one in fields(KLState) if one.name in found}
        return KLState(**saved | {"kind": self.kind, "base": self.base})

    def restored(self, state: KLState) -> KLController:
        """Return this controller with a saved state, whose rule is ignored if its kind or base differs."""
        rule, guard = self.rule, self.guard
        saved = asdict(state) | {"recent": tuple(state.recent)}
        if (state.kind, state.base) == (self.kind, self.base):
            rule = replace(rule, **{name: saved[name] for name in asdict(rule) if name in saved})
        if guard is not None and guard.decay is not None:
            guard = replace(guard, **{name: saved[name] for name in asdict(guard) if name in saved})
        return replace(self, rule=rule, guard=guard)


def kl_controller(config: Config, kl_coef: float) -> KLController:
    """Return the controller of the coefficient. Raises ConfigError for incompatible or unused settings."""
    settings = config.kl_control
    _reject_unused(settings)
    rule = _rule(settings, kl_coef, settings.steps or config.training.steps)
    return KLController(settings.kind, kl_coef, rule, _guard(settings))


def _rule(settings: KLControlConfig, base: float, steps: int) -> Schedule | AdaptiveKLController | PIDKLController:
    kind, end, target = settings.kind, settings.end or 0.0, settings.target
    gains = settings.kp or 0.0, settings.ki or 0.0, settings.kd or 0.0
    most = 1.0 if settings.max_coef is None else settings.max_coef
    if kind == "adaptive" and base == 0:
        raise ConfigError(
            'kl_control.kind = "adaptive" multiplies the KL coefficient, and algorithm.kl_coef is 0.',
            "Set algorithm.kl_coef above 0, or unset kl_control.",
        )
    if kind == "pid" and not any(gains):
        raise ConfigError(
            'kl_control.kind = "pid" has no gain: the coefficient would stay constant.',
            "Set kl_control.kp, kl_control.ki or kl_control.kd above 0.",
        )
    if kind == "pid" and base > most:
        raise ConfigError(
            f"algorithm.kl_coef = {base:g} is above kl_control.max_coef = {most:g}.", "Raise kl_control.max_coef."
        )
    if kind in ("linear", "cosine") and base == end:
        raise ConfigError(
            f'kl_control.kind = "{kind}" goes from algorithm.kl_coef = {base:g} to kl_control.end = {end:g}: '
            "the coefficient would stay constant.",
            "Change algorithm.kl_coef or kl_control.end, or unset kl_control.",
        )
    if kind == "constant" or kind == "linear" or kind == "cosine":
        return Schedule(kind, base, end, steps)
    if target is None:
        raise ConfigError(f'kl_control.kind = "{kind}" needs a target.', "Set kl_control.target, such as 0.01.")
    if kind == "adaptive":
        return AdaptiveKLController(base, target, settings.horizon or 10_000.0)
    return PIDKLController(target, base, *gains, most)


def _guard(settings: KLControlConfig) -> KLGuard | None:
    if settings.guard_factor == 0:
        return None
    if settings.guard_expected is not None:
        return KLGuard(settings.guard_expected, settings.guard_factor)
    decay = _GUARD_DECAY if settings.guard_decay is None else settings.guard_decay
    warmup = _GUARD_WARMUP if settings.guard_warmup is None else settings.guard_warmup
    return KLGuard(None, settings.guard_factor, decay, warmup=warmup)


def _reject_unused(settings: KLControlConfig) -> None:
    """Raise ConfigError for a setting that neither the kind nor the guard uses."""
    given = settings.model_dump(exclude_none=True, exclude={"kind", "guard_factor"})
    for name, value in given.items():
        if name in _READS[settings.kind]:
            continue
        reason = f'kl_control.kind is "{settings.kind}"'
        if name.startswith("guard_"):
            if settings.guard_factor > 0 and not (
                name in ("guard_decay", "guard_warmup") and "guard_expected" in given
            ):
                continue
            fixed = settings.guard_factor > 0
            reason = "kl_control.guard_expected is constant" if fixed else "kl_control.guard_factor is 0"
        raise ConfigError(f"kl_control.{name} = {value} would have no effect: {reason}.", f"Unset kl_control.{name}.")


@dataclass(frozen=True, slots=True)
class AdaptiveKLController:
    """`coef *= 1 + clip(kl / target - 1, -0.2, 0.2) num / horizon` (arXiv:1909.08593).

    `target` in nats, like the `kl` argument; `horizon` in trajectories (10000 in the paper, TRL and verl).
    The coefficient is clamped to at least 0.
    """

    coef: float
    target: float
    horizon: float = 10_000.0

    def __post_init__(self) -> None:
        if self.target <= 0 or self.horizon <= 0 or self.coef < 0:
            raise ValueError("target and horizon must be above 0, coef at least 0")

    def at(self, step: int) -> float:
        """Return the coefficient of the next step."""
        del step
        return self.coef

    def update(self, kl: float, num: int) -> AdaptiveKLController:
        """Return the state after a step with `num` trajectories and a mean of `kl`. Raises ValueError unless finite."""
        error = min(max(_finite(kl) / self.target - 1, -0.2), 0.2)
        return replace(self, coef=max(self.coef * (1 + error * num / self.horizon), 0.0))


@dataclass(frozen=True, slots=True)
class PIDKLController:
    """`coef = clip(base + kp e + ki sum(e) + kd (e - previous e), 0, max_coef)` with `e = kl - target`.

    The integral is not updated if the coefficient is at a bound and the error has the same direction
    (anti-windup). `base` is the coefficient at zero error; the first step has no derivative. Form of
    arXiv:2007.03964 (PID Lagrangian methods).
    """

    target: float
    base: float
    kp: float
    ki: float = 0.0
    kd: float = 0.0
    max_coef: float = 1.0
    integral: float = 0.0
    previous: float | None = None
    coef: float | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.base <= self.max_coef:
            raise ValueError(f"base must lie between 0 and max_coef = {self.max_coef}, not at {self.base}")

    def at(self, step: int = 0) -> float:
        """Return the coefficient of the next step: `base` before the first update."""
        del step
        return self.base if self.coef is None else self.coef

    def update(self, kl: float, num: int = 1) -> PIDKLController:
        """Return the state after a step with a mean of `kl`. Raises ValueError unless finite."""
        del num
        error = _finite(kl) - self.target
        slope = 0.0 if self.previous is None else error - self.previous
        integral = self.integral + error
        raw = self.base + self.kp * error + self.ki * integral + self.kd * slope
        if (raw > self.max_coef and error > 0) or (raw < 0 and error < 0):
            integral = self.integral
        return replace(self, integral=integral, previous=error, coef=min(max(raw, 0.0), self.max_coef))


WINDOW = 5
"""Number of recent steps whose mean a guard with `decay` compares."""


@dataclass(frozen=True, slots=True)
class KLGuard:
    """Pause a run if its `kl` exceeds `factor` times its expected value, or is not finite.

    Without `decay` the expected value is fixed, and each step is compared. With it the mean of the last `WINDOW` steps
    (`recent`) is compared with a prediction from earlier steps: `expected` is the moving average of their KL, `expected
    = d expected + (1 - d) kl` (paused steps included), and `expected_step` that of their step numbers. The KL grows at
    most linearly with the steps, so the prediction is `expected` times the ratio of the step numbers. The guard is
    inactive for the first `warmup` steps (`seen`). A lower expected value counts as `min_expected`.
    """

    expected: float | None
    factor: float = 2.0
    decay: float | None = None
    min_expected: float = 1e-3
    warmup: int = 20
    recent: tuple[float, ...] = ()
    seen: int = 0
    expected_step: float = 1.0

    def __post_init__(self) -> None:
        if self.expected is None and self.decay is None:
            raise ValueError("a guard without an expected value needs a decay")
        if self.factor <= 0 or (self.decay is not None and not 0 <= self.decay < 1):
            raise ValueError("factor must be above 0, decay at least 0 and below 1")

    def smoothed(self, kl: float) -> float:
        """Return the value compared with the prediction: `kl`, or its mean over the window if `decay` is set."""
        return kl if self.decay is None else math.fsum(self._window(kl)) / len(self._window(kl))

    @property
    def predicted(self) -> float:
        """Predicted KL of the next step."""
        if self.expected is None:
            return self.min_expected
        growth = 1.0
        if self.decay is not None:
            growth = max(1.0, (self.seen + 1 - (len(self._window(0.0)) - 1) / 2) / self.expected_step)
        return max(self.expected * growth, self.min_expected)

    def should_pause(self, kl: float) -> bool:
        """Return whether a step with a mean of `kl` pauses the run."""
        if not math.isfinite(kl):
            return True
        if self.expected is None or (self.decay is not None and self.seen < self.warmup):
            return False
        return self.smoothed(kl) > self.factor * self.predicted

    def update(self, kl: float) -> KLGuard:
        """Return the state after a step; unchanged if `kl` is not finite."""
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
