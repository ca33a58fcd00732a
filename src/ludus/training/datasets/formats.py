"""Convert records of known formats to ours, and check their messages and tools; ValueError has location and fault.

`FORMATS` is the table: the first format whose keys a record has applies. Converters return a record with `messages`,
`prompt` and `completion`, `prompt`, `chosen` and `rejected`, `text`, or `trajectory`; `files` parses and checks it.
None counts as missing, since columnar tables (Hugging Face datasets) cannot omit a key.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, get_args

from ludus.errors import UserError
from ludus.images import from_openai, read_image
from ludus.tools.base import FunctionSchema, Tool, ToolSchema, described_tool
from ludus.types import FunctionCall, Message, MessageToolCall

Fields = dict[str, object]
_SHAREGPT_ROLES: Final = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "function_call": "assistant",
    "observation": "tool",
    "function_response": "tool",
    "tool": "tool",
}


@dataclass(frozen=True, slots=True)
class DataFormat:
    """A format: its name, the keys that a record must have, and the conversion. `own`: read without conversion."""

    name: str
    keys: tuple[str, ...]
    convert: Callable[[Fields], Fields] = lambda record: record
    own: bool = False


def to_own_format(record: Fields) -> tuple[str, Fields]:
    """Return the name of a record's format (empty: ours) and the converted record. Raises ValueError if it has none."""
    for one in FORMATS:
        if record.keys() >= set(one.keys):
            try:
                return "" if one.own else f"{one.name} ({', '.join(one.keys)})", one.convert(record)
            except ValueError as error:
                raise ValueError(str(error) if one.own else f"read as {one.name}: {error}") from None
    keys = f"its keys are {', '.join(sorted(record))}" if record else "it has no keys"
    near = max(FORMATS, key=lambda one: len(record.keys() & set(one.keys)) / len(one.keys))
    if has := [key for key in near.keys if key in record]:
        lacks = " and ".join(key for key in near.keys if key not in record)
        raise ValueError(f"{keys}: with {' and '.join(has)} it resembles {near.name}, but {lacks} is missing")
    known = "; ".join(f"{one.name} ({', '.join(one.keys)})" for one in FORMATS)
    raise ValueError(f"{keys}, and no format has these. Known formats: {known}")


def _parsed(value: object, where: str) -> object:
    """Return a value whose table stores it as JSON text."""
    return parse_json(value, where) if isinstance(value, str) and value.lstrip()[:1] in ("[", "{") else value


def _openai(record: Fields) -> Fields:
    """Convert OpenAI's fine-tuning files: weights, text in parts and the role developer."""
    return {**record, "messages": _openai_messages(_parsed(record["messages"], "messages"), "messages")}


def _openai_messages(data: object, where: str) -> object:
    if not isinstance(data, list):
        return data
    return [_openai_message(one, f"{where}[{i}]") if isinstance(one, dict) else one for i, one in enumerate(data)]


def _openai_message(data: Fields, where: str) -> Fields:
    message = dict(data)
    if message.get("role") == "developer":
        message["role"] = "system"
    if isinstance(parts := message.get("content"), list):
        read = [_part(part, f"{where}.content[{i}]") for i, part in enumerate(parts)]
        message["content"], images = from_openai(read)
        message |= {"images": images} if images else {}
    weight = message.pop("weight", None)
    if weight is not None:
        if weight not in (0, 1):
            raise ValueError(f"{where}.weight is {as_words(weight)}, and must be 0 or 1")
        message["train"] = bool(weight)
    return message


def _part(part: object, where: str) -> tuple[str, str]:
    """Return the type of a content part and its text or URL."""
    fields = as_object(part, where)
    kind = fields.get("type")
    value = as_object(fields.get(kind), f"{where}.{kind}").get("url") if kind == "image_url" else fields.get("text")
    if kind not in ("text", "image_url") or not isinstance(value, str):
        raise ValueError(f"{where} has the type {as_words(kind)}, and only text and image_url are supported")
    return str(kind), value


