"""Algorithms as data: names of parts, numbers, and the options of each part. Imports no torch.

A part is an advantage, a loss or a correction: a pure function by keyword with its spec as the decorator, in one file:

    @AdvantageSpec(help="rewards over their mean", needs={Need.GROUP}, options={"power": Option("exponent", FRACTION)})
    def mine(*, rewards: Tensor, group: Tensor, mask: Tensor, power: float = 1.0) -> Tensor: ...

`Algorithm.compute` passes each parameter by its name: an option of the part, a field of the batch (`Outcomes` or
`TokenBatch`), the batch (`outcomes` or `batch`), the `algorithm`, or a setting (`SETTING_PARAMETERS`). The trainer
depends on `needs`, never on a name.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from functools import cache
from importlib import import_module
from operator import attrgetter
from pkgutil import iter_modules
from types import ModuleType
from typing import ClassVar, Literal, TypeVar, cast

from ludus.algorithms.tensors import NEUTRAL, Cut, Outcomes, Tensor, TokenBatch, torch
from ludus.errors import ConfigError
from ludus.plugins import describe_value, find_plugin, result_error


@dataclass(frozen=True, slots=True)
class OptionBounds:
    """Closed interval from `low` to `high`; excludes `low` if `above`; integers only if `is_integer`.

    Constants: `ANY` (any number), `POSITIVE` (above 0), `NOT_NEGATIVE` (from 0 on), `FRACTION` (from 0 to 1), `SWITCH`
    (0 or 1, passed to the function as a bool).
    """

    low: float = -math.inf
    high: float = math.inf
    is_integer: bool = False
    above: bool = False

    def contains(self, value: float) -> bool:
        """Return whether `value` is within the bounds."""
        inside = self.low < value if self.above else self.low <= value
        return inside and value <= self.high and (not self.is_integer or value == int(value))

    def __str__(self) -> str:
        if self.low == -math.inf:
            return "any number"
        kind = "a whole number " if self.is_integer else ""
        if self.above:
            most = f" and at most {self.high:g}" if self.high < math.inf else ""
            return f"{kind}above {self.low:g}{most}"
        return f"{kind}from {self.low:g} " + (f"to {self.high:g}" if self.high < math.inf else "on")


ANY = OptionBounds()
POSITIVE = OptionBounds(0, above=True)
NOT_NEGATIVE = OptionBounds(0)
FRACTION = OptionBounds(0, 1)
SWITCH = OptionBounds(0, 1, is_integer=True)


@dataclass(frozen=True, slots=True)
class Option:
    """An option of a part: a number within `bounds`, or one of `choices` if set.

    The default is that of the function's parameter, unless `default` is set.
    """

    help: str
    bounds: OptionBounds = ANY
    choices: tuple[str, ...] = ()
    default: float | str = ""

    def check(self, key: str, value: float | str) -> None:
        """Raise ConfigError unless `value` is allowed; `key` is the name of the setting in the message."""
        name = key.rpartition(".")[2]
        if self.choices:
            if value not in self.choices:
                raise ConfigError(f"{name} = {value!r} is not known.", f"Choose from: {', '.join(self.choices)}.")
        elif isinstance(value, str):
            raise ConfigError(f"{name} = {value!r} is not a number.")
        elif not self.bounds.contains(value):
            raise ConfigError(f"{key} is {value:g}, but must be {self.bounds}.")

    def convert(self, value: float | str) -> float | str:
        """Convert `value` to the type of the function's parameter: a switch to bool, a whole number to int."""
        if isinstance(value, str) or not self.bounds.is_integer:
            return value
        return bool(value) if self.bounds == SWITCH else int(value)


