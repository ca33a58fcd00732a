"""The functions world: tasks, episodes, demonstrations and what goes without skill."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from ludus.envs.base import World
from ludus.envs.settings import read_settings
from ludus.envs.tool_env import ToolEnv
from ludus.envs.tool_world import Dialogue, split_of
from ludus.envs.toolbox import ToolLimits
from ludus.errors import ConfigError
from ludus.rewards.base import Reward
from ludus.rewards.code.turns import TurnVerifier
from ludus.sandbox import Sandbox, open_sandbox
from ludus.tools.base import Tool
from ludus.types import JSON, DataClass, Message, Task
from ludus.worlds.functions.alternative_solutions import other_ways
from ludus.worlds.functions.api.apis import ApiTruth
from ludus.worlds.functions.api_env import ApiEnv, gold_messages
from ludus.worlds.functions.domains.catalogue import catalogue
from ludus.worlds.functions.generate import FAMILIES, SPLITS, SYSTEM, CallMaker, make_tasks, request_of
from ludus.worlds.functions.gold_calls import Truth, function_rewards, gold_calls_made, truth_of
from ludus.worlds.functions.records import load_tasks
from ludus.worlds.functions.solver import CallFlaws, play
from ludus.worlds.functions.tool_distractors import Scene, SchemaTool, plain_offer

SHARES = {"train": 1.0, "validation": 0.1, "test": 0.25, "composition": 0.2}
"""Tasks of each split for one of training."""
FILE_SPLIT = "file"
"""The split with the tasks of `data`."""


class FunctionsSettings(BaseModel):
    """Settings of the functions world (`env.settings`)."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    num_tasks: int = Field(2000, ge=20)
    """Tasks of the training split; the others have a tenth, a quarter and a fifth of it."""
    num_held_out: int | None = Field(None, ge=1)
    """Tasks of the splits test and composition, instead of those shares."""
    levels: tuple[int, ...] = Field((1, 2, 3, 4, 5), min_length=1)
    """Which levels, 1 to 5."""
    changed_in_training: bool = True
    """Whether tasks of train and validation, and demonstrations, offer changed signatures too; those of test
    and composition always do."""
    access: Literal["tool", "none"] = "tool"
    """`none` offers no function: a baseline."""
    well_formed_weight: float = Field(0.1, ge=0, lt=0.5)
    """Of an episode without a failed call that is right or made a gold call; solved weighs 1."""
    habit: float = Field(0.3, ge=0, le=1)
    """Share of the demonstrations that stop after the first of several calls, or call where none is right."""
    mended: float = Field(0.1, ge=0, le=1)
    """Share of those that call whose first call is refused and then mended."""
    data: str | None = None
    """A file of tasks in the manner of BFCL (JSON lines), which become the split `file`."""
    seed: int = 0
    """Of all that is drawn."""
    data_answers: str | None = None
    """The file with their `ground_truth`, where it is kept apart."""
    data_bad_lines: Literal["refuse", "skip"] = "refuse"
    """Lines of `data` that are not tasks: refuse the file and name them, or log and skip them."""


