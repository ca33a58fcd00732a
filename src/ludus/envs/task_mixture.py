"""Interleave the tasks of several pools, so that each has its share of every step.

The pool of each position follows from the weights alone. With `S(p)` the sum of a pool's shares over the
first `p` positions, the pool has been chosen at least `floor(S(p))` and at most `ceil(S(p))` times, so a step
has exact shares if those are integers. The j-th turn of a pool may come from the first position with `S > j
- 1` on, and is due at the first one with `S >= j`; the earliest due goes first, which meets every deadline
(the chairman assignment problem, Tijdeman, Discrete Mathematics 32, 1980).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count, islice

from ludus.envs.base import permutation
from ludus.errors import ConfigError
from ludus.types import Task

_SLACK = 1e-9
"""Tolerance for equality of sums of shares."""


@dataclass(frozen=True)
class TaskPool:
    """Tasks that share a weight, which moves linearly from `weight` to `weight_end` (None: constant)."""

    name: str
    tasks: Sequence[Task]
    weight: float = 1.0
    weight_end: float | None = None

    @property
    def moves(self) -> bool:
        """Whether the weight changes."""
        return self.weight_end is not None and self.weight_end != self.weight


@dataclass
class Shares:
    """Assignment of a pool to each position. Weights change over the first `num_chunks` chunks."""

    pools: Sequence[TaskPool]
    chunk: int = 1
    num_chunks: int = 1
    _starts: list[list[float]] = field(default_factory=list, init=False)
    """Each pool's `S` before each chunk."""
    _shares: dict[int, list[float]] = field(default_factory=dict, init=False)

    def turns(self) -> Iterator[int]:
        """Yield pool indices endlessly."""
        indices, counts = range(len(self.pools)), [0] * len(self.pools)
        due_chunks = [0] * len(self.pools)
        deadlines = [self._deadline(i, 1, due_chunks) for i in indices]
        for number in count():
            chunk = min(number, self._last)
            starts, shares = self.sums(chunk), self.at(chunk)
            offset = (number - chunk) * self.chunk
            for position in range(offset + 1, offset + self.chunk + 1):
                ready = [i for i in indices if counts[i] + _SLACK < starts[i] + position * shares[i]]
                chosen = min(ready, key=lambda i: (deadlines[i], i))
                counts[chosen] += 1
                deadlines[chosen] = self._deadline(chosen, counts[chosen] + 1, due_chunks)
                yield chosen

    def at(self, chunk: int) -> Sequence[float]:
        """Return the share of every pool in a chunk."""
        chunk = min(chunk, self._last)
        if chunk not in self._shares:
            progress = min(chunk / max(self.num_chunks - 1, 1), 1.0)
            ends = [pool.weight if pool.weight_end is None else pool.weight_end for pool in self.pools]
            weights = [p.weight + (end - p.weight) * progress for p, end in zip(self.pools, ends, strict=True)]
            self._shares[chunk] = [weight / sum(weights) for weight in weights]
        return self._shares[chunk]

    def sums(self, chunk: int) -> Sequence[float]:
        """Return `S` of every pool before a chunk, at most the one after which weights are constant."""
        self._starts = self._starts or [[0.0] * len(self.pools)]
        while len(self._starts) <= chunk:
            before, shares = self._starts[-1], self.at(len(self._starts) - 1)
            self._starts.append([s + share * self.chunk for s, share in zip(before, shares, strict=True)])
        return self._starts[chunk]

    def _deadline(self, pool: int, turn: int, due_chunks: list[int]) -> float:
        """Return the first position at which `S` reaches `turn`, or infinity."""
        while due_chunks[pool] < self._last and self.sums(due_chunks[pool] + 1)[pool] < turn - _SLACK:
            due_chunks[pool] += 1
        chunk = due_chunks[pool]
        share, missing = self.at(chunk)[pool], turn - self.sums(chunk)[pool]
        return chunk * self.chunk + math.ceil(missing / share - _SLACK) if share > 0 else math.inf

    @cached_property
    def _last(self) -> int:
        """First chunk from which the shares are constant."""
        return self.num_chunks - 1 if any(pool.moves for pool in self.pools) else 0


@dataclass
class MixtureOrder:
    """An endless order over the tasks of several pools; see `TaskOrder`.

    A pool's epochs each have a different order and visit a task at most once. No chunk repeats a task: if an
    epoch has fewer tasks left than a chunk needs, the next epoch starts. Weights reach their end values after
    `num_chunks` chunks. Raises ConfigError if a pool has fewer tasks than one chunk may need.
    """

    pools: Sequence[TaskPool]
    seed: int
    chunk: int = 1
    num_chunks: int = 1
    _chunks: list[list[Task]] = field(default_factory=list, init=False)
    _progress: list[tuple[int, int]] = field(default_factory=list, init=False)
    """Epoch of each pool, and number of its tasks used in this epoch."""

    def __post_init__(self) -> None:
        shares = Shares(self.pools, self.chunk, self.num_chunks)
        self._turns = shares.turns()
        self._progress = [(0, 0)] * len(self.pools)
        for i, pool in enumerate(self.pools):
            exact = max(shares.at(0)[i], shares.at(self.num_chunks)[i]) * self.chunk
            whole = not any(p.moves for p in self.pools) and abs(exact - round(exact)) < _SLACK
            max_tasks = min(round(exact) if whole else math.ceil(exact) + 1, self.chunk)
            if len(pool.tasks) < max_tasks:
                raise ConfigError(
                    f"One step may need {max_tasks} tasks of the world {pool.name!r}, but its train split has "
                    f"{len(pool.tasks)}.",
                    "Lower its weight, or training.prompts_per_step.",
                )

    @cached_property
    def tasks(self) -> Sequence[Task]:
        """The tasks of all pools."""
        return [task for pool in self.pools for task in pool.tasks]

    def take(self, start: int, num: int) -> list[Task]:
        """Return the tasks at positions `start` to `start + num`, counted over all epochs."""
        while len(self._chunks) * self.chunk < start + num:
            self._chunks.append(self._next_chunk())
        return [self._chunks[p // self.chunk][p % self.chunk] for p in range(start, start + num)]

    def _next_chunk(self) -> list[Task]:
        turns = list(islice(self._turns, self.chunk))
        found: list[Iterator[Task]] = []
        for i, pool in enumerate(self.pools):
            (epoch, done), num = self._progress[i], turns.count(i)
            if done + num > len(pool.tasks):
                epoch, done = epoch + 1, 0
            self._progress[i] = epoch, done + num
            places = permutation(len(pool.tasks), f"{self.seed}:{pool.name}", epoch)[done : done + num]
            found.append(iter([pool.tasks[place] for place in places]))
        return [next(found[i]) for i in turns]
