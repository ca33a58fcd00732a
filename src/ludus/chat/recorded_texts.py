"""Prompts that no template renders, as text or token ids, in the tokens of the replies that they contain."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ludus.chat.render import Renderer, Tokenizer, decode_exactly
from ludus.types import Segment

Prompt = str | tuple[int, ...]


@dataclass
class RecordedTexts:
    """The recorded tokens of each text prompt with its reply."""

    _tokens: dict[str, tuple[int, ...]] = field(default_factory=dict)

    def read(self, prompt: Prompt, tokenizer: Tokenizer) -> tuple[str, tuple[int, ...]]:
        """Return a prompt as text and tokens; those of the longest recorded text that it begins with are recorded."""
        if not isinstance(prompt, str):
            return decode_exactly(tokenizer, prompt), prompt
        known = max((text for text in self._tokens if prompt.startswith(text)), key=len, default="")
        rest = tokenizer.encode(prompt[len(known) :], add_special_tokens=not known)
        return prompt, (*self._tokens.get(known, ()), *rest)

    def add(self, prompt: str, segments: Sequence[Segment], renderer: Renderer) -> None:
        """Record a prompt and its reply, the last segment, with and without the end-of-turn token."""
        tokens, sampled = tokens_of(segments), segments[-1].tokens
        for num in {0, int(not {*sampled[-1:]}.isdisjoint(renderer.stop_token_ids))}:
            reply = decode_exactly(renderer.tokenizer, sampled[: len(sampled) - num])
            self._tokens[prompt + reply] = tokens[: len(tokens) - num]


def tokens_of(segments: Sequence[Segment]) -> tuple[int, ...]:
    """Return the tokens of segments."""
    return tuple(token for segment in segments for token in segment.tokens)


def common_segments(segments: Sequence[Segment], tokens: tuple[int, ...]) -> Sequence[Segment]:
    """Return the first segments, as many as the tokens begin with."""
    start = 0
    for number, segment in enumerate(segments):
        end = start + len(segment.tokens)
        if tokens[start:end] != segment.tokens:
            return segments[:number]
        start = end
    return segments
