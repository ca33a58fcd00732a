"""What an episode knows: rows by kind and identifier, and facts that follow from a seed.

Whatever a function makes up (an identifier, a price, a date) is a hash of the seed and of what it was asked,
never of the order of the calls: the same call gives the same in every episode of a task.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from ludus.rewards.exact_match import normalise
from ludus.types import JSON
from ludus.worlds.functions.domains.kinds import KINDS

Row = dict[str, JSON]


@dataclass(frozen=True, slots=True)
class KnownValues:
    """An identifier that a request names, and that is there from the start."""

    kind: str
    id: str


@dataclass
class DomainState:
    """The state of one episode. `known` are the identifiers that it begins with."""

    seed: int
    known: tuple[KnownValues, ...] = ()
    _rows: dict[str, dict[str, Row]] = field(init=False, default_factory=lambda: defaultdict(dict))

    def __post_init__(self) -> None:
        for one in self.known:
            self._rows[one.kind][one.id] = {}

    def number(self, low: int, high: int, *parts: JSON) -> int:
        """A number from `low` to `high`, the same for the same parts."""
        text = "\n".join([str(self.seed), *map(_plain, parts)])
        drawn = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")
        return low + drawn % (high - low + 1)

    def pick(self, choices: Sequence[str], *parts: JSON) -> str:
        """One of the choices, the same for the same parts."""
        return choices[self.number(0, len(choices) - 1, *parts)]

    def issue(self, kind: str, *parts: JSON) -> str:
        """The identifier of what the parts describe, from now on there."""
        made = KINDS[kind].identifier(self.number(1000, 9999, kind, *parts))
        self._rows[kind].setdefault(made, {})
        return made

    def row(self, kind: str, name: str) -> Row:
        """The row of something that is there in any case, such as an account."""
        return self._rows[kind].setdefault(normalise(name) or name, {})

    def need(self, kind: str, id_: str) -> Row:
        """The row of an identifier. Raises LookupError where there is none."""
        rows = self._rows[kind]
        if id_ not in rows:
            raise LookupError(f"there is no {kind} {id_!r}")
        return rows[id_]

    def drop(self, kind: str, id_: str) -> Row:
        """Take a row away. Raises LookupError where there is none."""
        row = self.need(kind, id_)
        del self._rows[kind][id_]
        return row


def _plain(part: JSON) -> str:
    """The text of a part, the same for values that count as equal."""
    if isinstance(part, float) and part.is_integer():
        return str(int(part))
    return normalise(str(part)) or str(part)
