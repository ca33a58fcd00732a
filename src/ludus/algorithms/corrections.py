"""Weights against the mismatch between the engine that sampled and the learner that trains.

Every correction returns weights [N, L] without gradient, 0 where `mask` is 0, which multiply the policy loss.
They do not change its normaliser (`reject_sequence`, a filter, narrows the mask). What may go together says
`combinations.check_corrections`. To add one: the function, and its line in `CORRECTIONS`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from ludus.algorithms.algorithm import (
    BEHAVIOUR_ADVANTAGES,
    LEVELS,
    LIMITING_CORRECTIONS,
    Algorithm,
    number,
    word,
)
from ludus.algorithms.batch import TokenBatch
from ludus.algorithms.masking import check_shapes, clamped_ratio, select
from ludus.algorithms.mismatch import Mismatch, MismatchByLength, mismatch, mismatch_by_length

__all__ = [
    "CORRECTIONS",
    "CorrectionFn",
    "Level",
    "Mismatch",
    "MismatchByLength",
    "decoupled",
    "icepop",
    "limited",
    "mismatch",
    "mismatch_by_length",
    "none",
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
    level: Level = "token",
) -> Tensor:
    """`min(w, cap)`, truncated importance sampling, [N, L].

    `w` is, by `level`: `token` `exp(old - behavior)`; `sequence` `exp(sum_t (old - behavior))`, unbiased and
    of high variance; `geometric` `exp(mean_t (old - behavior))`. The last two are the same on all action
    tokens of a trajectory. Sources: https://fengyao.notion.site/off-policy-rl (token, cap 2, as in verl,
    OpenRLHF and slime) and "When Speed Kills Stability" (Liu et al. 2025; sequence, TRL takes cap 3).
    """
    return select(_weights(old_logprobs, behavior_logprobs, mask, level).clamp(max=cap), mask)


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
    by: Literal["geometric", "largest"] = "geometric",
) -> Tensor:
    """1 on the action tokens of trajectories whose ratio lies in `[low, high]`, else 0, [N, L].

    The ratio is `geometric`, `exp(mean_t (old - behavior))`, or the `largest` of the tokens. A filter, so
    what it drops leaves the normaliser: meant to narrow the mask. verl's `rollout_rs` has 2 and its inverse;
    the geometric form is often held far tighter (0.999 to 1.001 in verl's examples).
    """
    _check_bounds(low, high)
    if by not in ("geometric", "largest"):
        raise ValueError(f"by = {by!r} is neither 'geometric' nor 'largest'")
    if by == "geometric":
        ratio = _weights(old_logprobs, behavior_logprobs, mask, "geometric")
    else:
        tokens = _weights(old_logprobs, behavior_logprobs, mask, "token")
        largest = tokens.amax(1, keepdim=True) if tokens.shape[1] else tokens
        ratio = select(largest.expand(mask.shape), mask)
    return ((ratio >= low) & (ratio <= high) & mask.bool()).to(old_logprobs.dtype)


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


CorrectionFn = Callable[[TokenBatch, Algorithm], Tensor]


def limited(batch: TokenBatch, algorithm: Algorithm, weights: Tensor) -> tuple[Tensor, Tensor] | None:
    """The ratios [N, L] before and after what limits them; None where nothing does.

    A correction limits them at its level, and `weights` are its own; V-trace and Retrace limit those of
    tokens: what passes the smaller of their bounds is cut somewhere.
    """
    if algorithm.correction in LIMITING_CORRECTIONS:
        level = _level(algorithm)
        return _weights(batch.old_logprobs, batch.behavior_logprobs, batch.mask, level), weights
    if algorithm.advantage in BEHAVIOUR_ADVANTAGES:
        options = algorithm.options.advantage
        ratios = _weights(batch.old_logprobs, batch.behavior_logprobs, batch.mask, "token")
        bound = min(number(options, "rho_bar", 1.0), number(options, "c_bar", 1.0))  # 1 for Retrace
        return ratios, ratios.clamp(max=bound)
    return None


def _level(algorithm: Algorithm) -> Level:
    return word(algorithm.options.correction, "level", LEVELS)


CORRECTIONS: dict[str, CorrectionFn] = {
    "none": lambda b, a: none(
        old_logprobs=b.old_logprobs, behavior_logprobs=b.behavior_logprobs, mask=b.mask
    ),
    "tis": lambda b, a: tis(
        old_logprobs=b.old_logprobs,
        behavior_logprobs=b.behavior_logprobs,
        mask=b.mask,
        cap=a.tis_cap,
        level=_level(a),
    ),
    "icepop": lambda b, a: icepop(
        old_logprobs=b.old_logprobs,
        behavior_logprobs=b.behavior_logprobs,
        mask=b.mask,
        low=number(a.options.correction, "low", 0.5),
        high=number(a.options.correction, "high", 5.0),
        level=_level(a),
    ),
    "decoupled": lambda b, a: decoupled(
        old_logprobs=b.old_logprobs,
        behavior_logprobs=b.behavior_logprobs,
        mask=b.mask,
        cap=number(a.options.correction, "cap", 5.0),
    ),
    # What it drops has left the batch before (`training.learner`).
    "reject_sequence": lambda b, a: none(
        old_logprobs=b.old_logprobs, behavior_logprobs=b.behavior_logprobs, mask=b.mask
    ),
}
