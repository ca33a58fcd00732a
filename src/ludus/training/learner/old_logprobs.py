"""Ratios that divide by what the engine recorded, in place of a pass of the learner's own.

The recorded log-probabilities are then the proximal policy: no forward pass before the first of several
updates. They have to be the learner's to rounding, which the parity check before the first step sees to.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal

import torch
from torch import Tensor

from ludus.algorithms.spec.algorithm import BEHAVIOUR_ADVANTAGES, Algorithm
from ludus.config.schema import Config
from ludus.errors import ConfigError
from ludus.rollout.build import sampling_params
from ludus.training.batches.rows import Row

OldLogprobs = Literal["recomputed", "engine"]

OLD_FROM_ENGINE: Final = "policy/old_from_engine"
"""1 where ratios divide by what the engine recorded, 0 where the learner computed it."""


def recorded_logprobs(rows: Sequence[Row]) -> list[Tensor]:
    """What the engine recorded of each row, `[T]` float64, 0 off its sampled tokens."""
    return [torch.tensor(row.behavior, dtype=torch.float64) for row in rows]


def check_old_logprobs(config: Config, algorithm: Algorithm) -> None:
    """Raise ConfigError where the engine's log-probabilities cannot stand for the learner's."""
    if config.training.learner.old_logprobs != "engine":
        return
    reason = ""
    if algorithm.correction != "none":
        reason = f"algorithm.correction = {algorithm.correction!r} compares the two"
    elif algorithm.advantage in BEHAVIOUR_ADVANTAGES:
        reason = f"algorithm.advantage = {algorithm.advantage!r} compares the two"
    elif sampling_params(config.rollout, config.rollout.temperature).cuts or config.rollout.guided_tools:
        reason = "actions are sampled from a cut distribution (rollout.top_p, top_k, min_p, guided_tools)"
    elif not config.training.mask_observations:
        reason = "observations train (training.mask_observations is off), and nothing is recorded of them"
    elif config.training.learner.replay_routing:
        reason = "training.learner.replay_routing records experts in the pass that this leaves out"
    if reason:
        raise ConfigError(
            f"training.learner.old_logprobs = 'engine' cannot be: {reason}.",
            "Set training.learner.old_logprobs = 'recomputed'.",
        )
