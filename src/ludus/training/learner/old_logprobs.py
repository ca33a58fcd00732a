"""Use the engine's log-probabilities as the old policy in ratios, which saves the learner's own pass.

They must equal the learner's up to rounding, which the parity check before the first step verifies.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal

import torch
from torch import Tensor

from ludus.algorithms.parts import Need
from ludus.algorithms.spec.algorithm import Algorithm
from ludus.config.schema import Config
from ludus.errors import ConfigError
from ludus.rollout.build import sampling_params
from ludus.training.batches.rows import Row

OldLogprobs = Literal["recomputed", "engine"]

OLD_FROM_ENGINE: Final = "policy/old_from_engine"
"""Metric: 1 if ratios divide by the engine's log-probabilities, 0 if the learner recomputed them."""


def recorded_logprobs(rows: Sequence[Row]) -> list[Tensor]:
    """Return the engine's log-probabilities of each row, `[T]` float64, 0 off its sampled tokens."""
    return [torch.tensor(row.behavior, dtype=torch.float64) for row in rows]


def check_old_logprobs(config: Config, algorithm: Algorithm) -> None:
    """Raise ConfigError if the engine's log-probabilities cannot replace the learner's."""
    if config.training.learner.old_logprobs != "engine":
        return
    reason = ""
    if algorithm.correction != "none":
        reason = f"algorithm.correction = {algorithm.correction!r} compares the two"
    elif algorithm.advantage_spec.has(Need.BEHAVIOR_RATIO):
        reason = f"algorithm.advantage = {algorithm.advantage!r} compares the two"
    elif sampling_params(config.rollout, config.rollout.temperature).cuts or config.rollout.guided_tools:
        reason = "sampling is truncated (rollout.top_p, top_k, min_p, guided_tools)"
    elif not config.training.mask_observations:
        reason = "observations train (training.mask_observations is off) and have no log-probabilities"
    elif config.training.learner.replay_routing:
        reason = "training.learner.replay_routing records experts in the pass that this skips"
    if reason:
        raise ConfigError(
            f"training.learner.old_logprobs = 'engine' is not possible: {reason}.",
            "Set training.learner.old_logprobs = 'recomputed'.",
        )
