"""Token rows and their packing into padded microbatches, which does not change the gradient.

A row is one trajectory or one demonstration. The row of a tree is its concatenated paths, in the order of
`Trajectory.rows`, separated by `BREAK`. An action token is marked in the first path through it and is context
in the others, so that sums over marked tokens count it once.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Final, NamedTuple

import torch
from torch import Tensor

from ludus.config.sections.rewards import RewardModelConfig
from ludus.config.sections.stages import PreferenceConfig
from ludus.engines.base import common_prefix
from ludus.errors import LearnerError
from ludus.images import IMAGE_IDS
from ludus.training.batches.prefix_packing import MIN_SHARED_TOKENS
from ludus.types import Path, Segment, Trajectory

BREAK: Final = -1
"""Separator between two paths of a row. It is never passed to a model."""
_GAP = Segment("prompt", (BREAK,))

Positions = tuple[Tensor, Tensor]
"""Row and column indices of a table."""


def row_segments(trajectory: Trajectory) -> Iterator[tuple[Segment, bool]]:
    """Yield the segments of the row in order, with separators; the flag is False if an earlier path had the segment.

    Raises ValueError if a path after the first starts with an action, whose first token has no context.
    """
    emitted: set[int] = set()
    for number, path in enumerate(trajectory.rows):
        if number:
            yield _GAP, False
            if trajectory.segments[path[0]].kind == "action" and path[0] not in emitted:
                raise ValueError(f"path {number} of task {trajectory.task_id} begins with an action")
        for i in path:
            yield trajectory.segments[i], i not in emitted
            emitted.add(i)


def new_actions(trajectory: Trajectory) -> list[Segment]:
    """Return the distinct actions in row order."""
    return [segment for segment, new in row_segments(trajectory) if new and segment.kind == "action"]


def last_actions(trajectory: Trajectory) -> dict[int, int]:
    """Return the row index of each path's last action token, for paths that have one."""
    last, path, index = {}, 0, 0
    for segment, _ in row_segments(trajectory):
        index += len(segment.tokens)
        if segment is _GAP:
            path += 1
        elif segment.kind == "action" and segment.tokens:
            last[path] = index - 1
    return last


def on_marked_path(paths: Sequence[Path], marked: Sequence[bool]) -> tuple[bool, ...]:
    """Return for each action token whether any of the paths through it is marked."""
    marked_positions = {place for path, mark in zip(paths, marked, strict=True) if mark for place in path.places}
    positions = sorted({place for path in paths for place in path.places})
    return tuple(place in marked_positions for place in positions)


def turn_nodes(split: Sequence[Sequence[Path]]) -> Tensor:
    """Return the action ids of each path of all trajectories, `[P, K]`, padded with -1; shared actions have one id."""
    rows: list[list[int]] = []
    first = 0
    for path_actions in split:
        for path in path_actions:
            actions = [len(s.tokens) for s in path.trajectory.segments if s.kind == "action" and s.tokens]
            starts = [0, *accumulate(actions)][: len(actions)]
            rows.append([first + path.places[start] for start in starts])
        first += 1 + max((place for path in path_actions for place in path.places), default=0)
    return pad_table(rows, torch.int64, fill=-1)


def pad_table(
    rows: Sequence[Sequence[float] | Tensor], dtype: torch.dtype, width: int | None = None, fill: float = 0
) -> Tensor:
    """Right-pad the rows to `[N, width]` on the CPU; the default width is that of the longest row."""
    table = torch.full((len(rows), max(map(len, rows), default=0) if width is None else width), fill, dtype=dtype)
    for i, row in enumerate(rows):
        table[i, : len(row)] = torch.as_tensor(row, dtype=dtype)
    return table


def num_unique_tokens(tokens: tuple[int, ...]) -> int:
    """Return the number of tokens to compute; a prefix that paths share counts once."""
    if BREAK not in tokens:
        return len(tokens)
    paths = sorted(tokens[start:end] for start, end in _spans(tokens))
    return sum(map(len, paths)) - sum(common_prefix(a, b) for a, b in pairwise(paths))


