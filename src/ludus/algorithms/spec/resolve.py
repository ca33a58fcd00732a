"""From a configuration to the algorithm it means, with all that is wrong with it said. Imports no torch."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from dataclasses import replace

from ludus.algorithms.spec.algorithm import (
    ADVANTAGE_NAMES,
    ADVANTAGE_OPTIONS,
    AGGREGATION_NAMES,
    ALONE_ADVANTAGES,
    BEHAVIOUR_ADVANTAGES,
    BINARY_ADVANTAGES,
    CLIPPING_LOSSES,
    CORRECTION_NAMES,
    CORRECTION_OPTIONS,
    DUAL_CLIPPING_LOSSES,
    FILTERING_CORRECTIONS,
    FULL_KL_NAMES,
    KL_NAMES,
    KL_OPTIONS,
    LOSS_NAMES,
    LOSS_OPTIONS,
    PLACEMENTS,
    POSITIVE_ADVANTAGES,
    SCALED_ADVANTAGES,
    SEQUENCE_LOSSES,
    TEACHER_LOSSES,
    TERM_NAMES,
    Algorithm,
    Options,
    PartOptions,
)
from ludus.algorithms.spec.bounds import check_option, check_together
from ludus.algorithms.spec.compatibility import check_corrections
from ludus.algorithms.spec.presets import PRESETS
from ludus.config.schema import Config
from ludus.config.sections.algorithm import AlgorithmConfig
from ludus.config.sections.algorithm import PartOptionsConfig as PartOptionsConfig
from ludus.errors import ConfigError, did_you_mean

TOP_P = 0.9
"""`variance_top` of the filter top_p, unless set (RAGEN-2, arXiv:2604.06268)."""
OFF_POLICY = ("dppo", "distill_full")
"""Losses that need no correction: they divide by the behaviour policy, or by nothing."""


def resolve(config: AlgorithmConfig) -> Algorithm:
    """The preset with the configured changes. Raises ConfigError for unknown names and contradictions."""
    _check_name("preset", config.preset, PRESETS)
    preset = PRESETS[config.preset]
    changes = config.model_dump(exclude_none=True, exclude={"preset", "options"})
    if changes.get("variance_filter") == "top_p" and preset.variance_top == 1:
        changes.setdefault("variance_top", TOP_P)
    algorithm = replace(preset, **changes)
    algorithm = replace(algorithm, options=_options(config.options, preset, algorithm))
    _check_name("advantage", algorithm.advantage, ADVANTAGE_NAMES)
    _check_name("loss", algorithm.loss, LOSS_NAMES)
    _check_name("aggregation", algorithm.aggregation, AGGREGATION_NAMES)
    _check_name("kl", algorithm.kl, KL_NAMES)
    _check_name("correction", algorithm.correction, CORRECTION_NAMES)
    _check_options("advantage", algorithm.advantage, algorithm.options.advantage, ADVANTAGE_OPTIONS)
    _check_options("loss", algorithm.loss, algorithm.options.loss, LOSS_OPTIONS)
    _check_options("correction", algorithm.correction, algorithm.options.correction, CORRECTION_OPTIONS)
    _check_options("kl", algorithm.kl, algorithm.options.kl, KL_OPTIONS)
    _check_terms(algorithm.options.terms)
    check_together(algorithm)
    check_corrections(algorithm.correction, algorithm.loss, algorithm.advantage)
    _check_sequence_weights(algorithm)
    _refuse_idle_settings(config, algorithm)
    _refuse_unread_parts(config, algorithm)
    _check_rewards_stay(algorithm)
    _check_group_size(algorithm)
    _check_importance(algorithm)
    if algorithm.advantage == "gpg" and algorithm.zero_variance:
        raise ConfigError(
            "The advantage gpg scales the batch up by its groups of equal rewards, and"
            " algorithm.zero_variance drops them, which scales it up a second time.",
            "Set algorithm.zero_variance = false, or the advantage dr_grpo.",
        )
    if algorithm.resample_rounds and not algorithm.zero_variance:
        raise ConfigError(
            f"algorithm.resample_rounds = {algorithm.resample_rounds} replaces groups that"
            " algorithm.zero_variance drops, and that is off.",
            "Turn zero_variance on, or set resample_rounds = 0.",
        )
    if algorithm.kl_coef > 0:
        check_placement(algorithm.kl, algorithm.kl_placement)
    return algorithm


def algorithm_of(config: Config) -> Algorithm:
    """The algorithm of a run: off policy it corrects by truncated importance sampling, unless told otherwise.

    What a server samples that repeats nothing (`rollout.reproducible` is off) counts as off policy too: its
    numbers are not the learner's. So do partial rollouts, whose tokens are of several versions. A correction,
    a loss or an advantage that reads the behaviour policy by itself stays as it is; a loss with one term per
    trajectory gets one weight per trajectory.
    """
    algorithm = resolve(config.algorithm)
    if algorithm.kl_coef == 0 and config.kl_control.kind != "constant":
        # A KL that comes with the steps has to fit as one from the first step does.
        resolve(config.algorithm.model_copy(update={"kl_coef": 1.0}))
    given = config.algorithm.correction is not None
    own = config.engine.url is None or config.rollout.reproducible
    alike = (own or config.training.learner.old_logprobs == "engine") and not config.rollout.partial.is_set
    if (
        (config.training.mode == "sync" and alike)
        or given
        or algorithm.correction != "none"
        or algorithm.loss in OFF_POLICY
        or algorithm.advantage in BEHAVIOUR_ADVANTAGES
    ):
        return algorithm
    sequence = algorithm.loss in SEQUENCE_LOSSES
    options = config.algorithm.options.model_copy(
        update={
            "correction": config.algorithm.options.correction | ({"level": "geometric"} if sequence else {})
        }
    )
    return resolve(config.algorithm.model_copy(update={"correction": "tis", "options": options}))


def minibatches_of(config: Config) -> int:
    """Optimiser steps in one pass over a batch: those of the settings, or else the preset's."""
    return config.training.minibatches or resolve(config.algorithm).minibatches


