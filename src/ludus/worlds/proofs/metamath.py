"""A verifier of Metamath databases (the Metamath book, N. Megill, 2nd edition, chapter 4), without `$[` and `?`.

A proof is a sequence of labels that works on a stack: a hypothesis pushes its statement, an assertion replaces the
statements of its hypotheses by its own, after a substitution of formulas for variables that the floating hypotheses
determine. Proofs are in the normal format; compressed proofs are refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

Expression = tuple[str, ...]
"""A statement: its typecode, and the symbols after it."""


class ProofError(ValueError):
    """An invalid database or proof. `step` is the number of accepted steps of the proof."""

    def __init__(self, message: str, step: int = 0) -> None:
        super().__init__(message)
        self.step = step


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A hypothesis. It is floating (`$f`) if it gives the type of a variable."""

    label: str
    statement: Expression
    floating: bool


@dataclass(frozen=True, slots=True)
class Assertion:
    """An axiom or a theorem with its mandatory hypotheses in order, and pairs of variables that must be disjoint."""

    label: str
    hypotheses: tuple[Hypothesis, ...]
    statement: Expression
    disjoint: frozenset[tuple[str, str]] = frozenset()
    proof: tuple[str, ...] | None = None


@dataclass
class _Scope:
    """Declarations of one block `${ ... $}`."""

    variables: set[str] = field(default_factory=set)
    hypotheses: list[Hypothesis] = field(default_factory=list)
    disjoint: set[tuple[str, str]] = field(default_factory=set)


@dataclass
class AxiomDatabase:
    """The assertions of a database in order, and its floating hypotheses by label."""

    constants: set[str] = field(default_factory=set)
    assertions: dict[str, Assertion] = field(default_factory=dict)
    floating: dict[str, Hypothesis] = field(default_factory=dict)

    def verify(self, assertion: Assertion) -> None:
        """Check the proof of a theorem. Raises ProofError."""
        if assertion.proof is None:
            raise ProofError(f"{assertion.label} has no proof")
        stack: list[Expression] = []
        own = {one.label: one for one in assertion.hypotheses}
        for number, label in enumerate(assertion.proof):
            try:
                self._apply(label, own, stack, assertion)
            except ProofError as error:
                raise ProofError(f"step {number + 1}, {label}: {error}", number) from None
        if stack != [assertion.statement]:
            raise ProofError("the proof ends with another statement", len(assertion.proof))

    def _apply(self, label: str, own: Mapping[str, Hypothesis], stack: list[Expression], goal: Assertion) -> None:
        known = own.get(label) or self.floating.get(label)
        if known is not None:
            stack.append(known.statement)
            return
        used = self.assertions.get(label)
        if used is None or label == goal.label:
            raise ProofError("no such label before the theorem")
        start = len(stack) - len(used.hypotheses)
        if start < 0:
            raise ProofError("the stack has too few statements")
        found: dict[str, Expression] = {}
        for hypothesis, statement in zip(used.hypotheses, stack[start:], strict=True):
            if hypothesis.floating:
                if statement[0] != hypothesis.statement[0]:
                    raise ProofError(f"{' '.join(statement)} has another type than {hypothesis.label}")
                found[hypothesis.statement[1]] = statement[1:]
            elif substituted(hypothesis.statement, found) != statement:
                raise ProofError(f"{' '.join(statement)} is not the hypothesis {hypothesis.label}")
        self._check_disjoint(used, found, goal)
        stack[start:] = [substituted(used.statement, found)]

    def _check_disjoint(self, used: Assertion, found: Mapping[str, Expression], goal: Assertion) -> None:
        variables = {one.statement[1] for one in self.floating.values()}
        for first, second in (pair for pair in used.disjoint if found.keys() >= set(pair)):
            for a in variables.intersection(found[first]):
                for b in variables.intersection(found[second]):
                    if a == b or tuple(sorted((a, b))) not in goal.disjoint:
                        raise ProofError(f"{a} and {b} must be disjoint")


def substituted(statement: Expression, found: Mapping[str, Expression]) -> Expression:
    """Return a statement with formulas in place of its variables."""
    return tuple(symbol for one in statement for symbol in found.get(one, (one,)))


def tokens_of(text: str) -> Iterator[str]:
    """Yield the tokens outside comments. Raises ProofError for an open comment."""
    commented = False
    for token in text.split():
        if token == "$(":
            commented = True
        elif token == "$)":
            commented = False
        elif not commented:
            yield token
    if commented:
        raise ProofError("a comment is not closed")


def read_database(text: str) -> AxiomDatabase:
    """Return a database whose proofs are all valid. Raises ProofError."""
    database, scopes, tokens = AxiomDatabase(), [_Scope()], tokens_of(text)
    label = ""
    for token in tokens:
        if token == "${":
            scopes.append(_Scope())
        elif token == "$}":
            if len(scopes) == 1:
                raise ProofError("a block is closed that was not opened")
            scopes.pop()
        elif token in ("$c", "$v", "$d"):
            _declare(database, scopes, token, _until(tokens, "$."))
        elif token in ("$f", "$e", "$a", "$p"):
            _add(database, scopes, label, token, tokens)
            label = ""
        elif token.startswith("$") or label:
            raise ProofError(f"unexpected {token!r}")
        else:
            label = token
    if len(scopes) > 1 or label:
        raise ProofError("the database ends within a block or a statement")
    return database


def _until(tokens: Iterator[str], end: str) -> list[str]:
    found: list[str] = []
    for token in tokens:
        if token == end:
            return found
        found.append(token)
    raise ProofError(f"{end} is missing")


def _declare(database: AxiomDatabase, scopes: Sequence[_Scope], kind: str, symbols: Sequence[str]) -> None:
    if kind == "$c":
        database.constants |= set(symbols)
    elif kind == "$v":
        scopes[-1].variables |= set(symbols)
    else:
        pairs = {tuple(sorted((a, b))) for i, a in enumerate(symbols) for b in symbols[i + 1 :]}
        scopes[-1].disjoint |= {(a, b) for a, b in pairs}


def _add(database: AxiomDatabase, scopes: Sequence[_Scope], label: str, kind: str, tokens: Iterator[str]) -> None:
    statement = tuple(_until(tokens, "$=" if kind == "$p" else "$."))
    variables = {name for scope in scopes for name in scope.variables}
    if not label or label in database.assertions or label in database.floating:
        raise ProofError(f"a statement has no label, or a label is repeated: {label!r}")
    if not statement or statement[0] not in database.constants:
        raise ProofError(f"{label} does not begin with a constant")
    if unknown := set(statement) - database.constants - variables:
        raise ProofError(f"{label} has undeclared symbols: {' '.join(sorted(unknown))}")
    if kind in ("$f", "$e"):
        hypothesis = Hypothesis(label, statement, kind == "$f")
        scopes[-1].hypotheses.append(hypothesis)
        if kind == "$f":
            database.floating[label] = hypothesis
        return
    proof = tuple(_until(tokens, "$.")) if kind == "$p" else None
    essential = [one for scope in scopes for one in scope.hypotheses if not one.floating]
    used = {s for one in essential for s in one.statement if s in variables}
    used |= variables.intersection(statement)
    hypotheses = tuple(
        one for scope in scopes for one in scope.hypotheses if not one.floating or one.statement[1] in used
    )
    disjoint = frozenset(pair for scope in scopes for pair in scope.disjoint)
    assertion = Assertion(label, hypotheses, statement, disjoint, proof)
    if proof is not None:
        database.verify(assertion)
    database.assertions[label] = assertion
