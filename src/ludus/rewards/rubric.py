"""Rubrics: weighted trees whose leaves are atomic checks, decided by a rule or by a judge."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple


class Rubric(NamedTuple):
    """A node of the tree: a leaf with a name, or weighted parts.

    `text` describes the check of a leaf to a judge; the name does if it is empty. A leaf with a `pattern` is decided by
    a rule: it holds if the regular expression is found in the text.
    """

    name: str
    weight: float = 1.0
    parts: tuple[Rubric, ...] = ()
    text: str = ""
    pattern: str = ""

    def score(self, holds: Mapping[str, bool]) -> float:
        """Return the weighted mean of the parts, in [0, 1]; of a leaf, whether it holds."""
        if not self.parts:
            return float(holds[self.name])
        return sum(one.weight * one.score(holds) for one in self.parts) / sum(one.weight for one in self.parts)

    def leaves(self) -> Iterator[Rubric]:
        """Yield the leaves from left to right."""
        if not self.parts:
            yield self
        for part in self.parts:
            yield from part.leaves()

    def rules(self, text: str) -> dict[str, bool]:
        """Return whether each leaf with a pattern holds for a text, by name."""
        return {leaf.name: re.search(leaf.pattern, text) is not None for leaf in self.leaves() if leaf.pattern}


def rubric_of(name: str, table: Mapping[str, object]) -> Rubric:
    """Return the tree of a TOML table: `weight`, `text` and `pattern` of the node, and one table per part.

    Raises ValueError for an invalid value, a weight that is not above 0, and a repeated name of a leaf.
    """
    parts = tuple(rubric_of(key, value) for key, value in table.items() if isinstance(value, Mapping))
    own = {key: value for key, value in table.items() if not isinstance(value, Mapping)}
    weight, text, pattern = own.pop("weight", 1.0), own.pop("text", ""), own.pop("pattern", "")
    if own or not isinstance(text, str) or not isinstance(pattern, str):
        raise ValueError(f"the rubric {name} has an invalid value; a node has weight, text, pattern and tables")
    if not isinstance(weight, int | float) or weight <= 0:
        raise ValueError(f"the weight of the rubric {name} is {weight!r}, not a number above 0")
    node = Rubric(name, float(weight), parts, text, pattern)
    names = [leaf.name for leaf in node.leaves()]
    if len(set(names)) < len(names):
        raise ValueError(f"two leaves of the rubric {name} share a name")
    return node
