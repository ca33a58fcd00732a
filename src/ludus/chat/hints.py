"""Texts that show a part of a dialogue: hints of failed tasks (`World.hint`), prompts of a self-teacher."""

from __future__ import annotations

from collections.abc import Sequence

from ludus.types import Message, StopReason, ToolStatus, Trajectory

MAX_ERROR_CHARS = 500
"""Longest part of a tool's output in a hint."""


def continuation(messages: Sequence[Message], prompt: Sequence[Message]) -> Sequence[Message]:
    """Return the messages after the task's prompt; all of them if the prompt differs."""
    return messages[len(prompt) :] if tuple(messages[: len(prompt)]) == tuple(prompt) else messages


def split_at_action(messages: Sequence[Message]) -> tuple[Sequence[Message], Sequence[Message]]:
    """Return the messages before the policy's first one, and the others."""
    first = next((i for i, one in enumerate(messages) if one["role"] == "assistant"), len(messages))
    return messages[:first], messages[first:]


def with_text(messages: Sequence[Message], text: str) -> list[Message]:
    """Return the messages with `text` after the last user message, or as a user message if there is none."""
    last = max((i for i, one in enumerate(messages) if one["role"] == "user"), default=None)
    if last is None:
        return [*messages, Message(role="user", content=text)]
    shown = Message(**{**messages[last], "content": f"{messages[last]['content']}\n\n{text}"})
    return [*messages[:last], shown, *messages[last + 1 :]]


def full_text(message: Message) -> str:
    """Return the reasoning, the text and the arguments of the calls of a message."""
    arguments = (call["function"]["arguments"] for call in message.get("tool_calls") or ())
    return " ".join((message.get("reasoning_content", ""), message.get("content") or "", *arguments))


def describe_dialogue(messages: Sequence[Message]) -> str:
    """Return one line per message: the text and the calls of assistant messages, the text of the others."""
    lines = [_action(one) if one["role"] == "assistant" else f"{one['role']}: {one['content']}" for one in messages]
    return "\n".join(filter(None, lines))


def describe_failure(attempt: Trajectory) -> str:
    """Return the last failed call and the reason of the end of an attempt; empty if it answered without an error."""
    errors = [one for one in attempt.outcomes if one.status is not ToolStatus.OK]
    lines = []
    if errors:
        lines.append(f"The call of {errors[-1].tool} failed: {errors[-1].output[:MAX_ERROR_CHARS]}")
    if attempt.stop_reason is not StopReason.ANSWERED:
        lines.append(f"It ended without an answer: {attempt.stop_reason.value.replace('_', ' ')}.")
    return "\n".join(lines)


def describe_start(solution: Sequence[Message], num_actions: int) -> str:
    """Return the first actions of a solution, one per line, without its last one, which is the answer.

    A solution of one action is shown up to half of its words. Empty without actions.
    """
    actions = [text for one in solution if one["role"] == "assistant" and (text := _action(one))]
    if not (actions and num_actions):
        return ""
    if len(actions) == 1:
        words = actions[0].split()
        return " ".join(words[: len(words) // 2])
    return "\n".join(actions[: min(num_actions, len(actions) - 1)])


def _action(message: Message) -> str:
    calls = [f"{one['function']['name']}({one['function']['arguments']})" for one in message.get("tool_calls", [])]
    return "\n".join(filter(None, [message["content"], *calls]))
