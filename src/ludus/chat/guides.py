"""Guides for tool calls: what an action may look like so that every call in it can be executed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Protocol

from ludus.chat.parse_hermes import CLOSE, OPEN
from ludus.tools.base import ToolSchema
from ludus.types import JSON, Guide

GUIDES_EXIST = "They exist for templates that write calls as Hermes, Qwen2.5 and Qwen3 do."
"""The hint of every refusal."""
JSON_STYLE: dict[str, dict[str, JSON]] = {
    "x-guidance": {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
}
"""Blanks as `json.dumps` sets them: a model that may choose them can go on for ever."""
_THINKING = ("<think>", "</think>")
_TEXT = r"TEXT: /(.|\n)+/ & ~/(.|\n)*(<tool_call>|<\/tool_call>)(.|\n)*/"


class AddedVocabulary(Protocol):
    """The part of a tokenizer that tells which tokens stand apart from text."""

    def get_added_vocab(self) -> dict[str, int]: ...


def hermes_guide(tools: Sequence[ToolSchema], tokenizer: AddedVocabulary) -> Guide:
    """Free text with any number of calls in the format of Hermes, each of a tool that there is.

    Arguments keep to the tool's schema. For guided sampling, which changes the distribution that is sampled
    from: leave it off in training.
    """
    opening, closing = (_terminal(tag, tokenizer) for tag in (OPEN, CLOSE))
    calls = " | ".join(f"call_{i}" for i in range(len(tools)))
    thinking = "".join(
        f" | {_terminal(tag, tokenizer)}" for tag in _THINKING if tag in tokenizer.get_added_vocab()
    )
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
    """A tag in a grammar: by its number where it is one added token, else as text."""
    number = tokenizer.get_added_vocab().get(tag)
    return json.dumps(tag) if number is None else f"<[{number}]>"
