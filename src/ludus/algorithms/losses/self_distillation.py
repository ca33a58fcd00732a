"""Losses of a policy that is its own teacher: the same model, whose prompt also shows a success or feedback.

`teacher_kl` [N, L] is the divergence from the teacher, which the learner computes in chunks (`algorithms.kl.
jensen_shannon`), and 0 on trajectories for which the teacher has nothing to show.
"""

from __future__ import annotations

from typing import Unpack

from ludus.algorithms.algorithm import FRACTION, POSITIVE, LossSpec, Need, Option, OptionBounds
from ludus.algorithms.losses.clipped import ClipInputs, ppo_clip, token_cut, token_ratio
from ludus.algorithms.tensors import Cut, Tensor, check_shapes, select, torch

TOP_K = Option(
    "tokens that the divergence tells apart, the policy's most likely; all others are one event; 0 for the vocabulary",
    OptionBounds(0, is_integer=True),
    default=100.0,
)
RATIO_CAP = Option("largest importance ratio of the divergence", POSITIVE)
DIVERGENCE_OPTIONS: dict[str, Option] = {"top_k": TOP_K, "ratio_cap": RATIO_CAP}


def _policy_cut(*, weight: float = 1.0, **inputs: Unpack[ClipInputs]) -> Cut:
    """Return the tokens whose policy gradient is clipped; none without a policy gradient."""
    cut = token_cut(**inputs)
    return cut if weight < 1 else Cut(*map(torch.zeros_like, cut))


@LossSpec(
    help="policy gradient, and the divergence from the same model that is shown a success or feedback",
    needs={Need.CLIP, Need.DUAL_CLIP, Need.SELF_TEACHER},
    options={"weight": Option("weight of the divergence; that of the policy gradient is 1 - weight", FRACTION)}
    | DIVERGENCE_OPTIONS,
    ratio_part="The importance ratio",
    cut=_policy_cut,
)
def sdpo(*, teacher_kl: Tensor, weight: float = 1.0, ratio_cap: float = 2.0, **inputs: Unpack[ClipInputs]) -> Tensor:
    """Return `(1 - weight) ppo_clip + weight min(ratio, ratio_cap) teacher_kl`, [N, L].

    SDPO (arXiv:2601.20802). No gradient flows through `ratio = exp(logprobs - old_logprobs)`. With `weight` 1, the
    default of the paper, the reward only decides which attempts are shown.
    """
    distilled = sdft(
        teacher_kl=teacher_kl,
        logprobs=inputs["logprobs"],
        old_logprobs=inputs["old_logprobs"],
        mask=inputs["mask"],
        ratio_cap=ratio_cap,
    )
    return distilled if weight == 1 else (1 - weight) * ppo_clip(**inputs) + weight * distilled


@LossSpec(
    help="divergence from the same model that is shown the expert's dialogue",
    needs={Need.SELF_TEACHER, Need.SHOWN_DEMONSTRATION},
    options=DIVERGENCE_OPTIONS,
)
def sdft(
    *,
    teacher_kl: Tensor,
    logprobs: Tensor,
    old_logprobs: Tensor,
    mask: Tensor,
    advantages: Tensor | None = None,
    ratio_cap: float = 2.0,
) -> Tensor:
    """Return `min(ratio, ratio_cap) teacher_kl`, [N, L]; self-distillation fine-tuning (SDFT, arXiv:2601.19897).

    No gradient flows through `ratio = exp(logprobs - old_logprobs)`. Rewards and `advantages` are not used.
    """
    check_shapes(mask, teacher_kl=teacher_kl, logprobs=logprobs, old_logprobs=old_logprobs)
    ratio = token_ratio(logprobs.detach(), old_logprobs, mask).clamp(max=ratio_cap)
    return ratio * select(teacher_kl, mask)
