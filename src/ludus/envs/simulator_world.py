"""`SimulatorWorld`: worlds whose state is in a simulator. An action and an observation are texts.

A world defines a `Simulator`, one episode of a task, and a function that makes one from a task. Observations are user
messages, and each message of the model is an action: the content of its last `<action>` tag, or else the whole message.
The state of the simulator, its random numbers included, is never shown. After every turn the environment reports
success, return and checkpoints in an outcome `state`, so that an episode that ends at a limit is graded by its last
state.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Final, NamedTuple, TypeVar

from ludus.envs.base import Environment, World
from ludus.envs.tool_world import Dialogue, assistant, split_of
from ludus.images import IMAGE_MARK, image_url
from ludus.rewards.base import Reward
from ludus.rewards.extract import last_output
from ludus.types import Action, Message, StepResult, Task, ToolOutcome, ToolStatus, Trajectory, grouped

T = TypeVar("T")

STATE: Final = "state"
"""Tool name of the outcomes that report the state of the simulator."""
MAX_EXPERT_TURNS: Final = 500
"""Maximum length of an expert's episode."""
_ACTION = re.compile(r"<action>(.*?)</action>", re.S | re.I)


class Observation(NamedTuple):
    """Response of a simulator to an action.

    `reward` is that of the turn, for advantages with turn rewards. `valid` is false for an action that the simulator
    does not understand; the text then names valid ones.
    """

    text: str
    reward: float = 0.0
    done: bool = False
    valid: bool = True


class Simulator(ABC):
    """One episode: `reset`, `step` until done, `close`. An instance is used once; methods may block.

    An exception is an infrastructure failure; a mistake of the model is an observation.
    """

    success: float = 0.0
    """Success of the episode so far, between 0 and 1."""
    reached: frozenset[str] = frozenset()
    """Exploration checkpoints reached so far."""

    @abstractmethod
    def reset(self) -> str:
        """Return the first observation."""

    @abstractmethod
    def step(self, action: str) -> Observation:
        """Apply an action."""

    def actions(self) -> Sequence[str]:
        """Return the valid actions in this state; empty if they cannot be listed."""
        return ()

    def expert_action(self) -> str | None:
        """Return the next action of an expert, a function of the state; None without an expert."""
        return None

    def image(self) -> bytes | None:
        """Return a PNG of the present state, for vision-language models; None by default."""
        return None

    def state_key(self) -> str:
        """Return a text that identifies the state, for advantages that compare equal states; empty by default."""
        return ""

    def close(self) -> None:
        """Release the resources of the episode; also called without `reset`."""
        return


def action_of(text: str) -> str:
    """Return the action in a message: the content of the last `<action>` tag, or else the whole text."""
    found: list[str] = _ACTION.findall(text)
    return (found or [text])[-1].strip()


@dataclass
class _Account:
    """Sums over the turns of an episode."""

    total: float = 0.0
    turns: int = 0
    invalid: int = 0


class SimulatorEnv(Environment):
    """One episode of a simulator. With `blocks`, all calls of the simulator run in one separate thread."""

    def __init__(self, simulator: Simulator, rewards: Sequence[Reward], *, blocks: bool) -> None:
        self.rewards, self._simulator, self._account = rewards, simulator, _Account()
        self._thread = ThreadPoolExecutor(1, "simulator") if blocks else None

    async def start(self, task: Task) -> list[Message]:
        """Reset the simulator; the observation follows the prompt, unless this ends with a message of the user."""
        first = await self._call(lambda: _message(self._simulator, self._simulator.reset()))
        return [*task.prompt] if _shows_state(task) else [*task.prompt, first]

    async def step(self, action: Action) -> StepResult:
        """Apply the action in a message."""
        seen, messages = await self._call(lambda: self._apply(action_of(action.message["content"])))
        account = self._account
        account.total += seen.reward
        account.turns += 1
        account.invalid += not seen.valid
        state = {
            "success": self._simulator.success,
            "return": account.total,
            "valid": 1 - account.invalid / account.turns,
            "reached": sorted(self._simulator.reached),
        }
        outcome = ToolOutcome("", STATE, ToolStatus.OK, json.dumps(state))
        return StepResult(messages, seen.done, seen.reward, (outcome,))

    def _apply(self, action: str) -> tuple[Observation, tuple[Message, ...]]:
        seen = self._simulator.step(action)
        return seen, () if seen.done else (_message(self._simulator, seen.text),)

    async def close(self) -> None:
        """Close the simulator."""
        try:
            await self._call(self._simulator.close)
        finally:
            if self._thread is not None:
                self._thread.shutdown(wait=False)

    def state_key(self) -> str:
        return self._simulator.state_key()

    async def _call(self, function: Callable[[], T]) -> T:
        if self._thread is None:
            return function()
        return await asyncio.get_running_loop().run_in_executor(self._thread, function)


def _message(simulator: Simulator, text: str) -> Message:
    """Return the message with an observation, and the image of the state if there is one."""
    image = simulator.image()
    if image is None:
        return Message(role="user", content=text)
    return Message(role="user", content=f"{text}\n{IMAGE_MARK}", images=[image_url(image)])


def _shows_state(task: Task) -> bool:
    """Return whether the prompt contains the first observation."""
    return bool(task.prompt) and task.prompt[-1]["role"] == "user"


def _read(trajectory: Trajectory) -> Mapping[str, object]:
    state: Mapping[str, object] = json.loads(last_output(STATE)(trajectory) or "{}")
    return state


