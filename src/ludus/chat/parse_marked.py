"""Parsers of calls between marks: Qwen3.5, GLM, Kimi K2, DeepSeek, Gemma 4 and gpt-oss.

The names are those of vLLM's option `--tool-call-parser`, except `harmony` (there `openai`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import cast

from ludus.chat.parse_json import (
    CALL_CLOSE,
    CALL_OPEN,
    THINK_CLOSE,
    THINK_OPEN,
    MalformedCall,
    ParsedDraft,
    call_of,
    check_plain,
    decode,
    split_thinking,
    strip_fence,
)
from ludus.tools.base import ToolSchema
from ludus.types import JSON, Action

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


@dataclass(frozen=True, slots=True)
class ReadCall:
    """Name and arguments of a call, and its id if the format has ids."""

    name: str
    arguments: dict[str, JSON]
    id: str = ""


ReadBody = Callable[[str, Sequence[ToolSchema]], ReadCall]


@dataclass(frozen=True, slots=True)
class MarkedParser:
    """Parser of calls between the marks `opening` and `closing`; `read` parses the text between them.

    Text around the calls is content, without the marks of `section`. A call that is not closed, or that `read`
    rejects, is an error.
    """

    name: str
    read: ReadBody
    opening: str = CALL_OPEN
    closing: str = CALL_CLOSE
    section: tuple[str, ...] = ()
    thinking: tuple[str, str] = (THINK_OPEN, THINK_CLOSE)

    def parse(self, text: str, *, turn: int, schemas: Sequence[ToolSchema] = ()) -> Action:
        reasoning, rest = split_thinking(text, lambda at: self._is_inside_call(text, at), self.thinking)
        draft = ParsedDraft(turn)
        before, *blocks = rest.split(self.opening)
        draft.add_text(self._without_section(before))
        for block in blocks:
            body, closing, after = block.partition(self.closing)
            self._read(draft, body, closing, schemas)
            draft.add_text(self._without_section(after))
        return draft.action(reasoning)

    def _read(self, draft: ParsedDraft, body: str, closing: str, schemas: Sequence[ToolSchema]) -> None:
        text = f"{self.opening}{body}{closing}".strip()
        if not closing:
            draft.add_error(text, f"The call is not closed. Write {self.closing} after it.")
            return
        try:
            call = self.read(body, schemas)
            check_plain({call.name: None})
            draft.add_call(call.name, check_plain(call.arguments), call.id)
        except MalformedCall as error:
            draft.add_error(text, error.reason)

    def _is_inside_call(self, text: str, at: int) -> bool:
        start = text.rfind(self.opening, 0, at)
        end = text.find(self.closing, at)
        following = text.find(self.opening, at)
        return start >= 0 and self.closing not in text[start:at] and end >= 0 and not 0 <= following < end

    def _without_section(self, text: str) -> str:
        for mark in self.section:
            text = text.replace(mark, "")
        return text


@dataclass(frozen=True, slots=True)
class HarmonyParser:
    """Parser of gpt-oss: messages in channels, `to=functions.NAME` in the header of a call.

    The channel `analysis` is thinking; `final`, and `commentary` without a recipient, are content.
    """

    name: str = "harmony"

    def parse(self, text: str, *, turn: int, schemas: Sequence[ToolSchema] = ()) -> Action:
        draft, thoughts = ParsedDraft(turn), list[str]()
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
        return draft.action("\n".join(filter(None, thoughts)) if thoughts else None)


def _read_qwen3_coder(body: str, schemas: Sequence[ToolSchema]) -> ReadCall:
    function = _FUNCTION.fullmatch(body)
    if not function:
        raise MalformedCall("The call is not <function=NAME> ... </function>.")
    name, inner = function[1].strip(), function[2]
    pairs = _read_pairs(_PARAMETER, inner, "Write each argument as <parameter=NAME>, its value and </parameter>.")
    return ReadCall(name, _typed(name, pairs, schemas))


def _read_glm(body: str, schemas: Sequence[ToolSchema]) -> ReadCall:
    name, key, rest = body.partition("<arg_key>")
    if not name.strip() or "<" in name:
        raise MalformedCall("The call has no name. Write the name of a tool directly after <tool_call>.")
    advice = "Write each argument as <arg_key>NAME</arg_key> and <arg_value>VALUE</arg_value>."
    return ReadCall(name.strip(), _typed(name.strip(), _read_pairs(_ARGUMENT, key + rest, advice), schemas))


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
    return ReadCall(*call_of({"name": named[1], "arguments": decode(arguments)}, "arguments"), call_id.strip())


def _read_deepseek(body: str, _: Sequence[ToolSchema]) -> ReadCall:
    """Read `function<sep>NAME` and fenced JSON (V3, R1), or `NAME<sep>` and JSON (V3.1)."""
    head, mark, rest = body.partition("<｜tool▁sep｜>")
    if not mark:
        raise MalformedCall("Write NAME<｜tool▁sep｜> and a JSON object.")
    name, arguments = head.strip(), rest
    if name == "function":
        name, arguments = rest.split("\n", 1) if "\n" in rest else (rest, "")
    return ReadCall(*call_of({"name": name.strip(), "arguments": decode(strip_fence(arguments))}, "arguments"))


def _read_gemma(body: str, _: Sequence[ToolSchema]) -> ReadCall:
    call = _GEMMA_CALL.fullmatch(body)
    if not call:
        raise MalformedCall("Write call:NAME{argument:value}.")
    return ReadCall(*call_of({"name": call[1].strip(), "arguments": decode(_gemma_json(call[2]))}, "arguments"))


def _gemma_json(text: str) -> str:
    """Return JSON for `{key:<|"|>text<|"|>,other:1}`."""
    parts = text.split(_GEMMA_QUOTE)
    structure = [_GEMMA_KEY.sub(r'\1"\2":', part) for part in parts[::2]]
    strings = [json.dumps(part, ensure_ascii=False) for part in parts[1::2]]
    return "".join(a + b for a, b in zip(structure, [*strings, ""], strict=False))


MARKED = (
    MarkedParser("qwen3_coder", _read_qwen3_coder),
    MarkedParser("glm45", _read_glm),
    MarkedParser(
        "kimi_k2",
        _read_kimi,
        "<|tool_call_begin|>",
        "<|tool_call_end|>",
        ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    ),
    MarkedParser(
        "deepseek_v3",
        _read_deepseek,
        "<｜tool▁call▁begin｜>",
        "<｜tool▁call▁end｜>",
        ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    ),
    MarkedParser("gemma4", _read_gemma, "<|tool_call>", "<tool_call|>", thinking=("<|channel>thought", "<channel|>")),
    HarmonyParser(),
)
"""The parsers of this module."""
