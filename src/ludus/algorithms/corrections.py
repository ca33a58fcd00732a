"""Training-inference mismatch: its statistics, and corrections by importance weights or rejection.

Every correction returns weights [N, L] without gradient, 0 where `mask` is 0, which multiply the policy loss. They
do not change its normaliser, except for `reject_sequence` and `m2po`, which are filters and narrow the mask.
`resolve.check_corrections` raises for incompatible parts. A new correction is one decorated function here.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from ludus.algorithms.algorithm import NOT_NEGATIVE, POSITIVE, CorrectionSpec, Need, Option, declared_in
from ludus.algorithms.kl import k3
from ludus.algorithms.tensors import SummedFields, Tensor, check_shapes, clamped_ratio, select, torch

Level = Literal["token", "sequence", "geometric"]
"""Level of a ratio: each token, the product over a trajectory, or its geometric mean."""
LEVELS: tuple[Level, ...] = ("token", "sequence", "geometric")
CRITERIA = ("geometric", "largest", "sequence", "token")
MEASURES = ("ratio", "k2", "k3")

LENGTH_BOUNDS = tuple(2**exponent for exponent in range(9, 18))
"""Upper bounds of the buckets of `mismatch_by_length`, in tokens from the sequence start: 512 to 131072."""


@CorrectionSpec(help="none")
def none(*, old_logprobs: Tensor, behavior_logprobs: Tensor, mask: Tensor) -> Tensor:
    """Return 1 on every action token: no correction."""
    check_shapes(mask, old_logprobs=old_logprobs, behavior_logprobs=behavior_logprobs)
    return mask.bool().to(old_logprobs.dtype)


@CorrectionSpec(
    help="truncated importance sampling",
    needs={Need.LIMITED_RATIO, Need.BEHAVIOR_RATIO},
    options={
        "low": Option("lower bound", NOT_NEGATIVE),
        "level": Option("ratio of a token, of the sequence, or its geometric mean", choices=LEVELS),
    },
)
def tis(
    *,
    old_logprobs: Tensor,
    behavior_logprobs: Tensor,
    mask: Tensor,
    cap: float = 2.0,
    low: float = 0.0,
    level: Level = "token",
) -> Tensor:
    """Return `max(low, min(w, cap))`, truncated importance sampling, [N, L].

    `w` depends on `level`: `token` `exp(old - behavior)`; `sequence` `exp(sum_t (old - behavior))`, unbiased and
    of high variance; `geometric` `exp(mean_t (old - behavior))`. The last two are the same on all action
    tokens of a trajectory. Sources: https://fengyao.notion.site/off-policy-rl (token, cap 2, as in verl,
    OpenRLHF and slime) and "When Speed Kills Stability" (Liu et al. 2025; sequence, TRL takes cap 3).
    `low` bounds the weight from below, as slime's `tis-clip-low`.
    """
    _check_bounds(low, cap)
    return select(importance_ratios(old_logprobs, behavior_logprobs, mask, level).clamp(low, cap), mask)


@CorrectionSpec(
    help="weights within bounds, 0 outside",
    needs={Need.LIMITED_RATIO, Need.BEHAVIOR_RATIO},
    options={
        "low": Option("lower bound", NOT_NEGATIVE),
        "high": Option("upper bound", POSITIVE),
        "level": Option("ratio of a token, of the sequence, or its geometric mean", choices=LEVELS),
    },
)
def icepop(
    *,
    old_logprobs: Tensor,
    behavior_logprobs: Tensor,
    mask: Tensor,
    low: float = 0.5,
    high: float = 5.0,
    level: Level = "token",
) -> Tensor:
    """Return `w` where `low <= w <= high`, else 0, [N, L]: a ratio out of bounds becomes 0 instead of the bound.

    arXiv:2510.18855 (Ring-1T; 0.5 and 5). `level` as in `tis`; `sequence` is the masked importance sampling of "When
    Speed Kills Stability" (Liu et al. 2025), TRL's default. Dropped tokens stay in the normaliser.
    """
    _check_bounds(low, high)
    weights = importance_ratios(old_logprobs, behavior_logprobs, mask, level)
    return torch.where((weights >= low) & (weights <= high), weights, 0.0)


@CorrectionSpec(
    help="weights of token ratios up to a cap",
    needs={Need.LIMITED_RATIO, Need.BEHAVIOR_RATIO},
    options={"cap": Option("upper bound of the ratio", POSITIVE)},
)
def decoupled(*, old_logprobs: Tensor, behavior_logprobs: Tensor, mask: Tensor, cap: float = 5.0) -> Tensor:
    """Return `min(exp(old - behavior), cap)`, [N, L]: with `ppo_clip` around `old`, the decoupled PPO objective.

    AReaL (arXiv:2505.24298): the clip is around the proximal policy, the weight is its ratio to the
    behaviour policy. The function is `tis` with a wider cap (AReaL's `behav_imp_weight_cap`, 5;
    its code drops tokens beyond it).
    """
    return tis(old_logprobs=old_logprobs, behavior_logprobs=behavior_logprobs, mask=mask, cap=cap)


@CorrectionSpec(
    help="trajectories or tokens out of bounds do not train",
    needs={Need.REJECTION},
    options={
        "low": Option("lower bound", NOT_NEGATIVE),
        "high": Option("upper bound", POSITIVE),
        "by": Option("what is compared with the bounds", choices=CRITERIA),
        "veto": Option("a token with a smaller ratio removes its trajectory; 0: none", NOT_NEGATIVE),
        "measure": Option("compare ratios, or an estimator of the KL", choices=MEASURES),
    },
)
def reject_sequence(
    *,
    old_logprobs: Tensor,
    behavior_logprobs: Tensor,
    mask: Tensor,
    low: float = 0.5,
    high: float = 2.0,
    by: Literal["geometric", "largest", "sequence", "token"] = "geometric",
    veto: float = 0.0,
    measure: Literal["ratio", "k2", "k3"] = "ratio",
) -> Tensor:
    """Return 1 on the action tokens whose ratio lies in `[low, high]`, else 0, [N, L].

    The ratio depends on `by`. Of the trajectory: `geometric`, `exp(mean_t (old - behavior))`; `sequence`,
    `exp(sum_t (old - behavior))`; the `largest` of its tokens; of each token: `token`. A trajectory
    with any token ratio below `veto` has weight 0 on all tokens.

    With `measure` `k2` or `k3` the bound `high` is on `g^2 / 2` or `exp(g) - 1 - g`, `g = old - behavior`:
    their mean, sum or maximum over the trajectory, or each token's own; `low` is ignored.

    A filter: dropped tokens are excluded from the normaliser. verl's `rollout_rs` (token, sequence, geometric,
    and `seq_mean_k3` etc.) defaults to 2 and its inverse; geometric bounds are often much tighter (0.999 to
    1.001 in verl's examples). Its `rollout_token_veto_threshold` is `veto` (1e-4).
    """
    if measure == "ratio":
        _check_bounds(low, high)
    if by not in CRITERIA:
        raise ValueError(f"by = {by!r} is not one of {', '.join(CRITERIA)}")
    if measure not in MEASURES:
        raise ValueError(f"measure = {measure!r} is not one of {', '.join(MEASURES)}")
    tokens = importance_ratios(old_logprobs, behavior_logprobs, mask, "token")
    gap = (select(old_logprobs, mask) - select(behavior_logprobs, mask)).detach()
    if measure != "ratio":
        found, low = _summary(gap.square() / 2 if measure == "k2" else gap.expm1() - gap, mask, by), 0.0
    elif by == "largest":
        found = _summary(tokens, mask, by)
    else:
        found = clamped_ratio(_summary(gap, mask, by))
    vetoed = (mask.bool() & (tokens < veto)).any(1, keepdim=True)
    return ((found >= low) & (found <= high) & mask.bool() & ~vetoed).to(old_logprobs.dtype)


def _summary(values: Tensor, mask: Tensor, by: str) -> Tensor:
    """Return the mean, sum or maximum of `values` [N, L] over the actions of each trajectory, [N, 1].

    `values` are 0 off the mask; returned unchanged if `by` is `token`."""
    if by == "largest":
        return values.amax(1, keepdim=True) if values.shape[1] else values
    if by == "token":
        return values
    total = values.sum(1, keepdim=True)
    return total / mask.bool().sum(1, keepdim=True).clamp(min=1) if by == "geometric" else total


@CorrectionSpec(
    help="tokens with the largest log-ratios do not train",
    needs={Need.REJECTION},
    options={"bound": Option("bound of the mean squared log-ratio", POSITIVE)},
)
def m2po(*, old_logprobs: Tensor, behavior_logprobs: Tensor, mask: Tensor, bound: float = 0.04) -> Tensor:
    """Return 0 on the action tokens of largest `(old - behavior)^2`, 1 on the others, [N, L].

    Second-moment trust policy optimisation (arXiv:2510.01161, `bound` 0.04): as few tokens as possible are
    removed, in descending order, so that the mean square of the others is below `bound`; at least one stays, as
    in AReaL. Requires the whole batch of the step. A filter like `reject_sequence`.
    """
    check_shapes(mask, old_logprobs=old_logprobs, behavior_logprobs=behavior_logprobs)
    actions = mask.bool()
    moments = (old_logprobs - behavior_logprobs).detach()[actions].double().square()
    order = torch.argsort(moments, descending=True, stable=True)
    rest = moments[order].flip(0).cumsum(0).flip(0)  # of each token and those after it
    counts = torch.arange(len(order), 0, -1, device=rest.device)
    gone = int((rest / counts >= bound).sum())  # the means fall, as the moments do
    keep = torch.ones_like(moments)
    keep[order[: min(gone, max(len(order) - 1, 0))]] = 0
    found = torch.zeros(mask.shape, dtype=old_logprobs.dtype, device=old_logprobs.device)
    found[actions] = keep.to(found)
    return found


def opsm(*, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, delta: float = 1e-4) -> Tensor:
    """Return 0 where `A < 0` and `mean_t (old - logprobs)` of the trajectory is above `delta`, else 1, [N, L].

    Off-policy sequence masking (DeepSeek-V3.2, arXiv:2512.02556; `old` is the sampling policy, as passed by
    `objective`; slime's `use-opsm`, `delta` 1e-4, uses the learner's by default): failed trajectories that have
    become unlikely have no policy loss. Multiplies the loss in addition to any correction; `logprobs` are those
    of the trained policy, without gradient.
    """
    check_shapes(mask, logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages)
    gap = (select(old_logprobs, mask) - select(logprobs, mask)).detach().sum(1, keepdim=True)
    far = gap / mask.bool().sum(1, keepdim=True).clamp(min=1) > delta
    return (mask.bool() & ~(far & (advantages < 0))).to(logprobs.dtype)


def importance_ratios(old_logprobs: Tensor, behavior_logprobs: Tensor, mask: Tensor, level: Level) -> Tensor:
    """Return `exp(old - behavior)` at `level`, [N, L], 0 off the mask, without gradient."""
    check_shapes(mask, old_logprobs=old_logprobs, behavior_logprobs=behavior_logprobs)
    if level not in LEVELS:
        raise ValueError(f"level = {level!r} is not one of {', '.join(LEVELS)}")
    gap = (select(old_logprobs, mask) - select(behavior_logprobs, mask)).detach()
    return select(clamped_ratio(_summary(gap, mask, level)).expand(mask.shape), mask)


def _check_bounds(low: float, high: float) -> None:
    if not 0 <= low <= high:
        raise ValueError(f"low and high must be bounds of a ratio, 0 <= low <= high: {low}, {high}")


@dataclass(frozen=True, slots=True)
class Mismatch(SummedFields):
    """Sums over action tokens; `+` joins microbatches.

    `w` is the ratio `exp(old - behavior)` at the level of the correction (each token by
    default), before truncation; `truncated` and `dropped` count the tokens with a reduced and with a zero weight.
    """

    tokens: int
    gap_sum: float
    gap_max: float
    weight_sum: float
    weight_square_sum: float
    k3_sum: float
    truncated: int
    dropped: int

    @property
    def gap_mean(self) -> float:
        """Mean of `|old - behavior|`, nats; 0 without tokens."""
        return self.gap_sum / max(self.tokens, 1)

    @property
    def effective_share(self) -> float:
        """Effective sample size `(sum w)^2 / (n sum w^2)` in (0, 1]; 1 without tokens."""
        return self.weight_sum**2 / (self.tokens * self.weight_square_sum) if self.tokens else 1.0

    @property
    def k3(self) -> float:
        """Estimate of KL(engine || learner), nats per token; 0 without tokens."""
        return self.k3_sum / max(self.tokens, 1)

    @property
    def truncated_share(self) -> float:
        """Share of action tokens whose weight is smaller than `w`, and not 0; 0 without tokens."""
        return self.truncated / max(self.tokens, 1)

    @property
    def dropped_share(self) -> float:
        """Share of action tokens whose weight is 0; 0 without tokens."""
        return self.dropped / max(self.tokens, 1)


@dataclass(frozen=True, slots=True)
class MismatchByLength:
    """`Mismatch` by token position in the sequence; `+` joins microbatches with the same `bounds`.

    Bucket `j` holds the tokens with `bounds[j-1] < number <= bounds[j]`, counted from 1 in each sequence; an
    additional last bucket holds the rest.
    """

    bounds: tuple[int, ...]
    buckets: tuple[Mismatch, ...]

    @property
    def labels(self) -> tuple[str, ...]:
        """Bucket names: `<=512`, ..., `>131072`."""
        return (*(f"<={bound}" for bound in self.bounds), f">{self.bounds[-1]}" if self.bounds else "all")

    def __add__(self, other: MismatchByLength) -> MismatchByLength:
        if self.bounds != other.bounds:
            raise ValueError(f"buckets that end at {self.bounds} and {other.bounds} do not add up")
        return MismatchByLength(self.bounds, tuple(a + b for a, b in zip(self.buckets, other.buckets, strict=True)))


def mismatch(
    *,
    old_logprobs: Tensor,
    behavior_logprobs: Tensor,
    mask: Tensor,
    ratios: Tensor | None = None,
    weights: Tensor | None = None,
) -> Mismatch:
    """Return the log-probability difference of learner and engine on action tokens, and the effect of a correction.

    `ratios` and `weights` [N, L] are the importance ratios before and after the limits of the correction. If None,
    `ratios` are those of single tokens, and `weights` equal `ratios`. Raises ValueError for wrong shapes.
    """
    check_shapes(mask, old_logprobs=old_logprobs, behavior_logprobs=behavior_logprobs)
    if ratios is None:
        ratios = clamped_ratio(select(old_logprobs, mask) - select(behavior_logprobs, mask))
    weights = ratios if weights is None else weights
    check_shapes(mask, ratios=ratios, weights=weights)
    return _record(_sums(old_logprobs, behavior_logprobs, mask, ratios, weights).tolist())


def mismatch_by_length(
    *,
    old_logprobs: Tensor,
    behavior_logprobs: Tensor,
    mask: Tensor,
    positions: Tensor | None = None,
    bounds: Sequence[int] = LENGTH_BOUNDS,
) -> MismatchByLength:
    """Return `mismatch` by token position in the sequence, prompt and observations included.

    `positions` [N, L] integers from 0 (required for packed batches; if None, the column index). Masked positions
    are ignored. `bounds` must ascend. Raises ValueError otherwise and for wrong shapes.
    """
    ends = tuple(bounds)
    if any(low >= high for low, high in pairwise(ends)):
        raise ValueError(f"bounds must ascend: {ends}")
    index = torch.arange(mask.shape[-1], device=mask.device).expand(mask.shape) if positions is None else positions
    check_shapes(mask, positions=index)
    # Token number p + 1 <= bound is position p < bound.
    bucket = torch.bucketize(index.contiguous(), torch.tensor(ends, device=mask.device, dtype=torch.long), right=True)
    check_shapes(mask, old_logprobs=old_logprobs, behavior_logprobs=behavior_logprobs)
    ratios = clamped_ratio(select(old_logprobs, mask) - select(behavior_logprobs, mask))
    rows = [
        _sums(old_logprobs, behavior_logprobs, mask.bool() & (bucket == j), ratios, ratios)
        for j in range(len(ends) + 1)
    ]
    return MismatchByLength(ends, tuple(_record(row) for row in torch.stack(rows).tolist()))


def _sums(old_logprobs: Tensor, behavior_logprobs: Tensor, mask: Tensor, ratios: Tensor, weights: Tensor) -> Tensor:
    """Return the fields of `Mismatch` in their order, [8] float64."""
    old = select(old_logprobs, mask).detach().double()
    behavior = select(behavior_logprobs, mask).detach().double()
    before, after = select(ratios, mask).detach().double(), select(weights, mask).detach().double()
    gap = (old - behavior).abs()
    sums = [
        mask.bool().sum(),
        gap.sum(),
        gap.amax() if gap.numel() else gap.sum(),
        before.sum(),
        before.square().sum(),
        select(k3(logprobs=behavior, ref_logprobs=old), mask).sum(),
        ((after > 0) & (after < before)).sum(),
        ((after == 0) & mask.bool()).sum(),
    ]
    return torch.stack([s.double() for s in sums])


def _record(sums: list[float]) -> Mismatch:
    tokens, gap, gap_max, weight, weight_square, k3_sum, truncated, dropped = sums
    return Mismatch(int(tokens), gap, gap_max, weight, weight_square, k3_sum, int(truncated), int(dropped))


CORRECTIONS: Mapping[str, CorrectionSpec] = declared_in(CorrectionSpec, [sys.modules[__name__]])
"""The values of `algorithm.correction`."""
