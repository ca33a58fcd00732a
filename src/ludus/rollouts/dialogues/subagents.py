"""Sub-agents (`rollout.subagents`): the tool `delegate` runs the policy on a subtask, in a row of the same rollout.

The loop of a sub-agent is that of an episode (`run_unscored`), with tools of the environment and without its rewards.
Its dialogue is a row of the rollout, under the agent's name `sub/0`, `sub/1` or, for a sub-agent's sub-agent,
`sub/0/0`. Names and seeds follow the order of the calls of each agent, so that they do not depend on timing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from itertools import count

from ludus.config.sections.rollout import RolloutConfig
from ludus.engines.base import seed_for
from ludus.envs.base import Environment
from ludus.envs.tool_env import ExtraToolsEnv, ToolEnv, ToolLimits
from ludus.rewards.code.turns import turn_of_call
from ludus.rollouts.dialogues.context import ManagedChatSession
from ludus.rollouts.episode import ChatSession, EngineChatSession, run_unscored
from ludus.sandbox.local.namespaces import paused_in_queue
from ludus.tools.base import Tool, ToolError, Traits, tool
from ludus.types import Message, Segment, StopReason, Task, ToolOutcome, Trajectory

DELEGATE = "delegate"
"""Name of the tool."""


@dataclass
class SubAgents:
    """The sub-agents of one episode of a task. `make_chat` returns dialogues of the episode.

    All agents have the tools `shared`. With `serial`, the sub-agents of an agent run one after another, for engines
    that batch the requests of all episodes; otherwise those of one turn run concurrently.
    """

    task: Task
    sample: int
    make_chat: Callable[[], ChatSession]
    limits: RolloutConfig
    shared: Sequence[Tool] = ()
    serial: bool = False
    _ended: dict[tuple[int, ...], Trajectory] = field(init=False, default_factory=dict)

    async def run(self, environment: Environment) -> Trajectory:
        """Run the episode without scoring, as `run_unscored`; the rows and outcomes of sub-agents follow its own."""
        hidden = [one.name for one in self._tools(environment)] if self.limits.subagents.exclusive else []
        outer = self._with_delegate_tool(environment, self._tools(environment), (), hidden)
        trajectory = await run_unscored(self.task, self.sample, outer, self.make_chat(), self.limits)
        segments, outcomes = list(trajectory.segments), list(trajectory.outcomes)
        for path, ended in sorted(self._ended.items()):
            first_turn = max((segment.turn for segment in segments), default=-1) + 1
            segments += _moved(ended.segments, len(segments), first_turn, _name(path))
            outcomes += [_renumbered(outcome, first_turn) for outcome in ended.outcomes]
        shared = trajectory.shared_reward or len(segments) > len(trajectory.segments)
        return replace(trajectory, segments=tuple(segments), outcomes=tuple(outcomes), shared_reward=shared)

    def _tools(self, environment: Environment) -> list[Tool]:
        """Return the tools of sub-agents."""
        names = self.limits.subagents.tools
        return [one for one in environment.tools if not names or one.name in names]

    def _with_delegate_tool(
        self, inner: Environment, tools: Sequence[Tool], path: tuple[int, ...], hidden: Sequence[str] = ()
    ) -> Environment:
        """Return an environment whose tools include `delegate`, for the agent at a path in the tree of agents."""
        numbers, most = count(), self.limits.subagents.max_per_agent
        turns = asyncio.Lock() if self.serial else nullcontext()

        async def delegate(task: str) -> str:
            """Have an assistant do a subtask. It sees only this text. Returns its answer.

            Args:
                task: the subtask, with all that the assistant needs to know.
            """
            if (number := next(numbers)) >= most:
                raise ToolError(f"at most {most} subtasks can be delegated")
            with paused_in_queue():
                async with turns:
                    return await self._answer((*path, number), task, tools)

        own = tool(name=DELEGATE, traits=Traits(latency="slow"))(delegate)
        return ExtraToolsEnv(inner, [own, *self.shared], ToolLimits.of(self.limits), hidden)

    async def _answer(self, path: tuple[int, ...], text: str, tools: Sequence[Tool]) -> str:
        """Run a sub-agent and return its answer. Raises ToolError if it ends without one."""
        settings = self.limits.subagents
        system = [message for message in self.task.prompt if message["role"] == "system"]
        if settings.prompt:
            system = [Message(role="system", content=settings.prompt)]
        task = replace(self.task, prompt=(*system, Message(role="user", content=text)), truth=None)
        tool_limits = ToolLimits.of(self.limits)
        environment: Environment = ToolEnv([*tools, *self.shared], (), tool_limits)
        if len(path) < settings.max_depth:
            environment = self._with_delegate_tool(ToolEnv(tools, (), tool_limits), tools, path)
        limits = self.limits.model_copy(update={"max_turns": settings.max_turns, "episode_timeout_s": None})
        chat = _named(self.make_chat(), path)
        ended = self._ended[path] = await run_unscored(task, self.sample, environment, chat, limits)
        if ended.stop_reason is not StopReason.ANSWERED:
            raise ToolError(f"the assistant ended without an answer ({ended.stop_reason})")
        return ended.answer


def _name(path: Sequence[int]) -> str:
    return "/".join(["sub", *map(str, path)])


def _named(chat: ChatSession, path: Sequence[int]) -> ChatSession:
    """Return the dialogue with the name and the seed of the sub-agent at a path."""
    if isinstance(chat, ManagedChatSession):
        first = _named(chat.first, path)
        assert isinstance(first, EngineChatSession)
        return replace(chat, first=first)
    if not isinstance(chat, EngineChatSession):
        return chat
    name = ".".join(map(str, path))
    agent = _name(path)
    return replace(chat, episode=f"{chat.episode}~{name}", seed=seed_for(chat.seed, agent), agent=agent)


def _moved(segments: Sequence[Segment], start: int, first_turn: int, agent: str) -> list[Segment]:
    """Return the segments of a sub-agent with parents and turns shifted to their position `start` in the rollout."""
    found = []
    for number, segment in enumerate(segments):
        parent = segment.parent if segment.parent is not None else number - 1
        parent = parent + start if parent >= 0 else -1
        found.append(replace(segment, parent=parent, turn=segment.turn + first_turn, agent=agent))
    return found


def _renumbered(outcome: ToolOutcome, first_turn: int) -> ToolOutcome:
    """Return the outcome with the turn of its call in the rollout."""
    turn = turn_of_call(outcome.call_id)
    if turn is None:
        return outcome
    return replace(outcome, call_id=f"call_{turn + first_turn}_{outcome.call_id.rpartition('_')[2]}")
