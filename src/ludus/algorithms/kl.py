"""Estimators of the KL divergence from a reference, per token, and the three places where one enters.

With `d = logprobs - ref_logprobs` on tokens sampled from the policy (http://joschu.net/blog/kl-approx.html).
In the *reward* `k1` gives the unbiased gradient of the reverse KL. In the *loss* the estimator itself is
differentiated: `k1` has gradient 0 in expectation and regularises nothing, `k2` has the gradient of the
reverse KL, `k3` that of the forward KL. `presets.check_placement` warns of the first.
"""

from __future__ import annotations

from typing import Literal, Protocol

from torch import Tensor

from ludus.algorithms.masking import check_shapes, clamped_ratio, select


def k1(*, logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """`d`: unbiased, may be negative; any shape, as all estimators here."""
    return logprobs - ref_logprobs


def k2(*, logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """`d^2 / 2`: biased, its gradient is that of the reverse KL."""
    return (logprobs - ref_logprobs).square() / 2


def k3(*, logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """`exp(-d) + d - 1`: unbiased, never negative; the exponent is clamped to +-20."""
    difference = logprobs - ref_logprobs
    return clamped_ratio(-difference) + difference - 1


def absolute(*, logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """`|d|`, under the name `abs`."""
    return (logprobs - ref_logprobs).abs()


def k3_k2grad(*, logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """The value of `k3` with the gradient of `k2` (straight-through)."""
    value = k3(logprobs=logprobs, ref_logprobs=ref_logprobs).detach()
    gradient = k2(logprobs=logprobs, ref_logprobs=ref_logprobs)
    return value + (gradient - gradient.detach())


def penalised_rewards(*, rewards: Tensor, kl: Tensor, mask: Tensor, coef: float) -> Tensor:
    """`r_i - coef sum_t m kl`, [N]: placement `reward` for advantages of whole trajectories, as in verl.

    `rewards` [N], `kl` and `mask` [N, L]. Goes before the groups are normalised; no gradient flows.
    """
    check_shapes(mask, kl=kl)
    if rewards.shape != mask.shape[:1]:
        raise ValueError(f"rewards must be [{mask.shape[0]}], not {list(rewards.shape)}")
    total = select(kl.detach(), mask).sum(1)
    return rewards.detach() - (coef * total).to(rewards.device, rewards.dtype)


def penalised_advantages(
    *,
    advantages: Tensor,
    kl: Tensor,
    mask: Tensor,
    coef: float,
    granularity: Literal["token", "trajectory"] = "token",
) -> Tensor:
    """`A - coef (kl - mean of kl over the action tokens)`, [N, L]: placement `advantage`.

    All tensors [N, L], of the whole batch (the mean is global). With `trajectory` each token carries the sum
    of `kl` over its trajectory. 0 where the mask is 0; no gradient flows.
    """
    check_shapes(mask, advantages=advantages, kl=kl)
    penalty = select(kl.detach(), mask)
    if granularity == "trajectory":
        penalty = select(penalty.sum(1, keepdim=True).expand(mask.shape), mask)
    centred = penalty - penalty.sum() / mask.bool().sum().clamp(min=1)
    return select(advantages.detach() - coef * centred, mask)


class KLFn(Protocol):
    """An estimator: two tensors of one shape to a third."""

    def __call__(self, *, logprobs: Tensor, ref_logprobs: Tensor) -> Tensor: ...


KLS: dict[str, KLFn] = {"k1": k1, "k2": k2, "k3": k3, "abs": absolute, "k3_k2grad": k3_k2grad}
