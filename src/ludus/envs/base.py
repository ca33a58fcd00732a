"""What a world is: tasks by split, and a fresh environment for each episode."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, ClassVar, Protocol

from ludus.config.sections.rollout import RolloutConfig
from ludus.errors import UserError
from ludus.rewards.base import Reward
from ludus.rewards.code.turns import TurnVerifier
from ludus.sandbox.base import BoundsSessions, Sandbox
from ludus.tasks.order import TaskOrder, TaskSequence
from ludus.tools.base import Tool
from ludus.types import Action, DataClass, Message, StepResult, Task, ToolOutcome


def defines(instance: object, base: type, method: str) -> bool:
    """Return whether a class between that of `instance` and `base` defines the method."""
    classes = type(instance).__mro__
    return any(method in vars(one) for one in classes[: classes.index(base)])


class Environment(ABC):
    """One episode of one task. An instance is used once: `start`, `step` until done, `close`.

    An exception of `start`, `step` or `close` is an infrastructure failure; a mistake of the model is an
    observation. A subclass defines `start` and `step`; everything else is optional.
    """

    tools: Sequence[Tool] = ()
    """Tools that the model may call."""
    rewards: Sequence[Reward] = ()
    """Scored when the episode has ended."""

    @abstractmethod
    async def start(self, task: Task) -> list[Message]:
        """Return the initial messages of the episode."""

    @abstractmethod
    async def step(self, action: Action) -> StepResult:
        """Return the response to one action of the model."""

    async def close(self) -> None:
        """Release the resources of the episode."""
        return

    def implements(self, method: str) -> bool:
        """Return whether a subclass defines an optional method."""
        return defines(self, Environment, method)

    def state_key(self) -> str:
        """Return a text that identifies the state before the model's next turn, for advantages that compare equal
        states (`gigpo`). By default these compare the messages of the last step."""
        return ""

    async def grade_again(self) -> ToolOutcome | None:
        """Return the outcome of grading the episode's final state once more, also after `close`.

        For environments that grade in their last `step`; None if nothing was graded. Raises WorldError if the
        sandbox fails.
        """
        return None


class World(ABC):
    """Where tasks and environments come from. Equal settings give equal tasks in equal order.

    A subclass defines `name`, `rewards`, `splits`, `tasks` and `environment`; everything else is optional.
    """

    num_text_dialogues: ClassVar[int] = 2_000
    """Demonstrations whose texts a tokenizer is trained on."""

    if TYPE_CHECKING:

        @property
        def name(self) -> str:
            """The name in messages and records."""

        @property
        def rewards(self) -> Sequence[Reward]:
            """The parts of the reward; the first one is the outcome."""

    @property
    @abstractmethod
    def splits(self) -> Sequence[str]:
        """The names of the splits."""

    @abstractmethod
    def tasks(self, split: str) -> Sequence[Task]:
        """Return the tasks of a split in a fixed order."""

    @abstractmethod
    def environment(self, task: Task) -> Environment:
        """Return a fresh environment for one episode."""

    def implements(self, method: str) -> bool:
        """Return whether a subclass defines an optional method."""
        return defines(self, World, method)

    def demonstrations(self, seed: int) -> Iterator[Demonstration]:
        """Yield dialogues on training tasks without end, for the cold start. None by default."""
        del seed
        return iter(())

    def texts(self) -> Iterator[str]:
        """Yield the texts of the first demonstrations, on which a tokenizer for this world is trained."""
        for dialogue in islice(self.demonstrations(seed=0), self.num_text_dialogues):
            for message in dialogue.messages:
                yield message["content"]
                yield from (call["function"]["arguments"] for call in message.get("tool_calls", []))

    def expert(self, task: Task) -> Demonstration | None:
        """Return a dialogue that solves the task, the same one each time, or None."""
        del task
        return None

    def paraphrases(self, task: Task) -> Sequence[str]:
        """Return texts that are as right as the answer of the expert, to check the verifier by."""
        del task
        return ()

    def alternative_solutions(self, task: Task) -> Sequence[Sequence[Message]]:
        """Return other correct episodes than the expert's, without the prompt, to audit the verifier."""
        del task
        return ()

    def cheats(self, task: Task) -> Mapping[str, Sequence[Message]]:
        """Return episodes that must not be paid: the messages behind the prompt, by the name of the cheat."""
        del task
        return {}

    def difficulty_report(self) -> str:
        """Return tables of how many tasks differ and how many are solved without skill; empty by default."""
        return ""

    @property
    def emits_turn_rewards(self) -> bool:
        """Whether the steps of its environments have rewards, for turn-level advantages."""
        return False

    @property
    def turn_verifier(self) -> TurnVerifier | None:
        """The function that names the milestones each turn reached, from task and trajectory alone."""
        return None

    def rollout_of(self, task: Task) -> RolloutConfig | None:
        """Return the settings of an episode of this task; None takes those of the run."""
        del task
        return None

    def order(self, seed: int, chunk: int, num_chunks: int) -> TaskSequence:
        """Return the order of the training tasks for `num_chunks` steps of `chunk` tasks.

        Raises ConfigError for too few tasks.
        """
        del num_chunks
        return TaskOrder(self.tasks("train"), seed, chunk)

    def opening(self, question: str) -> Sequence[Message]:
        """Return the messages that open an episode on a person's question.

        By default the system messages of the first task, and the question.
        """
        first = self.tasks(self.splits[0])[0]
        system = [message for message in first.prompt if message["role"] == "system"]
        return [*system, Message(role="user", content=question)]

    def with_sandbox(self, sandbox: Sandbox) -> World:
        """Return this world with a sandbox that nothing has been started in; the world closes it."""
        del sandbox
        return self

    @property
    def runs_programs(self) -> bool:
        """Whether it needs a sandbox as it is set up."""
        return self.implements("with_sandbox")

    @property
    def episodes_at_once(self) -> int | None:
        """The number of sessions that the sandbox has room for; None is no limit.

        More episodes wait before they begin, so that none that holds a session waits for one that does not.
        """
        return None

    def prepare(self, tell: Callable[[str], None]) -> None:
        """Fetch files that do not ship with Ludus (`ludus env prepare NAME`); `tell` takes each sentence.

        Raises UserError if they are unavailable.
        """
        del tell

    async def close(self) -> None:
        """Close what is shared by all episodes, on the event loop where it was used."""
        return


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
                f"Two tasks of the split {split!r} share the id {task.id!r}.", "Give each task an id of its own."
            )
        seen.add(task.id)


def room_of(sandbox: Sandbox) -> int | None:
    """How many sessions the sandbox has room for; None where it does not say."""
    return sandbox.most_sessions if isinstance(sandbox, BoundsSessions) else None


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
