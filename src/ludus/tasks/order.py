"""Which task comes when: a function of the seed and the position, so that a resumed run needs no memory."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

from ludus.types import Task


class TaskSequence(Protocol):
    """An endless order over tasks, the same at each position whenever it is asked."""

    @property
    def tasks(self) -> Sequence[Task]:
        """All tasks that it visits."""
        ...

    @property
    def chunk(self) -> int:
        """Tasks of a step: no step meets one twice."""
        ...

    def take(self, start: int, num: int) -> list[Task]:
        """The tasks at positions `start` to `start + num`."""
        ...


@dataclass(frozen=True)
class TaskOrder:
    """An endless order over tasks: each lap visits a task at most once, each lap in another order.

    A lap is a whole number of `chunk` tasks (those of one training step), so that no step meets a task
    twice; the few tasks that are left over wait for another lap. Needs at least `chunk` tasks.
    """

    tasks: Sequence[Task]
    seed: int
    chunk: int = 1

    def take(self, start: int, num: int) -> list[Task]:
        """The tasks at positions `start` to `start + num`, counted over all laps."""
        size = len(self.tasks)
        lap = size - size % self.chunk
        return [
            self.tasks[permutation(size, self.seed, position // lap)[position % lap]]
            for position in range(start, start + num)
        ]


@lru_cache(maxsize=32)
def permutation(size: int, seed: int | str, lap: int) -> tuple[int, ...]:
    """The numbers below `size` in an order that seed and lap decide."""
    order = list(range(size))
    random.Random(f"order:{seed}:{lap}").shuffle(order)
    return tuple(order)
