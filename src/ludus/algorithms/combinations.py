"""Which parts of an algorithm exclude each other. Imports no torch."""

from __future__ import annotations

from ludus.algorithms.algorithm import BEHAVIOUR_ADVANTAGES, Algorithm, number
from ludus.errors import ConfigError

BEHAVIOUR_RATIO = ("tis", "icepop", "decoupled", "dppo", *BEHAVIOUR_ADVANTAGES)
"""Corrections, losses and advantages that contain the ratio to the behaviour policy."""


def check_corrections(*names: str) -> None:
    """ConfigError where two of the chosen parts contain the ratio to the behaviour policy.

    `names` are the corrections, the loss and the advantage of an algorithm; others than those of
    `BEHAVIOUR_RATIO` do not matter. Two such ratios weigh the same gap between engine and learner twice.
    `reject_sequence` only drops trajectories and goes with each.
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
