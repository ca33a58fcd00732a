"""Programs as text: a grammar that draws them, parsing of replies, and the prompts of proposers and solvers.

The repetition penalty is that of R-Zero (arXiv:2508.05004): the share of a batch that is in a proposal's cluster.
"""

from __future__ import annotations

import ast
import math
import random
import tomllib
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from itertools import combinations
from typing import Final, Literal

import numpy as np
from scipy.cluster.hierarchy import fcluster, linkage

from ludus.types import Message
from ludus.worlds.code.grader import read_value
from ludus.worlds.code.guest_runner import encode
from ludus.worlds.code.world import program_of

Kind = Literal["abduction", "deduction", "induction"]
ENTRY: Final = "f"
MAX_PROGRAM: Final = 1000
"""Maximum number of characters of a program."""
MAX_VALUE: Final = 200
"""Maximum number of characters of an input or output."""
_INPUT: Final = "input:"
_IMPURE: Final = (
    *("open", "input", "exec", "eval", "compile", "breakpoint", "help", "globals", "locals", "vars", "dir"),
    *("getattr", "setattr", "delattr", "id", "hash", "gi_frame", "cr_frame", "ag_frame"),
)
"""Names that a proposed program must not use: builtins, and attributes that lead to them."""
_LETTERS: Final = "abc"
_NUM_STEPS: Final = (1, 2)


class Malformed(ValueError):
    """Raised for a reply, program or value that does not have the requested form."""


@dataclass(frozen=True, slots=True)
class Problem:
    """A valid task: a program, its inputs, and its outputs as text (`text_of`).

    Abduction and deduction have one input. Of those of induction, the solver sees the first half, and is tested on the
    others.
    """

    kind: str
    program: str
    inputs: tuple[object, ...]
    outputs: tuple[str, ...]

    @property
    def num_shown(self) -> int:
        return len(self.inputs) // 2

    @property
    def prompt(self) -> tuple[Message, ...]:
        """The messages for a solver."""
        pairs = list(zip(map(text_of, self.inputs), self.outputs, strict=True))
        shown = "\n".join(f"{ENTRY}({given}) == {due}" for given, due in pairs[: self.num_shown])
        values = {"program": self.program, "input": pairs[0][0], "output": pairs[0][1], "pairs": shown}
        return (Message(role="user", content=_content().solve[self.kind].format(**values)),)

    @property
    def answer(self) -> str:
        """A correct reply."""
        answers = {"abduction": text_of(self.inputs[0]), "deduction": self.outputs[0], "induction": self.program}
        return answers[self.kind]

    @property
    def proposal(self) -> str:
        """The reply that proposes this problem."""
        return "\n".join([self.program, *(f"{_INPUT} {text_of(one)}" for one in self.inputs)])


def proposer_prompt(kind: str, num_inputs: int, references: Sequence[str]) -> tuple[Message, ...]:
    """Return the messages for a proposer, with the proposals that the new one must differ from."""
    prompts = _content().prompts
    what = prompts["one_input"] if kind != "induction" else prompts["more_inputs"].format(num=num_inputs)
    text = prompts["propose"].format(what=what, kind=kind, references="\n\n".join(references))
    return (Message(role="user", content=text),)


def text_of(value: object) -> str:
    """Return the text of a value, equal for equal values of one type. Raises ValueError if it is not plain."""
    return repr(read_value(encode(value)))


def read_literal(reply: str) -> object:
    """Return the value of a reply that is a Python literal. Raises Malformed."""
    text = program_of(reply).strip()
    try:
        if len(text) > MAX_VALUE:
            raise ValueError("it is too long")
        (statement,) = _parse(text).body
        value = ast.literal_eval(statement.value if isinstance(statement, ast.Expr) else statement)
        text_of(value)
    except (ValueError, TypeError, RecursionError, MemoryError) as error:
        raise Malformed(str(error)) from error
    return value


def read_program(reply: str) -> str:
    """Return the program in a reply, which has to define `f` with one argument. Raises Malformed."""
    text = program_of(reply).strip()
    if len(text) > MAX_PROGRAM:
        raise Malformed("the program is too long")
    for node in _parse(text).body:
        if isinstance(node, ast.FunctionDef) and node.name == ENTRY and len(node.args.args) == 1:
            return text
    raise Malformed(f"the program does not define {ENTRY} with one argument")


