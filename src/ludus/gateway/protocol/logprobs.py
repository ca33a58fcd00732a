"""Log-probabilities of sampled tokens and prompts in the clients' formats, with top tokens."""

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
    """Token names: the token's text or, with `as_ids`, `token_id:N` as in vLLM."""

    tokenizer: Tokenizer
    as_ids: bool = False
    _texts: dict[int, str] = field(default_factory=dict)
    _json: dict[int, tuple[str, str]] = field(default_factory=dict)

    def text(self, token: int) -> str:
        """Return the token's text."""
        known = self._texts.get(token)
        if known is None:
            (known,) = token_texts(self.tokenizer, [token])
            self._texts[token] = known
        return known

    def name(self, token: int) -> str:
        return f"token_id:{token}" if self.as_ids else self.text(token)

    def entry(self, token: int, logprob: float) -> str:
        """Return JSON with the token's name, log-probability and bytes, without the closing brace."""
        known = self._json.get(token)
        if known is None:
            values = ",".join(map(str, self.text(token).encode()))
            known = f'{{"token":{json.dumps(self.name(token))},"logprob":', f',"bytes":[{values}]'
            self._json[token] = known
        return f"{known[0]}{logprob!r}{known[1]}"


@dataclass(frozen=True)
class Scored:
    """Tokens with log-probabilities; None for the first token of a prompt.

    `top` holds the top tokens per position, or is empty if not requested.
    """

    tokens: Sequence[int] = ()
    logprobs: Sequence[float | None] = ()
    top: Sequence[TopLogprobs] = ()

    @property
    def rows(self) -> list[tuple[int, float | None, TopLogprobs]]:
        """Token, log-probability and top tokens per position."""
        return list(zip(self.tokens, self.logprobs, self._tops, strict=True))

    def cut(self, num_top: int) -> Scored:
        """Return the same with fewer top tokens."""
        return replace(self, top=[row[:num_top] for row in self.top])

    def then(self, other: Scored) -> Scored:
        """Concatenate with other tokens."""
        return Scored([*self.tokens, *other.tokens], [*self.logprobs, *other.logprobs], [*self._tops, *other._tops])

    @property
    def _tops(self) -> Sequence[TopLogprobs]:
        return self.top or [()] * len(self.tokens)


def text_logprobs(names: TokenNames, scored: Scored, offset: int) -> TextLogprobs:
    """Return the completions format. The token itself is always among its top tokens.

    If two tokens have the same text, the more likely one is kept.
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
    """Return the chat format: the most likely tokens, which may not include the sampled one.

    `{"content": [{"token", "logprob", "bytes", "top_logprobs": [{"token", "logprob", "bytes"}, ...]}, ...]}`
    """
    content = []
    for token, logprob, likeliest in scored.rows:
        assert logprob is not None
        others = ",".join([names.entry(other, value) + "}" for other, value in likeliest])
        content.append(f'{names.entry(token, logprob)},"top_logprobs":[{others}]}}')
    return EncodedJson(f'{{"content":[{",".join(content)}]}}'.encode())


def prompt_logprobs(names: TokenNames, scored: Scored) -> list[dict[int, PromptLogprob] | None]:
    """Return vLLM's prompt format: the token itself, then its top tokens. None for the first token."""
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
