"""Parsers of tool calls in JSON (Hermes and Llama 3), and the parts shared by all parsers."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import NoReturn, cast

from ludus.tools.base import ToolSchema
from ludus.types import JSON, Action, CallError, Guide, Message, MessageToolCall, ToolCall

MAX_DEPTH = 64
"""Maximum nesting of lists and objects in the arguments of a call."""
THINK_OPEN, THINK_CLOSE = "<think>", "</think>"
CALL_OPEN, CALL_CLOSE = "<tool_call>", "</tool_call>"
PYTHON_TAG = "<|python_tag|>"
GUIDES_EXIST = "They support templates with the call format of Hermes, Qwen2.5 and Qwen3."
"""Hint of errors about unsupported guides."""
JSON_STYLE: dict[str, dict[str, JSON]] = {
    "x-guidance": {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
}
"""Whitespace as in `json.dumps`: unrestricted whitespace could be sampled endlessly."""

_FENCE = re.compile(r"```(?:[\w-]*(?=[\s{\[]))?(.*)```", re.DOTALL)
_SNIPPET_CHARS = 20
_BLANKS = re.compile(r"[ \t\n\r]*")
_PYTHON_WORD = re.compile(r"(None|True|False)\b")
_TRAILING_COMMA = re.compile(r",\s*[}\]]")
_KINDS = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", int: "a number", float: "a number"}


class MalformedCall(ValueError):
    """Malformed call. `reason` is a sentence for the model. Parsers catch it."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass
class ParsedDraft:
    """Action under construction from the text `whole`. Calls and errors are numbered in the order of addition."""

    turn: int
    whole: str
    reasoning: str | None = None
    calls: list[ToolCall] = field(default_factory=list)
    errors: list[CallError] = field(default_factory=list)
    prose: list[str] = field(default_factory=list)

    def add_text(self, text: str) -> None:
        if text.strip():
            self.prose.append(text.strip())

    def add_call(self, name: str, arguments: dict[str, JSON], call_id: str = "") -> None:
        """Add a well-formed call. `call_id` is its sampled id, if any; a repeated one is replaced."""
        taken = any(call.id == call_id for call in self.calls)
        self.calls.append(ToolCall(self._next_id() if taken or not call_id else call_id, name, arguments))

    def add_error(self, text: str, reason: str, content: str | None = None) -> None:
        """Add a malformed call, and its text or `content` to the content."""
        self.errors.append(CallError(self._next_id(), text, reason))
        self.add_text(text if content is None else content)

    def action(self) -> Action:
        message: Message = {"role": "assistant", "content": "\n".join(self.prose)}
        if self.reasoning is not None:
            message["reasoning_content"] = self.reasoning
        if self.calls:
            message["tool_calls"] = [
                tool_call(call.id, call.name, json.dumps(call.arguments, ensure_ascii=False)) for call in self.calls
            ]
        return Action(message, tuple(self.calls), tuple(self.errors))

    def _next_id(self) -> str:
        return f"call_{self.turn}_{len(self.calls) + len(self.errors)}"


