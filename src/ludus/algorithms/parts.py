"""Advantages, losses and corrections as parts: their options, what they need, and how they are found. No torch.

A part is a pure function by keyword with its spec as the decorator, in one file:

    @AdvantageSpec(help="rewards over their mean", needs={Need.GROUP}, options={"power": Option("exponent", FRACTION)})
    def mine(*, rewards: Tensor, group: Tensor, mask: Tensor, power: float = 1.0) -> Tensor: ...

`Algorithm.compute` passes each parameter by its name: an option of the part, a field of the batch (`Outcomes` or
`TokenBatch`), the batch (`outcomes` or `batch`), the `algorithm`, or a setting (`algorithm.SETTING_PARAMETERS`).
The trainer reads `needs`, never a name.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass, field, replace
from enum import StrEnum
from importlib import import_module
from pkgutil import iter_modules
from types import ModuleType
from typing import TypeVar

from ludus.algorithms.tensors import Cut, Tensor
from ludus.errors import ConfigError


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
    """One option of a part: a number within `bounds`, or, with `choices`, one of these words.

    The default is that of the function's parameter, unless `default` is set.
    """

    help: str
    bounds: OptionBounds = ANY
    choices: tuple[str, ...] = ()
    default: float | str = ""

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

    def argument(self, value: float | str) -> float | str:
        """Return `value` as the function takes it: a switch as a bool, a whole number as an int."""
        if isinstance(value, str) or not self.bounds.whole:
            return value
        return bool(value) if self.bounds == SWITCH else int(value)


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


F = TypeVar("F", bound=Callable[..., Tensor])
S = TypeVar("S", bound="PartSpec")


def _undeclared() -> Tensor:
    raise TypeError("a spec is a decorator: write it above a function")


@dataclass(frozen=True, slots=True, kw_only=True)
class PartSpec:
    """What all parts have. `name` is the name in settings, that of the function unless set."""

    help: str
    name: str = ""
    options: Mapping[str, Option] = field(default_factory=dict)
    needs: Set[Need] = frozenset()
    function: Callable[..., Tensor] = _undeclared

    def __call__(self, function: F) -> F:
        """Declare `function` as the part, and return it as it is."""
        parameters = inspect.signature(function).parameters
        options = dict(self.options)
        for key, option in options.items():
            if option.default == "":
                default = parameters[key].default
                options[key] = replace(option, default=float(default) if isinstance(default, bool) else default)
        _SPECS[function] = replace(self, name=self.name or function.__name__, function=function, options=options)
        return function

    def has(self, need: Need) -> bool:
        """Return whether the part has this need."""
        return need in self.needs


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageSpec(PartSpec):
    """An advantage: [N, L] from the fields of `Outcomes`.

    `critic_targets` names the advantage that, added to the values, is what the critic learns; empty: itself.
    `finish` is applied to the result, its parameter `advantages`. `selectable`: settings may name it.
    """

    critic_targets: str = ""
    finish: Callable[..., Tensor] | None = None
    selectable: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSpec(PartSpec):
    """A loss: [N, L], or [N] with `per_trajectory`, from the fields of `TokenBatch`.

    `ratio_part` names what acts only where the ratio is not 1. `off_policy`: no correction is needed. `cut`
    returns what a clip cuts off (`Cut`). `choose` returns the tokens of `Need.TOKEN_CHOICE`, [N, L] bool, from
    `covariance`, `mask` and `seed`.
    """

    ratio_part: str = ""
    per_trajectory: bool = False
    off_policy: bool = False
    cut: Callable[..., Cut] | None = None
    choose: Callable[..., Tensor] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CorrectionSpec(PartSpec):
    """A correction: weights [N, L] from the fields of `TokenBatch`.

    With `Need.REJECTION` it is a filter instead: it is applied once before the step, to `old_logprobs`,
    `behavior_logprobs` and `mask` of the whole batch, and tokens of weight 0 do not train.
    """


_SPECS: dict[Callable[..., Tensor], PartSpec] = {}
"""The specs of declared functions."""


def spec_of(kind: type[S], found: object) -> S | None:
    """Return the spec of a declared function, a bare one for another function, None for anything else."""
    if not callable(found):
        return None
    if found not in _SPECS:
        kind(help=(found.__doc__ or f"{found}").strip().splitlines()[0])(found)
    spec = _SPECS[found]
    return spec if isinstance(spec, kind) else None


def modules_of(package: str, path: Iterable[str]) -> tuple[ModuleType, ...]:
    """Return the modules of a folder, imported, by name. `path` is the package's `__path__`."""
    return tuple(import_module(f"{package}.{module.name}") for module in iter_modules(path))


def declared_in(kind: type[S], modules: Iterable[ModuleType]) -> dict[str, S]:
    """Return the specs of a kind that the modules declare, by name, in their order."""
    found = (_SPECS.get(one) for module in modules for one in vars(module).values() if inspect.isfunction(one))
    return {spec.name: spec for spec in found if isinstance(spec, kind)}


def publish(package: str, modules: Iterable[ModuleType]) -> list[str]:
    """Make the public functions and classes of modules names of a package, before modules of that name.

    Return the names.
    """
    found = {name: one for module in modules for name, one in vars(module).items() if _is_public(module, name, one)}
    vars(import_module(package)).update(found)
    return sorted(found)


def _is_public(module: ModuleType, name: str, one: object) -> bool:
    defined = inspect.isfunction(one) or inspect.isclass(one)
    return defined and vars(one).get("__module__", module.__name__) == module.__name__ and not name.startswith("_")
