"""Write the problems of the world `math`: python -m generators.math [--out FOLDER]."""

from __future__ import annotations

import argparse
import json
import lzma
import random
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from pathlib import Path

from generators.math.generate import ProblemMaker, make_problems
from ludus.worlds.math.problems import DEFAULT_TOPICS, LEVELS, RECIPE_LEVELS, RECIPE_TOPICS, SPLITS, MathProblem

OUT = Path(__file__).parents[2] / "src/ludus/worlds/math/data"
NUM: Mapping[str, int] = {"train": 40_000, "validation": 4_000, "test": 10_000, "composition": 8_000}
"""Problems of the default topics in each split."""
NUM_EXPRESSIONS: Mapping[str, int] = {"train": 4_000, "validation": 400, "test": 1_000, "composition": 0}
NUM_RECIPE: Mapping[str, int] = {"train": 9_522, "validation": 539, "test": 1_524, "composition": 2_000}
"""All that exist, except in `composition`."""
NUM_DEMONSTRATIONS = 150_000
"""Draws of the problems that the demonstrations of the recipe show, of which distinct questions are written."""


def row(problem: MathProblem) -> dict[str, object]:
    """Return a problem as data, without the fields of its group."""
    answer = problem.answer
    value: object = {"expression": answer.gold} if not isinstance(answer, Fraction) else str(answer)
    if isinstance(answer, Fraction) and answer.denominator == 1:
        value = answer.numerator
    assert all(size == 1.0 for size in problem.units.values())
    return {
        "kind": problem.kind,
        "question": problem.question,
        "steps": list(problem.steps),
        "answer": value,
        "units": list(problem.units),
    }


def draw(nums: Mapping[str, int], levels: Sequence[int], topics: Sequence[str]) -> Mapping[str, Sequence[MathProblem]]:
    """Return the problems of each split in the order in which they are drawn."""
    return {split: make_problems(split, nums[split], levels, topics, seed=0) for split in SPLITS}


def draw_demonstrations(num: int) -> list[MathProblem]:
    """Return training problems of the recipe with distinct questions; several may have the same steps."""
    rng = random.Random("demonstrations")
    found: dict[str, MathProblem] = {}
    for place in range(num):
        maker = ProblemMaker(RECIPE_LEVELS[place % len(RECIPE_LEVELS)], "train", RECIPE_TOPICS)
        problem = maker.draw(rng, rng.choice(maker.open_topics()))
        if problem is not None:
            found.setdefault(problem.question, problem)
    return list(found.values())


def as_text(drawn: Iterable[Mapping[str, Sequence[MathProblem]]]) -> str:
    """Return the lines of a data file: the header, then the problems by split, level and topic."""
    groups: dict[tuple[str, int, str], list[MathProblem]] = defaultdict(list)
    for splits in drawn:
        for split, problems in splits.items():
            for problem in problems:
                groups[split, problem.level, problem.topic].append(problem)
    lines: list[object] = [[(*group, len(found)) for group, found in groups.items()]]
    lines += [row(problem) for found in groups.values() for problem in found]
    return "".join(json.dumps(line, ensure_ascii=False, separators=(",", ":")) + "\n" for line in lines)


def texts() -> Mapping[str, str]:
    """Return the data files by name."""
    default, expressions = draw(NUM, LEVELS, DEFAULT_TOPICS), draw(NUM_EXPRESSIONS, LEVELS, ("expressions",))
    return {
        "problems.jsonl.xz": as_text((default, expressions)),
        "recipe.jsonl.xz": as_text((draw(NUM_RECIPE, RECIPE_LEVELS, RECIPE_TOPICS),)),
        "demonstrations.jsonl.xz": as_text(({"train": draw_demonstrations(NUM_DEMONSTRATIONS)},)),
    }


def main() -> None:
    """Write the data files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=OUT, help="folder of the data")
    out: Path = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    for name, text in texts().items():
        (out / name).write_bytes(lzma.compress(text.encode(), preset=9 | lzma.PRESET_EXTREME))


if __name__ == "__main__":
    main()
