"""From a configuration to the algorithm it means, and which parts and settings exclude each other. No torch."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from ludus.algorithms.aggregate import AGGREGATIONS
from ludus.algorithms.kl import FULL_KL_NAMES, KL_NAMES, PLACEMENTS
from ludus.algorithms.parts import Need
from ludus.algorithms.spec.algorithm import TERM_OPTIONS, Algorithm, Part, PartOptions
from ludus.algorithms.spec.presets import PRESETS
from ludus.config.schema import Config
from ludus.config.sections.algorithm import AlgorithmConfig
from ludus.config.sections.algorithm import PartOptionsConfig as PartOptionsConfig
from ludus.config.sections.rewards import RewardsConfig
from ludus.errors import ConfigError, did_you_mean
from ludus.rewards.base import Reward

TOP_P = 0.9
"""`top_variance_fraction` of the filter top_p, unless set (RAGEN-2, arXiv:2604.06268)."""


def resolve(config: AlgorithmConfig) -> Algorithm:
    """Return the preset with the configured changes. Raises ConfigError for unknown names and contradictions."""
    _check_name("preset", config.preset, PRESETS)
    preset = PRESETS[config.preset]
    changes = config.model_dump(exclude_none=True, exclude={"preset", "options"})
    if changes.get("variance_filter") == "top_p" and preset.top_variance_fraction == 1:
        changes.setdefault("top_variance_fraction", TOP_P)
    algorithm = replace(preset, **changes)
    algorithm = replace(algorithm, options=_options(config.options, preset, algorithm))
    _check_name("aggregation", algorithm.aggregation, AGGREGATIONS)
    _check_name("kl", algorithm.kl, KL_NAMES)
    _check_options(algorithm, "advantage", algorithm.advantage)
    _check_options(algorithm, "loss", algorithm.loss)
    _check_options(algorithm, "correction", algorithm.correction)
    _check_options(algorithm, "kl", algorithm.kl)
    for name in algorithm.options.terms:
        _check_name("options.terms", name, TERM_OPTIONS)
    _check_options(algorithm, "terms", "")
    check_together(algorithm)
    check_corrections(algorithm)
    _check_sequence_weights(algorithm)
    _refuse_idle_settings(config, algorithm)
    _refuse_unread_parts(config, algorithm)
    _check_rewards_stay(algorithm)
    _check_group_size(algorithm)
    _check_importance(algorithm)
    if algorithm.advantage == "gpg" and algorithm.filter_zero_variance:
        raise ConfigError(
            "The advantage gpg scales the batch up by its groups of equal rewards, and"
            " algorithm.filter_zero_variance drops them, which scales it up a second time.",
            "Set algorithm.filter_zero_variance = false, or the advantage dr_grpo.",
        )
    if algorithm.max_resample_rounds and not algorithm.filter_zero_variance:
        raise ConfigError(
            f"algorithm.max_resample_rounds = {algorithm.max_resample_rounds} replaces groups that"
            " algorithm.filter_zero_variance drops, and that is off.",
            "Turn filter_zero_variance on, or set max_resample_rounds = 0.",
        )
    if algorithm.kl_coef > 0:
        check_placement(algorithm.kl, algorithm.kl_placement)
    return algorithm


def algorithm_of(config: Config) -> Algorithm:
    """Return the algorithm of a run: off policy it corrects by truncated importance sampling, unless a correction is
    set.

    Samples of a server without `rollout.reproducible` count as off policy too, since its numbers differ from the
    learner's. So do partial rollouts, whose tokens are of several versions. A correction that is set stays, and a loss
    or an advantage that contains the behaviour ratio gets none. A loss with one term per trajectory gets one weight
    per trajectory.
    """
    algorithm = resolve(config.algorithm)
    if algorithm.kl_coef == 0 and config.kl_control.kind != "constant":
        # A KL that comes with the steps has to fit as one from the first step does.
        resolve(config.algorithm.model_copy(update={"kl_coef": 1.0}))
    given = config.algorithm.correction is not None
    own = not config.engine.is_external or config.rollout.reproducible
    alike = (own or config.training.learner.old_logprobs == "engine") and not config.rollout.partial.is_set
    if (
        (not config.training.off_policy and alike)
        or given
        or algorithm.correction != "none"
        or algorithm.loss_spec.off_policy
        or algorithm.advantage_spec.has(Need.BEHAVIOR_RATIO)
    ):
        return algorithm
    sequence = algorithm.loss_spec.per_trajectory
    options = config.algorithm.options.model_copy(
        update={"correction": config.algorithm.options.correction | ({"level": "geometric"} if sequence else {})}
    )
    return resolve(config.algorithm.model_copy(update={"correction": "tis", "options": options}))


def minibatches_of(config: Config) -> int:
    """Return the optimizer steps in one pass over a batch: the setting, or the preset's."""
    return config.training.minibatches or resolve(config.algorithm).minibatches