class Need(StrEnum):
    """An input or a condition of a part beyond rewards, groups, log-probabilities and the mask."""

    # Advantages
    GROUP = "group"
    """Comparison within a group: `group_size` must be at least 2."""
    STD = "std"
    """Division by a standard deviation, with `std_ddof`."""
    BINARY_REWARDS = "binary_rewards"
    """Rewards of 0 and 1 only."""
    TURN_REWARDS = "turn_rewards"
    """Turn rewards; a term of the advantage is 0 without them."""
    OPTIONAL_TURN_REWARDS = "optional_turn_rewards"
    """Turn rewards, if there are any."""
    STATE_KEYS = "state_keys"
    """Keys of equal environment states (`Environment.state_key`)."""
    BRANCHES = "branches"
    """Shared actions of the branches of a trajectory tree."""
    GREEDY_ROLLOUT = "greedy_rollout"
    """One additional greedy episode per task as the baseline."""
    ROLE_BASELINES = "role_baselines"
    """Running averages of the reward of each self-play role."""
    PROPOSALS = "proposals"
    """The mapping from solver trajectories to the proposals that they work on."""
    CRITIC = "critic"
    """The values of a critic."""
    TURN_VALUES = "turn_values"
    """One value per turn, at its first action token."""
    PRETRAINED_CRITIC = "pretrained_critic"
    """A critic pretrained on a fixed policy."""
    OUTCOME_CRITIC = "outcome_critic"
    """Outcome probabilities of an outcome critic."""
    PROCESS_REWARD_MODEL = "process_reward_model"
    """An implicit process reward model and the reference."""
    DISTRIBUTIONS = "distributions"
    """Sums over the sampling distributions of the tokens."""
    BATCH_STATISTICS = "batch_statistics"
    """Mean and standard deviation over the whole batch."""
    TOKEN_KL = "token_kl"
    """A KL penalty in the reward, subtracted per token by the advantage function."""
    BEHAVIOR_RATIO = "behavior_ratio"
    """The importance ratio to the behaviour policy as a factor. Also of losses and corrections."""
    ADVANTAGE_OF_EQUAL_REWARDS = "advantage_of_equal_rewards"
    """An advantage that may be nonzero in a group of equal rewards; otherwise such groups are filtered."""
    NON_NEGATIVE = "non_negative"
    """An advantage of at least 0, so that a clip is one-sided."""
    # Losses
    CLIP = "clip"
    """The settings `clip_low` and `clip_high`."""
    DUAL_CLIP = "dual_clip"
    """The setting `dual_clip`."""
    TEACHER = "teacher"
    """The log-probabilities of a teacher, and no advantage."""
    TEACHER_DISTRIBUTION = "teacher_distribution"
    """The full distributions of a teacher."""
    SELF_TEACHER = "self_teacher"
    """The divergence from the policy's moving average, whose prompt also shows a success or feedback."""
    SHOWN_DEMONSTRATION = "shown_demonstration"
    """A prompt of the self-teacher that shows the expert's dialogue, and no reward."""
    DEMONSTRATIONS = "demonstrations"
    """A mask of the rows that are expert demonstrations."""
    TOKEN_CHOICE = "token_choice"
    """A token selection over the whole batch (`LossSpec.choose`)."""
    CONFLICT_WEIGHTS = "conflict_weights"
    """Weights of the tokens common to solved and failed attempts, and entropies."""
    # Corrections
    LIMITED_RATIO = "limited_ratio"
    """A bounded importance ratio as the weight of the loss."""
    REJECTION = "rejection"
    """Removal of tokens from the batch before the step (`CorrectionSpec`)."""


Part = Literal["advantage", "loss", "correction", "kl", "terms"]
F = TypeVar("F", bound=Callable[..., Tensor])
R = TypeVar("R")
S = TypeVar("S", bound="PartSpec")
W = TypeVar("W", bound=str)


def _undeclared() -> Tensor:
    raise TypeError("a spec is a decorator: write it above a function")


DEFAULTS_OF: dict[type, Callable[..., object]] = {}
"""The function or dataclass that has the defaults of the optional keys of a record."""


