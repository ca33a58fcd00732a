"""Shared by the parsers: an action under construction, the separation of thinking, and JSON as models write it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NoReturn, cast

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

    def add_text(self, text: str) -> None:
        """Add ordinary text to the content."""
        if text.strip():
            self.prose.append(text.strip())

    def add_call(self, name: str, arguments: dict[str, JSON]) -> None:
        """Add a well-formed call."""
        self.calls.append(ToolCall(self._next_id(), name, arguments))

    def add_error(self, text: str, reason: str, content: str | None = None) -> None:
        """Add a malformed call; its text, or `content` instead, stays in the content."""
        self.errors.append(CallError(self._next_id(), text, reason))
        self.add_text(text if content is None else content)

    def action(self, reasoning: str | None = None) -> Action:
        """Return the finished action."""
        message: Message = {"role": "assistant", "content": "\n".join(self.prose)}
        if reasoning is not None:
            message["reasoning_content"] = reasoning
        if self.calls:
            message["tool_calls"] = [_to_openai(call) for call in self.calls]
        return Action(message, tuple(self.calls), tuple(self.errors))

    def _next_id(self) -> str:
        return f"call_{self.turn}_{len(self.calls) + len(self.errors)}"


def _to_openai(call: ToolCall) -> MessageToolCall:
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


_SNIPPET_CHARS = 20
_TOO_DEEP = "The JSON nests too deeply. Make the arguments flatter."
_BLANKS = re.compile(r"[ \t\n\r]*")
_PYTHON_WORD = re.compile(r"(None|True|False)\b")
_TRAILING_COMMA = re.compile(r",\s*[}\]]")
_KINDS = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", int: "a number", float: "a number"}


def skip_blanks(text: str, start: int) -> int:
    """Return the offset of the first character at or after `start` that is not blank in JSON."""
    blanks = _BLANKS.match(text, start)
    return blanks.end() if blanks else start


def decode_prefix(text: str, start: int = 0) -> tuple[object, int]:
    """Decode the JSON value at `start`, skipping blanks; return it and the offset after it.

    The last value of a repeated key wins. Raises Malformed for broken JSON, NaN and infinities, numbers
    beyond a float, and too many digits or levels.
    """
    begin = skip_blanks(text, start)
    try:
        return _DECODER.raw_decode(text, begin)
    except json.JSONDecodeError as error:
        raise Malformed(_reason(error, begin)) from None
    except Malformed:
        raise
    except ValueError:
        raise Malformed("The JSON holds a number with far too many digits.") from None
    except RecursionError:
        raise Malformed(_TOO_DEEP) from None


def decode(text: str) -> object:
    """Decode a text that is exactly one JSON value. Raises Malformed as `decode_prefix`."""
    value, end = decode_prefix(text)
    after = text[end:].strip()
    if after:
        raise Malformed(f"The JSON ends before {_snippet(after)}. Write one JSON object and nothing after it.")
    return value


def call_of(value: object, key: str) -> tuple[str, dict[str, JSON]]:
    """Parse a decoded value as a call; return name and arguments. Raises Malformed.

    The arguments are an object, or JSON text of one, under `arguments` or else `parameters`; missing
    arguments are empty. `key` is the name used in error messages.
    """
    if not isinstance(value, dict):
        raise Malformed(f'A call is a JSON object with "name" and "{key}", not {_kind(value)}.')
    if "name" not in value:
        raise Malformed(f'The call has no "name". Write {{"name": ..., "{key}": {{...}}}}.')
    name = value["name"]
    if not isinstance(name, str):
        raise Malformed(f'The "name" of a call is a string, not {_kind(name)}.')
    if not name.strip():
        raise Malformed('The "name" of the call is empty. Write the name of a tool.')
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        arguments = _decode_string(arguments)
    if not isinstance(arguments, dict):
        raise Malformed(f"The arguments of a call are a JSON object, not {_kind(arguments)}.")
    check_plain({name: None})
    return name, check_plain(cast("dict[str, JSON]", arguments))


def _decode_string(text: str) -> object:
    try:
        return decode(text)
    except Malformed as error:
        raise Malformed(f"The arguments are a string that holds no JSON object. {error.reason}") from None


def _refuse_constant(word: str) -> NoReturn:
    raise Malformed(f"{word} is not JSON. Write a finite number, a string or null.")


def _finite(digits: str) -> float:
    number = float(digits)
    if number in (float("inf"), float("-inf")):
        raise Malformed("The JSON holds a number that is too large.")
    return number


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant, parse_float=_finite)


def _reason(error: json.JSONDecodeError, begin: int) -> str:
    """Describe the JSON error and its position, independently of Python's version."""
    rest = error.doc[error.pos :]
    if not rest.strip():
        return "The JSON ends too early. Close every quote, bracket and brace."
    if rest.startswith("'") or _PYTHON_WORD.match(rest):
        return f"This is Python, not JSON, at {_snippet(rest)}. Use double quotes, null, true and false."
    last = error.doc[begin : error.pos].rstrip()[-1:]
    if _TRAILING_COMMA.match(last + rest if last == "," else rest):
        return "The JSON has a comma after the last item. Remove it."
    if error.msg.startswith("Invalid control character"):
        return "A string in the JSON holds a raw line break or control character. Write it as \\n or \\t."
    if error.msg.startswith("Unterminated string"):
        return f"A string in the JSON is not closed: {_snippet(rest)}."
    if error.msg.startswith("Invalid \\"):
        return f"A backslash in the JSON is not escaped, at {_snippet(rest)}. Write it twice."
    message = error.msg[:1].lower() + error.msg[1:]
    return f"The JSON is broken at character {error.pos - begin}, {_snippet(rest)}: {message}."


def _snippet(text: str) -> str:
    return repr(text[:_SNIPPET_CHARS])


def _kind(value: object) -> str:
    return "null" if value is None else _KINDS.get(type(value), "that")