def _check_options(algorithm: Algorithm, part: Part, name: str) -> None:
    """Raise ConfigError for an option that the part does not have, or a value that it does not take."""
    given, known = algorithm.options_of(part)
    for key, value in given.items():
        if key not in known:
            guess = did_you_mean(key, known, cutoff=0.5)
            have = ", ".join(known) or "none"
            raise ConfigError(
                f"algorithm.options.{part}.{key} is not an option of the {part} {name}.", f"{guess}It has: {have}."
            )
        known[key].check(f"algorithm.options.{part}.{key}", value)


def _check_sequence_weights(algorithm: Algorithm) -> None:
    """Raise ConfigError if token weights meet a loss with one term per trajectory."""
    correction = algorithm.correction_spec
    if not algorithm.loss_spec.per_trajectory or not correction.has(Need.LIMITED_RATIO):
        return
    if algorithm.options.correction.get("level", "token") == "token":
        raise ConfigError(
            f"The loss {algorithm.loss} has one term per trajectory, and algorithm.correction = "
            f"{algorithm.correction!r} weighs tokens.",
            "Set algorithm.options.correction.level = 'sequence' or 'geometric', or correction = 'none'.",
        )


def _options(given: PartOptionsConfig, preset: Algorithm, algorithm: Algorithm) -> PartOptions:
    """Return the preset's options with those given; a part that is replaced has none of the preset's."""
    own = preset.options
    return PartOptions(
        advantage=(own.advantage if algorithm.advantage == preset.advantage else {}) | given.advantage,
        loss=(own.loss if algorithm.loss == preset.loss else {}) | given.loss,
        correction=(own.correction if algorithm.correction == preset.correction else {}) | given.correction,
        kl=own.kl | given.kl,
        terms=own.terms | given.terms,
    )


def check_placement(kl: str, placement: str) -> None:
    """Warn of an estimator that has no effect at its placement; raise ConfigError for unknown names."""
    _check_name("kl", kl, KL_NAMES)
    _check_name("kl_placement", placement, PLACEMENTS)
    if kl == "k1" and placement == "loss":
        warnings.warn(
            "k1 in the loss has gradient 0 in expectation and regularises nothing;"
            " use k2 or k3_k2grad there, or kl_placement = 'reward'.",
            stacklevel=2,
        )


def _refuse_idle_settings(config: AlgorithmConfig, algorithm: Algorithm) -> None:
    """Raise ConfigError for a setting that has no effect. A coefficient of 0 that is spelled out is allowed."""
    if not algorithm.loss_spec.has(Need.CLIP):
        _refuse("clip_low", config.clip_low, f"the loss {algorithm.loss} does not clip")
        _refuse("clip_high", config.clip_high, f"the loss {algorithm.loss} does not clip")
    if not algorithm.loss_spec.has(Need.DUAL_CLIP):
        _refuse("dual_clip", config.dual_clip, f"the loss {algorithm.loss} has no second clip")
    if not algorithm.advantage_spec.has(Need.STD):
        _refuse("std_ddof", config.std_ddof, f"the advantage {algorithm.advantage} has no deviation in it")
    if algorithm.correction != "tis":
        _refuse("tis_cap", config.tis_cap, f"algorithm.correction is {algorithm.correction}")
    if algorithm.overlong_buffer == 0:
        reason = "algorithm.overlong_buffer is 0"
        _refuse("overlong_measure", config.overlong_measure, reason)
        _refuse("overlong_length", config.overlong_length, reason)
    if algorithm.kl_coef == 0 and config.kl_coef is None:
        reason = "algorithm.kl_coef is 0 (write it if kl_control raises it, also as 0)"
        _refuse("kl", config.kl, reason)
        _refuse("kl_placement", config.kl_placement, reason)
        _refuse("options.kl.granularity", config.options.kl.get("granularity"), reason)
        _refuse("options.kl.importance", config.options.kl.get("importance"), reason)
    if algorithm.kl_placement == "reward":
        reason = "a KL in the reward is already summed over the trajectory"
        _refuse("options.kl.granularity", config.options.kl.get("granularity"), reason)


