"""The JSON format of Llama 3.1 and later: the whole text is one call, or several separated by `;`."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ludus.chat.parser_base import Malformed, ParsedDraft, call_of, decode_prefix, parse_whole, skip_blanks, unfence
from ludus.types import Action

PYTHON_TAG = "<|python_tag|>"

_CALL_START = re.compile(r"\[?\s*\{\s*[\"']?(name|type|function|parameters|arguments)[\"']?\s*:")
_CALL_INSIDE = re.compile(r"\{\s*\"name\"\s*:\s*\"[^\"]*\"\s*,\s*\"parameters\"\s*:")
_NOT_ALONE = "The call stands inside other text. Write the JSON object alone."
_AFTER = "Other text follows a call. Separate calls with ; and write nothing else."
_NOTHING = f"Nothing follows {PYTHON_TAG}. Write a JSON object with name and parameters."


@dataclass(frozen=True, slots=True)
class Llama3Parser:
    """Parses `{"name": ..., "parameters": {...}}` as the whole text, or several separated by `;`.

    `<|python_tag|>` may come first, also after other text; calls must follow it. Also accepts `arguments` for
    `parameters`, a `type` key, no parameters, and a Markdown fence around the whole.

    Without the tag, JSON without parameters or arguments is content, unless it has only a name and possibly a
    type. Text that follows a call without `;` is one error, to the end; so is a call after other text.
    """

    name: str = "llama3"

    def parse(self, text: str, *, turn: int) -> Action:
        """Return the message, the calls and the errors of turn `turn`. Never raises."""
        return parse_whole(text, turn, _fill)


def _fill(draft: ParsedDraft, text: str) -> None:
    body = unfence(text)
    if _CALL_START.match(body):
        _read_calls(draft, body, tagged=False)
        return
    prose, tag, after = text.partition(PYTHON_TAG)
    if not tag and _CALL_INSIDE.search(text):
        draft.add_error(text.strip(), _NOT_ALONE)
        return
    draft.add_text(prose)
    if tag and unfence(after):
        _read_calls(draft, unfence(after), tagged=True)
    elif tag:
        draft.add_error(tag + after, _NOTHING)


def _read_calls(draft: ParsedDraft, body: str, *, tagged: bool) -> None:
    position = 0
    while position < len(body):
        try:
            value, end = decode_prefix(body, position)
        except Malformed as error:
            draft.add_error(body[position:], error.reason)
            return
        if not (tagged or draft.calls or draft.errors or _is_call(value)):
            draft.add_text(body)
            return
        try:
            draft.add_call(*call_of(value, "parameters"))
        except Malformed as error:
            draft.add_error(body[position:end], error.reason)
        position = skip_blanks(body, end)
        if position < len(body) and body[position] != ";":
            draft.add_error(body[position:], _AFTER)
            return
        position = skip_blanks(body, position + 1)


def _is_call(value: object) -> bool:
    if isinstance(value, list):
        return any(isinstance(item, dict) and "name" in item and _has_arguments(item) for item in value)
    if not isinstance(value, dict):
        return False
    return _has_arguments(value) or ("name" in value and value.keys() <= {"name", "type"})


def _has_arguments(value: dict[object, object]) -> bool:
    return "parameters" in value or "arguments" in value
