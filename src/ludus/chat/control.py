"""Prevent text from users and tools from becoming control tokens.

A tokenizer encodes the string `<|im_end|>` as the end-of-turn token anywhere, also in tool output: the author
of a fetched page could end the tool's turn and speak as the user. Before rendering, such strings are broken
with a zero-width character, so that they look the same but encode as ordinary text. The prompt, the deltas
and whole dialogues use the same broken messages, so that they agree.

- In `user` and `tool` messages every special token of the tokenizer is broken.
- In `tool` messages also protocol marks are broken: non-special tokens that occur in the template
  (`<tool_call>`, `<think>`), and the tags around tool output. Users may write these, as in instructions.
- `system` and `assistant` messages are unchanged: the environment's author wrote the former, and sampled
  text is kept as tokens.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from ludus.errors import UserError
from ludus.types import Message

WRAPPERS = ("<tool_response>", "</tool_response>")
_BREAKS = ("\u200b", "\u2060", " ", "\ufffd")


class AddedToken(Protocol):
    """A token matched before all others; `str` returns its text."""

    @property
    def special(self) -> bool: ...


class ControlTokenizer(Protocol):
    """The tokenizer methods that a guard needs."""

    @property
    def added_tokens_decoder(self) -> Mapping[int, AddedToken]: ...

    def encode(self, text: str, *, add_special_tokens: bool = ...) -> list[int]: ...


@dataclass(frozen=True)
class ControlGuard:
    """Breaks control strings in the text of messages. Other text is unchanged."""

    special: tuple[str, ...]
    """The special tokens."""
    marks: tuple[str, ...]
    """Strings also broken in tool output."""
    _breaker: str
    _special: re.Pattern[str]
    _all: re.Pattern[str]

    def message(self, message: Message) -> Message:
        """Return the message, safe to render with a template."""
        if message["role"] not in ("user", "tool"):
            return message
        safe = message.copy()
        safe["content"] = self.text(message["content"], from_tool=message["role"] == "tool")
        return safe

    def text(self, text: str, *, from_tool: bool) -> str:
        """Return the text without control strings. Repeats, since breaking one may uncover another."""
        pattern = self._all if from_tool else self._special
        while pattern.search(text):
            text = pattern.sub(lambda match: _broken(match.group(), self._breaker), text)
        return text


def control_ids(tokenizer: ControlTokenizer) -> frozenset[int]:
    """Return the ids of the special tokens."""
    return frozenset(i for i, token in tokenizer.added_tokens_decoder.items() if token.special)


def make_guard(tokenizer: ControlTokenizer, template: str = "", wrappers: Sequence[str] = WRAPPERS) -> ControlGuard:
    """Create the guard for a tokenizer, its Jinja chat template and the tags around tool output.

    Raises `UserError` if no break prevents this tokenizer from producing special tokens from text.
    """
    added = list(tokenizer.added_tokens_decoder.values())
    special = tuple(str(token) for token in added if token.special)
    in_template = (str(token) for token in added if not token.special and str(token) in template)
    marks = tuple(dict.fromkeys([*wrappers, *(mark for mark in in_template if mark.strip())]))
    every = special + marks
    return ControlGuard(special, marks, _breaker(tokenizer, every), _any_of(special), _any_of(every))


def _breaker(tokenizer: ControlTokenizer, strings: Sequence[str]) -> str:
    """Return the first break that prevents control tokens for all strings."""
    control = control_ids(tokenizer)
    for breaker in _BREAKS:
        text = "\n".join(_broken(string, breaker) for string in strings)
        contained = any(breaker in string for string in strings)
        if not contained and control.isdisjoint(tokenizer.encode(text, add_special_tokens=False)):
            return breaker
    raise UserError(
        "The tokenizer produces special tokens from ordinary text, so tool output could end a turn.",
        "Check the special tokens in its tokenizer_config.json.",
    )


def _broken(token: str, breaker: str) -> str:
    return token[0] + breaker + token[1:] if len(token) > 1 else breaker


def _any_of(strings: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern of all strings, longest first; it matches nothing if there are none."""
    ordered = sorted({string for string in strings if string}, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, ordered)) or r"(?!)")
