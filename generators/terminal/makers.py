"""Task makers of a topic. Tasks of the same maker differ only in names and numbers."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from ludus.worlds.terminal.task import TerminalTask


@dataclass(frozen=True)
class TaskMaker:
    """Draws tasks of one kind; `held_out` keeps the kind for the split `composition`."""

    name: str
    level: int
    draw: Callable[[random.Random], TerminalTask]
    held_out: bool = False

    def task(self, number: int) -> TerminalTask:
        """Return the task with a number; equal numbers give equal tasks."""
        return self.draw(random.Random(f"0/{self.name}/{number}"))
