"""Backward proofs: a step replaces the first goal by the hypotheses of a rule. A finished proof is one of Metamath."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Final, NamedTuple

from ludus.worlds.proofs.metamath import Assertion, AxiomDatabase, Hypothesis, ProofError, read_database

Formula = tuple[str, ...]
"""The symbols of a formula: a variable, `~ A`, `( A -> B )` or `( A & B )`."""
VARIABLES: Final = "pqrst"
_BINARY: Final = {"->": "wi", "&": "wa"}
MAX_SYMBOLS: Final = 200
"""Maximum length of a formula."""


def read_formula(text: str) -> Formula:
    """Return a formula. Raises ProofError."""
    symbols = tuple(text.replace("(", " ( ").replace(")", " ) ").split())
    if len(symbols) > MAX_SYMBOLS or not symbols or _end(symbols, 0) != len(symbols):
        raise ProofError(f"not a formula: {text.strip()[:60]!r}")
    return symbols


def _end(symbols: Sequence[str], start: int) -> int:
    """Return the position after the formula that begins at `start`; -1 if there is none."""
    if start < 0 or start >= len(symbols):
        return -1
    if symbols[start] in VARIABLES and len(symbols[start]) == 1:
        return start + 1
    if symbols[start] == "~":
        return _end(symbols, start + 1)
    middle = _end(symbols, start + 1) if symbols[start] == "(" else -1
    if middle < 0 or middle >= len(symbols) or symbols[middle] not in _BINARY:
        return -1
    last = _end(symbols, middle + 1)
    return last + 1 if 0 <= last < len(symbols) and symbols[last] == ")" else -1


def parts(formula: Formula) -> tuple[str, tuple[Formula, ...]]:
    """Return the connective of a formula and its operands; an empty connective for a variable."""
    if len(formula) == 1:
        return "", ()
    if formula[0] == "~":
        return "~", (formula[1:],)
    middle = _end(formula, 1)
    return formula[middle], (formula[1:middle], formula[middle + 1 : -1])


def subformulas(formula: Formula) -> Iterator[Formula]:
    """Yield a formula and all formulas within."""
    yield formula
    for one in parts(formula)[1]:
        yield from subformulas(one)


def match(pattern: Formula, formula: Formula, found: dict[str, Formula]) -> bool:
    """Return whether the formula is the pattern with formulas in place of its variables, which are added to `found`."""
    sign, operands = parts(pattern)
    if not sign:
        return found.setdefault(pattern[0], formula) == formula
    other, values = parts(formula)
    return sign == other and all(match(a, b, found) for a, b in zip(operands, values, strict=True))


def construction(formula: Formula) -> list[str]:
    """Return the Metamath proof that the symbols are a formula."""
    sign, operands = parts(formula)
    if not sign:
        return [f"w{formula[0]}"]
    label = {"~": "wn", **_BINARY}[sign]
    return [*(step for one in operands for step in construction(one)), label]


def replaced(pattern: Formula, found: Mapping[str, Formula]) -> Formula:
    """Return a pattern with formulas in place of its variables."""
    return tuple(symbol for one in pattern for symbol in found.get(one, (one,)))


@dataclass(frozen=True)
class InferenceRule:
    """An axiom, or a proven lemma. `extra` are the variables that its statement does not contain."""

    label: str
    variables: tuple[str, ...]
    hypotheses: tuple[Formula, ...]
    statement: Formula

    @property
    def extra(self) -> tuple[str, ...]:
        return tuple(one for one in self.variables if one not in self.statement)


class ProofStep(NamedTuple):
    """A step of a proof: its text, Metamath steps before those of the hypotheses, its label, and the hypotheses."""

    text: str
    constructions: tuple[str, ...]
    label: str
    goals: tuple[Formula, ...]


@dataclass
class Proof:
    """A proof in the making: the open goals in order, and the steps so far."""

    rules: Mapping[str, InferenceRule]
    hypotheses: Mapping[str, Formula]
    goal: Formula
    goals: list[Formula] = field(default_factory=list)
    steps: list[ProofStep] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.goals = [self.goal]

    def apply(self, text: str) -> None:
        """Apply a step to the first goal. Raises ProofError, and changes nothing then."""
        if not self.goals:
            raise ProofError("all goals are proven")
        label, _, given = text.strip().partition(" ")
        goal = self.goals[0]
        if label in self.hypotheses:
            if self.hypotheses[label] != goal or given:
                raise ProofError(f"{label} is not the first goal")
            self._push(ProofStep(text, (), label, ()))
            return
        if (rule := self.rules.get(label)) is None:
            raise ProofError(f"no rule {label[:20]!r}")
        found: dict[str, Formula] = {}
        if not match(rule.statement, goal, found):
            raise ProofError(f"{label} does not prove the first goal")
        values = [read_formula(one) for one in given.split(",")] if given else []
        if len(values) != len(rule.extra):
            raise ProofError(f"{label} needs {len(rule.extra)} formulas")
        found |= dict(zip(rule.extra, values, strict=True))
        made = tuple(step for name in rule.variables for step in construction(found[name]))
        self._push(ProofStep(text, made, label, tuple(replaced(one, found) for one in rule.hypotheses)))

    def _push(self, step: ProofStep) -> None:
        self.goals[:1] = step.goals
        self.steps.append(step)

    def undo(self) -> None:
        """Take back the last step; nothing if there is none."""
        done = self.steps[:-1]
        self.goals, self.steps = [self.goal], []
        for step in done:
            self._push(step)

    def metamath(self) -> tuple[str, ...]:
        """Return the proof of a finished proof in the format of Metamath."""
        steps = iter(self.steps)

        def tree() -> Iterator[str]:
            step = next(steps)
            yield from step.constructions
            for _ in step.goals:
                yield from tree()
            yield step.label

        return tuple(tree())

    def assertion(self, label: str = "theorem") -> Assertion:
        """Return the theorem with its proof, for the verifier."""
        used = [one for one in VARIABLES if one in self.goal or any(one in h for h in self.hypotheses.values())]
        floating = [Hypothesis(f"w{one}", ("wff", one), True) for one in used]
        essential = [Hypothesis(name, ("|-", *formula), False) for name, formula in self.hypotheses.items()]
        return Assertion(label, (*floating, *essential), ("|-", *self.goal), proof=self.metamath())


_HEADER: Final = f"""
$c ( ) -> & ~ wff |- $.
$v {" ".join(VARIABLES)} $.
{" ".join(f"w{one} $f wff {one} $." for one in VARIABLES)}
wi $a wff ( p -> q ) $.
wa $a wff ( p & q ) $.
wn $a wff ~ p $.
"""


class Logic(NamedTuple):
    """The shipped logic as rules, and as a verified Metamath database."""

    rules: Mapping[str, InferenceRule]
    database: AxiomDatabase
    text: str


@cache
def logic() -> Logic:
    """Return the shipped logic; the proofs of its lemmas are verified."""
    data = tomllib.loads((files("ludus.worlds.proofs") / "data/logic.toml").read_text("utf-8"))
    rules, text = dict[str, InferenceRule](), _HEADER
    for entry in (*data["axioms"], *data["lemmas"]):
        hypotheses = [read_formula(one) for one in entry["hypotheses"]]
        label, statement = entry["label"], read_formula(entry["statement"])
        names = {f"h{i + 1}": one for i, one in enumerate(hypotheses)}
        own = "".join(f"{label}.{name} $e |- {' '.join(one)} $.\n" for name, one in names.items())
        body = f"$a |- {' '.join(statement)} $."
        if "proof" in entry:
            proof = Proof(rules, names, statement)
            for step in entry["proof"]:
                proof.apply(step)
            lines = (f"{label}.{step}" if step in names else step for step in proof.metamath())
            body = f"$p |- {' '.join(statement)} $= {' '.join(lines)} $."
        text += f"${{\n{own}{label} {body}\n$}}\n"
        used = tuple(one for one in VARIABLES if one in statement or any(one in h for h in hypotheses))
        rules[label] = InferenceRule(label, used, tuple(hypotheses), statement)
    return Logic(rules, read_database(text), text)
