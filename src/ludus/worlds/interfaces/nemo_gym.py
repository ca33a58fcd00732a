"""Worlds behind a resources server of NeMo Gym 0.7 (HTTP: `seed_session`, an endpoint for each tool, `verify`).

A file has the tasks, one JSON object per line with `responses_create_params` (`input` and `tools`) and the fields that
the server's verifier reads. An episode keeps the cookies of its session. A message without a call ends it and is
verified together with the calls before.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, cast

import httpx
from pydantic import Field

from ludus.envs.base import Environment, World
from ludus.envs.settings import WorldSettings, read_settings
from ludus.envs.task_files import Record, RecordError, load_tasks, split_by_hash
from ludus.envs.tool_env import ToolLimits, tool_message
from ludus.envs.tool_world import split_of
from ludus.errors import WorldError
from ludus.rewards.base import Reward
from ludus.rewards.extract import last_output
from ludus.tools.base import FunctionSchema, Tool, ToolSchema, described_tool
from ludus.types import JSON, Action, Message, StepResult, Task, ToolCall, ToolOutcome, ToolStatus, Trajectory
from ludus.untrusted.json_client import bounded_client

_Role = Literal["system", "user", "assistant"]
_ROLES: Final[Mapping[str, _Role]] = {
    "developer": "system",
    "system": "system",
    "user": "user",
    "assistant": "assistant",
}
GRADE: Final = "nemo_gym"
"""Tool name of the outcome with the verifier's reward."""


class NemoGymSettings(WorldSettings):
    """Settings of the world nemo_gym (`env.settings`)."""

    url: str
    """URL of the resources server."""
    tasks: str
    """File of tasks, as the package's `data/*.jsonl`; `split` is optional."""
    timeout_s: float = Field(60.0, gt=0)
    """Timeout of a request."""


def verified(task: Task, trajectory: Trajectory) -> float:
    """Return the reward of the server's verifier; 0 for an episode that did not end with an answer."""
    return float(json.loads(last_output(GRADE)(trajectory) or "0"))


REWARDS = (Reward("verified", verified, outcome=True),)


class NemoGymEnv(Environment):
    """One session. `items` are the calls and their outputs so far, in the format of the Responses API."""

    def __init__(self, settings: NemoGymSettings, row: Record, tools: Sequence[Tool]) -> None:
        self.tools, self.rewards = tools, REWARDS
        self._settings, self._row, self._names = settings, row, {tool.name for tool in tools}
        self._items: list[dict[str, object]] = []
        self._client: httpx.AsyncClient | None = None

    async def start(self, task: Task) -> list[Message]:
        self._client = bounded_client()
        (await self._post("seed_session", self._row)).raise_for_status()
        return list(task.prompt)

    async def step(self, action: Action) -> StepResult:
        """Run the calls; without any, verify."""
        if not (action.calls or action.errors):
            return StepResult(done=True, outcomes=(await self._verify(action.message["content"]),))
        outcomes = [await self._call(call) for call in action.calls]
        outcomes += [ToolOutcome(e.id, "", ToolStatus.MALFORMED, f"Error: {e.reason}") for e in action.errors]
        return StepResult(tuple(map(tool_message, outcomes)), outcomes=tuple(outcomes))

    async def close(self) -> None:
        if self._client is not None:
            await self._client.aclose()

    async def _call(self, call: ToolCall) -> ToolOutcome:
        if call.name not in self._names:
            return ToolOutcome(call.id, call.name, ToolStatus.UNKNOWN_TOOL, f"Error: there is no tool {call.name!r}.")
        response = await self._post(call.name, call.arguments)
        arguments = json.dumps(call.arguments)
        made: dict[str, object]
        made = {"type": "function_call", "call_id": call.id, "name": call.name, "arguments": arguments}
        self._items += [made, {"type": "function_call_output", "call_id": call.id, "output": response.text}]
        status = ToolStatus.RAISED if response.is_error else ToolStatus.OK
        return ToolOutcome(call.id, call.name, status, response.text)

    async def _verify(self, answer: str) -> ToolOutcome:
        part = {"type": "output_text", "text": answer, "annotations": []}
        said: dict[str, object]
        said = {"type": "message", "id": "answer", "role": "assistant", "status": "completed", "content": [part]}
        params = cast(Mapping[str, JSON], self._row["responses_create_params"])
        response = {
            "id": "episode",
            "created_at": 0,
            "model": "policy",
            "object": "response",
            "output": [*self._items, said],
            "parallel_tool_calls": True,
            "tool_choice": "auto",
            "tools": params.get("tools") or [],
        }
        found = await self._post("verify", {**self._row, "response": response})
        try:
            reward = float(found.raise_for_status().json()["reward"])
        except (httpx.HTTPStatusError, ValueError, KeyError, TypeError) as error:
            raise WorldError(f"{found.url} sent no reward: {found.text[:300]}") from error
        return ToolOutcome("", GRADE, ToolStatus.OK, json.dumps(reward))

    async def _post(self, path: str, body: Mapping[str, object]) -> httpx.Response:
        assert self._client is not None
        url = f"{self._settings.url.rstrip('/')}/{path}"
        try:
            async with asyncio.timeout(self._settings.timeout_s):
                return await self._client.post(url, json=body)
        except TimeoutError as error:
            raise WorldError(f"{url} did not respond within {self._settings.timeout_s:g} s.") from error
        except httpx.HTTPError as error:
            raise WorldError(f"{url} is unreachable: {type(error).__name__}: {error}.") from error


