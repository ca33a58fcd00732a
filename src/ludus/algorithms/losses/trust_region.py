"""Losses that look at who sampled the token: the engine's policy (`dppo`) or an expert (`mixed_policy`)."""

from __future__ import annotations

from typing import Literal, Unpack

import torch
from torch import Tensor

from ludus.algorithms.losses.clipped import ClipOptions, ppo_clip, token_ratio
from ludus.algorithms.masking import check_shapes, select


def dppo(
    *,
    logprobs: Tensor,
    behavior_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    bound: float = 0.2,
    divergence: Literal["tv", "kl"] = "tv",
    old_logprobs: Tensor | None = None,
) -> Tensor:
    """`-rho A` with `rho = exp(logprobs - behavior)`, 0 where a step would leave the trust region, [N, L].

    A token has weight 0 where `A > 0, rho > 1` or `A < 0, rho < 1`, and its divergence passes `bound`: of
    the two distributions "this token or another", `tv` is `|exp(logprobs) - exp(behavior)|`, `kl` is
    `KL(behavior || current)`. arXiv:2602.04879. Two policies only: `old_logprobs` are not read,
    and there is no other correction beside it. `bound` 0.2 as verl's default; for `kl` it is in nats. verl
    truncates a detached `rho` at 20 and multiplies `logprobs`, which has the same gradient below 20.
    """
    check_shapes(mask, logprobs=logprobs, behavior_logprobs=behavior_logprobs, advantages=advantages)
    if divergence not in ("tv", "kl"):
        raise ValueError(f"divergence = {divergence!r} is neither 'tv' nor 'kl'")
    scores = select(advantages, mask).detach()
    current, behavior = select(logprobs, mask), select(behavior_logprobs, mask).detach()
    low, high = dppo_blocked(current.detach(), behavior, scores, bound, divergence)
    return select(-token_ratio(logprobs, behavior_logprobs, mask) * scores, mask.bool() & ~(low | high))


def dppo_blocked(
    logprobs: Tensor, behavior_logprobs: Tensor, advantages: Tensor, bound: float, divergence: str
) -> tuple[Tensor, Tensor]:
    """Tokens beyond `bound` that a step would move further out, any shape: those with A < 0, with A > 0."""
    measure = binary_tv if divergence == "tv" else binary_kl
    far = measure(logprobs, behavior_logprobs) > bound
    apart = logprobs - behavior_logprobs
    return far & (advantages < 0) & (apart < 0), far & (advantages > 0) & (apart > 0)


def binary_tv(logprobs: Tensor, behavior_logprobs: Tensor) -> Tensor:
    """`|exp(logprobs) - exp(behavior)|`, any shape: total variation between "this token or another"."""
    return (logprobs.exp() - behavior_logprobs.exp()).abs()


def binary_kl(logprobs: Tensor, behavior_logprobs: Tensor) -> Tensor:
    """`b log(b/p) + (1 - b) log((1 - b)/(1 - p))` with `p, b` the two probabilities, any shape, nats.

    Infinite where the current policy leaves no probability to other tokens and the behaviour policy did.
    """
    behavior = behavior_logprobs.exp()
    other, behavior_other = _log_complement(logprobs), _log_complement(behavior_logprobs)
    rest = torch.where(behavior < 1, (1 - behavior) * (behavior_other - other), 0.0)
    return behavior * (behavior_logprobs - logprobs) + rest


def mixed_policy(
    *,
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    expert: Tensor,
    gamma: float = 0.1,
    **clip: Unpack[ClipOptions],
) -> Tensor:
    """`ppo_clip` on the policy's own tokens, `-f(p) A` with `f(p) = p / (p + gamma)` on an expert's, [N, L].

    LUFFY (arXiv:2504.14945, `gamma` 0.1): expert trajectories sit inside the group and share
    its advantages; the shaping keeps a gradient on tokens that the policy finds unlikely, `gamma p / (p +
    gamma)^2` times that of `logprobs`. `expert` is [N] or [N, L] bool; `old_logprobs` are not read there.
    LUFFY's scripts do not clip the own tokens (wide `eps_low`, `eps_high` give that).
    """
    if gamma <= 0:
        raise ValueError(f"gamma must be above 0, not {gamma}")
    if expert.shape not in (mask.shape, mask.shape[:1]):
        raise ValueError(f"expert must be [N] or [N, L] for the mask {list(mask.shape)}, not {list(expert.shape)}")
    foreign = expert.bool()[:, None].expand(mask.shape) if expert.ndim == 1 else expert.bool()
    check_shapes(mask, logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages, expert=foreign)
    own, foreign = mask.bool() & ~foreign, mask.bool() & foreign
    on_policy = ppo_clip(logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages, mask=own, **clip)
    probability = select(logprobs, foreign).exp()
    shaped = probability / (probability + gamma)
    return on_policy - select(shaped * select(advantages, foreign).detach(), foreign)


def _log_complement(logprobs: Tensor) -> Tensor:
    """`log(1 - exp(x))` for x <= 0 (a rounding error above 0 counts as 0)."""
    below = logprobs.clamp(max=0.0)
    return torch.where(below > -0.6931, torch.log(-torch.expm1(below)), torch.log1p(-below.exp()))
