"""Losses on pairs of a chosen and a rejected trajectory, or on single labelled trajectories, [N].

Inputs are [N, L] (chosen and rejected may differ in L); sums run over action tokens, and the gradient flows through
the log-probabilities of the policy only. The loss of a batch is the mean over all its pairs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TypedDict, Unpack

from ludus.algorithms.tensors import Tensor, check_per_row, check_shapes, select, torch


@dataclass(frozen=True, slots=True)
class PreferenceSpec:
    """A preference loss, its inputs and the settings that it reads.

    `options`: parameters of `function` named as in the section `preference`. `beta`: the default of `preference.beta`.
    `reference`: log-probabilities of a reference. `mismatched`: completions of other pairs, for a KL estimate.
    `running_mean`: the mean of all implicit rewards so far. `per_token`: margins are means over tokens. `baseline`: the
    parameter that takes either, reported as `baseline_metric`. `unpaired`: a loss on single trajectories.
    """

    function: Callable[..., Tensor]
    options: tuple[str, ...] = ()
    beta: float = 0.1
    reference: bool = True
    per_token: bool = False
    unpaired: bool = False
    mismatched: bool = False
    running_mean: bool = False
    baseline: str = ""
    baseline_metric: str = ""


class PairInputs(TypedDict):
    """The inputs of every loss on pairs, all [N, L]."""

    chosen_logprobs: Tensor
    rejected_logprobs: Tensor
    ref_chosen_logprobs: Tensor
    ref_rejected_logprobs: Tensor
    chosen_mask: Tensor
    rejected_mask: Tensor


def dpo(*, beta: float = 0.1, label_smoothing: float = 0.0, robust: bool = False, **pair: Unpack[PairInputs]) -> Tensor:
    """Return `-log sigmoid(beta h)`, `h = (lp_c - ref_c) - (lp_r - ref_r)`, arXiv:2305.18290 (eq. 7), [N].

    With `label_smoothing = e`: `-(1 - e) log sigmoid(beta h) - e log sigmoid(-beta h)`, conservative DPO, as
    TRL's `sigmoid`; with `robust` the difference of the two over `1 - 2 e`, unbiased under flipped
    labels (arXiv:2403.00409, TRL's `robust`). `beta` 0.1 as in TRL and the paper.
    """
    _check_smoothing(label_smoothing, robust)
    return _smoothed(_margin(beta, pair), label_smoothing, robust)


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
    """Return `-log sigmoid(beta (lp_c / n_c - lp_r / n_r) - gamma)`, without a reference, [N].

    arXiv:2405.14734 (`beta` 2 to 10, `gamma / beta` about 0.5). TRL's CPO trainer has `beta` 0.1 and
    `gamma` 0.5, and smooths labels as `dpo` does. A trajectory without action tokens counts as 0.
    """
    _check_smoothing(label_smoothing, robust=False)
    chosen = _mean(_total(chosen_logprobs, chosen_mask), chosen_mask)
    rejected = _mean(_total(rejected_logprobs, rejected_mask), rejected_mask)
    return _smoothed(beta * (chosen - rejected) - gamma, label_smoothing, robust=False)


def ipo(*, beta: float = 0.1, per_token: bool = True, **pair: Unpack[PairInputs]) -> Tensor:
    """Return `(h - 1 / (2 beta))^2`, `h` the difference of the two log-ratios (arXiv:2310.12036, eq. 17), [N].

    With `per_token` each log-ratio is a mean over its action tokens, as in TRL (confirmed by the
    authors); otherwise a sum, as in the paper and OpenRLHF.
    """
    chosen, rejected = _log_ratios(pair)
    if per_token:
        chosen, rejected = _mean(chosen, pair["chosen_mask"]), _mean(rejected, pair["rejected_mask"])
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
    """Return `w_d (1 - sigmoid(beta (h - z)))` where desirable, else `w_u (1 - sigmoid(beta (z - h)))`, [N].

    `h = sum_t m (lp - ref)` and `z` the `baseline`, one number for the whole batch from `kto_baseline`
    (arXiv:2402.01306, and TRL). `desirable` [N] bool: unpaired data.
    """
    _check_desirable(desirable, mask)
    margin = beta * (_log_ratio(logprobs, ref_logprobs, mask) - baseline)
    good = desirable_weight * torch.sigmoid(-margin)
    return torch.where(desirable.bool(), good, undesirable_weight * torch.sigmoid(margin))


def kto_baseline(*, logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor) -> Tensor:
    """Return `max(0, mean_i sum_t m (lp - ref))`, [] without gradient: KTO's estimate of the KL.

    The rows are prompts with the completions of *other* prompts, over the whole batch of the step (TRL pairs each
    prompt with the next completion; a mean of microbatch means would differ). 0 for an empty batch.
    """
    return (_log_ratio(logprobs, ref_logprobs, mask).detach().sum() / max(mask.shape[0], 1)).clamp(min=0.0)


def hinge(*, beta: float = 0.1, **pair: Unpack[PairInputs]) -> Tensor:
    """Return `max(0, 1 - beta h)`, `h` as in `dpo`, [N]: a pair beyond the margin has no gradient.

    SLiC's hinge (arXiv:2305.10425) in the normalised form of arXiv:2309.06657; TRL's `hinge`.
    """
    return torch.relu(1 - _margin(beta, pair))


def exo(*, beta: float = 0.1, label_smoothing: float = 1e-3, **pair: Unpack[PairInputs]) -> Tensor:
    """Return `s (log s - log(1 - e)) + (1 - s) (log(1 - s) - log e)`, `s = sigmoid(beta h)`, [N].

    The reverse KL from the labels smoothed by `e` = `label_smoothing` (arXiv:2402.00856, eq. 16; TRL's
    `exo_pair`, which takes 1e-3 for 0). Raises ValueError unless `label_smoothing` is above 0 and below 1.
    """
    if not 0 < label_smoothing < 1:
        raise ValueError(f"label_smoothing = {label_smoothing} must be above 0 and below 1 for exo")
    logits = _margin(beta, pair)
    kept = logits.sigmoid() * (_logsigmoid(logits) - math.log1p(-label_smoothing))
    return kept + (-logits).sigmoid() * (_logsigmoid(-logits) - math.log(label_smoothing))


def nca(*, beta: float = 0.1, **pair: Unpack[PairInputs]) -> Tensor:
    """Return `-log sigmoid(c) - 0.5 log sigmoid(-c) - 0.5 log sigmoid(-r)`, [N], with `c, r = beta (lp - ref)`.

    Noise contrastive alignment (arXiv:2402.05369, for pairs; TRL's `nca_pair`): anchors both
    likelihoods to the reference, not only their difference.
    """
    chosen, rejected = (beta * ratio for ratio in _log_ratios(pair))
    return -_logsigmoid(chosen) - 0.5 * _logsigmoid(-chosen) - 0.5 * _logsigmoid(-rejected)


def sppo(*, beta: float = 0.1, **pair: Unpack[PairInputs]) -> Tensor:
    """Return `(c - 1 / (2 beta))^2 + (r + 1 / (2 beta))^2`, [N], with `c, r = lp - ref`, sums over tokens.

    Self-play preference optimisation (arXiv:2405.00675) with the probability of winning 1 for the chosen and
    0 for the rejected; TRL's `sppo_hard`.
    """
    chosen, rejected = _log_ratios(pair)
    return (chosen - 0.5 / beta).square() + (rejected + 0.5 / beta).square()


def discopop(*, beta: float = 0.05, tau: float = 0.05, **pair: Unpack[PairInputs]) -> Tensor:
    """Return `-(1 - g) log sigmoid(beta h) + g exp(-beta h)`, `g = sigmoid(beta h / tau)`, [N].

    DiscoPOP (arXiv:2406.08414, `beta` and `tau` 0.05): a loss discovered by LLM search. `beta` is 0.1 in
    TRL's `discopop`. Raises ValueError unless `tau` is above 0.
    """
    if tau <= 0:
        raise ValueError(f"tau must be above 0, not {tau}")
    logits = _margin(beta, pair)
    gate = torch.sigmoid(logits / tau)
    # exp(-x) alone overflows for very negative x, where the gate is 0; the joint exponent avoids inf * 0.
    exponential = (-logits + _logsigmoid(logits / tau)).exp()
    return -(1 - gate) * _logsigmoid(logits) + exponential


def apo_zero(*, beta: float = 0.1, **pair: Unpack[PairInputs]) -> Tensor:
    """Return `1 - sigmoid(beta c) + sigmoid(beta r)`, [N], `c, r = lp - ref`: chosen up, rejected down.

    Anchored preference optimisation (arXiv:2408.06266) for chosen completions better than those of the model.
    """
    chosen, rejected = (beta * ratio for ratio in _log_ratios(pair))
    return torch.sigmoid(-chosen) + torch.sigmoid(rejected)


def apo_down(*, beta: float = 0.1, **pair: Unpack[PairInputs]) -> Tensor:
    """Return `sigmoid(beta c) + 1 - sigmoid(beta (c - r))`, [N], `c, r = lp - ref`: both down, rejected more.

    Anchored preference optimisation (arXiv:2408.06266) for a model that is better than the chosen completions.
    """
    chosen, rejected = (beta * ratio for ratio in _log_ratios(pair))
    return torch.sigmoid(chosen) + torch.sigmoid(rejected - chosen)


def bco(
    *, logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor, desirable: Tensor, delta: Tensor | float, beta: float = 0.1
) -> Tensor:
    """Return `-log sigmoid(q - delta)` where desirable, else `-log sigmoid(delta - q)`, [N].

    `q = beta sum_t m (lp - ref)`. Binary classifier optimisation (arXiv:2404.04656), for unpaired data. `desirable`
    [N] bool. `delta` is the mean of `q` over all trajectories so far, including this batch (TRL's running mean;
    the paper takes half the sum of the two class means); no gradient flows through it.
    """
    _check_desirable(desirable, mask)
    shifted = beta * _log_ratio(logprobs, ref_logprobs, mask) - _constant(delta)
    return -_logsigmoid(torch.where(desirable.bool(), shifted, -shifted))


def bco_pair(*, delta: Tensor | float, beta: float = 0.1, **pair: Unpack[PairInputs]) -> Tensor:
    """Return the sum of `bco` over the two trajectories of a pair, [N]; TRL's `bco_pair`."""
    chosen, rejected = (beta * ratio - _constant(delta) for ratio in _log_ratios(pair))
    return -_logsigmoid(chosen) - _logsigmoid(-rejected)


def implicit_rewards(*, logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor, beta: float = 0.1) -> Tensor:
    """Return `beta sum_t m (lp - ref)`, [N] without gradient; `delta` of `bco` is their running mean."""
    return beta * _log_ratio(logprobs, ref_logprobs, mask).detach()


def _logsigmoid(values: Tensor) -> Tensor:
    return torch.nn.functional.logsigmoid(values)


def _total(logprobs: Tensor, mask: Tensor) -> Tensor:
    check_shapes(mask, logprobs=logprobs)
    return select(logprobs, mask).sum(1)


def _log_ratio(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor) -> Tensor:
    check_shapes(mask, logprobs=logprobs, ref_logprobs=ref_logprobs)
    return (select(logprobs, mask) - select(ref_logprobs, mask).detach()).sum(1)


def _log_ratios(pair: PairInputs) -> tuple[Tensor, Tensor]:
    """Return `sum_t m (lp - ref)` of the chosen and of the rejected, [N] each."""
    chosen = _log_ratio(pair["chosen_logprobs"], pair["ref_chosen_logprobs"], pair["chosen_mask"])
    rejected = _log_ratio(pair["rejected_logprobs"], pair["ref_rejected_logprobs"], pair["rejected_mask"])
    return chosen, rejected


def _margin(beta: float, pair: PairInputs) -> Tensor:
    """Return `beta h`, `h` the difference of the two log-ratios, [N]."""
    chosen, rejected = _log_ratios(pair)
    return beta * (chosen - rejected)


def _check_desirable(desirable: Tensor, mask: Tensor) -> None:
    check_per_row(mask, desirable=desirable)


def _constant(value: Tensor | float) -> Tensor | float:
    return value.detach() if isinstance(value, torch.Tensor) else value


def _mean(totals: Tensor, mask: Tensor) -> Tensor:
    return totals / mask.bool().sum(1).clamp(min=1)


def _smoothed(logits: Tensor, label_smoothing: float, robust: bool) -> Tensor:
    kept, flipped = -(1 - label_smoothing) * _logsigmoid(logits), label_smoothing * _logsigmoid(-logits)
    return (kept + flipped) / (1 - 2 * label_smoothing) if robust else kept - flipped


def _check_smoothing(label_smoothing: float, robust: bool) -> None:
    if not 0 <= label_smoothing < (0.5 if robust else 1.0):
        raise ValueError(f"label_smoothing = {label_smoothing} must be at least 0 and below 0.5 (robust) or 1")


_BCO = PreferenceSpec(bco, running_mean=True, baseline="delta", baseline_metric="preference/bco_delta")

PREFERENCES: Mapping[str, PreferenceSpec] = {
    "dpo": PreferenceSpec(dpo, ("label_smoothing",)),
    "robust": PreferenceSpec(partial(dpo, robust=True), ("label_smoothing",)),
    "hinge": PreferenceSpec(hinge),
    "exo": PreferenceSpec(exo, ("label_smoothing",)),
    "nca": PreferenceSpec(nca),
    "sppo": PreferenceSpec(sppo),
    "discopop": PreferenceSpec(discopop, ("tau",)),
    "apo_zero": PreferenceSpec(apo_zero),
    "apo_down": PreferenceSpec(apo_down),
    "bco": replace(_BCO, unpaired=True),
    "bco_pair": replace(_BCO, function=bco_pair),
    "ipo": PreferenceSpec(ipo, per_token=True),
    "simpo": PreferenceSpec(simpo, ("gamma", "label_smoothing"), beta=2.0, reference=False, per_token=True),
    "kto": PreferenceSpec(
        kto,
        ("undesirable_weight",),
        unpaired=True,
        mismatched=True,
        baseline="baseline",
        baseline_metric="preference/kto_baseline",
    ),
}
"""The values of `preference.loss`."""
