"""A custom environment in one file: how many of a thing are in a place? The model must look to know.

Fine-tuning on demonstrations, half of which guess, teaches a model the format; RL teaches it to look. Run from
the parent folder (`--from-scratch` instead of --model works too, and needs many more steps):

    ludus sft examples/stock.toml --model src/ludus/recipes/search/cold_start --run.dir runs/stock-sft
    ludus train examples/stock.toml --model runs/stock-sft/checkpoints/step-000100
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from typing import Any

from ludus.envs.tool_env import ToolLimits
from ludus.envs.tool_world import ToolWorld, call_and_result
from ludus.rewards.base import Reward
from ludus.tools.base import tool
from ludus.types import Message, Task, Trajectory

THINGS = "nails screws bolts nuts hinges locks keys pipes"
PLACES = "Athens Berlin Cairo Delhi Geneva Havana Lima Oslo Paris Quito Rome Seoul"
GUESSES = 0.5  # fraction of demonstrations that guess


def is_right(task: Task, trajectory: Trajectory) -> float:
    return float(trajectory.answer.strip() == task.truth)


def make_world(settings: Mapping[str, Any], limits: ToolLimits) -> ToolWorld:
    rng = random.Random(0)
    stock = {(thing, place): rng.randrange(1, 20) for thing in THINGS.split() for place in PLACES.split()}
    tasks: dict[str, list[Task]] = {"train": [], "validation": [], "test": []}
    for (thing, place), number in stock.items():
        split = rng.choices(list(tasks), (0.7, 0.1, 0.2))[0]
        question = Message(role="user", content=f'How many "{thing}" are in "{place}"?')
        tasks[split].append(Task(f"{thing} {place}", (question,), str(number), {"split": split}))

    @tool
    def look(thing: str, place: str) -> str:
        """Look into the stock."""
        return f"{stock[thing, place]} {thing}"

    def show(seed: int) -> Iterator[list[Message]]:
        rng = random.Random(seed)
        while True:
            task = rng.choice(tasks["train"])
            if rng.random() < GUESSES:
                yield [*task.prompt, Message(role="assistant", content=str(rng.randrange(1, 20)))]
            else:
                looked = call_and_result(look, dict(zip(("thing", "place"), task.id.split(), strict=True)))
                yield [*task.prompt, *looked, Message(role="assistant", content=str(task.truth))]

    return ToolWorld("stock", tasks, [look], [Reward("right", is_right, outcome=True)], limits, show)
