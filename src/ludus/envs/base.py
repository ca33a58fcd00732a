"""Base classes: `World`, a source of tasks by split, and `Environment`, one episode of a task."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from importlib.resources import files
from itertools import islice
from typing import TYPE_CHECKING, ClassVar, Protocol, Self

from ludus.chat.hints import continuation, describe_failure, describe_start, with_text
from ludus.config.sections.rollout import RolloutConfig
from ludus.errors import UserError
from ludus.rewards.base import Reward
from ludus.rewards.code.turns import TurnVerifier
from ludus.rewards.process import Retriever
from ludus.rewards.rubric import Rubric
from ludus.sandbox import Sandbox, open_sandbox
from ludus.tools.base import Tool
from ludus.tools.notes import Notes
from ludus.types import POLICY, Action, DataClass, Message, StepResult, Task, ToolOutcome, Trajectory


def defines(instance: object, base: type, method: str) -> bool:
    """Return whether a class between that of `instance` and `base` defines the method."""
    classes = type(instance).__mro__
    return any(method in vars(one) for one in classes[: classes.index(base)])


class AgentClient(Protocol):
    """The remote client that runs the agent of a rollout."""

    def touch(self) -> None:
        """Note a request of the client."""

    def hold(self, num: int) -> None:
        """Count requests that wait for a reply."""

    def finish(self, answer: str | None, reward: float | None, error: str) -> None:
        """End the rollout with the client's report; an empty error is a success."""


class PolicySession(Protocol):
    """The policy of one rollout. `address` is its base URL and API key, empty if it is not served."""

    address: tuple[str, str]
    reward: float | None
    """The reward that a client reported for the rollout."""
    answer: str | None
    """The agent's answer, if it is not the policy's last message."""
    client: AgentClient | None
    """The remote client that runs the agent, if there is one."""
    agent_rewards: dict[str, float]
    """The reward of each agent by its name, set by an environment of several agents."""
    notes: Notes
    """The notes of the rollout, for `notes_tools`; if `rollout.notes` persist, also those of earlier steps."""

    @property
    def opponent(self) -> PolicySession | None:
        """A past version of the policy, which is not trained, if `rollout.opponents` is set."""

    @property
    def seed(self) -> int:
        """Seed of the rollout, for the randomness of its environment."""

    async def chat(self, messages: Sequence[Message], tools: Sequence[Tool] = (), agent: str = POLICY) -> Message:
        """Return an agent's next message, sampled as the continuation of the whole dialogue.

        Dialogues of agents with different names are separate. Raises RuntimeError if the rollout has ended, for
        example at a limit of turns or tokens.
        """

    def reward_reply(self, reply: Message | str, reward: float, index: int | None = None) -> None:
        """Set the reward of a message of `chat`, or of a response by its id: its choice `index`, if it has several.

        The last call for a reply counts. Raises LookupError if the rollout has no such reply, and ValueError.
        """


class Environment(ABC):
    """One episode of one task. An instance is used once: `start`, `step` until done, `close`.

    An exception of `start`, `step` or `close` is an infrastructure failure; a mistake of the model is an
    observation. A subclass defines `start` and `step`; all other methods are optional.
    """

    tools: Sequence[Tool] = ()
    """Tools that the model may call."""
    rewards: Sequence[Reward] = ()
    """Reward parts, computed after the episode."""

    @abstractmethod
    async def start(self, task: Task) -> list[Message]:
        """Return the initial messages of the episode."""

    @abstractmethod
    async def step(self, action: Action) -> StepResult:
        """Return the response to one action of the model."""

    async def drive(self, task: Task, policy: PolicySession) -> None:
        """Run the whole episode, in place of `start` and `step`, for agents that own the loop; return at its end.

        An exception before the first reply of the policy is an infrastructure failure, later a failure of the agent.
        """
        raise NotImplementedError

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


