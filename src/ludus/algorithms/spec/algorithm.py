"""What an algorithm is: one record of names and numbers, and the names that there are. Imports no torch.

The name tuples repeat the keys of the registries (a test holds them equal), so that a configuration is
checked before torch is loaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeVar

from ludus.errors import ConfigError

ADVANTAGE_OPTIONS: dict[str, tuple[str, ...]] = {
    "grpo": ("std_floor", "std_over"),
    "dr_grpo": (),
    "gpg": ("counted",),
    "optimal_token_baseline": ("zero_tail",),
    "rloo": (),
    "remax": (),
    "rae": ("decay",),
    "hierarchical": (),
    "gigpo": ("gamma", "weight", "scale"),
    "siblings": ("scale",),
    "prime": ("beta", "gamma"),
    "coderl": (),
    "opo": (),
    "maxrl": (),
    "best_of_group": (),
    "pass_at_k": ("k",),
    "reinforce_pp": ("gamma",),
    "reinforce_pp_baseline": (),
    "turn_grpo": ("turn_weight", "outcome_weight"),
    "turn_return": ("gamma",),
    "turn_return_hybrid": ("gamma", "outcome_weight"),
    "raw": (),
    "gae": ("gamma", "lam", "lam_critic", "whiten", "bootstrap"),
    "step_gae": ("gamma", "lam", "whiten", "bootstrap"),
    "turn_gae": ("gamma_turn", "lam_turn", "gamma_token", "lam_token", "whiten", "bootstrap"),
    "vapo": ("gamma", "alpha", "lam_critic", "whiten", "bootstrap"),
    "vtrace": ("gamma", "rho_bar", "c_bar", "whiten", "bootstrap"),
    "retrace": ("gamma", "lam", "whiten", "bootstrap"),
}
"""Advantages, and the numbers of their own that `algorithm.options.advantage` may hold."""
LOSS_OPTIONS: dict[str, tuple[str, ...]] = {
    "ppo_clip": (),
    "ppo_sequence": (),
    "reinforce": (),
    "gspo": (),
    "gspo_token": (),
    "cispo": (),
    "gmpo": (),
    "sapo": ("tau_pos", "tau_neg"),
    "dppo": ("bound", "divergence"),
    "gtpo": ("amplify", "contiguous", "entropy_bound", "entropy_penalty"),
    "clip_cov": ("share", "low", "high"),
    "kl_cov": ("share", "coef"),
    "distill": (),
    "distill_full": (),
    "mixed_policy": ("gamma",),
}
CORRECTION_OPTIONS: dict[str, tuple[str, ...]] = {
    "none": (),
    "tis": ("level", "low"),
    "icepop": ("low", "high", "level"),
    "decoupled": ("cap",),
    "reject_sequence": ("low", "high", "by", "veto", "measure"),
    "m2po": ("bound",),
}
GRANULARITIES: tuple[Literal["token", "trajectory"], ...] = ("token", "trajectory")
LEVELS: tuple[Literal["token", "sequence", "geometric"], ...] = ("token", "sequence", "geometric")
CRITERIA: tuple[Literal["geometric", "largest", "sequence", "token"], ...] = (
    "geometric",
    "largest",
    "sequence",
    "token",
)
MEASURES: tuple[Literal["ratio", "k2", "k3"], ...] = ("ratio", "k2", "k3")
IMPORTANCES: tuple[Literal["none", "ratio"], ...] = ("none", "ratio")
SPREADS: tuple[Literal["group", "batch"], ...] = ("group", "batch")
COUNTS: tuple[Literal["varying", "nonzero"], ...] = ("varying", "nonzero")
DIVERGENCES: tuple[Literal["tv", "kl"], ...] = ("tv", "kl")
SCALES: tuple[Literal["std", "none"], ...] = ("std", "none")
OPTION_WORDS: dict[str, tuple[str, ...]] = {
    "level": LEVELS,
    "by": CRITERIA,
    "measure": MEASURES,
    "divergence": DIVERGENCES,
    "scale": SCALES,
    "granularity": GRANULARITIES,
    "importance": IMPORTANCES,
    "std_over": SPREADS,
    "counted": COUNTS,
}
"""Options that are words and not numbers."""
ADVANTAGE_NAMES = tuple(ADVANTAGE_OPTIONS)
LOSS_NAMES = tuple(LOSS_OPTIONS)
AGGREGATION_NAMES = ("token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "constant")
FULL_KL_NAMES: tuple[Literal["full_reverse", "full_forward"], ...] = ("full_reverse", "full_forward")
"""Of the whole distributions, without sampling noise."""
KL_NAMES = ("k1", "k2", "k3", "abs", "k3_k2grad", *FULL_KL_NAMES)
KL_OPTIONS = dict.fromkeys(KL_NAMES, ("granularity", "importance"))
TERM_NAMES = ("echo", "positive_nll")
CORRECTION_NAMES = tuple(CORRECTION_OPTIONS)
LIMITING_CORRECTIONS = ("tis", "icepop", "decoupled")
"""Corrections that weigh the loss by a ratio within limits."""
FILTERING_CORRECTIONS = ("reject_sequence", "m2po")
"""Corrections that take tokens from training before the step, and weigh nothing."""
PLACEMENTS = ("loss", "reward", "advantage")

CLIPPING_LOSSES = (
    "ppo_clip",
    "ppo_sequence",
    "gspo",
    "gspo_token",
    "cispo",
    "gmpo",
    "clip_cov",
    "mixed_policy",
)
"""Losses that read eps_low and eps_high."""
DUAL_CLIPPING_LOSSES = ("ppo_clip", "clip_cov", "mixed_policy")
"""Losses that read dual_clip."""
RATIO_PARTS = {
    **dict.fromkeys(CLIPPING_LOSSES, "The clip"),
    "sapo": "The gate",
    "kl_cov": "The KL of the chosen tokens",
    "dppo": "The trust region",
}
"""Parts of losses that act only where the ratio is not 1: several updates a batch, or other weights."""
BEHAVIOUR_LOSSES = ("dppo",)
"""Losses whose ratio is to the behaviour policy."""
EXPERT_LOSSES = ("mixed_policy",)
"""Losses that treat the tokens of experts apart."""
TEACHER_LOSSES = ("distill", "distill_full")
"""Losses that read a teacher, and no advantage."""
SEQUENCE_LOSSES = ("ppo_sequence", "gspo", "gmpo")
"""Losses with one term per trajectory, which is averaged over the trajectories."""
SCALED_ADVANTAGES = (
    "grpo",
    "reinforce_pp",
    "reinforce_pp_baseline",
    "turn_grpo",
    "turn_return",
    "turn_return_hybrid",
    "gigpo",
    "siblings",
    "hierarchical",
)
"""Advantages that divide by a standard deviation and so read std_ddof."""
POSITIVE_ADVANTAGES = ("best_of_group",)
"""Advantages that are never below 0, where a clip has one side only."""
BINARY_ADVANTAGES = ("pass_at_k",)
"""Advantages for rewards of 0 and 1 alone."""
TURN_ADVANTAGES = ("turn_grpo", "turn_return", "turn_return_hybrid")
"""Advantages that read the rewards of turns."""

ROLE_ADVANTAGES = ("rae", "hierarchical")
"""Advantages that read the tag `role` of a task."""
GREEDY_ADVANTAGES = ("remax", "coderl")
"""Advantages whose baseline is a greedy episode: one more is played for each task."""
BEHAVIOUR_ADVANTAGES = ("vtrace", "retrace")
"""Advantages that contain the ratio to the behaviour policy."""
CRITIC_ADVANTAGES = ("gae", "step_gae", "turn_gae", "vapo", *BEHAVIOUR_ADVANTAGES)
"""Advantages that read the values of a critic."""
PROBABILITY_ADVANTAGES = ("optimal_token_baseline",)
"""Advantages that read the distributions that the tokens were drawn from."""
STATE_ADVANTAGES = ("gigpo",)
"""Advantages that compare turns of equal states."""
BRANCH_ADVANTAGES = ("siblings",)
"""Advantages that compare the branches of a fork."""
TURN_READING_ADVANTAGES = (*TURN_ADVANTAGES, "gigpo", *PROBABILITY_ADVANTAGES, *CRITIC_ADVANTAGES)
"""Advantages that read the rewards of turns where there are any."""
WIDER_ADVANTAGES = (
    *TURN_ADVANTAGES,
    "gigpo",
    "hierarchical",
    *GREEDY_ADVANTAGES,
    *PROBABILITY_ADVANTAGES,
)
"""Advantages that may differ from 0 in a group of equal rewards: by turns, other groups, a greedy episode, a
tail without baseline."""
ALONE_ADVANTAGES = ("raw", "reinforce_pp", "rae", *GREEDY_ADVANTAGES, *CRITIC_ADVANTAGES)
"""Advantages that do not compare the attempts of a group with each other."""
DECOUPLED_ADVANTAGES = ("gae", "vapo")
"""Those whose critic learns from returns of a lam of its own, lam_critic."""
TURN_VALUE_ADVANTAGES = ("step_gae",)
"""Those that read one value a turn, at its first action token."""
WHITENED_ADVANTAGES = ("reinforce_pp", "reinforce_pp_baseline", *CRITIC_ADVANTAGES)
"""Advantages with a mean and a deviation over the whole batch."""
TOKEN_ADVANTAGES = ("reinforce_pp", *CRITIC_ADVANTAGES)
"""Advantages that take the KL of a reward token by token."""

Options = dict[str, float | str]

Placement = Literal["loss", "reward", "advantage"]
VarianceFilter = Literal["share", "top_p"]
Measure = Literal["sequence", "action_tokens"]


def number(options: Options, name: str, default: float) -> float:
    """An option that is a number."""
    value = options.get(name, default)
    if isinstance(value, str):
        raise ConfigError(f"{name} = {value!r} is not a number.")
    return value


W = TypeVar("W", bound=str)


def word(options: Options, name: str, choices: Sequence[W]) -> W:
    """An option that is one of some words; the first is the default."""
    value = options.get(name, choices[0])
    for choice in choices:
        if choice == value:
            return choice
    raise ConfigError(f"{name} = {value!r} is not known.", f"There are: {', '.join(choices)}.")


@dataclass(frozen=True, slots=True)
class PartOptions:
    """What each part has to itself."""

    advantage: Options = field(default_factory=dict)
    loss: Options = field(default_factory=dict)
    correction: Options = field(default_factory=dict)
    kl: Options = field(default_factory=dict)
    terms: Options = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Algorithm:
    """One algorithm. The fields mean what they mean in `AlgorithmConfig`; `summary` is one line,
    `source` where it is from.

    `minibatches` is what `training.minibatches` is unless set: a clip needs several updates a batch.
    `kl_coef` 0 is no KL term. The C of the aggregation `constant` is not here: it is the token budget of a
    trajectory and comes with the `Normalizer`.
    """

    name: str
    summary: str
    source: str
    group_size: int = 8
    advantage: str = "grpo"
    loss: str = "ppo_clip"
    aggregation: str = "token_mean"
    eps_low: float = 0.2
    eps_high: float = 0.2
    dual_clip: float | None = None
    opsm_delta: float | None = None
    kl: str = "k3"
    kl_coef: float = 0.0
    kl_placement: Placement = "loss"
    correction: str = "none"
    tis_cap: float = 2.0
    zero_variance: bool = False
    resample_rounds: int = 0
    variance_filter: VarianceFilter = "share"
    variance_top: float = 1.0
    greso: bool = False
    overlong_mask: bool = False
    std_ddof: int = 1
    entropy_coef: float = 0.0
    overlong_cache: float = 0.0
    overlong_measure: Measure = "sequence"
    overlong_length: int | None = None
    minibatches: int = 1
    options: PartOptions = PartOptions()

    @property
    def filters_groups(self) -> bool:
        """Whether groups are dropped by how much they vary within a step."""
        return self.variance_filter == "top_p" or self.variance_top < 1