def _check_options(part: str, name: str, options: Options, known: Mapping[str, tuple[str, ...]]) -> None:
    """Raises ConfigError for an option that this part does not have, or that it cannot take."""
    for key in options:
        if key in known[name]:
            check_option(part, key, options)
        else:
            guess = did_you_mean(key, known[name], cutoff=0.5)
            have = ", ".join(known[name]) or "none"
            raise ConfigError(
                f"algorithm.options.{part}.{key} is nothing that the {part} {name} has.",
                f"{guess}It has: {have}.",
            )


def _check_terms(terms: Options) -> None:
    for name in terms:
        _check_name("options.terms", name, TERM_NAMES)
        check_option("terms", name, terms)


def _check_sequence_weights(algorithm: Algorithm) -> None:
    """A loss with one term a trajectory takes one weight a trajectory."""
    if algorithm.loss not in SEQUENCE_LOSSES or algorithm.correction in ("none", *FILTERING_CORRECTIONS):
        return
    if algorithm.options.correction.get("level", "token") == "token":
        raise ConfigError(
            f"The loss {algorithm.loss} has one term per trajectory, and algorithm.correction = "
            f"{algorithm.correction!r} weighs tokens.",
            "Set algorithm.options.correction.level = 'sequence' or 'geometric', or correction = 'none'.",
        )


def _options(given: PartOptionsConfig, preset: Algorithm, algorithm: Algorithm) -> PartOptions:
    """The preset's numbers with those given; a part that is replaced brings none of the preset's."""
    own = preset.options
    return PartOptions(
        advantage=(own.advantage if algorithm.advantage == preset.advantage else {}) | given.advantage,
        loss=(own.loss if algorithm.loss == preset.loss else {}) | given.loss,
        correction=(own.correction if algorithm.correction == preset.correction else {}) | given.correction,
        kl=own.kl | given.kl,
        terms=own.terms | given.terms,
    )


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
    if algorithm.loss not in DUAL_CLIPPING_LOSSES:
        _refuse("dual_clip", config.dual_clip, f"the loss {algorithm.loss} has no second clip")
    if algorithm.advantage not in SCALED_ADVANTAGES:
        _refuse("std_ddof", config.std_ddof, f"the advantage {algorithm.advantage} has no deviation in it")
    if algorithm.correction != "tis":
        _refuse("tis_cap", config.tis_cap, f"algorithm.correction is {algorithm.correction}")
    if algorithm.overlong_cache == 0:
        reason = "algorithm.overlong_cache is 0"
        _refuse("overlong_measure", config.overlong_measure, reason)
        _refuse("overlong_length", config.overlong_length, reason)
    if algorithm.kl_coef == 0 and config.kl_coef is None:
        reason = "algorithm.kl_coef is 0 (write it where kl_control raises it, also as 0)"
        _refuse("kl", config.kl, reason)
        _refuse("kl_placement", config.kl_placement, reason)
        _refuse("options.kl.granularity", config.options.kl.get("granularity"), reason)
        _refuse("options.kl.importance", config.options.kl.get("importance"), reason)
    if algorithm.kl_placement == "reward":
        reason = "a KL in the reward adds up over the trajectory by itself"
        _refuse("options.kl.granularity", config.options.kl.get("granularity"), reason)


