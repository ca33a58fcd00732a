"""Bundled programming problems, loaded from the data file written by `python -m generators.code`."""

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
"""Number of tests shown in the prompt."""
NUM_TESTS = 15
"""Number of tests per problem in the data file."""
SPLITS = ("train", "validation", "test", "composition")
LEVELS = (1, 2, 3, 4, 5)
FAMILIES = (
    *("lists", "folds", "texts", "words", "numbers", "tables"),
    *("spans", "graphs", "grids", "parsing", "planning", "machines"),
)


@dataclass(frozen=True)
class CodeProblem:
    """A programming task in one style.

    `values` are pairs of arguments and result, `texts` pairs of stdin and stdout; the first `NUM_SHOWN` are in `text`.
    `flawed` are incorrect programs that omit a step.
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
        """Return the ground truth with `num_tests` tests: the first `NUM_SHOWN` are shown, the others hidden."""
        pairs: Sequence[tuple[object, object]] = self.texts if self.style == "stdin" else self.values
        cases = []
        for number, (inputs, expected) in enumerate(pairs[:num_tests]):
            shown = number < NUM_SHOWN
            name = f"shown {number + 1}" if shown else f"hidden {number + 1 - NUM_SHOWN}"
            cases.append(TestCase(name, inputs, expected))
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

    A problem keeps its style in the data file if that is in `styles`, otherwise it gets the first of `styles`.
    """
    adapter = TypeAdapter(CodeProblem)
    found: dict[str, list[CodeProblem]] = {split: [] for split in SPLITS}
    chosen = (row for row in _rows() if row["level"] in levels and row["family"] in families)
    for row, _ in zip(chosen, range(num), strict=False):
        style = row["style"] if row["style"] in styles else styles[0]
        found[row["split"]].append(adapter.validate_python(row | row["styles"][style] | {"style": style}))
    return {split: tuple(chosen) for split, chosen in found.items()}


@cache
def _rows() -> list[dict[str, Any]]:
    data = (files("ludus.worlds.code") / "data/problems.jsonl.xz").read_bytes()
    return [json.loads(line) for line in lzma.decompress(data).decode("utf-8").splitlines()]
