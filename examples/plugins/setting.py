"""A world with settings: how many sums, and up to which number."""

from pydantic import BaseModel, ConfigDict, Field

from ludus.envs.settings import read_settings
from ludus.envs.tool_world import ToolWorld
from ludus.rewards.base import Reward
from ludus.rewards.exact_match import ExpectedAnswers, exact_match
from ludus.types import Message, Task


class SumSettings(BaseModel):
    model_config = ConfigDict(extra="forbid")
    num_tasks: int = Field(40, ge=4)
    addend: int = Field(1, ge=0)


def sums(settings, limits):
    chosen = read_settings(SumSettings, settings)
    tasks = [task(n, chosen.addend) for n in range(chosen.num_tasks)]
    half, rest = len(tasks) // 2, len(tasks) * 3 // 4
    splits = {"train": tasks[:half], "validation": tasks[half:rest], "test": tasks[rest:]}
    return ToolWorld("sums", splits, (), (Reward("solved", exact_match, outcome=True),), limits)


def task(number, addend):
    question = Message(role="user", content=f"{number} + {addend}?")
    return Task(f"{number}", (question,), ExpectedAnswers((str(number + addend),)))
