"""Processes that compute rewards: a fork server, and the processes that it forks.

The fork server imports the common modules of worlds in advance, so that a fork starts without delay. Each fork
reads a `WorldLocation` from its socket, builds the world, sends its rewards and then replies to `ScoreRequest`s
in order. If scoring times out, a thread of `faulthandler` writes the current stack to the socket and exits the
process, even if the reward holds the interpreter lock. All processes exit with the parent of the server.
"""

from __future__ import annotations

import ctypes
import faulthandler
import importlib
import os
import pickle
import signal
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ludus.config.sections.rewards import RewardsConfig
from ludus.config.sections.rollout import EnvConfig, RolloutConfig, SandboxConfig
from ludus.envs.base import World
from ludus.envs.registry import FACTORIES, build_world
from ludus.errors import ConfigError, LudusError
from ludus.ipc import frame, read_frame
from ludus.plugins import plugin_line
from ludus.rewards.base import Reward
from ludus.rewards.process import TurnScorer, milestone_scorer, read_subgoals, search_scorer, subgoal_verifier
from ludus.rewards.registry import added_parts
from ludus.rollouts.episode import score_turns, scored
from ludus.types import Task, Trajectory

TIMEOUT_PREFIX = b"Timeout ("
"""Prefix of the stack sent instead of a reply after a timeout; a length prefix starts with a zero byte."""
_PDEATHSIG = 1

Part = tuple[str, float, bool, str]
"""Name, weight, whether it is an outcome reward, and world of a reward."""


@dataclass(frozen=True, slots=True)
class WorldLocation:
    """World to build, in the working directory `folder` with the module search path `path`."""

    env: EnvConfig
    rollout: RolloutConfig
    sandbox: SandboxConfig
    rewards: RewardsConfig
    folder: str
    path: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ScoreRequest:
    """Score a trajectory by the rewards of the world or, if `added`, by those of the settings."""

    task: Task
    trajectory: Trajectory
    added: bool = False


@dataclass(frozen=True, slots=True)
class ScoredEpisode:
    """Rewards of a trajectory: parts, weighted sum, duration, and the turn verifier's results if it is enabled."""

    parts: dict[str, float]
    total: float
    seconds: float
    turns: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class RewardFailed:
    """Error of a reward or of building the world; `late` if it was caused by a timeout."""

    error: LudusError
    late: bool = False


@dataclass(frozen=True, slots=True)
class UnreadableRequest:
    """Reply to a request that cannot be unpickled in the process."""

    why: str


Reply = tuple[Part, ...] | ScoredEpisode | RewardFailed | UnreadableRequest
"""A process that has built its world sends the descriptions of its rewards; then it replies to requests."""


def parts_of(world: World) -> tuple[Part, ...]:
    """Return the descriptions of the rewards of a world."""
    return tuple((part.name, part.weight, part.outcome, part.world) for part in world.rewards)


def fork_on_demand(control: str) -> None:
    """Fork a process per socket received on `control`, with the names of worlds to import, until it is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with socket.socket(fileno=int(control)) as requests:
        while True:
            names, descriptors, _, _ = socket.recv_fds(requests, 10_000, 1)
            if not descriptors:
                return
            with suppress(ImportError):  # raised again by the process that builds the world
                for name in set(names.decode().split(",")) & set(FACTORIES):
                    importlib.import_module(FACTORIES[name].partition(":")[0])
            if os.fork() == 0:
                requests.close()
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                with suppress(AttributeError, OSError):  # not on Linux: exits at its next reply
                    ctypes.CDLL(None).prctl(_PDEATHSIG, signal.SIGKILL)
                answer(str(descriptors[0]))
                os._exit(0)
            os.close(descriptors[0])


def answer(descriptor: str) -> None:
    """Build the requested world and score until the other end of the socket is closed."""
    with suppress(ConnectionError), socket.socket(fileno=int(descriptor)) as conn, conn.makefile("rb") as stream:
        body = read_frame(stream)
        if body is None:
            return
        location: WorldLocation = pickle.loads(body)
        verifiers = _build_verifiers(conn, location)
        while verifiers is not None and (body := read_frame(stream)) is not None:
            _send(conn, _score(verifiers, location.rollout.reward_timeout_s, conn, body))


@dataclass(frozen=True, slots=True)
class Verifiers:
    """Functions that score a trajectory: rewards, and the turn verifier if it is enabled."""

    rewards: Sequence[Reward]
    turns: TurnScorer | None = None

    def run(self, request: ScoreRequest) -> ScoredEpisode:
        """Score a trajectory. Raises WorldError with the message of a verifier's error."""
        begin = time.perf_counter()
        found = scored(self.rewards, request.task, request.trajectory)
        turns = () if self.turns is None else score_turns(self.turns, request.task, request.trajectory)
        return ScoredEpisode(dict(found.rewards), found.reward, time.perf_counter() - begin, turns)