def _spans(tokens: tuple[int, ...]) -> list[tuple[int, int]]:
    gaps = [i for i, token in enumerate(tokens) if token == BREAK]
    return list(zip([0, *(i + 1 for i in gaps)], [*gaps, len(tokens)], strict=True))


def split_paths(tokens: Tensor, at: Positions) -> tuple[Tensor, Positions]:
    """Split the rows `[B, L]` into one row per path, `[P, L]`; also map the positions `at` to the new rows."""
    gaps = tokens == BREAK
    if not bool(gaps.any()):
        return tokens, at
    columns = torch.arange(tokens.shape[1], device=tokens.device).expand(tokens.shape)
    starts = torch.where(gaps, columns + 1, 0)
    starts = torch.cat([torch.zeros_like(starts[:, :1]), starts[:, :-1]], 1).cummax(1).values
    path = gaps.long().cumsum(1) - gaps.long()
    counts = gaps.sum(1) + 1
    row = (counts.cumsum(0) - counts)[:, None] + path
    split = tokens.new_zeros(int(counts.sum()), tokens.shape[1])
    kept = ~gaps
    split[row[kept], (columns - starts)[kept]] = tokens[kept]
    rows, places = at
    return split, (row[rows, places], places - starts[rows, places])


@dataclass(frozen=True, slots=True)
class Row:
    """Tokens of one row, `[T]` each.

    `trains` marks tokens in the loss, `behavior` holds the engine's log-probabilities (0 if absent, with
    `sampled` False), `advantages` one value per token. `observed` marks environment tokens (empty: none),
    `policies` holds `Segment.policy` (empty: "" for all), `positive` a successful trajectory, `expert` an expert's.
    `name` is used in messages, `data_class` is the category of a demonstration. `teacher_tokens` is the row with
    another prompt, for a self-teacher (empty: none).
    """

    tokens: tuple[int, ...]
    trains: tuple[bool, ...]
    sampled: tuple[bool, ...]
    behavior: tuple[float, ...]
    advantages: tuple[float, ...]
    observed: tuple[bool, ...] = ()
    policies: tuple[str, ...] = ()
    positive: bool = False
    expert: bool = False
    name: str = ""
    data_class: str = ""
    teacher_tokens: tuple[int, ...] = ()


class TeacherView(NamedTuple):
    """The rows of a microbatch as the self-teacher sees them.

    `tokens` `[B, L']`; `shift` `[B]`: column `t` of the microbatch is column `t + shift` here; `taught` `[B]` bool: the
    prompt differs.
    """

    tokens: Tensor
    shift: Tensor
    taught: Tensor

    def scored(self, scored: Tensor) -> Tensor:
        """Return the mask `[B, L']` of the tokens that are marked in `scored` `[B, L]`, in the same order."""
        rows, columns = torch.nonzero(scored_mask(scored), as_tuple=True)
        marked = torch.zeros_like(self.tokens, dtype=torch.bool)
        marked[rows, columns + self.shift[rows]] = True
        return marked


