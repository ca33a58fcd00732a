"""Parse the model's text to an `Action`: one parser per tool-call format.

A parser takes the decoded text of one action, without the end-of-turn token, and returns an `Action`. Rules
for all parsers:

- A parser never raises. A malformed call becomes a `CallError` whose reason describes the correct form.
- Calls and errors are numbered together, in the order of the text: ids are `call_{turn}_{index}`,
  or the sampled id in formats that have one (Kimi K2).
- `message["content"]` is the text outside the well-formed calls, stripped. Malformed calls stay in it, so
  that the transcript is complete.
- Thinking is stored in `message["reasoning_content"]`; calls inside it are ignored (see `split_thinking`).
- Arguments are plain JSON: finite numbers, no lone surrogates, at most `MAX_DEPTH` levels. Their text in the
  message has unescaped Unicode and parses to the same values.
- Empty text yields an action with empty content, without calls or errors.

To add a format, add a parser and a line in `PARSERS`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Protocol

from ludus.chat.parse_json import HermesParser, Llama3Parser
from ludus.chat.parse_marked import MARKED
from ludus.chat.parse_pythonic import PythonicParser
from ludus.chat.parse_tags import RETOOL, SEARCH_R1, TagsParser
from ludus.tools.base import ToolSchema
from ludus.types import Action

_PYTHONIC_EXAMPLE = re.compile(r"\[\w+\(\w+\s*=|\bname \+ ['\"]\(['\"]")
_MARKS: Mapping[str, tuple[str, ...]] = {
    "qwen3_coder": ("<tool_call>", "<function=", "<parameter="),
    "glm45": ("<tool_call>", "<arg_key>"),
    "kimi_k2": ("<|tool_call_argument_begin|>",),
    "deepseek_v3": ("<｜tool▁call▁begin｜>",),
    "gemma4": ("<|tool_call>", "<tool_call|>"),
    "harmony": ("<|channel|>", "<|call|>"),
}
_LLAMA3_MARKS = ("<|python_tag|>", '"parameters":')


class ToolCallParser(Protocol):
    """Parser of the tool calls in the text of an action. Never raises."""

    @property
    def name(self) -> str: ...

    def parse(self, text: str, *, turn: int, schemas: Sequence[ToolSchema] = ()) -> Action:
        """Return the message, the calls and the errors of turn `turn`, counted from 0.

        Formats without types take the types of the arguments from the tools' `schemas`.
        """
        ...


PARSERS: Mapping[str, ToolCallParser] = MappingProxyType(
    {
        parser.name: parser
        for parser in (
            *(HermesParser(), Llama3Parser(), PythonicParser(), TagsParser(SEARCH_R1), TagsParser(RETOOL)),
            *MARKED,
        )
    }
)
"""The parsers by name."""


def detect(chat_template: str) -> str:
    """Return the name of the parser for the tool calls of a Jinja `chat_template`.

    The marks of a format mean that format; otherwise `<tool_call>` means hermes. A list of Python calls, as an
    example or as the template builds it, means pythonic; `<|python_tag|>` or a `"parameters":` key means llama3.
    The default is hermes.
    """
    for name, marks in _MARKS.items():
        if all(mark in chat_template for mark in marks):
            return name
    if "<tool_call>" in chat_template:
        return "hermes"
    if _PYTHONIC_EXAMPLE.search(chat_template):
        return "pythonic"
    if any(mark in chat_template for mark in _LLAMA3_MARKS):
        return "llama3"
    return "hermes"
