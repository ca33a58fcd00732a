"""Keys and values: of one batch while it is computed, and of each episode between its turns.

In a batch all rows end at the same column: a row's tokens are right-aligned, the columns before its first
token are padding (zeros that the mask hides). So a new token of every row goes into one column, and a row
that has finished is replaced by moving another into its place.

Keys and values of all layers lie in one tensor per shape ("plane group"), `[planes, rows, heads, columns,
width]`, in ordinary models a single one, so that loading or saving an episode is one copy.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import Cache

_COLUMN_STEP = 64
"""Columns of a stored entry are a multiple of this."""

Shape = tuple[int, int]
"""Heads and width of one key or value plane."""


@dataclass(frozen=True, slots=True)
class KvLayout:
    """Where the keys and values of each layer lie: `places[2 * layer + is_value]` is (group, plane)."""

    groups: tuple[tuple[int, Shape], ...]
    places: tuple[tuple[int, int], ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, planes: Sequence[Shape], dtype: torch.dtype, device: torch.device) -> KvLayout:
        """A layout for planes given as key, value, key, value, ... by layer."""
        counts: dict[Shape, int] = {}
        places: list[tuple[Shape, int]] = []
        for shape in planes:
            places.append((shape, counts.get(shape, 0)))
            counts[shape] = counts.get(shape, 0) + 1
        index = {shape: number for number, shape in enumerate(counts)}
        return cls(
            groups=tuple((count, shape) for shape, count in counts.items()),
            places=tuple((index[shape], plane) for shape, plane in places),
            dtype=dtype,
            device=device,
        )

    def empty(self, columns: int) -> tuple[Tensor, ...]:
        """Unset memory for one row: per group `[planes, heads, columns, width]`."""
        return tuple(
            torch.empty(count, heads, columns, width, dtype=self.dtype, device=self.device)
            for count, (heads, width) in self.groups
        )


@dataclass(frozen=True, slots=True)
class Entry:
    """Keys and values of `tokens` (T of them): the first T columns of `[planes, heads, columns, width]`."""

    tokens: tuple[int, ...]
    groups: tuple[Tensor, ...]

    @property
    def num_columns(self) -> int:
        return self.groups[0].shape[2]

    def shared(self, tokens: Sequence[int]) -> int:
        """How many of `tokens` are served: the common prefix, short of the last (whose logits are needed)."""
        return min(common_prefix(self.tokens, tokens), len(tokens) - 1)


def common_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    """Length of the common prefix of two token sequences."""
    length = min(len(left), len(right))
    if left[:length] == right[:length]:
        return length
    return next(i for i in range(length) if left[i] != right[i])


class KvStore:
    """Entries by episode, within a budget of columns (tokens); the least recently used one goes first.

    Columns are made in steps of `_COLUMN_STEP` and used again, since fresh memory costs more than the copy.
    """

    def __init__(self, layout: KvLayout, budget_tokens: int) -> None:
        self._layout = layout
        self._budget_tokens = budget_tokens
        self._entries: OrderedDict[str, Entry] = OrderedDict()
        self._free: list[Entry] = []
        self._num_columns = 0

    def get(self, episode: str) -> Entry | None:
        entry = self._entries.get(episode)
        if entry is not None:
            self._entries.move_to_end(episode)
        return entry

    def put(self, episode: str, tokens: tuple[int, ...], batch: KvBatch, row: int) -> None:
        """Keep the last columns of a row, which hold `tokens`, if they fit the budget at all.

        Only what the episode's entry does not hold yet is copied.
        """
        old = self._entries.pop(episode, None)
        if old is not None and len(tokens) <= old.num_columns:
            entry, num_same = old, common_prefix(old.tokens, tokens)
        else:
            if old is not None:
                self._free.append(old)
            columns = -(-len(tokens) // _COLUMN_STEP) * _COLUMN_STEP
            if columns > self._budget_tokens:
                return
            entry, num_same = self._take(columns), 0
        batch.save(row, entry, num_same, len(tokens))
        self._entries[episode] = Entry(tokens, entry.groups)

    def drop(self, episode: str) -> None:
        entry = self._entries.pop(episode, None)
        if entry is not None:
            self._free.append(entry)

    def clear(self) -> None:
        self._free.extend(self._entries.values())
        self._entries.clear()

    def _take(self, columns: int) -> Entry:
        """Memory for an entry: used before, or new after as many evictions as the budget asks for."""
        while True:
            for place, entry in enumerate(self._free):
                if entry.num_columns == columns:
                    return self._free.pop(place)
            if self._num_columns + columns <= self._budget_tokens:
                self._num_columns += columns
                return Entry((), self._layout.empty(columns))
            if self._free:
                self._num_columns -= self._free.pop().num_columns
            else:
                self._free.append(self._entries.popitem(last=False)[1])


class KvBatch(Cache):  # type: ignore[misc]
    """The keys and values of a batch, in the shape that transformers models write to and read from.

    A forward pass runs on the rows and columns set by `focus`. `end` is the first free column, the same for
    all rows. The memory is kept from batch to batch and not zeroed in between: what padding holds is hidden
    by the mask and only has to be finite.
    """

    def __init__(self, layout: KvLayout) -> None:
        super().__init__(layers=[])
        self._layout = layout
        self._memory = [torch.zeros(0, dtype=layout.dtype, device=layout.device) for _ in layout.groups]
        self.begin(rows=0, end=0, spare=0)

    def begin(self, rows: int, end: int, spare: int) -> None:
        """Start a batch of `rows` whose histories end at column `end`, with `spare` columns after it."""
        self.end = end
        self._buffers = self._view(rows, end + spare)
        self.focus(slice(0, rows), 0, end)

    def forget(self) -> None:
        """Zero the memory (it may hold numbers that are not finite)."""
        for memory in self._memory:
            memory.zero_()

    def _view(self, rows: int, columns: int) -> list[Tensor]:
        """Buffers of this size over the memory, which grows by an eighth more than is needed."""
        views = []
        for group, (count, (heads, width)) in enumerate(self._layout.groups):
            size = count * rows * heads * columns * width
            if size > self._memory[group].numel():
                self._memory[group] = self._memory[group].new_zeros(size + size // 8)
            views.append(self._memory[group][:size].view(count, rows, heads, columns, width))
        return views

    def focus(self, rows: slice, low: int, at: int, real: Tensor | None = None) -> None:
        """Set the next pass: its rows, the first column it sees, and the column of its first new token.

        `real` `[rows, 1, N, 1]` is False on padding among the N new tokens, whose columns are left alone.
        """
        self._rows, self._low, self._at, self._real = rows, low, at, real

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: object, **__: object
    ) -> tuple[Tensor, Tensor]:
        """Take the new keys and values `[rows, heads, N, width]`; give those of all columns in focus."""
        return self._write(2 * layer_idx, key_states), self._write(2 * layer_idx + 1, value_states)

    def _write(self, place: int, new: Tensor) -> Tensor:
        group, plane = self._layout.places[place]
        rows = self._buffers[group][plane][self._rows]
        until = self._at + new.shape[2]
        target = rows[:, :, self._at : until]
        target.copy_(new if self._real is None else torch.where(self._real, new, target))
        return rows[:, :, self._low : until]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._at - self._low

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self._at - self._low + query_length, 0

    def load(self, row: int, entry: Entry, num_tokens: int, until: int) -> None:
        """Put the first `num_tokens` of `entry` into a row, so that they end at column `until`."""
        for buffer, saved in zip(self._buffers, entry.groups, strict=True):
            buffer[:, row, :, until - num_tokens : until] = saved[:, :, :num_tokens]

    def save(self, row: int, entry: Entry, first: int, until: int) -> None:
        """Copy tokens `first` to `until` of a row of `until` tokens into the same columns of `entry`."""
        start = self.end - until
        for buffer, saved in zip(self._buffers, entry.groups, strict=True):
            saved[:, :, first:until] = buffer[:, row, :, start + first : self.end]

    def entry(self, row: int, tokens: tuple[int, ...]) -> Entry:
        """A copy of a row's last columns, which hold `tokens`, in memory of its own."""
        columns = slice(self.end - len(tokens), self.end)
        return Entry(tokens, tuple(buffer[:, row, :, columns].clone() for buffer in self._buffers))

    def copy_rows(self, target: Sequence[int], source: Sequence[int]) -> None:
        """Overwrite the rows `target` by the rows `source`."""
        to = torch.tensor(target, dtype=torch.int64, device=self._layout.device)
        of = torch.tensor(source, dtype=torch.int64, device=self._layout.device)
        for buffer in self._buffers:
            buffer[:, to] = buffer[:, of]

    def compact(self, keep: Sequence[int]) -> list[int]:
        """Move the rows `keep` to the front, as few as possible; returns the old row at each place."""
        count = len(keep)
        stay = set(keep)
        holes = [row for row in range(count) if row not in stay]
        movers = [row for row in keep if row >= count]
        order = list(range(count))
        for hole, mover in zip(holes, movers, strict=True):
            order[hole] = mover
        if holes:
            self.copy_rows(holes, movers)
        return order

    def reserve(self, rows: int, spare: int) -> None:
        """If no column is left make room for `spare` more, keeping the first `rows` rows."""
        if self.end < self._buffers[0].shape[3]:
            return
        old = self._buffers
        self._memory = [memory[:0] for memory in self._memory]
        self._buffers = self._view(rows, self.end + spare)
        for buffer, source in zip(self._buffers, old, strict=True):
            buffer[:, :, :, : self.end] = source[:, :rows, :, : self.end]
