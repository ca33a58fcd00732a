"""The format of Hermes, Qwen2.5 and Qwen3: a JSON object between `<tool_call>` and `</tool_call>`."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from ludus.chat.parser_base import (
    Malformed,
    ParsedDraft,
    call_of,
    decode,
    decode_prefix,
    skip_blanks,
    split_thinking,
    unfence,
)
from ludus.tools.base import ToolSchema
from ludus.types import JSON, Action, Guide

OPEN, CLOSE = "<tool_call>", "</tool_call>"

_TAG = re.compile(f"{OPEN}|{CLOSE}")
_NESTED = f"A {OPEN} starts before the one before it ends. Write {CLOSE} after each call."
_STRAY = f"There is a {CLOSE} without {OPEN}. Write each call between {OPEN} and {CLOSE}."
_UNCLOSED = f"The {OPEN} is not closed. Write {CLOSE} after the call."
_UNTAGGED = f"The call has no tags. Write it between {OPEN} and {CLOSE}."


@dataclass(frozen=True, slots=True)
class HermesParser:
    """Parses any number of `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`.

    Also accepts `parameters` for `arguments`, arguments as JSON text, no arguments, a Markdown fence around
    the JSON, and an unclosed tag with complete JSON at the end of the text (the stop token often comes
    first). Tags inside JSON strings belong to the string. Text around the calls is content.

    Errors: broken JSON, JSON that is not a call, nested tags (one error, up to the tag that closes the outer
    one or the end), a lone closing tag (its text reaches back to the previous call), and a text that is a
    call without tags.
    """

    name: str = "hermes"

    def parse(self, text: str, *, turn: int) -> Action:
        """Return the message, the calls and the errors of turn `turn`. Never raises."""
        reasoning, rest = split_thinking(text, lambda at: _inside_call(text, at))
        draft = ParsedDraft(turn)
        if _is_untagged_call(rest):
            draft.add_error(rest.strip(), _UNTAGGED)
        else:
            _read_blocks(draft, rest)
        return draft.action(reasoning)


def _inside_call(text: str, at: int) -> bool:
    start = text.rfind(OPEN, 0, at)
    return start >= 0 and _json_end(text, start + len(OPEN)) > at


def _json_end(text: str, start: int) -> int:
    try:
        return decode_prefix(text, start)[1]
    except Malformed:
        return -1


def _is_untagged_call(text: str) -> bool:
    if _TAG.search(text) or '"name"' not in text:
        return False
    try:
        value = decode(unfence(text))
    except Malformed:
        return False
    return isinstance(value, dict) and "name" in value and ("arguments" in value or "parameters" in value)


def _read_blocks(draft: ParsedDraft, text: str) -> None:
    position = 0
    while tag := _TAG.search(text, position):
        if tag.group() == CLOSE:
            draft.add_error(text[position : tag.end()].strip(), _STRAY)
            position = tag.end()
        else:
            draft.add_text(text[position : tag.start()])
            position = _read_block(draft, text, tag.start())
    draft.add_text(text[position:])


def _read_block(draft: ParsedDraft, text: str, start: int) -> int:
    """Read the block whose opening tag is at `start`; return the offset after it."""
    begin = start + len(OPEN)
    end = _json_end(text, begin)
    after = skip_blanks(text, end) if end >= 0 else -1
    if after == len(text) or (after >= 0 and text.startswith(CLOSE, after)):
        body, block_end = text[begin:after], min(after + len(CLOSE), len(text))
    else:
        tag = _TAG.search(text, begin)
        if tag and tag.group() == OPEN:
            block_end = _end_of_nested(text, begin)
            draft.add_error(text[start:block_end].strip(), _NESTED)
            return block_end
        body = text[begin : tag.start() if tag else len(text)]
        block_end = tag.end() if tag else len(text)
    block = text[start:block_end].strip()
    try:
        draft.add_call(*call_of(decode(unfence(body)), "arguments"))
    except Malformed as error:
        closed = block.endswith(CLOSE) or after == len(text)
        draft.add_error(block, error.reason if closed else f"{_UNCLOSED} {error.reason}")
    return block_end


def _end_of_nested(text: str, begin: int) -> int:
    """Return the offset after the tag that closes the block whose content starts at `begin`, or the end."""
    depth = 1
    for tag in _TAG.finditer(text, begin):
        depth += 1 if tag.group() == OPEN else -1
        if depth == 0:
            return tag.end()
    return len(text)


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
