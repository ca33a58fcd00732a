"""Worlds over simulators in Java processes, which episodes take in turns, with gold paths as experts."""

from __future__ import annotations

import asyncio
import shutil
import threading
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from ludus.envs.simulator_world import SimulatorWorld
from ludus.errors import UserError
from ludus.worlds.adapters.base import BoundedSimulator


class JavaProcess(Protocol):
    """Something with a process."""

    def close(self) -> None: ...


T = TypeVar("T")
Process = TypeVar("Process", bound=JavaProcess)


@dataclass
class JavaPool(Generic[Process]):
    """Idle processes; `take` starts one if there is none."""

    start: Callable[[], Process]
    gold_paths: dict[str, Sequence[str]] = field(default_factory=dict, init=False)
    """Gold paths by episode: some generators are slow, and some find another path each time."""
    _idle: list[Process] = field(default_factory=list, init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)

    def take(self) -> Process:
        """Return an idle process or a new one. Raises UserError if there is no Java."""
        if shutil.which("java") is None:
            raise UserError("This world needs Java.", "Install it: apt-get install default-jre-headless.")
        with self._lock:
            idle = self._idle.pop() if self._idle else None
        return self.start() if idle is None else idle

    def give_back(self, process: Process) -> None:
        """Keep a process for another episode."""
        with self._lock:
            self._idle.append(process)

    def close(self) -> None:
        """End all idle processes."""
        while self._idle:
            self._idle.pop().close()


class JavaSimulator(BoundedSimulator, Generic[Process]):
    """An episode in a process of a pool. A subclass defines `reset`, `act` and `gold_path`."""

    def __init__(self, pool: JavaPool[Process], name: str, max_steps: int) -> None:
        super().__init__(max_steps)
        self._pool, self._name = pool, name
        self._process: Process | None = None
        self._is_sound = True
        self._gold: Sequence[str] | None = None
        self._taken: list[str] = []
        self._valid: Sequence[str] = ()

    @abstractmethod
    def gold_path(self) -> Sequence[str]:
        """Return the actions of the expert from the first state, which is the current one."""

    def call(self, function: Callable[[Process], T]) -> T:
        """Call a function with the process; if it raises, no other episode uses the process."""
        if self._process is None:
            self._process = self._pool.take()
        self._is_sound = False
        result = function(self._process)
        self._is_sound = True
        return result

    def note(self, action: str, valid: object) -> None:
        """Record an action and the valid actions after it."""
        self._taken.append(action)
        self._valid = [str(one) for one in valid] if isinstance(valid, list) else ()

    def actions(self) -> Sequence[str]:
        """Return the valid actions."""
        return self._valid

    def expert_action(self) -> str | None:
        """Return the next action of the gold path; None after any other action."""
        if self._gold is None and not self._taken:
            known = self._pool.gold_paths.get(self._name)
            self._gold = self._pool.gold_paths.setdefault(self._name, self.gold_path()) if known is None else known
        gold, num = self._gold or (), len(self._taken)
        return gold[num] if num < len(gold) and list(gold[:num]) == self._taken else None

    def close(self) -> None:
        process, self._process = self._process, None
        if process is not None and self._is_sound:
            self._pool.give_back(process)
        elif process is not None:
            process.close()


@dataclass(frozen=True)
class JavaWorld(SimulatorWorld):
    """A world whose episodes share a pool, `max_processes` at once."""

    pool: JavaProcess | None = None
    max_processes: int = 1

    @property
    def episodes_at_once(self) -> int | None:
        """The maximum number of processes."""
        return self.max_processes

    async def close(self) -> None:
        """End the processes."""
        if self.pool is not None:
            await asyncio.to_thread(self.pool.close)
