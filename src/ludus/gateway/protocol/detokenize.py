"""Decode sampled tokens to client-visible text, at once or incrementally."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ludus.chat.render import Tokenizer, decode_exactly
from ludus.types import Completion, FinishReason, SamplingParams

_TORN = "\ufffd"
"""Decoding of an incomplete multi-byte character."""
_MAY_CALL = "<[{`"
"""First characters of tool calls and thinking in all formats."""


@dataclass(frozen=True)
class TextRules:
    """Text options. `keep_stop` keeps the stop string; `skip_special` drops control tokens."""

    tokenizer: Tokenizer
    stops: tuple[str, ...] = ()
    keep_stop: bool = False
    skip_special: bool = True

    def text(self, tokens: Sequence[int], finish: FinishReason | None) -> str:
        """Return an action's text; if it continues (`finish` None), without its unsettled end."""
        return self.cut(self.decoded(tokens), finish)

    def decoded(self, tokens: Sequence[int]) -> str:
        """Decode the tokens, with control tokens if they are kept."""
        return decode_exactly(self.tokenizer, tokens, skip_special=self.skip_special)

    def cut(self, text: str, finish: FinishReason | None) -> str:
        """Cut a text at its stop string or, if it continues, at a possible beginning of one."""
        if finish is None:
            text = text.rstrip(_TORN)
            return text[: len(text) - self._open_stop(text)]
        found = self.stop_in(text) if finish == "stop" else None
        return text if found is None or self.keep_stop else text[: text.find(found)]

    def stop_in(self, text: str) -> str | None:
        """Return the stop string that occurs first in the text, or None."""
        found = [stop for stop in self.stops if stop and stop in text]
        return min(found, key=text.find, default=None)

    def stop_reason(self, completion: Completion, params: SamplingParams, ends: Sequence[int]) -> int | str | None:
        """Return the stop string or the request's stop token that ended an action, or None."""
        if completion.finish_reason != "stop" or not completion.tokens:
            return None
        last = completion.tokens[-1]
        if last in params.stop_token_ids:
            return None if last in ends else last
        return self.stop_in(decode_exactly(self.tokenizer, completion.tokens))

    def _open_stop(self, text: str) -> int:
        """Return the length of the text's end that may be the beginning of a stop string."""
        longest = max((len(stop) for stop in self.stops), default=0)
        ends = (n for n in range(min(longest, len(text)), 0, -1))
        return next((n for n in ends if any(stop.startswith(text[-n:]) for stop in self.stops)), 0)


@dataclass
class GrowingText:
    """Streamed text of one choice. `plain_only` holds back text that may begin a tool call.

    New tokens are decoded together with the previous addition's, so the cost is linear in the number of
    tokens. The last addition decodes all tokens, as a complete response does.
    """

    rules: TextRules
    plain_only: bool = False
    tokens: list[int] = field(default_factory=list)
    shown: str = ""
    settled: str = ""
    start: int = 0
    read: int = 0

    def add(self, tokens: Sequence[int], finish: FinishReason | None) -> str:
        """Add tokens and return the new text."""
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
        """Return the text of all tokens so far."""
        before = self.rules.decoded(self.tokens[self.start : self.read])
        text = self.settled + self.rules.decoded(self.tokens[self.start :])[len(before) :]
        if not text.endswith(_TORN):
            self.settled, self.start, self.read = text, self.read, len(self.tokens)
        return text


def token_texts(tokenizer: Tokenizer, tokens: Sequence[int]) -> list[str]:
    """Decode each token separately."""
    return [decode_exactly(tokenizer, [token]) for token in tokens]
