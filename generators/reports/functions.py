"""Difficulty report: the number of different requests, and the success of baselines without skill."""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence

from generators.functions.__main__ import draw
from generators.functions.generate import DrawnTask, request_specs
from generators.functions.plans import in_words
from generators.reports.shared import TaskShape, rate_lines, variety_lines
from ludus.envs.base import World
from ludus.rewards.base import truth_of
from ludus.rewards.paper_rewards import ExpectedCall
from ludus.types import StopReason, Task, Trajectory
from ludus.worlds.functions.grader import Truth, solved
from ludus.worlds.functions.world import DONE, NO_TOOL, Attempt


def task_shapes(tasks: Sequence[DrawnTask]) -> list[TaskShape]:
    """Return the shape of each task."""
    forms = [(task, _form(task)) for task in tasks]
    return [TaskShape(str(task.level), form, _shape(task, form)) for task, form in forms]


def _form(task: DrawnTask) -> str:
    """Return the request with the kinds of values instead of the values."""
    request, at = task.row["request"], 0
    if task.right == "answer":
        return _template(request)
    for step in task.plan:
        for param in step.function.params:
            if param.name in step.values:
                words = param.piece.format(in_words(param.kind, step.values[param.name]))
                kind = param.piece.format(f"<{param.kind}>")
                place = request.index(words, at)
                request, at = request[:place] + kind + request[place + len(words) :], place + len(kind)
    return request


def _template(request: str) -> str:
    """Return the form of a request with the answer in it."""
    forms = [form for form, _ in request_specs().questions]
    return next(form for form in forms if re.fullmatch(re.sub(r"\\{\w+\\}", ".+", re.escape(form)), request))


def _shape(task: DrawnTask, form: str) -> str:
    """Return the solution without values: the calls as `name(argument, argument<-place)`."""
    steps, missing, ask = [], "", task.row.get("ask")
    for number, step in enumerate(task.plan):
        given = [*step.values, *(f"{name}<-{place}" for name, (place, _) in step.links.items())]
        if ask is not None and ask["function"] == step.function.name:
            given.append(ask["param"])
            missing = f" without {number}.{ask['param']}"
        steps.append(f"{step.function.name}({', '.join(sorted(given))})")
    return f"{task.right}: {'; '.join(sorted(steps)) or form}{missing}"


def no_tool_rate(tasks: Sequence[Task]) -> float:
    """Return the success of a policy that never calls and always refuses."""
    return _rate(tasks, lambda attempt: attempt.answer(NO_TOOL))


def majority_rate(train: Sequence[Task], tasks: Sequence[Task]) -> float:
    """Return the success of a policy that calls the most frequent function of training among those offered,
    with its most frequent values."""
    calls: Counter[str] = Counter()
    values: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    for truth in (truth_of(task, Truth) for task in train):
        for gold in truth.gold:
            calls[gold.name] += 1
            for param in truth.scene.function(gold.name).params:
                if param.offered in gold.accepted and param.offered not in gold.optional:
                    value = param.decode(gold.accepted[param.offered][0])
                    values[gold.name, param.name][json.dumps(value)] += 1
    common = {key: json.loads(counter.most_common(1)[0][0]) for key, counter in values.items()}

    def call(attempt: Attempt) -> None:
        function = max(truth_of(attempt.task, Truth).scene.functions, key=lambda one: calls[one.name])
        named = [(param.name, (function.name, param.name)) for param in function.required]
        known = {name: common[key] for name, key in named if key in common}
        attempt.call(ExpectedCall(function.name, function.encode(known)))
        attempt.answer(DONE)

    return _rate(tasks, call)


def _rate(tasks: Sequence[Task], play: Callable[[Attempt], None]) -> float:
    attempts = [Attempt(task) for task in tasks]
    for attempt in attempts:
        play(attempt)
    return sum(solved(attempt.task, trajectory_of(attempt)) for attempt in attempts) / len(tasks)


def trajectory_of(attempt: Attempt) -> Trajectory:
    """Return an attempt as an episode for rewards, without tokens."""
    messages = (*attempt.task.prompt, *attempt.messages)
    return Trajectory(attempt.task.id, 0, (), messages, StopReason.ANSWERED, tuple(attempt.outcomes))


def report(world: World) -> str:
    """Return the report on the generated tasks of a world."""
    splits = {split: world.tasks(split) for split in world.splits}
    drawn = dict(draw({split: len(tasks) for split, tasks in splits.items()} | {"demonstrations": 0}))
    table = variety_lines(((split, task_shapes(drawn[split])) for split in splits), "requests")
    rates = []
    for split, tasks in splits.items():
        null = sum(task.tags["null"] == "true" for task in tasks) / len(tasks)
        rates.append((split, (null, no_tool_rate(tasks), majority_rate(splits["train"], tasks))))
    return "\n".join([*table, "", *rate_lines(("nothing to do", "no tool", "majority"), rates)])
