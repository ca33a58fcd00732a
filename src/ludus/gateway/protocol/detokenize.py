"""Decode sampled tokens to client-visible text, at once or incrementally, and format their log-probabilities."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

from ludus.chat.render import Tokenizer, decode_exactly
from ludus.engines.embedded.engine import CompletionChunk
from ludus.gateway.protocol.bodies import EncodedJson, JsonBody
from ludus.types import Completion, FinishReason, SamplingParams, TopLogprobs

_REPLACEMENT = "\ufffd"  # character that an incomplete multi-byte character decodes to
_CALL_STARTS = "<[{`"  # first characters of tool calls and thinking in all formats


@dataclass(frozen=True)
class TextRules:
    """Text options. `keep_stop` includes the stop string; `skip_special` drops control tokens."""

    tokenizer: Tokenizer
    stops: tuple[str, ...] = ()
    keep_stop: bool = False
    skip_special: bool = True

    def text(self, tokens: Sequence[int], finish: FinishReason | None) -> str:
        """Return the text of tokens. If `finish` is None, omit an end that later tokens may change."""
        return self.cut(self.decoded(tokens), finish)

    def decoded(self, tokens: Sequence[int]) -> str:
        """Decode the tokens, without control tokens if `skip_special` is set."""
        return decode_exactly(self.tokenizer, tokens, skip_special=self.skip_special)

    def cut(self, text: str, finish: FinishReason | None) -> str:
        """Cut a text at its stop string or, if `finish` is None, at the possible beginning of a stop string."""
        if finish is None:
            text = text.rstrip(_REPLACEMENT)
            longest = min(max(map(len, self.stops), default=0), len(text))
            begun = (n for n in range(longest, 0, -1) if any(stop.startswith(text[-n:]) for stop in self.stops))
            return text[: len(text) - next(begun, 0)]
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


@dataclass
class StreamedText:
    """Streamed text of one choice. `plain_only` holds back text that may begin a tool call.

    New tokens are decoded together with those of the previous call, so the cost is linear in the number of
    tokens. The last call decodes all tokens, so that the text equals that of a complete response.
    """

    rules: TextRules
    plain_only: bool = False
    tokens: list[int] = field(default_factory=list)
    shown: str = ""
    settled: str = ""
    start: int = 0
    read: int = 0

    def add(self, tokens: Sequence[int], finish: FinishReason | None) -> str:
        self.tokens += tokens
        if finish:
            text = self.rules.text(self.tokens, finish)
        else:
            before = self.rules.decoded(self.tokens[self.start : self.read])
            text = self.settled + self.rules.decoded(self.tokens[self.start :])[len(before) :]
            if not text.endswith(_REPLACEMENT):
                self.settled, self.start, self.read = text, self.read, len(self.tokens)
            text = self.rules.cut(text, None)
        if self.plain_only:
            text = text.lstrip()
            cut = min((at for mark in _CALL_STARTS if (at := text.find(mark)) >= 0), default=len(text))
            text = text[:cut].rstrip()
        if len(text) <= len(self.shown) or not text.startswith(self.shown):
            return ""
        new, self.shown = text[len(self.shown) :], text
        return new


@dataclass
class TokenNames:
    """Names of tokens in responses: their text or, with `as_ids`, `token_id:N` as in vLLM."""

    tokenizer: Tokenizer
    as_ids: bool = False
    _texts: dict[int, str] = field(default_factory=dict)
    _json: dict[int, tuple[str, str]] = field(default_factory=dict)

    def text(self, token: int) -> str:
        if token not in self._texts:
            self._texts[token] = decode_exactly(self.tokenizer, [token])
        return self._texts[token]

    def name(self, token: int) -> str:
        return f"token_id:{token}" if self.as_ids else self.text(token)

    def entry(self, token: int, logprob: float) -> str:
        """Return JSON with the token's name, log-probability and bytes, without the closing brace."""
        if token not in self._json:
            values = ",".join(map(str, self.text(token).encode()))
            self._json[token] = f'{{"token":{json.dumps(self.name(token))},"logprob":', f',"bytes":[{values}]'
        before, after = self._json[token]
        return f"{before}{logprob!r}{after}"


@dataclass(frozen=True)
class Scored:
    """Tokens with log-probabilities (None: first token of a prompt), and the top tokens per position if requested."""

    tokens: Sequence[int] = ()
    logprobs: Sequence[float | None] = ()
    top: Sequence[TopLogprobs] = ()

    @classmethod
    def of(cls, sampled: Completion | CompletionChunk) -> Scored:
        return cls(sampled.tokens, sampled.logprobs, sampled.top_logprobs)

    @property
    def rows(self) -> list[tuple[int, float | None, TopLogprobs]]:
        return list(zip(self.tokens, self.logprobs, self._tops, strict=True))

    def cut(self, num_top: int) -> Scored:
        """Return a copy with at most `num_top` top tokens per position."""
        return replace(self, top=[row[:num_top] for row in self.top])

    def then(self, other: Scored) -> Scored:
        """Return the concatenation with other tokens."""
        return Scored([*self.tokens, *other.tokens], [*self.logprobs, *other.logprobs], [*self._tops, *other._tops])

    @property
    def _tops(self) -> Sequence[TopLogprobs]:
        return self.top or [()] * len(self.tokens)


def text_logprobs(names: TokenNames, scored: Scored, offset: int) -> JsonBody:
    """Return the completions format: the top tokens include the token itself; of equal texts only the likeliest."""
    lengths = [len(names.text(token)) for token in scored.tokens]
    top: list[dict[str, float] | None] = []
    for token, logprob, likeliest in scored.rows:
        row: dict[str, float] = {}
        for other, value in (*likeliest, *(() if logprob is None else ((token, logprob),))):
            row.setdefault(names.name(other), value)
        top.append(None if logprob is None else row)
    return {
        "text_offset": list(accumulate(lengths, initial=offset))[:-1],
        "token_logprobs": list(scored.logprobs),
        "tokens": [names.name(token) for token in scored.tokens],
        "top_logprobs": top,
    }


def chat_logprobs(names: TokenNames, scored: Scored) -> EncodedJson:
    """Return log-probabilities in the chat format. The top tokens may not include the sampled token.

    `{"content": [{"token", "logprob", "bytes", "top_logprobs": [{"token", "logprob", "bytes"}, ...]}, ...]}`
    """
    content = []
    for token, logprob, likeliest in scored.rows:
        assert logprob is not None
        others = ",".join([names.entry(other, value) + "}" for other, value in likeliest])
        content.append(f'{names.entry(token, logprob)},"top_logprobs":[{others}]}}')
    return EncodedJson(f'{{"content":[{",".join(content)}]}}'.encode())


def prompt_logprobs(names: TokenNames, scored: Scored) -> list[dict[int, JsonBody] | None]:
    """Return vLLM's prompt format: each token, then its top tokens by `rank`. The first entry is None."""
    found: list[dict[int, JsonBody] | None] = []
    for token, logprob, likeliest in scored.rows:
        ranked = [] if logprob is None else enumerate([(token, logprob), *likeliest])
        row: dict[int, JsonBody] = {
            other: {"logprob": value, "rank": rank or None, "decoded_token": names.text(other)}
            for rank, (other, value) in ranked
        }
        found.append(row or None)
    return found
