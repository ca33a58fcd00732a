"""Difficulty report: the number of different requests, and the success of baselines without skill."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence

from generators.reports.shared import TaskShape, rate_lines, variety_lines
from ludus.envs.base import World
from ludus.rewards.base import truth_of
from ludus.rewards.paper_rewards import ExpectedCall
from ludus.types import Task
from ludus.worlds.functions.gold_calls import Truth, solved
from ludus.worlds.functions.solver import DONE, NO_TOOL, Attempt
from ludus.worlds.functions.tool_distractors import Scene


def looks(tasks: Sequence[Task]) -> list[TaskShape]:
    """Return the shape of each task."""
    truths = [(task.tags.get("level", ""), truth_of(task, Truth)) for task in tasks]
    return [TaskShape(level, truth.form, truth.shape) for level, truth in truths]


def no_tool_rate(tasks: Sequence[Task]) -> float:
    """Return the success of a policy that never calls and always refuses."""
    return _rate(tasks, lambda task, attempt: attempt.say(NO_TOOL))


def majority_rate(train: Sequence[Task], tasks: Sequence[Task]) -> float:
    """Return the success of a policy that calls the most frequent function of training among those offered,
    with its most frequent values."""
    calls: Counter[str] = Counter()
    values: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    for truth in (truth_of(task, Truth) for task in train):
        for gold in truth.gold:
            calls[gold.name] += 1
            for one in truth.scene.offer(gold.name).params if isinstance(truth.scene, Scene) else ():
                if one.name in gold.accepted and one.name not in gold.optional:
                    value = one.decode(gold.accepted[one.name][0])
                    values[gold.name, one.param.name][json.dumps(value)] += 1
    common = {key: json.loads(counter.most_common(1)[0][0]) for key, counter in values.items()}

    def call(task: Task, attempt: Attempt) -> None:
        scene = truth_of(task, Truth).scene
        if isinstance(scene, Scene):
            offer = max(scene.offers, key=lambda one: calls[one.function.name])
            name, required = offer.function.name, [param.name for param in offer.function.required]
            known = {param: common[name, param] for param in required if (name, param) in common}
            attempt.call(ExpectedCall(name, offer.encode(known)))
        attempt.say(DONE)

    return _rate(tasks, call)


def _rate(tasks: Sequence[Task], play: Callable[[Task, Attempt], None]) -> float:
    total = 0.0
    for task in tasks:
        attempt = Attempt(task)
        play(task, attempt)
        total += solved(task, attempt.trajectory())
    return total / len(tasks)


def report(world: World) -> str:
    """Return the report on the generated tasks of a world."""
    splits = {split: world.tasks(split) for split in world.splits}
    table = variety_lines(((split, looks(tasks)) for split, tasks in splits.items()), "requests")
    rates = []
    for split, tasks in splits.items():
        null = sum(task.tags["null"] == "true" for task in tasks) / len(tasks)
        rates.append((split, (null, no_tool_rate(tasks), majority_rate(splits["train"], tasks))))
    return "\n".join([*table, "", *rate_lines(("nothing to do", "no tool", "majority"), rates)])
