"""Text that others wrote must not become control tokens.

A tokenizer turns the string `<|im_end|>` into the end-of-turn token wherever it stands, also inside a tool's
output: whoever writes a page that a tool fetches could end the tool's turn and speak as the user. Before a
message reaches the template, such strings in it are broken with a character that has no width, so that they
look the same and encode as ordinary text. The same broken messages are used for the prompt, the deltas and
whole dialogues, so that these agree with each other.

- In `user` and `tool` messages every special token of the tokenizer is broken.
- In `tool` messages also the marks of the protocol: tokens that are not special but stand in the template
  (`<tool_call>`, `<think>`), and the tags that wrap tool output. A user may write these, as instructions do.
- `system` and `assistant` messages stay as they are: the environment's author wrote the first, and what the
  model sampled is kept as tokens anyway.
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
    """A token that a tokenizer finds before all others; `str` gives its text."""

    @property
    def special(self) -> bool: ...


class ControlTokenizer(Protocol):
    """What a guard needs of a Hugging Face tokenizer."""

    @property
    def added_tokens_decoder(self) -> Mapping[int, AddedToken]: ...

    def encode(self, text: str, *, add_special_tokens: bool = ...) -> list[int]: ...


@dataclass(frozen=True)
class ControlGuard:
    """Breaks control strings in the text of messages. Text without any stays as it is."""

    special: tuple[str, ...]
    """The special tokens."""
    marks: tuple[str, ...]
    """What is broken besides these in tool output."""
    _breaker: str
    _special: re.Pattern[str]
    _all: re.Pattern[str]

    def message(self, message: Message) -> Message:
        """The message, safe to put into a template."""
        if message["role"] not in ("user", "tool"):
            return message
        safe = message.copy()
        safe["content"] = self.text(message["content"], from_tool=message["role"] == "tool")
        return safe

    def text(self, text: str, *, from_tool: bool) -> str:
        """The text without control strings. Breaking one may uncover another, hence the loop."""
        pattern = self._all if from_tool else self._special
        while pattern.search(text):
            text = pattern.sub(lambda match: _broken(match.group(), self._breaker), text)
        return text


def control_ids(tokenizer: ControlTokenizer) -> frozenset[int]:
    """The ids of the special tokens."""
    return frozenset(i for i, token in tokenizer.added_tokens_decoder.items() if token.special)


def make_guard(
    tokenizer: ControlTokenizer, template: str = "", wrappers: Sequence[str] = WRAPPERS
) -> ControlGuard:
    """The guard for a tokenizer, its chat template (Jinja text) and the tags around tool output.

    Raises `UserError` where no break keeps this tokenizer from making special tokens of text.
    """
    added = list(tokenizer.added_tokens_decoder.values())
    special = tuple(str(token) for token in added if token.special)
    in_template = (str(token) for token in added if not token.special and str(token) in template)
    marks = tuple(dict.fromkeys([*wrappers, *(mark for mark in in_template if mark.strip())]))
    every = special + marks
    return ControlGuard(special, marks, _breaker(tokenizer, every), _any_of(special), _any_of(every))


def _breaker(tokenizer: ControlTokenizer, strings: Sequence[str]) -> str:
    """The first break after which this tokenizer makes no control token of any of the strings."""
    control = control_ids(tokenizer)
    for breaker in _BREAKS:
        text = "\n".join(_broken(string, breaker) for string in strings)
        contained = any(breaker in string for string in strings)
        if not contained and control.isdisjoint(tokenizer.encode(text, add_special_tokens=False)):
            return breaker
    raise UserError(
        "The tokenizer makes special tokens of ordinary text, so tool output could end a turn.",
        "Check the special tokens in its tokenizer_config.json.",
    )


def _broken(token: str, breaker: str) -> str:
    return token[0] + breaker + token[1:] if len(token) > 1 else breaker


def _any_of(strings: Iterable[str]) -> re.Pattern[str]:
    """A pattern for any of the strings, the longest first; one that matches nothing where there is none."""
    ordered = sorted({string for string in strings if string}, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, ordered)) or r"(?!)")
