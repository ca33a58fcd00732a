"""Worlds behind an OpenEnv server (package openenv-core): each episode is a session of its client.

An action is a JSON object with the fields of the server's action, or a text for one field. An observation is shown as
JSON. The server has no tasks: a task is a seed for `reset`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from pydantic import Field

from ludus.envs.settings import WorldSettings, read_settings
from ludus.envs.simulator_world import Observation, Simulator, SimulatorWorld
from ludus.envs.task_files import SPLITS
from ludus.envs.tool_env import ToolLimits
from ludus.rewards.extract import NotJson, read_json
from ludus.types import Message, Task
from ludus.untrusted.json_client import get_bounded
from ludus.worlds.adapters.base import load_package

_REFUSED = "VALIDATION_ERROR"
"""Error code of a server for an action with wrong fields."""


class OpenEnvSettings(WorldSettings):
    """Settings of the OpenEnv world (`env.settings`)."""

    url: str
    """URL of the server, such as http://127.0.0.1:8000."""
    instructions: str = ""
    """System message; empty: the schema of an action."""
    field: str = ""
    """Field of the action for messages that are not a JSON object; empty: such messages are invalid."""
    success_return: float = 1.0
    """Sum of the rewards of an episode from which it is a success."""
    tasks: int = Field(100, ge=1)
    """Number of tasks (seeds) of each split."""
    timeout_s: float = Field(60.0, gt=0)
    """Timeout of a request."""


class OpenEnvEpisode(Simulator):
    """One session of a client."""

    def __init__(self, settings: OpenEnvSettings, seed: int) -> None:
        package = load_package("openenv.core.generic_client", "openenv-core", "openenv")
        self._settings, self._seed, self._total = settings, seed, 0.0
        self._client = package.GenericEnvClient(settings.url, message_timeout_s=settings.timeout_s).sync()

    def reset(self) -> str:
        self._client.connect()
        return _text(self._client.reset(seed=self._seed).observation)

    def step(self, action: str) -> Observation:
        try:
            fields = read_json(action)
        except NotJson:
            fields = None
        if not isinstance(fields, dict):
            if not self._settings.field:
                return Observation("The action must be a JSON object.", valid=False)
            fields = {self._settings.field: action}
        try:
            result = self._client.step(fields)
        except RuntimeError as error:
            if _REFUSED not in str(error):
                raise
            return Observation(f"The action is invalid: {error}", valid=False)
        reward = float(result.reward or 0.0)
        self._total += reward
        self.success = float(self._total >= self._settings.success_return)
        return Observation(_text(result.observation), reward, bool(result.done))

    def close(self) -> None:
        self._client.close()


def _text(observation: Mapping[str, object]) -> str:
    return json.dumps({key: value for key, value in observation.items() if key != "metadata"}, ensure_ascii=False)


def make_openenv_world(settings: Mapping[str, object], limits: ToolLimits) -> SimulatorWorld:
    """Build the world (the registered factory). Raises ConfigError for invalid settings."""
    chosen = read_settings(OpenEnvSettings, settings)
    load_package("openenv", "openenv-core", "openenv")
    text = chosen.instructions
    if not text:
        schema = get_bounded(f"{chosen.url}/schema", chosen.timeout_s).json()["action"]
        shown = {name: part for name, part in schema.get("properties", {}).items() if name != "metadata"}
        text = f"Act with one JSON object per message. Its fields: {json.dumps(shown)}"
    system = Message(role="system", content=text)
    numbers = {split: range(i * chosen.tasks, (i + 1) * chosen.tasks) for i, split in enumerate(SPLITS)}
    lists = {
        split: [Task(f"seed-{n}", (system,), None, {"split": split}, seed=n) for n in seeds]
        for split, seeds in numbers.items()
    }
    return SimulatorWorld("openenv", lists, lambda task: OpenEnvEpisode(chosen, task.seed), True, has_expert=False)
