"""Guides for tool calls: constrain an action so that every call in it is executable."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Protocol

from ludus.chat.parse_hermes import CLOSE, OPEN
from ludus.tools.base import ToolSchema
from ludus.types import JSON, Guide

GUIDES_EXIST = "They support templates with the call format of Hermes, Qwen2.5 and Qwen3."
"""Hint of every refusal."""
JSON_STYLE: dict[str, dict[str, JSON]] = {
    "x-guidance": {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
}
"""Whitespace as in `json.dumps`: if the model could choose it, it might never end."""
_THINKING = ("<think>", "</think>")
_TEXT = r"TEXT: /(.|\n)+/ & ~/(.|\n)*(<tool_call>|<\/tool_call>)(.|\n)*/"


class AddedVocabulary(Protocol):
    """The part of a tokenizer that lists its added tokens."""

    def get_added_vocab(self) -> dict[str, int]: ...


def hermes_guide(tools: Sequence[ToolSchema], tokenizer: AddedVocabulary) -> Guide:
    """Return a grammar of free text with any number of Hermes calls of the given tools.

    Arguments must match the tool's schema. For guided sampling only: it changes the sampled distribution, so
    do not use it in training.
    """
    opening, closing = (_terminal(tag, tokenizer) for tag in (OPEN, CLOSE))
    calls = " | ".join(f"call_{i}" for i in range(len(tools)))
    thinking = "".join(f" | {_terminal(tag, tokenizer)}" for tag in _THINKING if tag in tokenizer.get_added_vocab())
    rules = [
        f"start: (text {opening} ({calls}) {closing})* text" if tools else "start: text",
        f"text: (TEXT{thinking})*",
        _TEXT,
    ]
    for i, tool in enumerate(tools):
        function = tool["function"]
        head = json.dumps(f'\n{{"name": {json.dumps(function["name"])}, "arguments": ')
        schema = json.dumps({**function["parameters"], "additionalProperties": False, **JSON_STYLE})
        rules.append(f'call_{i}: {head} %json {schema} "}}\\n"')
    return Guide("lark", "\n".join(rules) + "\n")


def _terminal(tag: str, tokenizer: AddedVocabulary) -> str:
    """Return a tag in a grammar: its id if it is an added token, otherwise text."""
    number = tokenizer.get_added_vocab().get(tag)
    return json.dumps(tag) if number is None else f"<[{number}]>"
