"""The roles of one kind, kept at their number.

Takes a number to keep, and whatever starts one. Gives the members that are ready. Waits for each of them to
answer a ping every second, also while it is let in and while it leaves: one that is silent for too long, or
has ended, is lost, ended, and replaced. Never lists a member before `joined` has let it in, nor once `left`
is told. Where one cannot be replaced it goes on with fewer, and tries again. Where the first ones do not
start, or none is left and more were lost than may be, it is `failed`: whoever waits for a member then hears
why.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field

from ludus.cluster.handles import WorkerHandle
from ludus.cluster.protocol import Heartbeat, Ping, Shutdown, Started, StartRole, failed
from ludus.errors import LudusError

_PULSE_S = 1.0
_GOODBYE_S = 5.0
_DRAIN_S = 600.0
"""How long what is under way at a member that leaves may take."""

log = logging.getLogger("ludus.cluster")


@dataclass(eq=False)
class PoolMember:
    """A role that is ready. `busy` counts the calls that are under way from here. One that `leaves` ends its
    work first; others that are not kept any more are dead."""

    number: int
    remote: WorkerHandle
    started: Started
    busy: int = 0
    serial: int = -1
    leaves: bool = False
    since: float = field(default_factory=time.monotonic)
    pulse: Heartbeat = field(default_factory=Heartbeat)
    watch: asyncio.Task[None] | None = None


@dataclass(frozen=True)
class PoolLimits:
    """`start_s` bounds a start, `silence_s` each ping, `restarts` the losses that are made good one after
    another: they are forgotten where a member has lived for `proven_s`. Between starts that fail it waits for
    `wait_s`, twice as long each time, and never longer than `longest_wait_s`."""

    start_s: float
    silence_s: float
    restarts: int
    proven_s: float = 600.0
    wait_s: float = 1.0
    longest_wait_s: float = 30.0


@dataclass
class WorkerPool:
    """Members by their number. `start` makes a process for the role of a number."""

    kind: str
    target: int
    start: Callable[[int], Awaitable[WorkerHandle]]
    limits: PoolLimits
    joined: Callable[[PoolMember], Awaitable[None]]
    left: Callable[[PoolMember], Coroutine[None, None, None]]
    members: dict[int, PoolMember] = field(default_factory=dict)
    num_lost: int = 0
    num_gone: int = 0
    """Members that were lost, or left."""
    failed: LudusError | None = None
    _number: int = 0
    _ever: bool = False
    _closed: bool = False
    _lost_in_a_row: int = 0
    _starting: set[asyncio.Task[None]] = field(default_factory=set)
    _failing: set[asyncio.Task[None]] = field(default_factory=set)
    _leaving: set[asyncio.Task[None]] = field(default_factory=set)
    _ending: set[asyncio.Task[None]] = field(default_factory=set)
    _changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    def keep(self) -> None:
        """Start what is missing, and let go of what is too much."""
        if self.failed is not None or self._closed:
            return
        for _ in range(self.target - len(self.members) - len(self._starting)):
            task = asyncio.create_task(self._fill())
            self._starting.add(task)
            task.add_done_callback(self._starting.discard)
            task.add_done_callback(self._failing.discard)
        too_many = max(0, len(self.members) - self.target)
        for member in sorted(self.members.values(), key=lambda m: m.busy)[:too_many]:
            self.let_go(member)

    async def full(self) -> None:
        """Wait until all that are wanted are ready, or some of them where the others do not start: these are
        tried again. Raises what it failed by."""

        def holds() -> bool:
            tried = len(self.members) + len(self._failing)
            return len(self.members) >= self.target or (bool(self.members) and tried >= self.target)

        await self._until(holds)

    async def some(self) -> None:
        """Wait until one is ready. Raises what it failed by."""
        await self._until(lambda: bool(self.members))

    async def take(self, most: int) -> PoolMember:
        """The least busy member with fewer than `most` calls under way; it has one more then."""
        await self._until(lambda: any(m.busy < most for m in self.members.values()))
        member = min(self.members.values(), key=lambda m: (m.busy, m.number))
        member.busy += 1
        return member

    async def give_back(self, member: PoolMember) -> None:
        """A call is over."""
        member.busy -= 1
        await self._tell()

    async def check(self) -> None:
        """Ask every member at once whether it is there."""
        await asyncio.gather(*(self._ping(member) for member in tuple(self.members.values())))

    async def lose(self, member: PoolMember, error: LudusError) -> None:
        """End a member that does not answer, and replace it, also where whoever calls is cancelled."""
        if self.members.get(member.number) is not member:
            return
        log.warning("%s %d is lost, and another one is started: %s", self.kind, member.number, error)
        self._count_loss()
        self._drop(member)
        await self._fail_if_over(error)
        self.later(self.left(member))
        ending = asyncio.create_task(self._end(member))
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)
        await asyncio.shield(ending)

    def retire(self, member: PoolMember, error: LudusError) -> None:
        """Replace a member that can take no more work: what is under way there ends first. It is no loss."""
        if self.members.get(member.number) is not member:
            return
        log.warning("%s %d is replaced: %s", self.kind, member.number, error)
        self.let_go(member)
        self.keep()

    async def doubt(self, member: PoolMember, error: LudusError) -> None:
        """A call at a member has failed: lose it, unless the call was late and the member answers a ping."""
        if isinstance(error.__cause__, TimeoutError):
            await self._ping(member)
        else:
            await self.lose(member, error)

    async def close(self) -> None:
        """Have all members stop, and see to it that they do."""
        self.target = 0
        self._closed = True
        for task in (*self._starting, *self._leaving):
            task.cancel()
        await asyncio.gather(*self._starting, *self._leaving, *self._ending, return_exceptions=True)
        members = tuple(self.members.values())
        for member in members:
            self._drop(member)
        await asyncio.gather(*(self._stop(member.remote) for member in members))

    async def _fill(self) -> None:
        """Have one more member, however often it takes while one is wanted."""
        task, wait_s = asyncio.current_task(), self.limits.wait_s
        assert task is not None
        while not await self._start() and self.failed is None:
            self._failing.add(task)
            await self._tell()
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, self.limits.longest_wait_s)
            if len(self.members) + len(self._starting) > self.target:
                break
        self._starting.discard(task)
        self._failing.discard(task)
        self.keep()
        await self._tell()

    async def _start(self) -> bool:
        """Whether a member has started."""
        remote: WorkerHandle | None = None
        number = self._number
        self._number += 1
        try:
            remote = await self.start(number)
            started = await remote.call(StartRole(), self.limits.start_s)
            assert isinstance(started, Started)
            member = PoolMember(number, remote, started)
            await self._while_it_answers(member, self._join(member))
        except asyncio.CancelledError:
            if remote is not None:
                await remote.kill()
            raise
        except Exception as error:  # boundary: whoever waits for a member raises the cause
            if remote is not None:
                await remote.kill()
            await self._not_started(number, failed(error).error or LudusError(str(error)))
            return False
        return True

    async def _while_it_answers(self, member: PoolMember, work: Coroutine[None, None, None]) -> None:
        """Do something about a member, as long as that answers. Raises what this or a ping meets."""
        doing = asyncio.create_task(work)
        silence = asyncio.create_task(self._silence(member))
        try:
            await asyncio.wait({doing, silence}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            doing.cancel()
            silence.cancel()
            await asyncio.wait({doing, silence})
        if doing.cancelled():
            raise silence.result()
        doing.result()

    async def _join(self, member: PoolMember) -> None:
        """Nothing may come between `joined` and the list: a member hears of all that comes later."""
        await self.joined(member)
        self._ever = True
        self.members[member.number] = member
        member.watch = asyncio.create_task(self._watch(member))
        where = member.started
        log.info("%s %d runs at %s (%d)", self.kind, member.number, where.host, where.pid)

    async def _silence(self, member: PoolMember) -> LudusError:
        """What a ping meets, once a member does not answer one any more."""
        while True:
            await asyncio.sleep(_PULSE_S)
            try:
                await member.remote.call(Ping(), self.limits.silence_s)
            except LudusError as error:
                return error

    async def _end(self, member: PoolMember) -> None:
        await member.remote.kill()
        self.keep()
        await self._tell()

    async def _not_started(self, number: int, error: LudusError) -> None:
        log.warning("%s %d did not start: %s", self.kind, number, error)
        self._count_loss()
        await self._fail_if_over(error)

    def _count_loss(self) -> None:
        now = time.monotonic()
        if any(now - member.since >= self.limits.proven_s for member in self.members.values()):
            self._lost_in_a_row = 0
        self._lost_in_a_row += 1
        self.num_lost += 1

    async def _fail_if_over(self, error: LudusError) -> None:
        """Go on, unless nobody is there and losses do not end, or the first ones have not started: then
        whoever started the run has to hear of it."""
        if not self._ever or (not self.members and self._lost_in_a_row > self.limits.restarts):
            await self._fail(error)

    async def _fail(self, error: LudusError) -> None:
        self.failed = type(error)(
            f"The cluster has no {self.kind} to go on with: {error.message}", error.hint
        )
        await self._tell()

    async def _watch(self, member: PoolMember) -> None:
        while self.members.get(member.number) is member:
            await self._ping(member)
            await asyncio.sleep(_PULSE_S)

    async def _ping(self, member: PoolMember) -> None:
        try:
            pulse = await member.remote.call(Ping(), self.limits.silence_s)
        except LudusError as error:
            self.later(self.lose(member, error))
            return
        assert isinstance(pulse, Heartbeat)
        member.pulse = pulse

    def _drop(self, member: PoolMember) -> None:
        self.members.pop(member.number, None)
        self.num_gone += 1
        if member.watch is not None and member.watch is not asyncio.current_task():
            member.watch.cancel()

    def let_go(self, member: PoolMember) -> None:
        """Have a member end its work, and stop it."""
        member.leaves = True
        self._drop(member)
        self.later(self._drain(member))

    async def _drain(self, member: PoolMember) -> None:
        """Let what is under way at a member end, then stop it."""
        try:
            async with asyncio.timeout(_DRAIN_S):
                await self._while_it_answers(member, self.left(member))
                while await self._under_way(member) or member.busy:
                    await asyncio.sleep(_PULSE_S / 4)
        except (TimeoutError, LudusError) as error:
            log.warning("%s %d leaves before its work is done: %s", self.kind, member.number, error)
        finally:
            await self._stop(member.remote)

    async def _under_way(self, member: PoolMember) -> int:
        pulse = await member.remote.call(Ping(), self.limits.silence_s)
        assert isinstance(pulse, Heartbeat)
        return pulse.under_way

    async def _stop(self, remote: WorkerHandle) -> None:
        try:
            await remote.call(Shutdown(), _GOODBYE_S)
        except LudusError as error:
            log.info("a %s did not stop by itself: %s", self.kind, error)
        finally:
            await remote.kill()

    async def _until(self, holds: Callable[[], bool]) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: self.failed is not None or holds())
        if self.failed is not None:
            raise self.failed

    async def _tell(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    def later(self, work: Coroutine[None, None, None]) -> None:
        """Do something beside all else, before the pool closes."""
        task = asyncio.create_task(work)
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)
