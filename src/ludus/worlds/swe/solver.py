"""Who knows how: reads the lines around the bug, mends them, and hands in."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping

from ludus.sandbox.base import Snapshot
from ludus.tools.files import lines_of
from ludus.tools.patch import patched_files, read_patch
from ludus.types import JSON, FunctionCall, Message, MessageToolCall
from ludus.worlds.swe.problems import SweProblem

AROUND = 12
"""Lines that it reads before and after the place."""
THOUGHT = "I look at the code that the issue is about."
FOUND = "This is where it goes wrong."
DONE = "Mended."


def solution(problem: SweProblem) -> tuple[Message, ...]:
    """The messages after the prompt: a look at each file, its repair, and the end of the episode."""
    said: list[Message] = []
    for path, content in problem.mended.items():
        before = problem.shown.get(path, b"").decode("utf-8")
        after = content.decode("utf-8")
        if path in problem.shown:
            first, last = _place(before, after)
            look: dict[str, JSON] = {"path": path, "first": first, "last": last}
            said += _turn(len(said), THOUGHT, "read_file", look, lines_of(before, first, last))
        patch = unified(path, before, after, new=path not in problem.shown)
        words = "made" if path not in problem.shown else "changed"
        said += _turn(len(said), FOUND, "apply_patch", {"patch": patch}, f"{words} {path}")
    return (*said, _call(len(said), "The issue is mended.", "submit", {"answer": DONE}))


def written(texts: Mapping[str, str]) -> tuple[Message, ...]:
    """The messages after the prompt of an episode that writes these files."""
    said: list[Message] = []
    for path, text in texts.items():
        said += _turn(len(said), FOUND, "write_file", {"path": path, "text": text}, f"wrote {path}")
    return (*said, _call(len(said), "The issue is mended.", "submit", {"answer": DONE}))


def unified(path: str, before: str, after: str, new: bool = False) -> str:
    """The difference of two texts of a file as a unified diff."""
    source = "/dev/null" if new else f"a/{path}"
    lines = difflib.unified_diff(_lines(before), _lines(after), source, f"b/{path}", lineterm="\n")
    missing = "\n\\ No newline at end of file\n"
    return "".join(line if line.endswith("\n") else f"{line}{missing}" for line in lines)


def applies(problem: SweProblem) -> bool:
    """Whether the oracle's patches, as the tool reads them, give the files that they should."""
    tree: Mapping[str, bytes] = problem.shown
    for path, content in problem.mended.items():
        before = problem.shown.get(path, b"").decode("utf-8")
        patch = unified(path, before, content.decode("utf-8"), new=path not in problem.shown)
        tree = patched_files(Snapshot(tree), read_patch(patch)).files
    return all(tree[path] == content for path, content in problem.mended.items())


def _lines(text: str) -> list[str]:
    return [f"{line}\n" for line in text.split("\n")[:-1]] + ([last] if (last := text.split("\n")[-1]) else [])


def _place(before: str, after: str) -> tuple[int, int]:
    """The lines to read: those that change, with some around them, counted from 1."""
    old, new = _lines(before), _lines(after)
    head = next((i for i, (one, other) in enumerate(zip(old, new, strict=False)) if one != other), len(old) - 1)
    same = zip(reversed(old), reversed(new), strict=False)
    tail = next((i for i, (one, other) in enumerate(same) if one != other), 0)
    return max(1, head + 1 - AROUND), min(len(old), max(head, len(old) - tail) + AROUND)


def _turn(number: int, words: str, name: str, given: Mapping[str, JSON], said: str) -> tuple[Message, Message]:
    message = _call(number, words, name, given)
    answer = Message(role="tool", content=said, tool_call_id=message["tool_calls"][0]["id"], name=name)
    return message, answer


def _call(number: int, words: str, name: str, given: Mapping[str, JSON]) -> Message:
    function = FunctionCall(name=name, arguments=json.dumps(dict(given), ensure_ascii=False))
    call = MessageToolCall(id=f"call_{number}_0", type="function", function=function)
    return Message(role="assistant", content=words, tool_calls=[call])
