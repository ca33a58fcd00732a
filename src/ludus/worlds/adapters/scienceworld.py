"""Tasks of scienceworld: experiments in a house, with the package's own splits and gold paths. Needs Java.

The success of an episode is 1 at the full score; the reward of a turn is its gain in score, from 0 to 1 in total.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Protocol

from pydantic import Field

from ludus.envs.settings import read_settings
from ludus.envs.simulator_world import Observation
from ludus.envs.tool_env import ToolLimits
from ludus.errors import ConfigError
from ludus.types import Task
from ludus.worlds.adapters.base import SPLITS, AdapterSettings, load_package, make_tasks
from ludus.worlds.adapters.jvm import JavaPool, JavaSimulator, JavaWorld


class ScienceWorldSettings(AdapterSettings):
    """Settings of the world `scienceworld` (`env.settings`). `kwargs` is not used."""

    id: str = "all"
    """Name of the task, or `all`."""
    simplifications: str = ""
    """Simplifications of the package, separated by commas, for example `easy`."""
    max_processes: int = Field(2, ge=1)
    """Maximum number of Java processes, of about 1.4 GB each."""


class ScienceWorldProcess(Protocol):
    """Interface of the package's environment."""

    def load(self, name: str, variation: int, simplifications: str, *, generateGoldPath: bool) -> None: ...
    def reset(self) -> tuple[str, Mapping[str, object]]: ...
    def step(self, action: str) -> tuple[str, int, bool, Mapping[str, object]]: ...
    def get_gold_action_sequence(self) -> list[str]: ...
    def get_task_description(self) -> str: ...
    def get_task_names(self) -> list[str]: ...
    def get_variations_train(self) -> list[int]: ...
    def get_variations_dev(self) -> list[int]: ...
    def get_variations_test(self) -> list[int]: ...
    def close(self) -> None: ...


class ScienceWorldSimulator(JavaSimulator[ScienceWorldProcess]):
    """One variation of a task."""

    def __init__(
        self, pool: JavaPool[ScienceWorldProcess], settings: ScienceWorldSettings, task: str, variation: int
    ) -> None:
        super().__init__(pool, f"{task}:{variation}", settings.max_steps)
        self._settings, self._task, self._variation = settings, task, variation

    def reset(self) -> str:
        return self.call(partial(self._load, with_gold=False))

    def act(self, action: str) -> Observation:
        text, reward, done, info = self.call(lambda process: process.step(action))
        self.note(action, info["valid"])
        self.success = float(info["score"] == 100)
        return Observation(text, reward / 100, done, valid="No known action" not in text)

    def gold_path(self) -> Sequence[str]:
        """Load the task again, because the package generates the path, in seconds, only when it loads."""
        self.call(partial(self._load, with_gold=True))
        return self.call(lambda process: process.get_gold_action_sequence())

    def _load(self, process: ScienceWorldProcess, *, with_gold: bool) -> str:
        process.load(self._task, self._variation, self._settings.simplifications, generateGoldPath=with_gold)
        text, _ = process.reset()
        return f"{process.get_task_description()}\n{text}"


def make_scienceworld_world(settings: Mapping[str, object], limits: ToolLimits) -> JavaWorld:
    """Build the world (the registered factory). Raises ConfigError; UserError without the package or without Java."""
    chosen = read_settings(ScienceWorldSettings, settings)
    package = load_package("scienceworld", "scienceworld", "scienceworld")
    pool = JavaPool[ScienceWorldProcess](lambda: package.ScienceWorldEnv(envStepLimit=1_000_000))
    process = pool.take()
    try:
        names = process.get_task_names()
        if chosen.id not in ("all", *names):
            raise ConfigError(f"Unknown task {chosen.id!r}.", f"Tasks: {', '.join(names)}.")
        found: dict[str, list[tuple[str, int]]] = {split: [] for split in SPLITS}
        for name in names if chosen.id == "all" else (chosen.id,):
            process.load(name, 0, chosen.simplifications, generateGoldPath=False)
            found["train"] += [(name, number) for number in process.get_variations_train()]
            found["validation"] += [(name, number) for number in process.get_variations_dev()]
            found["test"] += [(name, number) for number in process.get_variations_test()]
    except ValueError as error:
        raise ConfigError(f"{error}", "Check env.settings.simplifications.") from error
    finally:
        pool.give_back(process)
    system = "You are in a house and have a task. Reply with one action, for example: open door to kitchen."
    lists = make_tasks(chosen, system)
    for split, pairs in found.items():
        random.Random(f"{chosen.seed}/{split}").shuffle(pairs)
        lists[split] = [
            Task(f"{split}:{name}:{number}", task.prompt, None, {**task.tags, "family": name, "variation": str(number)})
            for task, (name, number) in zip(lists[split], pairs, strict=False)
        ]

    def make(task: Task) -> ScienceWorldSimulator:
        return ScienceWorldSimulator(pool, chosen, task.tags["family"], int(task.tags["variation"]))

    return JavaWorld("scienceworld", lists, make, blocks=True, pool=pool, max_processes=chosen.max_processes)
