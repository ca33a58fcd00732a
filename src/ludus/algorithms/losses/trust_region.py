"""Losses that depend on the sampling policy of a token: the behaviour policy (`dppo`) or an expert (`mixed_policy`)."""

from __future__ import annotations

from typing import Literal, Unpack

from ludus.algorithms.algorithm import NOT_NEGATIVE, POSITIVE, LossSpec, Need, Option
from ludus.algorithms.losses.clipped import ClipInputs, ppo_clip, token_cut, token_ratio
from ludus.algorithms.tensors import Cut, Tensor, check_shapes, select, torch

DIVERGENCES = ("tv", "kl")


def dppo_blocked(
    logprobs: Tensor, behavior_logprobs: Tensor, advantages: Tensor, bound: float, divergence: str
) -> tuple[Tensor, Tensor]:
    """Return the tokens beyond `bound` whose update would increase the divergence, for A < 0 and A > 0; any shape."""
    measure = binary_tv if divergence == "tv" else binary_kl
    far = measure(logprobs, behavior_logprobs) > bound
    apart = logprobs - behavior_logprobs
    return far & (advantages < 0) & (apart < 0), far & (advantages > 0) & (apart > 0)


def binary_tv(logprobs: Tensor, behavior_logprobs: Tensor) -> Tensor:
    """Return `|exp(logprobs) - exp(behavior)|`, any shape: total variation between "this token or another"."""
    return (logprobs.exp() - behavior_logprobs.exp()).abs()


def binary_kl(logprobs: Tensor, behavior_logprobs: Tensor) -> Tensor:
    """Return `b log(b/p) + (1 - b) log((1 - b)/(1 - p))` with `p, b` the two probabilities, any shape, nats.

    Infinite if other tokens have probability 0 under the current policy but not under the behaviour policy.
    """
    behavior = behavior_logprobs.exp()
    other, behavior_other = _log_complement(logprobs), _log_complement(behavior_logprobs)
    rest = torch.where(behavior < 1, (1 - behavior) * (behavior_other - other), 0.0)
    return behavior * (behavior_logprobs - logprobs) + rest


def _log_complement(logprobs: Tensor) -> Tensor:
    """Return `log(1 - exp(x))` for x <= 0 (rounding errors above 0 count as 0)."""
    below = logprobs.clamp(max=0.0)
    return torch.where(below > -0.6931, torch.log(-torch.expm1(below)), torch.log1p(-below.exp()))


def _trust_region_cut(
    *, logprobs: Tensor, behavior_logprobs: Tensor, advantages: Tensor, mask: Tensor, bound: float, divergence: str
) -> Cut:
    """Return the tokens outside the trust region whose update would move them further out."""
    current, behavior, scores = (select(one, mask) for one in (logprobs, behavior_logprobs, advantages))
    low, high = dppo_blocked(current, behavior, scores, bound, divergence)
    return Cut(low, high, torch.zeros_like(low))


def _own_token_cut(*, expert: Tensor | None = None, **inputs: Unpack[ClipInputs]) -> Cut:
    """Return the clipped tokens of the policy; expert tokens are not clipped."""
    if expert is not None:
        inputs["mask"] = inputs["mask"].bool() & ~expert.bool()[:, None]
    return token_cut(**inputs)


@LossSpec(
    help="a trust region on the divergence from the behaviour policy",
    needs={Need.BEHAVIOR_RATIO},
    options={
        "bound": Option("bound of the divergence from the behaviour policy", NOT_NEGATIVE),
        "divergence": Option("total variation, or KL", choices=DIVERGENCES),
    },
    ratio_part="The trust region",
    off_policy=True,
    cut=_trust_region_cut,
)
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
    """Return `-rho A` with `rho = exp(logprobs - behavior)`, 0 if a step would leave the trust region, [N, L].

    A token has weight 0 if `A > 0, rho > 1` or `A < 0, rho < 1`, and its divergence passes `bound`: of
    the two distributions "this token or another", `tv` is `|exp(logprobs) - exp(behavior)|`, `kl` is
    `KL(behavior || current)`. arXiv:2602.04879. Two policies only: `old_logprobs` are ignored,
    and no other correction is allowed. `bound` 0.2 as in verl; for `kl` it is in nats. verl
    truncates a detached `rho` at 20 and multiplies `logprobs`, which has the same gradient below 20.
    """
    check_shapes(mask, logprobs=logprobs, behavior_logprobs=behavior_logprobs, advantages=advantages)
    if divergence not in DIVERGENCES:
        raise ValueError(f"divergence = {divergence!r} is neither 'tv' nor 'kl'")
    scores = select(advantages, mask).detach()
    current, behavior = select(logprobs, mask), select(behavior_logprobs, mask).detach()
    low, high = dppo_blocked(current.detach(), behavior, scores, bound, divergence)
    return select(-token_ratio(logprobs, behavior_logprobs, mask) * scores, mask.bool() & ~(low | high))


@LossSpec(
    help="PPO on own rollouts, a shaped ratio on demonstrations",
    needs={Need.CLIP, Need.DUAL_CLIP, Need.DEMONSTRATIONS},
    options={"gamma": Option("shaping constant of the demonstrations", POSITIVE)},
    ratio_part="The clip",
    cut=_own_token_cut,
)
def mixed_policy(*, expert: Tensor, gamma: float = 0.1, **inputs: Unpack[ClipInputs]) -> Tensor:
    """Return `ppo_clip` on the policy's own tokens, `-f(p) A` with `f(p) = p / (p + gamma)` on expert tokens, [N, L].

    LUFFY (arXiv:2504.14945, `gamma` 0.1): expert trajectories are members of the group and
    its statistics; the shaping preserves the gradient on unlikely tokens, `gamma p / (p +
    gamma)^2` times that of `logprobs`. `expert` is [N] or [N, L] bool; `old_logprobs` are ignored there.
    LUFFY's scripts do not clip on-policy tokens (set `eps_low` and `eps_high` wide).
    """
    if gamma <= 0:
        raise ValueError(f"gamma must be above 0, not {gamma}")
    mask = inputs["mask"]
    if expert.shape not in (mask.shape, mask.shape[:1]):
        raise ValueError(f"expert must be [N] or [N, L] for the mask {list(mask.shape)}, not {list(expert.shape)}")
    off_policy = mask.bool() & (expert.bool()[:, None] if expert.ndim == 1 else expert.bool())
    inputs["mask"] = mask.bool() & ~off_policy
    on_policy = ppo_clip(**inputs)
    probability = select(inputs["logprobs"], off_policy).exp()
    shaped = probability / (probability + gamma)
    return on_policy - select(shaped * select(inputs["advantages"], off_policy).detach(), off_policy)
