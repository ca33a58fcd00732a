"""Reward executors: compute rewards off the event loop, in separate processes or on a thread.

A process exits if scoring takes longer than `rollout.reward_timeout_s`. Raises WorldError for an error of a reward and
for a timeout, with its source location. Rewards that cannot be pickled (rewards of an episode, tasks of types defined
in this process) are computed on a thread of this process, with a warning.
"""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
import re
import socket
import subprocess
import sys
import weakref
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from threading import Lock
from typing import Protocol
from weakref import WeakKeyDictionary

from ludus.config.schema import Config
from ludus.envs.base import Environment, World
from ludus.errors import ConfigError, WorldError
from ludus.ipc import LENGTH, frame, python_command
from ludus.rewards.base import Reward, check_scored_elsewhere
from ludus.rollouts.reward_process import (
    TIMEOUT_PREFIX,
    Reply,
    RewardFailed,
    ScoredEpisode,
    ScoreRequest,
    UnreadableRequest,
    Verifiers,
    WorldLocation,
    added_verifiers,
    parts_of,
)
from ludus.types import Task, Trajectory
from ludus.untrusted.worker import run_in_thread

START_S = 120.0
"""Timeout for a process to build its world (s)."""
_GRACE_S = 30.0
"""Grace period after the timeout before a process counts as exited (s)."""
_PIPELINE_DEPTH = 4
"""Requests pipelined to one process."""
_FRAME = re.compile(r'File "([^"]*)", line (\d+) in (\S+)')

log = logging.getLogger(__name__)


class RewardExecutor(Protocol):
    """Interface of reward executors."""

    async def scored(
        self, world: World, environment: Environment | None, task: Task, trajectory: Trajectory
    ) -> Trajectory:
        """Return the trajectory with the rewards of its environment, or of the world if it is None.

        Adds to `timings.grading_s`. WorldError: a reward raises; RewardTimeout: scoring times out.
        """


class RewardFault(WorldError):
    """Raised if a reward timed out or its process exited: an infrastructure failure."""

    part = "reward"


class RewardTimeout(RewardFault):
    """Raised if scoring takes longer than `rollout.reward_timeout_s`."""


@dataclass
class ThreadRewardExecutor:
    """Compute rewards on a thread, one at a time. After a timeout the reward continues, and its result is ignored."""

    timeout_s: float = 120.0
    _locks: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock] = field(default_factory=WeakKeyDictionary)

    async def scored(
        self, world: World, environment: Environment | None, task: Task, trajectory: Trajectory
    ) -> Trajectory:
        verifiers = Verifiers(_rewards_of(world, environment))
        return with_rewards(trajectory, await self.run(verifiers, ScoreRequest(task, trajectory)))

    async def run(self, verifiers: Verifiers, request: ScoreRequest) -> ScoredEpisode:
        """Return the result of the verifiers. Raises as `RewardExecutor.scored`."""
        async with self._locks.setdefault(asyncio.get_running_loop(), asyncio.Lock()):
            work = asyncio.wrap_future(run_in_thread("rewards", partial(verifiers.run, request)))
            await asyncio.wait({work}, timeout=self.timeout_s)
            if work.done():
                return work.result()
            work.cancel()
            raise _timeout_error(request.task, self.timeout_s) from TimeoutError()


def _rewards_of(world: World, environment: Environment | None) -> Sequence[Reward]:
    return world.rewards if environment is None else environment.rewards


def with_rewards(trajectory: Trajectory, found: ScoredEpisode) -> Trajectory:
    """Return the trajectory with its rewards and their computing time."""
    return add_seconds(replace(trajectory, rewards=found.parts, reward=found.total), grading=found.seconds)


def add_seconds(trajectory: Trajectory, *, waiting: float = 0.0, grading: float = 0.0) -> Trajectory:
    """Return the trajectory with more time spent waiting for its rewards, and computing them."""
    before = trajectory.timings
    after = replace(before, scoring_s=before.scoring_s + waiting, grading_s=before.grading_s + grading)
    return replace(trajectory, timings=after)


def scoring_concurrency(config: Config) -> int:
    """Return the number of episodes of a run that can be scored concurrently."""
    cluster, processes = config.cluster, max(1, config.rollout.reward_processes)
    if not cluster.enabled:
        return processes
    if cluster.reward_workers:
        return cluster.reward_workers * cluster.scorings_per_worker
    return cluster.workers * processes


