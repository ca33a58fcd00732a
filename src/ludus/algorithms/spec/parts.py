"""Specs: what an advantage, a loss or a correction is called with, takes as options, and needs. No torch.

The trainer reads `needs`, never a name. A spec of your own is named in a setting as `path/to/file.py:name`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, TypeVar, cast

from ludus.errors import ConfigError
from ludus.plugins import import_object

if TYPE_CHECKING:
    from torch import Tensor

R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class OptionBounds:
    """The interval from `low` to `high`, closed; open at `low` if `above`; integers only if `whole`."""

    low: float = -math.inf
    high: float = math.inf
    whole: bool = False
    above: bool = False

    def hold(self, value: float) -> bool:
        """Return whether `value` is inside."""
        inside = self.low < value if self.above else self.low <= value
        return inside and value <= self.high and (not self.whole or value == int(value))

    def __str__(self) -> str:
        if self.low == -math.inf:
            return "any number"
        kind = "a whole number " if self.whole else ""
        if self.above:
            most = f" and at most {self.high:g}" if self.high < math.inf else ""
            return f"{kind}above {self.low:g}{most}"
        return f"{kind}from {self.low:g} " + (f"to {self.high:g}" if self.high < math.inf else "on")


ANY = OptionBounds()
POSITIVE = OptionBounds(0, above=True)
NOT_NEGATIVE = OptionBounds(0)
FRACTION = OptionBounds(0, 1)
SWITCH = OptionBounds(0, 1, whole=True)


@dataclass(frozen=True, slots=True)
class Option:
    """One option of a part: a number within `bounds`, or, with `choices`, one of these words."""

    default: float | str
    help: str
    bounds: OptionBounds = ANY
    choices: tuple[str, ...] = ()

    def check(self, key: str, value: float | str) -> None:
        """Raise ConfigError unless `value` is allowed; `key` is the setting that the message names."""
        name = key.rpartition(".")[2]
        if self.choices:
            if value not in self.choices:
                raise ConfigError(f"{name} = {value!r} is not known.", f"There are: {', '.join(self.choices)}.")
        elif isinstance(value, str):
            raise ConfigError(f"{name} = {value!r} is not a number.")
        elif not self.bounds.hold(value):
            raise ConfigError(f"{key} is {value:g}, but must be {self.bounds}.")


class Need(StrEnum):
    """What a part reads or requires beyond rewards, groups, log-probabilities and the mask."""

    # Advantages
    GROUP = "group"
    """Compares the attempts of a group: `group_size` is at least 2."""
    STD = "std"
    """Divides by a standard deviation and reads `std_ddof`."""
    BINARY_REWARDS = "binary_rewards"
    """Rewards are 0 or 1."""
    TURN_REWARDS = "turn_rewards"
    """Turn rewards, without which a term of the advantage is 0."""
    OPTIONAL_TURN_REWARDS = "optional_turn_rewards"
    """Turn rewards, if there are any."""
    STATE_KEYS = "state_keys"
    """Keys of equal environment states (`Environment.state_key`)."""
    BRANCHES = "branches"
    """Actions that the branches of a trajectory tree share."""
    GREEDY_ROLLOUT = "greedy_rollout"
    """One more episode a task, sampled greedily, as the baseline."""
    ROLE_BASELINES = "role_baselines"
    """Running averages of the reward of each self-play role."""
    PROPOSALS = "proposals"
    """Which trajectories proposed the tasks of others."""
    CRITIC = "critic"
    """The values of a critic."""
    TURN_VALUES = "turn_values"
    """One value a turn, at its first action token."""
    PRETRAINED_CRITIC = "pretrained_critic"
    """A critic that trains on a fixed policy first."""
    OUTCOME_CRITIC = "outcome_critic"
    """The probabilities of outcomes by an outcome critic."""
    PROCESS_REWARD_MODEL = "process_reward_model"
    """An implicit process reward model and the reference."""
    DISTRIBUTIONS = "distributions"
    """Sums over the distributions that the tokens were sampled from."""
    BATCH_STATISTICS = "batch_statistics"
    """A mean and a deviation over the whole batch."""
    TOKEN_KL = "token_kl"
    """Subtracts a KL in the reward token by token itself."""
    BEHAVIOR_RATIO = "behavior_ratio"
    """Contains the ratio to the behaviour policy. Also of losses and corrections."""
    ADVANTAGE_OF_EQUAL_REWARDS = "advantage_of_equal_rewards"
    """The advantage may differ from 0 in a group of equal rewards."""
    NON_NEGATIVE = "non_negative"
    """The advantage is never below 0, so that a clip has one side."""
    # Losses
    CLIP = "clip"
    """Reads `clip_low` and `clip_high`."""
    DUAL_CLIP = "dual_clip"
    """Reads `dual_clip`."""
    TEACHER = "teacher"
    """The log-probabilities of a teacher, and no advantage."""
    TEACHER_DISTRIBUTION = "teacher_distribution"
    """The whole distributions of a teacher."""
    DEMONSTRATIONS = "demonstrations"
    """Which rows are demonstrations of an expert."""
    TOKEN_CHOICE = "token_choice"
    """A choice of tokens over the whole batch (`LossSpec.choose`)."""
    CONFLICT_WEIGHTS = "conflict_weights"
    """Weights of tokens that solved and failed attempts share, and entropies."""
    # Corrections
    LIMITED_RATIO = "limited_ratio"
    """Weighs the loss by a ratio within limits."""
    REJECTION = "rejection"
    """Removes tokens from the batch before the step (`CorrectionSpec.keep`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartSpec:
    """What all parts have.

    `function` is a function or its import path, `module:name`, imported when it is first called.
    """

    help: str
    function: Callable[..., Tensor] | str
    options: Mapping[str, Option] = field(default_factory=dict)
    needs: frozenset[Need] = frozenset()

    def load(self) -> Callable[..., Tensor]:
        """Return the function."""
        return loaded(self.function)

    def has(self, need: Need) -> bool:
        """Return whether the part has this need."""
        return need in self.needs


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageSpec(PartSpec):
    """An advantage: `function(outcomes: Outcomes, algorithm: Algorithm) -> Tensor` of shape [N, L].

    `critic_targets` names the advantage that, added to the values, is what the critic learns; empty: itself.
    """

    critic_targets: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSpec(PartSpec):
    """A loss: `function(batch: TokenBatch, algorithm: Algorithm) -> Tensor` of shape [N, L] or [N].

    `ratio_part` names what acts only where the ratio is not 1. `per_trajectory`: one term a trajectory.
    `off_policy`: no correction is needed. `cut` returns what a clip cuts off (`Cut`), and `choose` the
    tokens of `Need.TOKEN_CHOICE`.
    """

    ratio_part: str = ""
    per_trajectory: bool = False
    off_policy: bool = False
    cut: Callable[..., object] | str = ""
    choose: Callable[..., Tensor] | str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CorrectionSpec(PartSpec):
    """A correction: `function(batch: TokenBatch, algorithm: Algorithm) -> Tensor`, weights [N, L].

    `keep(old_logprobs, behavior_logprobs, mask, algorithm)` returns the tokens that train, [N, L] bool.
    """

    keep: Callable[..., Tensor] | str = ""


def loaded(function: Callable[..., R] | str) -> Callable[..., R]:
    """Return a function that is given as one or by its import path."""
    return cast(Callable[..., R], import_object(function)) if isinstance(function, str) else function
