"""Recognise the format of a record by its keys, and convert it to one of ours.

`FORMATS` is the table: the first format whose keys a record has applies. Converters return a record with `messages`,
`prompt` and `completion`, `prompt`, `chosen` and `rejected`, `text`, or `trajectory`; `files` parses and checks it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from ludus.training.datasets.messages import as_object, as_words, parse_json

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
        message["content"] = "".join(_part_text(part, f"{where}.content[{i}]") for i, part in enumerate(parts))
    weight = message.pop("weight", None)
    if weight is not None:
        if weight not in (0, 1):
            raise ValueError(f"{where}.weight is {as_words(weight)}, and must be 0 or 1")
        message["train"] = bool(weight)
    return message


def _part_text(part: object, where: str) -> str:
    fields = as_object(part, where)
    text = fields.get("text")
    if fields.get("type") != "text" or not isinstance(text, str):
        raise ValueError(f"{where} has the type {as_words(fields.get('type'))}, and only text is supported")
    return text


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
