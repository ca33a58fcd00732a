"""Log-probabilities as clients see them: of sampled tokens and of prompts, with alternatives."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

from ludus.chat.render import Tokenizer
from ludus.gateway.protocol.detokenize import token_texts
from ludus.gateway.protocol.responses import EncodedJson, PromptLogprob, TextLogprobs
from ludus.types import TopLogprobs


@dataclass
class TokenNames:
    """What tokens are called: their own text or, with `as_ids`, `token_id:N`, as vLLM names them."""

    tokenizer: Tokenizer
    as_ids: bool = False
    _texts: dict[int, str] = field(default_factory=dict)
    _json: dict[int, tuple[str, str]] = field(default_factory=dict)

    def text(self, token: int) -> str:
        """The token's own text."""
        known = self._texts.get(token)
        if known is None:
            (known,) = token_texts(self.tokenizer, [token])
            self._texts[token] = known
        return known

    def name(self, token: int) -> str:
        return f"token_id:{token}" if self.as_ids else self.text(token)

    def entry(self, token: int, logprob: float) -> str:
        """The token's name, its log-probability and the bytes of its text as JSON, without the last brace."""
        known = self._json.get(token)
        if known is None:
            values = ",".join(map(str, self.text(token).encode()))
            known = f'{{"token":{json.dumps(self.name(token))},"logprob":', f',"bytes":[{values}]'
            self._json[token] = known
        return f"{known[0]}{logprob!r}{known[1]}"


@dataclass(frozen=True)
class Scored:
    """Tokens with log-probabilities; None for the first of a prompt.

    `top` has the likeliest tokens at each place, and is empty where nobody asked for them.
    """

    tokens: Sequence[int] = ()
    logprobs: Sequence[float | None] = ()
    top: Sequence[TopLogprobs] = ()

    @property
    def rows(self) -> list[tuple[int, float | None, TopLogprobs]]:
        """Token, log-probability and alternatives, by place."""
        return list(zip(self.tokens, self.logprobs, self._tops, strict=True))

    def cut(self, num_top: int) -> Scored:
        """The same with fewer alternatives."""
        return replace(self, top=[row[:num_top] for row in self.top])

    def then(self, other: Scored) -> Scored:
        """These tokens and, after them, others."""
        return Scored(
            [*self.tokens, *other.tokens],
            [*self.logprobs, *other.logprobs],
            [*self._tops, *other._tops],
        )

    @property
    def _tops(self) -> Sequence[TopLogprobs]:
        return self.top or [()] * len(self.tokens)


def text_logprobs(names: TokenNames, scored: Scored, offset: int) -> TextLogprobs:
    """As completions give them. The token itself is always among its alternatives.

    Where two tokens have the same text, the likelier one stands for both.
    """
    lengths = [len(names.text(token)) for token in scored.tokens]
    top: list[dict[str, float] | None] = []
    for token, logprob, likeliest in scored.rows:
        row: dict[str, float] = {}
        for other, value in (*likeliest, *(() if logprob is None else ((token, logprob),))):
            row.setdefault(names.name(other), value)
        top.append(None if logprob is None else row)
    return TextLogprobs(
        text_offset=list(accumulate(lengths, initial=offset))[:-1],
        token_logprobs=list(scored.logprobs),
        tokens=[names.name(token) for token in scored.tokens],
        top_logprobs=top,
    )


def chat_logprobs(names: TokenNames, scored: Scored) -> EncodedJson:
    """As chats give them: the alternatives are the likeliest, the token among them only if it is one.

    `{"content": [{"token", "logprob", "bytes", "top_logprobs": [{"token", "logprob", "bytes"}, ...]}, ...]}`
    """
    content = []
    for token, logprob, likeliest in scored.rows:
        assert logprob is not None
        others = ",".join([names.entry(other, value) + "}" for other, value in likeliest])
        content.append(f'{names.entry(token, logprob)},"top_logprobs":[{others}]}}')
    return EncodedJson(f'{{"content":[{",".join(content)}]}}'.encode())


def prompt_logprobs(names: TokenNames, scored: Scored) -> list[dict[int, PromptLogprob] | None]:
    """As vLLM gives those of a prompt: the token itself, then its alternatives. None for the first token."""
    found: list[dict[int, PromptLogprob] | None] = []
    for token, logprob, likeliest in scored.rows:
        if logprob is None:
            found.append(None)
            continue
        own = PromptLogprob(logprob=logprob, decoded_token=names.text(token))
        row = {token: own}
        for rank, (other, value) in enumerate(likeliest, start=1):
            row[other] = PromptLogprob(logprob=value, rank=rank, decoded_token=names.text(other))
        found.append(row)
    return found
