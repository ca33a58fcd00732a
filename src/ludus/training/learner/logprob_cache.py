"""Cache of reference, teacher and old log-probabilities, cleared when the weights change.

Rounding depends on how rows are batched, so values are only returned for the same list of rows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from ludus.training.batches.rows import Row

_MOST = 8
"""Maximum number of cached entries; a step needs fewer."""

Asked = tuple[str, list[tuple[tuple[int, ...], tuple[bool, ...]]]]


@dataclass
class LogprobCache:
    """Log-probabilities `[T]` of rows, by scorer name."""

    _found: deque[tuple[Asked, list[Tensor]]] = field(default_factory=lambda: deque(maxlen=_MOST))

    def keep(self, name: str, rows: Sequence[Row], logprobs: Sequence[Tensor]) -> None:
        """Cache a scorer's values of the rows."""
        self._found.append((_asked(name, rows), list(logprobs)))

    def get(self, name: str, rows: Sequence[Row]) -> list[Tensor] | None:
        """Return the values of exactly these rows in this order, or None."""
        wanted = _asked(name, rows)
        return next((logprobs for asked, logprobs in self._found if asked == wanted), None)

    def clear(self) -> None:
        """Drop all entries because the weights have changed."""
        self._found.clear()


def _asked(name: str, rows: Sequence[Row]) -> Asked:
    return name, [(row.tokens, row.trains) for row in rows]
