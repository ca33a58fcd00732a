"""An algorithm as data: names of parts, numbers, and the options of each part. No torch."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache
from operator import attrgetter
from typing import Literal, TypeVar

from ludus.algorithms.advantages import ADVANTAGES, TARGETS
from ludus.algorithms.corrections import CORRECTIONS
from ludus.algorithms.kl import KL_OPTIONS
from ludus.algorithms.losses import LOSSES
from ludus.algorithms.parts import (
    NOT_NEGATIVE,
    AdvantageSpec,
    CorrectionSpec,
    LossSpec,
    Need,
    Option,
    PartSpec,
    spec_of,
)
from ludus.algorithms.tensors import NEUTRAL, Outcomes, Tensor, TokenBatch, torch
from ludus.errors import ConfigError
from ludus.plugins import find_plugin

TERM_OPTIONS: Mapping[str, Option] = {
    "echo": Option("coefficient of the log-likelihood of observations", NOT_NEGATIVE, default=0.0),
    "positive_nll": Option("coefficient of the log-likelihood of solved attempts", NOT_NEGATIVE, default=0.0),
}
"""The coefficients of the auxiliary losses."""

Part = Literal["advantage", "loss", "correction", "kl", "terms"]
R = TypeVar("R")
S = TypeVar("S", bound=PartSpec)
W = TypeVar("W", bound=str)

SETTING_PARAMETERS = {
    "ddof": "std_ddof",
    "eps_low": "clip_low",
    "eps_high": "clip_high",
    "dual_clip": "dual_clip",
    "kl_coef": "kl_coef",
    "cap": "tis_cap",
}
"""The settings of an algorithm that a function takes, by the name of its parameter."""


@cache
def find_advantage(name: str) -> AdvantageSpec:
    """Return the spec of a built-in advantage or of a plug-in. Raises ConfigError if there is none."""
    return TARGETS[name] if name in TARGETS else _find(AdvantageSpec, "advantage", name, ADVANTAGES)


@cache
def find_loss(name: str) -> LossSpec:
    """Return the spec of a built-in loss or of a plug-in. Raises ConfigError if there is none."""
    return _find(LossSpec, "loss", name, LOSSES)


@cache
def find_correction(name: str) -> CorrectionSpec:
    """Return the spec of a built-in correction or of a plug-in. Raises ConfigError if there is none."""
    return _find(CorrectionSpec, "correction", name, CORRECTIONS)


def _find(kind: type[S], part: str, name: str, built_in: Mapping[str, S]) -> S:
    if name in built_in:
        return built_in[name]
    group = {"advantage": "advantages", "loss": "losses", "correction": "corrections"}[part]
    spec = spec_of(kind, find_plugin(group, name, f"algorithm.{part}", built_in))
    if spec is None:
        raise ConfigError(f"algorithm.{part} = {name!r} is not a function that {kind.__name__} can declare.")
    record, itself = (Outcomes, "outcomes") if kind is AdvantageSpec else (TokenBatch, "batch")
    known = {*spec.options, *(f.name for f in fields(record)), itself, "algorithm", *SETTING_PARAMETERS}
    for parameter in _required(spec.function):
        if parameter not in known:
            raise ConfigError(
                f"algorithm.{part} = {name!r}: nothing is passed for the parameter {parameter!r}.",
                f"Give it a default, declare it as an option, or take one of: {', '.join(sorted(known))}.",
            )
    return spec


@cache
def _parameters(function: Callable[..., object]) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(function).parameters


def _required(function: Callable[..., object]) -> list[str]:
    return [name for name, one in _parameters(function).items() if one.default is inspect.Parameter.empty]


def inputs_of(batch: Outcomes | TokenBatch) -> dict[str, object]:
    """Return the fields of a batch by name, and the batch itself, `outcomes` or `batch`."""
    names = [one.name for one in fields(batch)]
    return dict(zip(names, attrgetter(*names)(batch), strict=True)) | {
        "outcomes" if isinstance(batch, Outcomes) else "batch": batch
    }


Options = dict[str, float | str]

Placement = Literal["loss", "reward", "advantage"]
VarianceFilter = Literal["share", "top_p"]
Measure = Literal["sequence", "action_tokens"]


@dataclass(frozen=True, slots=True)
class PartOptions:
    """The options of each part that are set."""

    advantage: Options = field(default_factory=dict)
    loss: Options = field(default_factory=dict)
    correction: Options = field(default_factory=dict)
    kl: Options = field(default_factory=dict)
    terms: Options = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Algorithm:
    """One algorithm. The fields are those of `AlgorithmConfig`; `summary` is one line, `source` names the paper.

    `minibatches` is what `training.minibatches` is unless set: a clip needs several updates a batch.
    `kl_coef` 0: there is no KL term. The C of the aggregation `constant` is not here: it is the token budget of a
    trajectory and comes with the `Normalizer`.
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
    overlong_buffer: float = 0.0
    overlong_measure: Measure = "sequence"
    overlong_length: int | None = None
    minibatches: int = 1
    options: PartOptions = PartOptions()

    @property
    def advantage_spec(self) -> AdvantageSpec:
        """The spec of the advantage."""
        return find_advantage(self.advantage)

    @property
    def loss_spec(self) -> LossSpec:
        """The spec of the loss."""
        return find_loss(self.loss)

    @property
    def correction_spec(self) -> CorrectionSpec:
        """The spec of the correction."""
        return find_correction(self.correction)

    def option(self, part: Part, name: str) -> float | str:
        """Return the option of a part that is set, or its default. Raises KeyError for an unknown option."""
        given, known = self.options_of(part)
        return given.get(name, known[name].default)

    def number(self, part: Part, name: str) -> float:
        """Return an option that is a number. Raises ConfigError for a word."""
        value = self.option(part, name)
        if isinstance(value, str):
            raise ConfigError(f"{name} = {value!r} is not a number.")
        return value

    def word(self, part: Part, name: str, choices: Sequence[W]) -> W:
        """Return an option that is one of `choices`. Raises ConfigError for another one."""
        value = self.option(part, name)
        for choice in choices:
            if choice == value:
                return choice
        raise ConfigError(f"{name} = {value!r} is not known.", f"There are: {', '.join(choices)}.")

    def compute(self, part: Part, batch: Outcomes | TokenBatch) -> Tensor:
        """Return the result of the advantage, the loss or the correction."""
        spec = {"advantage": self.advantage_spec, "loss": self.loss_spec, "correction": self.correction_spec}[part]
        inputs = inputs_of(batch)
        if not spec.has(Need.OPTIONAL_TURN_REWARDS):
            inputs["turn_rewards"] = None
        found = self.call(spec.function, part, inputs)
        if isinstance(spec, AdvantageSpec) and spec.finish is not None:
            return self.call(spec.finish, part, inputs | {"advantages": found})
        return found

    def call(self, function: Callable[..., R], part: Part, inputs: Mapping[str, object]) -> R:
        """Call a function of a part, each parameter by its name: an option of the part, an input, or a setting.

        An input that is None and has no default is replaced by its neutral value (`batch.NEUTRAL`). Raises
        Raises ValueError if it has none.
        """
        known = self.options_of(part)[1]
        given: dict[str, object] = {}
        for name, parameter in _parameters(function).items():
            if name in known:
                given[name] = known[name].argument(self.option(part, name))
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
        """Return the options of a part that are set, and those that it has."""
        match part:
            case "advantage":
                return self.options.advantage, self.advantage_spec.options
            case "loss":
                return self.options.loss, self.loss_spec.options
            case "correction":
                return self.options.correction, self.correction_spec.options
            case "kl":
                return self.options.kl, KL_OPTIONS
            case "terms":
                return self.options.terms, TERM_OPTIONS

    def without_token_weights(self) -> Algorithm:
        """Return the algorithm with a loss that does not weigh tokens."""
        return replace(self, loss="reinforce")

    @property
    def filters_groups(self) -> bool:
        """Whether groups are dropped by how much they vary within a step."""
        return self.variance_filter == "top_p" or self.top_variance_fraction < 1
