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

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EpisodePin:
    """Engine and weight version that sample all of an episode."""

    url: str
    version: int


@dataclass
class Placement:
    """Selection of the engine of each new episode and of the engines to update, without clock or event loop.

    `replicas` is modified in place. `latest` is the last published version; a replica with `stale_version` unset
    holds it. At most half of the engines, oldest versions first, drain at once (wait for their episodes to
    end), plus all that are more than `max_lag` versions behind; but never all engines. An engine that drains for
    more than `max_lag` versions swaps roles with an open one of the same version.
    """

    replicas: list[Replica]
    latest: int
    max_lag: int
    min_version: int = field(init=False)
    """Minimum version on which an episode may start."""
    receiving: set[Replica] = field(default_factory=set, init=False)
    """Replicas whose weights are being sent."""
    removing: set[str] = field(default_factory=set, init=False)
    """Addresses of engines being removed: they accept no new episode."""
    _waiting: dict[Replica, int] = field(default_factory=dict, init=False)
    """Draining replicas, with the newest version at the time they began."""
    _pins: dict[str, EpisodePin] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self.min_version = self.latest

    def version_of(self, replica: Replica) -> int:
        """Return the version that a replica samples from."""
        return self.latest if replica.stale_version is None else replica.stale_version

    @property
    def open(self) -> list[Replica]:
        """Replicas that accept new episodes."""
        closed = self.receiving | self._waiting.keys()
        return [one for one in self._active if one not in closed and self.version_of(one) >= self.min_version]

    @property
    def _active(self) -> list[Replica]:
        """Replicas that have not left and are not being removed."""
        return [replica for replica in self.replicas if not replica.removed and replica.url not in self.removing]

    def is_empty(self, url: str) -> bool:
        return all(pin.url != url for pin in self._pins.values())

    def begin(self, episode: str) -> EpisodePin | None:
        """Pin an episode to the least loaded open engine (newest version on ties); None if there is none."""
        return self._pin(episode, self.open)

    def move(self, episode: str) -> EpisodePin | None:
        """Move an episode from a draining engine to an open engine with newer weights; None if it stays."""
        pin = self._pins[episode]
        if pin.url not in {replica.url for replica in self._waiting} | self.removing:
            return None
        return self._pin(episode, [replica for replica in self.open if self.version_of(replica) > pin.version])

    def _pin(self, episode: str, engines: Sequence[Replica]) -> EpisodePin | None:
        if not engines:
            return None
        self._pins.pop(episode, None)
        busy = self._busy()
        chosen = min(engines, key=lambda replica: (replica.is_down, busy[replica.url], -self.version_of(replica)))
        self._pins[episode] = EpisodePin(chosen.url, self.version_of(chosen))
        return self._pins[episode]

    def end(self, episode: str) -> None:
        self._pins.pop(episode, None)

    def due_updates(self) -> list[Replica]:
        """Choose the engines to drain; return those that may update now."""
        busy = self._busy()
        behind = [replica for replica in self._active if self.version_of(replica) < self.latest]
        self._waiting = {replica: since for replica, since in self._waiting.items() if replica in behind}
        self._swap_draining(busy)
        for replica in sorted(behind, key=lambda replica: (self.version_of(replica), busy[replica.url])):
            is_late = self.latest - self.version_of(replica) > self.max_lag
            num_open, num = len(self.open), len(self.replicas)
            if replica in self.open and num_open > 1 and (is_late or num - num_open < num // 2):
                self._waiting[replica] = self.latest
        self.min_version = max(self.min_version, min(map(self.version_of, self.open), default=0))
        return [replica for replica in behind if not (busy[replica.url] or replica in self.receiving)]

    def _swap_draining(self, busy: Counter[str]) -> None:
        """Prevent a slow episode from blocking updates of engines of the same version."""
        for replica, since in tuple(self._waiting.items()):
            same_version = [other for other in self.open if self.version_of(other) == self.version_of(replica)]
            if self.latest - since > self.max_lag and self.version_of(replica) >= self.min_version and same_version:
                del self._waiting[replica]
                self._waiting[min(same_version, key=lambda other: busy[other.url])] = self.latest

    def _busy(self) -> Counter[str]:
        return Counter(pin.url for pin in self._pins.values())


@dataclass
class RollingUpdates:
    """Placement of episodes and distribution of weights.

    `stage` stores a version, and `push` sends it to one replica and verifies it. `is_alive`, if set, is called after a
    failure with the URL of the replica and returns whether it still exists.
    """

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
        while (pin := self.placement.begin(episode)) is None:
            await self._wait_for_change()
        return pin

    def move(self, episode: str) -> EpisodePin | None:
        """Move an episode between two turns, if its engine drains; that engine may then update."""
        if (pin := self.placement.move(episode)) is not None:
            self.start_due_updates()
        return pin

    def release(self, episode: str) -> None:
        self.placement.end(episode)
        self.start_due_updates()

    async def wait_for_version(self, beyond: int) -> int:
        while self.placement.min_version <= beyond:
            await self._wait_for_change()
        return self.placement.min_version

    async def wait_until_current(self) -> None:
        """Allow only the newest weights for new episodes, and wait until one engine has them."""
        self.placement.min_version = self.placement.latest
        self.start_due_updates()
        while not self.placement.open:
            await self._wait_for_change()

    async def push_weights(self, check: WeightCheck, state: Mapping[str, torch.Tensor]) -> None:
        async with self.pause_transfers():
            await self.stage(check.version, state)
            self._check = check
            self.placement.latest = check.version

    @asynccontextmanager
    async def pause_transfers(self) -> AsyncIterator[None]:
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
        self.placement.removing.add(url)
        try:
            self.start_due_updates()
            while not self.placement.is_empty(url):
                await self._wait_for_change()
        finally:
            self.placement.removing.discard(url)

    def close(self) -> None:
        self._paused = True
        for task in self._transfers.values():
            task.cancel()

    def start_due_updates(self) -> None:
        """Start the transfers that may start, and wake all waiters."""
        for replica in () if self._paused else self.placement.due_updates():
            assert self._check is not None
            self.placement.receiving.add(replica)
            task = asyncio.get_running_loop().create_task(self._push(replica, self._check))
            self._transfers[replica] = task
            task.add_done_callback(partial(self._finish_transfer, replica))
        self._changed.set()  # wakes all waiters

    async def _push(self, replica: Replica, check: WeightCheck) -> None:
        try:
            async with asyncio.timeout(check.deadline_s):
                await self.push(replica, check)
        except TimeoutError as error:
            raise SyncError(
                f"Sending weights {check.version} to {replica.url} took longer than {check.deadline_s:g} s."
            ) from error
        except EngineError as error:
            if replica.removed or (self.is_alive is not None and not await self.is_alive(replica.url)):
                replica.removed = True
                return
            raise SyncError(f"{replica.url} failed to load weights {check.version}: {error}") from error
        counts = Counter(map(self.placement.version_of, self.placement.replicas))
        versions = ", ".join(f"{counts[version]} at version {version}" for version in sorted(counts))
        log.info("%s loaded weights %d; %s", replica.url, check.version, versions)

    def _finish_transfer(self, replica: Replica, task: asyncio.Task[None]) -> None:
        """Finish a transfer. A replica that failed verification accepts no episodes."""
        self._transfers.pop(replica, None)
        error = None if task.cancelled() else task.exception()
        if error is None:
            self.placement.receiving.discard(replica)
        self._failure = self._failure or error
        self.start_due_updates()

    async def _wait_for_change(self) -> None:
        """Wait for a change. Raises a transfer's error."""
        if self._failure is None:
            self._changed.clear()
            await self._changed.wait()
        if self._failure is not None:
            raise self._failure
