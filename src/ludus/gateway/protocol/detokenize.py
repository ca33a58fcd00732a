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
        return self.cut(self.decoded(tokens), finish)

    def decoded(self, tokens: Sequence[int]) -> str:
        """The text of the tokens, with control tokens where they are kept."""
        return decode_exactly(self.tokenizer, tokens, skip_special=self.skip_special)

    def cut(self, text: str, finish: FinishReason | None) -> str:
        """A decoded text up to its stop string, or up to what may become one where more is to come."""
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
    """The text of one choice as it is streamed. `plain_only` holds back what a tool call may begin with.

    Tokens are decoded with the ones of the addition before them, so that a stream costs time linear in its
    length: `settled` is the text of the tokens up to `read`, whose decoding ends with a whole character. The
    last addition decodes all tokens, as a whole answer does.
    """

    rules: TextRules
    plain_only: bool = False
    tokens: list[int] = field(default_factory=list)
    shown: str = ""
    settled: str = ""
    start: int = 0
    read: int = 0

    def add(self, tokens: Sequence[int], finish: FinishReason | None) -> str:
        """Take the next tokens; gives the text that is new."""
        self.tokens += tokens
        text = self.rules.text(self.tokens, finish) if finish else self.rules.cut(self._grown(), None)
        if self.plain_only:
            text = text.lstrip()
            cut = min((at for mark in _MAY_CALL if (at := text.find(mark)) >= 0), default=len(text))
            text = text[:cut].rstrip()
        if len(text) <= len(self.shown) or not text.startswith(self.shown):
            return ""
        new, self.shown = text[len(self.shown) :], text
        return new

    def _grown(self) -> str:
        """The text of all tokens so far."""
        before = self.rules.decoded(self.tokens[self.start : self.read])
        text = self.settled + self.rules.decoded(self.tokens[self.start :])[len(before) :]
        if not text.endswith(_TORN):
            self.settled, self.start, self.read = text, self.read, len(self.tokens)
        return text


def token_texts(tokenizer: Tokenizer, tokens: Sequence[int]) -> list[str]:
    """Each token's own text."""
    return [decode_exactly(tokenizer, [token]) for token in tokens]