@dataclass(frozen=True)
class FunctionsWorld(World):
    """Requests over a catalogue of functions."""

    settings: FunctionsSettings = field(default_factory=FunctionsSettings)
    limits: ToolLimits = field(default_factory=ToolLimits)
    name: str = "functions"
    sandbox: Sandbox = field(default_factory=open_sandbox)
    _tasks: dict[str, tuple[Task, ...]] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def splits(self) -> Sequence[str]:
        """The names of the splits; `file` only where the settings name one."""
        return SPLITS if self.settings.data is None else (*SPLITS, FILE_SPLIT)

    @property
    def rewards(self) -> tuple[Reward, ...]:
        """All or nothing, and a little for an episode without a failed call."""
        return function_rewards(self.settings.well_formed_weight)

    @property
    def turn_verifier(self) -> TurnVerifier | None:
        """A milestone is a gold call; where no function is on offer there is no verifier."""
        return gold_calls_made if self.settings.access == "tool" else None

    def tasks(self, split: str) -> Sequence[Task]:
        """The tasks of a split, levels in turn."""
        split_of(dict.fromkeys(self.splits, ()), split, self.name)
        if split not in self._tasks:
            self._tasks[split] = self._made(split)
        return self._tasks[split]

    def environment(self, task: Task) -> ToolEnv | ApiEnv:
        """A fresh episode on a state of its own; the calls of a task of several turns run in the sandbox."""
        if isinstance(task.truth, ApiTruth):
            offers_tools = self.settings.access != "none"
            return ApiEnv(task.truth, self.rewards, self.limits, self.sandbox, offers_tools)
        return ToolEnv(self._tools(task), self.rewards, self.limits)

    def opening(self, question: str) -> tuple[Message, ...]:
        """System message and request."""
        return Message(role="system", content=SYSTEM), Message(role="user", content=question)

    def demonstrations(self, seed: int) -> Iterator[Dialogue]:
        """An endless stream by the flawed oracle, on ever new requests from the generators of training tasks.

        None is a request of a held-out split.
        """
        rng = random.Random(f"demonstrations/{self.settings.seed}/{seed}")
        flaws = CallFlaws(self.settings.habit, self.settings.mended)
        changed = self.settings.changed_in_training
        makers = [CallMaker(rng, "train", level, changed) for level in self.settings.levels]
        held_out = {request_of(task) for split in SPLITS[1:] for task in self.tasks(split)}
        for number in itertools.count():
            task = makers[number % len(makers)].task(number)
            if task is not None and request_of(task) not in held_out:
                yield self._show(task, flaws, rng)

    def expert(self, task: Task) -> Dialogue | None:
        """The oracle without flaws; None if the task offers no function.

        Of a task of several turns the gold calls, their responses left out.
        """
        if self.settings.access == "none" or not isinstance(task.truth, Truth | ApiTruth):
            return None
        if isinstance(task.truth, ApiTruth):
            tools = tuple(self.environment(task).tools)
            return Dialogue((*task.prompt, *gold_messages(task.truth)), tools)
        return self._show(task, CallFlaws(), random.Random(task.id))

    def difficulty_report(self) -> str:
        """How many requests differ, and what is solved without skill; nothing of a file's."""
        from ludus.worlds.functions.difficulty_report import report

        return report(self)

    def alternative_solutions(self, task: Task) -> Sequence[Sequence[Message]]:
        """Arguments in another order and with defaults, calls one by one, or other words."""
        if self.settings.access == "none" or not isinstance(task.truth, Truth):
            return ()
        return tuple(other_ways(task))

    def texts(self) -> Iterator[str]:
        """Descriptions of functions and dialogues as text: what the tokenizer is trained on."""
        for dialogue, _ in zip(self.demonstrations(seed=0), range(2_000), strict=False):
            yield from map(_described, dialogue.tools)
            for message in dialogue.messages:
                yield message["content"]
                for call in message.get("tool_calls", []):
                    said = call["function"]
                    yield f'{{"name": "{said["name"]}", "arguments": {said["arguments"]}}}'

    @property
    def runs_programs(self) -> bool:
        """Whether a task of `data` has calls that run in the sandbox."""
        return self.settings.data is not None and any(
            isinstance(task.truth, ApiTruth) for task in self.tasks(FILE_SPLIT)
        )

    def with_sandbox(self, sandbox: Sandbox) -> FunctionsWorld:
        """This world with that sandbox."""
        return replace(self, sandbox=sandbox)

    async def close(self) -> None:
        """Close the sandbox."""
        await self.sandbox.close()

    def _show(self, task: Task, flaws: CallFlaws, rng: random.Random) -> Dialogue:
        messages, truth = play(task, flaws, rng).messages, truth_of(task)
        teaches: DataClass = "tool_use" if truth.right in ("call", "any_call") else "negatives"
        return Dialogue((*task.prompt, *messages), truth.scene.tools(), teaches)

    def _tools(self, task: Task) -> Sequence[SchemaTool]:
        """Those of the task; for a question of somebody's own one function of each domain."""
        if self.settings.access == "none":
            return ()
        if isinstance(task.truth, Truth):
            return task.truth.scene.tools()
        first = {function.domain: function for function in [*catalogue().values()][::-1]}
        return Scene(task.seed, (), tuple(map(plain_offer, first.values()))).tools()

    def _made(self, split: str) -> tuple[Task, ...]:
        settings = self.settings
        if split == FILE_SPLIT and settings.data is not None:
            answers = None if settings.data_answers is None else Path(settings.data_answers)
            return load_tasks(Path(settings.data), answers, split, settings.data_bad_lines)
        num = max(round(settings.num_tasks * SHARES[split]), 1)
        if settings.num_held_out is not None and split in ("test", "composition"):
            num = settings.num_held_out
        taken = {request_of(task) for other in _before(split) for task in self.tasks(other)}
        changed = settings.changed_in_training or split in ("test", "composition")
        return make_tasks(split, num, settings.levels, settings.seed, taken, changed)


def make_functions_world(settings: Mapping[str, object], limits: ToolLimits) -> FunctionsWorld:
    """The factory by which the world is registered. Raises ConfigError for settings that do not fit."""
    chosen = read_settings(FunctionsSettings, settings)
    if odd := [level for level in chosen.levels if level not in FAMILIES]:
        raise ConfigError(f"There is no level {odd[0]} (env.settings.levels).", "Levels are 1 to 5.")
    return FunctionsWorld(chosen, limits)


def _before(split: str) -> Sequence[str]:
    """The splits whose requests do not occur in this one."""
    return SPLITS[: SPLITS.index(split)]


def _described(tool: Tool) -> str:
    """A description as the package's chat template writes it."""
    function = tool.schema["function"]
    properties: Mapping[str, Mapping[str, JSON]] = function["parameters"]["properties"]
    said = ", ".join(f"{name}: {schema.get('type', 'any')}" for name, schema in properties.items())
    return f"{function['name']}({said}) {function['description']}"
