"""Tool use that is worth its calls: results that contribute to the answer, and tasks that need tools.

The tool necessity of a task is the success rate of attempts with tools minus that of attempts without them, as in
LongCat-Flash-Thinking's selection of tasks for tool use; in [-1, 1].
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from ludus.chat.hints import full_text
from ludus.errors import UserError
from ludus.rewards.base import RewardFunction
from ludus.types import Task, ToolStatus, Trajectory

_WORD = re.compile(r"\d+|[^\W\d_]{3,}")
"""Numbers, and words of three letters or more."""


class Necessity(NamedTuple):
    """Success rates of a task with and without tools."""

    with_tools: float
    without_tools: float

    @property
    def value(self) -> float:
        return self.with_tools - self.without_tools


def write_necessity(path: Path, found: Mapping[str, Necessity]) -> None:
    """Write one JSON line per task: `task`, `with_tools`, `without_tools` and `necessity`."""
    rows = ({"task": task, **one._asdict(), "necessity": one.value} for task, one in found.items())
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")


@lru_cache(maxsize=8)
def read_necessity(path: str) -> Mapping[str, float]:
    """Return the necessity by task from a file of `write_necessity`. Raises UserError for any other file."""
    try:
        rows = [json.loads(line) for line in Path(path).read_text("utf-8").splitlines()]
        return {str(row["task"]): float(row["necessity"]) for row in rows}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{path} is not a file of tool necessity: {error}.", "Write one with ludus necessity."
        ) from error


def used_results(necessity: str = "") -> RewardFunction:
    """Create a part: the share in [0, 1] of the calls whose output contributed to the answer, 0 without calls.

    An output contributes if a word of it that is new in the dialogue occurs in the answer, or in the arguments of a
    later call that contributes. A failed, empty, repeated or unused call therefore lowers the share. With a file of
    tool necessity, the share is multiplied by that of the task, at least 0 (1 for tasks that are not in the file). An
    answer can use a result and be wrong: combine with `rewards.aggregation = "gated"`.
    """
    scales = read_necessity(necessity) if necessity else {}

    def share_used(task: Task, trajectory: Trajectory) -> float:
        calls = _results(trajectory)
        needed, used = _words(trajectory.answer), 0
        for arguments, new in reversed(calls):
            if new & needed:
                used += 1
                needed |= arguments
        scale: float = max(0.0, scales.get(task.id, 1.0))
        return scale * used / len(calls) if calls else 0.0

    return share_used


def _results(trajectory: Trajectory) -> list[tuple[set[str], set[str]]]:
    """Return for each call the words of its arguments, and those of its output that are new in the dialogue."""
    fine = {outcome.call_id for outcome in trajectory.call_outcomes if outcome.status is ToolStatus.OK}
    known: set[str] = set()
    arguments: dict[str, set[str]] = {}
    outputs: dict[str, set[str]] = {}
    for message in trajectory.messages:
        words = _words(full_text(message))
        if message["role"] == "tool":
            call = message.get("tool_call_id", "")
            outputs[call] = words - known if call in fine else set()
        for made in message.get("tool_calls") or ():
            arguments[made["id"]] = _words(made["function"]["arguments"])
        known |= words
    return [(words, outputs.get(call, set())) for call, words in arguments.items()]


def _words(text: str) -> set[str]:
    return set(_WORD.findall(text.casefold()))
