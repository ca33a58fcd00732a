"""Rows of tokens, and how they are packed into padded microbatches.

A row is one path through a trajectory or one demonstration. Rows of similar length share a microbatch, so
that little is padding; the order of rows and their grouping do not change the gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ludus.types import Segment, Trajectory


@dataclass(frozen=True, slots=True)
class Row:
    """Tokens of one row, `[T]` each.

    `trains` marks the tokens that enter the loss, `behavior` holds the engine's log-probabilities (0 where
    there is none, with `sampled` False), `advantages` one value per token.
    """

    tokens: tuple[int, ...]
    trains: tuple[bool, ...]
    sampled: tuple[bool, ...]
    behavior: tuple[float, ...]
    advantages: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Microbatch:
    """Right-padded tensors `[B, L]` of some rows; `index` holds the rows' places in the batch.

    `tokens` int64; `trains`, `sampled` bool; `behavior`, `advantages` float32 or float64.
    Padding is on the right, so that under a causal mask no real token sees it.
    """

    index: tuple[int, ...]
    tokens: Tensor
    trains: Tensor
    sampled: Tensor
    behavior: Tensor
    advantages: Tensor


def row_of_segments(segments: Sequence[Segment]) -> Row:
    """A row of a dialogue for supervised training: action tokens train, with advantage 1."""
    tokens = tuple(t for s in segments for t in s.tokens)
    trains = tuple(s.kind == "action" for s in segments for _ in s.tokens)
    zeros = (0.0,) * len(tokens)
    return Row(tokens, trains, (False,) * len(tokens), zeros, tuple(map(float, trains)))


def row_of_trajectory(trajectory: Trajectory, advantage: float, *, mask_observations: bool = True) -> Row:
    """The row of a chain: its action tokens train with one advantage.

    With `mask_observations` False observation tokens train as well, as if the model had written them.
    """
    sampled = trajectory.action_mask
    trains = sampled
    if not mask_observations:
        trains = tuple(s.kind != "prompt" for s in trajectory.chain for _ in s.tokens)
    advantages = tuple(advantage if t else 0.0 for t in trains)
    return Row(trajectory.token_ids, trains, sampled, trajectory.behavior_logprobs, advantages)


def microbatches(
    rows: Sequence[Row], max_tokens: int, device: torch.device, dtype: torch.dtype
) -> list[Microbatch]:
    """Split rows, longest first, into microbatches of at most `max_tokens` padded tokens (or one row)."""
    order = sorted(range(len(rows)), key=lambda i: -len(rows[i].tokens))
    parts: list[list[int]] = []
    for i in order:
        if parts and len(rows[parts[-1][0]].tokens) * (len(parts[-1]) + 1) <= max_tokens:
            parts[-1].append(i)
        else:
            parts.append([i])
    return [_pad([rows[i] for i in part], tuple(part), device, dtype) for part in parts]


def _pad(rows: Sequence[Row], index: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> Microbatch:
    length = max(len(row.tokens) for row in rows)

    def padded(values: list[Sequence[float]], kind: torch.dtype) -> Tensor:
        tensor = torch.zeros(len(rows), length, dtype=kind)
        for i, value in enumerate(values):
            tensor[i, : len(value)] = torch.tensor(value, dtype=kind)
        return tensor.to(device)

    return Microbatch(
        index=index,
        tokens=padded([row.tokens for row in rows], torch.int64),
        trains=padded([row.trains for row in rows], torch.bool),
        sampled=padded([row.sampled for row in rows], torch.bool),
        behavior=padded([row.behavior for row in rows], dtype),
        advantages=padded([row.advantages for row in rows], dtype),
    )
