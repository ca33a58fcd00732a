"""Shaping parts: format, language and support of the answer, and number and validity of calls and turns.

They do not depend on whether the answer is right. All are in [-1, 1], penalties in [-1, 0]. Give them weights
well below the outcome's (`check_rewards`).
"""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import pairwise

from ludus.rewards.base import RewardFunction
from ludus.rewards.exact_match import normalise
from ludus.rewards.extract import MAX_CHARACTERS, boxes
from ludus.rewards.math.math_verify import Expression
from ludus.rewards.math.numeric import Quantity
from ludus.rewards.paper_rewards import ExpectedCalls, calls_made
from ludus.types import JSON, Message, StopReason, Task, ToolStatus, Trajectory

THINK_MARKS = ("<think>", "</think>")
MATH_TRUTHS = (Expression, Quantity)
"""Truths of tasks whose answer is expected in a box."""
_INVALID = (ToolStatus.MALFORMED, ToolStatus.UNKNOWN_TOOL, ToolStatus.BAD_ARGUMENTS)


def only_if(part: RewardFunction, *gates: RewardFunction) -> RewardFunction:
    """Create a part with the value of `part` if every gate is 1, else 0."""

    def gated_part(task: Task, trajectory: Trajectory) -> float:
        return part(task, trajectory) if all(gate(task, trajectory) >= 1 for gate in gates) else 0.0

    return gated_part


def either(*parts: RewardFunction) -> RewardFunction:
    """Create a part with the largest value of the parts, such as for a gate with alternatives."""
    if not parts:
        raise ValueError("either needs at least one part")

    def largest(task: Task, trajectory: Trajectory) -> float:
        return max(part(task, trajectory) for part in parts)

    return largest


def extra_calls(free: int, limit: int) -> RewardFunction:
    """Create a tool-efficiency penalty: 0 up to `free` calls, then linear to -1 at `limit`, -1 beyond."""
    return _linear_penalty(lambda trajectory: len(trajectory.call_outcomes), free, limit)


def extra_turns(free: int, limit: int) -> RewardFunction:
    """Create a penalty: 0 up to `free` turns of the model, then linear to -1 at `limit`, -1 beyond."""
    return _linear_penalty(lambda trajectory: len(_assistant_messages(trajectory)), free, limit)


def long_answer(free: int, limit: int) -> RewardFunction:
    """Create a length penalty: 0 up to `free` words of the answer, then linear to -1 at `limit`, -1 beyond.

    It depends on the visible answer only; the algorithm can penalize the length of all sampled text.
    """
    return _linear_penalty(lambda trajectory: len(trajectory.answer.split()), free, limit)


def repeated_calls(cap: int = 4) -> RewardFunction:
    """Create a penalty `-repeats / cap`, at least -1: calls with the tool and arguments of an earlier call.

    The order of arguments does not matter, and 1 equals 1.0. Unsuitable for tools whose output changes between
    calls.
    """

    def count(trajectory: Trajectory) -> int:
        calls = calls_made(trajectory)
        made = {(one.name, json.dumps(_normalise_numbers(dict(one.arguments)), sort_keys=True)) for one in calls}
        return len(calls) - len(made)

    return _capped_penalty(count, cap)


def invalid_calls(cap: int = 4) -> RewardFunction:
    """Create a penalty `-number / cap`, at least -1: malformed calls, unknown tools and invalid arguments.

    Exceptions and timeouts of a tool do not count.
    """
    return _capped_penalty(lambda trajectory: sum(o.status in _INVALID for o in trajectory.call_outcomes), cap)


def tool_diversity(cap: int = 3) -> RewardFunction:
    """Create a bonus: the number of different tools that were called successfully, divided by `cap`, at most 1."""
    if cap < 1:
        raise ValueError(f"cap must be at least 1, not {cap}")

    def diversity(task: Task, trajectory: Trajectory) -> float:
        used = {one.tool for one in trajectory.call_outcomes if one.status is ToolStatus.OK}
        return min(1.0, len(used) / cap)

    return diversity


def _capped_penalty(count: Callable[[Trajectory], int], cap: int) -> RewardFunction:
    if cap < 1:
        raise ValueError(f"cap must be at least 1, not {cap}")
    return _linear_penalty(count, 0, cap)


