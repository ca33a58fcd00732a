"""How many tasks of a world are really different, for the surveys of the worlds."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TaskShape:
    """What makes a task different.

    `form` is what is asked, without identifiers, names and numbers; `shape` the solution without values.
    """

    level: str
    form: str
    shape: str


@dataclass(frozen=True, slots=True)
class Variety:
    """How many tasks there are, how many different requests, and how many different solutions."""

    num_tasks: int
    num_forms: int
    num_shapes: int


def variety(looks: Iterable[TaskShape]) -> dict[str, Variety]:
    """The variety of each level, levels in order."""
    by_level: dict[str, list[TaskShape]] = defaultdict(list)
    for look in looks:
        by_level[look.level].append(look)
    return {
        level: Variety(len(found), len({one.form for one in found}), len({one.shape for one in found}))
        for level, found in sorted(by_level.items())
    }


def variety_lines(splits: Iterable[tuple[str, Iterable[TaskShape]]], form: str) -> list[str]:
    """A table of all splits by level; `form` is the word for what is asked, such as "questions"."""
    lines = [f"split        level  tasks  {form}  solutions"]
    for split, looks in splits:
        for level, found in variety(looks).items():
            counts = f"{found.num_tasks:5}  {found.num_forms:{len(form)}}  {found.num_shapes:9}"
            lines.append(f"{split:12} {level:5}  {counts}")
    return lines


def rate_lines(names: Sequence[str], rows: Iterable[tuple[str, Sequence[float]]]) -> list[str]:
    """A table of shares, one row a split and one column a name."""
    lines = [f"{'split':12} {'  '.join(names)}"]
    for split, shares in rows:
        cells = "  ".join(f"{share:{len(name)}.1%}" for name, share in zip(names, shares, strict=True))
        lines.append(f"{split:12} {cells}")
    return lines
