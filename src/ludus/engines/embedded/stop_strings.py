"""Detect stop strings while tokens are sampled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class StopStrings:
    """Matches one set of stop strings against growing token lists.

    Only the tail of an action is decoded, and only if its last token can end a stop string. The text of an
    action is the tokenizer's decoding: SentencePiece tokenizers omit a leading space.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop: tuple[str, ...]) -> None:
        self._tokenizer = tokenizer
        self._stop = tuple(text for text in stop if text)
        # Each byte of a stop string may be a separate token; 4 more keep the first characters whole.
        self._window_tokens = max((len(text.encode()) for text in self._stop), default=0) + 4
        self._last_characters = frozenset(text[-1] for text in self._stop)
        self._check_all = not all(character.isascii() for character in self._last_characters)
        self._may_end: dict[int, bool] = {}

    def completed(self, tokens: Sequence[int]) -> bool:
        """Return True if the last of `tokens` (the action so far) completes a stop string."""
        last = tokens[-1]
        may_end = self._may_end.get(last)
        if may_end is None:
            text = self._decode([last, last])  # decoded alone, a token may lose its leading space
            may_end = self._check_all or not self._last_characters.isdisjoint(text)
            self._may_end[last] = may_end
        if not may_end:
            return False
        tail = self._decode(list(tokens[-self._window_tokens :]))
        return any(text in tail for text in self._stop)

    def _decode(self, tokens: list[int]) -> str:
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text
