"""Which parts of an algorithm exclude each other, and other settings. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ludus.algorithms.spec.algorithm import Algorithm
from ludus.algorithms.spec.parts import Need
from ludus.config.sections.rewards import RewardsConfig
from ludus.errors import ConfigError
from ludus.rewards.base import Reward


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
    """ConfigError where observations would train twice: by the term echo, and as if they were actions."""
    if not mask_observations and algorithm.number("terms", "echo") > 0:
        raise ConfigError(
            "training.mask_observations = false trains observations already, and so does algorithm.options.terms.echo.",
            "Leave one of them out.",
        )


def check_binary_rewards(algorithm: Algorithm, settings: RewardsConfig, parts: Sequence[Reward]) -> None:
    """ConfigError where the advantage takes rewards of 0 and 1 alone and the settings make others of the
    `parts` that train."""
    if not algorithm.advantage_spec.has(Need.BINARY_REWARDS):
        return
    for what, remedy in _not_binary(settings, parts):
        raise ConfigError(
            f"The advantage {algorithm.advantage} takes rewards of 0 and 1, and {what}.",
            f"{remedy}, or choose another advantage.",
        )


def _not_binary(settings: RewardsConfig, parts: Sequence[Reward]) -> Iterator[tuple[str, str]]:
    """What makes other rewards than 0 and 1 of outcomes of 0 and 1, and what to do about it."""
    for part in parts:
        start = settings.weights.get(part.name, part.weight)
        wanted = (0.0, 1.0) if part.outcome else (0.0,)
        for weight in (start, settings.weights_end.get(part.name, start)):
            if weight not in wanted:
                said = f"the part {part.name} has the weight {weight:g}"
                yield said, f"Set rewards.weights.{part.name} = {wanted[-1]:g} throughout"
    others = {
        "length.kind": settings.length.kind if settings.length.kind != "none" else None,
        "aggregation": settings.aggregation if settings.aggregation == "pareto" else None,
        "normalise_by": settings.normalise_by,
        "model": settings.model if settings.model_weight != 0 else None,
    }
    for key, value in others.items():
        if value is not None:
            yield f"rewards.{key} = {value!r} makes others", f"Leave out rewards.{key}"
