"""Messages of scripted episodes (solutions, demonstrations and cheats), and of rewritten dialogues."""

from __future__ import annotations

import json
from collections.abc import Mapping

from ludus.types import JSON, FunctionCall, Message, MessageToolCall

SUMMARY = "Summary of the work so far:\n"
"""Start of the message with a summary."""


def assistant(text: str) -> Message:
    """Return an assistant message without a tool call."""
    return Message(role="assistant", content=text)


def summary_message(summary: str) -> Message:
    """Return the message with which a rewritten dialogue continues after the first messages."""
    return Message(role="user", content=SUMMARY + summary.strip())


def tool_call(call_id: str, tool: str, arguments: Mapping[str, JSON]) -> MessageToolCall:
    """Return a tool call with its arguments as JSON text."""
    text = json.dumps(dict(arguments), ensure_ascii=False)
    return MessageToolCall(id=call_id, type="function", function=FunctionCall(name=tool, arguments=text))


def calling_message(
    turn: int, tool: str, arguments: Mapping[str, JSON], *, content: str = "", reasoning: str = ""
) -> Message:
    """Return an assistant message with one tool call, whose id is `call_{turn}_0`."""
    message = Message(role="assistant", content=content)
    if reasoning:
        message["reasoning_content"] = reasoning
    message["tool_calls"] = [tool_call(f"call_{turn}_0", tool, arguments)]
    return message


def tool_turn(
    turn: int, tool: str, arguments: Mapping[str, JSON], output: str, *, content: str = "", reasoning: str = ""
) -> tuple[Message, Message]:
    """Return an assistant message with one tool call, and the tool message with its output."""
    call = calling_message(turn, tool, arguments, content=content, reasoning=reasoning)
    return call, Message(role="tool", content=output, tool_call_id=f"call_{turn}_0", name=tool)
