"""`AgentWorld`: a plain function as the agent, which calls the policy through a handle.

The function owns the loop: it calls `policy.chat(messages, tools)`, receives the assistant message, runs tools as it
likes, and returns an answer. Each call must extend the messages of the previous one, so that the episode is one chain
of exact tokens.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from ludus.envs.base import Environment, World
from ludus.envs.tool_world import split_of
from ludus.errors import UserError, WorldError
from ludus.rewards.base import Reward
from ludus.tools.base import Tool
from ludus.types import Action, Message, StepResult, Task
from ludus.untrusted.worker import run_in_thread

AgentFunction = Callable[..., object]
"""`agent(task, policy)`, plain or `async`; returns the answer."""
RewardFunction = Callable[..., float]
"""`reward(task, answer)`, in [0, 1]; 1 is a success."""


@dataclass(frozen=True)
class PolicyCall:
    """A request of an agent function: all messages so far, the tools, and the future of the response."""

    messages: Sequence[Message]
    tools: Sequence[Tool]
    response: asyncio.Future[Message]


@dataclass
class AsyncPolicy:
    """The policy in an `async` agent function."""

    calls: asyncio.Queue[PolicyCall] = field(default_factory=asyncio.Queue)
    closed: bool = False

    async def chat(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> Message:
        """Return the policy's next message. `messages` extends those of the previous call and its response.

        Raises RuntimeError if the episode has ended, for example at a limit of turns or tokens.
        """
        if self.closed:
            raise RuntimeError("the episode has ended")
        response: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        await self.calls.put(PolicyCall(list(messages), tools, response))
        return await response


@dataclass(frozen=True)
class Policy:
    """The policy in a plain agent function, which runs in a thread."""

    policy: AsyncPolicy
    loop: asyncio.AbstractEventLoop

    def chat(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> Message:
        """Return the policy's next message. `messages` extends those of the previous call and its response."""
        return asyncio.run_coroutine_threadsafe(self.policy.chat(messages, tools), self.loop).result()


class AgentEnvironment(Environment):
    """One run of an agent function; its calls of the policy are the turns."""

    def __init__(self, agent: AgentFunction, reward: RewardFunction) -> None:
        self._agent, self._reward = agent, reward
        self._policy = AsyncPolicy()
        self._run: asyncio.Task[object] | None = None
        self._pending: PolicyCall | None = None
        self._history: list[Message] = []
        self._value = 0.0
        self.rewards = (Reward("reward", lambda task, trajectory: self._value, outcome=True),)

    async def start(self, task: Task) -> list[Message]:
        """Run the function until its first call of the policy. Raises WorldError if it returns without one."""
        self._task = task
        self._run = asyncio.create_task(self._call(task.truth))
        call = await self._next_call(self._run)
        if call is None:
            raise WorldError("The agent function returned without a call of policy.chat.")
        self.tools = tuple(call.tools)
        return self._new_messages(call)

    async def step(self, action: Action) -> StepResult:
        """Resume the function with the policy's message; return the messages of its next call, or end the episode."""
        assert self._run is not None
        assert self._pending is not None
        self._history.append(action.message)
        self._pending.response.set_result(action.message)
        call = await self._next_call(self._run)
        if call is not None:
            return StepResult(tuple(self._new_messages(call)))
        value = self._reward(self._task.truth, self._run.result())
        self._value = float(await value if inspect.isawaitable(value) else value)
        return StepResult(done=True)

    async def close(self) -> None:
        """Cancel the function if it is still running; a plain function ends with an error in its next call."""
        self._policy.closed = True
        if self._pending is not None:
            self._pending.response.cancel()
        if self._run is not None and not self._run.done():
            self._run.cancel()
            await asyncio.wait({self._run})

    async def _call(self, task: object) -> object:
        if inspect.iscoroutinefunction(self._agent):
            return await self._agent(task, self._policy)
        policy = Policy(self._policy, asyncio.get_running_loop())
        return await asyncio.wrap_future(run_in_thread("agent", partial(self._agent, task, policy)))

    async def _next_call(self, run: asyncio.Task[object]) -> PolicyCall | None:
        """Wait for the next call, or the end of the function (None). Raises its error."""
        waiting = asyncio.ensure_future(self._policy.calls.get())
        await asyncio.wait({waiting, run}, return_when=asyncio.FIRST_COMPLETED)
        if waiting.done():
            self._pending = waiting.result()
            return self._pending
        waiting.cancel()
        run.result()
        return None

    def _new_messages(self, call: PolicyCall) -> list[Message]:
        """Return the messages after those of the previous turns. Raises WorldError if these were changed."""
        start = len(self._history)
        if list(call.messages[:start]) != self._history or len(call.messages) == start:
            raise WorldError(
                f"Call {start + 1} of policy.chat does not extend the previous messages.",
                "Append the policy's message and new messages to the same list; do not edit or remove earlier ones.",
            )
        added = list(call.messages[start:])
        self._history += added
        return added


@dataclass(frozen=True)
class AgentWorld(World):
    """Tasks of any type for an agent function; the truth of a task is the user's object."""

    agent: AgentFunction
    reward: RewardFunction
    task_lists: Mapping[str, Sequence[Task]]
    name: str = "agent"
    rewards: Sequence[Reward] = field(default=(Reward("reward", lambda task, trajectory: 0.0, outcome=True),))

    @classmethod
    def of(
        cls, agent: AgentFunction, tasks: Sequence[object] | Mapping[str, Sequence[object]], reward: RewardFunction
    ) -> AgentWorld:
        """Return the world of tasks by split, or of a list, every fifth task of which is held out.

        Raises UserError if a split is empty.
        """
        if not isinstance(tasks, Mapping):
            held_out = list(tasks[4::5])
            tasks = {"train": [one for i, one in enumerate(tasks) if i % 5 != 4], "test": held_out}
        splits = {"validation": tasks.get("test", ()), **tasks}
        if empty := [name for name in ("train", "validation") if not splits.get(name)]:
            hint = "Pass a list of at least five tasks, or tasks for this split."
            raise UserError(f"The agent has no tasks of the split {empty[0]!r}.", hint)
        lists: dict[str, list[Task]] = {split: [] for split in splits}
        for split, found in splits.items():
            for i, one in enumerate(found):
                lists[split].append(Task(f"{split}:{i}", (Message(role="user", content=str(one)),), truth=one))
        return cls(agent, reward, lists)

    @property
    def splits(self) -> Sequence[str]:
        return tuple(self.task_lists)

    def tasks(self, split: str) -> Sequence[Task]:
        return split_of(self.task_lists, split, self.name)

    def environment(self, task: Task) -> AgentEnvironment:
        return AgentEnvironment(self.agent, self.reward)
