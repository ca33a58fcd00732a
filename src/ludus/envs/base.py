"""What a world is: tasks by split, and a fresh environment for each episode."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from ludus.config.sections.rollout import RolloutConfig
from ludus.errors import UserError
from ludus.rewards.base import Reward
from ludus.rewards.code.turns import TurnVerifier
from ludus.sandbox.base import BoundsSessions, Sandbox
from ludus.tasks.order import TaskOrder, TaskSequence
from ludus.tools.base import Tool
from ludus.types import Action, DataClass, Message, StepResult, Task, ToolOutcome


class Environment(Protocol):
    """One episode of one task. An instance is used once: `start`, `step` until done, `close`.

    Whatever `start`, `step` and `close` raise counts as a failure of the infrastructure; what the model does
    wrong is an observation. `rewards` are scored when the episode has ended.
    """

    @property
    def tools(self) -> Sequence[Tool]: ...

    @property
    def rewards(self) -> Sequence[Reward]: ...

    async def start(self, task: Task) -> list[Message]:
        """The messages that open the episode."""
        ...

    async def step(self, action: Action) -> StepResult:
        """Answer one action of the model."""
        ...

    async def close(self) -> None: ...


@runtime_checkable
class HasStateKey(Protocol):
    """An environment that can name the state that it is in, for advantages that compare equal states."""

    def anchor(self) -> str:
        """The state before the model's next turn; equal texts are equal states."""
        ...


@runtime_checkable
class EmitsTurnRewards(Protocol):
    """A world that says whether the steps of its environments have rewards, for advantages of turns."""

    @property
    def emits_turn_rewards(self) -> bool: ...


@runtime_checkable
class VerifiesTurns(Protocol):
    """A world that can tell which turns of an episode brought it closer to the solution."""

    @property
    def turn_verifier(self) -> TurnVerifier | None:
        """The verifier, which reads task and trajectory alone; None if the world's settings leave none."""
        ...


def turn_verifier_of(world: World) -> TurnVerifier | None:
    """Return the turn verifier of a world, None if it has none."""
    return world.turn_verifier if isinstance(world, VerifiesTurns) else None


@runtime_checkable
class Regradable(Protocol):
    """An environment whose verdict is an outcome that it leaves: what it judged can be judged once more."""

    async def grade_again(self) -> ToolOutcome | None:
        """The outcome of another grading of what was there at the end, also after `close`; None where nothing
        was graded. Raises WorldError where the sandbox breaks."""
        ...


class World(Protocol):
    """Where tasks and environments come from. Equal settings give equal tasks in equal order."""

    @property
    def name(self) -> str: ...

    @property
    def splits(self) -> Sequence[str]: ...

    @property
    def rewards(self) -> Sequence[Reward]: ...

    def tasks(self, split: str) -> Sequence[Task]:
        """The tasks of a split in a fixed order."""
        ...

    def environment(self, task: Task) -> Environment:
        """A fresh environment for one episode."""
        ...


def check_tasks(split: str, tasks: Sequence[Task]) -> None:
    """Raise UserError where two tasks of a split share an id, by which results are kept, or one has a prompt
    that is no messages or a tag that is no text."""
    seen: set[str] = set()
    for task in tasks:
        if not (isinstance(task.prompt, tuple | list) and all(isinstance(m, dict) for m in task.prompt)):
            raise UserError(
                f"The prompt of the task {task.id!r} of the split {split!r} is no tuple of messages.",
                "Write prompt=(Message(role='user', content=...),).",
            )
        wrong = {name: tag for name, tag in task.tags.items() if not isinstance(tag, str)}
        for name, tag in wrong.items():
            raise UserError(
                f"The tag {name!r} of the task {task.id!r} of the split {split!r} is {tag!r}, not text.",
                f"Write {str(tag)!r}.",
            )
        if task.id in seen:
            raise UserError(
                f"Two tasks of the split {split!r} share the id {task.id!r}.",
                "Give each task an id of its own.",
            )
        seen.add(task.id)


@runtime_checkable
class Demonstrates(Protocol):
    """A world that can also show how it is done: dialogues for the cold start."""

    def demonstrations(self, seed: int) -> Iterator[Demonstration]:
        """An endless stream of dialogues on training tasks."""
        ...

    def texts(self) -> Iterator[str]:
        """Texts on which a tokenizer for this world is trained."""
        ...


@runtime_checkable
class ShowsTasks(Protocol):
    """A world that can show how a given task is done: experts that train beside the policy."""

    def expert(self, task: Task) -> Demonstration | None:
        """A dialogue that solves the task, the same one each time; None where there is none."""
        ...


@runtime_checkable
class OffersParaphrases(Protocol):
    """A world that knows other words for the right answer, by which its verifier is checked."""

    def paraphrases(self, task: Task) -> Sequence[str]:
        """Texts that are as right as the answer of the expert; none where there is no other way to say it."""
        ...


