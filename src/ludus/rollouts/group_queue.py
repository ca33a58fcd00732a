"""Queue of episode groups: groups start as slots become free, and `take` returns batches of complete groups.

`take` waits until the staleness controller admits a batch. At most `in_flight` episodes run; when one ends,
the next starts, oldest group first. Groups are never split or dropped silently: a group that does not count (a
member failed permanently, or a filter removed it) is returned separately from the batch, and another group is
admitted instead. `take` raises errors of episodes; `close` cancels all running ones.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Protocol

from ludus.errors import LudusError
from ludus.rollouts.ledger import RolloutKey
from ludus.rollouts.scheduler import Episode, RolloutRequest
from ludus.rollouts.stream_control import StalenessController, StreamThroughput
from ludus.types import Segment

PAUSE_FACTOR = 1.0  # pause of the engine after a forward pass, as a multiple of the duration of the pass


@dataclass(frozen=True, slots=True)
class StartedEpisode:
    """Paused episode: the key of its attempt and its segments so far."""

    key: RolloutKey
    segments: tuple[Segment, ...]


@dataclass
class StreamedGroup:
    """Requests of a group, its finished and paused (`begun`) episodes by index; `counts` is False if filtered out."""

    number: int
    requests: Sequence[RolloutRequest]
    version: int
    done: dict[int, Episode] = field(default_factory=dict)
    counts: bool = True
    begun: dict[int, StartedEpisode] = field(default_factory=dict)

    @property
    def episodes(self) -> list[Episode]:
        return [self.done[index] for index in sorted(self.done)]


class GroupSource(Protocol):
    """Source and filter of groups."""

    def requests(self, number: int) -> Sequence[RolloutRequest]:
        """Return the requests of a new group."""

    def counts(self, group: Sequence[Episode]) -> bool:
        """Return whether a group counts towards a batch."""


@dataclass(frozen=True, slots=True)
class GroupBatch:
    """Batch of a step: complete groups, oldest first, and filtered or failed groups in `others`."""

    groups: tuple[StreamedGroup, ...]
    others: tuple[StreamedGroup, ...]


@dataclass
class GroupQueue:
    """Run groups of requests. `needed` members of a group suffice (0: all); the others are then cancelled.

    `restored` groups of a checkpoint are sampled again if too stale. `next_number` is the number of
    the next group.
    """

    admission: StalenessController
    source: GroupSource
    run_request: Callable[[RolloutRequest], Awaitable[Episode]]
    in_flight: int
    needed: int = 0
    next_number: int = 0
    restored: Sequence[StreamedGroup] = ()
    on_done: Callable[[Episode], None] | None = None
    late: list[Episode] = field(default_factory=list, init=False)
    """Finished restored episodes whose groups are sampled again."""
    ended: list[Episode] = field(default_factory=list, init=False)
    """Episodes that ended since the last `pop_ended`."""
    held: bool = field(default=False, init=False)
    """Whether the last batch waited for a group that was due although enough others were complete."""
    _groups: dict[int, StreamedGroup] = field(default_factory=dict, init=False)
    _restarts: deque[StreamedGroup] = field(default_factory=deque, init=False)
    _others: list[StreamedGroup] = field(default_factory=list, init=False)
    _pending: deque[tuple[StreamedGroup, int]] = field(default_factory=deque, init=False)
    _running: dict[asyncio.Task[None], tuple[StreamedGroup, int]] = field(default_factory=dict, init=False)
    _changed: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    _failure: BaseException | None = field(default=None, init=False)
    _set_pause: Callable[[float], None] | None = field(default=None, init=False)
    _draining: bool = field(default=False, init=False)
    _num_ready: int = field(default=0, init=False)
    _episode_s: float = field(default=0.0, init=False)
    _measured_at: float = field(default=0.0, init=False)

    def start(self) -> list[Episode]:
        """Restore groups, start episodes up to the limit, and return the restored finished episodes."""
        for group in self.restored:
            if not group.counts:
                self._others.append(group)
            elif self.admission.readmit(group.number, group.version):
                self._add_group(group)
            else:
                self.late += [e for e in group.episodes if e.trajectory.failure is None]
                requests = list(group.requests)
                for index, episode in group.done.items():
                    key = replace(requests[index].key, attempt=episode.key.attempt + 1)
                    requests[index] = replace(requests[index], key=key)
                self._restarts.append(replace(group, requests=requests, done={}))
        going_on = [e for group in (*self._groups.values(), *self._others) for e in group.episodes]
        for group in tuple(self._groups.values()):
            self._end_group(group)
        self._num_ready = 0  # restored groups do not count as throughput
        self._start_pending()
        return going_on

    async def take(self) -> GroupBatch:
        """Wait for the next batch that the staleness controller admits."""
        self.held = False
        self._start_pending()  # the limit may have changed
        while True:
            if self._failure is not None:
                raise self._failure
            if (numbers := self.admission.take()) is not None:
                break
            if not self._running and not self.admission.is_behind:
                raise LudusError("Internal error: no episode is in flight and no batch is complete.")
            self.held = self.held or self.admission.is_held
            self._changed.clear()
            await self._changed.wait()
        others, self._others = tuple(self._others), []
        groups = tuple(self._groups.pop(number) for number in numbers)
        self._start_pending()
        return GroupBatch(groups, others)

    @contextmanager
    def throttled(self, rest: Callable[[float], None]) -> Iterator[None]:
        """Throttle the engine inside the block (the training step) while the next batch is ready and was not due.

        `rest` receives the pause after a pass as a multiple of its duration, and 0 at the end.
        """
        self._set_pause = rest
        self._update_pause()
        try:
            yield
        finally:
            self._set_pause = None
            rest(0.0)

    def on_publish(self, version: int, *, everywhere: bool = True) -> None:
        """Record that the engine (or the first of several) has the weights of the last batch."""
        self.admission.on_publish(version, everywhere=everywhere)
        self._draining = False
        self._start_pending()

    def on_serve(self, version: int) -> None:
        """Record the oldest version on which new episodes may start."""
        self.admission.on_serve(version)
        self._start_pending()
        self._changed.set()

    def fail(self, error: BaseException) -> None:
        """Stop starting episodes and raise this error in `take`."""
        self._failure = self._failure or error
        self._changed.set()

    async def drain(self) -> None:
        """Stop starting episodes until `on_publish`, and wait for running ones."""
        self._draining = True
        while self._running and self._failure is None:
            self._changed.clear()
            await self._changed.wait()

    async def close(self) -> None:
        self._draining = True
        tasks = tuple(self._running)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    @property
    def num_in_flight(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._pending)

    @property
    def is_limited(self) -> bool:
        """Return whether the concurrency limit keeps episodes from starting."""
        return bool(self._pending) or self.admission.capacity > 0

    def in_progress(self) -> list[StreamedGroup]:
        """Return copies of the unfinished and untaken groups, by number."""
        going = [replace(group, done=dict(group.done)) for group in (*self._groups.values(), *self._others)]
        return sorted([*going, *self._restarts], key=lambda group: group.number)

    def pop_ended(self) -> list[Episode]:
        ended, self.ended = self.ended, []
        return ended

    def flow(self) -> StreamThroughput:
        self._measure()
        found = StreamThroughput(self._episode_s, self._num_ready / self.admission.schedule.groups_per_step)
        self._episode_s, self._num_ready = 0.0, 0
        return found

    def _measure(self) -> None:
        now = asyncio.get_running_loop().time()
        self._episode_s += len(self._running) * (now - self._measured_at)
        self._measured_at = now

    def _update_pause(self) -> None:
        if self._set_pause is not None:
            self._set_pause(PAUSE_FACTOR if self.admission.batches_ready and not self.held else 0.0)

    def _start_pending(self) -> None:
        while not self._draining and self._failure is None and len(self._running) < self.in_flight:
            if not self._pending and self.admission.capacity:
                self._admit()
            if not self._pending:
                return
            group, index = self._pending.popleft()
            self._measure()
            task = asyncio.create_task(self._run(group, index))
            self._running[task] = (group, index)
            task.add_done_callback(self._on_episode_done)

    def _admit(self) -> None:
        if self._restarts:
            number, requests = self._restarts[0].number, self._restarts.popleft().requests
        else:
            number, self.next_number = self.next_number, self.next_number + 1
            requests = self.source.requests(number)
        self._add_group(StreamedGroup(number, requests, self.admission.admit(number).version))

    def _add_group(self, group: StreamedGroup) -> None:
        self._groups[group.number] = group
        indices = (index for index in range(len(group.requests)) if index not in group.done)
        self._pending.extend((group, index) for index in indices)

    async def _run(self, group: StreamedGroup, index: int) -> None:
        episode = group.done[index] = await self.run_request(group.requests[index])
        self.ended.append(episode)
        if self.on_done is not None:
            self.on_done(episode)
        self._end_group(group)

    def _end_group(self, group: StreamedGroup) -> None:
        """Finish a group that has enough members: cancel the rest and decide whether it counts."""
        has_all, has_needed = len(group.done) == len(group.requests), self._has_needed(group)
        if not (has_all or has_needed) or group.number not in self._groups:
            return
        if not has_all:
            self._pending = deque((g, index) for g, index in self._pending if g is not group)
            for task, (of, index) in self._running.items():
                if of is group and index not in group.done:
                    task.cancel()
        if has_needed:  # failures were retried and are in the ledger
            group.done = {i: e for i, e in group.done.items() if e.trajectory.failure is None}
        if self.source.counts(group.episodes):
            self.admission.ready(group.number)
            self._num_ready += 1
            self._update_pause()
        else:
            self.admission.discard(group.number)
            group.counts = False
            self._others.append(self._groups.pop(group.number))

    def _has_needed(self, group: StreamedGroup) -> bool:
        succeeded = [episode for episode in group.done.values() if episode.trajectory.failure is None]
        baselines = sum(request.greedy for request in group.requests)
        has_baselines = sum(episode.greedy for episode in succeeded) >= baselines
        return self.needed > 0 and has_baselines and len(succeeded) - baselines >= self.needed

    def _on_episode_done(self, task: asyncio.Task[None]) -> None:
        self._measure()
        self._running.pop(task, None)
        self._failure = self._failure or (None if task.cancelled() else task.exception())
        try:
            self._start_pending()
        except Exception as fill_error:  # boundary: a callback of the loop; `take` raises it
            self._failure = fill_error
        self._changed.set()
