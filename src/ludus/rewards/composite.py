"""Parts of composite rewards: format of the transcript, use of tools, number of turns.

They reward form, never correctness. Give them weights well below the outcome's.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from ludus.rewards.answer_extraction import MAX_CHARACTERS, boxes
from ludus.rewards.base import RewardFunction
from ludus.rewards.math.math_verify import Expression
from ludus.rewards.math.numeric import Quantity
from ludus.rewards.paper_rewards import ExpectedCalls, calls_made
from ludus.types import Message, StopReason, Task, ToolStatus, Trajectory

THINK_MARKS = ("<think>", "</think>")
MATH_TRUTHS = (Expression, Quantity)
"""Truths of tasks whose answer is expected in a box."""


def think_format(task: Task, trajectory: Trajectory) -> float:
    """Return 1 if the episode ended with an answer after well-formed thinking, else 0 (arXiv:2501.12948).

    Well formed: a message begins with a closed, non-empty `<think>` block followed by other text, and no message
    has a thinking mark anywhere else.
    """
    del task
    said = _said(trajectory)
    answered = trajectory.stop_reason is StopReason.ANSWERED and bool(trajectory.answer.strip())
    stray = any(_has_mark(message) for message in said)
    return float(answered and not stray and any(_has_thought(message) for message in said))


def format_score(task: Task, trajectory: Trajectory) -> float:
    """Return the format score, clamped to [0, 1].

    0.3 for a complete `<think>` block, 0.1 for each call that is valid JSON, -0.2 for each that is not, and 0.2
    for a final answer in a box if the task is mathematics.
    """
    statuses = [outcome.status for outcome in trajectory.call_outcomes]
    broken = statuses.count(ToolStatus.MALFORMED)
    thought = any(_has_thought(message) and not _has_mark(message) for message in _said(trajectory))
    boxed = isinstance(task.truth, MATH_TRUTHS) and _has_box(trajectory.answer)
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


def extra_turns(free: int, limit: int) -> RewardFunction:
    """Create a penalty: 0 up to `free` turns of the model, then linear to -1 at `limit`, -1 beyond."""
    if not 0 <= free < limit:
        raise ValueError(f"free must be from 0 to below limit = {limit}, not {free}")

    def turns(task: Task, trajectory: Trajectory) -> float:
        del task
        return -max(0.0, min(1.0, (len(_said(trajectory)) - free) / (limit - free)))

    return turns


def _has_box(answer: str) -> bool:
    found = boxes(answer) if len(answer) <= MAX_CHARACTERS else None
    return any(one.strip() for one in found or ())


def _said(trajectory: Trajectory) -> Sequence[Message]:
    return [message for message in trajectory.messages if message["role"] == "assistant"]


def _has_thought(message: Message) -> bool:
    """Whether thinking was closed: something follows it."""
    follows = message["content"].strip() or message.get("tool_calls")
    return bool(message.get("reasoning_content", "").strip() and follows)


def _has_mark(message: Message) -> bool:
    texts = (message["content"], message.get("reasoning_content", ""))
    return any(mark in text for mark in THINK_MARKS for text in texts)