def added_verifiers(settings: RewardsConfig, world: World) -> Verifiers:
    """Return the verifiers added by the section `rewards`."""
    return Verifiers(added_parts(settings), turn_scorer(settings, world) if settings.verifies_turns else None)


def turn_scorer(settings: RewardsConfig, world: World) -> TurnScorer:
    """Return the scorer of turns that `rewards.process.source` names. Raises UserError if the world has none."""
    process = settings.process
    if process.subgoals is not None:
        return milestone_scorer(subgoal_verifier(read_subgoals(Path(process.subgoals))))
    if process.source == "search_gain":
        if world.retrieval is None:
            text = f"The world {world.name} does not tell which documents were retrieved (rewards.process.source)."
            raise ConfigError(text, "search does, with its tool.")
        return search_scorer(world.retrieval)
    if world.turn_verifier is None:
        raise ConfigError(
            f"The world {world.name} has no turn verifier (rewards.turn_verifier_weight, rewards.turns.progress).",
            "search, sql and functions have one with their tools, code and terminal with "
            "env.settings.check_turns = true.",
        )
    return milestone_scorer(world.turn_verifier)


def _build_verifiers(conn: socket.socket, location: WorldLocation) -> tuple[Verifiers, Verifiers] | None:
    try:
        sys.path[:] = location.path
        os.chdir(location.folder)
        world = build_world(location.env, location.rollout, location.sandbox)
        found = Verifiers(world.rewards), added_verifiers(location.rewards, world)
        _send(conn, parts_of(world))
    except Exception as error:  # boundary: errors of worlds are raised in the caller
        _send(conn, _failure_of(error))
        return None
    return found


def _score(verifiers: tuple[Verifiers, Verifiers], timeout_s: float, conn: socket.socket, body: bytes) -> Reply:
    try:
        request = pickle.loads(body)
        assert isinstance(request, ScoreRequest)
    except Exception as error:  # boundary: user types may raise anything; the caller scores the trajectory
        return UnreadableRequest(f"{type(error).__name__}: {error}")
    faulthandler.dump_traceback_later(timeout_s, exit=True, file=conn.fileno())
    try:
        return verifiers[request.added].run(request)
    except Exception as error:  # boundary: errors of rewards are raised in the caller
        return _failure_of(error)
    finally:
        faulthandler.cancel_dump_traceback_later()


def _failure_of(error: Exception) -> RewardFailed:
    where = plugin_line(error)
    text = f"{type(error).__name__}: {error}{f' ({where})' if where else ''}"
    sendable = error if isinstance(error, LudusError) else LudusError(text)
    try:
        pickle.loads(pickle.dumps(sendable))
    except Exception:  # boundary: an unpicklable class is sent as its message
        sendable = LudusError(str(sendable))
    return RewardFailed(sendable, isinstance(error.__cause__, TimeoutError))


def _send(conn: socket.socket, reply: Reply) -> None:
    conn.sendall(frame(pickle.dumps(reply)))
