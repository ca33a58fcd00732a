"""Calibration of per-turn reward tiers on recorded rollouts, arXiv:2604.02869 (iterative reward calibration).

A *tier* is a kind of turn (right call, read-only call, error, ...). Its reward is proportional to
the correlation of its presence with success, or 0 if that is small. `tier_advantages` checks whether the advantage of
each tier has the sign of its reward; if the signs differ, calibrate again on new rollouts.
"""

from __future__ import annotations

from dataclasses import dataclass

from ludus.algorithms.advantages.action_tokens import turns_of
from ludus.algorithms.tensors import Tensor, numbers, torch


@dataclass(frozen=True, slots=True)
class TierCalibration:
    """Statistics of recorded rollouts for each of C tiers; all [C] float64.

    `correlation` between the presence of the tier and success (point-biserial; 0 if either is constant); `reward` is
    the calibrated reward; `in_success`, `in_failure` are the shares of such trajectories with the tier.
    """

    correlation: Tensor
    reward: Tensor
    in_success: Tensor
    in_failure: Tensor


def calibrate_tiers(
    *, tiers: Tensor, success: Tensor, num_tiers: int, alpha: float = 1.0, threshold: float = 0.1
) -> TierCalibration:
    """Return `r_c = alpha rho_c` if `|rho_c| > threshold`, else 0.

    `tiers` [N, K] integers, the tier of each turn of N trajectories, negative for none and padding;
    `success` [N] of 0 and 1; `rho_c` the correlation of `1[c occurs in i]` with `success_i`. The paper
    does not specify the threshold; 0.1 is our choice. Raises ValueError for shapes, a tier of at least `num_tiers`,
    or another success value (naming the row).
    """
    _check_tiers(tiers, num_tiers)
    won = numbers("success", success, tiers)
    invalid = ((won != 0) & (won != 1)).nonzero()
    if invalid.numel():
        row = int(invalid[0])
        raise ValueError(f"success[{row}] is {float(won[row])}; it must be 0 or 1")
    present = (tiers[:, :, None] == torch.arange(num_tiers, device=tiers.device)).any(1).double()
    of_success, of_failure = won.sum().clamp(min=1), (1 - won).sum().clamp(min=1)
    has = present - present.mean(0)
    outcome = (won - won.mean())[:, None]
    scale = (has.square().sum(0) * outcome.square().sum()).sqrt()
    varied = (present.amin(0) < present.amax(0)) & (won.amin() < won.amax())
    correlation = torch.where(varied, (has * outcome).sum(0) / torch.where(varied, scale, 1.0), 0.0)
    return TierCalibration(
        correlation=correlation,
        reward=torch.where(correlation.abs() > threshold, alpha * correlation, 0.0),
        in_success=(present * won[:, None]).sum(0) / of_success,
        in_failure=(present * (1 - won)[:, None]).sum(0) / of_failure,
    )


def tier_advantages(*, advantages: Tensor, tiers: Tensor, turn: Tensor, mask: Tensor, num_tiers: int) -> Tensor:
    """Return the mean turn advantage of each tier, [C] float64; 0 for a tier without turns.

    `advantages`, `turn`, `mask` [N, L]; a turn counts once, with the advantage of its first action token.
    A tier is misaligned if this and its reward have opposite signs.
    """
    _check_tiers(tiers, num_tiers)
    turns = turns_of(turn, mask, tiers.shape[1])
    of_turns = turns.at_turn_start(turns.tokens.take("advantages", advantages))
    counted = (tiers.to(mask.device)[:, :, None] == torch.arange(num_tiers, device=mask.device)).double()
    counted = counted * turns.reached[:, :, None]
    totals = (counted * of_turns[:, :, None]).sum((0, 1))
    return totals / counted.sum((0, 1)).clamp(min=1)


def _check_tiers(tiers: Tensor, num_tiers: int) -> None:
    if tiers.ndim != 2 or tiers.is_floating_point():
        raise ValueError(f"tiers must be [N, K] integers, not {list(tiers.shape)} {tiers.dtype}")
    past = (tiers >= num_tiers).any(1).nonzero()
    if past.numel():
        raise ValueError(f"row {int(past[0])} has a tier index above {num_tiers - 1}")