def _timeout_error(task: Task, timeout_s: float, stack: str = "") -> RewardTimeout:
    found = [_FRAME.search(line) for line in stack.splitlines()]
    frames = [frame.groups() for frame in found if frame]
    score = next((i for i, (_, _, name) in enumerate(frames) if name == "value_of"), 0)
    inner = frames[:score]
    where = f": {inner[-1][2]}, at {inner[0][0]}, line {inner[0][1]}" if inner else ""
    text = f"The rewards of task {task.id} took longer than {timeout_s:g} s{where}."
    return RewardTimeout(text, "Bound their work, or raise rollout.reward_timeout_s.")


class _ProcessExited(Exception):
    """Raised if a process exited or timed out during a request; the message is its last output."""


class _ConnectionClosed(Exception):
    """Raised if the connection was closed, or the process exited, before a request."""


@dataclass(eq=False)
class _Connection:
    """Connection to a reward process over a non-blocking socket, with pipelined requests and ordered replies.

    It is closed once no task uses it, since tasks that wait on a reused file descriptor would hang.
    """

    socket: socket.socket
    num_requests: int = 0
    closed: bool = False
    """Whether it can no longer be used."""
    _closed_here: bool = False
    _writing: asyncio.Lock = field(default_factory=asyncio.Lock)
    _reading: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def request(self, body: bytes, timeout_s: float) -> Reply:
        """Return the reply. Closes the connection on _ProcessExited (also after `timeout_s`) and cancellation."""
        self.num_requests += 1
        try:
            async with self._writing, self._timeout(timeout_s * self.num_requests):  # earlier requests are scored first
                await self._send(frame(body))
            async with self._reading, self._timeout(timeout_s):
                head = await self._read(LENGTH.size)
                if TIMEOUT_PREFIX.startswith(head):
                    raise _ProcessExited((head + await self._read(None)).decode("utf-8", "replace"))
                reply: Reply = pickle.loads(await self._read(*LENGTH.unpack(head)))
                return reply
        except _ConnectionClosed:
            raise
        except BaseException as error:
            self.close()
            if isinstance(error, OSError):  # TimeoutError is one
                raise _ProcessExited("") from error
            raise
        finally:
            self.num_requests -= 1
            if self.closed and not self.num_requests:
                self.socket.close()

    def close(self) -> None:
        """Close the connection; pending reads and writes raise _ConnectionClosed."""
        self.closed = self._closed_here = True
        with suppress(OSError):  # already closed, here or at the other end
            self.socket.shutdown(socket.SHUT_RDWR)
        if not self.num_requests:
            self.socket.close()

    async def _send(self, body: bytes) -> None:
        try:
            await asyncio.get_running_loop().sock_sendall(self.socket, body)
        except OSError as error:  # the process exited during an earlier request, whose task reads its output
            self.closed = True
            raise _ConnectionClosed from error

    def _timeout(self, timeout_s: float) -> asyncio.Timeout:
        if self.closed:
            raise _ConnectionClosed
        return asyncio.timeout(timeout_s)

    async def _read(self, count: int | None) -> bytes:
        """Return `count` bytes, or all bytes until EOF if None. Raises _ProcessExited on early EOF."""
        found, loop = bytearray(), asyncio.get_running_loop()
        while count is None or len(found) < count:
            size = 65536 if count is None else min(count - len(found), 1 << 20)
            try:
                more = await loop.sock_recv(self.socket, size)
            except ConnectionResetError:  # the process exited with unread requests
                more = b""
            if not more and self._closed_here:
                raise _ConnectionClosed
            if not more:
                if count is None:
                    break
                raise _ProcessExited("")
            found += more
        return bytes(found)


