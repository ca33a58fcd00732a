"""Scripted episodes: solutions, which repair the bug, and forgeries, which add code that forges test results."""

from __future__ import annotations

import io
import tomllib
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Final

from ludus.envs.messages import calling_message, tool_turn
from ludus.tools.files import lines_of, unified_diff
from ludus.types import JSON, Message
from ludus.worlds.swe.grader import SweProblem
from ludus.worlds.swe.repository import package_text

WORST: Final = ("gc", "frames", "recorder", "reports", "an early end", "lines")
"""Forgeries that `ludus env check` runs."""
_Turn = tuple[str, Mapping[str, JSON], str, str]
"""A tool call: its name, arguments and output, and the text of its message."""
_CONTEXT_LINES: Final = 12
"""Lines that the solver reads before and after a change."""
_FOUND: Final = "This is where it goes wrong."


def solution(problem: SweProblem) -> tuple[Message, ...]:
    """Return the messages after the prompt: read and repair each file, then end the episode."""
    turns: list[_Turn] = []
    for path, content in problem.fixed.items():
        before, after, new = problem.text(path), content.decode("utf-8"), path not in problem.shown
        if not new:
            first, last = _line_range(before, after)
            place: dict[str, JSON] = {"path": path, "first": first, "last": last}
            look = "I look at the code that the issue is about."
            turns.append(("read_file", place, lines_of(before, first, last), look))
        patch, result = unified_diff(path, before, after, new), f"{'made' if new else 'changed'} {path}"
        turns.append(("apply_patch", {"patch": patch}, result, _FOUND))
    return _episode(turns)


def written(texts: Mapping[str, str]) -> tuple[Message, ...]:
    """Return the messages after the prompt of an episode that writes these files."""
    return _episode(
        [("write_file", {"path": path, "text": text}, f"wrote {path}", _FOUND) for path, text in texts.items()]
    )


def _episode(turns: Sequence[_Turn]) -> tuple[Message, ...]:
    messages: list[Message] = []
    for name, arguments, output, content in turns:
        messages += tool_turn(len(messages), name, arguments, output, content=content)
    last = calling_message(len(messages), "submit", {"answer": "Mended."}, content="The issue is mended.")
    return (*messages, last)


def _line_range(before: str, after: str) -> tuple[int, int]:
    """Return the first and last line to read (1-based): the changed lines with some context."""
    old, new = list(io.StringIO(before)), list(io.StringIO(after))
    head = next((i for i, (one, other) in enumerate(zip(old, new, strict=False)) if one != other), len(old) - 1)
    same = zip(reversed(old), reversed(new), strict=False)
    tail = next((i for i, (one, other) in enumerate(same) if one != other), 0)
    return max(1, head + 1 - _CONTEXT_LINES), min(len(old), max(head, len(old) - tail) + _CONTEXT_LINES)


@cache
def forgeries() -> Mapping[str, str]:
    """Return the code of each forgery by name."""
    held = tomllib.loads(package_text("data/forgeries.toml"))
    return {name: f"{held['common']}\n{body}" for name, body in held["ways"].items()}


def forged(problem: SweProblem, code: str) -> dict[str, str]:
    """Return the files that a fix changes, unfixed, with code appended."""
    return {path: problem.text(path) + code for path in problem.fixed if path.endswith(".py")}
