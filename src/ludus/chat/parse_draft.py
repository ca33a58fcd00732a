"""Shared by the parsers: an action under construction, and the separation of thinking."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field

from ludus.types import JSON, Action, CallError, Message, MessageToolCall, ToolCall

MAX_DEPTH = 64
"""Maximum nesting of lists and objects in the arguments of a call."""

THINK_OPEN, THINK_CLOSE = "<think>", "</think>"

_FENCE = "```"
_FENCE_LANGUAGE = re.compile(r"[\w-]*(?=[\s{\[])")


class Malformed(ValueError):
    """A malformed call. `reason` is a sentence that the model can act on. Never leaves a parser."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass
class ParsedDraft:
    """An action under construction. Calls and errors are numbered in the order of addition."""

    turn: int
    calls: list[ToolCall] = field(default_factory=list)
    errors: list[CallError] = field(default_factory=list)
    prose: list[str] = field(default_factory=list)

    def say(self, text: str) -> None:
        """Add ordinary text to the content."""
        if text.strip():
            self.prose.append(text.strip())

    def call(self, name: str, arguments: dict[str, JSON]) -> None:
        """Add a well-formed call."""
        self.calls.append(ToolCall(self._next_id(), name, arguments))

    def fail(self, text: str, reason: str, content: str | None = None) -> None:
        """Add a malformed call; its text, or `content` instead, stays in the content."""
        self.errors.append(CallError(self._next_id(), text, reason))
        self.say(text if content is None else content)

    def action(self, reasoning: str | None = None) -> Action:
        """Return the finished action."""
        message: Message = {"role": "assistant", "content": "\n".join(self.prose)}
        if reasoning is not None:
            message["reasoning_content"] = reasoning
        if self.calls:
            message["tool_calls"] = [_in_openai_shape(call) for call in self.calls]
        return Action(message, tuple(self.calls), tuple(self.errors))

    def _next_id(self) -> str:
        return f"call_{self.turn}_{len(self.calls) + len(self.errors)}"


def _in_openai_shape(call: ToolCall) -> MessageToolCall:
    arguments = json.dumps(call.arguments, ensure_ascii=False)
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}


def split_thinking(text: str, inside_call: Callable[[int], bool]) -> tuple[str | None, str]:
    """Return the thinking (None if there is none) and the text after it.

    `<think>...</think>` at the start is thinking, and so is an adjacent second block; without `</think>`
    everything is. If the generation prompt has opened `<think>`, the text starts inside: a `</think>` without
    a preceding `<think>` ends thinking that began with the text, unless `inside_call` returns that its offset
    belongs to a call's arguments. A `<think>` after other text is ordinary text.
    """
    thoughts: list[str] = []
    rest = text
    close = text.find(THINK_CLOSE)
    if close >= 0 and THINK_OPEN not in text[:close] and not inside_call(close):
        thoughts.append(text[:close].strip())
        rest = text[close + len(THINK_CLOSE) :]
    while rest.lstrip().startswith(THINK_OPEN):
        thought, _, rest = rest.lstrip().removeprefix(THINK_OPEN).partition(THINK_CLOSE)
        thoughts.append(thought.strip())
    return ("\n".join(filter(None, thoughts)) if thoughts else None), rest


def parse_whole(text: str, turn: int, fill: Callable[[ParsedDraft, str], None]) -> Action:
    """Parse a format in which calls make up the whole text after the thinking.

    A text that consists of calls contains no thinking, so arguments may contain `</think>`.
    """
    whole = ParsedDraft(turn)
    fill(whole, text)
    if whole.calls and not whole.errors and not whole.prose:
        return whole.action()
    reasoning, rest = split_thinking(text, inside_call=lambda _: False)
    if reasoning is None:
        return whole.action()
    draft = ParsedDraft(turn)
    fill(draft, rest)
    return draft.action(reasoning)


def unfence(text: str) -> str:
    """Return the inside of a Markdown fence around the whole text, or the stripped text."""
    stripped = text.strip()
    if len(stripped) < 2 * len(_FENCE) or not (stripped.startswith(_FENCE) and stripped.endswith(_FENCE)):
        return stripped
    inner = stripped[len(_FENCE) : -len(_FENCE)]
    language = _FENCE_LANGUAGE.match(inner)
    return inner[language.end() if language else 0 :].strip()


def deeper_than(value: object, limit: int) -> bool:
    """Return whether lists and dicts in `value` nest in more than `limit` levels."""
    level = [value]
    for _ in range(limit + 1):
        level = [child for node in level for child in _children(node)]
        if not level:
            return False
    return True


def _children(node: object) -> list[object]:
    if isinstance(node, dict):
        return list(node.values())
    return node if isinstance(node, list) else []


def check_plain(arguments: dict[str, JSON]) -> dict[str, JSON]:
    """Return `arguments` if they can be encoded as JSON and UTF-8. Raises Malformed."""
    if deeper_than(arguments, MAX_DEPTH):
        raise Malformed(f"The arguments nest deeper than {MAX_DEPTH} levels. Make them flatter.")
    try:
        json.dumps(arguments, ensure_ascii=False, allow_nan=False).encode()
    except UnicodeEncodeError:
        raise Malformed("The call holds half of a surrogate pair. Write the character itself.") from None
    except ValueError:
        raise Malformed("The arguments hold a number that is not finite or far too long.") from None
    return arguments
