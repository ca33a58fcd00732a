"""Sandbox program for tasks of several turns: runs calls on new objects of API classes.

Its source text is the program. It reads the arguments of `reply` from stdin as JSON: the modules of the involved
classes by name; the arguments of their `_load_scenario` by class (a class without that method has no state); whether
the long contents of `long_context` are loaded; the calls of each turn, `[name, arguments]`; the gold calls, or null.

It writes one JSON object to stdout. Without gold calls, `{"response": text, "raised": flag}` of the last call. With
them, a flag for each `turn N`: whether calls were made, the public attributes of all objects equal those after the
gold calls, and the responses so far contain those of the turn's gold calls. A turn without gold calls agrees.
`{"fault": text}` reports objects that cannot be created.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Sequence

Calls = Sequence[tuple[str, dict[str, object]]]


class Objects:
    """One object of each involved class."""

    def __init__(self, classes: dict[str, str], config: dict[str, object], extended: bool) -> None:
        self.made = {name: vars(importlib.import_module(module))[name]() for name, module in classes.items()}
        self.methods: dict[str, Callable[..., object]] = {}
        for name, one in self.made.items():
            found = dict(inspect.getmembers(one, inspect.ismethod))
            if "_load_scenario" in found:
                found["_load_scenario"](copy.deepcopy(config.get(name, {})), long_context=extended)
            self.methods.update(found)

    def run(self, calls: Calls) -> list[tuple[str, bool]]:
        """Return the responses to calls, and whether each raised an exception."""
        return [self._call(name, arguments) for name, arguments in calls]

    def _call(self, name: str, arguments: dict[str, object]) -> tuple[str, bool]:
        try:
            value = self.methods[name](**arguments)
        except Exception as error:  # boundary: third-party code may raise; the model sees the error
            return f"Error during execution: {error}", True
        try:
            return json.dumps(value) if isinstance(value, dict) else str(value), False
        except (TypeError, ValueError):
            return str(value), False

    def state(self) -> dict[tuple[str, str], object]:
        return {
            (name, key): value
            for name, one in self.made.items()
            for key, value in vars(one).items()
            if not key.startswith("_")
        }


def reply(
    classes: dict[str, str], config: dict[str, object], extended: bool, made: list[Calls], gold: list[Calls] | None
) -> dict[str, object]:
    """Return the reply described in the module docstring."""
    try:
        objects, right = (Objects(classes, config, extended) for _ in range(2))
    except Exception as error:  # boundary: third-party code and configuration may raise
        return {"fault": f"{type(error).__name__}: {error}"}
    if gold is None:
        *_, (response, raised) = [one for calls in made for one in objects.run(calls)]
        return {"response": response, "raised": raised}
    responses, agrees = Counter[str](), dict[str, object]()
    for number, (calls, wanted) in enumerate(zip(made, gold, strict=True), 1):
        responses.update(text for text, _ in objects.run(calls))
        due = Counter(text for text, _ in right.run(wanted))
        is_equal = right.state().items() <= objects.state().items()
        agrees[f"turn {number}"] = not wanted or (bool(calls) and is_equal and due <= responses)
    return agrees


def main() -> None:
    """Read the request, and write the reply to the original stdout, which the classes cannot print to."""
    line = os.dup(1)
    os.dup2(2, 1)
    sys.path[:0] = ["apis.zip"]
    text = json.dumps(reply(**json.loads(sys.stdin.read())))
    with os.fdopen(line, "w") as out:
        out.write(text)
