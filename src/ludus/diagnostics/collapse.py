"""Metrics of template collapse (RAGEN-2, arXiv:2604.06268): does the reasoning still depend on the prompt?

A policy can write the same varied text for every prompt: its entropy is unchanged, and the mutual information of prompt
and reasoning is about 0. They are computed from the log-probability of every reasoning under every prompt.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ludus.diagnostics.history import COLLAPSE

MARGINAL_STD: Final = COLLAPSE + "marginal_std"
_TOP: Final = (1, 2, 4, 8)
_DECAY: Final = 0.9
_EPSILON: Final = 1e-3


def collapse_metrics(
    logprobs: NDArray[np.float64], own: Sequence[int], num_tokens: Sequence[int], before: Mapping[str, float]
) -> dict[str, float]:
    """Return the collapse metrics of S reasonings under N distinct prompts.

    `logprobs` [S, N]: summed log-probability in nats of reasoning `s` under prompt `j`; `own` [S]: the prompt of each
    reasoning; `num_tokens` [S]: their lengths. Information and entropies are of per-token means, and with `_sum` of
    sums. `retrieval_K` is the share of reasonings whose own prompt is among the K most likely (ties count in part),
    `chance` is 1/N. The z-score divides `matched - marginal` by the standard deviation of `marginal`, a moving average
    that continues that of the metrics `before`. Raises ValueError if the shapes differ or S or N is 0.
    """
    sums = np.asarray(logprobs, np.float64)
    if sums.ndim != 2 or not sums.size or sums.shape[0] != len(own) or len(own) != len(num_tokens):
        raise ValueError(f"logprobs {sums.shape}, own [{len(own)}] and num_tokens [{len(num_tokens)}] do not fit")
    prompts = np.asarray(own)
    means = sums / np.asarray(num_tokens, np.float64)[:, None]
    matched, marginal = _matched_and_marginal(means, prompts)
    std = float(marginal.std())
    if MARGINAL_STD in before:
        std = _DECAY * before[MARGINAL_STD] + (1 - _DECAY) * std
    of_sums = _matched_and_marginal(sums, prompts)
    metrics = {
        "mutual_information": float(matched.mean() - marginal.mean()),
        "mutual_information_sum": float(of_sums[0].mean() - of_sums[1].mean()),
        "conditional_entropy": -float(matched.mean()),
        "marginal_entropy": -float(marginal.mean()),
        "z_score": float(((matched - marginal) / (std + _EPSILON)).mean()),
        "marginal_std": std,
        "chance": 1 / sums.shape[1],
        "samples": float(sums.shape[0]),
    }
    mine = sums[np.arange(len(sums)), prompts][:, None]
    above, equal = (sums > mine).sum(1), (sums == mine).sum(1)
    for k in _TOP:
        metrics[f"retrieval_{k}"] = math.fsum(np.clip((k - above) / equal, 0.0, 1.0)) / len(sums)
    return {COLLAPSE + name: value for name, value in metrics.items()}


def _matched_and_marginal(
    values: NDArray[np.float64], own: NDArray[np.int_]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return `l_own(z)` and `logsumexp_j l_j(z) - log N`, [S] each."""
    largest = values.max(1)
    marginal = largest + np.log(np.exp(values - largest[:, None]).mean(1))
    return values[np.arange(len(values)), own], marginal
