"""The shipped problems, read from a data file that `python -m generators.code` writes."""

from __future__ import annotations

import json
import lzma
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, Literal

from pydantic import TypeAdapter

from ludus.worlds.code.grader import LIMITS, CodeTruth, TestCase

Style = Literal["function", "stdin"]
ENTRY = "solve"
NUM_SHOWN = 3
"""Tests in the text of a task."""
NUM_TESTS = 15
"""Tests of each problem in the data."""
SPLITS = ("train", "validation", "test", "composition")
LEVELS = (1, 2, 3, 4, 5)
FAMILIES = (
    *("lists", "folds", "texts", "words", "numbers", "tables"),
    *("spans", "graphs", "grids", "parsing", "planning", "machines"),
)


@dataclass(frozen=True)
class CodeProblem:
    """A programming task in one style.

    `values` are arguments and results, `texts` inputs and outputs; the first `NUM_SHOWN` are in the text. `flawed`
    are programs that leave out a step.
    """

    id: str
    split: str
    level: int
    family: str
    steps: tuple[str, ...]
    shape: str
    style: Style
    text: str
    reference: str
    flawed: tuple[str, ...]
    values: tuple[tuple[tuple[object, ...], object], ...]
    texts: tuple[tuple[str, str], ...]

    def truth(self, num_tests: int) -> CodeTruth:
        """Return the truth: the first tests are shown, the others hidden."""
        pairs: Sequence[tuple[object, object]] = self.texts if self.style == "stdin" else self.values
        cases = []
        for number, (given, due) in enumerate(pairs[:num_tests]):
            shown = number < NUM_SHOWN
            name = f"shown {number + 1}" if shown else f"hidden {number + 1 - NUM_SHOWN}"
            cases.append(TestCase(name, given, due))
        names = tuple(case.name for case in cases)
        return CodeTruth(
            fail_to_pass=names,
            hidden=frozenset(names[NUM_SHOWN:]),
            seconds=LIMITS.cpu_s,
            memory_bytes=float(LIMITS.memory_bytes),
            style=self.style,
            entry=ENTRY,
            cases=tuple(cases),
            reference=self.reference,
            shape=self.shape,
        )


def problems(
    num: int, levels: Sequence[int], families: Sequence[str], styles: Sequence[Style]
) -> Mapping[str, tuple[CodeProblem, ...]]:
    """Return the first `num` problems of these levels and families by split, in one of the styles.

    A problem has the style that the data specifies, if it is among `styles`.
    """
    reader = TypeAdapter(CodeProblem)
    found: dict[str, list[CodeProblem]] = {split: [] for split in SPLITS}
    chosen = (row for row in _rows() if row["level"] in levels and row["family"] in families)
    for row, _ in zip(chosen, range(num), strict=False):
        style = row["style"] if row["style"] in styles else styles[0]
        found[row["split"]].append(reader.validate_python(row | row["styles"][style] | {"style": style}))
    return {split: tuple(own) for split, own in found.items()}


@cache
def _rows() -> list[dict[str, Any]]:
    data = (files("ludus.worlds.code") / "data/problems.jsonl.xz").read_bytes()
    return [json.loads(line) for line in lzma.decompress(data).decode("utf-8").splitlines()]
