"""Rolling weight updates of several engines: each episode stays on the version that it started with.

An engine's update waits until its episodes have ended and then loads the newest weights, skipping missed versions.
No episode starts on an engine whose weights are not verified, or are older than the version that `served` returned.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from ludus.engines.base import WeightCheck
from ludus.engines.remote.http_client import Replica
from ludus.errors import EngineError, SyncError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    import torch

log = logging.getLogger("ludus.server")


@dataclass(frozen=True, slots=True)
class EpisodePin:
    """Engine and weight version that sample all of an episode."""

    url: str
    version: int


@dataclass
class Placement:
    """Decides on which engine an episode starts, and which engines may update. Uses no clock or event loop.

    `replicas` is modified in place. `newest` is the last published version; a replica with `behind` unset
    holds it. At most half of the engines, oldest versions first, drain at once (wait for their episodes to
    end), plus all that are more than `lag` versions behind; but never all engines. An engine that drains for
    more than `lag` versions swaps roles with an open one of the same version.
    """

    replicas: list[Replica]
    newest: int
    lag: int
    floor: int = field(init=False)
    """Minimum version on which an episode may start."""
    taking: set[Replica] = field(default_factory=set, init=False)
    """Replicas whose weights are being sent."""
    leaving: set[str] = field(default_factory=set, init=False)
    """Addresses of engines being removed: they accept no new episode."""
    _waiting: dict[Replica, int] = field(default_factory=dict, init=False)
    """Draining replicas, with the newest version at the time they began."""
    _pins: dict[str, EpisodePin] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self.floor = self.newest

    def version_of(self, replica: Replica) -> int:
        """Return the version that a replica samples from."""
        return self.newest if replica.behind is None else replica.behind

    @property
    def open(self) -> list[Replica]:
        """Replicas that accept new episodes."""
        shut = self.taking | self._waiting.keys()
        return [one for one in self._active if one not in shut and self.version_of(one) >= self.floor]

    @property
    def _active(self) -> list[Replica]:
        """Replicas that have not left and are not being removed."""
        return [one for one in self.replicas if not one.gone and one.url not in self.leaving]

    def is_empty(self, url: str) -> bool:
        """Return whether an address has no episode."""
        return all(pin.url != url for pin in self._pins.values())

    def begin(self, episode: str) -> EpisodePin | None:
        """Pin an episode to the least loaded open engine (newest version on ties); None if there is none."""
        return self._pin(episode, self.open)

    def move(self, episode: str) -> EpisodePin | None:
        """Move an episode from a draining engine to an open engine with newer weights; None if it stays."""
        pin = self._pins[episode]
        if pin.url not in {one.url for one in self._waiting} | self.leaving:
            return None
        return self._pin(episode, [one for one in self.open if self.version_of(one) > pin.version])

    def _pin(self, episode: str, engines: Sequence[Replica]) -> EpisodePin | None:
        if not engines:
            return None
        self._pins.pop(episode, None)
        busy = self._busy()
        chosen = min(engines, key=lambda one: (one.is_down, busy[one.url], -self.version_of(one)))
        self._pins[episode] = EpisodePin(chosen.url, self.version_of(chosen))
        return self._pins[episode]

    def end(self, episode: str) -> None:
        """End an episode."""
        self._pins.pop(episode, None)

    def due_updates(self) -> list[Replica]:
        """Choose the engines to drain; return those that may update now."""
        busy = self._busy()
        behind = [one for one in self._active if self.version_of(one) < self.newest]
        self._waiting = {one: since for one, since in self._waiting.items() if one in behind}
        self._change_places(busy)
        for one in sorted(behind, key=lambda one: (self.version_of(one), busy[one.url])):
            late = self.newest - self.version_of(one) > self.lag
            num_open, num = len(self.open), len(self.replicas)
            if one in self.open and num_open > 1 and (late or num - num_open < num // 2):
                self._waiting[one] = self.newest
        self.floor = max(self.floor, min(map(self.version_of, self.open), default=0))
        return [one for one in behind if not (busy[one.url] or one in self.taking)]

    def _change_places(self, busy: Counter[str]) -> None:
        """Prevent a slow episode from blocking updates of engines of the same version."""
        for one, since in tuple(self._waiting.items()):
            as_old = [other for other in self.open if self.version_of(other) == self.version_of(one)]
            if self.newest - since > self.lag and self.version_of(one) >= self.floor and as_old:
                del self._waiting[one]
                self._waiting[min(as_old, key=lambda other: busy[other.url])] = self.newest

    def _busy(self) -> Counter[str]:
        return Counter(pin.url for pin in self._pins.values())


@dataclass
class RollingUpdates:
    """Places episodes and distributes weights: `stage` stores a version, `push` sends it to one replica and verifies
    it, and `is_alive`, if set, tests after a failure whether the replica still exists."""

    placement: Placement
    stage: Callable[[int, Mapping[str, torch.Tensor]], Awaitable[None]]
    push: Callable[[Replica, WeightCheck], Awaitable[None]]
    is_alive: Callable[[str], Awaitable[bool]] | None = None
    _check: WeightCheck | None = field(default=None, init=False)
    _transfers: dict[Replica, asyncio.Task[None]] = field(default_factory=dict, init=False)
    _paused: bool = field(default=False, init=False)
    _failure: BaseException | None = field(default=None, init=False)
    _changed: asyncio.Event = field(default_factory=asyncio.Event, init=False)

    async def place(self, episode: str) -> EpisodePin:
        """Pin an episode as soon as an engine is open. Raises a transfer's error."""
        while True:
            pin = self.placement.begin(episode)
            if pin is not None:
                return pin
            await self._change()

    def move(self, episode: str) -> EpisodePin | None:
        """Move an episode between two turns, if its engine drains; that engine may then update."""
        pin = self.placement.move(episode)
        if pin is not None:
            self.start_due_updates()
        return pin

    def release(self, episode: str) -> None:
        """End an episode."""
        self.placement.end(episode)
        self.start_due_updates()

    async def served(self, beyond: int) -> int:
        """Return the minimum version on which episodes may start, once above `beyond`. Raises a transfer's error."""
        while self.placement.floor <= beyond:
            await self._change()
        return self.placement.floor

    async def wait_until_current(self) -> None:
        """Allow only the newest weights for new episodes, and wait until one engine has them."""
        self.placement.floor = self.placement.newest
        self.start_due_updates()
        while not self.placement.open:
            await self._change()

    async def push_weights(self, check: WeightCheck, state: Mapping[str, torch.Tensor]) -> None:
        """Store weights for each replica to load and verify once its episodes have ended."""
        async with self.quiet():
            await self.stage(check.version, state)
            self._check = check
            self.placement.newest = check.version

    @asynccontextmanager
    async def quiet(self) -> AsyncIterator[None]:
        """Suspend transfers during the block, after waiting for running ones."""
        self._paused = True
        try:
            await asyncio.gather(*self._transfers.values(), return_exceptions=True)
            yield
        finally:
            self._paused = False
            self.start_due_updates()

    async def empty(self, url: str) -> None:
        """Stop new episodes at an address and wait until its episodes have ended."""
        self.placement.leaving.add(url)
        try:
            self.start_due_updates()
            while not self.placement.is_empty(url):
                await self._change()
        finally:
            self.placement.leaving.discard(url)

    def close(self) -> None:
        """Cancel running transfers."""
        self._paused = True
        for task in self._transfers.values():
            task.cancel()

    def start_due_updates(self) -> None:
        """Start the transfers that may start, and wake all waiters."""
        for replica in () if self._paused else self.placement.due_updates():
            assert self._check is not None
            self.placement.taking.add(replica)
            task = asyncio.get_running_loop().create_task(self._push(replica, self._check))
            self._transfers[replica] = task
            task.add_done_callback(partial(self._after, replica))
        self._changed.set()

    async def _push(self, replica: Replica, check: WeightCheck) -> None:
        try:
            async with asyncio.timeout(check.deadline_s):
                await self.push(replica, check)
        except TimeoutError as error:
            raise SyncError(
                f"Sending weights {check.version} to {replica.url} took longer than {check.deadline_s:g} s."
            ) from error
        except EngineError as error:
            if replica.gone or (self.is_alive is not None and not await self.is_alive(replica.url)):
                replica.gone = True
                return
            raise SyncError(f"{replica.url} refused weights {check.version}: {error}") from error
        log.info("%s loaded weights %d; %s", replica.url, check.version, self._versions())

    def _after(self, replica: Replica, task: asyncio.Task[None]) -> None:
        """Finish a transfer. A replica that failed verification accepts no episodes."""
        self._transfers.pop(replica, None)
        error = None if task.cancelled() else task.exception()
        if error is None:
            self.placement.taking.discard(replica)
        self._failure = self._failure or error
        self.start_due_updates()

    def _versions(self) -> str:
        counts = Counter(map(self.placement.version_of, self.placement.replicas))
        return ", ".join(f"{counts[version]} at version {version}" for version in sorted(counts))

    async def _change(self) -> None:
        """Wait for a change. Raises a transfer's error."""
        if self._failure is None:
            self._changed.clear()
            await self._changed.wait()
        if self._failure is not None:
            raise self._failure
