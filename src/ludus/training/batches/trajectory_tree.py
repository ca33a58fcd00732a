"""Branching trajectories as one row of tokens in which each action trains once.

The row of a tree is its concatenated paths, in the order of `Trajectory.rows`, separated by `BREAK`. An
action token is marked in the first path through it and is context in the others, so that sums over marked
tokens count it once; shared tokens are computed once anyway (`forest.plant`). A linear trajectory is its own
only path.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Final

import torch
from torch import Tensor

from ludus.engines.embedded.kv_cache import common_prefix
from ludus.rollout.trees import Path
from ludus.types import Segment, Trajectory

BREAK: Final = -1
"""Separator between two paths of a row. It is never passed to a model."""
_GAP = Segment("prompt", (BREAK,))

Positions = tuple[Tensor, Tensor]
"""Row and column indices of a table."""


def laid(trajectory: Trajectory) -> Iterator[tuple[Segment, bool]]:
    """Yield the segments of the row in order, each with whether it is new, and the separators.

    Raises ValueError if a path after the first starts with an action, whose first token has no context.
    """
    met: set[int] = set()
    for number, path in enumerate(trajectory.rows):
        if number:
            yield _GAP, False
            if trajectory.segments[path[0]].kind == "action" and path[0] not in met:
                raise ValueError(f"path {number} of task {trajectory.task_id} begins with an action")
        for i in path:
            yield trajectory.segments[i], i not in met
            met.add(i)


def new_actions(trajectory: Trajectory) -> list[Segment]:
    """Return the distinct actions in row order."""
    return [segment for segment, new in laid(trajectory) if new and segment.kind == "action"]


def last_actions(trajectory: Trajectory) -> dict[int, int]:
    """Return the row index of each path's last action token, for paths that have one."""
    found, path, place = {}, 0, 0
    for segment, _ in laid(trajectory):
        place += len(segment.tokens)
        if segment is _GAP:
            path += 1
        elif segment.kind == "action" and segment.tokens:
            found[path] = place - 1
    return found


def where_any(own: Sequence[Path], marked: Sequence[bool]) -> tuple[bool, ...]:
    """Return for each action token whether any path through it is marked."""
    chosen = {place for path, mark in zip(own, marked, strict=True) if mark for place in path.places}
    every = sorted({place for path in own for place in path.places})
    return tuple(place in chosen for place in every)


def turn_nodes(split: Sequence[Sequence[Path]]) -> Tensor:
    """Return action ids of each path of each trajectory, `[P, K]`; shared actions have equal ids.

    Padded with -1.
    """
    rows: list[list[int]] = []
    first = 0
    for own in split:
        for path in own:
            actions = [len(s.tokens) for s in path.trajectory.segments if s.kind == "action" and s.tokens]
            starts = [0, *accumulate(actions)][: len(actions)]
            rows.append([first + path.places[start] for start in starts])
        first += 1 + max((place for path in own for place in path.places), default=0)
    table = torch.full((len(rows), max(map(len, rows), default=0)), -1)
    for i, row in enumerate(rows):
        table[i, : len(row)] = torch.tensor(row)
    return table


def num_distinct(tokens: tuple[int, ...]) -> int:
    """Return the number of tokens to compute; a prefix that paths share counts once."""
    if BREAK not in tokens:
        return len(tokens)
    ways = sorted(tokens[start:end] for start, end in _spans(tokens))
    return sum(map(len, ways)) - sum(common_prefix(a, b) for a, b in pairwise(ways))


def _spans(tokens: tuple[int, ...]) -> list[tuple[int, int]]:
    """Return the start and end of each path in a row."""
    gaps = [i for i, token in enumerate(tokens) if token == BREAK]
    return list(zip([0, *(i + 1 for i in gaps)], [*gaps, len(tokens)], strict=True))


def apart(tokens: Tensor, at: Positions) -> tuple[Tensor, Positions]:
    """Split the rows `[B, L]` into one row per path; also return the positions `at` in the new rows."""
    gaps = tokens == BREAK
    if not bool(gaps.any()):
        return tokens, at
    columns = torch.arange(tokens.shape[1], device=tokens.device).expand(tokens.shape)
    starts = torch.where(gaps, columns + 1, 0)
    starts = torch.cat([torch.zeros_like(starts[:, :1]), starts[:, :-1]], 1).cummax(1).values
    path = gaps.long().cumsum(1) - gaps.long()
    counts = gaps.sum(1) + 1
    row = (counts.cumsum(0) - counts)[:, None] + path
    found = tokens.new_zeros(int(counts.sum()), tokens.shape[1])
    kept = ~gaps
    found[row[kept], (columns - starts)[kept]] = tokens[kept]
    rows, places = at
    return found, (row[rows, places], places - starts[rows, places])
