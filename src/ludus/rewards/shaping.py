"""Shaping parts about how an answer was reached. They say nothing about whether it is right.

All are in [-1, 1], penalties in [-1, 0]. Give them weights well below the outcome's (`check_rewards`).
"""

from __future__ import annotations

import json
import unicodedata
from functools import lru_cache

from ludus.rewards.base import RewardFunction
from ludus.rewards.exact_match import normalise
from ludus.rewards.paper_rewards import calls_made
from ludus.types import JSON, Task, ToolStatus, Trajectory

_INVALID = (ToolStatus.MALFORMED, ToolStatus.UNKNOWN_TOOL, ToolStatus.BAD_ARGUMENTS)


def only_if(part: RewardFunction, *gates: RewardFunction) -> RewardFunction:
    """Create a part with the value of `part` if every gate is 1, else 0: form counts only if nothing else failed."""

    def gated_part(task: Task, trajectory: Trajectory) -> float:
        return part(task, trajectory) if all(gate(task, trajectory) >= 1 for gate in gates) else 0.0

    return gated_part


def either(*parts: RewardFunction) -> RewardFunction:
    """Create a part with the largest value of the parts: a gate that any of them opens."""
    if not parts:
        raise ValueError("either needs a part")

    def largest(task: Task, trajectory: Trajectory) -> float:
        return max(part(task, trajectory) for part in parts)

    return largest


def extra_calls(free: int, limit: int) -> RewardFunction:
    """Create a tool-efficiency penalty: 0 up to `free` calls, then linear to -1 at `limit`, -1 beyond."""
    if not 0 <= free < limit:
        raise ValueError(f"free must be from 0 to below limit = {limit}, not {free}")

    def call_count(task: Task, trajectory: Trajectory) -> float:
        del task
        return -_held((len(trajectory.call_outcomes) - free) / (limit - free))

    return call_count


def repeated_calls(cap: int = 4) -> RewardFunction:
    """`-repeats / cap`, at least -1: calls of a tool with the very arguments of an earlier one.

    The order of arguments does not matter, and 1 is 1.0. For tools whose answer changes between calls this is
    no fault.
    """
    _check(cap)

    def repeats(task: Task, trajectory: Trajectory) -> float:
        del task
        made = [
            (call.name, json.dumps(_plain(dict(call.arguments)), sort_keys=True)) for call in calls_made(trajectory)
        ]
        return -_held((len(made) - len(set(made))) / cap)

    return repeats


def invalid_calls(cap: int = 4) -> RewardFunction:
    """`-number / cap`, at least -1: calls that were malformed, of no tool, or with unfit arguments.

    A tool that raises or takes too long is not the model's fault and does not count.
    """
    _check(cap)

    def invalid(task: Task, trajectory: Trajectory) -> float:
        del task
        return -_held(sum(outcome.status in _INVALID for outcome in trajectory.call_outcomes) / cap)

    return invalid


def long_answer(free: int, limit: int) -> RewardFunction:
    """Create a length penalty: 0 up to `free` words of the answer, then linear to -1 at `limit`, -1 beyond.

    It concerns the visible answer; the length of all sampled text is shaped by the algorithm.
    """
    if not 0 <= free < limit:
        raise ValueError(f"free must be from 0 to below limit = {limit}, not {free}")

    def words(task: Task, trajectory: Trajectory) -> float:
        del task
        return -_held((len(trajectory.answer.split()) - free) / (limit - free))

    return words


def share_in_script(text: str, script: str) -> float:
    """Return the share of the letters that belong to a script, by Unicode name (LATIN, CYRILLIC, CJK, ...).

    1 if there are no letters. Digits, punctuation and marks do not count.
    """
    letters = [_script(character) for character in text if character.isalpha()]
    return sum(name == script for name in letters) / len(letters) if letters else 1.0


@lru_cache(maxsize=20_000)
def _script(character: str) -> str:
    """Return the first word of the character's name, ignoring words about its glyph."""
    plain = unicodedata.normalize("NFKC", character)[:1]
    return unicodedata.name(plain, "NONE").split(" ")[0].split("-")[0]


def language_consistency(script: str = "LATIN") -> RewardFunction:
    """Create a part: the share in [0, 1] of the letters that the model wrote, thoughts included, in the script.

    After DeepSeek-R1's share of words in the language (arXiv:2501.12948, section 2.3.2). A script is not a
    language, and Latin letters in formulas and names count as Latin.
    """

    def in_script(task: Task, trajectory: Trajectory) -> float:
        del task
        texts = [
            message.get("reasoning_content", "") + message["content"]
            for message in trajectory.messages
            if message["role"] == "assistant"
        ]
        return share_in_script("".join(texts), script)

    return in_script


def is_supported(answer: str, sources: str) -> bool:
    """Return whether the words of the answer occur in the sources, contiguous and in order."""
    words = normalise(answer)
    return bool(words) and f" {words} " in f" {normalise(sources)} "


def citation_support(task: Task, trajectory: Trajectory) -> float:
    """Return 1 if the final answer occurs in the output of one successful call, else 0.

    It does not show that the answer is right: a page may name it for another reason.
    """
    del task
    fine = (outcome.output for outcome in trajectory.call_outcomes if outcome.status is ToolStatus.OK)
    return float(any(is_supported(trajectory.answer, output) for output in fine))


def _plain(value: JSON) -> JSON:
    """Return the value with integral floats as integers."""
    if isinstance(value, dict):
        return {name: _plain(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_plain(inner) for inner in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _held(value: float) -> float:
    return max(0.0, min(1.0, value))


def _check(cap: int) -> None:
    if cap < 1:
        raise ValueError(f"cap must be at least 1, not {cap}")
