"""Several engines that take new weights one by one, so that an episode stays with those it began on.

Takes weights to hand out, and episodes that begin and end. Gives each episode an engine and a version, both
for all of its life. Waits with the weights of an engine until its episodes have ended; it then takes the
newest, not those that it missed. Never lets an episode begin on an engine whose weights are not proved
there, nor on weights older than `served` has said. An engine that has left is forgotten; one that joins holds
the newest.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
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
    """The engine that samples an episode, and the version of the weights that samples all of it."""

    url: str
    version: int


@dataclass
class Placement:
    """Which engine an episode begins on, and which may take weights. Knows no clock and no event loop.

    `replicas` changes in place. `newest` is the version that was published last; a replica that is not
    `behind` holds it. At most half of the engines wait for the end of their episodes at once, the oldest
    first, and all that are more than `lag` versions behind; but never all of them. One that waits for more
    than `lag` versions changes places with an open one that is as old.
    """

    replicas: list[Replica]
    newest: int
    lag: int
    floor: int = field(init=False)
    """No episode begins on an older version."""
    taking: set[Replica] = field(default_factory=set, init=False)
    """Those to which weights are on their way."""
    leaving: set[str] = field(default_factory=set, init=False)
    """Addresses of those that go when their episodes have ended: none begins there."""
    _waiting: dict[Replica, int] = field(default_factory=dict, init=False)
    """Those on which no episode begins, with the newest version of when that began."""
    _pins: dict[str, EpisodePin] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self.floor = self.newest

    def held(self, replica: Replica) -> int:
        """The version that a replica samples from."""
        return self.newest if replica.behind is None else replica.behind

    @property
    def open(self) -> list[Replica]:
        """Those on which episodes may begin."""
        shut = self.taking | self._waiting.keys()
        return [one for one in self._kept if one not in shut and self.held(one) >= self.floor]

    @property
    def _kept(self) -> list[Replica]:
        """Those that have not left, and are not about to."""
        return [one for one in self.replicas if not one.gone and one.url not in self.leaving]

    def is_empty(self, url: str) -> bool:
        """Whether no episode is at an address."""
        return all(pin.url != url for pin in self._pins.values())

    def begin(self, episode: str) -> EpisodePin | None:
        """The least busy engine that is open, of equally busy ones the newest; None while there is none."""
        busy = self._busy()
        found = self.open
        if not found:
            return None
        chosen = min(found, key=lambda one: (one.is_down, busy[one.url], -self.held(one)))
        self._pins[episode] = EpisodePin(chosen.url, self.held(chosen))
        return self._pins[episode]

    def move(self, episode: str) -> EpisodePin | None:
        """Where an episode goes on whose engine waits for it to end: the least busy of the open engines with
        newer weights; None where it stays."""
        pin = self._pins[episode]
        waits = {one.url for one in self._waiting} | self.leaving
        newer = [one for one in self.open if self.held(one) > pin.version]
        if pin.url not in waits or not newer:
            return None
        del self._pins[episode]
        busy = self._busy()
        chosen = min(newer, key=lambda one: (one.is_down, busy[one.url], -self.held(one)))
        self._pins[episode] = EpisodePin(chosen.url, self.held(chosen))
        return self._pins[episode]

    def end(self, episode: str) -> None:
        """An episode is over."""
        self._pins.pop(episode, None)

    def publish(self, version: int) -> None:
        """There are newer weights."""
        self.newest = version

    def serve_newest(self) -> None:
        """Let episodes begin on the newest version alone from now on."""
        self.floor = self.newest

    def settle(self) -> list[Replica]:
        """Decide which engines wait for the end of their episodes; gives those that may take weights now."""
        busy = self._busy()
        behind = [one for one in self._kept if self.held(one) < self.newest]
        self._waiting = {one: since for one, since in self._waiting.items() if one in behind}
        self._change_places(busy)
        for one in sorted(behind, key=lambda one: (self.held(one), busy[one.url])):
            late = self.newest - self.held(one) > self.lag
            num_open, num = len(self.open), len(self.replicas)
            if one in self.open and num_open > 1 and (late or num - num_open < num // 2):
                self._waiting[one] = self.newest
        self.floor = max(self.floor, min(map(self.held, self.open), default=0))
        return [one for one in behind if not (busy[one.url] or one in self.taking)]

    def _change_places(self, busy: Counter[str]) -> None:
        """Let no slow episode keep engines from newer weights that have no such episode."""
        for one, since in tuple(self._waiting.items()):
            as_old = [other for other in self.open if self.held(other) == self.held(one)]
            if self.newest - since > self.lag and self.held(one) >= self.floor and as_old:
                del self._waiting[one]
                self._waiting[min(as_old, key=lambda other: busy[other.url])] = self.newest

    def _busy(self) -> Counter[str]:
        """Episodes by engine."""
        return Counter(pin.url for pin in self._pins.values())


@dataclass
class RollingUpdates:
    """Places episodes and hands weights out, in one event loop.

    `hold` keeps weights of a version; `give` brings those to one replica, with their proof. `lives` tells,
    after that has failed, whether the engine at an address is still one of them.
    """

    placement: Placement
    hold: Callable[[int, Mapping[str, torch.Tensor]], Awaitable[None]]
    give: Callable[[Replica, WeightCheck], Awaitable[None]]
    lives: Callable[[str], Awaitable[bool]]
    _check: WeightCheck | None = field(default=None, init=False)
    _transfers: dict[Replica, asyncio.Task[None]] = field(default_factory=dict, init=False)
    _paused: bool = field(default=False, init=False)
    _failure: BaseException | None = field(default=None, init=False)
    _changed: asyncio.Event = field(default_factory=asyncio.Event, init=False)

    async def place(self, episode: str) -> EpisodePin:
        """Where an episode begins, as soon as an engine is open. Raises what a transfer met."""
        while True:
            pin = self.placement.begin(episode)
            if pin is not None:
                return pin
            await self._change()

    def move(self, episode: str) -> EpisodePin | None:
        """Where an episode goes on between two turns, if that is another engine; its own may then take
        weights."""
        pin = self.placement.move(episode)
        if pin is not None:
            self._settle()
        return pin

    def release(self, episode: str) -> None:
        """An episode is over."""
        self.placement.end(episode)
        self._settle()

    async def served(self, beyond: int) -> int:
        """The version than which no episode begins on an older one, once it is more than `beyond`.

        Raises what a transfer met.
        """
        while self.placement.floor <= beyond:
            await self._change()
        return self.placement.floor

    async def catch_up(self) -> None:
        """Let episodes begin on the newest weights alone, and wait until the first engine has them."""
        self.placement.serve_newest()
        self._settle()
        while not self.placement.open:
            await self._change()

    async def offer(self, check: WeightCheck, state: Mapping[str, torch.Tensor]) -> None:
        """Keep weights, which each replica takes and proves when its episodes have ended."""
        async with self.quiet():
            await self.hold(check.version, state)
            self._check = check
            self.placement.publish(check.version)

    @asynccontextmanager
    async def quiet(self) -> AsyncIterator[None]:
        """No weights are on their way for the time of the block; waits for those that are."""
        self._paused = True
        try:
            await asyncio.gather(*self._transfers.values(), return_exceptions=True)
            yield
        finally:
            self._paused = False
            self._settle()

    def change(self) -> None:
        """An engine has joined or left."""
        self._settle()

    async def empty(self, url: str) -> None:
        """Let no more episodes begin at an address, and wait until those that are there have ended."""
        self.placement.leaving.add(url)
        try:
            self._settle()
            while not self.placement.is_empty(url):
                await self._change()
        finally:
            self.placement.leaving.discard(url)

    def close(self) -> None:
        """End what is on its way."""
        self._paused = True
        for task in self._transfers.values():
            task.cancel()

    def _settle(self) -> None:
        """Begin the transfers that may begin, and wake up whoever waits for a change."""
        for replica in () if self._paused else self.placement.settle():
            assert self._check is not None
            self.placement.taking.add(replica)
            task = asyncio.get_running_loop().create_task(self._give(replica, self._check))
            self._transfers[replica] = task
            task.add_done_callback(partial(self._after, replica))
        self._changed.set()

    async def _give(self, replica: Replica, check: WeightCheck) -> None:
        try:
            async with asyncio.timeout(check.deadline_s):
                await self.give(replica, check)
        except TimeoutError as error:
            raise SyncError(
                f"Sending weights {check.version} to {replica.url} took longer than {check.deadline_s:g} s."
            ) from error
        except EngineError as error:
            if replica.gone or not await self.lives(replica.url):
                replica.gone = True
                return
            raise SyncError(f"{replica.url} refused weights {check.version}: {error}") from error
        log.info("%s has taken weights %d; %s", replica.url, check.version, self._versions())

    def _after(self, replica: Replica, task: asyncio.Task[None]) -> None:
        """A transfer is over. A replica without its proof stays shut."""
        self._transfers.pop(replica, None)
        error = None if task.cancelled() else task.exception()
        if error is None:
            self.placement.taking.discard(replica)
        self._failure = self._failure or error
        self._settle()

    def _versions(self) -> str:
        """Which versions the engines hold, in words."""
        counts = Counter(map(self.placement.held, self.placement.replicas))
        return ", ".join(f"{counts[version]} at version {version}" for version in sorted(counts))

    async def _change(self) -> None:
        """Wait until something has changed. Raises what a transfer met."""
        if self._failure is None:
            self._changed.clear()
            await self._changed.wait()
        if self._failure is not None:
            raise self._failure
