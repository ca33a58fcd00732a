"""Tasks of a file with the tools of MCP servers, both named in the configuration.

Each line of the file is a JSON object with `question` and `answer`, and optionally `type` and its fields
(`ludus.rewards.truth_records`), `id` and `split`. The reward compares the final answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from pydantic import Field

from ludus.envs.settings import WorldSettings, read_settings
from ludus.envs.task_files import Record, RecordError, load_tasks, split_by_hash, text_field
from ludus.envs.tool_env import ToolLimits
from ludus.envs.tool_world import ToolWorld
from ludus.rewards.base import Reward
from ludus.rewards.truth_records import by_record, question_text, read_truth
from ludus.tools.mcp.client import McpSettings, mcp_server
from ludus.types import Message, Task


class ToolTasksSettings(WorldSettings):
    """Settings of the world tools (`env.settings`)."""

    tasks: str
    """File of tasks: JSON lines, or a table."""
    servers: tuple[McpSettings, ...] = Field(min_length=1)
    """MCP servers, shared by all episodes."""
    system: str = ""
    """System message; empty: none."""


def make_tool_tasks_world(settings: Mapping[str, object], limits: ToolLimits) -> ToolWorld:
    """Build the world (the registered factory). Raises ConfigError for invalid settings, UserError for a wrong line."""
    chosen = read_settings(ToolTasksSettings, settings)
    system = (Message(role="system", content=chosen.system),) if chosen.system else ()

    def read(record: Record, number: int) -> Task:
        question = text_field(record, "question")
        try:
            truth = read_truth(record)
        except ValueError as error:
            raise RecordError(str(error)) from error
        prompt = (*system, Message(role="user", content=question_text(question, truth)))
        split = str(record.get("split") or split_by_hash(question))
        return Task(str(record.get("id", number)), prompt, truth, {"split": split})

    lists = load_tasks(Path(chosen.tasks), read, "Each line needs a question and an answer.")
    servers = tuple(mcp_server(server) for server in chosen.servers)
    tools = tuple(tool for server in servers for tool in server.tools)
    return ToolWorld("tools", lists, tools, [Reward("right", by_record, outcome=True)], limits, resources=servers)