@dataclass(frozen=True, slots=True)
class Microbatch:
    """Right-padded tensors `[B, L]` of rows; `index` holds the rows' batch indices, `names` their names.

    `tokens` int64; `trains`, `sampled`, `observed` bool; `behavior`, `advantages` float32 or float64;
    `positive`, `expert` `[B]` bool; `policies` bool by adapter, empty if no row has policies. With right padding, a
    causal mask hides padding from real tokens. `teacher` is None if no row has `teacher_tokens`.
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
    policies: Mapping[str, Tensor]
    teacher: TeacherView | None


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
    segments = list(row_segments(trajectory))
    sampled = tuple(new and s.kind == "action" for s, new in segments for _ in s.tokens)
    observed = tuple(new and s.kind == "observation" and t < IMAGE_IDS for s, new in segments for t in s.tokens)
    trains = sampled
    if not mask_observations:
        trains = tuple(action or seen for action, seen in zip(sampled, observed, strict=True))
    if isinstance(advantage, float | int):
        advantages = tuple(float(advantage) if t else 0.0 for t in trains)
    else:
        advantages = _scatter_advantages(advantage, sampled, trains)
    tokens = tuple(token for s, _ in segments for token in s.tokens)
    behavior = tuple(lp for s, _ in segments for lp in (s.logprobs or (0.0,) * len(s.tokens)))
    policies = tuple(s.policy for s, _ in segments for _ in s.tokens)
    row = Row(tokens, trains, sampled, behavior, advantages, observed, name=trajectory.name)
    return replace(row, policies=policies) if any(policies) else row


def with_teacher_prompt(row: Row, trajectory: Trajectory, prompt: tuple[int, ...]) -> Row:
    """Return the row of a trajectory of one path, with another prompt for the self-teacher (empty: unchanged)."""
    if not prompt:
        return row
    return replace(row, teacher_tokens=(*prompt, *row.tokens[len(trajectory.segments[0].tokens) :]))


def apply_mask(row: Row, trains: Sequence[bool] | None) -> Row:
    """Return the row with action tokens masked where `trains` is false (None: unchanged)."""
    if trains is None:
        return row
    flags = iter(trains)
    tokens = zip(row.trains, row.sampled, strict=True)
    return replace(row, trains=tuple(next(flags) and trained if action else trained for trained, action in tokens))


def transitions_of(row: Row, trajectory: Trajectory) -> list[Row]:
    """Return one row per turn of a trajectory: its context and its action; only the action is trained.

    If observations are trained, they belong to the next action, and those after a path's last action to the last
    one. `row` is the row of the trajectory.
    """
    spans: list[tuple[int, int, int]] = []
    path, start, place = 0, 0, 0
    for segment, new in row_segments(trajectory):
        if segment.tokens == (BREAK,):
            spans = _extend_last_span(spans, path, place)
            path = start = place + 1
        place += len(segment.tokens)
        if new and segment.kind == "action" and segment.tokens:
            spans.append((path, start, place))
            start = place
    return [_cut_row(row, *span) for span in _extend_last_span(spans, path, place)]


def _extend_last_span(spans: list[tuple[int, int, int]], path: int, end: int) -> list[tuple[int, int, int]]:
    if not spans or spans[-1][0] != path:
        return spans
    return [*spans[:-1], (path, spans[-1][1], end)]


def scored_mask(trains: Tensor) -> Tensor:
    """Return `trains` `[B, L]` without the first column, which has no context."""
    mask = trains.clone()
    mask[:, 0] = False
    return mask


def _cut_row(row: Row, path: int, start: int, end: int) -> Row:
    """Return the tokens from `path` to `end`; training fields are cleared before `start`."""
    context = start - path
    return replace(
        row,
        tokens=row.tokens[path:end],
        trains=(False,) * context + row.trains[start:end],
        sampled=(False,) * context + row.sampled[start:end],
        behavior=(0.0,) * context + row.behavior[start:end],
        advantages=(0.0,) * context + row.advantages[start:end],
        observed=(False,) * context + row.observed[start:end] if row.observed else (),
        policies=row.policies[path:end],
    )


def _scatter_advantages(values: Sequence[float], sampled: Sequence[bool], trains: Sequence[bool]) -> tuple[float, ...]:
    """Map action token values to the row; other trained tokens get the value of the preceding action."""
    remaining = iter(values)
    advantages, current = [], 0.0
    for action, train in zip(sampled, trains, strict=True):
        if action:
            current = next(remaining)
        advantages.append(current if train else 0.0)
    return tuple(advantages)


def microbatches(
    rows: Sequence[Row], max_tokens: int, device: torch.device, dtype: torch.dtype, *, shared: bool = True
) -> list[Microbatch]:
    """Split rows into balanced microbatches of at most `max_tokens` computed tokens (or one row).

    `shared`: shared prefixes count once, and rows that share stay together. Otherwise rows are padded to the
    longest of the microbatch, and padding counts.
    """
    parts = _by_prefix(rows, max_tokens) if shared else _by_length(rows, max_tokens)
    return [_pad([rows[i] for i in part], tuple(part), device, dtype) for part in parts]


def balance_rows(rows: Sequence[Row], count: int, *, shared: bool = True) -> list[list[int]]:
    """Distribute row indices over `count` ranks with balanced token counts.

    `shared`: rows with a common prefix stay together, and each rank gets an equal share up to one row's
    new tokens. Otherwise the longest remaining row goes to the least loaded rank.
    """
    parts: list[list[int]] = [[] for _ in range(count)]
    if shared:
        order, new = _in_order(rows)
        total, assigned = max(1, sum(new)), 0
        for i, size in zip(order, new, strict=True):
            parts[min(count - 1, (2 * assigned + size) * count // (2 * total))].append(i)
            assigned += size
    else:
        loads = [0] * count
        for i in sorted(range(len(rows)), key=lambda i: (-len(rows[i].tokens), i)):
            least = loads.index(min(loads))
            parts[least].append(i)
            loads[least] += len(rows[i].tokens)
    return [sorted(part) for part in parts]


def blank_microbatch(device: torch.device, dtype: torch.dtype) -> Microbatch:
    """Return a microbatch without rows: one unscored token."""
    return _pad([Row((0,), (False,), (False,), (0.0,), (0.0,))], (), device, dtype)


def _by_length(rows: Sequence[Row], max_tokens: int) -> list[list[int]]:
    parts: list[list[int]] = []
    for i in sorted(range(len(rows)), key=lambda i: -len(rows[i].tokens)):
        if parts and len(rows[parts[-1][0]].tokens) * (len(parts[-1]) + 1) <= max_tokens:
            parts[-1].append(i)
        else:
            parts.append([i])
    return parts


def _by_prefix(rows: Sequence[Row], max_tokens: int) -> list[list[int]]:
    order, new = _in_order(rows)
    num_parts = max(1, -(-sum(new) // max_tokens))
    mean_size = sum(new) / num_parts
    parts: list[list[int]] = []
    size = 0
    for at, i in enumerate(order):
        is_full = size + new[at] > max_tokens or size + new[at] / 2 > mean_size
        if not parts or is_full:
            parts.append([i])
            size = num_unique_tokens(rows[i].tokens)
        else:
            parts[-1].append(i)
            size += new[at]
    return parts


def _in_order(rows: Sequence[Row]) -> tuple[list[int], list[int]]:
    """Return the rows sorted by tokens, and the number of tokens not shared with the previous row."""
    order = sorted(range(len(rows)), key=lambda i: rows[i].tokens)
    new = [num_unique_tokens(rows[i].tokens) for i in order]
    for at, (a, b) in enumerate(pairwise(order), start=1):
        shared = common_prefix(rows[a].tokens, rows[b].tokens)
        new[at] -= shared if shared >= MIN_SHARED_TOKENS else 0
    return order, new


def _pad(rows: Sequence[Row], index: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> Microbatch:
    length = max(len(row.tokens) for row in rows)

    def padded(values: list[Sequence[float]], kind: torch.dtype) -> Tensor:
        return pad_table(values, kind, length).to(device)

    of_tokens = [row.policies or ("",) * len(row.tokens) for row in rows]
    adapters = sorted({name for names in of_tokens for name in names}) if any(row.policies for row in rows) else []

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
        policies={a: padded([[name == a for name in names] for names in of_tokens], torch.bool) for a in adapters},
        teacher=_teacher_view(rows, device) if any(row.teacher_tokens for row in rows) else None,
    )


def _teacher_view(rows: Sequence[Row], device: torch.device) -> TeacherView:
    seen = [row.teacher_tokens or row.tokens for row in rows]
    shift = [len(tokens) - len(row.tokens) for tokens, row in zip(seen, rows, strict=True)]
    taught = torch.tensor([bool(row.teacher_tokens) for row in rows], device=device)
    return TeacherView(pad_table(seen, torch.int64).to(device), torch.tensor(shift, device=device), taught)


HINT = "Nothing was trained on it. Look for extreme rewards or weights."
RECORDED = "recorded log-probability"


def check_trajectories(trajectories: Sequence[Trajectory]) -> None:
    """Raise LearnerError if a reward or a recorded log-probability is not finite."""
    for one in trajectories:
        recorded = tuple(lp for segment in one.segments for lp in segment.logprobs)
        given = {
            "reward": (one.reward, *one.leaf_rewards, *one.agent_rewards.values()),
            "reward of a turn": one.turn_rewards,
            RECORDED: recorded,
        }
        for what, values in given.items():
            if fault := describe_fault(what, values, one.name):
                raise LearnerError(fault, HINT)


def check_estimates(estimates: Mapping[str, Sequence[Tensor] | None], names: Sequence[str]) -> None:
    """Raise LearnerError if a model estimate is not finite."""
    for what, tables in estimates.items():
        for values, name in zip(tables, names, strict=True) if tables is not None else ():
            if fault := describe_fault(what, values.tolist(), name):
                raise LearnerError(fault, HINT)


def find_row_fault(rows: Sequence[Row]) -> str:
    """Describe the first row with a non-finite advantage or log-probability; "" if there is none."""
    for index, row in enumerate(rows):
        for what, values in (("advantage", row.advantages), (RECORDED, row.behavior)):
            if not math.isfinite(sum(values)):
                trained = [v for v, trains in zip(values, row.trains, strict=True) if trains]
                if fault := describe_fault(what, trained, row.name or f"row {index}"):
                    return fault
    return ""


@dataclass
class FiniteChecks:
    """Checks that the values of a step's microbatches are finite, at the end only: reading them synchronizes."""

    _checks: list[tuple[Microbatch, Tensor, dict[str, Tensor]]] = field(default_factory=list, init=False)

    def add_values(self, part: Microbatch, mask: Tensor, given: Mapping[str, Tensor | None]) -> None:
        """Add values `[B, L]` of a microbatch, by their names in messages; only those in `mask` are checked."""
        self._checks.append(
            (part, mask, {what: values.detach() for what, values in given.items() if values is not None})
        )

    def clear(self) -> None:
        self._checks.clear()

    @property
    def fault(self) -> str:
        """Describe the first row with a non-finite value; "" if all are finite."""
        found = [mask & torch.stack([~v.isfinite() for v in given.values()]) for _, mask, given in self._checks]
        if found and bool(torch.stack([where.any() for where in found]).any()):
            for (part, _, given), where in zip(self._checks, found, strict=True):
                if len(places := where.nonzero()):
                    field_number, place, column = places[0].tolist()
                    what, values = list(given.items())[field_number]
                    name = part.names[place] or f"row {part.index[place]}"
                    return describe_fault(what, [float(values[place, column])], name)
        return ""