@dataclass
class ProcessRewardExecutor:
    """Compute rewards in at most `processes` processes, started on demand; if 0, on a thread of this process."""

    location: WorldLocation
    processes: int = 1
    _in_thread: ThreadRewardExecutor = field(init=False)
    _connections: list[_Connection] = field(default_factory=list, init=False)
    _loop: asyncio.AbstractEventLoop | None = field(default=None, init=False)
    _slots: asyncio.Semaphore = field(init=False)
    _starting: asyncio.Lock = field(init=False)
    _last_warning: str = field(default="", init=False)

    def __post_init__(self) -> None:
        self._in_thread = ThreadRewardExecutor(self.location.rollout.reward_timeout_s)
        weakref.finalize(self, _close, self._connections)

    @classmethod
    def of(cls, config: Config) -> ProcessRewardExecutor:
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
        request = ScoreRequest(task, trajectory)
        return with_rewards(trajectory, await self._run_verifiers(world, Verifiers(rewards), request, why))

    async def with_added(self, world: World, task: Task, trajectory: Trajectory) -> Trajectory:
        """Return the trajectory with parts and turn progress of `added_verifiers`, whose sum replaces the reward."""
        verifiers = added_verifiers(self.location.rewards, world)
        found = await self._run_verifiers(world, verifiers, ScoreRequest(task, trajectory, added=True))
        parts = {**trajectory.rewards, **found.parts}
        return replace(with_rewards(trajectory, found), rewards=parts, turn_progress=found.turns)

    async def _run_verifiers(
        self, world: World, verifiers: Verifiers, request: ScoreRequest, why: str = ""
    ) -> ScoredEpisode:
        """Return the result of the verifiers; a non-empty `why` is the reason to run them in this process."""
        reply = await self._run_in_process(world, request) if self.processes and not why else UnreadableRequest(why)
        match reply:
            case ScoredEpisode():
                return reply
            case RewardFailed():
                raise reply.error from TimeoutError() if reply.late else None
            case UnreadableRequest() if self.processes and reply.why != self._last_warning:
                self._last_warning = reply.why
                log.warning("Rewards are computed in this process and may block it: %s", reply.why)
        return await self._in_thread.run(verifiers, request)

    async def _run_in_process(self, world: World, request: ScoreRequest) -> Reply:
        task = request.task
        try:
            body = pickle.dumps(request)
        except Exception as error:  # boundary: foreign types; scored in this process
            kind = type(error).__name__
            return UnreadableRequest(f"Task {task.id} cannot be sent to another process ({kind}: {error}).")
        loop = asyncio.get_running_loop()
        if self._loop is not loop:  # locks and connections belong to a loop
            _close(self._connections)
            self._loop, self._starting = loop, asyncio.Lock()
            self._slots = asyncio.Semaphore(max(1, self.processes) * _PIPELINE_DEPTH)
        async with self._slots:
            while True:
                connection = await self._connection(world)
                if isinstance(connection, UnreadableRequest):
                    return connection
                with suppress(_ConnectionClosed):
                    return await self._request(connection, task, body)

    async def _connection(self, world: World) -> _Connection | UnreadableRequest:
        async with self._starting:
            self._connections[:] = [one for one in self._connections if not one.closed]
            idlest = min(self._connections, key=lambda one: one.num_requests, default=None)
            if idlest is not None and (not idlest.num_requests or len(self._connections) >= self.processes):
                return idlest
            started = await self._start_process(world)
            if isinstance(started, _Connection):
                self._connections.append(started)
            return started

    async def _request(self, connection: _Connection, task: Task, body: bytes) -> Reply:
        timeout_s = self.location.rollout.reward_timeout_s
        try:
            return await connection.request(body, timeout_s + _GRACE_S)
        except _ProcessExited as exited:
            if str(exited) or isinstance(exited.__cause__, TimeoutError):
                raise _timeout_error(task, timeout_s, str(exited)) from TimeoutError()
            raise RewardFault(f"The reward process of task {task.id} has exited.", "Check free memory.") from exited

    async def _start_process(self, world: World) -> _Connection | UnreadableRequest:
        local_end, remote_end = socket.socketpair()
        local_end.setblocking(False)
        connection = _Connection(local_end)
        with remote_end:
            _FORK_SERVERS.setdefault(os.getpid(), _ForkServer()).fork(self.location, remote_end.fileno())
        try:
            reply = await connection.request(pickle.dumps(self.location), START_S)
        except (_ProcessExited, _ConnectionClosed) as error:
            raise RewardFault("The reward process did not start.", "Check free memory.") from error
        if reply == parts_of(world):
            return connection
        connection.close()
        if isinstance(reply, RewardFailed):
            return UnreadableRequest(f"The world cannot be built in a reward process: {reply.error.message}")
        return UnreadableRequest("The world built from the settings has different rewards from the run's.")


def _close(connections: list[_Connection]) -> None:
    for connection in connections:
        connection.close()


@dataclass
class _ForkServer:
    _control: socket.socket | None = None
    _process: subprocess.Popen[bytes] | None = None
    _lock: Lock = field(default_factory=Lock)

    def fork(self, location: WorldLocation, descriptor: int) -> None:
        """Fork a process that serves requests on the socket `descriptor`."""
        env = location.env
        names = ",".join([env.name, *(member.world or name for name, member in env.mixture.items())])
        with self._lock:
            try:
                self._send(names, descriptor)
            except OSError:  # the server has exited
                self._control = None
                self._send(names, descriptor)

    def _send(self, names: str, descriptor: int) -> None:
        control = self._control = self._control or self._start()
        try:
            socket.send_fds(control, [names.encode()], [descriptor])
        except OSError:
            control.close()
            raise

    def _start(self) -> socket.socket:
        local_end, remote_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with remote_end:
            command = python_command("ludus.rollouts.reward_process:fork_on_demand", str(remote_end.fileno()))
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[remote_end.fileno()])
        return local_end


_FORK_SERVERS: dict[int, _ForkServer] = {}
"""Fork server by process; a forked process starts another one."""
