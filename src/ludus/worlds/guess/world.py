"""The guess world: a small game of many turns without tools.

The environment chooses a number from a range; the model guesses, and the reply is "higher" or "lower", until
the guess is right or `rollout.max_turns` is reached. Bisection finds one of n numbers in `log2(n + 1)` guesses.
The reward of a turn is its fraction of the search, the logarithm of the reduction of the range.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from pydantic import Field

from ludus.envs.base import Environment, World
from ludus.envs.settings import WorldSettings, read_settings
from ludus.envs.tool_env import ToolLimits
from ludus.envs.tool_world import Dialogue, split_of
from ludus.rewards.base import Reward
from ludus.tools.base import Tool
from ludus.types import Action, Message, StepResult, StopReason, Task, Trajectory

SPLITS = {"train": 0.5, "validation": 0.2, "test": 0.3}


class GuessSettings(WorldSettings):
    """Settings of the guess world (`env.settings`)."""

    sizes: tuple[int, ...] = (11, 13, 15)
    """Sizes of the ranges of the tasks."""
    composition_size: int = Field(19, ge=3)
    """Size of the ranges of the split `composition`; no training task or demonstration has this size."""
    largest: int = Field(24, ge=7)
    """Largest number."""
    num_tasks: int = Field(1200, ge=10)
    """Number of tasks of all splits together."""
    flaw: float = Field(0.3, ge=0, le=1)
    """Fraction of the guesses in demonstrations that ignore one of the bounds."""
    seed: int = 0


def found(task: Task, trajectory: Trajectory) -> float:
    """Return 1 if the last guess is the number, else 0."""
    return float(trajectory.stop_reason is StopReason.ANSWERED and trajectory.answer.strip() == task.truth)


REWARDS = (Reward("found", found, outcome=True),)


class GuessEnv(Environment):
    """One game. A message is a guess; the reply is "higher" or "lower"."""

    tools: Sequence[Tool] = ()
    rewards: Sequence[Reward] = REWARDS

    def __init__(self) -> None:
        self._low = self._high = self._number = self._size = 0

    async def start(self, task: Task) -> list[Message]:
        self._low, self._high = (int(task.tags[name]) for name in ("low", "high"))
        self._number, self._size = int(str(task.truth)), self._high - self._low + 1
        return list(task.prompt)

    async def step(self, action: Action) -> StepResult:
        """Reply "higher" or "lower", or end the episode. A message without a number has reward 0."""
        text = action.message["content"].strip()
        if not (text.isascii() and text.isdigit() and len(text) < 9):
            return StepResult((Message(role="user", content="say a number"),), reward=0.0)
        guess = int(text)
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
        """Return the remaining range; `gigpo` groups turns by it."""
        return f"{self._low}-{self._high}"


@dataclass(frozen=True)
class GuessWorld(World):
    """Games of guessing a number."""

    task_lists: Mapping[str, Sequence[Task]]
    settings: GuessSettings
    name: str = "guess"
    splits: Sequence[str] = (*SPLITS, "composition")
    rewards: Sequence[Reward] = REWARDS
    emits_turn_rewards: bool = True

    def tasks(self, split: str) -> Sequence[Task]:
        return split_of(self.task_lists, split, self.name)

    def environment(self, task: Task) -> GuessEnv:
        return GuessEnv()

    def achieved(self, task: Task, trajectory: Trajectory) -> Task | None:
        """Return the task of the last guess in the range; None if it is the number, or a task of another split."""
        low, high = (int(task.tags[name]) for name in ("low", "high"))
        said = [one["content"].strip() for one in trajectory.messages if one["role"] == "assistant"]
        guesses = [int(text) for text in said if text.isascii() and text.isdigit() and len(text) < 9]
        fitting = [guess for guess in guesses if low <= guess <= high]
        if not fitting or str(fitting[-1]) == task.truth:
            return None
        other = make_task(low, high - low + 1, fitting[-1], "train")
        return None if other.id in self._held_out else other

    @cached_property
    def _held_out(self) -> frozenset[str]:
        return frozenset(one.id for split, tasks in self.task_lists.items() if split != "train" for one in tasks)

    def demonstrations(self, seed: int) -> Iterator[Dialogue]:
        rng = random.Random(f"{self.settings.seed}/{seed}/show")
        while True:
            task = rng.choice(self.task_lists["train"])
            yield Dialogue(tuple(flawed_game(task, rng, self.settings.flaw)), ())

    def expert(self, task: Task) -> Dialogue:
        """Return a game played by bisection."""
        return Dialogue(tuple(play(task, lambda low, high: (low + high) // 2)), ())


def make_guess_world(settings: Mapping[str, object], limits: ToolLimits) -> GuessWorld:
    """Build the world (the registered factory). Raises ConfigError for invalid settings."""
    chosen = read_settings(GuessSettings, settings)
    return GuessWorld(make_tasks(chosen), chosen)


def make_tasks(settings: GuessSettings) -> dict[str, list[Task]]:
    """Return distinct (range, number) pairs by split; equal settings return equal tasks."""
    rng = random.Random(settings.seed)
    lists: dict[str, list[Task]] = {name: [] for name in (*SPLITS, "composition")}
    seen: set[tuple[int, int, int]] = set()
    for _ in range(20 * settings.num_tasks):
        if len(seen) == settings.num_tasks:
            break
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
    """Return the task of one number."""
    high = low + size - 1
    asked = f"I think of a number from {low} to {high}. Guess it: reply with one number."
    question = Message(role="user", content=asked)
    tags = {"split": split, "size": str(size), "low": str(low), "high": str(high)}
    return Task(f"{low}-{high}-{number}", (question,), str(number), tags)


def flawed_game(task: Task, rng: random.Random, flaw: float) -> list[Message]:
    """Return a game with random guesses, which ignore one of the bounds with probability `flaw`."""
    first, last = int(task.tags["low"]), int(task.tags["high"])

    def guess(low: int, high: int) -> int:
        return rng.randint(*(rng.choice(((first, high), (low, last))) if rng.random() < flaw else (low, high)))

    return play(task, guess)


def play(task: Task, guess: Callable[[int, int], int]) -> list[Message]:
    """Return the messages of a game in which `guess` maps the remaining lowest and highest number to a guess."""
    low, high, number = int(task.tags["low"]), int(task.tags["high"]), int(str(task.truth))
    messages = list(task.prompt)
    while True:
        value = guess(low, high)
        messages.append(Message(role="assistant", content=str(value)))
        if value == number:
            return messages
        messages.append(Message(role="user", content="higher" if value < number else "lower"))
        low, high = (max(low, value + 1), high) if value < number else (low, min(high, value - 1))
