"""Losses on pairs of a chosen and a rejected trajectory, or on trajectories judged alone, [N].

Tensors are [N, L] (chosen and rejected may differ in L), column `t` speaks of token `t`, and every sum runs
over action tokens only: what stands elsewhere never matters. The gradient flows through the policy's
log-probabilities alone. The loss of a batch is the mean over all its pairs, `sum / N` with the `N` of the
whole batch.

Names: `chosen_logprobs`, `rejected_logprobs` under the policy, `ref_...` under the reference.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from ludus.algorithms.masking import check_shapes, select


def dpo(
    *,
    chosen_logprobs: Tensor,
    rejected_logprobs: Tensor,
    ref_chosen_logprobs: Tensor,
    ref_rejected_logprobs: Tensor,
    chosen_mask: Tensor,
    rejected_mask: Tensor,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
    robust: bool = False,
) -> Tensor:
    """`-log sigmoid(beta h)`, `h = (lp_c - ref_c) - (lp_r - ref_r)`, arXiv:2305.18290 (eq. 7), [N].

    With `label_smoothing = e`: `-(1 - e) log sigmoid(beta h) - e log sigmoid(-beta h)`, conservative DPO, as
    TRL's `sigmoid` had it; with `robust` the difference of the two over `1 - 2 e`, unbiased under flipped
    labels (arXiv:2403.00409, TRL's `robust`). `beta` 0.1 as in TRL and the paper.
    """
    _check_smoothing(label_smoothing, robust)
    margin = _log_ratio(chosen_logprobs, ref_chosen_logprobs, chosen_mask) - _log_ratio(
        rejected_logprobs, ref_rejected_logprobs, rejected_mask
    )
    return _smoothed(beta * margin, label_smoothing, robust)


def simpo(
    *,
    chosen_logprobs: Tensor,
    rejected_logprobs: Tensor,
    chosen_mask: Tensor,
    rejected_mask: Tensor,
    beta: float = 2.0,
    gamma: float = 1.0,
    label_smoothing: float = 0.0,
) -> Tensor:
    """`-log sigmoid(beta (lp_c / n_c - lp_r / n_r) - gamma)`, without a reference, [N].

    arXiv:2405.14734 (`beta` 2 to 10, `gamma / beta` about 0.5). TRL's CPO trainer has `beta` 0.1 and
    `gamma` 0.5, and smooths labels as `dpo` does. A trajectory without action tokens counts 0.
    """
    _check_smoothing(label_smoothing, robust=False)
    chosen = _mean(_total(chosen_logprobs, chosen_mask), chosen_mask)
    rejected = _mean(_total(rejected_logprobs, rejected_mask), rejected_mask)
    return _smoothed(beta * (chosen - rejected) - gamma, label_smoothing, robust=False)


def ipo(
    *,
    chosen_logprobs: Tensor,
    rejected_logprobs: Tensor,
    ref_chosen_logprobs: Tensor,
    ref_rejected_logprobs: Tensor,
    chosen_mask: Tensor,
    rejected_mask: Tensor,
    beta: float = 0.1,
    per_token: bool = True,
) -> Tensor:
    """`(h - 1 / (2 beta))^2`, `h` the difference of the two log-ratios (arXiv:2310.12036, eq. 17), [N].

    With `per_token` each log-ratio is a mean over its action tokens, as TRL defines it after asking the
    authors; without, a sum, as the paper writes it and OpenRLHF has it.
    """
    chosen = _log_ratio(chosen_logprobs, ref_chosen_logprobs, chosen_mask)
    rejected = _log_ratio(rejected_logprobs, ref_rejected_logprobs, rejected_mask)
    if per_token:
        chosen, rejected = _mean(chosen, chosen_mask), _mean(rejected, rejected_mask)
    return (chosen - rejected - 1 / (2 * beta)).square()


def kto(
    *,
    logprobs: Tensor,
    ref_logprobs: Tensor,
    mask: Tensor,
    desirable: Tensor,
    baseline: Tensor | float,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> Tensor:
    """`w_d (1 - sigmoid(beta (h - z)))` where desirable, else `w_u (1 - sigmoid(beta (z - h)))`, [N].

    `h = sum_t m (lp - ref)` and `z` the `baseline`, one number for the whole batch from `kto_baseline`
    (arXiv:2402.01306, and TRL). `desirable` [N] bool: no pairs are needed.
    """
    if desirable.shape != mask.shape[:1]:
        raise ValueError(f"desirable must be [{mask.shape[0]}], not {list(desirable.shape)}")
    margin = beta * (_log_ratio(logprobs, ref_logprobs, mask) - baseline)
    good = desirable_weight * torch.sigmoid(-margin)
    return torch.where(desirable.bool(), good, undesirable_weight * torch.sigmoid(margin))


def kto_baseline(*, logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor) -> Tensor:
    """`max(0, mean_i sum_t m (lp - ref))`, [] without gradient: KTO's estimate of the KL.

    The rows are prompts with the answers of *other* prompts, over the whole batch of the step (TRL pairs each
    prompt with the next one's answer; a mean of means of microbatches would differ). Without rows 0.
    """
    return (_log_ratio(logprobs, ref_logprobs, mask).detach().sum() / max(mask.shape[0], 1)).clamp(min=0.0)


def _total(logprobs: Tensor, mask: Tensor) -> Tensor:
    check_shapes(mask, logprobs=logprobs)
    return select(logprobs, mask).sum(1)


def _log_ratio(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor) -> Tensor:
    check_shapes(mask, logprobs=logprobs, ref_logprobs=ref_logprobs)
    return (select(logprobs, mask) - select(ref_logprobs, mask).detach()).sum(1)


def _mean(totals: Tensor, mask: Tensor) -> Tensor:
    return totals / mask.bool().sum(1).clamp(min=1)


def _smoothed(logits: Tensor, label_smoothing: float, robust: bool) -> Tensor:
    kept, flipped = -(1 - label_smoothing) * logsigmoid(logits), label_smoothing * logsigmoid(-logits)
    return (kept + flipped) / (1 - 2 * label_smoothing) if robust else kept - flipped


def _check_smoothing(label_smoothing: float, robust: bool) -> None:
    if not 0 <= label_smoothing < (0.5 if robust else 1.0):
        raise ValueError(
            f"label_smoothing = {label_smoothing} must be at least 0 and below 0.5 (robust) or 1"
        )
