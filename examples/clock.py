"""An environment with the tools of an MCP server: convert a time between two places.

The server is a setting (`env.settings.server`, see clock.toml), here a third-party one. Needs the extra `mcp` and
the server: pip install 'ludus[mcp]' mcp-server-time
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict

from ludus.envs.settings import read_settings
from ludus.envs.tool_env import ToolLimits
from ludus.envs.tool_world import ToolWorld
from ludus.rewards.base import Reward
from ludus.tools.mcp.client import McpSettings, mcp_server
from ludus.types import Message, Task, Trajectory

# Hours and minutes ahead of UTC, in places without daylight saving time.
ZONES = {
    "America/Bogota": (-5, 0),
    "America/Phoenix": (-7, 0),
    "Africa/Lagos": (1, 0),
    "Africa/Nairobi": (3, 0),
    "Asia/Dubai": (4, 0),
    "Asia/Kathmandu": (5, 45),
    "Asia/Kolkata": (5, 30),
    "Asia/Tokyo": (9, 0),
    "Australia/Brisbane": (10, 0),
    "Pacific/Honolulu": (-10, 0),
}


class Settings(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    server: McpSettings


def is_right(task: Task, trajectory: Trajectory) -> float:
    return float(trajectory.answer.strip() == task.truth)


def make_task(rng: random.Random, number: int, split: str) -> Task:
    here, there = rng.sample(sorted(ZONES), 2)
    hour, minute = rng.randrange(24), rng.choice((0, 10, 15, 30, 45))
    (from_h, from_m), (to_h, to_m) = ZONES[here], ZONES[there]
    truth = (hour - from_h + to_h) * 60 + minute - from_m + to_m
    said = f"It is {hour:02d}:{minute:02d} in {here}. What time is it in {there}? Answer as HH:MM."
    question = (Message(role="user", content=said),)
    return Task(f"{split}-{number}", question, f"{truth // 60 % 24:02d}:{truth % 60:02d}", {"split": split})


def make_world(settings: Mapping[str, Any], limits: ToolLimits) -> ToolWorld:
    server = mcp_server(read_settings(Settings, settings).server)
    rng = random.Random(0)
    sizes = {"train": 200, "validation": 20, "test": 50}
    tasks = {split: [make_task(rng, n, split) for n in range(size)] for split, size in sizes.items()}
    rewards = (Reward("right", is_right, outcome=True),)
    return ToolWorld("clock", tasks, server.tools, rewards, limits, resources=(server,))