@runtime_checkable
class OffersOtherWays(Protocol):
    """A world that knows other right episodes than those of its expert, by which its verifier is checked."""

    def other_ways(self, task: Task) -> Sequence[Sequence[Message]]:
        """The messages behind the prompt, tools' ones included; none where there is no other way."""
        ...


@runtime_checkable
class OffersCheats(Protocol):
    """A world that knows ways to be paid for nothing that only it could be cheated by."""

    def cheats(self, task: Task) -> Mapping[str, Sequence[Message]]:
        """The messages behind the prompt, by the name of the cheat; none of them may be paid."""
        ...


@runtime_checkable
class Surveys(Protocol):
    """A world that counts how many of its tasks really differ, and what is solved without skill."""

    def survey(self, measure: bool) -> str:
        """Tables: tasks, requests and shapes of solutions by level, and baselines; empty for foreign tasks.

        What takes minutes is measured where `measure` says so, and named otherwise. For use outside an event
        loop.
        """
        ...


@runtime_checkable
class SetsBounds(Protocol):
    """A world whose episodes are bounded by their task: a mixture."""

    def rollout_of(self, task: Task) -> RolloutConfig:
        """The settings of an episode of this task; only its budgets differ from those of the run."""
        ...


@runtime_checkable
class OrdersTasks(Protocol):
    """A world that says which training task comes when: a mixture."""

    def order(self, seed: int, chunk: int, num_chunks: int) -> TaskSequence:
        """For a run of `num_chunks` steps of `chunk` tasks. Raises ConfigError for too few tasks."""
        ...


def order_of(world: World, seed: int, chunk: int, num_chunks: int) -> TaskSequence:
    """The order of the training tasks for a run of `num_chunks` steps of `chunk` tasks, at least as many."""
    if isinstance(world, OrdersTasks):
        return world.order(seed, chunk, num_chunks)
    return TaskOrder(world.tasks("train"), seed, chunk)


@runtime_checkable
class Chats(Protocol):
    """A world in which a person may ask questions of their own."""

    def opening(self, question: str) -> Sequence[Message]:
        """The messages that open an episode on this question, as those of the world's tasks do."""
        ...


@runtime_checkable
class Closes(Protocol):
    """A world that keeps something open over its episodes: a sandbox, a server whose tools it offers."""

    async def close(self) -> None:
        """Close it, on the event loop where it was used. Called when a command is done with the world."""
        ...


@runtime_checkable
class UsesSandbox(Closes, Protocol):
    """A world whose tools run programs. `build_world` gives it the sandbox of the settings; it closes it."""

    def with_sandbox(self, sandbox: Sandbox) -> World:
        """This world with that sandbox, which nothing has been started in yet."""
        ...


@runtime_checkable
class SaysIfItRuns(Protocol):
    """A world that may be set up without tools that run programs."""

    @property
    def runs_programs(self) -> bool:
        """Whether it has such tools as it is."""
        ...


def runs_programs(world: World) -> bool:
    """Whether a world needs its sandbox; one that takes a sandbox and does not say so does."""
    return world.runs_programs if isinstance(world, SaysIfItRuns) else isinstance(world, UsesSandbox)


@runtime_checkable
class LimitsConcurrency(Protocol):
    """A world whose episodes each hold a session of a sandbox from their start to their end."""

    @property
    def episodes_at_once(self) -> int | None:
        """How many the sandbox has room for; None where it does not say. More wait before they begin, so
        that none that holds a session ever waits for one that does not."""
        ...


def room_of(sandbox: Sandbox) -> int | None:
    """How many sessions the sandbox has room for; None where it does not say."""
    return sandbox.most_sessions if isinstance(sandbox, BoundsSessions) else None


@runtime_checkable
class Prepares(Protocol):
    """A world that needs files which do not ship with Ludus (`ludus env prepare NAME`)."""

    def prepare(self, tell: Callable[[str], None]) -> None:
        """Fetch what is missing, telling what. Raises UserError where it cannot be had."""
        ...


class Demonstration(Protocol):
    """A whole dialogue with the tools that it may use."""

    @property
    def messages(self) -> Sequence[Message]: ...

    @property
    def tools(self) -> Sequence[Tool]: ...

    @property
    def trains(self) -> Sequence[bool]:
        """For each message whether it enters the loss."""
        ...

    @property
    def data_class(self) -> DataClass | None:
        """What it teaches; None if this follows from its messages (`class_of`)."""
        ...


def class_of(shown: Demonstration) -> DataClass:
    """Return what a demonstration teaches.

    Unless it names its class: `tool_use` if it has a call, `negatives` if tools are on offer and none is
    called, `reasoning` if it has thinking, otherwise `format`.
    """
    if shown.data_class is not None:
        return shown.data_class
    if any(message.get("tool_calls") for message in shown.messages):
        return "tool_use"
    if shown.tools:
        return "negatives"
    thinks = any(message.get("reasoning_content") for message in shown.messages)
    return "reasoning" if thinks else "format"


WorldFactory = Callable[[Mapping[str, Any]], World]
"""Makes a world of its settings; raises `ConfigError` for settings that it does not know."""
