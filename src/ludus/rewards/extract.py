"""Extract the text that a verifier judges: the answer, or the output of a tool or of the environment.

An environment reports data that is hidden from the model, such as its final state, as an outcome of its last
`StepResult`: `ToolOutcome("", "state", ToolStatus.OK, json.dumps(state))`. It is stored with the rollout, so
that rewards can be replayed, and does not count as a call (`Trajectory.call_outcomes`). If the model calls a
nonexistent tool of that name, the outcome is not OK and is ignored.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable

from ludus.types import JSON, ToolStatus, Trajectory

Evidence = Callable[[Trajectory], str]
"""Function that returns the text to judge, empty if there is none."""

MAX_CHARACTERS = 4_000_000
MAX_DEPTH = 64
_FENCE = re.compile(r"(```|~~~)[a-zA-Z]*[ \t]*\r?\n(.*?)\1", re.S)


def final_answer(trajectory: Trajectory) -> str:
    """Return the model's answer."""
    return trajectory.answer


def last_output(tool: str) -> Evidence:
    """Return a function that reads the output of the last call of `tool`; empty if it failed or was truncated."""

    def read(trajectory: Trajectory) -> str:
        found = [outcome for outcome in trajectory.outcomes if outcome.tool == tool]
        fine = bool(found) and found[-1].status is ToolStatus.OK and not found[-1].truncated
        return found[-1].output if fine else ""

    return read


def fenced(text: str) -> str:
    """Return the content of the only fenced block; the whole text if there is none; empty if there are several."""
    blocks = [match[2].strip() for match in _FENCE.finditer(text)]
    if not blocks:
        return text.strip()
    return blocks[0] if len(blocks) == 1 else ""


class NotJson(ValueError):
    """The text is not a JSON value: malformed, too deep or long, with a duplicate key, or with NaN."""


def read_json(text: str) -> JSON:
    """Parse the whole text as strict JSON. Raises NotJson."""
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