def _refuse_unread_parts(config: AlgorithmConfig, algorithm: Algorithm) -> None:
    """Raise ConfigError for a part that the loss or the advantage does not read."""
    loss, in_loss = algorithm.loss, algorithm.kl_placement == "loss"
    penalised = algorithm.kl_coef > 0
    if algorithm.loss_spec.per_trajectory and algorithm.entropy_coef == 0 and not (penalised and in_loss):
        _refuse("aggregation", config.aggregation, f"the loss {loss} is already a mean over trajectories")
    if algorithm.loss_spec.has(Need.TEACHER):
        reason = f"the loss {loss} reads a teacher and no reward"
        _refuse("opsm_delta", algorithm.opsm_delta, reason)
        _refuse("advantage", config.advantage, reason)
        _refuse("options.advantage", config.options.advantage or None, reason)
        _refuse("overlong_buffer", algorithm.overlong_buffer or None, reason)
        _refuse("filter_zero_variance", algorithm.filter_zero_variance or None, reason)
        _refuse("greso", algorithm.greso or None, reason)
        _refuse("top_variance_fraction", algorithm.top_variance_fraction if algorithm.filters_groups else None, reason)
        _refuse("kl_placement", algorithm.kl_placement if penalised and not in_loss else None, reason)
    one_sided = algorithm.advantage_spec.has(Need.NON_NEGATIVE) and loss != "cispo"
    if one_sided and not (penalised and algorithm.kl_placement == "advantage"):
        reason = f"the advantage {algorithm.advantage} is never below 0"
        _refuse("clip_low", config.clip_low, reason)
        _refuse("dual_clip", config.dual_clip, reason)


def _check_importance(algorithm: Algorithm) -> None:
    """Raise ConfigError for a ratio on a KL that is exact at each state, or detached."""
    if algorithm.options.kl.get("importance", "none") == "none":
        return
    if algorithm.kl in FULL_KL_NAMES:
        raise ConfigError(
            f"algorithm.options.kl.importance corrects for the sampled token, and algorithm.kl = "
            f"{algorithm.kl!r} reads whole distributions.",
            "Set kl = 'k3', or unset importance.",
        )
    if algorithm.kl_placement != "loss":
        raise ConfigError(
            f"algorithm.options.kl.importance acts in the loss, and algorithm.kl_placement is "
            f"{algorithm.kl_placement!r}.",
            "Set kl_placement = 'loss', or unset importance.",
        )


def _check_rewards_stay(algorithm: Algorithm) -> None:
    """Raise ConfigError if something is added to rewards that must be 0 or 1."""
    if not algorithm.advantage_spec.has(Need.BINARY_REWARDS):
        return
    penalised = algorithm.kl_coef > 0 and algorithm.kl_placement == "reward"
    if penalised or algorithm.overlong_buffer:
        what = "algorithm.kl_placement = 'reward'" if penalised else "algorithm.overlong_buffer"
        raise ConfigError(
            f"The advantage {algorithm.advantage} takes rewards of 0 and 1, and {what} adds to them.",
            "Set kl_placement = 'loss' and overlong_buffer = 0, or choose another advantage.",
        )


def _check_group_size(algorithm: Algorithm) -> None:
    """Raise ConfigError for groups of one if the attempts of a group are compared."""
    compares = {
        f"the advantage {algorithm.advantage}": algorithm.advantage_spec.has(Need.GROUP),
        "algorithm.filter_zero_variance": algorithm.filter_zero_variance,
        "algorithm.top_variance_fraction": algorithm.filters_groups,
        "algorithm.greso": algorithm.greso,
    }
    if algorithm.group_size == 1 and any(compares.values()):
        what = next(name for name, does in compares.items() if does)
        raise ConfigError(
            "algorithm.group_size is 1, but must be at least 2: a group of one has no baseline to compare"
            f" with, and {what} compares the attempts of a group."
        )


def _refuse(key: str, value: object, reason: str) -> None:
    if value is not None:
        raise ConfigError(
            f"algorithm.{key} = {value} would have no effect: {reason}.",
            f"Unset {key}, or change what ignores it; if the preset sets it, switch it off.",
        )


