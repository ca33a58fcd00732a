"""Task order as a function of seed and position, so that resuming needs no state."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

from ludus.types import Task


class TaskSequence(Protocol):
    """An endless, deterministic order over tasks."""

    @property
    def tasks(self) -> Sequence[Task]:
        """All tasks in the order."""
        ...

    @property
    def chunk(self) -> int:
        """Number of tasks per step, in which no task repeats."""
        ...

    def take(self, start: int, num: int) -> list[Task]:
        """Return the tasks at positions `start` to `start + num`."""
        ...


@dataclass(frozen=True)
class TaskOrder:
    """An endless order over tasks: each epoch visits a task at most once, in a different order.

    An epoch is a whole number of `chunk`s (the tasks of one training step), so that no step repeats a task;
    the remaining tasks are dropped for that epoch. Needs at least `chunk` tasks.
    """

    tasks: Sequence[Task]
    seed: int
    chunk: int = 1

    def take(self, start: int, num: int) -> list[Task]:
        """Return the tasks at positions `start` to `start + num`, counted over all epochs."""
        size = len(self.tasks)
        epoch = size - size % self.chunk
        return [
            self.tasks[permutation(size, self.seed, position // epoch)[position % epoch]]
            for position in range(start, start + num)
        ]


@lru_cache(maxsize=32)
def permutation(size: int, seed: int | str, epoch: int) -> tuple[int, ...]:
    """Return the numbers below `size` in a random order determined by seed and epoch."""
    order = list(range(size))
    random.Random(f"order:{seed}:{epoch}").shuffle(order)
    return tuple(order)