class WrappedEnvironment(Environment):
    """Base of environments that change another one; everything else is forwarded to it."""

    def __init__(self, inner: Environment) -> None:
        self.inner = inner
        self.tools, self.rewards = inner.tools, inner.rewards

    def task_of(self, task: Task) -> Task:
        """Return the task that the other environment receives."""
        return task

    async def start(self, task: Task) -> list[Message]:
        return await self.inner.start(self.task_of(task))

    async def step(self, action: Action) -> StepResult:
        return await self.inner.step(action)

    async def drive(self, task: Task, policy: PolicySession) -> None:
        await self.inner.drive(self.task_of(task), policy)

    async def close(self) -> None:
        await self.inner.close()

    def implements(self, method: str) -> bool:
        return defines(self, WrappedEnvironment, method) or self.inner.implements(method)

    def state_key(self) -> str:
        return self.inner.state_key()

    async def grade_again(self) -> ToolOutcome | None:
        return await self.inner.grade_again()


class HintedEnv(WrappedEnvironment):
    """An environment whose first messages end with a hint (`World.hint`)."""

    def __init__(self, inner: Environment, hint: str) -> None:
        super().__init__(inner)
        self.hint = hint

    async def start(self, task: Task) -> list[Message]:
        """Return the first messages, with the hint."""
        return with_text(await self.inner.start(task), self.hint)