def _openai_preference(record: Fields) -> Fields:
    """Convert OpenAI's preference files."""
    given = as_object(record["input"], "input")
    sides = {"chosen": record["preferred_output"], "rejected": record["non_preferred_output"]}
    prompt = _openai_messages(given.get("messages"), "input.messages")
    return {"prompt": prompt, "tools": given.get("tools"), **{k: _openai_messages(v, k) for k, v in sides.items()}}


def _sharegpt(record: Fields) -> Fields:
    """Convert `conversations` of from/value (or role/content), with `system` and `tools` as in LLaMA-Factory."""
    turns = _parsed(record["conversations"], "conversations")
    if not isinstance(turns, list):
        raise ValueError(f"conversations is {as_words(turns)}, and must be a list")
    messages = [_sharegpt_message(turn, f"conversations[{i}]") for i, turn in enumerate(turns)]
    if system := record.get("system"):
        messages.insert(0, {"role": "system", "content": system})
    return {**record, "messages": messages, "tools": _wrapped_tools(record.get("tools"))}


def _sharegpt_message(data: object, where: str) -> Fields:
    turn = as_object(data, where)
    name = turn.get("from", turn.get("role"))
    role = _SHAREGPT_ROLES.get(name) if isinstance(name, str) else None
    if role is None:
        raise ValueError(f"{where}.from is {as_words(name)}, and must be one of {', '.join(_SHAREGPT_ROLES)}")
    value = turn.get("value", turn.get("content"))
    if name != "function_call":
        return {"role": role, "content": value}
    calls = _parsed(value, f"{where}.value")
    calls = calls if isinstance(calls, list) else [calls]
    return {"role": role, "tool_calls": [{"function": as_object(call, f"{where}.value")} for call in calls]}


def _wrapped_tools(data: object) -> object:
    """Return tools as OpenAI descriptions: a bare function is wrapped."""
    tools = _parsed(data, "tools") or None
    if not isinstance(tools, list):
        return tools
    return [
        {"type": "function", "function": one} if isinstance(one, dict) and "function" not in one else one
        for one in tools
    ]


def _columns(question: str, answer: str, extra: str = "") -> Callable[[Fields], Fields]:
    """Return the conversion of a table with columns for question, further input and answer, and perhaps `system`."""

    def convert(record: Fields) -> Fields:
        texts = {key: record.get(key) or "" for key in (question, answer, "system", *([extra] if extra else []))}
        for key, text in texts.items():
            if not isinstance(text, str):
                raise ValueError(f"{key} is {as_words(text)}, and must be text")
        asked = "\n\n".join(str(texts[key]) for key in (question, extra) if texts.get(key))
        prompt = [{"role": "system", "content": texts["system"]}] if texts["system"] else []
        if not asked or not texts[answer]:
            raise ValueError(f"{answer if asked else question} is empty")
        return {**record, "prompt": [*prompt, {"role": "user", "content": asked}], "completion": texts[answer]}

    return convert


def _prompt_and_completion(record: Fields) -> Fields:
    """Convert prompt and completion, which are texts or messages."""
    return {**record, **{key: _openai_messages(record[key], key) for key in ("prompt", "completion")}}


FORMATS: Final[tuple[DataFormat, ...]] = (
    DataFormat("dialogue", ("messages",), _openai, own=True),
    DataFormat("rollout", ("trajectory",), own=True),
    DataFormat("OpenAI preference", ("input", "preferred_output", "non_preferred_output"), _openai_preference),
    DataFormat("prompt and completion", ("prompt", "completion"), _prompt_and_completion, own=True),
    DataFormat("preference pair", ("chosen", "rejected"), own=True),
    DataFormat("ShareGPT", ("conversations",), _sharegpt),
    DataFormat("Alpaca", ("instruction", "output"), _columns("instruction", "output", "input")),
    DataFormat("Dolly", ("instruction", "response"), _columns("instruction", "response", "context")),
    DataFormat("prompt and response", ("prompt", "response"), _columns("prompt", "response")),
    DataFormat("question and answer", ("question", "answer"), _columns("question", "answer")),
    DataFormat("text", ("text",), own=True),
)


