"""Resolution of a configuration to an algorithm, and checks for incompatible settings. Imports no torch."""

from __future__ import annotations

import tomllib
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from importlib import resources
from operator import attrgetter

from ludus.algorithms.algorithm import KINDS, TERM_OPTIONS, Algorithm, Need, Part, PartOptions
from ludus.algorithms.kl import FULL_KL_NAMES, KL_NAMES
from ludus.algorithms.objective import AGGREGATIONS
from ludus.config.schema import Config
from ludus.config.sections.algorithm import AlgorithmConfig
from ludus.config.sections.algorithm import PartOptionsConfig as PartOptionsConfig
from ludus.config.sections.rewards import RewardsConfig
from ludus.errors import ConfigError, did_you_mean
from ludus.rewards.base import Reward


def _presets() -> dict[str, Algorithm]:
    text = resources.files(__package__).joinpath("presets.toml").read_text("utf-8")
    return {
        name: Algorithm(name=name, **fields | {"options": PartOptions(**fields.get("options", {}))})
        for name, fields in tomllib.loads(text).items()
    }


PRESETS: dict[str, Algorithm] = _presets()

TURN_LEVEL = PRESETS["turn_return_hybrid"]
"""Default target of turn-reward calibration, for runs without a turn-level algorithm."""


TOP_P = 0.9
"""Default of `top_variance_fraction` for the filter top_p (RAGEN-2, arXiv:2604.06268)."""


def resolve(config: AlgorithmConfig) -> Algorithm:
    """Return the preset with the configured overrides. Raises ConfigError for unknown names and contradictions."""
    _check_name("preset", config.preset, PRESETS)
    preset = PRESETS[config.preset]
    changes = config.model_dump(exclude_none=True, exclude={"preset", "options"})
    if changes.get("variance_filter") == "top_p" and preset.top_variance_fraction == 1:
        changes.setdefault("top_variance_fraction", TOP_P)
    algorithm = replace(preset, **changes)
    algorithm = replace(algorithm, options=_options(config.options, preset, algorithm))
    _check_name("aggregation", algorithm.aggregation, AGGREGATIONS)
    _check_name("kl", algorithm.kl, KL_NAMES)
    for part in (*KINDS, "kl"):
        _check_options(algorithm, part)
    for name in algorithm.options.terms:
        _check_name("options.terms", name, TERM_OPTIONS)
    _check_options(algorithm, "terms")
    check_combinations(algorithm)
    check_corrections(algorithm)
    for wrong, what, remedy in _contradictions(algorithm):
        if wrong:
            raise ConfigError(what, remedy)
    for idle, given, reason in (*_idle_settings(config, algorithm), *_unread_parts(config, algorithm)):
        for key, value in given.items():
            if idle and value is not None:
                raise ConfigError(
                    f"algorithm.{key} = {value} would have no effect: {reason}.",
                    f"Unset {key}; if the preset sets it, disable it.",
                )
    _check_group_size(algorithm)
    if algorithm.kl_coef > 0 and algorithm.kl == "k1" and algorithm.kl_placement == "loss":
        warnings.warn(
            "k1 in the loss has gradient 0 in expectation and regularises nothing;"
            " use k2 or k3_k2grad there, or kl_placement = 'reward'.",
            stacklevel=2,
        )
    return algorithm


