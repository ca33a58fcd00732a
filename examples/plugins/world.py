"""A world of sums."""

from ludus.envs.tool_world import ToolWorld
from ludus.rewards.base import Reward
from ludus.rewards.exact_match import ExpectedAnswers, exact_match
from ludus.types import Message, Task


def sums(settings, limits):
    tasks = [
        Task(f"{n}", (Message(role="user", content=f"{n} + 1?"),), ExpectedAnswers((str(n + 1),))) for n in range(40)
    ]
    splits = {"train": tasks[:20], "validation": tasks[20:30], "test": tasks[30:]}
    return ToolWorld("sums", splits, (), (Reward("solved", exact_match, outcome=True),), limits)
