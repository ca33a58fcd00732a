"""The advantages: what a configuration may name. No torch.

To add one, write its function (`outcomes`, `algorithm`) and its spec here.
"""

from __future__ import annotations

from collections.abc import Mapping

from ludus.algorithms.spec.parts import (
    FRACTION,
    NOT_NEGATIVE,
    POSITIVE,
    SWITCH,
    AdvantageSpec,
    Need,
    Option,
    OptionBounds,
)
from ludus.algorithms.spec.words import COUNTS, SCALES, SPREADS

_MODULE = "ludus.algorithms.advantages.adapters"

ADVANTAGES: Mapping[str, AdvantageSpec] = {
    "grpo": AdvantageSpec(
        help="rewards minus the mean of the group, over its deviation",
        function=f"{_MODULE}:grpo",
        needs=frozenset({Need.GROUP, Need.STD}),
        options={
            "std_floor": Option(0.0, "added to the standard deviation of a group", NOT_NEGATIVE),
            "std_over": Option(SPREADS[0], "standard deviation of each group, or of the batch", choices=SPREADS),
        },
    ),
    "dr_grpo": AdvantageSpec(
        help="rewards minus the mean of the group", function=f"{_MODULE}:dr_grpo", needs=frozenset({Need.GROUP})
    ),
    "gpg": AdvantageSpec(
        help="dr_grpo, scaled by the share of groups that vary",
        function=f"{_MODULE}:gpg",
        needs=frozenset({Need.GROUP}),
        options={
            "counted": Option(
                COUNTS[0], "scale by the groups whose rewards vary, or whose advantages are not 0", choices=COUNTS
            )
        },
    ),
    "optimal_token_baseline": AdvantageSpec(
        help="returns minus the variance-optimal baseline of each token",
        function=f"{_MODULE}:optimal_token_baseline",
        needs=frozenset({Need.GROUP, Need.OPTIONAL_TURN_REWARDS, Need.DISTRIBUTIONS, Need.ADVANTAGE_OF_EQUAL_REWARDS}),
        options={"zero_tail": Option(1.0, "1: tokens after the last reward have advantage 0", SWITCH)},
    ),
    "rloo": AdvantageSpec(
        help="rewards minus the mean of the other attempts", function=f"{_MODULE}:rloo", needs=frozenset({Need.GROUP})
    ),
    "remax": AdvantageSpec(
        help="rewards minus that of a greedy episode",
        function=f"{_MODULE}:remax",
        needs=frozenset({Need.GREEDY_ROLLOUT, Need.ADVANTAGE_OF_EQUAL_REWARDS}),
    ),
    "rae": AdvantageSpec(
        help="rewards minus the running average of the role",
        function=f"{_MODULE}:rae",
        needs=frozenset({Need.ROLE_BASELINES}),
        options={"decay": Option(0.95, "decay of the running average of a role", FRACTION)},
    ),
    "hierarchical": AdvantageSpec(
        help="proposers and solvers compared in groups of their own",
        function=f"{_MODULE}:hierarchical",
        needs=frozenset({Need.GROUP, Need.STD, Need.PROPOSALS, Need.ADVANTAGE_OF_EQUAL_REWARDS}),
    ),
    "gigpo": AdvantageSpec(
        help="episode-level and state-level comparison",
        function=f"{_MODULE}:gigpo",
        needs=frozenset(
            {Need.GROUP, Need.STD, Need.OPTIONAL_TURN_REWARDS, Need.STATE_KEYS, Need.ADVANTAGE_OF_EQUAL_REWARDS}
        ),
        options={
            "gamma": Option(0.95, "discount", FRACTION),
            "weight": Option(1.0, "weight of the step-level term", NOT_NEGATIVE),
            "scale": Option(SCALES[0], "divide by the standard deviation, or do not", choices=SCALES),
        },
    ),
    "siblings": AdvantageSpec(
        help="branches of a fork compared with each other",
        function=f"{_MODULE}:siblings",
        needs=frozenset({Need.GROUP, Need.STD, Need.BRANCHES}),
        options={"scale": Option(SCALES[0], "divide by the standard deviation, or do not", choices=SCALES)},
    ),
    "prime": AdvantageSpec(
        help="leave-one-out of outcomes and implicit process rewards",
        function=f"{_MODULE}:prime",
        needs=frozenset({Need.GROUP, Need.PROCESS_REWARD_MODEL}),
        options={
            "beta": Option(0.05, "scale of the implicit process reward", POSITIVE),
            "gamma": Option(1.0, "discount", FRACTION),
        },
    ),
    "coderl": AdvantageSpec(
        help="rewards minus a greedy one, weighted by an outcome critic",
        function=f"{_MODULE}:coderl",
        needs=frozenset({Need.GREEDY_ROLLOUT, Need.OUTCOME_CRITIC, Need.ADVANTAGE_OF_EQUAL_REWARDS}),
    ),
    "opo": AdvantageSpec(
        help="rewards minus the length-weighted mean of the group",
        function=f"{_MODULE}:opo",
        needs=frozenset({Need.GROUP}),
    ),
    "maxrl": AdvantageSpec(
        help="rewards minus the mean of the group, over the mean",
        function=f"{_MODULE}:maxrl",
        needs=frozenset({Need.GROUP}),
    ),
    "best_of_group": AdvantageSpec(
        help="the best attempt of a group alone",
        function=f"{_MODULE}:best_of_group",
        needs=frozenset({Need.GROUP, Need.NON_NEGATIVE}),
    ),
    "pass_at_k": AdvantageSpec(
        help="the analytic advantage of pass@k",
        function=f"{_MODULE}:pass_at_k",
        needs=frozenset({Need.GROUP, Need.BINARY_REWARDS}),
        options={"k": Option(4, "attempts that pass@k counts", OptionBounds(1, whole=True))},
    ),
    "reinforce_pp": AdvantageSpec(
        help="discounted returns, whitened over the batch",
        function=f"{_MODULE}:reinforce_pp",
        needs=frozenset({Need.STD, Need.BATCH_STATISTICS, Need.TOKEN_KL}),
        options={"gamma": Option(1.0, "discount", FRACTION)},
    ),
    "reinforce_pp_baseline": AdvantageSpec(
        help="rewards minus the mean of the group, whitened over the batch",
        function=f"{_MODULE}:reinforce_pp_baseline",
        needs=frozenset({Need.GROUP, Need.STD, Need.BATCH_STATISTICS}),
    ),
    "turn_grpo": AdvantageSpec(
        help="turn rewards and outcomes, each compared in the group",
        function=f"{_MODULE}:turn_grpo",
        needs=frozenset(
            {Need.GROUP, Need.STD, Need.TURN_REWARDS, Need.OPTIONAL_TURN_REWARDS, Need.ADVANTAGE_OF_EQUAL_REWARDS}
        ),
        options={
            "turn_weight": Option(1.0, "weight of the turn-level term", NOT_NEGATIVE),
            "outcome_weight": Option(1.0, "weight of the outcome", NOT_NEGATIVE),
        },
    ),
    "turn_return": AdvantageSpec(
        help="returns of turns, compared in the group",
        function=f"{_MODULE}:turn_return",
        needs=frozenset(
            {Need.GROUP, Need.STD, Need.TURN_REWARDS, Need.OPTIONAL_TURN_REWARDS, Need.ADVANTAGE_OF_EQUAL_REWARDS}
        ),
        options={"gamma": Option(1.0, "discount", FRACTION)},
    ),
    "turn_return_hybrid": AdvantageSpec(
        help="returns of turns and the outcome, compared in the group",
        function=f"{_MODULE}:turn_return_hybrid",
        needs=frozenset(
            {Need.GROUP, Need.STD, Need.TURN_REWARDS, Need.OPTIONAL_TURN_REWARDS, Need.ADVANTAGE_OF_EQUAL_REWARDS}
        ),
        options={
            "gamma": Option(0.9, "discount", FRACTION),
            "outcome_weight": Option(0.3, "weight of the outcome", NOT_NEGATIVE),
        },
    ),
    "raw": AdvantageSpec(help="the reward itself", function=f"{_MODULE}:raw", needs=frozenset()),
    "gae": AdvantageSpec(
        help="generalised advantage estimation over tokens",
        function=f"{_MODULE}:gae",
        needs=frozenset({Need.OPTIONAL_TURN_REWARDS, Need.CRITIC, Need.BATCH_STATISTICS, Need.TOKEN_KL}),
        options={
            "gamma": Option(1.0, "discount", FRACTION),
            "lam": Option(1.0, "lambda of GAE", FRACTION),
            "lam_critic": Option(1.0, "lambda of the critic's targets", FRACTION),
            "whiten": Option(1.0, "1: whiten over the batch", SWITCH),
            "bootstrap": Option(0.0, "1: bootstrap the value of a truncated episode", SWITCH),
        },
        critic_targets="gae",
    ),
    "step_gae": AdvantageSpec(
        help="GAE with a turn as the step",
        function=f"{_MODULE}:step_gae",
        needs=frozenset(
            {Need.OPTIONAL_TURN_REWARDS, Need.CRITIC, Need.TURN_VALUES, Need.BATCH_STATISTICS, Need.TOKEN_KL}
        ),
        options={
            "gamma": Option(1.0, "discount", FRACTION),
            "lam": Option(1.0, "lambda of GAE", FRACTION),
            "whiten": Option(1.0, "1: whiten over the batch", SWITCH),
            "bootstrap": Option(0.0, "1: bootstrap the value of a truncated episode", SWITCH),
        },
    ),
    "turn_gae": AdvantageSpec(
        help="GAE within turns and between them",
        function=f"{_MODULE}:turn_gae",
        needs=frozenset({Need.OPTIONAL_TURN_REWARDS, Need.CRITIC, Need.BATCH_STATISTICS, Need.TOKEN_KL}),
        options={
            "gamma_turn": Option(1.0, "discount between turns", FRACTION),
            "lam_turn": Option(1.0, "lambda between turns", FRACTION),
            "gamma_token": Option(1.0, "discount between the tokens of a turn", FRACTION),
            "lam_token": Option(1.0, "lambda between the tokens of a turn", FRACTION),
            "whiten": Option(1.0, "1: whiten over the batch", SWITCH),
            "bootstrap": Option(0.0, "1: bootstrap the value of a truncated episode", SWITCH),
        },
    ),
    "vapo": AdvantageSpec(
        help="GAE with a length-adaptive lambda",
        function=f"{_MODULE}:vapo",
        needs=frozenset(
            {Need.OPTIONAL_TURN_REWARDS, Need.CRITIC, Need.PRETRAINED_CRITIC, Need.BATCH_STATISTICS, Need.TOKEN_KL}
        ),
        options={
            "gamma": Option(1.0, "discount", FRACTION),
            "alpha": Option(0.05, "lambda is 1 - 1 / (alpha * length)", POSITIVE),
            "lam_critic": Option(1.0, "lambda of the critic's targets", FRACTION),
            "whiten": Option(1.0, "1: whiten over the batch", SWITCH),
            "bootstrap": Option(0.0, "1: bootstrap the value of a truncated episode", SWITCH),
        },
        critic_targets="gae",
    ),
    "vtrace": AdvantageSpec(
        help="V-trace",
        function=f"{_MODULE}:vtrace",
        needs=frozenset(
            {Need.OPTIONAL_TURN_REWARDS, Need.CRITIC, Need.BATCH_STATISTICS, Need.TOKEN_KL, Need.BEHAVIOR_RATIO}
        ),
        options={
            "gamma": Option(1.0, "discount", FRACTION),
            "rho_bar": Option(1.0, "upper bound of the ratio of a temporal difference", POSITIVE),
            "c_bar": Option(1.0, "upper bound of the ratio of a trace", POSITIVE),
            "whiten": Option(1.0, "1: whiten over the batch", SWITCH),
            "bootstrap": Option(0.0, "1: bootstrap the value of a truncated episode", SWITCH),
        },
        critic_targets="vtrace_error",
    ),
    "retrace": AdvantageSpec(
        help="Retrace",
        function=f"{_MODULE}:retrace",
        needs=frozenset(
            {Need.OPTIONAL_TURN_REWARDS, Need.CRITIC, Need.BATCH_STATISTICS, Need.TOKEN_KL, Need.BEHAVIOR_RATIO}
        ),
        options={
            "gamma": Option(1.0, "discount", FRACTION),
            "lam": Option(1.0, "lambda of GAE", FRACTION),
            "whiten": Option(1.0, "1: whiten over the batch", SWITCH),
            "bootstrap": Option(0.0, "1: bootstrap the value of a truncated episode", SWITCH),
        },
    ),
}


def advantages_that_need(need: Need) -> list[str]:
    """Return the names of the built-in advantages with a need."""
    return [name for name, spec in ADVANTAGES.items() if spec.has(need)]


TARGETS: Mapping[str, AdvantageSpec] = {
    "vtrace_error": AdvantageSpec(
        help="targets of V-trace minus the values",
        function=f"{_MODULE}:vtrace_error",
        needs=ADVANTAGES["vtrace"].needs,
        options=ADVANTAGES["vtrace"].options,
    )
}
"""What critics learn, where that is no advantage that a configuration may name."""
