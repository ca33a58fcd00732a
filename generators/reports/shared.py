"""Variety of tasks, and tables: shared by the difficulty reports of worlds."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TaskShape:
    """The features by which tasks count as different.

    `form` is the question without identifiers, names and numbers; `shape` the solution without values.
    """

    level: str
    form: str
    shape: str


@dataclass(frozen=True, slots=True)
class Variety:
    """Number of tasks, of different questions, and of different solutions."""

    num_tasks: int
    num_forms: int
    num_shapes: int


def variety(shapes: Iterable[TaskShape]) -> dict[str, Variety]:
    """Return the variety of each level, in order of level."""
    by_level: dict[str, list[TaskShape]] = defaultdict(list)
    for shape in shapes:
        by_level[shape.level].append(shape)
    return {
        level: Variety(len(found), len({one.form for one in found}), len({one.shape for one in found}))
        for level, found in sorted(by_level.items())
    }


def variety_lines(splits: Iterable[tuple[str, Iterable[TaskShape]]], form: str) -> list[str]:
    """Return a table of all splits by level; `form` is the heading of different questions, such as "requests"."""
    lines = [f"split        level  tasks  {form}  solutions"]
    for split, shapes in splits:
        for level, found in variety(shapes).items():
            counts = f"{found.num_tasks:5}  {found.num_forms:{len(form)}}  {found.num_shapes:9}"
            lines.append(f"{split:12} {level:5}  {counts}")
    return lines


def rate_lines(names: Sequence[str], rows: Iterable[tuple[str, Sequence[float]]]) -> list[str]:
    """Return a table of rates, with a row per split and a column per name."""
    lines = [f"{'split':12} {'  '.join(names)}"]
    for split, shares in rows:
        cells = "  ".join(f"{share:{len(name)}.1%}" for name, share in zip(names, shares, strict=True))
        lines.append(f"{split:12} {cells}")
    return lines
