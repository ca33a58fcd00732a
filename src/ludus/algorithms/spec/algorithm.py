"""An algorithm as data: names of parts, numbers, and the options of each part. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Literal, TypeVar

from ludus.algorithms.spec.advantages import ADVANTAGES, TARGETS
from ludus.algorithms.spec.corrections import CORRECTIONS, KL_OPTIONS, TERM_OPTIONS
from ludus.algorithms.spec.losses import LOSSES
from ludus.algorithms.spec.parts import AdvantageSpec, CorrectionSpec, LossSpec, Option, PartSpec
from ludus.errors import ConfigError
from ludus.plugins import find_plugin

AGGREGATION_NAMES = ("token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "constant")
FULL_KL_NAMES: tuple[Literal["full_reverse", "full_forward"], ...] = ("full_reverse", "full_forward")
"""KL divergences of whole distributions, without sampling noise."""
KL_NAMES = ("k1", "k2", "k3", "abs", "k3_k2grad", *FULL_KL_NAMES)
TERM_NAMES = tuple(TERM_OPTIONS)
PLACEMENTS = ("loss", "reward", "advantage")

Part = Literal["advantage", "loss", "correction", "kl", "terms"]
W = TypeVar("W", bound=str)
S = TypeVar("S", bound=PartSpec)


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
    """Return the spec of a built-in correction. Raises ConfigError if there is none."""
    return _find(CorrectionSpec, "correction", name, CORRECTIONS)


def _find(kind: type[S], part: str, name: str, built_in: Mapping[str, S]) -> S:
    if name in built_in:
        return built_in[name]
    group = {"advantage": "advantages", "loss": "losses", "correction": "corrections"}[part]
    found = find_plugin(group, name, f"algorithm.{part}", built_in)
    if isinstance(found, kind):
        return found
    if callable(found):
        summary = (found.__doc__ or name).strip().splitlines()[0]
        return kind(help=summary, function=found)
    raise ConfigError(f"algorithm.{part} = {name!r} is not a function or {kind.__name__}.")


Options = dict[str, float | str]

Placement = Literal["loss", "reward", "advantage"]
VarianceFilter = Literal["share", "top_p"]
Measure = Literal["sequence", "action_tokens"]


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