@dataclass(frozen=True)
class NemoGymWorld(World):
    """The tasks of a file; their truth is the row, which only the server's verifier reads."""

    settings: NemoGymSettings
    task_lists: Mapping[str, Sequence[Task]]
    name: str = "nemo_gym"
    rewards: Sequence[Reward] = REWARDS

    @property
    def splits(self) -> Sequence[str]:
        return tuple(self.task_lists)

    def tasks(self, split: str) -> Sequence[Task]:
        return split_of(self.task_lists, split, self.name)

    def environment(self, task: Task) -> NemoGymEnv:
        row = cast(Record, task.truth)
        params = cast(Mapping[str, Sequence[Mapping[str, JSON]]], row["responses_create_params"])
        return NemoGymEnv(self.settings, row, [_tool(one) for one in params.get("tools") or ()])


def _tool(described: Mapping[str, JSON]) -> Tool:
    """Return a tool from its description in the Responses API, which is flat."""
    name, about = str(described["name"]), str(described.get("description") or "")
    parameters = cast(dict[str, JSON], described.get("parameters") or {"type": "object", "properties": {}})
    function = FunctionSchema(name=name, description=about, parameters=parameters)
    return described_tool(ToolSchema(type="function", function=function))


def _read(record: Record, number: int) -> Task:
    params = record.get("responses_create_params")
    given = params.get("input") if isinstance(params, dict) else None
    messages = [{"role": "user", "content": given}] if isinstance(given, str) else given
    if not isinstance(messages, list) or not messages:
        raise RecordError('"responses_create_params" has no "input"')
    prompt = []
    for one in messages:
        if not isinstance(one, dict) or not isinstance(one.get("content"), str):
            raise RecordError("a message is not a text")
        role = _ROLES.get(str(one.get("role")))
        if role is None:
            raise RecordError(f'"role" is {one.get("role")!r}, not one of {", ".join(_ROLES)}')
        prompt.append(Message(role=role, content=str(one["content"])))
    split = str(record.get("split") or split_by_hash(json.dumps(given)))
    return Task(str(record.get("id", number)), tuple(prompt), dict(record), {"split": split})


def make_nemo_gym_world(settings: Mapping[str, object], limits: ToolLimits) -> NemoGymWorld:
    """Build the world (the registered factory). Raises ConfigError for invalid settings, UserError for a wrong line."""
    chosen = read_settings(NemoGymSettings, settings)
    hint = "Each line needs responses_create_params."
    return NemoGymWorld(chosen, load_tasks(Path(chosen.tasks), _read, hint))
