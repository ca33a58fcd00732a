"""From sampled tokens to the text that a client sees, whole or as it grows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ludus.chat.render import Tokenizer, decode_exactly
from ludus.types import Completion, FinishReason, SamplingParams

_TORN = "\ufffd"
"""What a character decodes to while some of its bytes are missing."""
_MAY_CALL = "<[{`"
"""What the ways of writing a tool call, or thinking, begin with."""


@dataclass(frozen=True)
class TextRules:
    """How tokens are shown. `keep_stop` leaves a stop string there; `skip_special` drops control tokens."""

    tokenizer: Tokenizer
    stops: tuple[str, ...] = ()
    keep_stop: bool = False
    skip_special: bool = True

    def text(self, tokens: Sequence[int], finish: FinishReason | None) -> str:
        """The text of an action, without what is not settled yet where more is to come (`finish` None)."""
        text = decode_exactly(self.tokenizer, tokens, skip_special=self.skip_special)
        if finish is None:
            text = text.rstrip(_TORN)
            return text[: len(text) - self._open_stop(text)]
        found = self.stop_in(text) if finish == "stop" else None
        return text if found is None or self.keep_stop else text[: text.find(found)]

    def stop_in(self, text: str) -> str | None:
        """The stop string that stands first in the text, None where there is none."""
        found = [stop for stop in self.stops if stop and stop in text]
        return min(found, key=text.find, default=None)

    def stop_reason(
        self, completion: Completion, params: SamplingParams, ends: Sequence[int]
    ) -> int | str | None:
        """The stop string, or the token of the request's own, that ended an action."""
        if completion.finish_reason != "stop" or not completion.tokens:
            return None
        last = completion.tokens[-1]
        if last in params.stop_token_ids:
            return None if last in ends else last
        return self.stop_in(decode_exactly(self.tokenizer, completion.tokens))

    def _open_stop(self, text: str) -> int:
        """Characters at the end of the text that may be the beginning of a stop string."""
        longest = max((len(stop) for stop in self.stops), default=0)
        ends = (n for n in range(min(longest, len(text)), 0, -1))
        return next((n for n in ends if any(stop.startswith(text[-n:]) for stop in self.stops)), 0)


@dataclass
class GrowingText:
    """The text of one choice as it is streamed. `plain_only` holds back what a tool call may begin with."""

    rules: TextRules
    plain_only: bool = False
    tokens: list[int] = field(default_factory=list)
    shown: str = ""

    def add(self, tokens: Sequence[int], finish: FinishReason | None) -> str:
        """Take the next tokens; gives the text that is new."""
        self.tokens += tokens
        text = self.rules.text(self.tokens, finish)
        if self.plain_only:
            text = text.lstrip()
            cut = min((at for mark in _MAY_CALL if (at := text.find(mark)) >= 0), default=len(text))
            text = text[:cut].rstrip()
        if len(text) <= len(self.shown) or not text.startswith(self.shown):
            return ""
        new, self.shown = text[len(self.shown) :], text
        return new


def token_texts(tokenizer: Tokenizer, tokens: Sequence[int]) -> list[str]:
    """Each token's own text."""
    return [decode_exactly(tokenizer, [token]) for token in tokens]