def _number(name: str) -> Callable[[Task, Trajectory], float]:
    def read(task: Task, trajectory: Trajectory) -> float:
        value = _read(trajectory).get(name, 0.0)
        return float(value) if isinstance(value, int | float) else 0.0

    return read


def _coverage(task: Task, trajectory: Trajectory) -> float:
    """Return the share of the task's checkpoints (tag `checkpoints`) that were reached; 0 if it has none."""
    reached, total = _read(trajectory).get("reached", ()), int(task.tags.get("checkpoints", "0"))
    return len(reached) / total if total and isinstance(reached, list) else 0.0


SIMULATOR_REWARDS: Final = (
    Reward("success", _number("success"), outcome=True),
    Reward("return", _number("return"), weight=0.0),
    Reward("valid_actions", _number("valid"), weight=0.0),
    Reward("coverage", _coverage, weight=0.0),
)
"""Success is the outcome; return, share of valid actions and coverage of the checkpoints are reported only."""


@dataclass(frozen=True)
class SimulatorWorld(World):
    """Tasks, and the simulator of each.

    `blocks` says that methods of the simulator may take more than a millisecond. `flaw` is the fraction of the actions
    in demonstrations that are random; they are excluded from the loss unless `flaws_train`. `relabel` returns the task
    that the actions of an attempt solve.
    """

    name: str
    task_lists: Mapping[str, Sequence[Task]]
    make: Callable[[Task], Simulator]
    blocks: bool = False
    flaw: float = 0.0
    flaws_train: bool = True
    rewards: Sequence[Reward] = field(default=SIMULATOR_REWARDS)
    has_expert: bool = True
    emits_turn_rewards: bool = True
    vary: Callable[[Task, random.Random], Task | None] | None = None
    """Function that returns a new task with the parameters of another one, as `variant`."""
    relabel: Callable[[Task, Sequence[str]], Task | None] | None = None
    """Function that returns the task that these actions solve, as `achieved`."""

    @property
    def splits(self) -> Sequence[str]:
        return tuple(self.task_lists)

    def tasks(self, split: str) -> Sequence[Task]:
        return split_of(self.task_lists, split, self.name)

    def environment(self, task: Task) -> SimulatorEnv:
        return SimulatorEnv(self.make(task), self.rewards, blocks=self.blocks)

    def implements(self, method: str) -> bool:
        """Return whether an optional method is available: scripted episodes need an expert, others a function."""
        lacks: tuple[str, ...] = () if self.has_expert else ("demonstrations", "expert")
        lacks += ("variant",) if self.vary is None else ()
        lacks += ("achieved",) if self.relabel is None else ()
        return super().implements(method) and method not in lacks

    def achieved(self, task: Task, trajectory: Trajectory) -> Task | None:
        said = (one["content"] for one in trajectory.messages[len(task.prompt) :] if one["role"] == "assistant")
        return None if self.relabel is None else self.relabel(task, [action_of(text) for text in said])

    def demonstrations(self, seed: int) -> Iterator[Dialogue]:
        """Yield the expert's episodes on training tasks, with random actions in between; families in equal parts."""
        rng = random.Random(f"demonstrations:{self.name}:{seed}")
        families = grouped(self.task_lists["train"], lambda task: task.tags.get("family", ""))
        while self.has_expert:
            task = rng.choice(families[rng.choice(list(families))])
            shown = play_expert(task, self.make(task), rng, self.flaw, flaws_train=self.flaws_train)
            if shown is not None:
                yield shown

    def expert(self, task: Task) -> Dialogue | None:
        """Return the expert's episode; None if it fails, for example by chance."""
        if not self.has_expert:
            return None
        simulator = self.make(task)
        shown = play_expert(task, simulator)
        return shown if simulator.success == 1 else None

    def variant(self, task: Task, rng: random.Random) -> Task | None:
        """Return a new task by `vary`."""
        return None if self.vary is None else self.vary(task, rng)

    def cheats(self, task: Task) -> Mapping[str, Sequence[Message]]:
        """Return an episode that claims success, and one of empty messages."""
        return {"claim": [assistant('{"success": 1.0}')] * 3, "silence": [assistant("")] * 3}


def play_expert(
    task: Task, simulator: Simulator, rng: random.Random | None = None, flaw: float = 0.0, *, flaws_train: bool = True
) -> Dialogue | None:
    """Return an episode of the simulator's expert, and close it; None without an expert, or if it does not end.

    An episode whose messages are all excluded from the loss is None as well.

    With probability `flaw` an action is a random one instead, in the loss if `flaws_train`.
    """
    try:
        first = _message(simulator, simulator.reset())
        messages = [*task.prompt] if _shows_state(task) else [*task.prompt, first]
        for _ in range(MAX_EXPERT_TURNS):
            action, options = simulator.expert_action(), simulator.actions()
            if action is None:
                return None
            said = assistant(action)
            if rng is not None and options and rng.random() < flaw:
                said = assistant(rng.choice(options))
                if said["content"] != action and not flaws_train:
                    said["train"] = False
            messages.append(said)
            seen = simulator.step(said["content"])
            if seen.done:
                trained = any(one["role"] == "assistant" and one.get("train", True) for one in messages)
                return Dialogue(tuple(messages), ()) if trained else None
            messages.append(_message(simulator, seen.text))
        return None
    finally:
        simulator.close()


def make_task(simulator: Simulator, name: str, system: str, tags: Mapping[str, str], seed: int = 0) -> Task:
    """Return a task whose prompt has the rules and the first observation of a simulator, which is closed."""
    try:
        first = Message(role="user", content=simulator.reset())
    finally:
        simulator.close()
    return Task(name, (Message(role="system", content=system), first), None, tags, seed=seed)
