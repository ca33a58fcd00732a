"""Rows of tokens, and how they are packed into padded microbatches.

A row is one trajectory (a tree as its paths one after the other, `trajectory_tree.py`) or one demonstration.
The order of rows and their grouping do not change the gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from ludus.engines.embedded.radix_cache import common_prefix
from ludus.training.batches.prefix_packing import LEAST_SHARED
from ludus.training.batches.trajectory_tree import BREAK, laid, num_distinct
from ludus.types import Segment, Trajectory


@dataclass(frozen=True, slots=True)
class Row:
    """Tokens of one row, `[T]` each.

    `trains` marks the tokens that enter the loss, `behavior` holds the engine's log-probabilities (0 where
    there is none, with `sampled` False), `advantages` one value per token. `observed` marks what the
    environment wrote (empty: nothing), `positive` a trajectory that succeeded, `expert` one that an expert
    made. `name` says to a reader whose tokens they are, `data_class` what a demonstration teaches.
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
    """Right-padded tensors `[B, L]` of some rows; `index` holds the rows' places in the batch, `names` their
    names.

    `tokens` int64; `trains`, `sampled`, `observed` bool; `behavior`, `advantages` float32 or
    float64; `positive`, `expert` `[B]` bool.
    Padding is on the right, so that under a causal mask no real token sees it.
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
    """A row of a dialogue for supervised training: action tokens train, with advantage 1."""
    tokens = tuple(t for s in segments for t in s.tokens)
    trains = tuple(s.kind == "action" for s in segments for _ in s.tokens)
    zeros = (0.0,) * len(tokens)
    return Row(tokens, trains, (False,) * len(tokens), zeros, tuple(map(float, trains)))


def row_of_trajectory(
    trajectory: Trajectory, advantage: float | Sequence[float], *, mask_observations: bool = True
) -> Row:
    """The row of a trajectory, in which action tokens train, each once.

    `advantage` is one number, or one for each action token. With `mask_observations` False observation tokens
    train as well, as if the model had written them, with the advantage of the action before.
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
    """The row, in which the action tokens for which `trains` is false do not train; None: all do."""
    if trains is None:
        return row
    given = iter(trains)
    tokens = zip(row.trains, row.sampled, strict=True)
    return replace(row, trains=tuple(next(given) and own if action else own for own, action in tokens))


def transitions_of(row: Row, trajectory: Trajectory) -> list[Row]:
    """One row for each turn of a trajectory: its context and its action, which alone trains.

    Where observations train, those before an action train with it, and those after the last action of a path
    with that. `row` is the trajectory's.
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
    """The last span of a path reaches to its end."""
    if not spans or spans[-1][0] != path:
        return spans
    return [*spans[:-1], (path, spans[-1][1], end)]


def _only(row: Row, path: int, start: int, end: int) -> Row:
    """The tokens from `path` to `end`, of which those from `start` on keep what makes them train."""
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
    """A value for each action token onto the row; other tokens that train have that of the action before."""
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
    """Split rows into microbatches of at most `max_tokens` tokens to compute (or one row), about equal ones.

    `shared`: a prefix of several rows is computed once, and rows that share stand together. Otherwise rows
    are padded to the longest of their microbatch, and padding counts.
    """
    parts = _by_prefix(rows, max_tokens) if shared else _by_length(rows, max_tokens)
    return [_pad([rows[i] for i in part], tuple(part), device, dtype) for part in parts]


def balanced(rows: Sequence[Row], count: int, *, shared: bool = True) -> list[list[int]]:
    """The places of the rows, dealt to `count` processes so that each has about as many tokens to compute.

    `shared`: rows that share a prefix stay together, which then is computed once; each process has the fair
    share up to the new tokens of one row. Otherwise the longest row goes to whoever has least so far.
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
    """A microbatch of no row: one token that nobody asks for."""
    return _pad([Row((0,), (False,), (False,), (0.0,), (0.0,))], (), device, dtype)


def _by_length(rows: Sequence[Row], max_tokens: int) -> list[list[int]]:
    """Longest first."""
    parts: list[list[int]] = []
    for i in sorted(range(len(rows)), key=lambda i: -len(rows[i].tokens)):
        if parts and len(rows[parts[-1][0]].tokens) * (len(parts[-1]) + 1) <= max_tokens:
            parts[-1].append(i)
        else:
            parts.append([i])
    return parts


def _by_prefix(rows: Sequence[Row], max_tokens: int) -> list[list[int]]:
    """In the order of their tokens."""
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
    """The rows by their tokens, and the tokens of each without what it shares with the one before."""
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