def read_proposal(reply: str, num_inputs: int) -> tuple[str, tuple[object, ...]]:
    """Return the program and the inputs of a proposer's reply. Raises Malformed."""
    lines = reply.splitlines()
    inputs = [line.removeprefix(_INPUT) for line in lines if line.startswith(_INPUT)]
    if len(inputs) != num_inputs:
        raise Malformed(f"{num_inputs} inputs were expected")
    program = read_program("\n".join(line for line in lines if not line.startswith(_INPUT)))
    return program, tuple(map(read_literal, inputs))


def is_pure(program: str) -> bool:
    """Return whether a program has no imports, no names with `__` and none of the impure names."""
    for node in ast.walk(_parse(program)):
        name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
        if isinstance(node, ast.Import | ast.ImportFrom | ast.Global) or name.startswith("__") or name in _IMPURE:
            return False
    return True


def _parse(text: str) -> ast.Module:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise Malformed(str(error)) from error


@dataclass(frozen=True)
class _Content:
    prompts: Mapping[str, str]
    solve: Mapping[str, str]
    steps: Mapping[str, Mapping[str, Sequence[str]]]


@cache
def _content() -> _Content:
    return _Content(**tomllib.loads((files(__package__) / "data/programs.toml").read_text("utf-8")))


def draw_problem(rng: random.Random, kind: Kind, num_inputs: int) -> Problem:
    """Draw a program of the grammar with inputs for which it has a short output."""
    while True:
        start, program = _draw_program(rng)
        names: dict[str, Callable[[object], object]] = {}
        exec(program, names)  # a program of the grammar, which is data of this package
        found: dict[str, tuple[object, str]] = {}
        for _ in range(3 * num_inputs):
            value = _draw_value(rng, start)
            with suppress(LookupError, ValueError):  # of an empty list
                output = text_of(names[ENTRY](value))
                found |= {text_of(value): (value, output)} if len(output) <= MAX_VALUE // 4 else {}
            if len(found) == num_inputs:
                inputs, outputs = zip(*found.values(), strict=True)
                return Problem(kind, program, inputs, outputs)


def _draw_program(rng: random.Random) -> tuple[str, str]:
    """Return the type of the input and the program."""
    steps = _content().steps
    start = kind = rng.choice(sorted(steps))
    lines = [f"def {ENTRY}(x):"]
    for left in reversed(range(rng.choice(_NUM_STEPS))):
        result = rng.choice(sorted(steps[kind]))
        holes = {"n": rng.randint(1, 9), "k": rng.randint(2, 4), "c": rng.choice(_LETTERS), "d": rng.choice(_LETTERS)}
        lines.append(f"    {'x =' if left else 'return'} {rng.choice(steps[kind][result]).format(**holes)}")
        kind = result
    return start, "\n".join(lines)


def _draw_value(rng: random.Random, kind: str) -> object:
    if kind == "int":
        return rng.randrange(10)
    if kind == "list":
        return [rng.randrange(10) for _ in range(rng.randint(2, 3))]
    return "".join(rng.choices(_LETTERS, k=rng.randint(2, 4)))


THRESHOLD = 0.5
"""Average distance up to which clusters are merged."""
_MAX_N = 4
_SMOOTHING = 0.1


def bleu(words: Sequence[str], reference: Sequence[str]) -> float:
    """Return the BLEU score of a sentence with one reference, up to 4-grams of equal weight.

    A precision of 0 above unigrams is smoothed to 0.1 divided by the number of n-grams (method 1 of Chen and Cherry).
    """
    total = 0.0
    for n in range(1, _MAX_N + 1):
        given, wanted = (Counter(zip(*(one[i:] for i in range(n)), strict=False)) for one in (words, reference))
        matches = (given & wanted).total()
        if n == 1 and not matches:
            return 0.0
        total += math.log((matches or _SMOOTHING) / max(1, given.total()))
    brevity = min(0.0, 1 - len(reference) / len(words))
    return math.exp(total / _MAX_N + brevity)


def cluster_shares(texts: Sequence[str]) -> list[float]:
    """Return the share of texts in the cluster of each text: average linkage on 1 - BLEU, cut at `THRESHOLD`.

    The words of a text are separated by white space. Of a pair the earlier text is scored against the later one; equal
    texts have the distance 0.
    """
    if len(texts) < 2:
        return [1.0] * len(texts)
    words = [text.split() for text in texts]
    distances = [0.0 if a == b else 1 - bleu(a, b) for a, b in combinations(words, 2)]
    clusters = fcluster(linkage(np.array(distances), "average"), THRESHOLD, "distance").tolist()
    sizes = Counter(clusters)
    return [sizes[one] / len(texts) for one in clusters]
