"""What models said of rows before an update, kept until the weights change: nobody is asked twice.

The numbers are those of the rows that were asked together, so they are given back for the same rows alone:
another batch is computed in other microbatches, and rounds otherwise.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from ludus.training.batches.rows import Row

_MOST = 8
"""Answers that are kept at once: a step has fewer."""

Asked = tuple[str, list[tuple[tuple[int, ...], tuple[bool, ...]]]]


@dataclass
class LogprobCache:
    """Log-probabilities `[T]` of rows, by the name of who gave them."""

    _found: deque[tuple[Asked, list[Tensor]]] = field(default_factory=lambda: deque(maxlen=_MOST))

    def keep(self, name: str, rows: Sequence[Row], logprobs: Sequence[Tensor]) -> None:
        """Remember what `name` said of the rows."""
        self._found.append((_asked(name, rows), list(logprobs)))

    def get(self, name: str, rows: Sequence[Row]) -> list[Tensor] | None:
        """What it said of exactly these rows in this order; None where it was not asked."""
        wanted = _asked(name, rows)
        return next((logprobs for asked, logprobs in self._found if asked == wanted), None)

    def clear(self) -> None:
        """Forget everything: the weights are others now."""
        self._found.clear()


def _asked(name: str, rows: Sequence[Row]) -> Asked:
    return name, [(row.tokens, row.trains) for row in rows]
