"""The functions world: settings, tasks, episodes and demonstrations."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from ludus.envs.base import World, shipped_report
from ludus.envs.settings import read_settings
from ludus.envs.tool_env import ToolEnv, ToolLimits
from ludus.envs.tool_world import Dialogue, check_split
from ludus.rewards.base import Reward, truth_of
from ludus.rewards.code.turns import TurnVerifier
from ludus.rewards.exact_match import well_formed
from ludus.rewards.shaping import either, only_if
from ludus.sandbox import Sandbox, open_sandbox
from ludus.types import Message, Task
from ludus.worlds.functions.bfcl.api_env import ApiEnv, ApiTruth, gold_messages
from ludus.worlds.functions.bfcl.reader import load_tasks
from ludus.worlds.functions.catalogue import Scene, catalogue
from ludus.worlds.functions.generate import SPLITS, TaskSampler, request_of, sample_tasks
from ludus.worlds.functions.grader import Truth, gold_calls_made, part_made, solved
from ludus.worlds.functions.solver import CallFlaws, alternative_solutions, play

SHARES = {"train": 1.0, "validation": 0.1, "test": 0.25, "composition": 0.2}
"""Number of tasks of each split relative to training."""
FILE_SPLIT = "file"
"""The split with the tasks of `data`."""


class FunctionsSettings(BaseModel):
    """Settings of the functions world (`env.settings`)."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    num_tasks: int = Field(2000, ge=20)
    """Number of training tasks; validation, test and composition have a tenth, a quarter and a fifth of it."""
    num_held_out: int | None = Field(None, ge=1)
    """Number of tasks of test and of composition, instead of those shares."""
    levels: tuple[Literal[1, 2, 3, 4, 5], ...] = Field((1, 2, 3, 4, 5), min_length=1)
    """Levels of the tasks."""
    changed_in_training: bool = True
    """Also change signatures in train, validation and demonstrations, as in test and composition."""
    access: Literal["tool", "none"] = "tool"
    """`none` offers no functions: a baseline."""
    well_formed_weight: float = Field(0.1, ge=0, lt=0.5)
    """Weight of an episode without failed calls that is solved or made a gold call; `solved` has weight 1."""
    flaw_rate: float = Field(0.3, ge=0, le=1)
    """Share of the demonstrations that stop after the first of several calls, or call although no call is right."""
    correction_rate: float = Field(0.1, ge=0, le=1)
    """Share of the demonstrations with calls whose first call is rejected and then corrected."""
    data: str | None = None
    """File of tasks in BFCL format (JSON lines), which become the split `file`."""
    seed: int = 0
    """Seed of tasks and demonstrations."""
    data_answers: str | None = None
    """File with the `ground_truth` of `data`, if separate."""
    data_bad_lines: Literal["refuse", "skip"] = "refuse"
    """Invalid lines of `data`: raise an error that lists them, or log and skip them."""


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
        """The names of the splits; `file` only if `data` is set."""
        return SPLITS if self.settings.data is None else (*SPLITS, FILE_SPLIT)

    @property
    def rewards(self) -> tuple[Reward, ...]:
        """The outcome, 0 or 1, and a smaller format reward, for an episode without failed calls that is solved or
        made a gold call."""
        form = only_if(well_formed, either(solved, part_made))
        return Reward("solved", solved, outcome=True), Reward("well_formed", form, self.settings.well_formed_weight)

    @property
    def turn_verifier(self) -> TurnVerifier | None:
        """A milestone is a gold call; None without functions."""
        return gold_calls_made if self.settings.access == "tool" else None

    def tasks(self, split: str) -> Sequence[Task]:
        """Return the tasks of a split, alternating between levels."""
        check_split(split, self.splits, self.name)
        if split not in self._tasks:
            self._tasks[split] = self._make(split)
        return self._tasks[split]

    def environment(self, task: Task) -> ToolEnv | ApiEnv:
        """Return a new episode with its own state; calls of tasks of several turns run in the sandbox."""
        has_tools = self.settings.access == "tool"
        if isinstance(task.truth, ApiTruth):
            return ApiEnv(task.truth, self.rewards, self.limits, self.sandbox, has_tools)
        if isinstance(task.truth, Truth):
            scene = task.truth.scene
        else:  # a question of a user: one function of each domain
            first = {function.domain: function for function in [*catalogue().values()][::-1]}
            scene = Scene(task.seed, functions=tuple(first.values()))
        return ToolEnv(scene.tools() if has_tools else (), self.rewards, self.limits)

    def demonstrations(self, seed: int) -> Iterator[Dialogue]:
        """Yield dialogues of the flawed solver on new training tasks without end; no request is held out."""
        settings = self.settings
        rng = random.Random(f"demonstrations/{settings.seed}/{seed}")
        makers = [TaskSampler(rng, "train", level, settings.changed_in_training) for level in settings.levels]
        held_out = {request_of(task) for split in SPLITS[1:] for task in self.tasks(split)}
        for number in itertools.count():
            task = makers[number % len(makers)].task(number)
            if task is not None and request_of(task) not in held_out:
                yield _show(task, CallFlaws(settings.flaw_rate, settings.correction_rate), rng)

    def expert(self, task: Task) -> Dialogue | None:
        """Return a dialogue without flaws (of several turns: without responses); None if there are no functions."""
        if self.settings.access == "none":
            return None
        if isinstance(task.truth, ApiTruth):
            return Dialogue((*task.prompt, *gold_messages(task.truth)), tuple(self.environment(task).tools))
        return _show(task, CallFlaws(), random.Random(task.id)) if isinstance(task.truth, Truth) else None

    def difficulty_report(self) -> str:
        """Return the difficulty report of the generated tasks."""
        return shipped_report(self, self.settings == FunctionsSettings())

    def alternative_solutions(self, task: Task) -> Sequence[Sequence[Message]]:
        """Return episodes with reordered arguments, with defaults, with single calls, or with other words."""
        if self.settings.access == "none" or not isinstance(task.truth, Truth):
            return ()
        return tuple(alternative_solutions(task))

    def texts(self) -> Iterator[str]:
        """Yield descriptions of functions and dialogues as text, for the training of a tokenizer."""
        for dialogue in itertools.islice(self.demonstrations(seed=0), self.num_text_dialogues):
            for tool in dialogue.tools:
                function = tool.schema["function"]
                properties = function["parameters"]["properties"].items()
                params = ", ".join(f"{name}: {schema.get('type', 'any')}" for name, schema in properties)
                yield f"{function['name']}({params}) {function['description']}"
            for message in dialogue.messages:
                yield message["content"]
                for made in (call["function"] for call in message.get("tool_calls", [])):
                    yield f'{{"name": "{made["name"]}", "arguments": {made["arguments"]}}}'

    @property
    def runs_programs(self) -> bool:
        """Whether calls of a task of `data` run in the sandbox."""
        has_file = self.settings.data is not None
        return has_file and any(isinstance(task.truth, ApiTruth) for task in self.tasks(FILE_SPLIT))

    def with_sandbox(self, sandbox: Sandbox) -> FunctionsWorld:
        """Return this world with another sandbox."""
        return replace(self, sandbox=sandbox)

    async def close(self) -> None:
        """Close the sandbox."""
        await self.sandbox.close()

    def _make(self, split: str) -> tuple[Task, ...]:
        settings = self.settings
        if split == FILE_SPLIT and settings.data is not None:
            answers = Path(settings.data_answers) if settings.data_answers is not None else None
            return load_tasks(Path(settings.data), answers, split, settings.data_bad_lines)
        is_held_out = split in ("test", "composition")
        share = max(round(settings.num_tasks * SHARES[split]), 1)
        num = settings.num_held_out or share if is_held_out else share
        taken = {request_of(task) for other in SPLITS[: SPLITS.index(split)] for task in self.tasks(other)}
        changes = settings.changed_in_training or is_held_out
        samplers = [
            TaskSampler(random.Random(f"{split}/{level}/{settings.seed}"), split, level, changes)
            for level in settings.levels
        ]
        return sample_tasks(samplers, num, taken)


def make_functions_world(settings: Mapping[str, object], limits: ToolLimits) -> FunctionsWorld:
    """Return the world. Raises ConfigError for invalid settings."""
    return FunctionsWorld(read_settings(FunctionsSettings, settings), limits)


def _show(task: Task, flaws: CallFlaws, rng: random.Random) -> Dialogue:
    messages, truth = play(task, flaws, rng).messages, truth_of(task, Truth)
    has_call = truth.right in ("call", "any_call")
    return Dialogue((*task.prompt, *messages), truth.scene.tools(), "tool_use" if has_call else "negatives")
