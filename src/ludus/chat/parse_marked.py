"""Parsers of calls between marks: Qwen3.5, GLM, Kimi K2, DeepSeek, Gemma 4 and gpt-oss.

The names are those of vLLM's option `--tool-call-parser`, except `harmony` (there `openai`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import cast

from ludus.chat.parse_json import (
    CALL_CLOSE,
    CALL_OPEN,
    THINK_CLOSE,
    THINK_OPEN,
    MalformedCall,
    ParsedDraft,
    ToolCallParser,
    call_of,
    check_plain,
    decode,
    strip_fence,
)
from ludus.tools.base import ToolSchema
from ludus.types import JSON

_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>(.*)</function>\s*", re.DOTALL)
_PARAMETER = re.compile(r"\s*<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>\s*", re.DOTALL)
_ARGUMENT = re.compile(r"\s*<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>\s*", re.DOTALL)
_KIMI_ID = re.compile(r"(?:functions\.)?([^:]+)(?::\d+)?")
_GEMMA_CALL = re.compile(r"\s*call:([^{]*)(\{.*\})\s*", re.DOTALL)
_GEMMA_KEY = re.compile(r"([{,]\s*)([^\s{}\[\],:\"]+)\s*:")
_GEMMA_QUOTE = '<|"|>'
_HARMONY_END = re.compile(r"<\|(?:end|call|return)\|>")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_CHANNEL = re.compile(r"<\|channel\|>(\w+)")


ReadCall = tuple[str, dict[str, JSON], str]
"""Name and arguments of a call, and its id, empty if the format has none."""


def _marked_parser(
    name: str,
    read_body: Callable[[str, Sequence[ToolSchema]], ReadCall],
    marks: tuple[str, str] = (CALL_OPEN, CALL_CLOSE),
    section: tuple[str, ...] = (),
    thinking: tuple[str, str] = (THINK_OPEN, THINK_CLOSE),
) -> ToolCallParser:
    """Create a parser of calls between two `marks`; `read_body` parses the text between them.

    Text around the calls is content, without the marks of `section`. A call that is not closed, or that `read_body`
    rejects, is an error.
    """
    opening, closing = marks

    def without_section(text: str) -> str:
        for mark in section:
            text = text.replace(mark, "")
        return text

    def read(draft: ParsedDraft, text: str, schemas: Sequence[ToolSchema]) -> None:
        before, *blocks = text.split(opening)
        draft.add_text(without_section(before))
        for block in blocks:
            body, closed, after = block.partition(closing)
            try:
                if not closed:
                    raise MalformedCall(f"The call is not closed. Write {closing} after it.")
                tool, arguments, call_id = read_body(body, schemas)
                check_plain({tool: None})
                draft.add_call(tool, check_plain(arguments), call_id)
            except MalformedCall as error:
                draft.add_error(f"{opening}{body}{closed}".strip(), error.reason)
            draft.add_text(without_section(after))

    def is_inside_call(text: str, at: int) -> bool:
        start = text.rfind(opening, 0, at)
        end = text.find(closing, at)
        following = text.find(opening, at)
        return start >= 0 and closing not in text[start:at] and end >= 0 and not 0 <= following < end

    return ToolCallParser(name, read, is_inside_call, thinking)


def _read_harmony(draft: ParsedDraft, text: str, _: Sequence[ToolSchema]) -> None:
    """Read the messages of gpt-oss in channels; `to=functions.NAME` in the header of one is a call.

    The channel `analysis` is thinking; `final`, and `commentary` without a recipient, are content.
    """
    thoughts = list[str]()
    for block in text.split("<|start|>"):
        header, mark, rest = block.partition("<|message|>")
        body, *after = _HARMONY_END.split(rest, maxsplit=1)
        recipient, channel = _RECIPIENT.search(header), _CHANNEL.search(header)
        if not mark:
            draft.add_text(block)
        elif recipient:
            call = {"name": recipient[1].removeprefix("functions.")}
            try:
                arguments = decode(body) if body.strip() else {}
                draft.add_call(*call_of(call | {"arguments": arguments}, "arguments"))
            except MalformedCall as error:
                draft.add_error(block.strip(), error.reason)
        elif channel and channel[1] == "analysis":
            thoughts.append(body.strip())
        else:
            draft.add_text(body)
        draft.add_text("".join(after))
    draft.reasoning = "\n".join(filter(None, thoughts)) if thoughts else None


def _read_qwen3_coder(body: str, schemas: Sequence[ToolSchema]) -> ReadCall:
    function = _FUNCTION.fullmatch(body)
    if not function:
        raise MalformedCall("The call is not <function=NAME> ... </function>.")
    name, inner = function[1].strip(), function[2]
    pairs = _read_pairs(_PARAMETER, inner, "Write each argument as <parameter=NAME>, its value and </parameter>.")
    return name, _typed(name, pairs, schemas), ""


def _read_glm(body: str, schemas: Sequence[ToolSchema]) -> ReadCall:
    name, key, rest = body.partition("<arg_key>")
    if not name.strip() or "<" in name:
        raise MalformedCall("The call has no name. Write the name of a tool directly after <tool_call>.")
    advice = "Write each argument as <arg_key>NAME</arg_key> and <arg_value>VALUE</arg_value>."
    return name.strip(), _typed(name.strip(), _read_pairs(_ARGUMENT, key + rest, advice), schemas), ""


def _read_pairs(pattern: re.Pattern[str], text: str, advice: str) -> list[tuple[str, str]]:
    pairs, position = [], 0
    while pair := pattern.match(text, position):
        pairs.append((pair[1].strip(), pair[2]))
        position = pair.end()
    if text[position:].strip():
        raise MalformedCall(f"The arguments cannot be read. {advice}")
    return pairs


def _typed(name: str, pairs: Sequence[tuple[str, str]], schemas: Sequence[ToolSchema]) -> dict[str, JSON]:
    """Return the arguments: text where the tool declares a string, otherwise JSON, or text if it is not JSON."""
    functions = [schema["function"] for schema in schemas if schema["function"]["name"] == name]
    declared = functions[0]["parameters"].get("properties", {}) if functions else {}
    arguments: dict[str, JSON] = dict(pairs)
    for key, text in pairs:
        with suppress(MalformedCall):
            arguments[key] = text if declared.get(key, {}).get("type") == "string" else cast("JSON", decode(text))
    return arguments


def _read_kimi(body: str, _: Sequence[ToolSchema]) -> ReadCall:
    call_id, mark, arguments = body.partition("<|tool_call_argument_begin|>")
    named = _KIMI_ID.fullmatch(call_id.strip())
    if not (mark and named):
        raise MalformedCall("Write functions.NAME:INDEX<|tool_call_argument_begin|> and a JSON object.")
    return *call_of({"name": named[1], "arguments": decode(arguments)}, "arguments"), call_id.strip()


def _read_deepseek(body: str, _: Sequence[ToolSchema]) -> ReadCall:
    """Read `function<sep>NAME` and fenced JSON (V3, R1), or `NAME<sep>` and JSON (V3.1)."""
    head, mark, rest = body.partition("<｜tool▁sep｜>")
    if not mark:
        raise MalformedCall("Write NAME<｜tool▁sep｜> and a JSON object.")
    name, arguments = head.strip(), rest
    if name == "function":
        name, arguments = rest.split("\n", 1) if "\n" in rest else (rest, "")
    return *call_of({"name": name.strip(), "arguments": decode(strip_fence(arguments))}, "arguments"), ""


def _read_gemma(body: str, _: Sequence[ToolSchema]) -> ReadCall:
    call = _GEMMA_CALL.fullmatch(body)
    if not call:
        raise MalformedCall("Write call:NAME{argument:value}.")
    return *call_of({"name": call[1].strip(), "arguments": decode(_gemma_json(call[2]))}, "arguments"), ""


def _gemma_json(text: str) -> str:
    """Return JSON for `{key:<|"|>text<|"|>,other:1}`."""
    parts = text.split(_GEMMA_QUOTE)
    structure = [_GEMMA_KEY.sub(r'\1"\2":', part) for part in parts[::2]]
    strings = [json.dumps(part, ensure_ascii=False) for part in parts[1::2]]
    return "".join(a + b for a, b in zip(structure, [*strings, ""], strict=False))


MARKED = (
    _marked_parser("qwen3_coder", _read_qwen3_coder),
    _marked_parser("glm45", _read_glm),
    _marked_parser(
        "kimi_k2",
        _read_kimi,
        ("<|tool_call_begin|>", "<|tool_call_end|>"),
        ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    ),
    _marked_parser(
        "deepseek_v3",
        _read_deepseek,
        ("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"),
        ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    ),
    _marked_parser(
        "gemma4", _read_gemma, ("<|tool_call>", "<tool_call|>"), thinking=("<|channel>thought", "<channel|>")
    ),
    ToolCallParser("harmony", _read_harmony, thinking=None),
)
"""The parsers of this module."""