Role = Literal["system", "user", "assistant", "tool"]
_KEY_ROLES = {"reasoning_content": "assistant", "tool_calls": "assistant", "train": "assistant"}
"""Keys of messages of a single role."""
_KEYS = {"role", "content", "tool_call_id", "name", "images", *_KEY_ROLES}
_MAX_DEPTH = 100
"""Maximum nesting; templates render values recursively."""


def as_object(data: object, where: str) -> dict[str, object]:
    """Return the object without keys whose value is None."""
    if not isinstance(data, dict):
        raise ValueError(f"{where} is {as_words(data)}, and must be an object")
    return {str(key): value for key, value in data.items() if value is not None}


def as_text(data: object, where: str) -> str:
    """Return the text. Raises ValueError if it is not text or cannot be encoded."""
    if not isinstance(data, str):
        raise ValueError(f"{where} is {as_words(data)}, and must be text")
    try:
        data.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{where} has {data[error.start]!a}, an unpaired surrogate") from None
    return data


def parse_json(text: str | bytes, where: str) -> object:
    """Parse JSON text. Raises ValueError if it is invalid."""
    try:
        value: object = json.loads(text)
    except UnicodeDecodeError:
        raise ValueError(f"{where} is not UTF-8 text") from None
    except RecursionError:
        raise ValueError(f"{where} is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"{where} is not valid JSON: {error}") from None
    return value


def read_messages(data: object, where: str) -> tuple[Message, ...]:
    """Return the messages of a list in any order."""
    return tuple(
        _message(as_object(item, f"{where}[{i}]"), f"{where}[{i}]") for i, item in enumerate(_list(data, where))
    )


def read_train_flags(data: object, where: str) -> tuple[bool, ...]:
    """Return whether each message trains: the assistant's unless `train` is false."""
    flags = []
    for i, item in enumerate(_list(data, where)):
        fields = as_object(item, f"{where}[{i}]")
        train = fields.get("train", fields.get("role") == "assistant")
        if not isinstance(train, bool):
            raise ValueError(f"{where}[{i}].train is {as_words(train)}, and must be true or false")
        flags.append(train)
    return tuple(flags)


def read_tools(data: object) -> tuple[Tool, ...]:
    """Return the tools of a list of OpenAI schemas, or of its JSON text; none for None."""
    if isinstance(data, str):
        data = parse_json(data, "tools")
    tools = [_tool(item, f"tools[{i}]") for i, item in enumerate(_list(data, "tools"))] if data else []
    names = [tool.name for tool in tools]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"two tools are called {twice[0]!r}")
    return tuple(tools)


def check_turns(messages: Sequence[Message], tools: Sequence[Tool], where: str) -> None:
    """Raise ValueError for a message in an invalid position."""
    known = {tool.name for tool in tools}
    for i, message in enumerate(messages):
        if fault := _position_fault(messages, i):
            raise ValueError(f"{where}[{i}] {fault}")
        called = [call["function"]["name"] for call in message.get("tool_calls", [])]
        if tools and (unknown := [name for name in called if name not in known]):
            raise ValueError(f"{where}[{i}] calls {unknown[0]!r}, which is not among its tools")


def _position_fault(messages: Sequence[Message], at: int) -> str:
    """Return why a message cannot follow those before it; empty if it can."""
    role, before = messages[at]["role"], messages[at - 1]["role"] if at else None
    if role == "system" and before is not None:
        return "is a system message, and only the first message can be one"
    if role == "assistant" and before is None:
        return "is the assistant's, and a message must precede it"
    if role == "assistant" and before == "assistant":
        return "is the assistant's, as is the one before it: merge them"
    if role != "tool":
        return ""
    caller = next((m for m in reversed(messages[:at]) if m["role"] != "tool"), None)
    calls = [call["id"] for call in caller.get("tool_calls", [])] if caller else []
    if not calls:
        return "is a tool's, and no call precedes it"
    answered = messages[at].get("tool_call_id")
    if answered is not None and answered not in calls:
        return f"answers the call {answered!r}, and the calls are {', '.join(calls)}"
    return ""


