"""Algorithms as data: the names and numbers that make one, the presets, and the checks. Imports no torch.

The name tuples repeat the keys of the registries (a test holds them equal), so that a configuration is
checked before torch is loaded.
"""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from ludus.config.schema import AlgorithmConfig
from ludus.errors import ConfigError

ADVANTAGE_NAMES = ("grpo", "dr_grpo", "rloo", "opo", "reinforce_pp_baseline", "raw")
LOSS_NAMES = ("ppo_clip", "reinforce")
AGGREGATION_NAMES = ("token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "constant")
KL_NAMES = ("k1", "k2", "k3", "abs", "k3_k2grad")
CORRECTION_NAMES = ("none", "tis")
PLACEMENTS = ("loss", "reward", "advantage")

CLIPPING_LOSSES = ("ppo_clip",)
"""Losses that read eps_low, eps_high and dual_clip."""
SCALED_ADVANTAGES = ("grpo", "reinforce_pp_baseline")
"""Advantages that divide by a standard deviation and so read std_ddof."""

Placement = Literal["loss", "reward", "advantage"]


@dataclass(frozen=True, slots=True)
class Algorithm:
    """One algorithm. The fields mean what they mean in `AlgorithmConfig`; `source` is where it is from.

    `kl_coef` 0 is no KL term. The C of the aggregation `constant` is not here: it is the token budget of a
    trajectory and comes with the `Normaliser`.
    """

    name: str
    source: str
    group_size: int = 8
    advantage: str = "grpo"
    loss: str = "ppo_clip"
    aggregation: str = "token_mean"
    eps_low: float = 0.2
    eps_high: float = 0.2
    dual_clip: float | None = None
    kl: str = "k3"
    kl_coef: float = 0.0
    kl_placement: Placement = "loss"
    correction: str = "none"
    tis_cap: float = 2.0
    zero_variance: bool = False
    resample_rounds: int = 0
    overlong_mask: bool = False
    std_ddof: int = 1
    entropy_coef: float = 0.0


PRESETS: dict[str, Algorithm] = {
    "grpo": Algorithm(
        name="grpo",
        source="arXiv:2402.03300 with the clip range and aggregation of arXiv:2503.14476, no KL",
        eps_high=0.28,
        zero_variance=True,
    ),
    "grpo_paper": Algorithm(
        name="grpo_paper",
        source="arXiv:2402.03300",
        aggregation="seq_mean_token_mean",
        kl_coef=0.04,
        std_ddof=0,
    ),
    "dapo": Algorithm(
        name="dapo",
        source="arXiv:2503.14476, without its soft overlong punishment (a reward)",
        eps_high=0.28,
        zero_variance=True,
        resample_rounds=3,
        overlong_mask=True,
    ),
    "dr_grpo": Algorithm(
        name="dr_grpo", source="arXiv:2503.20783", advantage="dr_grpo", aggregation="constant"
    ),
    "rloo": Algorithm(
        name="rloo",
        source="arXiv:2402.14740, without its KL term",
        advantage="rloo",
        loss="reinforce",
        aggregation="seq_mean_token_sum",
    ),
    "reinforce": Algorithm(
        name="reinforce",
        source="Williams 1992",
        advantage="raw",
        loss="reinforce",
        aggregation="seq_mean_token_sum",
    ),
}


def resolve(config: AlgorithmConfig) -> Algorithm:
    """The preset with the configured changes. Raises ConfigError for unknown names and contradictions."""
    _check_name("preset", config.preset, PRESETS)
    changes = config.model_dump(exclude_none=True, exclude={"preset"})
    algorithm = replace(PRESETS[config.preset], **changes)
    _check_name("advantage", algorithm.advantage, ADVANTAGE_NAMES)
    _check_name("loss", algorithm.loss, LOSS_NAMES)
    _check_name("aggregation", algorithm.aggregation, AGGREGATION_NAMES)
    _check_name("kl", algorithm.kl, KL_NAMES)
    _check_name("correction", algorithm.correction, CORRECTION_NAMES)
    _refuse_idle_settings(config, algorithm)
    if algorithm.resample_rounds and not algorithm.zero_variance:
        raise ConfigError(
            f"algorithm.resample_rounds = {algorithm.resample_rounds} replaces groups that"
            " algorithm.zero_variance drops, and that is off.",
            "Turn zero_variance on, or set resample_rounds = 0.",
        )
    if algorithm.kl_coef > 0:
        check_placement(algorithm.kl, algorithm.kl_placement)
    return algorithm


def check_placement(kl: str, placement: str) -> None:
    """Warn of an estimator that does nothing where it is placed; ConfigError for unknown names."""
    _check_name("kl", kl, KL_NAMES)
    _check_name("kl_placement", placement, PLACEMENTS)
    if kl == "k1" and placement == "loss":
        warnings.warn(
            "k1 in the loss has gradient 0 in expectation and regularises nothing;"
            " use k2 or k3_k2grad there, or kl_placement = 'reward'.",
            stacklevel=2,
        )


def _refuse_idle_settings(config: AlgorithmConfig, algorithm: Algorithm) -> None:
    """A setting that nothing would read is a mistake. A coefficient of 0 that is spelled out is not."""
    if algorithm.loss not in CLIPPING_LOSSES:
        _refuse("eps_low", config.eps_low, f"the loss {algorithm.loss} does not clip")
        _refuse("eps_high", config.eps_high, f"the loss {algorithm.loss} does not clip")
        _refuse("dual_clip", config.dual_clip, f"the loss {algorithm.loss} does not clip")
    if algorithm.advantage not in SCALED_ADVANTAGES:
        _refuse("std_ddof", config.std_ddof, f"the advantage {algorithm.advantage} has no deviation in it")
    if algorithm.correction != "tis":
        _refuse("tis_cap", config.tis_cap, f"algorithm.correction is {algorithm.correction}")
    if algorithm.kl_coef == 0 and config.kl_coef is None:
        _refuse("kl", config.kl, "algorithm.kl_coef is 0")
        _refuse("kl_placement", config.kl_placement, "algorithm.kl_coef is 0")


def _refuse(key: str, value: object, reason: str) -> None:
    if value is not None:
        raise ConfigError(
            f"algorithm.{key} = {value} would have no effect: {reason}.",
            f"Leave {key} out, or change what ignores it.",
        )


def _check_name(key: str, value: str, names: Iterable[str]) -> None:
    known = list(names)
    if value in known:
        return
    near = difflib.get_close_matches(value.lower(), known, n=1, cutoff=0.5)
    guess = f"Did you mean {near[0]!r}? " if near else ""
    raise ConfigError(f"algorithm.{key} = {value!r} is not known.", f"{guess}There are: {', '.join(known)}.")
