"""The KL divergence from a reference, per token, and the three places at which it enters.

With `d = logprobs - ref_logprobs` on tokens sampled from the policy (http://joschu.net/blog/kl-approx.html).
In the *reward* `k1` has the unbiased gradient of the reverse KL. In the *loss* the estimator itself is
differentiated: `k1` has gradient 0 in expectation and regularises nothing, `k2` has the gradient of the
reverse KL, `k3` that of the forward KL. `resolve.check_placement` warns of the first.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, Protocol

from ludus.algorithms.parts import Option
from ludus.algorithms.tensors import Tensor, check_shapes, clamped_ratio, select, torch


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
    """Return `|d|`, under the name `abs`."""
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
    can be given in pieces, and only action positions should be given at all. A token that the policy forbids
    (logit -inf) counts 0; a token that only the reference forbids makes the divergence infinite. Half precision
    is computed and returned in float32. The gradient flows through both.
    """
    policy, reference = _log_softmax(logits, temperature), _log_softmax(ref_logits, temperature)
    return _divergence(policy, reference)


def full_forward(*, logits: Tensor, ref_logits: Tensor, temperature: float = 1.0) -> Tensor:
    """Return `KL(reference || policy) = sum_v q (log q - log p)`; otherwise as `full_reverse`."""
    policy, reference = _log_softmax(logits, temperature), _log_softmax(ref_logits, temperature)
    return _divergence(reference, policy)


def penalised_rewards(*, rewards: Tensor, kl: Tensor, mask: Tensor, coef: float) -> Tensor:
    """Return `r_i - coef sum_t m kl`, [N]: placement `reward` for advantages of whole trajectories, as in verl.

    `rewards` [N], `kl` and `mask` [N, L]. Goes before the groups are normalised; no gradient flows.
    """
    check_shapes(mask, kl=kl)
    if rewards.shape != mask.shape[:1]:
        raise ValueError(f"rewards must be [{mask.shape[0]}], not {list(rewards.shape)}")
    total = select(kl.detach(), mask).sum(1)
    return rewards.detach() - (coef * total).to(rewards.device, rewards.dtype)


def penalised_token_rewards(*, token_rewards: Tensor, kl: Tensor, mask: Tensor, coef: float) -> Tensor:
    """Return `r_t - coef kl_t` on action tokens, 0 elsewhere, [N, L]: placement `reward` for advantages per token.

    For `reinforce_pp` and the GAE family (arXiv:2203.02155, as in verl and OpenRLHF). No gradient flows.
    """
    check_shapes(mask, token_rewards=token_rewards, kl=kl)
    return select(token_rewards.detach(), mask) - coef * select(kl.detach(), mask)


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
    `trains` (None: all). With `trajectory` each token carries the sum of `kl` over its trajectory. 0 where
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


class KLFn(Protocol):
    """An estimator: two tensors of one shape to a third."""

    def __call__(self, *, logprobs: Tensor, ref_logprobs: Tensor) -> Tensor: ...


KLS: dict[str, KLFn] = {"k1": k1, "k2": k2, "k3": k3, "abs": absolute, "k3_k2grad": k3_k2grad}
FULL_KLS = {"full_reverse": full_reverse, "full_forward": full_forward}
"""Divergences of whole distributions: the learner computes them in chunks (`training.learner.full_kl`)."""
FULL_KL_NAMES: tuple[Literal["full_reverse", "full_forward"], ...] = ("full_reverse", "full_forward")
KL_NAMES = (*KLS, *FULL_KL_NAMES)
PLACEMENTS = ("loss", "reward", "advantage")
GRANULARITIES: tuple[Literal["token", "trajectory"], ...] = ("token", "trajectory")
IMPORTANCES: tuple[Literal["none", "ratio"], ...] = ("none", "ratio")
KL_OPTIONS: Mapping[str, Option] = {
    "granularity": Option(
        "penalty of each token, or its sum over the trajectory", choices=GRANULARITIES, default="token"
    ),
    "importance": Option("weigh the term in the loss by the ratio, or do not", choices=IMPORTANCES, default="none"),
}
"""The options of every KL estimator."""
