"""Values of the trained tokens of each step, as the loss saw them, for `ludus view`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from ludus.algorithms.tensors import Cut, TokenBatch
from ludus.rollouts.rollout_files import RolloutRecord, token_values_path, write_lines
from ludus.training.batches.rows import Microbatch, row_segments
from ludus.types import Trajectory

_DIGITS = 5


@dataclass
class TokenValues:
    """The values of the newest update of each row, by the name of the row; written once per step.

    `logprob` is under the weights of the update, `old` at the start of the step, `reference` under the reference model
    if the loss has one; `clipped` is 1 for tokens whose policy gradient is clipped to 0.
    """

    folder: Path
    _rows: dict[str, dict[str, list[float | None]]] = field(default_factory=dict, init=False)

    def add(self, part: Microbatch, batch: TokenBatch, cut: Cut | None) -> None:
        """Keep the values of a microbatch; tokens out of the loss have None."""
        clipped = None if cut is None else cut.low | cut.high | cut.dual
        tables = {
            "advantage": batch.advantages,
            "logprob": batch.logprobs,
            "old": batch.old_logprobs,
            "reference": batch.ref_logprobs,
            "entropy": batch.entropy,
            "clipped": clipped,
        }
        mask = batch.mask.tolist()
        rounded = {name: _rounded(table) for name, table in tables.items() if table is not None}
        for place, name in enumerate(part.names[: len(part.index)]):
            self._rows[name] = {
                key: [value if kept else None for value, kept in zip(table[place], mask[place], strict=True)]
                for key, table in rounded.items()
            }

    def write(self, step: int, records: Sequence[RolloutRecord]) -> None:
        """Write one line per trained rollout, and clear the values. Raises StorageError if writing fails."""
        write_lines(token_values_path(self.folder, step), self._lines(records))
        self._rows.clear()

    def _lines(self, records: Sequence[RolloutRecord]) -> Iterator[str]:
        for record in records:
            if (row := self._rows.get(record.trajectory.name)) is not None:
                spans = action_spans(record.trajectory)
                segments = {i: {name: row[name][a:b] for name in row} for i, (a, b) in spans.items()}
                key = {"task": record.group, "sample": record.trajectory.sample, "attempt": record.attempt}
                yield json.dumps(key | {"segments": segments}, separators=(",", ":"))


def action_spans(trajectory: Trajectory) -> dict[int, tuple[int, int]]:
    """Return the row positions of each action segment, where it trains, by the index of the segment."""
    index = {id(segment): i for i, segment in enumerate(trajectory.segments)}
    spans: dict[int, tuple[int, int]] = {}
    at = 0
    for segment, new in row_segments(trajectory):
        if new and segment.kind == "action":
            spans[index[id(segment)]] = (at, at + len(segment.tokens))
        at += len(segment.tokens)
    return spans


def _rounded(table: Tensor) -> list[list[float]]:
    values: list[list[float]] = torch.round(table.detach().double(), decimals=_DIGITS).tolist()
    return values
