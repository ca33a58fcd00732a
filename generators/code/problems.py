"""Problems: chains of steps with a text, a solution and tests."""

from __future__ import annotations

import ast
import inspect
import random
import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Literal

from generators.code.layouts import LAYOUTS, WRITTEN, as_input, as_output
from generators.code.shapes import shape_of
from generators.code.steps.base import CodeStep, StepKind

Style = Literal["function", "stdin"]
ENTRY = "solve"
_NAMES: Mapping[str, tuple[str, ...]] = {
    "int": ("n", "m"),
    "list[int]": ("xs", "ys"),
    "str": ("text", "other"),
    "list[str]": ("words", "others"),
    "dict[str, int]": ("table", "other_table"),
    "list[list[int]]": ("rows", "other_rows"),
}
_SIZES = (0, 1, 2, 3, 3, 4, 5, 5, 6, 7, 8, 9, 10, 12)
_POOL, _KEPT = 42, 420
"""Number of inputs from which tests are chosen, and number of values drawn per kind."""
LARGEST, LONGEST, SLOW = 10**15, 400, 3000
MOST_COMMON, MOST_KEPT = 0.4, 0.34
"""Maximum fractions of the tests with the same result, and with the first argument as result."""
NUM_SHOWN = 3


class TooLarge(Exception):
    """An intermediate number is too large for a step that loops up to it."""


@dataclass(frozen=True)
class Chain:
    """A sequence of steps with their drawn numbers."""

    steps: tuple[CodeStep, ...]
    numbers: tuple[Mapping[str, int], ...]

    @property
    def takes(self) -> tuple[StepKind, ...]:
        """The kinds of the arguments."""
        return self.steps[0].takes

    @property
    def gives(self) -> StepKind:
        """The kind of the result."""
        return self.steps[-1].gives

    @property
    def points(self) -> int:
        """The difficulty."""
        return sum(step.points for step in self.steps)

    @property
    def family(self) -> str:
        """The family of the hardest step."""
        return max(self.steps, key=lambda step: step.points).family

    @property
    def shape(self) -> str:
        """The shape of the solution: the shapes of the steps."""
        return "-".join(source_of(step).shape for step in self.steps)

    @property
    def pairs(self) -> frozenset[tuple[str, str]]:
        """The pairs of consecutive steps."""
        names = [step.name for step in self.steps]
        return frozenset(pairwise(names))

    def run(self, arguments: Sequence[object]) -> object:
        """Return the result. Raise TooLarge if it would take long."""
        value = tuple(arguments)
        for step, numbers in zip(self.steps, self.numbers, strict=True):
            if step.family == "numbers" and any(isinstance(n, int) and abs(n) > SLOW for n in value):
                raise TooLarge
            value = (step.function(*value, **numbers),)
        return value[0]

    def without(self, place: int) -> Chain | None:
        """Return the chain without one step, or None if the others do not fit together."""
        step = self.steps[place]
        if len(self.steps) == 1 or step.takes != (step.gives,):
            return None
        cut = slice(place, place + 1)
        steps, numbers = list(self.steps), list(self.numbers)
        del steps[cut], numbers[cut]
        return Chain(tuple(steps), tuple(numbers))


@dataclass(frozen=True)
class CodeExample:
    """Arguments and the right result."""

    arguments: tuple[object, ...]
    value: object


@dataclass(frozen=True)
class CodeProblem:
    """A programming task. `examples` are its tests; the text shows the first `NUM_SHOWN`."""

    chain: Chain
    style: Style
    level: int
    examples: tuple[CodeExample, ...]

    @property
    def id(self) -> str:
        """The names of the steps, unique among problems."""
        return "+".join(step.name for step in self.chain.steps)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the arguments."""
        used: list[str] = []
        for kind in self.chain.takes:
            used.append(next(name for name in _NAMES[kind.annotation] if name not in used))
        return tuple(used)

    @property
    def signature(self) -> str:
        """The signature of the requested function."""
        kinds = zip(self.names, self.chain.takes, strict=True)
        given = ", ".join(f"{name}: {kind.annotation}" for name, kind in kinds)
        return f"{ENTRY}({given}) -> {self.chain.gives.annotation}"

    @property
    def text(self) -> str:
        """The task in words, with examples."""
        lines = [self._asked, *self._given, *self._steps]
        if self.style == "stdin":
            lines.append(f"It prints the result: {_printed(self.chain.gives)}.")
        return "\n".join([*lines, "", *self._shown])

    @property
    def solution(self) -> str:
        """A program that solves the task."""
        parts = [source_of(step).text for step in self.chain.steps]
        return "\n\n\n".join([*parts, self._main]) + "\n"

    @property
    def _asked(self) -> str:
        if self.style == "function":
            return f"Write a Python function {self.signature}."
        return "Write a Python program that reads from standard input and prints to standard output."

    @property
    def _given(self) -> list[str]:
        kinds = zip(self.names, self.chain.takes, strict=True)
        if self.style == "function":
            return [f"{name} is {kind.words}." for name, kind in kinds]
        return [f"It reads {kind.words}: {LAYOUTS[kind.layout].words}." for _, kind in kinds]

    @property
    def _steps(self) -> list[str]:
        steps = zip(self.chain.steps, self.chain.numbers, strict=True)
        said = [step.says.format(**numbers) for step, numbers in steps]
        if len(said) == 1:
            return [f"What it does: {said[0]}"]
        head = "What it does, each step with what the step before gives:"
        return [head, *(f"{number}. {text}" for number, text in enumerate(said, 1))]

    @property
    def _shown(self) -> list[str]:
        if self.style == "function":
            calls = [
                f"{ENTRY}({', '.join(map(repr, one.arguments))}) == {one.value!r}" for one in self.examples[:NUM_SHOWN]
            ]
            return ["For example:", *calls]
        return [f"For example, for the input\n{given}it prints\n{due}" for given, due in self._texts()]

    def _texts(self) -> list[tuple[str, str]]:
        return [self.as_texts(one) for one in self.examples[:NUM_SHOWN]]

    def as_texts(self, example: CodeExample) -> tuple[str, str]:
        """Return an example as the input and the output of a program."""
        return as_input(self.chain.takes, example.arguments), as_output(self.chain.gives, example.value)

    @property
    def _main(self) -> str:
        value, lines = ", ".join(self.names), list[str]()
        for place, (step, numbers) in enumerate(zip(self.chain.steps, self.chain.numbers, strict=True), 1):
            given = ", ".join([value, *map(str, numbers.values())])
            value = "result" if place == len(self.chain.steps) else f"step_{place}"
            lines.append(f"{value} = {step.name}({given})")
        if self.style == "function":
            body = textwrap.indent("\n".join([*lines, "return result"]), "    ")
            return f"def {self.signature}:\n{body}"
        read = [
            LAYOUTS[kind.layout].read.format(name=name) for name, kind in zip(self.names, self.chain.takes, strict=True)
        ]
        return "\n".join([*read, *lines, LAYOUTS[self.chain.gives.layout].write.format(name="result")])


def _printed(kind: StepKind) -> str:
    return WRITTEN.get(kind.layout, LAYOUTS[kind.layout].words)


@dataclass(frozen=True, slots=True)
class CodeSource:
    """The source of a step's function without decorator and docstring, and its shape."""

    text: str
    shape: str