def _check_name(key: str, value: str, names: Iterable[str]) -> None:
    known = list(names)
    if value in known:
        return
    guess = did_you_mean(value, known, cutoff=0.5)
    raise ConfigError(f"algorithm.{key} = {value!r} is not known.", f"{guess}There are: {', '.join(known)}.")


def check_corrections(algorithm: Algorithm) -> None:
    """Raise ConfigError if two of the chosen parts contain the ratio to the behaviour policy.

    Two such ratios weigh the same gap between engine and learner twice. A correction that only removes
    tokens goes with each.
    """
    specs = {
        algorithm.correction: algorithm.correction_spec,
        algorithm.loss: algorithm.loss_spec,
        algorithm.advantage: algorithm.advantage_spec,
    }
    twice = [name for name, spec in specs.items() if spec.has(Need.BEHAVIOR_RATIO)]
    if len(twice) > 1:
        raise ConfigError(
            f"{' and '.join(twice)} correct the same gap between engine and learner twice.",
            f"Keep one of {', '.join(twice)}; with the loss dppo or the advantages vtrace and retrace the"
            " correction is 'none'.",
        )


def check_together(algorithm: Algorithm) -> None:
    """Raise ConfigError for options that contradict each other or the size of the groups."""
    for part, options, known in (
        ("loss", algorithm.options.loss, algorithm.loss_spec.options),
        ("correction", algorithm.options.correction, algorithm.correction_spec.options),
    ):
        if options.get("measure", "ratio") != "ratio":
            if "low" in options:
                raise ConfigError(
                    f"algorithm.options.{part}.low bounds ratios; with measure {options['measure']} there is"
                    " high alone."
                )
        elif "low" in options or "high" in options:
            upper, high = "high", options.get("high", known["high"].default if "high" in known else None)
            if high is None:
                upper, high = "algorithm.tis_cap", algorithm.tis_cap
            low = options.get("low", known["low"].default)
            if float(low) > float(high):
                raise ConfigError(
                    f"algorithm.options.{part}.low is {float(low):g}, but must be at most {upper}, which is"
                    f" {float(high):g}."
                )
    k = algorithm.options_of("advantage")[1].get("k")
    if k is not None and (chosen := algorithm.number("advantage", "k")) > algorithm.group_size:
        raise ConfigError(
            f"algorithm.options.advantage.k is {chosen:g}, but must be at most algorithm.group_size, which is"
            f" {algorithm.group_size}."
        )


def check_observations(algorithm: Algorithm, mask_observations: bool) -> None:
    """Raise ConfigError if observations would train twice: by the term echo, and as actions."""
    if not mask_observations and algorithm.number("terms", "echo") > 0:
        raise ConfigError(
            "training.mask_observations = false trains observations already, and so does algorithm.options.terms.echo.",
            "Leave one of them out.",
        )


def check_binary_rewards(algorithm: Algorithm, settings: RewardsConfig, parts: Sequence[Reward]) -> None:
    """Raise ConfigError if the advantage takes rewards of 0 and 1 alone and the settings make others of the
    `parts` that train.
    """
    if not algorithm.advantage_spec.has(Need.BINARY_REWARDS):
        return
    for what, remedy in _not_binary(settings, parts):
        raise ConfigError(
            f"The advantage {algorithm.advantage} takes rewards of 0 and 1, and {what}.",
            f"{remedy}, or choose another advantage.",
        )


def _not_binary(settings: RewardsConfig, parts: Sequence[Reward]) -> Iterator[tuple[str, str]]:
    """Yield what turns outcomes of 0 and 1 into other rewards, and how to prevent it."""
    for part in parts:
        start = settings.weights.get(part.name, part.weight)
        wanted = (0.0, 1.0) if part.outcome else (0.0,)
        for weight in (start, settings.weights_end.get(part.name, start)):
            if weight not in wanted:
                what = f"the part {part.name} has the weight {weight:g}"
                yield what, f"Set rewards.weights.{part.name} = {wanted[-1]:g} throughout"
    others = {
        "length.kind": settings.length.kind if settings.length.kind != "none" else None,
        "aggregation": settings.aggregation if settings.aggregation == "pareto" else None,
        "normalise_by": settings.normalise_by,
        "model": settings.model if settings.model_weight != 0 else None,
    }
    for key, value in others.items():
        if value is not None:
            yield f"rewards.{key} = {value!r} makes others", f"Unset rewards.{key}"
