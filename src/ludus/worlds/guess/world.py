"""Guess a number: a small game of many turns, without tools.

The environment thinks of a number from a range; the model guesses, and is told "higher" or "lower", until it
is right or its turns are used up (`rollout.max_turns`). Halving what is left finds one of n numbers in
`log2(n + 1)` guesses. Each turn earns the share of the search that it did.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict, Field

from ludus.envs.base import Environment, World
from ludus.envs.settings import read_settings
from ludus.envs.tool_world import Dialogue, split_of
from ludus.envs.toolbox import ToolLimits
from ludus.rewards.base import Reward
from ludus.tools.base import Tool
from ludus.types import Action, Message, StepResult, StopReason, Task, Trajectory

SPLITS = {"train": 0.5, "validation": 0.2, "test": 0.3}


class GuessSettings(BaseModel):
    """The world's settings (`env.settings`)."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    sizes: tuple[int, ...] = (11, 13, 15)
    """Numbers in the range of a task."""
    composition_size: int = Field(19, ge=3)
    """The same of the split `composition`: a range that no training task and no demonstration has."""
    largest: int = Field(24, ge=7)
    """No number is above this."""
    num_tasks: int = Field(1200, ge=10)
    """Tasks of all splits together."""
    flaw: float = Field(0.3, ge=0, le=1)
    """Share of the guesses in demonstrations that forget one of the bounds."""
    seed: int = 0


def found(task: Task, trajectory: Trajectory) -> float:
    """1 if the last guess was the number."""
    return float(trajectory.stop_reason is StopReason.ANSWERED and trajectory.answer.strip() == task.truth)


REWARDS = (Reward("found", found, outcome=True),)


class GuessEnv(Environment):
    """One number. A message is a guess; the reply says where the number lies."""

    tools: Sequence[Tool] = ()
    rewards: Sequence[Reward] = REWARDS

    def __init__(self) -> None:
        self._low = self._high = self._number = self._size = 0

    async def start(self, task: Task) -> list[Message]:
        """The task's own messages."""
        self._low, self._high = (int(task.tags[name]) for name in ("low", "high"))
        self._number, self._size = int(str(task.truth)), self._high - self._low + 1
        return list(task.prompt)

    async def step(self, action: Action) -> StepResult:
        """Higher, lower, or the end; a message that is no number is told so and earns nothing."""
        text = action.message["content"].strip()
        guess = int(text) if text.isascii() and text.isdigit() and len(text) < 9 else None
        if guess is None:
            return StepResult((Message(role="user", content="say a number"),), reward=0.0)
        before = self._high - self._low + 1
        if guess < self._number:
            self._low = max(self._low, guess + 1)
        elif guess > self._number:
            self._high = min(self._high, guess - 1)
        else:
            self._low = self._high = guess
        earned = math.log(before / (self._high - self._low + 1)) / math.log(self._size)
        if guess == self._number:
            return StepResult(done=True, reward=earned)
        word = "higher" if guess < self._number else "lower"
        return StepResult((Message(role="user", content=word),), reward=earned)

    def state_key(self) -> str:
        """What is known of the number: turns that begin with the same are compared by `gigpo`."""
        return f"{self._low}-{self._high}"


@dataclass(frozen=True)
class GuessWorld(World):
    """The world of the game."""

    task_lists: Mapping[str, Sequence[Task]]
    settings: GuessSettings
    name: str = "guess"
    rewards: Sequence[Reward] = REWARDS
    emits_turn_rewards: bool = True

    @property
    def splits(self) -> Sequence[str]:
        """The names of the splits."""
        return tuple(self.task_lists)

    def tasks(self, split: str) -> Sequence[Task]:
        """The tasks of a split."""
        return split_of(self.task_lists, split, self.name)

    def environment(self, task: Task) -> GuessEnv:
        """A fresh game."""
        del task
        return GuessEnv()

    def demonstrations(self, seed: int) -> Iterator[Dialogue]:
        """Games of a player who guesses badly, on training tasks."""
        rng = random.Random(f"{self.settings.seed}/{seed}/show")
        while True:
            task = rng.choice(self.task_lists["train"])
            yield Dialogue(tuple(play_badly(task, rng, self.settings.flaw)), ())

    def expert(self, task: Task) -> Dialogue:
        """A game that halves the range with each guess."""
        return Dialogue(tuple(played(task, lambda low, high: (low + high) // 2)), ())

    def texts(self) -> Iterator[str]:
        """What is said in games, for a tokenizer of this world's own."""
        for dialogue, _ in zip(self.demonstrations(seed=0), range(2_000), strict=False):
            yield from (message["content"] for message in dialogue.messages)


def make_guess_world(settings: Mapping[str, object], limits: ToolLimits) -> GuessWorld:
    """The world of these settings. Raises ConfigError for settings it does not know."""
    chosen = read_settings(GuessSettings, settings)
    del limits  # there are no tools
    return GuessWorld(make_tasks(chosen), chosen)


def make_tasks(settings: GuessSettings) -> dict[str, list[Task]]:
    """Distinct (range, number) pairs; which split one is in depends on the pair and the seed alone."""
    rng = random.Random(settings.seed)
    lists: dict[str, list[Task]] = {name: [] for name in (*SPLITS, "composition")}
    seen: set[tuple[int, int, int]] = set()
    attempts = 0
    while len(seen) < settings.num_tasks and attempts < 20 * settings.num_tasks:
        attempts += 1
        split = rng.choices(list(lists), (*SPLITS.values(), SPLITS["test"]))[0]
        size = settings.composition_size if split == "composition" else rng.choice(settings.sizes)
        size = min(size, settings.largest)
        low = rng.randint(1, settings.largest - size + 1)
        number = rng.randint(low, low + size - 1)
        if (low, size, number) not in seen:
            seen.add((low, size, number))
            lists[split].append(make_task(low, size, number, split))
    return lists


def make_task(low: int, size: int, number: int, split: str) -> Task:
    """The game of one number."""
    high = low + size - 1
    asked = f"I think of a number from {low} to {high}. Guess it: reply with one number."
    question = Message(role="user", content=asked)
    tags = {"split": split, "size": str(size), "low": str(low), "high": str(high)}
    return Task(f"{low}-{high}-{number}", (question,), str(number), tags)


def play_badly(task: Task, rng: random.Random, flaw: float) -> list[Message]:
    """A demonstration by somebody who guesses anywhere, and often forgets one of the bounds."""
    first, last = int(task.tags["low"]), int(task.tags["high"])

    def guess(low: int, high: int) -> int:
        forgets = rng.random() < flaw
        return rng.randint(*((low, high) if not forgets else rng.choice(((first, high), (low, last)))))

    return played(task, guess)


def played(task: Task, guess: Callable[[int, int], int]) -> list[Message]:
    """The game of a player who guesses so from the lowest and the highest number that are left."""
    low, high, number = int(task.tags["low"]), int(task.tags["high"]), int(str(task.truth))
    messages = list(task.prompt)
    while True:
        said = guess(low, high)
        messages.append(Message(role="assistant", content=str(said)))
        if said == number:
            return messages
        messages.append(Message(role="user", content="higher" if said < number else "lower"))
        low, high = (max(low, said + 1), high) if said < number else (low, min(high, said - 1))