class World(ABC):
    """A source of tasks and environments. Equal settings yield equal tasks in equal order.

    A subclass defines `name`, `rewards`, `splits`, `tasks` and `environment`; all other methods are optional.
    """

    num_text_dialogues: ClassVar[int] = 2_000
    """Number of demonstrations in the training corpus of a tokenizer."""

    if TYPE_CHECKING:

        @property
        def name(self) -> str:
            """The name in messages and records."""

        @property
        def rewards(self) -> Sequence[Reward]:
            """The reward parts; the first is the outcome."""

    @property
    @abstractmethod
    def splits(self) -> Sequence[str]:
        """The names of the splits."""

    @abstractmethod
    def tasks(self, split: str) -> Sequence[Task]:
        """Return the tasks of a split in a fixed order."""

    @abstractmethod
    def environment(self, task: Task) -> Environment:
        """Return a new environment for one episode."""

    def implements(self, method: str) -> bool:
        """Return whether a subclass defines an optional method."""
        return defines(self, World, method)

    def demonstrations(self, seed: int) -> Iterator[Demonstration]:
        """Yield dialogues on training tasks without end, for the cold start; none by default."""
        return iter(())

    def texts(self) -> Iterator[str]:
        """Yield the training corpus of a tokenizer: the texts of the first demonstrations."""
        for dialogue in islice(self.demonstrations(seed=0), self.num_text_dialogues):
            for message in dialogue.messages:
                yield message["content"]
                yield from (call["function"]["arguments"] for call in message.get("tool_calls", []))

    def expert(self, task: Task) -> Demonstration | None:
        """Return a dialogue that solves the task, always the same, or None."""
        return None

    def variant(self, task: Task, rng: random.Random) -> Task | None:
        """Return a new training task like `task`, drawn with `rng` alone, or None; its identifier is replaced.

        It must not equal a task of another split.
        """
        return None

    def hint(self, task: Task, attempt: Trajectory, num_actions: int) -> str | None:
        """Return advice for another attempt at the task after a failed one, or None.

        By default the error of the attempt, and the first `num_actions` actions of the expert without its answer. With
        0 actions the advice is feedback on the attempt alone.
        """
        shown = self.expert(task) if num_actions else None
        start = "" if shown is None else describe_start(continuation(shown.messages, task.prompt), num_actions)
        texts = {"An earlier attempt failed.": describe_failure(attempt), "A solution begins with:": start}
        return "\n".join(f"{title}\n{text}" for title, text in texts.items() if text) or None

    def paraphrases(self, task: Task) -> Sequence[str]:
        """Return texts that are as correct as the expert's answer, to audit the verifier."""
        return ()

    def alternative_solutions(self, task: Task) -> Sequence[Sequence[Message]]:
        """Return other correct episodes than the expert's, without the prompt, to audit the verifier."""
        return ()

    def cheats(self, task: Task) -> Mapping[str, Sequence[Message]]:
        """Return scripted episodes that must not be rewarded, without the prompt, by name of the cheat."""
        return {}

    def difficulty_report(self) -> str:
        """Return tables of the diversity of tasks and of success without skill; empty by default."""
        return ""

    @property
    def emits_turn_rewards(self) -> bool:
        """Whether the turns of its episodes may have rewards, for turn-level advantages."""
        return False

    @property
    def turn_verifier(self) -> TurnVerifier | None:
        """Function that returns the milestones reached in each turn, from task and trajectory alone."""
        return None

    def rubric(self, task: Task) -> Rubric | None:
        """Return the rubric of the task for LLM judges (`rewards.judge`), or None."""
        return None

    def rubric_checks(self, task: Task, trajectory: Trajectory) -> Mapping[str, bool]:
        """Return whether leaves of the task's rubric hold, by name, as far as rules decide them."""
        return {}

    @property
    def retrieval(self) -> Retriever | None:
        """Function that returns the documents that each turn retrieved and those that prove the answer, from task and
        trajectory alone, for `rewards.process.source = search_gain`."""
        return None

    def achieved(self, task: Task, trajectory: Trajectory) -> Task | None:
        """Return the task that an attempt at `task` solves by its actions, for hindsight relabelling; None without one.

        It must not be a task of another split than `train`. The actions are repeated in its environment, so the
        observations may differ.
        """
        return None

    def rollout_of(self, task: Task) -> RolloutConfig | None:
        """Return the episode settings for this task; None means those of the run."""
        return None

    def order(self, seed: int, chunk: int, num_chunks: int) -> TaskSequence:
        """Return the order of the training tasks for `num_chunks` steps of `chunk` tasks.

        Raises ConfigError if there are too few tasks.
        """
        return TaskOrder(self.tasks("train"), seed, chunk)

    def opening(self, question: str) -> Sequence[Message]:
        """Return the initial messages of an episode on a user's question.

        By default the system messages of the first task, and the question.
        """
        first = self.tasks(self.splits[0])[0]
        system = [message for message in first.prompt if message["role"] == "system"]
        return [*system, Message(role="user", content=question)]

    def with_sandbox(self, sandbox: Sandbox) -> World:
        """Return this world with an unused sandbox, which the world closes."""
        return self

    @property
    def runs_programs(self) -> bool:
        """Whether the world needs a sandbox with these settings."""
        return self.implements("with_sandbox")

    @property
    def runs_agents(self) -> bool:
        """Whether its environments have `drive`."""
        return False

    @property
    def roles(self) -> Sequence[str]:
        """Roles of the agents of its episodes: their names up to a slash; empty if an episode has one agent."""
        return ()

    @property
    def needs_opponents(self) -> bool:
        """Whether episodes of its training tasks use `PolicySession.opponent`."""
        return False

    @property
    def needs_server(self) -> bool:
        """Whether its agents call the policy under a base URL."""
        return False

    @property
    def episodes_at_once(self) -> int | None:
        """Maximum number of sandbox sessions; None means unlimited.

        Further episodes wait before they start, so that no episode waits for a session while it uses another.
        """
        return None

    def prepare(self, report: Callable[[str], None]) -> None:
        """Download files that do not ship with Ludus (`ludus env prepare NAME`); `report` receives progress messages.

        Raises UserError if they are unavailable.
        """
        return

    async def close(self) -> None:
        """Release the resources shared by all episodes, on the event loop that used them."""
        return


@dataclass(frozen=True)
class SandboxWorld(World):
    """A world that runs programs in one sandbox."""

    sandbox: Sandbox = field(default_factory=open_sandbox, kw_only=True)

    def with_sandbox(self, sandbox: Sandbox) -> Self:
        """Return this world with another sandbox."""
        return replace(self, sandbox=sandbox)

    async def close(self) -> None:
        """Close the sandbox."""
        await self.sandbox.close()


