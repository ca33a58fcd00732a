"""Where rewards are computed: not on the event loop, and in a process of their own.

Takes trajectories that were played. Gives them with their rewards, one after another for each process, so
that a slow verifier holds up neither engine nor tools, and one that hangs ends at `rollout.reward_timeout_s`.
Waits for the scoring alone: the clock starts when a process has begun with it. Raises WorldError for what a
reward raises and for one that is late, by the place where it was, and goes on in a fresh process. What other
processes cannot know is scored on a thread of this one, and a warning says so: rewards that are an
episode's own, tasks of types that are defined here.
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
"""How long a process may take until it has its world."""
_SPARE_S = 30.0
"""After its deadline a process that has not ended itself counts as lost."""
_DEPTH = 4
"""What one process is asked before it has answered."""
_FRAME = re.compile(r'File "([^"]*)", line (\d+) in (\S+)')

log = logging.getLogger("ludus.rewards")


class RewardExecutor(Protocol):
    """Interface of reward executors."""

    async def scored(
        self, world: World, environment: Environment | None, task: Task, trajectory: Trajectory
    ) -> Trajectory:
        """The trajectory with its rewards: those of its environment, or of the world where none is given.

        Its `timings.grading_s` grows by what they took. Raises WorldError with the words of what a reward
        raises, RewardTimeout for one that takes too long.
        """
        ...


class RewardFault(WorldError):
    """Raised if a reward timed out or its process exited: an infrastructure failure."""

    part = "reward"


class RewardTimeout(RewardFault):
    """A reward took longer than `rollout.reward_timeout_s`."""


@dataclass
class _Turns:
    """So many at a time on one event loop; whoever has been used on another one starts anew."""

    places: int
    _loop: asyncio.AbstractEventLoop | None = None
    _places: asyncio.Semaphore = field(init=False)
    _lock: asyncio.Lock = field(init=False)

    def one(self) -> asyncio.Semaphore:
        """Held by whoever has a turn."""
        if self.is_elsewhere():
            self._loop = asyncio.get_running_loop()
            self._places, self._lock = asyncio.Semaphore(self.places), asyncio.Lock()
        return self._places

    def beginning(self) -> asyncio.Lock:
        """Held, within a turn, by whoever may begin something."""
        return self._lock

    def is_elsewhere(self) -> bool:
        """Whether it is not of the event loop that runs."""
        return self._loop is not asyncio.get_running_loop()


@dataclass
class ThreadRewardExecutor:
    """On threads of this process, one at a time: the event loop goes on, unless a reward keeps the
    interpreter to itself. One that is late goes on unheard."""

    timeout_s: float = 120.0
    _turns: _Turns = field(default_factory=lambda: _Turns(1))

    async def scored(
        self, world: World, environment: Environment | None, task: Task, trajectory: Trajectory
    ) -> Trajectory:
        """As `RewardExecutor.scored`."""
        verifiers = Verifiers(_rewards(world, environment))
        return _with(trajectory, await self.judged(verifiers, ScoreRequest(task, trajectory)))

    async def judged(self, verifiers: Verifiers, asked: ScoreRequest) -> ScoredEpisode:
        """What the rewards give. Raises as `RewardExecutor.scored`."""
        async with self._turns.one():
            work = asyncio.wrap_future(_on_a_thread(verifiers, asked))
            await asyncio.wait({work}, timeout=self.timeout_s)
            if work.done():
                return work.result()
            work.cancel()
            raise _late(asked.task, self.timeout_s) from TimeoutError()


def _rewards(world: World, environment: Environment | None) -> Sequence[Reward]:
    return world.rewards if environment is None else environment.rewards


def _with(trajectory: Trajectory, found: ScoredEpisode) -> Trajectory:
    return graded(replace(trajectory, rewards=found.parts, reward=found.total), found.seconds)


def graded(trajectory: Trajectory, seconds: float) -> Trajectory:
    """With so many seconds more of computing its rewards."""
    before = trajectory.timings
    return replace(trajectory, timings=replace(before, grading_s=before.grading_s + seconds))


def waited(trajectory: Trajectory, seconds: float) -> Trajectory:
    """With so many seconds more until it had its rewards."""
    before = trajectory.timings
    return replace(trajectory, timings=replace(before, scoring_s=before.scoring_s + seconds))


def places(config: Config) -> int:
    """How many episodes a run computes the rewards of at once."""
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
        except BaseException as error:  # boundary: it is raised where the future is waited for
            future.set_exception(error)

    Thread(target=work, name="rewards", daemon=True).start()
    return future


def _late(task: Task, timeout_s: float, words: str = "") -> RewardTimeout:
    """`words` are the Python frames of the process, the innermost first."""
    found = [_FRAME.search(line) for line in words.splitlines()]
    frames = [frame.groups() for frame in found if frame]
    score = next((i for i, (_, _, name) in enumerate(frames) if name == "score"), 0)
    inner = frames[:score]
    where = f": {inner[-1][2]}, at {inner[0][0]}, line {inner[0][1]}" if inner else ""
    return RewardTimeout(
        f"The rewards of task {task.id} took longer than {timeout_s:g} s{where}.",
        "Bound what they do, or see rollout.reward_timeout_s.",
    )


class _Lost(Exception):
    """Raised if a process exited or timed out during a request; holds its last output."""


class _Gone(Exception):
    """Raised if the reward process exited before scoring."""


@dataclass(eq=False)
class _Line:
    """A process that scores, at the other end of a socket that does not block.

    It is asked before it has answered, and answers in order: it need not wait for this process to wake up.
    `closed` once it is no use any more. The socket goes when nobody is at it: a number that is used again
    would leave whoever still waits asleep.
    """

    ours: socket.socket
    under_way: int = 0
    closed: bool = False
    _given_up: bool = False
    _writing: asyncio.Lock = field(default_factory=asyncio.Lock)
    _reading: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def ask(self, said: bytes, wait_s: float) -> object:
        """What it answers. Raises _Lost where it ends at this, or says nothing for so long, and _Gone where
        it ended, or was closed, before it came to this. It is no use any more then, nor where whoever asks is
        cancelled."""
        self.under_way += 1
        try:
            async with self._writing:
                self._check()
                async with asyncio.timeout(wait_s * self.under_way):  # it may score the others first
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
        """Be done with it: whoever writes to it or reads from it wakes up, with _Gone."""
        self.closed = self._given_up = True
        with suppress(OSError):  # it is closed already, or its other end is
            self.ours.shutdown(socket.SHUT_RDWR)
        if not self.under_way:
            self.ours.close()

    async def _send(self, said: bytes) -> None:
        """Raises _Gone where it has ended at what was asked before: its last words are for who asked it."""
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
        """So many bytes, or all until the end. Raises _Lost where the end comes too early, and _Gone where
        that is because the line was closed here."""
        found, loop = bytearray(), asyncio.get_running_loop()
        while count is None or len(found) < count:
            try:
                size = 65536 if count is None else min(count - len(found), 1 << 20)
                more = await loop.sock_recv(self.ours, size)
            except ConnectionResetError:  # its end, where it had not read all that it was asked
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
    """In at most `processes` processes, started when they are needed; with none, on a thread of this one."""

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
        """That of a run's settings."""
        sections = (config.env, config.rollout, config.sandbox, config.rewards)
        return cls(WorldLocation(*sections, os.getcwd(), tuple(sys.path)), config.rollout.reward_processes)

    async def scored(
        self, world: World, environment: Environment | None, task: Task, trajectory: Trajectory
    ) -> Trajectory:
        """As `RewardExecutor.scored`."""
        rewards, why = _rewards(world, environment), ""
        if environment is not None:
            try:
                check_scored_elsewhere(world.rewards, rewards, environment)
            except ConfigError as error:
                why = error.message
        return _with(trajectory, await self._judged(world, Verifiers(rewards), ScoreRequest(task, trajectory), why))

    async def with_added(self, world: World, task: Task, trajectory: Trajectory) -> Trajectory:
        """With what the section `rewards` has judged (`added_verifiers`): the parts, whose sum takes the
        place of the reward, and the progress of the turns. Raises as `RewardExecutor.scored`."""
        verifiers = added_verifiers(self.place.rewards, world)
        found = await self._judged(world, verifiers, ScoreRequest(task, trajectory, added=True))
        parts = {**trajectory.rewards, **found.parts}
        return replace(_with(trajectory, found), rewards=parts, turn_progress=found.turns)

    async def _judged(self, world: World, verifiers: Verifiers, asked: ScoreRequest, why: str = "") -> ScoredEpisode:
        """`why`: what keeps the verifiers in this process; empty where nothing does."""
        reply = await self._reply(world, asked) if self.processes and not why else UnreadableRequest(why)
        match reply:
            case ScoredEpisode():
                return reply
            case RewardFailed():
                raise reply.error from TimeoutError() if reply.late else None
            case UnreadableRequest() if self.processes and reply.why != self._why_here:
                self._why_here = reply.why
                log.warning("Rewards are computed in this process, which may hold it up: %s", reply.why)
        return await self._here.judged(verifiers, asked)

    async def _reply(self, world: World, question: ScoreRequest) -> ScoredEpisode | RewardFailed | UnreadableRequest:
        task = question.task
        try:
            asked = pickle.dumps(question)
        except Exception as error:  # boundary: foreign types; they are scored where they are known
            return UnreadableRequest(
                f"Task {task.id} cannot be sent to another process ({type(error).__name__}: {error})."
            )
        if self._turns.is_elsewhere():
            _close(self._lines)  # their locks are of another event loop
        async with self._turns.one():
            while True:
                line = await self._line(world)
                if isinstance(line, UnreadableRequest):
                    return line
                with suppress(_Gone):
                    return await self._answer(line, task, asked)

    async def _line(self, world: World) -> _Line | UnreadableRequest:
        """The least busy process, or a new one where all are busy."""
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
            reply = await line.ask(asked, timeout_s + _SPARE_S)
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
            reply = await line.ask(pickle.dumps(self.place), START_S)
        except (_Lost, _Gone) as lost:
            raise RewardFault("The reward process does not start.", "Is memory short?") from lost
        if isinstance(reply, RewardsReady) and reply.parts == parts_of(world):
            return line
        line.close()
        if isinstance(reply, RewardFailed):
            return UnreadableRequest(f"The world cannot be made a second time: {reply.error.message}")
        return UnreadableRequest("The world of the settings has other rewards than the one that is played.")


def _close(lines: list[_Line]) -> None:
    for line in lines:
        line.close()


@functools.cache
def _forks(pid: int) -> _Forks:
    """That of this process; one that was forked off has its own."""
    del pid
    return _Forks()


@dataclass
class _Forks:
    """The process that forks those that score, started when the first is wanted."""

    _asked: socket.socket | None = None
    _running: subprocess.Popen[bytes] | None = None
    _lock: Lock = field(default_factory=Lock)

    def send(self, place: WorldLocation, line: int) -> None:
        """Have a process answer on this socket."""
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
