"""Weights against the mismatch between the engine that sampled and the learner that trains.

Every correction returns weights [N, L] without gradient, 0 where `mask` is 0, which multiply the policy loss.
They do not change its normaliser (`reject_sequence` and `m2po`, filters, narrow the mask). What may go
together says `compatibility.check_corrections`. To add one, write its function here and its spec in
`spec.corrections`.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from ludus.algorithms.batch import TokenBatch
from ludus.algorithms.masking import check_shapes, clamped_ratio, select
from ludus.algorithms.spec.algorithm import Algorithm
from ludus.algorithms.spec.parts import Need
from ludus.algorithms.spec.words import CRITERIA, LEVELS, MEASURES
from ludus.algorithms.train_inference_mismatch import Mismatch, MismatchByLength, mismatch, mismatch_by_length

__all__ = [
    "Level",
    "Mismatch",
    "MismatchByLength",
    "decoupled",
    "icepop",
    "limited",
    "m2po",
    "mismatch",
    "mismatch_by_length",
    "none",
    "opsm",
    "reject_sequence",
    "tis",
]

Level = Literal["token", "sequence", "geometric"]
"""Over what a ratio is taken: each token, the product over a trajectory, or its geometric mean."""


def none(*, old_logprobs: Tensor, behavior_logprobs: Tensor, mask: Tensor) -> Tensor:
    """1 on every action token: sampler and learner are taken to agree."""
    check_shapes(mask, old_logprobs=old_logprobs, behavior_logprobs=behavior_logprobs)
    return mask.bool().to(old_logprobs.dtype)


def tis(
    *,
    old_logprobs: Tensor,
    behavior_logprobs: Tensor,
    mask: Tensor,
    cap: float = 2.0,
    low: float = 0.0,
    level: Level = "token",
) -> Tensor:
    """`max(low, min(w, cap))`, truncated importance sampling, [N, L].

    `w` is, by `level`: `token` `exp(old - behavior)`; `sequence` `exp(sum_t (old - behavior))`, unbiased and
    of high variance; `geometric` `exp(mean_t (old - behavior))`. The last two are the same on all action
    tokens of a trajectory. Sources: https://fengyao.notion.site/off-policy-rl (token, cap 2, as in verl,
    OpenRLHF and slime) and "When Speed Kills Stability" (Liu et al. 2025; sequence, TRL takes cap 3).
    `low` bounds the weight from below, as slime's `tis-clip-low`.
    """
    _check_bounds(low, cap)
    return select(_weights(old_logprobs, behavior_logprobs, mask, level).clamp(low, cap), mask)


def icepop(
    *,
    old_logprobs: Tensor,
    behavior_logprobs: Tensor,
    mask: Tensor,
    low: float = 0.5,
    high: float = 5.0,
    level: Level = "token",
) -> Tensor:
    """`w` where `low <= w <= high`, else 0, [N, L]: a ratio out of bounds is dropped, not truncated.

    arXiv:2510.18855 (Ring-1T; 0.5 and 5). `level` as in `tis`; `sequence` is the masked importance sampling
    of "When Speed Kills Stability" (Liu et al. 2025), TRL's default. Dropped tokens stay in the
    normaliser.
    """
    _check_bounds(low, high)
    weights = _weights(old_logprobs, behavior_logprobs, mask, level)
    return torch.where((weights >= low) & (weights <= high), weights, 0.0)


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
    """1 on the action tokens whose ratio lies in `[low, high]`, else 0, [N, L].

    The ratio is, by `by`, that of the trajectory: `geometric`, `exp(mean_t (old - behavior))`; `sequence`,
    `exp(sum_t (old - behavior))`; the `largest` of its tokens; or with `token` each token's own. A trajectory
    with a token whose ratio is below `veto` is 0 throughout, whatever the rest.

    With `measure` `k2` or `k3` the bound `high` is on `g^2 / 2` or `exp(g) - 1 - g`, `g = old - behavior`:
    their mean, sum or maximum over the trajectory, or each token's own; `low` is not read.

    A filter, so what it drops leaves the normaliser: meant to narrow the mask. verl's `rollout_rs` (token,
    sequence, geometric; `seq_mean_k3` and its like) has 2 and its inverse; the geometric form is often held
    far tighter (0.999 to 1.001 in verl's examples), and its `rollout_token_veto_threshold` is `veto` (1e-4).
    """
    if measure == "ratio":
        _check_bounds(low, high)
    if by not in CRITERIA:
        raise ValueError(f"by = {by!r} is none of {', '.join(CRITERIA)}")
    if measure not in MEASURES:
        raise ValueError(f"measure = {measure!r} is none of {', '.join(MEASURES)}")
    tokens = _weights(old_logprobs, behavior_logprobs, mask, "token")
    if measure != "ratio":
        gap = (select(old_logprobs, mask) - select(behavior_logprobs, mask)).detach()
        found, low = _summary(gap.square() / 2 if measure == "k2" else gap.expm1() - gap, mask, by), 0.0
    elif by == "largest":
        found = _summary(tokens, mask, by)
    else:
        found = _weights(old_logprobs, behavior_logprobs, mask, by)
    vetoed = (mask.bool() & (tokens < veto)).any(1, keepdim=True)
    return ((found >= low) & (found <= high) & mask.bool() & ~vetoed).to(old_logprobs.dtype)


def _summary(values: Tensor, mask: Tensor, by: str) -> Tensor:
    """Mean, sum or maximum of values [N, L], 0 off the mask, over the actions of each trajectory, [N, 1]; by
    token the values."""
    if by == "largest":
        return values.amax(1, keepdim=True) if values.shape[1] else values
    if by == "token":
        return values
    total = values.sum(1, keepdim=True)
    return total / mask.bool().sum(1, keepdim=True).clamp(min=1) if by == "geometric" else total


def m2po(*, old_logprobs: Tensor, behavior_logprobs: Tensor, mask: Tensor, bound: float = 0.04) -> Tensor:
    """1 on the action tokens that stay, 0 on those of largest `(old - behavior)^2`, [N, L].

    Second-moment trust policy optimisation (arXiv:2510.01161, `bound` 0.04): as few tokens as possible go, in
    descending order, so that the mean of the square over the others is below `bound`; one stays in any case,
    as in AReaL. Over the whole batch of the step, so all of it belongs here. A filter, as `reject_sequence`.
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
    """0 where `A < 0` and `mean_t (old - logprobs)` of the trajectory is above `delta`, else 1, [N, L].

    Off-policy sequence masking (DeepSeek-V3.2, arXiv:2512.02556; `old` is the policy that sampled, and here
    the settings give that; slime's `use-opsm`, `delta` 1e-4, takes the learner's unless told otherwise): what
    failed and has become unlikely does not push further. It multiplies the policy loss, beside any
    correction; `logprobs` are those being trained, without gradient.
    """
    check_shapes(mask, logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages)
    gap = (select(old_logprobs, mask) - select(logprobs, mask)).detach().sum(1, keepdim=True)
    far = gap / mask.bool().sum(1, keepdim=True).clamp(min=1) > delta
    return (mask.bool() & ~(far & (advantages < 0))).to(logprobs.dtype)


def decoupled(*, old_logprobs: Tensor, behavior_logprobs: Tensor, mask: Tensor, cap: float = 5.0) -> Tensor:
    """`min(exp(old - behavior), cap)`, [N, L]: with `ppo_clip` around `old`, the decoupled PPO objective.

    AReaL (arXiv:2505.24298): the clip is around the proximal policy, the weight leads from the
    behaviour policy to it. The numbers are those of `tis` with a wider cap (AReaL's `behav_imp_weight_cap`,
    5; its code drops tokens beyond it).
    """
    return tis(old_logprobs=old_logprobs, behavior_logprobs=behavior_logprobs, mask=mask, cap=cap)


def _weights(old_logprobs: Tensor, behavior_logprobs: Tensor, mask: Tensor, level: Level) -> Tensor:
    check_shapes(mask, old_logprobs=old_logprobs, behavior_logprobs=behavior_logprobs)
    gap = (select(old_logprobs, mask) - select(behavior_logprobs, mask)).detach()
    if level == "sequence":
        gap = gap.sum(1, keepdim=True)
    elif level == "geometric":
        gap = gap.sum(1, keepdim=True) / mask.bool().sum(1, keepdim=True).clamp(min=1)
    elif level != "token":
        raise ValueError(f"level = {level!r} is none of token, sequence, geometric")
    return select(clamped_ratio(gap).expand(mask.shape), mask)


def _check_bounds(low: float, high: float) -> None:
    if not 0 <= low <= high:
        raise ValueError(f"low and high must be bounds of a ratio, 0 <= low <= high: {low}, {high}")


def limited(batch: TokenBatch, algorithm: Algorithm, weights: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return the ratios [N, L] before and after what limits them, or None if nothing does.

    A correction limits them at its level, and `weights` are its own; V-trace and Retrace limit those of
    tokens by the smaller of their bounds.
    """
    if algorithm.correction_spec.has(Need.LIMITED_RATIO):
        level = _level(algorithm)
        return _weights(batch.old_logprobs, batch.behavior_logprobs, batch.mask, level), weights
    if algorithm.advantage_spec.has(Need.BEHAVIOR_RATIO):
        ratios = _weights(batch.old_logprobs, batch.behavior_logprobs, batch.mask, "token")
        names = [name for name in ("rho_bar", "c_bar") if name in algorithm.advantage_spec.options]
        bound = min((algorithm.number("advantage", name) for name in names), default=1.0)
        return ratios, ratios.clamp(max=bound)
    return None


def _level(algorithm: Algorithm) -> Level:
    has_level = "level" in algorithm.correction_spec.options
    return algorithm.word("correction", "level", LEVELS) if has_level else LEVELS[0]


def no_weights(b: TokenBatch, a: Algorithm) -> Tensor:
    """Return 1 at each token: no correction, or one that has removed its tokens before."""
    del a
    return none(old_logprobs=b.old_logprobs, behavior_logprobs=b.behavior_logprobs, mask=b.mask)


def weights_of_tis(b: TokenBatch, a: Algorithm) -> Tensor:
    """Call `tis`."""
    return tis(
        old_logprobs=b.old_logprobs,
        behavior_logprobs=b.behavior_logprobs,
        mask=b.mask,
        cap=a.tis_cap,
        low=a.number("correction", "low"),
        level=_level(a),
    )


def weights_of_icepop(b: TokenBatch, a: Algorithm) -> Tensor:
    """Call `icepop`."""
    return icepop(
        old_logprobs=b.old_logprobs,
        behavior_logprobs=b.behavior_logprobs,
        mask=b.mask,
        low=a.number("correction", "low"),
        high=a.number("correction", "high"),
        level=_level(a),
    )


def weights_of_decoupled(b: TokenBatch, a: Algorithm) -> Tensor:
    """Call `decoupled`."""
    return decoupled(
        old_logprobs=b.old_logprobs,
        behavior_logprobs=b.behavior_logprobs,
        mask=b.mask,
        cap=a.number("correction", "cap"),
    )


def kept_by_reject_sequence(old: Tensor, behavior: Tensor, mask: Tensor, a: Algorithm) -> Tensor:
    """Call `reject_sequence`; [N, L] bool."""
    return reject_sequence(
        old_logprobs=old,
        behavior_logprobs=behavior,
        mask=mask,
        low=a.number("correction", "low"),
        high=a.number("correction", "high"),
        by=a.word("correction", "by", CRITERIA),
        veto=a.number("correction", "veto"),
        measure=a.word("correction", "measure", MEASURES),
    ).bool()


def kept_by_m2po(old: Tensor, behavior: Tensor, mask: Tensor, a: Algorithm) -> Tensor:
    """Call `m2po`; [N, L] bool."""
    bound = a.number("correction", "bound")
    return m2po(old_logprobs=old, behavior_logprobs=behavior, mask=mask, bound=bound).bool()