def algorithm_of(config: Config) -> Algorithm:
    """Return the algorithm of a run; off policy, the default correction is truncated importance sampling.

    Samples of an external server without `rollout.reproducible` count as off policy, since its log-probabilities
    differ from those of the learner; so do partial rollouts, with tokens of several policy versions, and guided
    attempts, sampled with another prompt. A configured correction is unchanged, and a loss or an advantage with the
    behaviour ratio is not corrected again. If the loss has one term per trajectory, the correction has one weight per
    trajectory.
    """
    algorithm = resolve(config.algorithm)
    if algorithm.kl_coef == 0 and config.kl_control.kind != "constant":
        # A KL term that starts later must pass the same checks as one from the first step.
        resolve(config.algorithm.model_copy(update={"kl_coef": 1.0}))
    given = config.algorithm.correction is not None
    exact = not config.engine.is_external or config.rollout.reproducible
    on_policy = (exact or config.training.learner.old_logprobs == "engine") and not config.rollout.partial.is_set
    on_policy = on_policy and not config.training.guidance.samples
    if (
        (not config.training.off_policy and on_policy)
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
    """Return the number of optimizer steps per pass over a batch: the setting, else that of the preset."""
    return config.training.minibatches or resolve(config.algorithm).minibatches


def _check_options(algorithm: Algorithm, part: Part) -> None:
    """Raise ConfigError for an unknown option of the part or an invalid value."""
    given, known = algorithm.options_of(part)
    for key, value in given.items():
        if key not in known:
            guess = did_you_mean(key, known, cutoff=0.5)
            have = ", ".join(known) or "none"
            raise ConfigError(
                f"algorithm.options.{part}.{key} is not an option of the {part} {attrgetter(part)(algorithm)}.",
                f"{guess}It has: {have}.",
            )
        known[key].check(f"algorithm.options.{part}.{key}", value)


def _options(given: PartOptionsConfig, preset: Algorithm, algorithm: Algorithm) -> PartOptions:
    """Return the options of the preset with overrides; a replaced part does not inherit options."""
    found = {}
    for part in fields(PartOptions):
        read = attrgetter(part.name)
        kept = part.name not in KINDS or read(algorithm) == read(preset)
        found[part.name] = (read(preset.options) if kept else {}) | read(given)
    return PartOptions(**found)


def _contradictions(algorithm: Algorithm) -> Iterator[tuple[bool, str, str]]:
    """Yield, for each pair of incompatible settings, whether both are set, the message, and the remedy."""
    loss, advantage, correction = algorithm.loss_spec, algorithm.advantage_spec, algorithm.correction_spec
    by_token = correction.has(Need.LIMITED_RATIO) and algorithm.options.correction.get("level", "token") == "token"
    yield (
        loss.per_trajectory and by_token,
        (
            f"The loss {algorithm.loss} has one term per trajectory, and algorithm.correction = "
            f"{algorithm.correction!r} weighs tokens."
        ),
        "Set algorithm.options.correction.level = 'sequence' or 'geometric', or correction = 'none'.",
    )
    penalised = algorithm.kl_coef > 0 and algorithm.kl_placement == "reward"
    what = "algorithm.kl_placement = 'reward'" if penalised else "algorithm.overlong_buffer"
    yield (
        advantage.has(Need.BINARY_REWARDS) and (penalised or algorithm.overlong_buffer > 0),
        f"The advantage {algorithm.advantage} needs rewards of 0 and 1, and {what} adds to them.",
        "Set kl_placement = 'loss' and overlong_buffer = 0, or choose another advantage.",
    )
    weighted = algorithm.options.kl.get("importance", "none") != "none"
    yield (
        weighted and algorithm.kl in FULL_KL_NAMES,
        (
            f"algorithm.options.kl.importance corrects for the sampled token, and algorithm.kl = {algorithm.kl!r} "
            "reads whole distributions."
        ),
        "Set kl = 'k3', or unset importance.",
    )
    yield (
        weighted and algorithm.kl_placement != "loss",
        f"algorithm.options.kl.importance acts in the loss, and algorithm.kl_placement is {algorithm.kl_placement!r}.",
        "Set kl_placement = 'loss', or unset importance.",
    )
    yield (
        algorithm.advantage == "gpg" and algorithm.filter_zero_variance,
        (
            "The advantage gpg scales the batch up by its groups of equal rewards, and algorithm.filter_zero_variance "
            "drops them, which scales it up a second time."
        ),
        "Set algorithm.filter_zero_variance = false, or the advantage dr_grpo.",
    )
    yield (
        algorithm.max_resample_rounds > 0 and not algorithm.filter_zero_variance,
        (
            f"algorithm.max_resample_rounds = {algorithm.max_resample_rounds} replaces groups that "
            "algorithm.filter_zero_variance drops, and that is off."
        ),
        "Turn filter_zero_variance on, or set max_resample_rounds = 0.",
    )


Idle = tuple[bool, Mapping[str, object], str]
"""Whether settings have no effect, their configured values (None if unset), and the reason."""


def _idle_settings(config: AlgorithmConfig, algorithm: Algorithm) -> Iterator[Idle]:
    """Yield settings without effect. An explicit coefficient of 0 is allowed."""
    loss, advantage = algorithm.loss_spec, algorithm.advantage_spec
    clip = {"clip_low": config.clip_low, "clip_high": config.clip_high}
    yield not loss.has(Need.CLIP), clip, f"the loss {algorithm.loss} does not clip"
    dual_clip = {"dual_clip": config.dual_clip}
    yield not loss.has(Need.DUAL_CLIP), dual_clip, f"the loss {algorithm.loss} has no second clip"
    ddof = {"std_ddof": config.std_ddof}
    yield not advantage.has(Need.STD), ddof, f"the advantage {algorithm.advantage} has no standard deviation"
    correction = algorithm.correction
    yield correction != "tis", {"tis_cap": config.tis_cap}, f"algorithm.correction is {correction}"
    overlong = {"overlong_measure": config.overlong_measure, "overlong_length": config.overlong_length}
    yield algorithm.overlong_buffer == 0, overlong, "algorithm.overlong_buffer is 0"
    granularity = {"options.kl.granularity": config.options.kl.get("granularity")}
    kl = {"kl": config.kl, "kl_placement": config.kl_placement, **granularity}
    kl["options.kl.importance"] = config.options.kl.get("importance")
    reason = "algorithm.kl_coef is 0 (write it if kl_control raises it, also as 0)"
    yield algorithm.kl_coef == 0 and config.kl_coef is None, kl, reason
    reason = "a KL in the reward is already summed over the trajectory"
    yield algorithm.kl_placement == "reward", granularity, reason


def _unread_parts(config: AlgorithmConfig, algorithm: Algorithm) -> Iterator[Idle]:
    """Yield settings of parts that the loss or the advantage ignores."""
    loss, placement, penalised = algorithm.loss_spec, algorithm.kl_placement, algorithm.kl_coef > 0
    means = loss.per_trajectory and algorithm.entropy_coef == 0 and not (penalised and placement == "loss")
    aggregation = {"aggregation": config.aggregation}
    yield means, aggregation, f"the loss {algorithm.loss} is already a mean over trajectories"
    of_rewards = {
        "opsm_delta": algorithm.opsm_delta,
        "advantage": config.advantage,
        "options.advantage": config.options.advantage or None,
        "overlong_buffer": algorithm.overlong_buffer or None,
        "filter_zero_variance": algorithm.filter_zero_variance or None,
        "greso": algorithm.greso or None,
        "top_variance_fraction": algorithm.top_variance_fraction if algorithm.filters_groups else None,
        "kl_placement": placement if penalised and placement != "loss" else None,
    }
    no_reward = loss.has(Need.TEACHER) or loss.has(Need.SHOWN_DEMONSTRATION)
    yield no_reward, of_rewards, f"the loss {algorithm.loss} reads a teacher and no reward"
    distilled = "weight" in loss.options and loss.has(Need.SELF_TEACHER) and algorithm.number("loss", "weight") == 1
    of_policy = {
        "clip_low": config.clip_low,
        "clip_high": config.clip_high,
        "dual_clip": config.dual_clip,
        "advantage": config.advantage,
        "options.advantage": config.options.advantage or None,
        "std_ddof": config.std_ddof,
        "kl_placement": placement if penalised and placement != "loss" else None,
    }
    yield distilled, of_policy, f"algorithm.options.loss.weight of {algorithm.loss} is 1, without a policy gradient"
    one_sided = algorithm.advantage_spec.has(Need.NON_NEGATIVE) and algorithm.loss != "cispo"
    clips = {"clip_low": config.clip_low, "dual_clip": config.dual_clip}
    one_sided = one_sided and not (penalised and placement == "advantage")
    yield one_sided, clips, f"the advantage {algorithm.advantage} is never below 0"


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


def _check_name(key: str, value: str, names: Iterable[str]) -> None:
    known = list(names)
    if value in known:
        return
    guess = did_you_mean(value, known, cutoff=0.5)
    raise ConfigError(f"algorithm.{key} = {value!r} is not known.", f"{guess}Choose from: {', '.join(known)}.")


def check_corrections(algorithm: Algorithm) -> None:
    """Raise ConfigError if two of the chosen parts contain the ratio to the behaviour policy.

    Two such ratios correct the same mismatch between engine and learner twice. A correction that only removes
    tokens is compatible with each of them.
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


def check_combinations(algorithm: Algorithm) -> None:
    """Raise ConfigError for options that are incompatible with each other or with the group size."""
    for part, options, known in (
        ("loss", algorithm.options.loss, algorithm.loss_spec.options),
        ("correction", algorithm.options.correction, algorithm.correction_spec.options),
    ):
        if options.get("measure", "ratio") != "ratio":
            if "low" in options:
                raise ConfigError(
                    f"algorithm.options.{part}.low bounds ratios; with measure {options['measure']} only"
                    " high has an effect."
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
    """Raise ConfigError if observations would be trained on twice: by the term echo and as actions."""
    if not mask_observations and algorithm.number("terms", "echo") > 0:
        raise ConfigError(
            "training.mask_observations = false trains observations already, and so does algorithm.options.terms.echo.",
            "Unset one of them.",
        )


def check_binary_rewards(algorithm: Algorithm, settings: RewardsConfig, parts: Sequence[Reward]) -> None:
    """Raise ConfigError if the advantage requires rewards of 0 and 1 and the settings or `parts` allow other values."""
    if not algorithm.advantage_spec.has(Need.BINARY_REWARDS):
        return
    for what, remedy in _not_binary(settings, parts):
        raise ConfigError(
            f"The advantage {algorithm.advantage} needs rewards of 0 and 1, and {what}.",
            f"{remedy}, or choose another advantage.",
        )


def _not_binary(settings: RewardsConfig, parts: Sequence[Reward]) -> Iterator[tuple[str, str]]:
    """Yield the causes of rewards other than 0 and 1, each with its remedy."""
    for part in parts:
        start = settings.weights.get(part.name, part.weight)
        wanted = (0.0, 1.0) if part.outcome else (0.0,)
        for weight in (start, settings.weights_end.get(part.name, start)):
            if weight not in wanted:
                what = f"the part {part.name} has the weight {weight:g}"
                yield what, f"Set rewards.weights.{part.name} = {wanted[-1]:g} throughout"
    others = {
        "length.kind": settings.length.kind if settings.length.kind != "none" else None,
        "aggregation": settings.aggregation if settings.aggregation in ("pareto", "gdpo") else None,
        "constraint.part": settings.constraint.part,
        "normalise_by": settings.normalise_by,
        "model": settings.model if settings.model_weight != 0 else None,
        "judge": settings.judge.kind if settings.judge.is_on and settings.judge.weight != 0 else None,
    }
    for key, value in others.items():
        if value is not None:
            yield f"rewards.{key} = {value!r} makes others", f"Unset rewards.{key}"