@cache
def parameters_of(function: Callable[..., object]) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of a function.

    `**inputs: Unpack[Record]` is replaced by the keys of the record, also in `inspect.signature(function)`; optional
    ones have the default of `DEFAULTS_OF`, else None.
    """
    signature = inspect.signature(function)
    named = list(signature.parameters.values())
    if named and str(named[-1].annotation).startswith("Unpack["):
        record = vars(inspect.getmodule(function))[named.pop().annotation.removeprefix("Unpack[").removesuffix("]")]
        known = inspect.signature(DEFAULTS_OF[record]).parameters if record in DEFAULTS_OF else {}
        for key, kind in record.__annotations__.items():
            default = known[key].default if key in known else None
            default = inspect.Parameter.empty if key in record.__required_keys__ else default
            named.append(inspect.Parameter(key, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind))
        signature = signature.replace(parameters=named)
        vars(function)["__signature__"] = signature
    return signature.parameters


@dataclass(frozen=True, slots=True, kw_only=True)
class PartSpec:
    """The fields of all parts. `name` is the name in settings, that of the function unless set.

    `selectable`: a setting may name it. `reads`: the field of the batch for a parameter of another name.
    """

    part: ClassVar[Part]
    plugins: ClassVar[str]
    batch: ClassVar[type[Outcomes | TokenBatch]] = TokenBatch
    help: str
    name: str = ""
    options: Mapping[str, Option] = field(default_factory=dict)
    needs: Set[Need] = frozenset()
    selectable: bool = True
    reads: Mapping[str, str] = field(default_factory=dict)
    function: Callable[..., Tensor] = _undeclared

    def __call__(self, function: F) -> F:
        """Register `function` as the part and return it unchanged."""
        parameters = parameters_of(function)
        options = dict(self.options)
        for key, option in options.items():
            if option.default == "":
                default = parameters[key].default
                options[key] = replace(option, default=float(default) if isinstance(default, bool) else default)
        spec = replace(self, name=self.name or function.__name__, function=function, options=options)
        _SPECS[function] = spec
        if function.__module__.startswith("ludus.algorithms."):
            _NAMED[type(self), spec.name] = spec
        return function

    def has(self, need: Need) -> bool:
        """Return whether the part has this need."""
        return need in self.needs


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageSpec(PartSpec):
    """An advantage: [N, L] from the fields of `Outcomes`.

    `critic_targets` names the advantage whose sum with the values is the target of the critic; empty: itself.
    `finish` is applied to the result, passed as `advantages`.
    """

    part, plugins, batch = "advantage", "advantages", Outcomes
    critic_targets: str = ""
    finish: Callable[..., Tensor] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSpec(PartSpec):
    """A loss: [N, L], or [N] with `per_trajectory`, from the fields of `TokenBatch`.

    `ratio_part` names the term without effect at a ratio of 1. `off_policy`: no correction is needed. `cut` returns
    the clipped tokens (`Cut`). `choose` returns the tokens of `Need.TOKEN_CHOICE`, [N, L] bool, from
    `covariance`, `mask` and `seed`.
    """

    part, plugins = "loss", "losses"
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

    part, plugins = "correction", "corrections"


_SPECS: dict[Callable[..., Tensor], PartSpec] = {}
"""The specs of declared functions."""
_NAMED: dict[tuple[type[PartSpec], str], PartSpec] = {}
"""The specs of built-in parts and of loaded plug-ins, by kind and name."""


def modules_of(package: str, path: Iterable[str]) -> tuple[ModuleType, ...]:
    """Import and return the modules of a package, sorted by name. `path` is the package's `__path__`."""
    return tuple(import_module(f"{package}.{module.name}") for module in iter_modules(path))


def declared_in(kind: type[S], modules: Iterable[ModuleType]) -> dict[str, S]:
    """Return the specs of one kind declared in the modules, by name, in module order."""
    found = (_SPECS.get(one) for module in modules for one in vars(module).values() if inspect.isfunction(one))
    return {spec.name: spec for spec in found if isinstance(spec, kind)}


def publish(package: str, modules: Iterable[ModuleType]) -> list[str]:
    """Export the public functions and classes of modules from a package; they shadow modules of the same name.

    Return the exported names.
    """
    found = {name: one for module in modules for name, one in vars(module).items() if _is_public(module, name, one)}
    vars(import_module(package)).update(found)
    return sorted(found)


def _is_public(module: ModuleType, name: str, one: object) -> bool:
    defined = inspect.isfunction(one) or inspect.isclass(one)
    return defined and vars(one).get("__module__", module.__name__) == module.__name__ and not name.startswith("_")


SETTING_PARAMETERS = {
    "ddof": "std_ddof",
    "eps_low": "clip_low",
    "eps_high": "clip_high",
    "dual_clip": "dual_clip",
    "kl_coef": "kl_coef",
    "cap": "tis_cap",
}
"""The settings of an algorithm by the parameter name of a function."""


def find_part(kind: type[S], name: str) -> S:
    """Return the spec of a built-in part or of a plug-in. Raises ConfigError for an unknown name."""
    found = _NAMED.get((kind, name)) or _find_plugin(kind, name)
    _NAMED[kind, name] = found
    return cast(S, found)


