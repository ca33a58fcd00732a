"""Write the tasks of the environment `code`: python -m generators.code [--num N] [--out FOLDER]."""

from __future__ import annotations

import argparse
import json
import lzma
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from generators.code.difficulty_report import report
from generators.code.generate import CodeQuota, make_problems, split_of_chain
from generators.code.problems import Chain, CodeProblem

OUT = Path(__file__).parents[2] / "src/ludus/worlds/code/data"
NUM = 2_000
"""Problems in the file. The first 500 are the default tasks."""


def flawed_chains(chain: Chain) -> list[Chain]:
    """Return the chains without one step; without the last one if no other fits."""
    fitting = [less for place in range(len(chain.steps)) if (less := chain.without(place)) is not None]
    return fitting or ([Chain(chain.steps[:-1], chain.numbers[:-1])] if len(chain.steps) > 1 else [])


def unchanged(problem: CodeProblem) -> str:
    """Return a program that returns its argument."""
    if problem.style == "stdin":
        return "print(input())\n"
    return f"def {problem.signature}:\n    return {problem.names[0]}\n"


def row(problem: CodeProblem) -> dict[str, object]:
    """Return a problem as data, with its text and its programs in both styles."""
    styles = {}
    for style in ("function", "stdin"):
        one = replace(problem, style=style)
        flawed = [replace(one, chain=less).solution for less in flawed_chains(problem.chain)]
        styles[style] = {"text": one.text, "reference": one.solution, "flawed": flawed or [unchanged(one)]}
    return {
        "id": problem.id,
        "split": split_of_chain(problem.chain),
        "level": problem.level,
        "family": problem.chain.family,
        "steps": [step.name for step in problem.chain.steps],
        "shape": problem.chain.shape,
        "style": problem.style,
        "styles": styles,
        "values": [[list(one.arguments), one.value] for one in problem.examples],
        "texts": [list(problem.as_texts(one)) for one in problem.examples],
    }


def rows(num: int) -> Iterator[Mapping[str, object]]:
    """Yield the problems in the order in which they are drawn."""
    return map(row, make_problems(CodeQuota(num)))


def main() -> None:
    """Write the problems and the difficulty report of the default tasks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num", type=int, default=NUM, help="problems (2000)")
    parser.add_argument("--out", type=Path, default=OUT, help="folder of the data")
    args = parser.parse_args()
    text = "".join(json.dumps(one, ensure_ascii=False, separators=(",", ":")) + "\n" for one in rows(args.num))
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "problems.jsonl.xz").write_bytes(lzma.compress(text.encode(), preset=9))
    (args.out / "difficulty_report.txt").write_text(report(make_problems(CodeQuota(500))) + "\n", "utf-8")


if __name__ == "__main__":
    main()