def describe_fault(what: str, values: Sequence[float], name: str) -> str:
    """Describe the first non-finite value; "" if there is none."""
    if math.isfinite(sum(values)):
        return ""
    invalid = [value for value in values if not math.isfinite(value)]
    article = "An" if what[0] in "aeiou" else "A"
    return f"{article} {what} of {name} is {invalid[0]}." if invalid else ""


def num_steps(settings: PreferenceConfig | RewardModelConfig, num_pairs: int) -> int:
    """Return the number of optimizer steps of the run."""
    return settings.steps or math.ceil(num_pairs * settings.epochs / min(settings.batch_size, num_pairs))


def batch_of_step(step: int, num_pairs: int, batch_size: int, seed: int) -> list[int]:
    """Return the indices of a step's examples; each epoch is shuffled separately."""
    size = min(batch_size, num_pairs)
    places = range((step - 1) * size, step * size)
    return [_shuffled_epoch(num_pairs, seed, place // num_pairs)[place % num_pairs] for place in places]


@lru_cache(maxsize=4)
def _shuffled_epoch(num_pairs: int, seed: int, epoch: int) -> tuple[int, ...]:
    order = list(range(num_pairs))
    random.Random(f"pairs:{seed}:{epoch}").shuffle(order)
    return tuple(order)