def _find_plugin(kind: type[PartSpec], name: str) -> PartSpec:
    """Return the spec of a plug-in. Raises ConfigError for an unknown name, parameter or field."""
    setting = f"algorithm.{kind.part}"
    built_in = [one for (other, one), spec in _NAMED.items() if other is kind and spec.selectable and one == spec.name]
    function = find_plugin(kind.plugins, name, setting, built_in)
    if callable(function) and function not in _SPECS:
        kind(help=(function.__doc__ or f"{function}").strip().splitlines()[0])(function)
    found = _SPECS.get(function) if callable(function) else None
    if not isinstance(found, kind):
        raise ConfigError(f"{setting} = {name!r} is not a function that {kind.__name__} can declare.")
    itself = "outcomes" if kind.batch is Outcomes else "batch"
    known = {*(f.name for f in fields(kind.batch)), itself}
    if unknown := sorted(set(found.reads.values()) - known):
        raise ConfigError(
            f"{setting} = {name!r} reads {unknown[0]!r}, but {kind.batch.__name__} has no such field.",
            f"Choose from: {', '.join(sorted(known))}.",
        )
    passed = {*found.options, *known, *found.reads, "algorithm", *SETTING_PARAMETERS}
    for parameter, one in parameters_of(found.function).items():
        if one.default is inspect.Parameter.empty and parameter not in passed:
            raise ConfigError(
                f"{setting} = {name!r}: nothing is passed for the parameter {parameter!r}.",
                f"Give it a default, declare it as an option, or take one of: {', '.join(sorted(passed))}.",
            )
    return found


def inputs_of(batch: Outcomes | TokenBatch) -> dict[str, object]:
    """Return the fields of a batch by name, plus the batch itself as `outcomes` or `batch`."""
    names = [one.name for one in fields(batch)]
    return dict(zip(names, attrgetter(*names)(batch), strict=True)) | {
        "outcomes" if isinstance(batch, Outcomes) else "batch": batch
    }


KINDS: Mapping[Part, type[PartSpec]] = {"advantage": AdvantageSpec, "loss": LossSpec, "correction": CorrectionSpec}
GRANULARITIES: tuple[Literal["token", "trajectory"], ...] = ("token", "trajectory")
IMPORTANCES: tuple[Literal["none", "ratio"], ...] = ("none", "ratio")
KL_OPTIONS: Mapping[str, Option] = {
    "granularity": Option(
        "penalty of each token, or its sum over the trajectory", choices=GRANULARITIES, default="token"
    ),
    "importance": Option("weigh the term in the loss by the ratio, or do not", choices=IMPORTANCES, default="none"),
}
"""The options of every KL estimator."""
TERM_OPTIONS: Mapping[str, Option] = {
    "echo": Option("coefficient of the log-likelihood of observations", NOT_NEGATIVE, default=0.0),
    "positive_nll": Option("coefficient of the log-likelihood of solved attempts", NOT_NEGATIVE, default=0.0),
}
"""The coefficients of the auxiliary losses."""
OPTIONS: Mapping[Part, Mapping[str, Option]] = {"kl": KL_OPTIONS, "terms": TERM_OPTIONS}
Options = dict[str, float | str]
Placement = Literal["loss", "reward", "advantage"]
VarianceFilter = Literal["share", "top_p"]
Measure = Literal["sequence", "action_tokens"]


