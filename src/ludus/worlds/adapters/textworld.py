"""Games that textworld generates by seed, with the package's winning policy as expert.

A game is generated and compiled when an episode first needs it, in seconds, and kept in a folder.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Protocol

from pydantic import Field

from ludus.envs.settings import read_settings
from ludus.envs.simulator_world import Observation, SimulatorWorld
from ludus.envs.tool_env import ToolLimits
from ludus.errors import ConfigError
from ludus.worlds.adapters.base import (
    BoundedSimulator,
    ExpertSettings,
    cannot_start,
    load_package,
    make_tasks,
    seeded_globally,
)

CUSTOM = "tw-custom"
_BANNED = frozenset(["save", "restore", "restart", "undo", "quit", "q", "script", "transcript", "recording", "replay"])
"""Words that would write files, end or rewind the game, or join several commands."""
_MAX_COMMAND = 100
_STATUS = re.compile(r"\n*>[ \t]*(\S.*)?(-= .*)?$", re.S)


class TextWorldSettings(ExpertSettings):
    """Settings of the world `textworld` (`env.settings`).

    `kwargs` are the options of the generator (`nb_rooms`, `nb_objects`, `quest_length`, ...) for `tw-custom`, and the
    settings of a challenge otherwise.
    """

    id: str = CUSTOM
    """Kind of game: `tw-custom`, or a challenge of the package, for example `tw-coin_collector`."""
    num_tasks: int = Field(100, ge=1)
    """Number of training tasks; each game takes seconds to generate when it is first played."""
    num_held_out: int = Field(20, ge=1)
    folder: str = ""
    """Folder where compiled games are kept, also for later runs; empty: a temporary one."""


class TextWorldState(Protocol):
    """Interface of the state of a game."""

    feedback: str
    objective: str
    description: str
    score: int
    max_score: int
    won: bool
    lost: bool
    admissible_commands: Sequence[str]
    policy_commands: Sequence[str]


class TextWorldEnv(Protocol):
    """Interface of a running game."""

    def reset(self) -> TextWorldState: ...
    def step(self, command: str) -> tuple[TextWorldState, int, bool]: ...
    def close(self) -> None: ...


@dataclass(frozen=True)
class TextWorldMaker:
    """How games are made."""

    package: ModuleType
    settings: TextWorldSettings
    folder: Path
    lock: threading.Lock

    def start(self, seed: int) -> TextWorldEnv:
        """Return a running game, generated and compiled if it is not in the folder."""
        name = hashlib.sha256(json.dumps([self.settings.id, self.settings.kwargs, seed]).encode()).hexdigest()[:20]
        file = self.folder / f"{name}.z8"
        with self.lock:
            if not file.is_file():
                self._compile(seed, file)
        wanted = ("objective", "description", "score", "max_score", "won", "lost", "admissible_commands")
        infos = self.package.EnvInfos(**dict.fromkeys((*wanted, "policy_commands"), True))
        env: TextWorldEnv = self.package.start(str(file), request_infos=infos)
        return env

    def _compile(self, seed: int, file: Path) -> None:
        generator = self.package.generator
        options = self.package.GameOptions()
        options.seeds = seed
        with seeded_globally(f"textworld/{seed}"):
            if self.settings.id == CUSTOM:
                for name, value in self.settings.kwargs.items():
                    setattr(options, name, value)
                game = generator.make_game(options)
            else:
                _, make, _ = self.package.challenges.CHALLENGES[self.settings.id]
                game = make(dict(self.settings.kwargs), options)
        with tempfile.TemporaryDirectory(dir=self.folder) as own:
            options.path = str(Path(own) / file.name)
            generator.compile_game(game, options)
            for made in sorted(Path(own).iterdir(), reverse=True):  # .z8, the file that is looked for, is the last
                if made.suffix in (".json", ".ni", ".z8"):
                    os.replace(made, self.folder / made.name)


class TextWorldSimulator(BoundedSimulator):
    """One game."""

    def __init__(self, maker: TextWorldMaker, seed: int) -> None:
        super().__init__(maker.settings.max_steps)
        self._maker, self._seed = maker, seed
        self._env: TextWorldEnv | None = None
        self._state: TextWorldState | None = None

    def reset(self) -> str:
        self._env = self._maker.start(self._seed)
        self._state = state = self._env.reset()
        return f"{state.objective.strip()}\n\n{state.description.strip()}"

    def act(self, action: str) -> Observation:
        assert self._env is not None
        assert self._state is not None
        words = re.findall(r"[a-z]+", action.casefold())
        command = re.sub(r"[^\w' -]", " ", action.encode("ascii", "replace").decode()).strip()
        if len(command) > _MAX_COMMAND or not command or not _BANNED.isdisjoint(words):
            return Observation("That is not a command of this game.", valid=False)
        valid, before = command in self._state.admissible_commands, self._state.score
        self._state, score, done = self._env.step(command)
        self.success = float(self._state.won)
        reward = (score - before) / max(self._state.max_score, 1)
        return Observation(_STATUS.sub("", self._state.feedback).strip(), reward, bool(done), valid)

    def actions(self) -> Sequence[str]:
        """Return the commands that the game admits."""
        return self._state.admissible_commands if self._state else ()

    def expert_action(self) -> str | None:
        """Return the next command of the winning policy from this state; None if the game can no longer be won."""
        return next(iter(self._state.policy_commands or ()), None) if self._state else None

    def close(self) -> None:
        if self._env is not None:
            self._env.close()


def make_textworld_world(settings: Mapping[str, object], limits: ToolLimits) -> SimulatorWorld:
    """Build the world (the registered factory). Raises ConfigError, and UserError if the package is missing."""
    chosen = read_settings(TextWorldSettings, settings)
    package = load_package("textworld", "textworld", "textworld")
    kinds = (CUSTOM, *load_package("textworld.challenges", "textworld", "textworld").CHALLENGES)
    if chosen.id not in kinds:
        raise ConfigError(f"Unknown kind of game {chosen.id!r}.", f"Kinds: {', '.join(kinds)}.")
    folder = Path(chosen.folder or tempfile.mkdtemp(prefix="textworld-"))
    folder.mkdir(parents=True, exist_ok=True)
    maker = TextWorldMaker(package, chosen, folder, threading.Lock())
    lists = make_tasks(chosen, "You play a text game. Reply with one command, for example: open chest.")
    simulator = TextWorldSimulator(maker, lists["train"][0].seed)
    try:
        simulator.reset()
    except Exception as error:  # boundary: the generator refuses options in many ways
        raise cannot_start(f"The game {chosen.id}", error) from error
    finally:
        simulator.close()

    return SimulatorWorld(
        "textworld", lists, lambda task: TextWorldSimulator(maker, task.seed), blocks=True, flaw=chosen.flaw
    )