def _linear_penalty(count: Callable[[Trajectory], int], free: int, limit: int) -> RewardFunction:
    if not 0 <= free < limit:
        raise ValueError(f"free must be from 0 to below limit = {limit}, not {free}")

    def penalty(task: Task, trajectory: Trajectory) -> float:
        return -max(0.0, min(1.0, (count(trajectory) - free) / (limit - free)))

    return penalty


def share_in_script(text: str, script: str) -> float:
    """Return the share of the letters that belong to a script, by Unicode name (LATIN, CYRILLIC, CJK, ...).

    1 if there are no letters. Digits, punctuation and marks do not count.
    """
    letters = [_script(character) for character in text if character.isalpha()]
    return letters.count(script) / len(letters) if letters else 1.0


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
        texts = (m.get("reasoning_content", "") + m["content"] for m in _assistant_messages(trajectory))
        return share_in_script("".join(texts), script)

    return in_script


def is_supported(answer: str, sources: str) -> bool:
    """Return whether the words of the answer occur in the sources, contiguous and in order."""
    words = normalise(answer)
    return bool(words) and f" {words} " in f" {normalise(sources)} "


def citation_support(task: Task, trajectory: Trajectory) -> float:
    """Return 1 if the final answer occurs in the output of one successful call, else 0.

    A supported answer need not be right: the output may contain it in another context.
    """
    fine = (outcome.output for outcome in trajectory.call_outcomes if outcome.status is ToolStatus.OK)
    return float(any(is_supported(trajectory.answer, output) for output in fine))


def think_format(task: Task, trajectory: Trajectory) -> float:
    """Return 1 if the episode ended with an answer after well-formed thinking, else 0 (arXiv:2501.12948).

    Well formed: a message begins with a closed, non-empty `<think>` block followed by other text, and no message
    has a thinking mark anywhere else.
    """
    messages = _assistant_messages(trajectory)
    answered = trajectory.stop_reason is StopReason.ANSWERED and bool(trajectory.answer.strip())
    stray = any(_has_mark(message) for message in messages)
    return float(answered and not stray and any(_has_thought(message) for message in messages))


def format_score(task: Task, trajectory: Trajectory) -> float:
    """Return the format score, clamped to [0, 1].

    0.3 for a complete `<think>` block, 0.1 for each call that is valid JSON, -0.2 for each that is not, and 0.2
    for a final answer in a box if the task is mathematics.
    """
    statuses = [outcome.status for outcome in trajectory.call_outcomes]
    broken = statuses.count(ToolStatus.MALFORMED)
    thought = any(_has_thought(message) and not _has_mark(message) for message in _assistant_messages(trajectory))
    found = boxes(trajectory.answer) if len(trajectory.answer) <= MAX_CHARACTERS else None
    boxed = isinstance(task.truth, MATH_TRUTHS) and any(one.strip() for one in found or ())
    total = 0.3 * thought + 0.1 * (len(statuses) - broken) - 0.2 * broken + 0.2 * boxed
    return max(0.0, min(1.0, total))


def tool_use(task: Task, trajectory: Trajectory) -> float:
    """Return the tool-use score in [-1, 1].

    0.1 if the task needs a tool and one was called, -0.05 for each call that repeats the previous one, -0.3 for
    each call of an unknown tool. A task needs a tool unless its truth is `ExpectedCalls` without a call.
    """
    statuses = [outcome.status for outcome in trajectory.call_outcomes]
    unknown = statuses.count(ToolStatus.UNKNOWN_TOOL)
    called = len(statuses) > unknown + statuses.count(ToolStatus.MALFORMED)
    needed = not isinstance(task.truth, ExpectedCalls) or bool(task.truth.calls)
    repeats = sum(before == after for before, after in pairwise(calls_made(trajectory)))
    return max(-1.0, 0.1 * (needed and called) - 0.05 * repeats - 0.3 * unknown)


def _normalise_numbers(value: JSON) -> JSON:
    if isinstance(value, dict):
        return {name: _normalise_numbers(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_normalise_numbers(inner) for inner in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _assistant_messages(trajectory: Trajectory) -> Sequence[Message]:
    return [message for message in trajectory.messages if message["role"] == "assistant"]


def _has_thought(message: Message) -> bool:
    """Return whether the message has reasoning, followed by text or a tool call."""
    follows = message["content"].strip() or message.get("tool_calls")
    return bool(message.get("reasoning_content", "").strip() and follows)


def _has_mark(message: Message) -> bool:
    texts = (message["content"], message.get("reasoning_content", ""))
    return any(mark in text for mark in THINK_MARKS for text in texts)
