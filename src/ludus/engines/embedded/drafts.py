"""Drafts for speculative decoding, looked up in earlier text.

The last `ORDER` tokens of a sequence select the most recent place where the same tokens occurred, in a prompt, an
observation or an action, and the tokens that followed there are the draft (prompt lookup, as in Saxena 2023 and in
suffix decoding, arXiv 2411.04975). One pass computes the logits at all tokens of the draft, and sampling goes on while
the sampled tokens equal it. Token t of an action depends only on its logits and its own random number, so a batch-
invariant engine samples the same tokens with the same log-probabilities as without drafts.
"""

from __future__ import annotations

from collections.abc import Sequence

ORDER = 3
PASS_TOKENS = 96
"""Tokens of a pass up to which the running sequences share drafts: beyond, a pass is limited by compute."""
_CAPACITY = 1_000_000
_END = -1


class DraftIndex:
    """Index of recent text by its n-grams of `ORDER` tokens, for drafts of at most `longest` tokens."""

    def __init__(self, longest: int) -> None:
        self.longest = longest
        self._text: list[int] = []
        self._after: dict[tuple[int, ...], int] = {}

    def add(self, tokens: Sequence[int], begin: int) -> None:
        """Add the tokens from number `begin` on; those before are in the index already."""
        if not self.longest or begin >= len(tokens):
            return
        if len(self._text) > _CAPACITY:
            self._text, self._after = [], {}
        first = max(begin - ORDER, 0)
        offset = len(self._text) - first
        self._text.extend(tokens[first:])
        self._text.append(_END)
        for at in range(first + ORDER, len(tokens)):
            self._after[tuple(tokens[at - ORDER : at])] = offset + at

    def draft(self, tokens: Sequence[int], num: int) -> tuple[int, ...]:
        """Return at most `num` tokens that followed the end of `tokens` at its last occurrence."""
        at = self._after.get(tuple(tokens[-ORDER:])) if num > 0 else None
        if at is None:
            return ()
        found = self._text[at : at + num]
        return tuple(found[: found.index(_END)] if _END in found else found)

    def share(self, num_decoding: int, num_tokens: int) -> int:
        """Return the draft tokens of each of `num_decoding` sequences in a pass of `num_tokens` other tokens."""
        return min(self.longest, max(0, PASS_TOKENS - num_tokens) // num_decoding) if num_decoding else 0
