"""Which parts of an algorithm exclude each other, and other settings. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ludus.algorithms.spec.algorithm import BEHAVIOUR_ADVANTAGES, BINARY_ADVANTAGES, Algorithm, number
from ludus.config.sections.rewards import RewardsConfig
from ludus.errors import ConfigError
from ludus.rewards.base import Reward

BEHAVIOUR_RATIO = ("tis", "icepop", "decoupled", "dppo", *BEHAVIOUR_ADVANTAGES)
"""Corrections, losses and advantages that contain the ratio to the behaviour policy."""


def check_corrections(*names: str) -> None:
    """ConfigError where two of the chosen parts contain the ratio to the behaviour policy.

    `names` are the corrections, the loss and the advantage of an algorithm; others than those of
    `BEHAVIOUR_RATIO` do not matter. Two such ratios weigh the same gap between engine and learner twice.
    `reject_sequence` and `m2po` only drop what does not train, and go with each.
    """
    twice = [name for name in names if name in BEHAVIOUR_RATIO]
    if len(twice) > 1:
        raise ConfigError(
            f"{' and '.join(twice)} correct the same gap between engine and learner twice.",
            f"Keep one of {', '.join(twice)}; with the loss dppo or the advantages vtrace and retrace the"
            " correction is 'none'.",
        )


def check_observations(algorithm: Algorithm, mask_observations: bool) -> None:
    """ConfigError where observations would train twice: by the term echo, and as if they were actions."""
    if not mask_observations and number(algorithm.options.terms, "echo", 0.0) > 0:
        raise ConfigError(
            "training.mask_observations = false trains observations already, and so does"
            " algorithm.options.terms.echo.",
            "Leave one of them out.",
        )


def check_binary_rewards(algorithm: Algorithm, settings: RewardsConfig, parts: Sequence[Reward]) -> None:
    """ConfigError where the advantage takes rewards of 0 and 1 alone and the settings make others of the
    `parts` that train."""
    if algorithm.advantage not in BINARY_ADVANTAGES:
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
        "combination": settings.combination if settings.combination == "pareto" else None,
        "normalise_by": settings.normalise_by,
        "model": settings.model if settings.model_weight != 0 else None,
    }
    for key, value in others.items():
        if value is not None:
            yield f"rewards.{key} = {value!r} makes others", f"Leave out rewards.{key}"