class SessionWorld(SandboxWorld):
    """A world whose episodes have sessions of one sandbox."""

    @property
    def episodes_at_once(self) -> int | None:
        """The sandbox's maximum number of sessions."""
        return self.sandbox.max_sessions


def shipped_report(world: World, is_default: bool) -> str:
    """Return the report that ships with the default tasks of a world; otherwise preceded by the sizes of its splits."""
    text = (files(f"ludus.worlds.{world.name}") / "data/difficulty_report.txt").read_text("utf-8").rstrip("\n")
    if is_default:
        return text
    sizes = "\n".join(f"{split:12} {len(world.tasks(split))} tasks" for split in world.splits)
    return f"{sizes}\n\nThe default tasks:\n{text}"


class TaskSequence(Protocol):
    """Endless order over tasks, a function of seed and position, so that resuming needs no state."""

    @property
    def tasks(self) -> Sequence[Task]:
        """All tasks in the order."""

    @property
    def chunk(self) -> int:
        """Number of tasks per step, in which no task repeats."""

    def take(self, start: int, num: int) -> list[Task]:
        """Return the tasks at positions `start` to `start + num`."""


@dataclass(frozen=True)
class TaskOrder:
    """An endless order over tasks: each epoch visits a task at most once, in a different order.

    An epoch is a whole number of `chunk`s (the tasks of one training step), so that no step repeats a task;
    the remaining tasks are dropped for that epoch. Needs at least `chunk` tasks.
    """

    tasks: Sequence[Task]
    seed: int
    chunk: int = 1

    def take(self, start: int, num: int) -> list[Task]:
        """Return the tasks at positions `start` to `start + num`, counted over all epochs."""
        size = len(self.tasks)
        epoch = size - size % self.chunk
        return [
            self.tasks[permutation(size, self.seed, position // epoch)[position % epoch]]
            for position in range(start, start + num)
        ]


@lru_cache(maxsize=32)
def permutation(size: int, seed: int | str, epoch: int) -> tuple[int, ...]:
    """Return the numbers below `size` in a random order determined by seed and epoch."""
    order = list(range(size))
    random.Random(f"order:{seed}:{epoch}").shuffle(order)
    return tuple(order)


def check_tasks(split: str, tasks: Sequence[Task]) -> None:
    """Raise UserError for a repeated id, a prompt that is not a sequence of messages, or a tag that is not a text."""
    seen: set[str] = set()
    for task in tasks:
        if not (isinstance(task.prompt, tuple | list) and all(isinstance(m, dict) for m in task.prompt)):
            raise UserError(
                f"The prompt of the task {task.id!r} of the split {split!r} is not a tuple of messages.",
                "Write prompt=(Message(role='user', content=...),).",
            )
        for name, tag in task.tags.items():
            if not isinstance(tag, str):
                where = f"of the task {task.id!r} of the split {split!r}"
                raise UserError(f"The tag {name!r} {where} is {tag!r}, not text.", f"Write {str(tag)!r}.")
        if task.id in seen:
            raise UserError(
                f"Two tasks of the split {split!r} share the id {task.id!r}.", "Give each task a unique id."
            )
        seen.add(task.id)


class Demonstration(Protocol):
    """A complete dialogue, and the tools that its prompt offers."""

    @property
    def messages(self) -> Sequence[Message]: ...

    @property
    def tools(self) -> Sequence[Tool]: ...

    @property
    def trains(self) -> Sequence[bool]:
        """Whether each message is part of the loss."""

    @property
    def data_class(self) -> DataClass | None:
        """The skill that it teaches; None if `class_of` infers it from the messages."""


def class_of(shown: Demonstration) -> DataClass:
    """Return the skill that a demonstration teaches.

    If it declares none: `tool_use` if it has a call, `negatives` if it has tools but no call, `reasoning` if it
    has reasoning, otherwise `format`.
    """
    if shown.data_class is not None:
        return shown.data_class
    if any(message.get("tool_calls") for message in shown.messages):
        return "tool_use"
    if shown.tools:
        return "negatives"
    thinks = any(message.get("reasoning_content") for message in shown.messages)
    return "reasoning" if thinks else "format"
