"""Token rows and their packing into padded microbatches.

A row is one trajectory (for a tree, its concatenated paths, `trajectory_tree.py`) or one demonstration. The
order and grouping of rows do not change the gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from ludus.engines.embedded.kv_cache import common_prefix
from ludus.training.batches.prefix_packing import LEAST_SHARED
from ludus.training.batches.trajectory_tree import BREAK, laid, num_distinct
from ludus.types import Segment, Trajectory


@dataclass(frozen=True, slots=True)
class Row:
    """Tokens of one row, `[T]` each.

    `trains` marks tokens in the loss, `behavior` holds the engine's log-probabilities (0 if absent, with
    `sampled` False), `advantages` one value per token. `observed` marks environment tokens (empty: none),
    `positive` a successful trajectory, `expert` an expert's. `name` is used in messages, `data_class` is the
    category of a demonstration.
    """

    tokens: tuple[int, ...]
    trains: tuple[bool, ...]
    sampled: tuple[bool, ...]
    behavior: tuple[float, ...]
    advantages: tuple[float, ...]
    observed: tuple[bool, ...] = ()
    positive: bool = False
    expert: bool = False
    name: str = ""
    data_class: str = ""


@dataclass(frozen=True, slots=True)
class Microbatch:
    """Right-padded tensors `[B, L]` of rows; `index` holds the rows' batch indices, `names` their names.

    `tokens` int64; `trains`, `sampled`, `observed` bool; `behavior`, `advantages` float32 or float64;
    `positive`, `expert` `[B]` bool. With right padding, a causal mask hides padding from real tokens.
    """

    index: tuple[int, ...]
    tokens: Tensor
    trains: Tensor
    sampled: Tensor
    behavior: Tensor
    advantages: Tensor
    observed: Tensor
    positive: Tensor
    expert: Tensor
    names: tuple[str, ...]


def row_of_segments(segments: Sequence[Segment]) -> Row:
    """Return the row of a dialogue for supervised training: action tokens train, with advantage 1."""
    tokens = tuple(t for s in segments for t in s.tokens)
    trains = tuple(s.kind == "action" for s in segments for _ in s.tokens)
    zeros = (0.0,) * len(tokens)
    return Row(tokens, trains, (False,) * len(tokens), zeros, tuple(map(float, trains)))


def row_of_trajectory(
    trajectory: Trajectory, advantage: float | Sequence[float], *, mask_observations: bool = True
) -> Row:
    """Return the row of a trajectory, in which each action token trains once.

    `advantage` is one number, or one per action token. If `mask_observations` is False, observation tokens
    also train, with the advantage of the preceding action.
    """
    parts = list(laid(trajectory))
    sampled = tuple(new and s.kind == "action" for s, new in parts for _ in s.tokens)
    trains = sampled
    if not mask_observations:
        trains = tuple(new and s.kind != "prompt" for s, new in parts for _ in s.tokens)
    if isinstance(advantage, float | int):
        advantages = tuple(float(advantage) if t else 0.0 for t in trains)
    else:
        advantages = _spread(advantage, sampled, trains)
    observed = tuple(new and s.kind == "observation" for s, new in parts for _ in s.tokens)
    tokens = tuple(token for s, _ in parts for token in s.tokens)
    behavior = tuple(lp for s, _ in parts for lp in (s.logprobs or (0.0,) * len(s.tokens)))
    return Row(tokens, trains, sampled, behavior, advantages, observed, name=trajectory.name)


def without_masked(row: Row, trains: Sequence[bool] | None) -> Row:
    """Return the row with action tokens masked where `trains` is false (None: unchanged)."""
    if trains is None:
        return row
    given = iter(trains)
    tokens = zip(row.trains, row.sampled, strict=True)
    return replace(row, trains=tuple(next(given) and own if action else own for own, action in tokens))


def transitions_of(row: Row, trajectory: Trajectory) -> list[Row]:
    """Return one row per turn of a trajectory: its context, and its action, which alone trains.

    If observations train, those before an action belong to it, and those after a path's last action to that
    one. `row` is the trajectory's.
    """
    spans: list[tuple[int, int, int]] = []
    path, begin, place = 0, 0, 0
    for segment, new in laid(trajectory):
        if segment.tokens == (BREAK,):
            spans = _to_the_end(spans, path, place)
            path = begin = place + 1
        place += len(segment.tokens)
        if new and segment.kind == "action" and segment.tokens:
            spans.append((path, begin, place))
            begin = place
    return [_only(row, *span) for span in _to_the_end(spans, path, place)]


def _to_the_end(spans: list[tuple[int, int, int]], path: int, end: int) -> list[tuple[int, int, int]]:
    """Extend the last span of a path to its end."""
    if not spans or spans[-1][0] != path:
        return spans
    return [*spans[:-1], (path, spans[-1][1], end)]


def _only(row: Row, path: int, start: int, end: int) -> Row:
    """Return the tokens from `path` to `end`; only those from `start` on keep their training fields."""
    context = start - path
    return replace(
        row,
        tokens=row.tokens[path:end],
        trains=(False,) * context + row.trains[start:end],
        sampled=(False,) * context + row.sampled[start:end],
        behavior=(0.0,) * context + row.behavior[start:end],
        advantages=(0.0,) * context + row.advantages[start:end],
        observed=(False,) * context + row.observed[start:end] if row.observed else (),
    )


def _spread(values: Sequence[float], sampled: Sequence[bool], trains: Sequence[bool]) -> tuple[float, ...]:
    """Map action token values to the row; other trained tokens get the value of the preceding action."""
    given = iter(values)
    found, current = [], 0.0
    for action, train in zip(sampled, trains, strict=True):
        if action:
            current = next(given)
        found.append(current if train else 0.0)
    return tuple(found)


def microbatches(
    rows: Sequence[Row], max_tokens: int, device: torch.device, dtype: torch.dtype, *, shared: bool = True
) -> list[Microbatch]:
    """Split rows into balanced microbatches of at most `max_tokens` computed tokens (or one row).

    `shared`: shared prefixes count once, and rows that share stay together. Otherwise rows are padded to the
    longest of the microbatch, and padding counts.
    """
    parts = _by_prefix(rows, max_tokens) if shared else _by_length(rows, max_tokens)
    return [_pad([rows[i] for i in part], tuple(part), device, dtype) for part in parts]


def balanced(rows: Sequence[Row], count: int, *, shared: bool = True) -> list[list[int]]:
    """Distribute row indices over `count` processes with balanced token counts.

    `shared`: rows with a common prefix stay together, and each process gets its fair share up to one row's
    new tokens. Otherwise the longest row goes to the least loaded process.
    """
    parts: list[list[int]] = [[] for _ in range(count)]
    if shared:
        order, new = _in_order(rows)
        total, done = max(1, sum(new)), 0
        for i, size in zip(order, new, strict=True):
            parts[min(count - 1, (2 * done + size) * count // (2 * total))].append(i)
            done += size
    else:
        loads = [0] * count
        for i in sorted(range(len(rows)), key=lambda i: (-len(rows[i].tokens), i)):
            least = loads.index(min(loads))
            parts[least].append(i)
            loads[least] += len(rows[i].tokens)
    return [sorted(part) for part in parts]


def blank(device: torch.device, dtype: torch.dtype) -> Microbatch:
    """Return a microbatch without rows: one unscored token."""
    return _pad([Row((0,), (False,), (False,), (0.0,), (0.0,))], (), device, dtype)


def _by_length(rows: Sequence[Row], max_tokens: int) -> list[list[int]]:
    """Group rows by length, longest first."""
    parts: list[list[int]] = []
    for i in sorted(range(len(rows)), key=lambda i: -len(rows[i].tokens)):
        if parts and len(rows[parts[-1][0]].tokens) * (len(parts[-1]) + 1) <= max_tokens:
            parts[-1].append(i)
        else:
            parts.append([i])
    return parts


def _by_prefix(rows: Sequence[Row], max_tokens: int) -> list[list[int]]:
    """Group rows in token order."""
    order, new = _in_order(rows)
    num_parts = max(1, -(-sum(new) // max_tokens))
    fair = sum(new) / num_parts
    parts: list[list[int]] = []
    size = 0
    for at, i in enumerate(order):
        full = size + new[at] > max_tokens or size + new[at] / 2 > fair
        if not parts or full:
            parts.append([i])
            size = num_distinct(rows[i].tokens)
        else:
            parts[-1].append(i)
            size += new[at]
    return parts


def _in_order(rows: Sequence[Row]) -> tuple[list[int], list[int]]:
    """Return the rows sorted by tokens, and the number of tokens not shared with the previous row."""
    order = sorted(range(len(rows)), key=lambda i: rows[i].tokens)
    new = [num_distinct(rows[i].tokens) for i in order]
    for at, (a, b) in enumerate(pairwise(order), start=1):
        shared = common_prefix(rows[a].tokens, rows[b].tokens)
        new[at] -= shared if shared >= LEAST_SHARED else 0
    return order, new


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
        observed=padded([row.observed for row in rows], torch.bool),
        positive=torch.tensor([row.positive for row in rows], device=device),
        expert=torch.tensor([row.expert for row in rows], device=device),
        names=tuple(row.name for row in rows),
    )
