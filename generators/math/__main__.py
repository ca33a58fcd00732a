"""Write the problems of the world `math`: python -m generators.math [--out F]."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path

from generators.archive import write_archive
from generators.math.generate import draw_questions, make_problems
from ludus.worlds.math.grader import answer_text
from ludus.worlds.math.problems import DEFAULT_TOPICS, LEVELS, RECIPE, MathProblem

OUT = Path(__file__).parents[2] / "src/ludus/worlds/math/data/tasks.zip"
Row = tuple[str, str, Sequence[str], str, Sequence[str]]
SIZES: Mapping[str, int] = {"train": 1_250, "validation": 125, "test": 300, "composition": 250, "demonstrations": 1_250}
"""Problems of each level and topic."""
RECIPE_SIZES: Mapping[str, int] = {**SIZES, "composition": 1_000, "demonstrations": 6_000}


def as_row(problem: MathProblem) -> Row:
    """Return a problem as it is stored, without its level and topic."""
    return problem.kind, problem.question, problem.steps, answer_text(problem), list(problem.units)


def first_of_each(problems: Iterable[MathProblem], num: int) -> dict[str, list[Row]]:
    """Return the first rows of each level and topic."""
    found: dict[str, list[Row]] = {}
    for problem in problems:
        own = found.setdefault(f"{problem.level}/{problem.topic}", [])
        if len(own) < num:
            own.append(as_row(problem))
    return found


def drawn(split: str, levels: Sequence[int], topics: Sequence[str], num: int) -> dict[str, list[Row]]:
    """Return the first problems of each level and topic of a split, or of the demonstrations."""
    if split == "demonstrations":
        streams = [draw_questions(level, topic) for level in levels for topic in topics]
        return first_of_each((one for stream in streams for one in islice(stream, num)), num)
    every = make_problems(split, levels, topics, 0)
    return first_of_each((one.problem for one in islice(every, num * len(levels) * len(topics))), num)


def members(sizes: Mapping[str, int] = SIZES, recipe_sizes: Mapping[str, int] = RECIPE_SIZES) -> dict[str, list[Row]]:
    """Return the rows of the archive by split, level and topic."""
    found: dict[str, list[Row]] = {}
    for split, num in sizes.items():
        rows = drawn(split, LEVELS, DEFAULT_TOPICS, num) | drawn(split, LEVELS, ("expressions",), num)
        found |= {f"{split}/{name}": own for name, own in rows.items()}
        rows = drawn(split, *RECIPE, recipe_sizes[split])
        found |= {f"recipe/{split}/{name}": own for name, own in rows.items()}
    return found


if __name__ == "__main__":
    write_archive(__doc__, OUT, members)