def _refuse_unread_parts(config: AlgorithmConfig, algorithm: Algorithm) -> None:
    """A part that the loss or the advantage does not read."""
    loss, in_loss = algorithm.loss, algorithm.kl_placement == "loss"
    penalised = algorithm.kl_coef > 0
    if loss in SEQUENCE_LOSSES and algorithm.entropy_coef == 0 and not (penalised and in_loss):
        _refuse("aggregation", config.aggregation, f"the loss {loss} is a mean over trajectories by itself")
    if loss in TEACHER_LOSSES:
        reason = f"the loss {loss} reads a teacher and no reward"
        _refuse("opsm_delta", algorithm.opsm_delta, reason)
        _refuse("advantage", config.advantage, reason)
        _refuse("options.advantage", config.options.advantage or None, reason)
        _refuse("overlong_cache", algorithm.overlong_cache or None, reason)
        _refuse("zero_variance", algorithm.zero_variance or None, reason)
        _refuse("greso", algorithm.greso or None, reason)
        _refuse("variance_top", algorithm.variance_top if algorithm.filters_groups else None, reason)
        _refuse("kl_placement", algorithm.kl_placement if penalised and not in_loss else None, reason)
    one_sided = algorithm.advantage in POSITIVE_ADVANTAGES and loss != "cispo"
    if one_sided and not (penalised and algorithm.kl_placement == "advantage"):
        reason = f"the advantage {algorithm.advantage} is never below 0"
        _refuse("eps_low", config.eps_low, reason)
        _refuse("dual_clip", config.dual_clip, reason)


def _check_importance(algorithm: Algorithm) -> None:
    """ConfigError for a ratio on a KL that is exact at each state, or detached."""
    if algorithm.options.kl.get("importance", "none") == "none":
        return
    if algorithm.kl in FULL_KL_NAMES:
        raise ConfigError(
            f"algorithm.options.kl.importance corrects for the sampled token, and algorithm.kl = "
            f"{algorithm.kl!r} reads whole distributions.",
            "Set kl = 'k3', or leave importance out.",
        )
    if algorithm.kl_placement != "loss":
        raise ConfigError(
            f"algorithm.options.kl.importance acts in the loss, and algorithm.kl_placement is "
            f"{algorithm.kl_placement!r}.",
            "Set kl_placement = 'loss', or leave importance out.",
        )


def _check_rewards_stay(algorithm: Algorithm) -> None:
    """ConfigError where something is added to rewards that have to be 0 or 1."""
    if algorithm.advantage not in BINARY_ADVANTAGES:
        return
    penalised = algorithm.kl_coef > 0 and algorithm.kl_placement == "reward"
    if penalised or algorithm.overlong_cache:
        what = "algorithm.kl_placement = 'reward'" if penalised else "algorithm.overlong_cache"
        raise ConfigError(
            f"The advantage {algorithm.advantage} takes rewards of 0 and 1, and {what} adds to them.",
            "Set kl_placement = 'loss' and overlong_cache = 0, or choose another advantage.",
        )


def _check_group_size(algorithm: Algorithm) -> None:
    """ConfigError for groups of one where the attempts of a group are compared."""
    compares = {
        f"the advantage {algorithm.advantage}": algorithm.advantage not in ALONE_ADVANTAGES,
        "algorithm.zero_variance": algorithm.zero_variance,
        "algorithm.variance_top": algorithm.filters_groups,
        "algorithm.greso": algorithm.greso,
    }
    if algorithm.group_size == 1 and any(compares.values()):
        what = next(name for name, does in compares.items() if does)
        raise ConfigError(
            "algorithm.group_size is 1, but must be at least 2: a group of one has no baseline to compare"
            f" with, and {what} compares the attempts of a group.",
        )


def _refuse(key: str, value: object, reason: str) -> None:
    if value is not None:
        raise ConfigError(
            f"algorithm.{key} = {value} would have no effect: {reason}.",
            f"Unset {key}, or change what ignores it; where the preset sets it, switch it off.",
        )


def _check_name(key: str, value: str, names: Iterable[str]) -> None:
    known = list(names)
    if value in known:
        return
    guess = did_you_mean(value, known, cutoff=0.5)
    raise ConfigError(f"algorithm.{key} = {value!r} is not known.", f"{guess}There are: {', '.join(known)}.")
