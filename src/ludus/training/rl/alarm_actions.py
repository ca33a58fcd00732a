"""Actions of alarms that change a coefficient of the run."""

from __future__ import annotations

from dataclasses import replace

from ludus.config.schema import AlarmAction, AlarmsConfig
from ludus.training.run.checkpoint import Adjustments

MIN_LEARNING_RATE = 0.01
"""Smallest factor of the learning rate."""
MAX_KL = 100.0
"""Largest factor of the KL coefficient."""


def adjusted(before: Adjustments, action: AlarmAction, step: int, settings: AlarmsConfig) -> Adjustments:
    """Return the factors after an action at a step; unchanged within `cooldown_steps` of the last change."""

    def waits(last: int | None) -> bool:
        return last is not None and step - last < settings.cooldown_steps

    after = before
    if action == "lower_learning_rate" and not waits(before.learning_rate_step):
        factor = max(MIN_LEARNING_RATE, before.learning_rate * settings.learning_rate_factor)
        after = replace(before, learning_rate=factor, learning_rate_step=step)
    if action == "raise_kl" and not waits(before.kl_step):
        after = replace(before, kl=min(MAX_KL, before.kl * settings.kl_factor), kl_step=step)
    changed = (after.learning_rate, after.kl) != (before.learning_rate, before.kl)
    return after if changed else before
