"""Epoch sampler: the examples of a step, as a function of seed and step alone."""

from __future__ import annotations

import math
import random
from functools import lru_cache

from ludus.config.sections.rewards import RewardModelConfig
from ludus.config.sections.stages import PreferenceConfig


def num_steps(settings: PreferenceConfig | RewardModelConfig, num_pairs: int) -> int:
    """Return the number of optimizer steps of the run."""
    return settings.steps or math.ceil(num_pairs * settings.epochs / min(settings.batch_size, num_pairs))


def batch_of_step(step: int, num_pairs: int, batch_size: int, seed: int) -> list[int]:
    """Return the indices of a step's examples; each epoch is shuffled separately."""
    size = min(batch_size, num_pairs)
    places = range((step - 1) * size, step * size)
    return [_lap(num_pairs, seed, place // num_pairs)[place % num_pairs] for place in places]


@lru_cache(maxsize=4)
def _lap(num_pairs: int, seed: int, lap: int) -> tuple[int, ...]:
    order = list(range(num_pairs))
    random.Random(f"pairs:{seed}:{lap}").shuffle(order)
    return tuple(order)
