"""Difficulty report: the variety of the tasks, and the success of baselines without skill."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from generators.code.generate import by_split
from generators.code.problems import NUM_SHOWN, Chain, CodeExample, CodeProblem, TooLarge
from ludus.worlds.code import guest_runner
from ludus.worlds.code.grader import read_value, same_value

Guess = Callable[[CodeProblem, CodeExample], object]
"""A baseline: returns its result for the arguments of an example."""


@dataclass(frozen=True, slots=True)
class CodeVariety:
    """Number of tasks, of solution shapes (without identifiers, names and numbers), and of different steps."""

    num_tasks: int
    num_shapes: int
    num_steps: int


def variety(problems: Sequence[CodeProblem]) -> dict[int, CodeVariety]:
    """Return the variety of each level."""
    by_level: dict[int, list[Chain]] = defaultdict(list)
    for problem in problems:
        by_level[problem.level].append(problem.chain)
    return {
        level: CodeVariety(
            len(chains),
            len({chain.shape for chain in chains}),
            len({step.name for chain in chains for step in chain.steps}),
        )
        for level, chains in sorted(by_level.items())
    }


def constant(problem: CodeProblem, example: CodeExample) -> object:
    """Return the most frequent result in the examples of the task (the majority answer)."""
    del example
    shown = [one.value for one in problem.examples[:NUM_SHOWN]]
    texts = [repr(value) for value in shown]
    return shown[texts.index(Counter(texts).most_common(1)[0][0])]


def unchanged(problem: CodeProblem, example: CodeExample) -> object:
    """Return the first argument."""
    del problem
    return example.arguments[0]


def borrowed(train: Sequence[CodeProblem]) -> Guess:
    """Return a baseline: the solution of the first training task with the same types that shares the most steps. It
    runs nothing, so it needs no tool."""

    nearest: dict[str, Chain | None] = {}

    def guess(problem: CodeProblem, example: CodeExample) -> object:
        if problem.id not in nearest:
            nearest[problem.id] = _nearest(problem.chain, train)
        other = nearest[problem.id]
        try:
            return None if other is None else other.run(example.arguments)
        except TooLarge:
            return None

    return guess


def _nearest(chain: Chain, train: Sequence[CodeProblem]) -> Chain | None:
    names = {step.name for step in chain.steps}
    fitting = [
        one.chain
        for one in train
        if one.chain.takes == chain.takes and one.chain.gives is chain.gives and one.chain.shape != chain.shape
    ]
    return max(fitting, key=lambda other: len(names & {s.name for s in other.steps}), default=None)


def _is_right(value: object, example: CodeExample) -> bool:
    return same_value(read_value(guest_runner.encode(value)), example.value)


def rates(problems: Sequence[CodeProblem], guess: Guess) -> tuple[float, float]:
    """Return the fraction of tasks whose tests all pass, and the mean fraction of hidden tests that pass."""
    solved, share = 0, 0.0
    for problem in problems:
        right = [_is_right(guess(problem, one), one) for one in problem.examples]
        solved += all(right)
        share += sum(right[NUM_SHOWN:]) / len(right[NUM_SHOWN:])
    return solved / len(problems), share / len(problems)


def report(problems: Sequence[CodeProblem]) -> str:
    """Return the report as text."""
    splits = by_split(problems)
    lines = ["split        level  tasks  solutions  steps"]
    for split, own in splits.items():
        for level, found in variety(own).items():
            lines.append(f"{split:12} {level:5}  {found.num_tasks:5}  {found.num_shapes:9}  {found.num_steps:5}")
    every = [one for found in splits.values() for one in found]
    shapes = len({one.chain.shape for one in every})
    steps = len({step.name for one in every for step in one.chain.steps})
    lines.append(f"all: {len(every)} tasks, {shapes} different solutions of {steps} steps")
    lines.append("\nsplit        majority        unchanged       no tool  (all tests, share of hidden tests)")
    baselines: Mapping[str, Guess] = {
        "majority": constant,
        "unchanged": unchanged,
        "no tool": borrowed(splits["train"]),
    }
    for split, own in splits.items():
        if not own:
            continue
        cells = [rates(own, guess) for guess in baselines.values()]
        lines.append(f"{split:12} " + "  ".join(f"{solved:6.1%} {share:6.1%}" for solved, share in cells))
    return "\n".join(lines)
