"""The losses: what a configuration may name. No torch.

To add one, write its function (`batch`, `algorithm`) and its spec here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from ludus.algorithms.spec.parts import ANY, NOT_NEGATIVE, POSITIVE, SWITCH, LossSpec, Need, Option, OptionBounds
from ludus.algorithms.spec.words import DIVERGENCES

_MODULE = "ludus.algorithms.losses.adapters"
_CUTS = "ludus.algorithms.losses.clipping"

LOSSES: Mapping[str, LossSpec] = {
    "ppo_clip": LossSpec(
        help="the clipped surrogate of PPO",
        function=f"{_MODULE}:ppo_clip",
        needs=frozenset({Need.CLIP, Need.DUAL_CLIP}),
        ratio_part="The clip",
        cut=f"{_CUTS}:of_tokens",
    ),
    "ppo_sequence": LossSpec(
        help="PPO with the ratio of the whole trajectory",
        function=f"{_MODULE}:ppo_sequence",
        needs=frozenset({Need.CLIP}),
        ratio_part="The clip",
        per_trajectory=True,
        cut=f"{_CUTS}:of_products",
    ),
    "reinforce": LossSpec(
        help="the policy gradient without a ratio", function=f"{_MODULE}:reinforce", needs=frozenset()
    ),
    "gspo": LossSpec(
        help="the geometric mean of the ratios, clipped",
        function=f"{_MODULE}:gspo",
        needs=frozenset({Need.CLIP}),
        ratio_part="The clip",
        per_trajectory=True,
        cut=f"{_CUTS}:of_sequences",
    ),
    "gspo_token": LossSpec(
        help="GSPO with the advantage of each token",
        function=f"{_MODULE}:gspo_token",
        needs=frozenset({Need.CLIP}),
        ratio_part="The clip",
        cut=f"{_CUTS}:of_sequences_by_token",
    ),
    "cispo": LossSpec(
        help="REINFORCE weighted by a clipped, detached ratio",
        function=f"{_MODULE}:cispo",
        needs=frozenset({Need.CLIP}),
        ratio_part="The clip",
        cut=f"{_CUTS}:of_weights",
    ),
    "gmpo": LossSpec(
        help="the geometric mean of clipped ratios",
        function=f"{_MODULE}:gmpo",
        needs=frozenset({Need.CLIP}),
        ratio_part="The clip",
        per_trajectory=True,
        cut=f"{_CUTS}:of_log_ratios",
    ),
    "sapo": LossSpec(
        help="a smooth gate in place of the clip",
        function=f"{_MODULE}:sapo",
        needs=frozenset(),
        options={
            "tau_pos": Option(1.0, "temperature of the gate for positive advantages", POSITIVE),
            "tau_neg": Option(1.05, "temperature of the gate for negative advantages", POSITIVE),
        },
        ratio_part="The gate",
    ),
    "dppo": LossSpec(
        help="a trust region on the divergence from the behaviour policy",
        function=f"{_MODULE}:dppo",
        needs=frozenset({Need.BEHAVIOR_RATIO}),
        options={
            "bound": Option(0.2, "bound of the divergence from the behaviour policy", NOT_NEGATIVE),
            "divergence": Option(DIVERGENCES[0], "total variation, or KL", choices=DIVERGENCES),
        },
        ratio_part="The trust region",
        off_policy=True,
        cut=f"{_CUTS}:of_trust_region",
    ),
    "gtpo": LossSpec(
        help="REINFORCE with weights of conflict tokens",
        function=f"{_MODULE}:gtpo",
        needs=frozenset({Need.CONFLICT_WEIGHTS}),
        options={
            "amplify": Option(2.0, "weight of conflict tokens of solved attempts", NOT_NEGATIVE),
            "contiguous": Option(1.0, "1: conflict tokens are a common prefix or suffix", SWITCH),
            "entropy_bound": Option(math.log(2), "entropy (nats) above which an attempt does not train", POSITIVE),
            "entropy_penalty": Option(0.1, "coefficient of the entropy penalty", NOT_NEGATIVE),
        },
    ),
    "clip_cov": LossSpec(
        help="PPO without the gradient of some tokens of high covariance",
        function=f"{_MODULE}:clip_cov",
        needs=frozenset({Need.CLIP, Need.DUAL_CLIP, Need.TOKEN_CHOICE}),
        options={
            "share": Option(0.0002, "fraction of the tokens that is chosen", OptionBounds(0, 1, above=True)),
            "low": Option(1.0, "lower bound of the covariance", ANY),
            "high": Option(5.0, "upper bound of the covariance", ANY),
        },
        ratio_part="The clip",
        cut=f"{_CUTS}:of_tokens",
        choose=f"{_MODULE}:choose_clipped",
    ),
    "kl_cov": LossSpec(
        help="a KL on the tokens of the highest covariance",
        function=f"{_MODULE}:kl_cov",
        needs=frozenset({Need.TOKEN_CHOICE}),
        options={
            "share": Option(0.0002, "fraction of the tokens that is chosen", OptionBounds(0, 1, above=True)),
            "coef": Option(1.0, "coefficient of the KL of chosen tokens", NOT_NEGATIVE),
        },
        ratio_part="The KL of the chosen tokens",
        choose=f"{_MODULE}:choose_penalised",
    ),
    "distill": LossSpec(
        help="reverse KL from a teacher, on sampled tokens",
        function=f"{_MODULE}:distill",
        needs=frozenset({Need.TEACHER}),
    ),
    "distill_full": LossSpec(
        help="reverse KL from a teacher, over the vocabulary",
        function=f"{_MODULE}:distill_full",
        needs=frozenset({Need.TEACHER, Need.TEACHER_DISTRIBUTION}),
        off_policy=True,
    ),
    "mixed_policy": LossSpec(
        help="PPO on own rollouts, a shaped ratio on demonstrations",
        function=f"{_MODULE}:mixed_policy",
        needs=frozenset({Need.CLIP, Need.DUAL_CLIP, Need.DEMONSTRATIONS}),
        options={"gamma": Option(0.1, "shaping constant of the demonstrations", POSITIVE)},
        ratio_part="The clip",
        cut=f"{_CUTS}:of_own_tokens",
    ),
}
