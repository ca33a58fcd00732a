"""Route each episode's requests to a replica, and track and abort running requests.

A server ignores an abort for a request that it has not received yet, so the abort is retried until the request ends.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from ludus.engines.base import Request
from ludus.engines.remote.api_adapters import ApiAdapter
from ludus.engines.remote.http_client import Replica
from ludus.engines.remote.rolling_update import EpisodePin
from ludus.errors import EngineError

_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.05, 1.0

log = logging.getLogger("ludus.server")


@dataclass
class Router:
    """The replicas of one client (modified in place), removed ones, and the replica of each episode."""

    replicas: list[Replica]
    removed: list[Replica] = field(default_factory=list)
    _by_episode: dict[str, Replica] = field(default_factory=dict)
    pins: dict[str, EpisodePin] = field(default_factory=dict)

    def pin(self, episode: str, pin: EpisodePin) -> None:
        """Pin an episode to a replica and version until released or pinned again."""
        self.pins[episode] = pin
        self._by_episode.pop(episode, None)

    def of(self, episode: str) -> Replica:
        """Return the episode's replica: its previous or the least loaded one. Raises EngineError if there is none."""
        pin = self.pins.get(episode)
        if pin is not None:
            pinned = next((one for one in self.replicas if one.url == pin.url), None)
            if pinned is None:
                raise EngineError(f"{pin.url} was removed; its episodes are pinned to version {pin.version}.")
            return pinned
        previous = self._by_episode.get(episode)
        if previous is not None and not previous.is_down:
            return previous
        if not self.replicas:
            raise EngineError("No inference server is left: all were removed.")
        return min(self.replicas, key=lambda replica: (replica.is_down, replica.load))

    def is_new(self, episode: str) -> bool:
        """Return whether the episode has no replica yet."""
        return episode not in self._by_episode

    def assign(self, episode: str, replica: Replica) -> None:
        """Route the episode's next request to the same replica, unless it was removed."""
        if not replica.removed:
            self._by_episode[episode] = replica

    def release(self, episode: str) -> None:
        """Remove an episode's routing and pin."""
        self._by_episode.pop(episode, None)
        self.pins.pop(episode, None)

    def remove(self, url: str) -> None:
        """Remove a replica: requests waiting to reconnect fail, and episodes move to others."""
        for replica in [one for one in self.replicas if one.url == url]:
            replica.remove()
            self.replicas.remove(replica)
            self.removed.append(replica)
            self._by_episode = {e: r for e, r in self._by_episode.items() if r is not replica}


@dataclass(eq=False)
class InflightRequest:
    """A running request. `name` is its id at the server, "" before sending."""

    replica: Replica
    name: str = ""
    aborted: bool = False
    done: asyncio.Event = field(default_factory=asyncio.Event)


class InflightRequests:
    """Running requests by episode. Their names begin with `prefix`."""

    def __init__(self, api: ApiAdapter, prefix: str) -> None:
        self._api = api
        self._prefix = prefix
        self._num_names = 0
        self._by_episode: dict[str, set[InflightRequest]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def new_name(self) -> str:
        """Return a unique request name."""
        self._num_names += 1
        return f"{self._prefix}-{self._num_names}"

    @contextmanager
    def track(self, replica: Replica, request: Request) -> Iterator[InflightRequest]:
        """Register a request during the block; abort it after its `timeout_s`."""
        call = InflightRequest(replica)
        calls = self._by_episode.setdefault(request.episode, set())
        calls.add(call)
        timer: asyncio.TimerHandle | None = None
        if request.timeout_s is not None:
            timer = asyncio.get_running_loop().call_later(request.timeout_s, self._abort, call)
        try:
            yield call
        finally:
            call.done.set()
            if timer is not None:
                timer.cancel()
            calls.discard(call)
            if not calls:
                self._by_episode.pop(request.episode, None)

    def abort(self, episode: str) -> None:
        """Abort the episode's requests; they return the tokens so far."""
        for call in self._by_episode.get(episode, ()):
            self._abort(call)

    def close(self) -> None:
        """Stop retrying aborts."""
        for task in tuple(self._tasks):
            task.cancel()

    def _abort(self, call: InflightRequest) -> None:
        if call.aborted:
            return
        call.aborted = True
        task = asyncio.get_running_loop().create_task(self._end(call))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _end(self, call: InflightRequest) -> None:
        """Retry the abort with growing delays until the request ends."""
        wait_s = _FIRST_WAIT_S
        while not call.done.is_set():
            if call.name:
                try:
                    await self._api.abort(call.replica, call.name)
                except EngineError as error:
                    log.warning("failed to abort a request: %s", error.message)
                    return
            with suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await call.done.wait()
            wait_s = min(2 * wait_s, _LONGEST_WAIT_S)
