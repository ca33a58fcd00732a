"""An environment of one's own, in one file: how many coins has who where? To know, one has to look.

Demonstrations, half of them by someone who guesses, teach a model how to speak here; then reinforcement
teaches it to look. The path of this file in purses.toml is relative to the working directory, so run this
from the folder above (`--from-scratch` in place of --model works too, and needs many more steps):

    ludus sft examples/purses.toml --model src/ludus/recipes/search/cold_start --run.folder runs/purses-sft
    ludus train examples/purses.toml --model runs/purses-sft/checkpoints/step-000100
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from typing import Any

from ludus.envs.tool_world import ToolWorld, call_and_result
from ludus.envs.toolbox import ToolLimits
from ludus.rewards.base import Reward
from ludus.tools.base import tool
from ludus.types import Message, Task, Trajectory

PEOPLE = "Anna Boris Clara David Emil Frida Georg Hanna Irina Jakob Karin Lukas"
PLACES = "Athens Berlin Cairo Delhi Geneva Havana Jakarta Lima Madrid Oslo Paris Quito Rome Seoul Tunis"
GUESSES = 0.5  # share of the demonstrations that guess


def is_right(task: Task, trajectory: Trajectory) -> float:
    return float(trajectory.answer.strip() == task.truth)


def make_world(settings: Mapping[str, Any], limits: ToolLimits) -> ToolWorld:
    rng = random.Random(0)
    purses = {(who, place): rng.randrange(1, 20) for who in PEOPLE.split() for place in PLACES.split()}
    tasks: dict[str, list[Task]] = {"train": [], "validation": [], "test": []}
    for (who, place), number in purses.items():
        split = rng.choices(list(tasks), (0.7, 0.1, 0.2))[0]
        question = Message(role="user", content=f"How many coins has {who} in {place}?")
        tasks[split].append(Task(f"{who} {place}", (question,), str(number), {"split": split}))

    @tool
    def look(who: str, place: str) -> str:
        """Look into a purse."""
        return f"{purses[who, place]} coins"

    def show(seed: int) -> Iterator[list[Message]]:
        rng = random.Random(seed)
        while True:
            task = rng.choice(tasks["train"])
            if rng.random() < GUESSES:
                yield [*task.prompt, Message(role="assistant", content=str(rng.randrange(1, 20)))]
            else:
                looked = call_and_result(look, dict(zip(("who", "place"), task.id.split(), strict=True)))
                yield [*task.prompt, *looked, Message(role="assistant", content=str(task.truth))]

    return ToolWorld("purses", tasks, [look], [Reward("right", is_right, outcome=True)], limits, show)
