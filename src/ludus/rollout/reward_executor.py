"""Reward executors: compute rewards off the event loop, in separate processes or on a thread.

Each process scores one trajectory after another, so that a slow verifier blocks neither engine nor tools, and
one that hangs is ended after `rollout.reward_timeout_s`; the clock starts when the process starts scoring.
Raises WorldError for an error of a reward and for a timeout, naming the place, and continues in a fresh
process. Rewards that cannot be sent to another process (an episode's own rewards, tasks of types defined in
this process) are computed on a thread of this one, with a warning.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import pickle
import re
import socket
import subprocess
import sys
import weakref
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from threading import Lock, Thread
from typing import Protocol

from ludus.config.schema import Config
from ludus.envs.base import Environment, World
from ludus.errors import ConfigError, WorldError
from ludus.ipc import LENGTH, frame, python_command
from ludus.rewards.base import Reward, check_scored_elsewhere
from ludus.rollout.reward_process import (
    LATE,
    RewardFailed,
    RewardsReady,
    ScoredEpisode,
    ScoreRequest,
    UnreadableRequest,
    Verifiers,
    WorldLocation,
    added_verifiers,
    parts_of,
)
from ludus.types import Task, Trajectory

START_S = 120.0
"""Timeout for a process to build its world."""
_SPARE_S = 30.0
"""Time after its deadline at which a process counts as lost."""
_DEPTH = 4
"""Requests pipelined to one process."""
_FRAME = re.compile(r'File "([^"]*)", line (\d+) in (\S+)')

log = logging.getLogger("ludus.rewards")


class RewardExecutor(Protocol):
    """Interface of reward executors."""

    async def scored(
        self, world: World, environment: Environment | None, task: Task, trajectory: Trajectory
    ) -> Trajectory:
        """Return the trajectory with the rewards of its environment, or of the world if it is None.

        Adds the duration to `timings.grading_s`. Raises WorldError with the error of a reward, RewardTimeout if one
        takes too long.
        """
        ...


class RewardFault(WorldError):
    """Raised if a reward timed out or its process exited: an infrastructure failure."""

    part = "reward"


class RewardTimeout(RewardFault):
    """A reward took longer than `rollout.reward_timeout_s`."""


@dataclass
class _Turns:
    """Semaphore of `places` slots on one event loop; reset if used on another one."""

    places: int
    _loop: asyncio.AbstractEventLoop | None = None
    _places: asyncio.Semaphore = field(init=False)
    _lock: asyncio.Lock = field(init=False)

    def one(self) -> asyncio.Semaphore:
        """Return the semaphore of slots."""
        if self.is_elsewhere():
            self._loop = asyncio.get_running_loop()
            self._places, self._lock = asyncio.Semaphore(self.places), asyncio.Lock()
        return self._places

    def beginning(self) -> asyncio.Lock:
        """Return the lock to hold, within a slot, while starting a process."""
        return self._lock

    def is_elsewhere(self) -> bool:
        """Return whether it belongs to an event loop other than the running one."""
        return self._loop is not asyncio.get_running_loop()


@dataclass
class ThreadRewardExecutor:
    """Compute rewards on threads of this process, one at a time.

    The event loop continues unless a reward holds the interpreter lock. A reward that timed out keeps running, and
    its result is ignored.
    """

    timeout_s: float = 120.0
    _turns: _Turns = field(default_factory=lambda: _Turns(1))

    async def scored(
        self, world: World, environment: Environment | None, task: Task, trajectory: Trajectory
    ) -> Trajectory:
        verifiers = Verifiers(_rewards_of(world, environment))
        return _with(trajectory, await self.judged(verifiers, ScoreRequest(task, trajectory)))

    async def judged(self, verifiers: Verifiers, asked: ScoreRequest) -> ScoredEpisode:
        """Return the result of the verifiers. Raises as `RewardExecutor.scored`."""
        async with self._turns.one():
            work = asyncio.wrap_future(_on_a_thread(verifiers, asked))
            await asyncio.wait({work}, timeout=self.timeout_s)
            if work.done():
                return work.result()
            work.cancel()
            raise _late(asked.task, self.timeout_s) from TimeoutError()


def _rewards_of(world: World, environment: Environment | None) -> Sequence[Reward]:
    return world.rewards if environment is None else environment.rewards


def _with(trajectory: Trajectory, found: ScoredEpisode) -> Trajectory:
    return graded(replace(trajectory, rewards=found.parts, reward=found.total), found.seconds)


def graded(trajectory: Trajectory, seconds: float) -> Trajectory:
    """Return the trajectory with `seconds` added to the time spent computing its rewards."""
    before = trajectory.timings
    return replace(trajectory, timings=replace(before, grading_s=before.grading_s + seconds))


def waited(trajectory: Trajectory, seconds: float) -> Trajectory:
    """Return the trajectory with `seconds` added to the time spent waiting for its rewards."""
    before = trajectory.timings
    return replace(trajectory, timings=replace(before, scoring_s=before.scoring_s + seconds))


def places(config: Config) -> int:
    """Return how many episodes of a run can be scored concurrently."""
    cluster, own = config.cluster, max(1, config.rollout.reward_processes)
    if not cluster.enabled:
        return own
    if cluster.reward_workers:
        return cluster.reward_workers * cluster.scorings_per_worker
    return cluster.workers * own


def _on_a_thread(verifiers: Verifiers, asked: ScoreRequest) -> Future[ScoredEpisode]:
    future: Future[ScoredEpisode] = Future()
    future.set_running_or_notify_cancel()

    def work() -> None:
        try:
            future.set_result(verifiers.judge(asked))
        except BaseException as error:  # boundary: raised in the task that awaits the future
            future.set_exception(error)

    Thread(target=work, name="rewards", daemon=True).start()
    return future


def _late(task: Task, timeout_s: float, words: str = "") -> RewardTimeout:
    """Return the timeout error; `words` are the Python frames of the process, innermost first."""
    found = [_FRAME.search(line) for line in words.splitlines()]
    frames = [frame.groups() for frame in found if frame]
    score = next((i for i, (_, _, name) in enumerate(frames) if name == "score"), 0)
    inner = frames[:score]
    where = f": {inner[-1][2]}, at {inner[0][0]}, line {inner[0][1]}" if inner else ""
    return RewardTimeout(
        f"The rewards of task {task.id} took longer than {timeout_s:g} s{where}.",
        "Bound their work, or raise rollout.reward_timeout_s.",
    )


class _Lost(Exception):
    """Raised if a process exited or timed out during a request; holds its last output."""


class _Gone(Exception):
    """Raised if the reward process exited before scoring."""


@dataclass(eq=False)
class _Line:
    """Reward process at the other end of a non-blocking socket.

    Requests are pipelined and answered in order, so the process need not wait for this one to wake up. `closed` if
    it is no longer usable. The socket is closed once no task uses it: a reused file descriptor would leave waiting
    tasks asleep.
    """

    ours: socket.socket
    under_way: int = 0
    closed: bool = False
    _given_up: bool = False
    _writing: asyncio.Lock = field(default_factory=asyncio.Lock)
    _reading: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def request(self, said: bytes, wait_s: float) -> object:
        """Send a request and return the reply.

        Raises _Lost if the process exits during this request or does not reply within `wait_s`, and _Gone if it exited,
        or the line was closed, before this request. In both cases, and on cancellation, the line becomes unusable.
        """
        self.under_way += 1
        try:
            async with self._writing:
                self._check()
                async with asyncio.timeout(wait_s * self.under_way):  # earlier requests are scored first
                    await self._send(frame(said))
            async with self._reading:
                self._check()
                async with asyncio.timeout(wait_s):
                    return await self._reply()
        except _Gone:
            raise
        except BaseException as error:
            self.close()
            if isinstance(error, OSError):  # TimeoutError is one
                raise _Lost("") from error
            raise
        finally:
            self.under_way -= 1
            if self.closed and not self.under_way:
                self.ours.close()

    def close(self) -> None:
        """Shut the line down; pending reads and writes raise _Gone."""
        self.closed = self._given_up = True
        with suppress(OSError):  # already closed, here or at the other end
            self.ours.shutdown(socket.SHUT_RDWR)
        if not self.under_way:
            self.ours.close()

    async def _send(self, said: bytes) -> None:
        """Send bytes. Raises _Gone if the process exited during an earlier request, whose task reads its output."""
        try:
            await asyncio.get_running_loop().sock_sendall(self.ours, said)
        except OSError as error:
            self.closed = True
            raise _Gone from error

    def _check(self) -> None:
        if self.closed:
            raise _Gone

    async def _reply(self) -> object:
        head = await self._bytes(LENGTH.size)
        if LATE.startswith(head):
            raise _Lost((head + await self._bytes(None)).decode("utf-8", "replace"))
        return pickle.loads(await self._bytes(*LENGTH.unpack(head)))

    async def _bytes(self, count: int | None) -> bytes:
        """Return `count` bytes, or all until the end. Raises _Lost if the stream ends early, _Gone if the line was
        closed in this process.
        """
        found, loop = bytearray(), asyncio.get_running_loop()
        while count is None or len(found) < count:
            try:
                size = 65536 if count is None else min(count - len(found), 1 << 20)
                more = await loop.sock_recv(self.ours, size)
            except ConnectionResetError:  # the process exited with unread requests
                more = b""
            if not more and self._given_up:
                raise _Gone
            if not more and count is None:
                break
            if not more:
                raise _Lost("")
            found += more
        return bytes(found)


@dataclass
class ProcessRewardExecutor:
    """Compute rewards in at most `processes` processes, started on demand; with 0, on a thread of this one."""

    place: WorldLocation
    processes: int = 1
    _here: ThreadRewardExecutor = field(init=False)
    _turns: _Turns = field(init=False)
    _lines: list[_Line] = field(default_factory=list, init=False)
    _why_here: str = field(default="", init=False)

    def __post_init__(self) -> None:
        self._here = ThreadRewardExecutor(self.place.rollout.reward_timeout_s)
        self._turns = _Turns(max(1, self.processes) * _DEPTH)
        weakref.finalize(self, _close, self._lines)

    @classmethod
    def of(cls, config: Config) -> ProcessRewardExecutor:
        """Build from the settings of a run."""
        sections = (config.env, config.rollout, config.sandbox, config.rewards)
        return cls(WorldLocation(*sections, os.getcwd(), tuple(sys.path)), config.rollout.reward_processes)

    async def scored(
        self, world: World, environment: Environment | None, task: Task, trajectory: Trajectory
    ) -> Trajectory:
        rewards, why = _rewards_of(world, environment), ""
        if environment is not None:
            try:
                check_scored_elsewhere(world.rewards, rewards, environment)
            except ConfigError as error:
                why = error.message
        return _with(
            trajectory, await self._run_verifiers(world, Verifiers(rewards), ScoreRequest(task, trajectory), why)
        )

    async def with_added(self, world: World, task: Task, trajectory: Trajectory) -> Trajectory:
        """Return the trajectory with the parts and turn progress that the `rewards` settings add (`added_verifiers`).

        The sum of the added parts replaces the reward. Raises as `RewardExecutor.scored`.
        """
        verifiers = added_verifiers(self.place.rewards, world)
        found = await self._run_verifiers(world, verifiers, ScoreRequest(task, trajectory, added=True))
        parts = {**trajectory.rewards, **found.parts}
        return replace(_with(trajectory, found), rewards=parts, turn_progress=found.turns)

    async def _run_verifiers(
        self, world: World, verifiers: Verifiers, asked: ScoreRequest, why: str = ""
    ) -> ScoredEpisode:
        """Return the result of the verifiers; `why` they must run in this process, or an empty string."""
        reply = await self._reply(world, asked) if self.processes and not why else UnreadableRequest(why)
        match reply:
            case ScoredEpisode():
                return reply
            case RewardFailed():
                raise reply.error from TimeoutError() if reply.late else None
            case UnreadableRequest() if self.processes and reply.why != self._why_here:
                self._why_here = reply.why
                log.warning("Rewards are computed in this process and may block it: %s", reply.why)
        return await self._here.judged(verifiers, asked)

    async def _reply(self, world: World, question: ScoreRequest) -> ScoredEpisode | RewardFailed | UnreadableRequest:
        task = question.task
        try:
            asked = pickle.dumps(question)
        except Exception as error:  # boundary: foreign types; scored in this process
            return UnreadableRequest(
                f"Task {task.id} cannot be sent to another process ({type(error).__name__}: {error})."
            )
        if self._turns.is_elsewhere():
            _close(self._lines)  # their locks belong to another event loop
        async with self._turns.one():
            while True:
                line = await self._line(world)
                if isinstance(line, UnreadableRequest):
                    return line
                with suppress(_Gone):
                    return await self._answer(line, task, asked)

    async def _line(self, world: World) -> _Line | UnreadableRequest:
        """Return the least busy process, or a new one if all are busy."""
        async with self._turns.beginning():
            self._lines[:] = [line for line in self._lines if not line.closed]
            best = min(self._lines, key=lambda line: line.under_way, default=None)
            if best is not None and (not best.under_way or len(self._lines) >= self.processes):
                return best
            made = await self._begin(world)
            if isinstance(made, _Line):
                self._lines.append(made)
            return made

    async def _answer(self, line: _Line, task: Task, asked: bytes) -> ScoredEpisode | RewardFailed | UnreadableRequest:
        timeout_s = self.place.rollout.reward_timeout_s
        try:
            reply = await line.request(asked, timeout_s + _SPARE_S)
        except _Lost as lost:
            if str(lost) or isinstance(lost.__cause__, TimeoutError):
                raise _late(task, timeout_s, str(lost)) from TimeoutError()
            raise RewardFault(f"The reward process of task {task.id} has exited.", "Is memory short?") from lost
        assert isinstance(reply, ScoredEpisode | RewardFailed | UnreadableRequest)
        return reply

    async def _begin(self, world: World) -> _Line | UnreadableRequest:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        line = _Line(ours)
        with theirs:
            _forks(os.getpid()).send(self.place, theirs.fileno())
        try:
            reply = await line.request(pickle.dumps(self.place), START_S)
        except (_Lost, _Gone) as lost:
            raise RewardFault("The reward process does not start.", "Is memory short?") from lost
        if isinstance(reply, RewardsReady) and reply.parts == parts_of(world):
            return line
        line.close()
        if isinstance(reply, RewardFailed):
            return UnreadableRequest(f"The world cannot be built a second time: {reply.error.message}")
        return UnreadableRequest("The world built from the settings has different rewards from the run's.")


def _close(lines: list[_Line]) -> None:
    for line in lines:
        line.close()


@functools.cache
def _forks(pid: int) -> _Forks:
    """Return this process's fork server; a forked process has its own."""
    del pid
    return _Forks()


@dataclass
class _Forks:
    """Fork server: the process that forks the reward processes, started on demand."""

    _asked: socket.socket | None = None
    _running: subprocess.Popen[bytes] | None = None
    _lock: Lock = field(default_factory=Lock)

    def send(self, place: WorldLocation, line: int) -> None:
        """Fork a process that answers on this socket."""
        names = ",".join([place.env.name, *(m.world or name for name, m in place.env.mixture.items())])
        with self._lock:
            for last in (False, True):
                asked = self._asked or self._start()
                try:
                    socket.send_fds(asked, [names.encode()], [line])
                    return
                except OSError:
                    asked.close()
                    self._asked = None
                    if last:
                        raise

    def _start(self) -> socket.socket:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = python_command("ludus.rollout.reward_process:fork_on_demand", str(theirs.fileno()))
            self._running = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()])
        self._asked = ours
        return ours