def tool_call(call_id: str, name: str, arguments: str) -> MessageToolCall:
    """Return a tool call in OpenAI's format; `arguments` is JSON text."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def split_thinking(text: str, inside_call: Callable[[int], bool], marks: tuple[str, str]) -> tuple[str | None, str]:
    """Return the thinking between `marks` (None if there is none) and the text after it.

    A `<think>...</think>` block at the start is thinking, as are blocks directly after it; an unclosed block
    extends to the end. If the generation prompt contains `<think>`, the text starts inside the block: a `</think>`
    without a preceding `<think>` then ends it, unless `inside_call` returns True for its offset (the arguments of a
    call). A `<think>` after other text is ordinary text.
    """
    opening, closing = marks
    thoughts, rest, close = list[str](), text, text.find(closing)
    if close >= 0 and opening not in text[:close] and not inside_call(close):
        thoughts.append(text[:close].strip())
        rest = text[close + len(closing) :]
    while rest.lstrip().startswith(opening):
        thought, _, rest = rest.lstrip().removeprefix(opening).partition(closing)
        thoughts.append(thought.strip())
    return ("\n".join(filter(None, thoughts)) if thoughts else None), rest


ReadText = Callable[[ParsedDraft, str, Sequence[ToolSchema]], None]


@dataclass(frozen=True, slots=True)
class ToolCallParser:
    """Parser of the tool calls in the text of an action. Never raises.

    `read` adds the calls, the errors and the content of the text after the thinking to a draft. `is_inside_call`
    returns whether an offset of the text is inside a call. Without `thinking` marks, `read` finds the thinking.
    """

    name: str
    read: ReadText
    is_inside_call: Callable[[str, int], bool] = lambda text, at: False
    thinking: tuple[str, str] | None = (THINK_OPEN, THINK_CLOSE)

    def parse(self, text: str, *, turn: int, schemas: Sequence[ToolSchema] = ()) -> Action:
        """Return the message, the calls and the errors of turn `turn`, counted from 0.

        Formats without types take the types of the arguments from the tools' `schemas`.
        """
        draft, rest = ParsedDraft(turn, text), text
        if self.thinking is not None:
            draft.reasoning, rest = split_thinking(text, partial(self.is_inside_call, text), self.thinking)
        self.read(draft, rest, schemas)
        return draft.action()


def whole_text_parser(name: str, read: ReadText) -> ToolCallParser:
    """Create the parser of a format in which calls make up the whole text after the thinking.

    If the whole text parses as calls, it has no thinking, so arguments may contain `</think>`.
    """

    def is_inside_call(text: str, _: int) -> bool:
        draft = ParsedDraft(0, text)
        read(draft, text, ())
        return bool(draft.calls) and not draft.errors and not draft.prose

    return ToolCallParser(name, read, is_inside_call)


def strip_fence(text: str) -> str:
    """Return the content of a Markdown fence around the whole text, or the stripped text."""
    fenced = _FENCE.fullmatch(text.strip())
    return (fenced[1] if fenced else text).strip()


def exceeds_depth(value: object, limit: int) -> bool:
    """Return whether lists and dicts in `value` are nested in more than `limit` levels."""
    level = [value]
    for _ in range(limit + 1):
        lists = [node.values() if isinstance(node, dict) else node for node in level if isinstance(node, dict | list)]
        level = list(chain.from_iterable(lists))
        if not level:
            return False
    return True


def check_plain(arguments: dict[str, JSON]) -> dict[str, JSON]:
    """Return `arguments` if they can be encoded as JSON and UTF-8. Raises MalformedCall."""
    if exceeds_depth(arguments, MAX_DEPTH):
        raise MalformedCall(f"The arguments nest deeper than {MAX_DEPTH} levels. Make them flatter.")
    try:
        json.dumps(arguments, ensure_ascii=False, allow_nan=False).encode()
    except UnicodeEncodeError:
        raise MalformedCall("The call holds half of a surrogate pair. Write the character itself.") from None
    except ValueError:
        raise MalformedCall("The arguments hold a number that is not finite or far too long.") from None
    return arguments


def skip_blanks(text: str, start: int) -> int:
    """Return the offset of the first character at or after `start` that is not blank in JSON."""
    blanks = _BLANKS.match(text, start)
    return blanks.end() if blanks else start


def decode_prefix(text: str, start: int = 0) -> tuple[object, int]:
    """Decode the JSON value at `start`, skipping blanks; return it and the offset after it.

    The last value of a repeated key wins. Raises MalformedCall for invalid JSON, NaN and infinities, numbers
    beyond the range of floats, and too many digits or levels.
    """
    begin = skip_blanks(text, start)
    try:
        return _DECODER.raw_decode(text, begin)
    except json.JSONDecodeError as error:
        raise MalformedCall(_reason(error, begin)) from None
    except MalformedCall:
        raise
    except ValueError:
        raise MalformedCall("The JSON holds a number with far too many digits.") from None
    except RecursionError:
        raise MalformedCall("The JSON nests too deeply. Make the arguments flatter.") from None


def decode(text: str) -> object:
    """Decode a text that is exactly one JSON value. Raises MalformedCall as `decode_prefix`."""
    value, end = decode_prefix(text)
    after = text[end:].strip()
    if after:
        raise MalformedCall(f"The JSON ends before {_snippet(after)}. Write one JSON object and nothing after it.")
    return value


def call_of(value: object, key: str) -> tuple[str, dict[str, JSON]]:
    """Parse a decoded value as a call; return name and arguments. Raises MalformedCall.

    The arguments are an object, or JSON text of one, under `arguments` or else `parameters`; missing
    arguments are empty. `key` is the name used in error messages.
    """
    if not isinstance(value, dict):
        raise MalformedCall(f'A call is a JSON object with "name" and "{key}", not {_kind(value)}.')
    if "name" not in value:
        raise MalformedCall(f'The call has no "name". Write {{"name": ..., "{key}": {{...}}}}.')
    name = value["name"]
    if not isinstance(name, str):
        raise MalformedCall(f'The "name" of a call is a string, not {_kind(name)}.')
    if not name.strip():
        raise MalformedCall('The "name" of the call is empty. Write the name of a tool.')
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        try:
            arguments = decode(arguments)
        except MalformedCall as error:
            raise MalformedCall(f"The arguments are a string that holds no JSON object. {error.reason}") from None
    if not isinstance(arguments, dict):
        raise MalformedCall(f"The arguments of a call are a JSON object, not {_kind(arguments)}.")
    check_plain({name: None})
    return name, check_plain(cast("dict[str, JSON]", arguments))


def _reject_constant(word: str) -> NoReturn:
    raise MalformedCall(f"{word} is not JSON. Write a finite number, a string or null.")


def _finite(digits: str) -> float:
    number = float(digits)
    if number in (float("inf"), float("-inf")):
        raise MalformedCall("The JSON holds a number that is too large.")
    return number


_DECODER = json.JSONDecoder(parse_constant=_reject_constant, parse_float=_finite)


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


_TAG = re.compile(f"{CALL_OPEN}|{CALL_CLOSE}")
_NESTED = f"A {CALL_OPEN} starts before the one before it ends. Write {CALL_CLOSE} after each call."
_STRAY = f"There is a {CALL_CLOSE} without {CALL_OPEN}. Write each call between {CALL_OPEN} and {CALL_CLOSE}."
_UNCLOSED = f"The {CALL_OPEN} is not closed. Write {CALL_CLOSE} after the call."
_UNTAGGED = f"The call has no tags. Write it between {CALL_OPEN} and {CALL_CLOSE}."


def _read_hermes(draft: ParsedDraft, text: str, _: Sequence[ToolSchema]) -> None:
    """Read any number of `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`.

    Also accepts `parameters` for `arguments`, arguments as JSON text, no arguments, a Markdown fence around
    the JSON, and an unclosed tag with complete JSON at the end of the text (models often stop
    before the closing tag). Tags inside JSON strings belong to the string. Text around the calls is content.

    Errors: invalid JSON, JSON that is not a call, nested tags (one error, up to the tag that closes the outer
    one or the end), a lone closing tag (the text of the error starts at the previous call), and a call without
    tags as the whole text.
    """
    if _is_untagged_call(text):
        draft.add_error(text.strip(), _UNTAGGED)
        return
    position = 0
    while tag := _TAG.search(text, position):
        if tag.group() == CALL_CLOSE:
            draft.add_error(text[position : tag.end()].strip(), _STRAY)
            position = tag.end()
        else:
            draft.add_text(text[position : tag.start()])
            position = _read_block(draft, text, tag.start())
    draft.add_text(text[position:])


def _is_inside_json(text: str, at: int) -> bool:
    position = 0
    while (start := text.find(CALL_OPEN, position, at)) >= 0:
        end = _json_end(text, start + len(CALL_OPEN))
        if end > at:
            return True
        position = end if end >= 0 else text.find(CALL_CLOSE, start, at)
        if position < 0:  # broken JSON up to `at`: the last tag may begin a call
            return _json_end(text, text.rfind(CALL_OPEN, 0, at) + len(CALL_OPEN)) > at
    return False


HERMES = ToolCallParser("hermes", _read_hermes, _is_inside_json)


def _json_end(text: str, start: int) -> int:
    try:
        return decode_prefix(text, start)[1]
    except MalformedCall:
        return -1


def _is_untagged_call(text: str) -> bool:
    if _TAG.search(text) or '"name"' not in text:
        return False
    try:
        value = decode(strip_fence(text))
    except MalformedCall:
        return False
    return isinstance(value, dict) and "name" in value and ("arguments" in value or "parameters" in value)


def _read_block(draft: ParsedDraft, text: str, start: int) -> int:
    """Read the block whose opening tag is at `start`; return the offset after it."""
    begin = start + len(CALL_OPEN)
    end = _json_end(text, begin)
    after = skip_blanks(text, end) if end >= 0 else -1
    if after == len(text) or (after >= 0 and text.startswith(CALL_CLOSE, after)):
        body, block_end = text[begin:after], min(after + len(CALL_CLOSE), len(text))
    else:
        tag = _TAG.search(text, begin)
        if tag and tag.group() == CALL_OPEN:
            depth, block_end = 1, len(text)
            for tag in _TAG.finditer(text, begin):
                depth += 1 if tag.group() == CALL_OPEN else -1
                if depth == 0:
                    block_end = tag.end()
                    break
            draft.add_error(text[start:block_end].strip(), _NESTED)
            return block_end
        body = text[begin : tag.start() if tag else len(text)]
        block_end = tag.end() if tag else len(text)
    block = text[start:block_end].strip()
    try:
        draft.add_call(*call_of(decode(strip_fence(body)), "arguments"))
    except MalformedCall as error:
        closed = block.endswith(CALL_CLOSE) or after == len(text)
        draft.add_error(block, error.reason if closed else f"{_UNCLOSED} {error.reason}")
    return block_end


_TEXT = r"TEXT: /(.|\n)+/ & ~/(.|\n)*(<tool_call>|<\/tool_call>)(.|\n)*/"


def hermes_guide(
    tools: Sequence[ToolSchema], added: Mapping[str, int], *, required: bool = False, single: bool = False
) -> Guide:
    """Return a grammar of free text with any number of Hermes calls of the given tools; `added` are the tokenizer's
    added tokens. With `required` there is at least one call, and only a thought, spaces and line breaks around the
    calls. With `single` there is at most one.

    Arguments must match the tool's schema. For guided sampling only: do not use it in training, since it
    changes the sampled distribution.
    """
    opening, closing = (f"<[{added[tag]}]>" if tag in added else json.dumps(tag) for tag in (CALL_OPEN, CALL_CLOSE))
    calls = " | ".join(f"call_{i}" for i in range(len(tools)))
    think = [f"<[{added[tag]}]>" if tag in added else json.dumps(tag) for tag in (THINK_OPEN, THINK_CLOSE)]
    tags = "".join(f" | <[{added[tag]}]>" for tag in (THINK_OPEN, THINK_CLOSE) if tag in added)
    between = "gap" if required else "text"
    one = f"{opening} ({calls}) {closing} {between}"
    count = {(False, False): "*", (False, True): "?", (True, False): "+", (True, True): ""}[required, single]
    before = f"gap ({' TEXT? '.join(think)} gap)?" if required else "text"
    rules = [
        f"start: {before} ({one}){count}" if tools else "start: text",
        f"text: (TEXT{tags})*",
        r"gap: /[ \n]*/",
        _TEXT,
    ]
    for i, tool in enumerate(tools):
        function = tool["function"]
        head = json.dumps(f'\n{{"name": {json.dumps(function["name"])}, "arguments": ')
        schema = json.dumps({**function["parameters"], "additionalProperties": False, **JSON_STYLE})
        rules.append(f'call_{i}: {head} %json {schema} "}}\\n"')
    return Guide("lark", "\n".join(rules) + "\n")


_CALL_START = re.compile(r"\[?\s*\{\s*[\"']?(name|type|function|parameters|arguments)[\"']?\s*:")
_CALL_INSIDE = re.compile(r"\{\s*\"name\"\s*:\s*\"[^\"]*\"\s*,\s*\"parameters\"\s*:")
_NOT_ALONE = "The call stands inside other text. Write the JSON object alone."
_AFTER = "Other text follows a call. Separate calls with ; and write nothing else."
_NOTHING = f"Nothing follows {PYTHON_TAG}. Write a JSON object with name and parameters."


def read_llama3(draft: ParsedDraft, text: str, _: Sequence[ToolSchema]) -> None:
    """Read `{"name": ..., "parameters": {...}}` as the whole text, or several separated by `;`.

    `<|python_tag|>` may precede the calls, also after other text. Also accepts `arguments` for
    `parameters`, a `type` key, no parameters, and a Markdown fence around the whole.

    Without the tag, JSON without parameters or arguments is content, unless it has only a name and possibly a
    type. Text after a call without `;` is one error up to the end; so is a call after other text.
    """
    body = strip_fence(text)
    if _CALL_START.match(body):
        _read_calls(draft, body, tagged=False)
        return
    prose, tag, after = text.partition(PYTHON_TAG)
    if not tag and _CALL_INSIDE.search(text):
        draft.add_error(text.strip(), _NOT_ALONE)
        return
    draft.add_text(prose)
    if tag and strip_fence(after):
        _read_calls(draft, strip_fence(after), tagged=True)
    elif tag:
        draft.add_error(tag + after, _NOTHING)


def _read_calls(draft: ParsedDraft, body: str, *, tagged: bool) -> None:
    position = 0
    while position < len(body):
        try:
            value, end = decode_prefix(body, position)
        except MalformedCall as error:
            draft.add_error(body[position:], error.reason)
            return
        if not (tagged or draft.calls or draft.errors or _is_call(value)):
            draft.add_text(body)
            return
        try:
            draft.add_call(*call_of(value, "parameters"))
        except MalformedCall as error:
            draft.add_error(body[position:end], error.reason)
        position = skip_blanks(body, end)
        if position < len(body) and body[position] != ";":
            draft.add_error(body[position:], _AFTER)
            return
        position = skip_blanks(body, position + 1)


def _is_call(value: object) -> bool:
    arguments = {"parameters", "arguments"}
    if isinstance(value, list):
        return any(isinstance(item, dict) and "name" in item and arguments & item.keys() for item in value)
    if not isinstance(value, dict):
        return False
    return bool(arguments & value.keys()) or ("name" in value and value.keys() <= {"name", "type"})