def source_of(step: CodeStep) -> CodeSource:
    """Return the source of a step."""
    return _sources(step.function.__module__)[step.name]


@cache
def _sources(module: str) -> Mapping[str, CodeSource]:
    """Return the sources of the steps of a module."""
    text = inspect.getsource(sys.modules[module])
    lines, found = text.splitlines(), dict[str, CodeSource]()
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef) and ast.get_docstring(node) is not None:
            head = lines[node.lineno - 1 : node.body[0].lineno - 1]
            plain = "\n".join([*head, *lines[node.body[1].lineno - 1 : node.end_lineno]])
            found[node.name] = CodeSource(plain, shape_of(plain))
    return found


@cache
def _pool(kind: StepKind, place: int) -> Sequence[object]:
    """Return values of a kind, different ones for each argument position. No step changes them."""
    rng = random.Random(f"{kind.name}/{place}")
    return [kind.draw(rng, max(_SIZES[turn % len(_SIZES)], 2 * (place > 0))) for turn in range(_KEPT)]


def examples_of(chain: Chain, rng: random.Random, num: int) -> tuple[CodeExample, ...] | None:
    """Return tests of a chain, the smaller ones first, or None if they do not characterise it.

    Results must differ, none may be too frequent, the result may rarely equal the first argument, and each step
    must change some results.
    """
    pool: dict[str, CodeExample] = {}
    start = rng.randrange(_KEPT)
    for turn in range(_POOL):
        number = (start + turn) % _KEPT
        arguments = tuple(_pool(kind, place)[number] for place, kind in enumerate(chain.takes))
        try:
            value = chain.run(arguments)
        except TooLarge:
            continue
        if _is_large(value) or _is_large(list(arguments)):
            continue
        pool.setdefault(repr(arguments), CodeExample(arguments, value))
    chosen = _varied(list(pool.values()), num)
    return chosen if chosen is not None and _tell(chain, chosen) else None


def _varied(pool: Sequence[CodeExample], num: int) -> tuple[CodeExample, ...] | None:
    """Return `num` examples, preferring rare results, with readable ones first; None if there are too few."""
    counts: dict[str, int] = {}
    ranked = []
    for one in pool:
        key = repr(one.value)
        counts[key] = counts.get(key, 0) + 1
        ranked.append((counts[key], one))
    chosen = [one for _, one in sorted(ranked, key=lambda pair: pair[0])[:num]]
    if len(chosen) < num:
        return None
    shown = [one for one in chosen if 12 < len(repr(one.arguments)) < 90 and one.value][:NUM_SHOWN]
    rest = sorted((one for one in chosen if one not in shown), key=lambda one: len(repr(one.arguments)))
    return (*shown, *rest) if len(shown) == NUM_SHOWN else (*chosen,)


def _tell(chain: Chain, examples: Sequence[CodeExample]) -> bool:
    hidden = examples[NUM_SHOWN:]
    values = [repr(one.value) for one in hidden]
    if max(map(values.count, values)) > MOST_COMMON * len(values) or len(set(values)) < 5:
        return False
    if sum(one.value == one.arguments[0] for one in hidden) > MOST_KEPT * len(values):
        return False
    for place in range(len(chain.steps)):
        less = chain.without(place)
        if less is not None and _num_changed(less, hidden) < 3:
            return False
    return True


def _num_changed(chain: Chain, examples: Sequence[CodeExample]) -> int:
    try:
        return sum(chain.run(one.arguments) != one.value for one in examples)
    except TooLarge:
        return len(examples)


def _is_large(value: object) -> bool:
    if isinstance(value, int):
        return abs(value) > LARGEST
    if isinstance(value, list):
        return len(value) > LONGEST // 4 or any(map(_is_large, value))
    if isinstance(value, dict):
        return any(map(_is_large, value.values()))
    return isinstance(value, str) and (len(value) > LONGEST or "\n" in value)