def _message(fields: Mapping[str, object], where: str) -> Message:
    if unknown := sorted(fields.keys() - _KEYS):
        raise ValueError(f"{where} has the unknown key {unknown[0]!r}")
    roles: tuple[Role, ...] = get_args(Role)
    role = next((role for role in roles if role == fields.get("role")), None)
    if role is None:
        raise ValueError(f"{where}.role is {as_words(fields.get('role'))}, and must be one of {', '.join(roles)}")
    for key, owner in _KEY_ROLES.items():
        if key in fields and role != owner and fields[key] not in ([], False):
            raise ValueError(f"{where}.{key} belongs to {owner} messages, and this one is of the {role}")
    calls = _list(fields.get("tool_calls", []), f"{where}.tool_calls")
    if "content" not in fields and not calls:
        raise ValueError(f"{where} has no content")
    message = Message(role=role, content=as_text(fields.get("content", ""), f"{where}.content"))
    if calls:
        message["tool_calls"] = [_call(call, i, f"{where}.tool_calls[{i}]") for i, call in enumerate(calls)]
    texts: tuple[Literal["reasoning_content", "tool_call_id", "name"], ...]
    texts = ("reasoning_content", "tool_call_id", "name")
    for key in texts:
        if key in fields and (key != "reasoning_content" or role == "assistant"):
            message[key] = as_text(fields[key], f"{where}.{key}")
    if urls := _list(fields.get("images", []), f"{where}.images"):
        message["images"] = [_image(url, f"{where}.images[{i}]") for i, url in enumerate(urls)]
    return message


def _image(url: object, where: str) -> str:
    try:
        read_image(url)
    except UserError as error:
        raise ValueError(f"{where}: {error.message}") from error
    return str(url)


def _call(data: object, place: int, where: str) -> MessageToolCall:
    """Parse a tool call; its arguments are an object or its JSON text."""
    call = as_object(data, where)
    function = as_object(call.get("function"), f"{where}.function")
    name = as_text(function.get("name"), f"{where}.function.name")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        arguments = parse_json(arguments, f"{where}.function.arguments")
    if not isinstance(arguments, dict):
        raise ValueError(f"{where}.function.arguments is {as_words(arguments)}, and must be an object")
    _check_value(arguments, f"{where}.function.arguments")
    text = json.dumps(arguments, ensure_ascii=False)
    number = as_text(call.get("id", f"call_{place}"), f"{where}.id")
    return MessageToolCall(id=number, type="function", function=FunctionCall(name=name, arguments=text))


def _tool(data: object, where: str) -> Tool:
    function = as_object(as_object(data, where).get("function"), f"{where}.function")
    name = as_text(function.get("name"), f"{where}.function.name")
    description = as_text(function.get("description", ""), f"{where}.function.description")
    parameters = as_object(function.get("parameters", {}), f"{where}.function.parameters")
    _check_value(parameters, f"{where}.function.parameters")
    schema = FunctionSchema(name=name, description=description, parameters=_without_none(parameters))
    return described_tool(ToolSchema(type="function", function=schema))


def _without_none(data: Mapping[str, object]) -> dict[str, object]:
    rest = {key: value for key, value in data.items() if value is not None}
    return {key: _without_none(value) if isinstance(value, dict) else value for key, value in rest.items()}


def _list(data: object, where: str) -> list[object]:
    if not isinstance(data, list):
        raise ValueError(f"{where} is {as_words(data)}, and must be a list")
    return data


def _check_value(data: object, where: str, depth: int = 0) -> None:
    """Raise ValueError if a JSON value is nested too deeply or contains invalid text."""
    if depth > _MAX_DEPTH:
        raise ValueError(f"{where} is nested too deeply")
    if isinstance(data, str):
        as_text(data, where)
    elif isinstance(data, dict | list):
        for part in (*data.keys(), *data.values()) if isinstance(data, dict) else data:
            _check_value(part, where, depth + 1)


def as_words(data: object) -> str:
    """Format a value for an error message."""
    if data is None:
        return "missing"
    if isinstance(data, dict | list):
        return "an object" if isinstance(data, dict) else "a list"
    text = json.dumps(data, ensure_ascii=False, default=str).encode(errors="backslashreplace").decode()
    return text if len(text) <= 40 else f"{text[:40]}..."
