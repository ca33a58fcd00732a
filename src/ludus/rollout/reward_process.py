"""The processes in which rewards are computed: one that forks them, and what each of them does.

The first has imported what worlds have in common and does nothing but fork, so that the next process is there
at once. Each fork reads a `WorldLocation` from its socket, builds the world, says `ready` with the rewards
that it has, and then answers one `ScoreRequest` after another. A scoring that is late is ended by a thread
without Python in it, whatever the reward does, and with it the process: the last thing on the socket is where
it was. All of them end with whoever started the first.
"""

from __future__ import annotations

import ctypes
import faulthandler
import importlib
import os
import pickle
import signal
import socket
import struct
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import BinaryIO

from ludus.config.sections.rewards import RewardsConfig
from ludus.config.sections.rollout import EnvConfig, RolloutConfig
from ludus.config.sections.sandbox import SandboxConfig
from ludus.envs.base import World
from ludus.envs.registry import WORLDS, build_world
from ludus.errors import LudusError
from ludus.rewards.base import Reward
from ludus.rewards.code.turns import TurnVerifier
from ludus.rewards.registry import added_parts
from ludus.rollout.episode import score_turns, scored
from ludus.types import Task, Trajectory

HEAD = struct.Struct(">Q")
"""Before each message: its bytes. The first byte of it is 0, which no text has."""
LATE = b"Timeout ("
"""How the words begin that take the place of a message where a scoring was late."""
_PDEATHSIG = 1

Part = tuple[str, float, bool, str]
"""Name, weight, whether it is an outcome, and the world of a reward."""


@dataclass(frozen=True, slots=True)
class WorldLocation:
    """The world whose rewards are wanted, and where it is: relative paths lead to the same files."""

    env: EnvConfig
    rollout: RolloutConfig
    sandbox: SandboxConfig
    rewards: RewardsConfig
    folder: str
    path: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ScoreRequest:
    """Score what was played: by the rewards of the world, or by those that the settings add to them."""

    task: Task
    trajectory: Trajectory
    added: bool = False


@dataclass(frozen=True, slots=True)
class RewardsReady:
    """The rewards that the process has."""

    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class ScoredEpisode:
    """The rewards of a trajectory: its parts, their weighted sum, and the seconds that they took.

    `turns` is what the turn verifier found, empty if it was not asked.
    """

    parts: dict[str, float]
    total: float
    seconds: float
    turns: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class RewardFailed:
    """What a reward, or the making of the world, raised; `late` where a time limit was its cause."""

    error: LudusError
    late: bool = False


@dataclass(frozen=True, slots=True)
class UnreadableRequest:
    """What came is made of types that are not known here."""

    why: str


Reply = RewardsReady | ScoredEpisode | RewardFailed | UnreadableRequest


def parts_of(world: World) -> tuple[Part, ...]:
    """The rewards of a world, without what they do."""
    return tuple((part.name, part.weight, part.outcome, part.world) for part in world.rewards)


def fork_on_demand(control: int) -> None:
    """For each socket that comes, a process that answers on it; until nobody asks any more.

    With the socket come the names of its worlds, separated by commas: they are imported once.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with socket.socket(fileno=control) as asked:
        while True:
            names, [*lines], _, _ = socket.recv_fds(asked, 10_000, 1)
            if not lines:
                return
            with suppress(ImportError):  # the process that needs the world says what is missing
                for name in set(names.decode().split(",")) & set(WORLDS):
                    importlib.import_module(WORLDS[name].partition(":")[0])
            if os.fork() == 0:
                asked.close()
                _follow_the_parent()
                answer(lines[0])
                os._exit(0)
            os.close(lines[0])


def _follow_the_parent() -> None:
    """End with the process that forked this one, even in the middle of a scoring."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    with suppress(AttributeError, OSError):  # elsewhere than on Linux it ends with its next answer
        ctypes.CDLL(None).prctl(_PDEATHSIG, signal.SIGKILL)


def answer(line: int) -> None:
    """Build the world that is asked for, and score for it until nobody is at the other end of the socket."""
    with suppress(ConnectionError), socket.socket(fileno=line) as ours, ours.makefile("rb") as questions:
        place = _read(questions)
        assert isinstance(place, WorldLocation)
        rewards = _begin(ours, place)
        while rewards is not None and (head := questions.read(HEAD.size)):
            said = questions.read(*HEAD.unpack(head))
            _send(ours, _answer(rewards, place.rollout.reward_timeout_s, ours, said))


@dataclass(frozen=True, slots=True)
class Verifiers:
    """The functions that judge a trajectory: rewards, and the turn verifier if it is asked."""

    rewards: Sequence[Reward]
    turns: TurnVerifier | None = None

    def judge(self, asked: ScoreRequest) -> ScoredEpisode:
        """Raise WorldError with the words of what one of them raises."""
        begin = time.perf_counter()
        found = scored(self.rewards, asked.task, asked.trajectory)
        turns = () if self.turns is None else score_turns(self.turns, asked.task, asked.trajectory)
        return ScoredEpisode(dict(found.rewards), found.reward, time.perf_counter() - begin, turns)


def added_verifiers(settings: RewardsConfig, world: World) -> Verifiers:
    """What the section `rewards` has judged beside the rewards of the world."""
    turns = world.turn_verifier if settings.verifies_turns else None
    return Verifiers(added_parts(settings), turns)


@dataclass(frozen=True, slots=True)
class _Rewards:
    """Those of the world, and those that the settings add."""

    own: Verifiers
    added: Verifiers


def _begin(ours: socket.socket, place: WorldLocation) -> _Rewards | None:
    try:
        sys.path[:] = place.path
        os.chdir(place.folder)
        world = build_world(place.env, place.rollout, place.sandbox)
        found = _Rewards(Verifiers(world.rewards), added_verifiers(place.rewards, world))
        _send(ours, RewardsReady(parts_of(world)))
    except Exception as error:  # boundary: whatever a world raises goes to whoever asked for it
        _send(ours, _failed(error))
        return None
    return found


def _answer(rewards: _Rewards, timeout_s: float, ours: socket.socket, said: bytes) -> Reply:
    try:
        asked = pickle.loads(said)
        assert isinstance(asked, ScoreRequest)
    except Exception as error:  # boundary: what cannot be read here is scored elsewhere
        return UnreadableRequest(f"{type(error).__name__}: {error}")
    faulthandler.dump_traceback_later(timeout_s, exit=True, file=ours.fileno())
    try:
        return (rewards.added if asked.added else rewards.own).judge(asked)
    except Exception as error:  # boundary: whatever a reward raises goes to whoever asked for it
        return _failed(error)
    finally:
        faulthandler.cancel_dump_traceback_later()


def _failed(error: Exception) -> RewardFailed:
    own = error if isinstance(error, LudusError) else LudusError(f"{type(error).__name__}: {error}")
    try:
        pickle.loads(pickle.dumps(own))
    except Exception:  # boundary: a class that does not pickle travels as its words
        own = LudusError(str(own))
    return RewardFailed(own, isinstance(error.__cause__, TimeoutError))


def _read(questions: BinaryIO) -> object:
    return pickle.loads(questions.read(*HEAD.unpack(questions.read(HEAD.size))))


def _send(ours: socket.socket, reply: Reply) -> None:
    said = pickle.dumps(reply)
    ours.sendall(HEAD.pack(len(said)) + said)
