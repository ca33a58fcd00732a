"""The service world: tasks, episodes with a user, demonstrations.

The flaws of demonstrations are systematic, since noise averages out in training: a change without confirmation, a
forgotten second request, an instruction in the data that is followed, or a forbidden request that is fulfilled.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from itertools import islice

from ludus.envs.base import Environment, PolicySession, World
from ludus.envs.settings import read_settings
from ludus.envs.task_archive import SPLITS, split_sizes
from ludus.envs.tool_env import ToolExecutor, ToolLimits, tool_message
from ludus.envs.tool_world import Dialogue, check_split
from ludus.errors import ConfigError
from ludus.rewards.base import Reward, truth_of
from ludus.tools.base import Tool
from ludus.types import Action, Message, StepResult, Task, ToolOutcome, ToolStatus
from ludus.worlds.service.desk import DESK, agent_tools
from ludus.worlds.service.domain import DomainName
from ludus.worlds.service.grader import AGENT, REWARDS, SELF_PLAY_REWARDS, STATE, USER, ServiceTruth, report
from ludus.worlds.service.solver import Solver, cheats, flaws_of, new_desk
from ludus.worlds.service.tasks import ServiceSettings, make_tasks
from ludus.worlds.service.users import ChatUser, EndpointUser, ScriptedUser, Speaker, User, action_of_message

TASKS_PER_DATABASE = 40
"""Number of demonstrations with the same database."""


@cache
def _executor(domain: DomainName, limits: ToolLimits) -> ToolExecutor:
    """Return the executor of a domain; its tools find the episode in `DESK`."""
    return ToolExecutor(agent_tools(domain), limits)


class ServiceEnv(Environment):
    """One episode: a message without calls goes to the user, whose reply is the observation.

    It ends when the user ends it, or with `transfer_to_human`. Every turn reports the grades in an outcome `state`.
    """

    def __init__(self, truth: ServiceTruth, limits: ToolLimits, strict: bool, speak: Speaker | None = None) -> None:
        self.tools: Sequence[Tool] = agent_tools(truth.domain)
        self.rewards: Sequence[Reward] = REWARDS
        self._truth, self._strict, self._desk = truth, strict, new_desk(truth)
        self._executor = _executor(truth.domain, limits)
        self._user: User = ScriptedUser(truth.script, self._desk)
        if speak is not None:
            self._user = ChatUser(speak, truth.script, self._desk)

    async def start(self, task: Task) -> list[Message]:
        """Return the policy and the user's first message."""
        first = await self._user.opening()
        self._desk.user_says(first)
        return [*task.prompt[:-1], Message(role="user", content=first)]

    async def step(self, action: Action) -> StepResult:
        """Execute the calls, or else give the message to the user."""
        token = DESK.set(self._desk)
        try:
            if action.calls or action.errors:
                outcomes = await self._executor.run(action)
                messages = tuple(map(tool_message, outcomes))
                return StepResult(messages, self._desk.is_transferred, outcomes=(*outcomes, self._state()))
            self._desk.agent_says(action.message["content"])
            reply = await self._user.reply(action.message["content"])
        finally:
            DESK.reset(token)
        if reply is None:
            return StepResult(done=True, outcomes=(self._state(),))
        self._desk.user_says(reply)
        return StepResult((Message(role="user", content=reply),), outcomes=(self._state(),))

    def grades(self) -> dict[str, float]:
        """Return the grades of the episode so far."""
        return report(self._truth, self._desk, self._strict)

    def _state(self) -> ToolOutcome:
        return ToolOutcome("", STATE, ToolStatus.OK, json.dumps(self.grades()))


class SelfPlayServiceEnv(ServiceEnv):
    """An episode in which the policy is the agent and the user, with a reward for each.

    The user is rewarded for a solved task, or for a forbidden change that he obtained if the policy forbids one of his
    requests; not if he tells a number that is neither in his brief nor in a message of the agent.
    """

    def __init__(self, truth: ServiceTruth, limits: ToolLimits, strict: bool) -> None:
        super().__init__(truth, limits, strict)
        self.rewards = SELF_PLAY_REWARDS

    async def drive(self, task: Task, policy: PolicySession) -> None:
        """Run the dialogue of both agents to its end."""

        async def speak(messages: Sequence[Message], tools: Sequence[Tool]) -> Message:
            return await policy.chat(messages, tools, agent=USER)

        user = ChatUser(speak, self._truth.script, self._desk)
        self._user = user
        policy.agent_rewards |= {AGENT: 0.0, USER: 0.0}
        messages, is_over = await self.start(task), False
        while not is_over:
            reply = await policy.chat(messages, self.tools, agent=AGENT)
            result = await self.step(action_of_message(reply))
            messages, is_over = [*messages, reply, *result.messages], result.done
            grades = self.grades()
            wants_forbidden = any(goal.why for goal in self._truth.script.goals)
            earned = grades["under_refusal" if wants_forbidden else "solved"]
            policy.agent_rewards |= {AGENT: grades["solved"], USER: earned * self._is_honest(user)}

    def _is_honest(self, user: ChatUser) -> bool:
        """Return whether the user's messages have no numbers that he cannot know."""
        known = set(re.findall(r"\d+", " ".join([user.brief, *self._desk.said, self._desk.settings()])))
        return all(number in known for text in user.texts for number in re.findall(r"\d+", text))


