"""A world of prices for tests, small enough for a model of a few thousand weights.

The tool `look(item)` returns the price. Two of three demonstrations call it; the third guesses. With the setting
`roles`, fruits are tasks of solvers and tools tasks of proposers, and equal prices are one proposal.
"""

import json
import random

from ludus.envs.tool_world import ToolWorld
from ludus.rewards.base import Reward
from ludus.rewards.exact_match import ExpectedAnswers, exact_match, token_f1, well_formed
from ludus.tools.base import tool
from ludus.types import Message, Task

FRUITS = ("apple", "pear", "plum", "fig", "lime", "date", "kiwi", "melon", "peach", "mango", "grape", "lemon")
TOOLS = ("saw", "axe", "drill", "file", "plane", "rasp", "clamp", "awl", "spade", "rake", "hoe", "fork")
NAMES = tuple(name for pair in zip(FRUITS, TOOLS, strict=True) for name in pair)
PRICES = {name: str(2 + i % 5) for i, name in enumerate(NAMES)}
SPLITS = {"train": NAMES[:12], "validation": NAMES[12:16], "test": NAMES[16:]}


@tool
def look(item: str) -> str:
    """Look up a price.

    Args:
        item: what it is.
    """
    if item not in PRICES:
        raise KeyError(item)
    return f"{item} costs {PRICES[item]}"


def opening(name):
    return (Message(role="system", content="Look first."), Message(role="user", content=f"What does {name} cost?"))


def task_of(name, split, roles=False):
    family = "fruit" if name in FRUITS else "tool"
    tags = {"split": split, "family": family}
    if roles:
        tags |= {"role": "solver" if name in FRUITS else "proposer", "proposal": PRICES[name]}
    return Task(f"{split}:{name}", opening(name), ExpectedAnswers((PRICES[name],)), tags)


def show(seed):
    rng = random.Random(seed)
    while True:
        name = rng.choice(NAMES)
        if rng.random() < 0.33:
            yield [*opening(name), Message(role="assistant", content=rng.choice("23456"))]
            continue
        function = {"name": "look", "arguments": json.dumps({"item": name})}
        call = {"id": "call_0_0", "type": "function", "function": function}
        found = f"{name} costs {PRICES[name]}"
        yield [
            *opening(name),
            Message(role="assistant", content="", reasoning_content="Look.", tool_calls=[call]),
            Message(role="tool", content=found, tool_call_id="call_0_0", name="look"),
            Message(role="assistant", content=PRICES[name]),
        ]


def make_world(settings, limits):
    weight = settings.get("well_formed_weight", 0.1)
    rewards = (
        Reward("exact_match", exact_match, outcome=True),
        Reward("f1", token_f1, weight=0.0),
        Reward("well_formed", well_formed, weight=weight),
    )
    roles = settings.get("roles", False)
    tasks = {split: [task_of(name, split, roles) for name in names] for split, names in SPLITS.items()}
    return ToolWorld("prices", tasks, (look,), rewards, limits, show)
