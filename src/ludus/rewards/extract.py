"""What a verifier looks at in an episode: the answer, or what a tool or the environment left behind.

An environment leaves something that is not shown to the model, such as its last state, by giving an outcome
with its last `StepResult`: `ToolOutcome("", "state", ToolStatus.OK, json.dumps(state))`. It is stored with
the rollout, so that rewards can be replayed, and counts as no call (`Trajectory.call_outcomes`). A model that
calls a tool of that name where there is none leaves an outcome that is not OK, and is not believed.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable

from ludus.types import JSON, ToolStatus, Trajectory

Evidence = Callable[[Trajectory], str]
"""Gives the text to judge; empty where there is none."""

MAX_CHARACTERS = 4_000_000
MAX_DEPTH = 64
_FENCE = re.compile(r"(```|~~~)[a-zA-Z]*[ \t]*\r?\n(.*?)\1", re.S)


def final_answer(trajectory: Trajectory) -> str:
    """The model's answer."""
    return trajectory.answer


def last_output(tool: str) -> Evidence:
    """The output of the last call of `tool` if it went well and is whole, otherwise empty."""

    def read(trajectory: Trajectory) -> str:
        found = [outcome for outcome in trajectory.outcomes if outcome.tool == tool]
        fine = bool(found) and found[-1].status is ToolStatus.OK and not found[-1].truncated
        return found[-1].output if fine else ""

    return read


def fenced(text: str) -> str:
    """The content of the only fenced block, the whole text without one, empty with several."""
    blocks = [match[2].strip() for match in _FENCE.finditer(text)]
    if not blocks:
        return text.strip()
    return blocks[0] if len(blocks) == 1 else ""


class NotJson(ValueError):
    """A text is no JSON value: broken, too deep or long, with a key twice, or with NaN."""


def read_json(text: str) -> JSON:
    """The value that the whole text is, strictly. Raises NotJson."""
    if len(text) > MAX_CHARACTERS:
        raise NotJson("too long")
    try:
        value: JSON = json.loads(text, object_pairs_hook=_object, parse_constant=_refuse, parse_float=_finite)
    except (ValueError, RecursionError) as error:
        raise NotJson(str(error)) from error
    if _is_deep(value):
        raise NotJson("nested too deep")
    return value


def _object(pairs: list[tuple[str, JSON]]) -> dict[str, JSON]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise NotJson("a key twice")
    return found


def _finite(numeral: str) -> JSON:
    value = float(numeral)
    return value if math.isfinite(value) else _refuse(numeral)


def _refuse(name: str) -> JSON:
    raise NotJson(name)


def _is_deep(value: JSON) -> bool:
    level: list[JSON] = [value]
    for _ in range(MAX_DEPTH):
        level = [item for outer in level for item in _inner(outer)]
        if not level:
            return False
    return True


def _inner(value: JSON) -> list[JSON]:
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else []
