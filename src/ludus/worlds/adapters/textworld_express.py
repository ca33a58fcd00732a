"""Games of textworld-express by seed, with the package's own splits of seeds and gold paths. Needs Java.

An episode succeeds if the game is won; the reward of a turn is its gain in score, from 0 to 1 in total.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from pydantic import Field

from ludus.envs.settings import read_settings
from ludus.envs.simulator_world import Observation
from ludus.envs.tool_env import ToolLimits
from ludus.errors import ConfigError
from ludus.types import Task
from ludus.worlds.adapters.base import AdapterSettings, load_package, make_tasks
from ludus.worlds.adapters.jvm import JavaPool, JavaSimulator, JavaWorld

_FOLDS = {"train": "train", "validation": "dev", "test": "test"}


class TextWorldExpressSettings(AdapterSettings):
    """Settings of the world `textworld_express` (`env.settings`); `kwargs` are the parameters of the game."""

    id: str = "coin"
    """Name of the game."""
    max_processes: int = Field(2, ge=1)
    """Maximum number of Java processes, of about 0.5 GB each."""


class TextWorldExpressProcess(Protocol):
    """Interface of the package's environment."""

    def reset(
        self, *, seed: int, gameFold: str, gameName: str, gameParams: str, generateGoldPath: bool
    ) -> tuple[str, Mapping[str, object]]: ...
    def step(self, action: str) -> tuple[str, float, bool, Mapping[str, object]]: ...
    def getGoldActionSequence(self) -> list[str]: ...
    def getValidSeedsTrain(self) -> list[int]: ...
    def getValidSeedsDev(self) -> list[int]: ...
    def getValidSeedsTest(self) -> list[int]: ...
    def close(self) -> None: ...


class TextWorldExpressSimulator(JavaSimulator[TextWorldExpressProcess]):
    """One game."""

    def __init__(
        self, pool: JavaPool[TextWorldExpressProcess], settings: TextWorldExpressSettings, fold: str, seed: int
    ) -> None:
        super().__init__(pool, f"{fold}:{seed}", settings.max_steps)
        self._settings, self._fold, self._seed = settings, fold, seed

    def reset(self) -> str:
        text, info = self.call(lambda process: load_game(process, self._settings, self._fold, self._seed))
        return f"{info['taskDescription']}\n{text}"

    def act(self, action: str) -> Observation:
        text, reward, done, info = self.call(lambda process: process.step(action))
        self.note(action, info["validActions"])
        self.success = float(info["tasksuccess"] is True)
        return Observation(text, float(reward), done, valid=not text.startswith("Unknown action"))

    def gold_path(self) -> Sequence[str]:
        return self.call(lambda process: process.getGoldActionSequence())


def load_game(
    process: TextWorldExpressProcess, settings: TextWorldExpressSettings, fold: str, seed: int
) -> tuple[str, Mapping[str, object]]:
    """Start a game in a process; return its first observation and its information."""
    parameters = ",".join(f"{key}={value}" for key, value in settings.kwargs.items())
    return process.reset(seed=seed, gameFold=fold, gameName=settings.id, gameParams=parameters, generateGoldPath=True)


def make_textworld_express_world(settings: Mapping[str, object], limits: ToolLimits) -> JavaWorld:
    """Build the world (the registered factory). Raises ConfigError; UserError without the package or without Java."""
    chosen = read_settings(TextWorldExpressSettings, settings)
    package = load_package("textworld_express", "textworld-express", "textworld-express")
    pool = JavaPool[TextWorldExpressProcess](lambda: package.TextWorldExpressEnv(envStepLimit=1_000_000))
    process = pool.take()
    try:
        load_game(process, chosen, "train", 0)
        own = {
            "train": process.getValidSeedsTrain(),
            "validation": process.getValidSeedsDev(),
            "test": process.getValidSeedsTest(),
        }
    except ValueError as error:
        raise ConfigError(str(error), "Check env.settings.id and env.settings.kwargs.") from error
    finally:
        pool.give_back(process)
    lists = make_tasks(chosen, "You play a text game. Reply with one action, for example: look around.")
    for split, seeds in own.items():
        shift = chosen.seed * chosen.num_tasks
        lists[split] = [
            Task(task.id, task.prompt, None, task.tags, seed=seeds[(shift + place) % len(seeds)])
            for place, task in enumerate(lists[split][: len(seeds)])
        ]

    def make(task: Task) -> TextWorldExpressSimulator:
        return TextWorldExpressSimulator(pool, chosen, _FOLDS[task.tags["split"]], task.seed)

    return JavaWorld("textworld_express", lists, make, blocks=True, pool=pool, max_processes=chosen.max_processes)
