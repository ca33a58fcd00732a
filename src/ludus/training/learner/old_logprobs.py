"""Use the engine's log-probabilities as the old policy in ratios, which saves the learner's own pass.

They must equal the learner's up to rounding, which the parity check before the first step verifies.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal

import torch
from torch import Tensor

from ludus.training.batches.rows import Row

OldLogprobs = Literal["recomputed", "engine"]

OLD_FROM_ENGINE: Final = "policy/old_from_engine"
"""Metric: 1 if ratios divide by the engine's log-probabilities, 0 if the learner recomputed them."""


def recorded_logprobs(rows: Sequence[Row]) -> list[Tensor]:
    """Return the engine's log-probabilities of each row, `[T]` float64, 0 off its sampled tokens."""
    return [torch.tensor(row.behavior, dtype=torch.float64) for row in rows]
