"""Policy losses per token or per trajectory, to be aggregated, and the terms that are added to them.

Every function takes padded tensors [N, L] by keyword and returns [N, L], 0 where `mask` is 0, or [N] where
its docstring says so. The gradient flows through `logprobs` alone; all else is constant. What stands at
masked positions never matters, NaN and infinity included. What needs the whole batch (a choice of tokens,
weights, a count) is an argument, computed once for the batch, so that microbatches add up to the same
gradient.

Those on pairs (`dpo` and its kin) are in `algorithms.preference` and have its shapes.

To add one, write its function in a module here, its adapter in `adapters` and its spec in `spec.losses`.
"""

from __future__ import annotations

from ludus.algorithms.losses.clipped import (
    ClipOptions,
    ClipRange,
    ClipStats,
    Cut,
    cispo,
    clip_stats,
    ppo_clip,
    ppo_cut,
    sapo,
    token_ratio,
)
from ludus.algorithms.losses.covariance import (
    CovarianceMeans,
    choose_between,
    choose_highest,
    clip_cov,
    kl_cov,
    token_covariance,
)
from ludus.algorithms.losses.gtpo_weights import conflict_weights, gtpo
from ludus.algorithms.losses.likelihood import distill, distill_full, echo, positive_nll, reinforce, sft, value_loss
from ludus.algorithms.losses.sequence import gmpo, gspo, gspo_token, ppo_sequence, trajectory_mean
from ludus.algorithms.losses.trust_region import binary_kl, binary_tv, dppo, mixed_policy
from ludus.algorithms.preference import (
    apo_down,
    apo_zero,
    bco,
    bco_pair,
    discopop,
    dpo,
    exo,
    hinge,
    ipo,
    kto,
    nca,
    simpo,
    sppo,
)

__all__ = [
    "ClipOptions",
    "ClipRange",
    "ClipStats",
    "CovarianceMeans",
    "Cut",
    "apo_down",
    "apo_zero",
    "bco",
    "bco_pair",
    "binary_kl",
    "binary_tv",
    "choose_between",
    "choose_highest",
    "cispo",
    "clip_cov",
    "clip_stats",
    "conflict_weights",
    "discopop",
    "distill",
    "distill_full",
    "dpo",
    "dppo",
    "echo",
    "exo",
    "gmpo",
    "gspo",
    "gspo_token",
    "gtpo",
    "hinge",
    "ipo",
    "kl_cov",
    "kto",
    "mixed_policy",
    "nca",
    "positive_nll",
    "ppo_clip",
    "ppo_cut",
    "ppo_sequence",
    "reinforce",
    "sapo",
    "sft",
    "simpo",
    "sppo",
    "token_covariance",
    "token_ratio",
    "trajectory_mean",
    "value_loss",
]