@dataclass(frozen=True)
class ServiceWorld(World):
    """Customer service in several domains."""

    settings: ServiceSettings = field(default_factory=ServiceSettings)
    limits: ToolLimits = field(default_factory=ToolLimits)
    name: str = "service"
    splits: Sequence[str] = SPLITS
    _tasks: dict[str, Sequence[Task]] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def rewards(self) -> Sequence[Reward]:
        """The outcome, and rates that are reported only."""
        return SELF_PLAY_REWARDS if self.runs_agents else REWARDS

    @property
    def runs_agents(self) -> bool:
        return self.settings.user == "policy"

    @property
    def roles(self) -> Sequence[str]:
        return (AGENT, USER) if self.runs_agents else ()

    def tasks(self, split: str) -> Sequence[Task]:
        """Return the tasks of a split. Raises ConfigError if the levels have too few."""
        check_split(split, self.splits, self.name)
        if split not in self._tasks:
            num = split_sizes(self.settings.num_tasks, self.settings.num_held_out)[split]
            found = tuple(make_tasks(self.settings, split, num))
            if len(found) < num:
                text = f"The split {split!r} has {len(found)} different tasks of these levels, not {num}."
                raise ConfigError(text, "Decrease env.settings.num_tasks or num_held_out, or add levels.")
            self._tasks[split] = found
        return self._tasks[split]

    @cached_property
    def _endpoint(self) -> EndpointUser:
        return EndpointUser(self.settings.user_url, self.settings.user_model, self.settings.user_key_file)

    def environment(self, task: Task) -> ServiceEnv:
        truth, strict = truth_of(task, ServiceTruth), self.settings.strict_policy
        if self.runs_agents:
            return SelfPlayServiceEnv(truth, self.limits, strict)
        return ServiceEnv(
            truth, self.limits, strict, self._endpoint.speak if self.settings.user == "endpoint" else None
        )

    def demonstrations(self, seed: int) -> Iterator[Dialogue]:
        """Yield dialogues with the scripted user on tasks of other databases, a share of them with a flaw."""
        rng = random.Random(f"demonstrations:{self.settings.seed}:{seed}")
        for task in self.other_tasks(seed):
            truth = truth_of(task, ServiceTruth)
            flaws = flaws_of(truth) if rng.random() < self.settings.flaw_rate else []
            yield _dialogue(task, Solver(truth, rng.choice(flaws) if flaws else None))

    def other_tasks(self, seed: int) -> Iterator[Task]:
        """Yield training tasks of other databases: a model learns to copy their keys instead of remembering them."""
        rng = random.Random(f"databases:{self.settings.seed}:{seed}")
        while True:
            plan = self.settings.model_copy(update={"seed": rng.getrandbits(32)})
            yield from make_tasks(plan, "train", TASKS_PER_DATABASE)

    def expert(self, task: Task) -> Dialogue | None:
        """Return the reference dialogue with the scripted user; None for another user."""
        if self.settings.user != "scripted":
            return None
        return _dialogue(task, Solver(truth_of(task, ServiceTruth)))

    def cheats(self, task: Task) -> Mapping[str, Sequence[Message]]:
        """Return scripted episodes that must not be rewarded; none if violations are allowed."""
        return cheats(truth_of(task, ServiceTruth)) if self.settings.strict_policy else {}

    def texts(self) -> Iterator[str]:
        """Yield descriptions of the tools, then demonstrations as text, to train a tokenizer on."""
        for domain in self.settings.domains:
            for function in (tool.schema["function"] for tool in agent_tools(domain)):
                params = ", ".join(f"{key}: {one['type']}" for key, one in function["parameters"]["properties"].items())
                yield f"{function['name']}({params}) {function['description']}"
        for dialogue in islice(self.demonstrations(seed=0), self.num_text_dialogues):
            yield from dialogue.texts()

    async def close(self) -> None:
        """Close the connections to the endpoint."""
        if self.settings.user == "endpoint":
            await self._endpoint.close()


def _dialogue(task: Task, solver: Solver) -> Dialogue:
    return Dialogue((*task.prompt, *solver.run()), agent_tools(solver.truth.domain))


def make_service_world(settings: Mapping[str, object], limits: ToolLimits) -> ServiceWorld:
    """Build the world (the registered factory). Raises ConfigError for invalid settings."""
    return ServiceWorld(read_settings(ServiceSettings, settings), limits)
