"""Losses on the token ratio to the policy at the start of the step, clipped or gated.

The gradient flows through `logprobs` only; `old_logprobs` and `advantages` are constants. The `cut` of a loss
returns its clipped tokens, for the statistics of a step; a loss without a `cut` does not clip.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypedDict, Unpack

from ludus.algorithms.algorithm import DEFAULTS_OF, POSITIVE, LossSpec, Need, Option
from ludus.algorithms.tensors import Cut, SummedFields, Tensor, check_shapes, clamped_ratio, select, torch


class PolicyInputs(TypedDict):
    """The inputs of every loss on ratios, all [N, L]."""

    logprobs: Tensor
    old_logprobs: Tensor
    advantages: Tensor
    mask: Tensor


class ClipInputs(PolicyInputs, total=False):
    """The inputs of `ppo_clip`."""

    eps_low: float
    eps_high: float
    dual_clip: float | None


@dataclass(frozen=True, slots=True)
class PolicyTokens:
    """The inputs of a loss on ratios at the action tokens, all [N, L], 0 elsewhere.

    `gap` is `logprobs - old_logprobs`, with the gradient of `logprobs`; `scores` are the advantages, without gradient.
    """

    logprobs: Tensor
    gap: Tensor
    scores: Tensor
    mask: Tensor

    @classmethod
    def of(cls, *, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor) -> PolicyTokens:
        """Return the tokens. Raises ValueError for unequal shapes."""
        check_shapes(mask, logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages)
        own = select(logprobs, mask)
        return cls(own, own - select(old_logprobs, mask).detach(), select(advantages, mask).detach(), mask.bool())

    @property
    def ratio(self) -> Tensor:
        """`exp(gap)` with the exponent clamped to +-20, 1 where the mask is 0, [N, L]."""
        return clamped_ratio(self.gap)


@dataclass(frozen=True, slots=True)
class ClipRange:
    """The interval `[1 - eps_low, 1 + eps_high]` of the ratio, and the bound `dual_clip` > 1 (None: unbounded)."""

    eps_low: float = 0.2
    eps_high: float = 0.2
    dual_clip: float | None = None

    def __post_init__(self) -> None:
        if self.eps_low < 0 or self.eps_high < 0:
            raise ValueError(f"eps_low and eps_high must not be negative: {self.eps_low}, {self.eps_high}")
        if self.dual_clip is not None and self.dual_clip <= 1:
            raise ValueError(f"dual_clip must be above 1, not {self.dual_clip}")

    def surrogate(self, ratio: Tensor, advantages: Tensor) -> Tensor:
        """Return `-min(ratio A, clip(ratio) A)`, at most `-dual_clip A` if `A < 0`; all of one shape."""
        clipped = ratio.clamp(1 - self.eps_low, 1 + self.eps_high)
        loss = -torch.minimum(ratio * advantages, clipped * advantages)
        if self.dual_clip is None:
            return loss
        return torch.where(advantages < 0, torch.minimum(loss, -self.dual_clip * advantages), loss)


def ppo_cut(*, ratio: Tensor, advantages: Tensor, mask: Tensor, clip: ClipRange) -> Cut:
    """Return the tokens clipped by PPO at these ratios, all [N, L]."""
    check_shapes(mask, ratio=ratio, advantages=advantages)
    positive, negative = mask.bool() & (advantages > 0), mask.bool() & (advantages < 0)
    dual = torch.inf if clip.dual_clip is None else clip.dual_clip
    return Cut(negative & (ratio < 1 - clip.eps_low), positive & (ratio > 1 + clip.eps_high), negative & (ratio > dual))


def token_ratio(logprobs: Tensor, old_logprobs: Tensor, mask: Tensor) -> Tensor:
    """Return `exp(logprobs - old_logprobs)` with the exponent clamped to +-20, 1 where the mask is 0, [N, L]."""
    return clamped_ratio(select(logprobs, mask) - select(old_logprobs, mask).detach())


def token_cut(
    *, eps_low: float, eps_high: float, dual_clip: float | None = None, **inputs: Unpack[PolicyInputs]
) -> Cut:
    """Return the tokens clipped by their own ratio."""
    tokens, clip = PolicyTokens.of(**inputs), ClipRange(eps_low, eps_high, dual_clip)
    return ppo_cut(ratio=tokens.ratio, advantages=tokens.scores, mask=tokens.mask, clip=clip)


def _weight_cut(*, eps_low: float, eps_high: float, **inputs: Unpack[PolicyInputs]) -> Cut:
    """Return the tokens with a clipped weight, for any advantage; their gradient is nonzero."""
    tokens = PolicyTokens.of(**inputs)
    ratio, actions = tokens.ratio, tokens.mask
    return Cut(actions & (ratio < 1 - eps_low), actions & (ratio > 1 + eps_high), torch.zeros_like(actions))


@LossSpec(help="the clipped surrogate of PPO", needs={Need.CLIP, Need.DUAL_CLIP}, ratio_part="The clip", cut=token_cut)
def ppo_clip(
    *, eps_low: float = 0.2, eps_high: float = 0.2, dual_clip: float | None = None, **inputs: Unpack[PolicyInputs]
) -> Tensor:
    """Return `-min(ratio A, clip(ratio, 1 - eps_low, 1 + eps_high) A)`, `ratio = exp(logprobs - old_logprobs)`.

    arXiv:1707.06347 (eq. 7); two bounds as in DAPO (arXiv:2503.14476). With `dual_clip = c`, if `A < 0`:
    `min(that, -c A)` (arXiv:1912.09729).
    """
    bounds, tokens = ClipRange(eps_low, eps_high, dual_clip), PolicyTokens.of(**inputs)
    return select(bounds.surrogate(tokens.ratio, tokens.scores), tokens.mask)


DEFAULTS_OF[ClipInputs] = ppo_clip


@LossSpec(
    help="REINFORCE weighted by a clipped, detached ratio", needs={Need.CLIP}, ratio_part="The clip", cut=_weight_cut
)
def cispo(*, eps_low: float = 1.0, eps_high: float = 0.28, **inputs: Unpack[PolicyInputs]) -> Tensor:
    """Return `-stop_grad(clip(ratio, 1 - eps_low, 1 + eps_high)) A logprobs`, [N, L]: clipped tokens retain a gradient.

    arXiv:2506.13585 (MiniMax-M1), which has no lower bound (`eps_low = 1`) and does not
    specify the upper one; 0.28 is from Trinity. verl uses the clip range of PPO for both, TRL and ScaleRL
    (arXiv:2510.13786) an upper bound of 5 (`eps_high = 4`).
    """
    bounds, tokens = ClipRange(eps_low, eps_high), PolicyTokens.of(**inputs)
    weights = tokens.ratio.detach().clamp(1 - bounds.eps_low, 1 + bounds.eps_high)
    return -select(weights * tokens.scores, tokens.mask) * tokens.logprobs


@LossSpec(
    help="a smooth gate in place of the clip",
    options={
        "tau_pos": Option("temperature of the gate for positive advantages", POSITIVE),
        "tau_neg": Option("temperature of the gate for negative advantages", POSITIVE),
    },
    ratio_part="The gate",
)
def sapo(*, tau_pos: float = 1.0, tau_neg: float = 1.05, **inputs: Unpack[PolicyInputs]) -> Tensor:
    """Return `-A (4 / tau) sigmoid(tau (ratio - 1))`, [N, L]: a soft gate in place of the clip.

    arXiv:2511.20347 with its temperatures: `tau_pos` if `A > 0`, else the larger `tau_neg`, so that
    the gate of negative tokens decays faster. At ratio 1 the gradient is that of `-A ratio`. TRL has the same defaults.
    """
    if tau_pos <= 0 or tau_neg <= 0:
        raise ValueError(f"tau_pos and tau_neg must be above 0: {tau_pos}, {tau_neg}")
    tokens = PolicyTokens.of(**inputs)
    scores = tokens.scores
    tau = torch.where(scores > 0, scores.new_tensor(tau_pos), scores.new_tensor(tau_neg))
    gate = torch.sigmoid(tau * (tokens.ratio - 1)) * 4 / tau
    return select(-scores * gate, tokens.mask)


@dataclass(frozen=True, slots=True)
class ClipStats(SummedFields):
    """Counts and sums over action tokens; `+` joins microbatches.

    A token is clipped as in `Cut`, by the ratio of its loss. `ratio_sum` and `ratio_max` are of token
    ratios, also for losses on other ratios.
    """

    tokens: int
    clipped_low: int
    clipped_high: int
    clipped_dual: int
    ratio_sum: float
    ratio_max: float

    @property
    def fraction(self) -> float:
        """Share of action tokens that are clipped; 0 without tokens."""
        return (self.clipped_low + self.clipped_high + self.clipped_dual) / max(self.tokens, 1)

    @property
    def ratio_mean(self) -> float:
        """Mean ratio over action tokens; 0 without tokens."""
        return self.ratio_sum / max(self.tokens, 1)


def clip_stats(*, logprobs: Tensor, old_logprobs: Tensor, mask: Tensor, cut: Cut | None) -> ClipStats:
    """Return ratio and clip statistics on action tokens; `cut` None: no token is clipped."""
    check_shapes(mask, logprobs=logprobs, old_logprobs=old_logprobs)
    actions = mask.bool()
    ratio = select(token_ratio(logprobs.detach(), old_logprobs, mask), mask).double()
    low, high, dual = cut or (torch.zeros_like(actions),) * 3
    largest = ratio.amax() if ratio.numel() else ratio.sum()
    sums = [actions.sum(), low.sum(), high.sum(), dual.sum(), ratio.sum(), largest]
    tokens, num_low, num_high, num_dual, ratio_sum, ratio_max = torch.stack([s.double() for s in sums]).tolist()
    return ClipStats(int(tokens), int(num_low), int(num_high), int(num_dual), ratio_sum, ratio_max)
