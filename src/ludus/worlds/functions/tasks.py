"""The shipped tasks, which `python -m generators.functions` draws.

A task is stored with the names of the catalogue; the signatures that it offers are applied when it is read.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import repeat
from typing import Final, TypedDict

from ludus.envs.task_archive import in_turn, read_lines
from ludus.rewards.exact_match import ExpectedAnswers
from ludus.rewards.paper_rewards import ExpectedCall
from ludus.types import JSON, Message, Task
from ludus.worlds.functions.catalogue import Form, Function, Scene, catalogue
from ludus.worlds.functions.grader import Ask, GoldCall, Right, Truth

SYSTEM: Final = "Do what is asked with the tools. Ask back where something is missing; call nothing where no tool fits."


class CallRow(TypedDict):
    """A gold call: its arguments except defaults, and the indices of the calls whose results it takes."""

    name: str
    arguments: dict[str, JSON]
    after: list[int]


class AskRow(TypedDict):
    """The missing parameter of a function, and the function, name and value of the required ones in the request."""

    function: str
    param: str
    stated: list[tuple[str, str, JSON]]


class TaskRow(TypedDict, total=False):
    """A task: the request, the scene, and its one right response; without any, it is a refusal.

    `functions` are names, with the name, alias and form of each parameter if the signature is changed. `invented` are
    arguments from nowhere for a wrong call.
    """

    family: str
    request: str
    seed: int
    known: list[tuple[str, str]]
    functions: list[tuple[str, list[tuple[str, str, Form]]]]
    calls: list[CallRow]
    ask: AskRow
    answer: str
    invented: dict[str, JSON]


def read_tasks(split: str, levels: Sequence[int], seed: int, changed: bool) -> Iterator[Task]:
    """Yield the tasks of a split, levels in turn; signatures are those of the catalogue unless `changed`."""
    streams = [zip(repeat(level), read_lines("functions", f"{split}/{level}", seed)) for level in dict.fromkeys(levels)]
    for number, (level, line) in enumerate(in_turn(streams)):
        yield make_task(json.loads(line), f"{split}-{level}-{number:04d}", changed)


def make_task(row: TaskRow, task_id: str, changed: bool = True) -> Task:
    """Return a task; its identifier begins with the split and the level."""
    split, level, _ = task_id.split("-")
    offered = tuple(_offered(name, params if changed else []) for name, params in row["functions"])
    scene = Scene(row["seed"], tuple((kind, key) for kind, key in row.get("known", ())), offered)
    gold = tuple(_gold_call(call, scene.function(call["name"])) for call in row.get("calls", ()))
    ask = _ask(row["ask"], row["request"]) if "ask" in row else None
    answer = ExpectedAnswers((row["answer"],)) if "answer" in row else None
    right: Right = "call" if gold else "ask" if ask else "answer" if answer else "decline"
    invented = None
    if "invented" in row:
        function = scene.function(ask.function) if ask else offered[0]
        invented = ExpectedCall(function.name, function.encode(row["invented"]))
    truth = Truth(tuple(call.expected for call in gold), right, gold, scene, ask, answer, invented)
    tags = {
        "split": split,
        "family": row["family"],
        "level": level,
        "signature": "changed" if changed and any(params for _, params in row["functions"]) else "plain",
        "null": "true" if right == "decline" else "false",
    }
    prompt = (Message(role="system", content=SYSTEM), Message(role="user", content=row["request"]))
    return Task(task_id, prompt, truth, tags, seed=scene.seed)


def _offered(name: str, params: Sequence[tuple[str, str, Form]]) -> Function:
    function = catalogue()[name]
    if not params:
        return function
    return replace(function, params=tuple(replace(function.param(n), alias=a, form=f) for n, a, f in params))


def _gold_call(call: CallRow, function: Function) -> GoldCall:
    left = {param.name: param.default for param in function.params if param.name not in call["arguments"]}
    accepted = {name: (value,) for name, value in function.encode({**call["arguments"], **left}).items()}
    optional = frozenset(param.offered for param in function.params if param.name in left)
    return GoldCall(function.name, accepted, optional, tuple(call["after"]))


def _ask(row: AskRow, request: str) -> Ask:
    stated = tuple((catalogue()[name].param(param), value) for name, param, value in row["stated"])
    return Ask(row["function"], catalogue()[row["function"]].param(row["param"]), request, stated)
