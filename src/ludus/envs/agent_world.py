"""`AgentWorld`: a function of the user as the agent, which owns the loop and calls the policy.

The function runs tools as it likes and returns an answer. It calls the policy through a handle, `policy.chat(messages,
tools)`, or under a base URL, for agents that are written with another library. Calls may rewrite earlier messages, run
at the same time, and have their own system messages: what does not extend a recorded turn becomes another row of the
rollout (`ludus.rollouts.agent_session`).
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import fmean

from ludus.envs.base import Environment, PolicySession, World
from ludus.envs.tool_env import describe_error
from ludus.envs.tool_world import split_of
from ludus.errors import UserError, WorldError
from ludus.rewards.base import Reward
from ludus.tools.base import Tool
from ludus.tools.notes import Notes
from ludus.types import POLICY, Action, Message, StepResult, Task, Trajectory
from ludus.untrusted.worker import run_in_thread

AgentFunction = Callable[..., object]
"""`agent(task, policy)` or `agent(task, base_url, api_key)`, plain or `async`; returns the answer.

The second form may also have the parameter `policy`."""
RewardFunction = Callable[..., "float | Mapping[str, float]"]
"""`reward(task, answer)`, in [0, 1]; 1 is a success. For several agents, the reward of each by its name."""
URL_PARAMETERS = ("base_url", "api_key")


@dataclass(frozen=True)
class Policy:
    """The policy in a plain agent function, which runs in a thread."""

    session: PolicySession
    loop: asyncio.AbstractEventLoop

    @property
    def notes(self) -> Notes:
        """The notes of the rollout."""
        return self.session.notes

    def chat(self, messages: Sequence[Message], tools: Sequence[Tool] = (), agent: str = POLICY) -> Message:
        """Return an agent's next message, as `PolicySession.chat`."""
        return asyncio.run_coroutine_threadsafe(self.session.chat(messages, tools, agent), self.loop).result()

    def reward_reply(self, reply: Message | str, reward: float, index: int | None = None) -> None:
        """Set the reward of one reply, as `PolicySession.reward_reply`."""
        self.session.reward_reply(reply, reward, index)


class AgentEnvironment(Environment):
    """One run of an agent function, with `drive` in place of `start` and `step`."""

    def __init__(self, agent: AgentFunction, reward: RewardFunction) -> None:
        self._agent, self._reward = agent, reward
        self._value = 0.0
        self.rewards = (Reward("reward", self._outcome, outcome=True),)

    async def drive(self, task: Task, policy: PolicySession) -> None:
        """Run the function to its end and compute its reward. Raises its error, and WorldError if the reward raises."""
        given = agent_arguments(self._agent, policy)
        if inspect.iscoroutinefunction(self._agent):
            answer = await self._agent(task.truth, **given)
        else:
            handle = Policy(policy, asyncio.get_running_loop())
            given = {name: handle if value is policy else value for name, value in given.items()}
            answer = await asyncio.wrap_future(run_in_thread("agent", partial(self._agent, task.truth, **given)))
        try:
            value = policy.reward if policy.reward is not None else self._reward(task.truth, answer)
            value = await value if inspect.isawaitable(value) else value
            if isinstance(value, Mapping):
                policy.agent_rewards |= {str(name): float(one) for name, one in value.items()}
                value = fmean(policy.agent_rewards.values())
            self._value = float(value)
        except Exception as error:  # boundary: user code; the cause is chained
            raise WorldError(f"The reward of task {task.id} raised {describe_error(error)}") from error

    def _outcome(self, task: Task, trajectory: Trajectory) -> float:
        """Return the reward. A method, so that it is read in this process."""
        return self._value

    async def start(self, task: Task) -> list[Message]:
        return list(task.prompt)

    async def step(self, action: Action) -> StepResult:
        return StepResult(done=True)


def agent_arguments(agent: AgentFunction, policy: PolicySession) -> dict[str, object]:
    """Return the arguments of an agent function after the task: `policy`, or those of `URL_PARAMETERS` it names."""
    names = tuple(inspect.signature(agent).parameters)[1:]
    if not uses_url(agent):
        return dict.fromkeys(names[:1], policy)
    known = dict(zip(URL_PARAMETERS, policy.address, strict=True)) | {"policy": policy}
    return {name: value for name, value in known.items() if name in names}


def uses_url(agent: AgentFunction) -> bool:
    """Return whether an agent function calls the policy under a base URL."""
    return URL_PARAMETERS[0] in inspect.signature(agent).parameters


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

    @property
    def runs_agents(self) -> bool:
        return True

    @property
    def needs_server(self) -> bool:
        return uses_url(self.agent)

    @property
    def emits_turn_rewards(self) -> bool:
        return True

    def environment(self, task: Task) -> AgentEnvironment:
        return AgentEnvironment(self.agent, self.reward)
