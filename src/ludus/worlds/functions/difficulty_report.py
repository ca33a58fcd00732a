"""What tasks are like: how many are really different, and what is solved without skill."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ludus.envs.difficulty_report import TaskShape, rate_lines, variety_lines
from ludus.rewards.paper_rewards import ExpectedCall
from ludus.types import JSON, Task
from ludus.worlds.functions.generate import SPLITS
from ludus.worlds.functions.gold_calls import solved, truth_of
from ludus.worlds.functions.solver import DONE, NO_TOOL, Attempt
from ludus.worlds.functions.tool_distractors import Scene

if TYPE_CHECKING:
    from ludus.worlds.functions.world import FunctionsWorld


def looks(tasks: Sequence[Task]) -> list[TaskShape]:
    """What makes each task different."""
    truths = [(task.tags.get("level", ""), truth_of(task)) for task in tasks]
    return [TaskShape(level, truth.form, truth.shape) for level, truth in truths]


def no_tool_rate(tasks: Sequence[Task]) -> float:
    """Success of whoever never calls and always says that no tool fits."""
    return sum(_said(task, NO_TOOL) for task in tasks) / len(tasks)


def null_share(tasks: Sequence[Task]) -> float:
    """The share of tasks on which doing nothing is right."""
    return sum(task.tags["null"] == "true" for task in tasks) / len(tasks)


def majority_rate(train: Sequence[Task], tasks: Sequence[Task]) -> float:
    """Success of whoever calls, among the functions on offer, the one that training tasks call most often,
    with the values that they give it most often."""
    habits = _habits(train)
    return sum(_by_habit(task, habits) for task in tasks) / len(tasks)


@dataclass(frozen=True, slots=True)
class _Habits:
    """How often functions are called, and the commonest value of each parameter, by the catalogue's names."""

    calls: Counter[str]
    values: Mapping[str, Mapping[str, JSON]]


def _habits(train: Sequence[Task]) -> _Habits:
    calls: Counter[str] = Counter()
    values: dict[str, dict[str, Counter[str]]] = defaultdict(lambda: defaultdict(Counter))
    for truth in map(truth_of, train):
        scene = truth.scene
        for call in truth.gold:
            calls[call.name] += 1
            for one in scene.offer(call.name).params if isinstance(scene, Scene) else ():
                if one.name in call.accepted and one.name not in call.optional:
                    value = one.decode(call.accepted[one.name][0])
                    values[call.name][one.param.name][json.dumps(value)] += 1
    common = {
        name: {param: json.loads(counter.most_common(1)[0][0]) for param, counter in params.items()}
        for name, params in values.items()
    }
    return _Habits(calls, common)


def _by_habit(task: Task, habits: _Habits) -> float:
    scene, attempt = truth_of(task).scene, Attempt(task)
    if isinstance(scene, Scene):
        offer = max(scene.offers, key=lambda one: habits.calls[one.function.name])
        name = offer.function.name
        required = {param.name for param in offer.function.required}
        values = {key: value for key, value in habits.values.get(name, {}).items() if key in required}
        attempt.call(ExpectedCall(name, offer.encode(values)))
    attempt.say(DONE)
    return solved(task, attempt.trajectory())


def _said(task: Task, text: str) -> float:
    attempt = Attempt(task)
    attempt.say(text)
    return solved(task, attempt.trajectory())


def report(world: FunctionsWorld) -> str:
    """The survey of the requests that the world draws, as text."""
    splits = {split: tasks for split in world.splits if split in SPLITS and (tasks := world.tasks(split))}
    table = variety_lines(((split, looks(tasks)) for split, tasks in splits.items()), "requests")
    rates = (
        (split, (null_share(tasks), no_tool_rate(tasks), majority_rate(splits["train"], tasks)))
        for split, tasks in splits.items()
    )
    return "\n".join([*table, "", *rate_lines(("nothing to do", "no tool", "majority"), rates)])