@dataclass(frozen=True, slots=True)
class PartOptions:
    """The configured options of each part."""

    advantage: Options = field(default_factory=dict)
    loss: Options = field(default_factory=dict)
    correction: Options = field(default_factory=dict)
    kl: Options = field(default_factory=dict)
    terms: Options = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Algorithm:
    """One algorithm. The fields are those of `AlgorithmConfig`; `summary` is one line, `source` names the paper.

    `minibatches` is the default of `training.minibatches`: a clip needs several updates per batch. `kl_coef` 0: no KL
    term. The C of the aggregation `constant` is not a field: it is the token budget of a trajectory and part of the
    `Normalizer`.
    """

    name: str
    summary: str
    source: str
    group_size: int = 8
    advantage: str = "grpo"
    loss: str = "ppo_clip"
    aggregation: str = "token_mean"
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    opsm_delta: float | None = None
    kl: str = "k3"
    kl_coef: float = 0.0
    kl_placement: Placement = "loss"
    correction: str = "none"
    tis_cap: float = 2.0
    filter_zero_variance: bool = False
    max_resample_rounds: int = 0
    variance_filter: VarianceFilter = "share"
    top_variance_fraction: float = 1.0
    greso: bool = False
    overlong_mask: bool = False
    std_ddof: int = 1
    entropy_coef: float = 0.0
    entropy_target: float | None = None
    overlong_buffer: float = 0.0
    overlong_measure: Measure = "sequence"
    overlong_length: int | None = None
    minibatches: int = 1
    options: PartOptions = PartOptions()

    @property
    def advantage_spec(self) -> AdvantageSpec:
        """The spec of the advantage."""
        return find_part(AdvantageSpec, self.advantage)

    @property
    def loss_spec(self) -> LossSpec:
        """The spec of the loss."""
        return find_part(LossSpec, self.loss)

    @property
    def correction_spec(self) -> CorrectionSpec:
        """The spec of the correction."""
        return find_part(CorrectionSpec, self.correction)

    def option(self, part: Part, name: str) -> float | str:
        """Return the configured value of an option, else its default. Raises KeyError for an unknown option."""
        given, known = self.options_of(part)
        return given.get(name, known[name].default)

    def number(self, part: Part, name: str) -> float:
        """Return the value of a numeric option. Raises ConfigError for a string."""
        value = self.option(part, name)
        if isinstance(value, str):
            raise ConfigError(f"{name} = {value!r} is not a number.")
        return value

    def choice(self, part: Part, name: str, choices: Sequence[W]) -> W:
        """Return the value of an option with `choices`. Raises ConfigError for any other value."""
        value = self.option(part, name)
        for choice in choices:
            if choice == value:
                return choice
        raise ConfigError(f"{name} = {value!r} is not known.", f"Choose from: {', '.join(choices)}.")

    def compute(self, part: Part, batch: Outcomes | TokenBatch) -> Tensor:
        """Return the result of the advantage, the loss or the correction.

        Raises ConfigError unless it is a tensor [N, L], or [N] for a loss with `per_trajectory`.
        """
        spec = find_part(KINDS[part], attrgetter(part)(self))
        inputs = inputs_of(batch)
        if not spec.has(Need.OPTIONAL_TURN_REWARDS):
            inputs["turn_rewards"] = None
        found = self.call(spec.function, part, inputs | {name: inputs[field] for name, field in spec.reads.items()})
        if isinstance(spec, AdvantageSpec) and spec.finish is not None:
            found = self.call(spec.finish, part, inputs | {"advantages": found})
        whole = isinstance(spec, LossSpec) and spec.per_trajectory
        expected = batch.mask.shape[:1] if whole else batch.mask.shape
        if not isinstance(found, torch.Tensor) or found.shape != expected:
            text = f"a tensor {list(found.shape)}" if isinstance(found, torch.Tensor) else describe_value(found)
            shape = f"a tensor {'[N]' if whole else '[N, L]'} = {list(expected)}"
            raise result_error(f"algorithm.{part} = {attrgetter(part)(self)}", text, shape)
        return found

    def call(self, function: Callable[..., R], part: Part, inputs: Mapping[str, object]) -> R:
        """Call a function of a part; bind each parameter by name to an option of the part, an input, or a setting.

        A required input that is None is replaced by its neutral value (`tensors.NEUTRAL`). Raises ValueError for an
        input without one.
        """
        known = self.options_of(part)[1]
        given: dict[str, object] = {}
        for name, parameter in parameters_of(function).items():
            if name in known:
                given[name] = known[name].convert(self.option(part, name))
            elif name in inputs:
                required = parameter.default is inspect.Parameter.empty
                given[name] = self._present(name, part, inputs) if required else inputs[name]
            elif name in SETTING_PARAMETERS:
                given[name] = attrgetter(SETTING_PARAMETERS[name])(self)
            elif name == "algorithm":
                given[name] = self
        return function(**given)

    def _present(self, name: str, part: Part, inputs: Mapping[str, object]) -> object:
        value, mask = inputs[name], inputs["mask"]
        if value is None and name in NEUTRAL and isinstance(mask, torch.Tensor):
            return torch.full(mask.shape, NEUTRAL[name], dtype=torch.float64)
        if value is None:
            raise ValueError(f"the {part} {attrgetter(part)(self)} needs {name}, and the batch has none")
        return value

    def options_of(self, part: Part) -> tuple[Options, Mapping[str, Option]]:
        """Return the configured options of a part, and all options that it supports."""
        known = OPTIONS[part] if part in OPTIONS else find_part(KINDS[part], attrgetter(part)(self)).options
        given: Options = attrgetter(part)(self.options)
        return given, known

    @property
    def filters_groups(self) -> bool:
        """Whether groups are dropped by their reward variance within a step."""
        return self.variance_filter == "top_p" or self.top_variance_fraction < 1
