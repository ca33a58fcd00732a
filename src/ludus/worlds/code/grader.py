"""Grading of programs: tests run in a sandbox, and results are compared on the host.

The sandbox receives a program and the arguments of a test and returns results as data. It never has the expected
value, so a program that exits early, patches builtins, overloads `==`, prints the protocol or searches for the
tests gains nothing: it has to return the correct values. Tests that are code (asserts) run in a separate sandbox,
which has the program's results as data but not the program.

Results are read from the JSON of `guest_runner.encode`. No set or dictionary of their elements is built, because a
program can choose integers that collide in Python's hash and take quadratic time. Elements of sets and keys of
dictionaries are compared as sorted texts, which are equal if the values are equal in Python (1, 1.0 and True).
"""

from __future__ import annotations

import ast
import asyncio
import inspect
import json
import math
import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Final, Literal

from ludus.rewards.code.sql_rows import number_key, tuple_key
from ludus.rewards.code.unit_tests import Suite
from ludus.sandbox.base import MIB, Limits, Outcome, Sandbox
from ludus.tools.fetch import stripped_lines
from ludus.worlds.code import guest_runner

Record = dict[str, object]
LIMITS: Final = Limits(wall_s=6.0, cpu_s=5.0, output_bytes=MIB, files_out=0)
MAX_CHARACTERS = 200_000
_MAX_RUNS = 3
"""Maximum runs of a program that exits before the last call."""
_MAX_PASSES = 60
_MAX_SHOWN = 240
_TOO_LONG: Final = "it took longer than"


@dataclass(frozen=True, slots=True)
class TestCase:
    """A test. `given` is a tuple of arguments, the text of stdin, or the code of asserts; `due` the expected value,
    the expected output, or None."""

    name: str
    given: object
    due: object = None


@dataclass(frozen=True, slots=True)
class CodeTruth(Suite):
    """The truth of a programming task.

    Tests of style `function` call `entry`, `stdin` run a program, `checks` are asserts about `entry`. `setup` is
    code that runs before asserts; `stub` is prepended to each program. `loose` accepts what public graders accept:
    a value instead of a list of it, and other formats of printed numbers. `reference` is a correct program and
    `shape` its shape; both may be empty.
    """

    style: Literal["function", "stdin", "checks"] = "function"
    entry: str = "solve"
    cases: tuple[TestCase, ...] = ()
    setup: str = ""
    stub: str = ""
    loose: bool = False
    reference: str = ""
    shape: str = ""

    @property
    def visible(self) -> tuple[TestCase, ...]:
        """The tests that the model sees."""
        return tuple(case for case in self.cases if case.name not in self.hidden)


@dataclass(frozen=True, slots=True)
class CodeVerdict:
    """Whether a test passed, and a description of the failure."""

    case: TestCase
    passed: bool
    failure: str = ""


@dataclass
class Grading:
    """Verdicts on a program, and the time and memory of its runs. `broken` is the reason why it fails to load."""

    verdicts: list[CodeVerdict] = field(default_factory=list)
    broken: str = ""
    seconds: float = 0.0
    memory_bytes: int = 0

    def add(self, outcome: Outcome) -> None:
        """Add the usage of a run."""
        self.seconds += outcome.cpu_s
        self.memory_bytes = max(self.memory_bytes, outcome.peak_memory_bytes)

    def report(self, measured: bool) -> str:
        """Return JSON for `ludus.rewards.code.unit_tests.read_report`; `measured` adds time and memory, which are
        not reproducible."""
        report: Record = {"passed": {one.case.name: one.passed for one in self.verdicts}, "loads": not self.broken}
        if measured:
            report |= {"seconds": round(self.seconds, 4), "memory_bytes": self.memory_bytes}
        return json.dumps(report)


@dataclass(frozen=True)
class CodeGrader:
    """Grades programs. Raises WorldError if the sandbox fails, never because of a program."""

    sandbox: Sandbox
    limits: Limits = LIMITS

    async def grade(self, program: str, truth: CodeTruth, cases: Sequence[TestCase]) -> Grading:
        """Return a verdict for each test."""
        if not program.strip() or len(program) > MAX_CHARACTERS:
            reason = "there is no program" if not program.strip() else "the program is too long"
            return Grading([CodeVerdict(case, False, reason) for case in cases], reason)
        styles = {"function": self._function, "stdin": self._stdin, "checks": self._checks}
        grading = Grading()
        await styles[truth.style](truth.stub + program, truth, cases, grading)
        return grading

    async def _function(self, program: str, truth: CodeTruth, cases: Sequence[TestCase], grading: Grading) -> None:
        calls = [[guest_runner.encode(one) for one in case.given] for case in cases if isinstance(case.given, tuple)]
        results = await self.results(program, truth.entry, calls, grading)
        verdicts = (_verdict(case, one, truth.loose) for case, one in zip(cases, results, strict=True))
        grading.verdicts = await asyncio.to_thread(list, verdicts)

    async def results(self, program: str, entry: str, calls: Sequence[list[object]], grading: Grading) -> list[Record]:
        """Return a record for each call; a program that exits early is restarted after the call where it exited."""
        results: list[Record] = []
        for _ in range(_MAX_RUNS):
            if len(results) == len(calls) or grading.broken:
                break
            nonce = secrets.token_hex(16)
            lines = [nonce, entry, *(json.dumps(call) for call in calls[len(results) :])]
            outcome = await self.sandbox.run(
                f"{inspect.getsource(guest_runner)}\nrun_calls()\n",
                files={"solution.py": program.encode("utf-8", "surrogatepass")},
                stdin="\n".join(lines).encode(),
                limits=self.limits,
            )
            grading.add(outcome)
            records = await asyncio.to_thread(_records, outcome, nonce)
            grading.broken = next((str(one["broken"]) for one in records if "broken" in one), "")
            left = range(len(calls) - len(results))
            numbered = [one for one in records if type(one.get("number")) is int]
            done = {one["number"]: one for one in numbered if one["number"] in left}
            for number in left:
                if number not in done:
                    if not any("loaded" in one for one in records) and not grading.broken:
                        grading.broken = _exit_reason(outcome, self.limits)
                    results.append({"error": _exit_reason(outcome, self.limits)})
                    break
                results.append(done[number])
        rest: Record = {"error": grading.broken or "not run: the program kept ending before its tests were done"}
        return [*results, *([rest] * (len(calls) - len(results)))]

    async def _stdin(self, program: str, truth: CodeTruth, cases: Sequence[TestCase], grading: Grading) -> None:
        verdicts = grading.verdicts
        for case in cases:
            has_timed_out = sum(one.failure.startswith(_TOO_LONG) for one in verdicts) > 1
            if has_timed_out or grading.broken:
                verdicts.append(CodeVerdict(case, False, grading.broken or "not run: an earlier test took too long"))
                continue
            stdin = str(case.given).encode("utf-8", "surrogatepass")
            outcome = await self.sandbox.run(program, stdin=stdin, limits=self.limits)
            grading.add(outcome)
            passed = outcome.ok and same_output(outcome.text, str(case.due), truth.loose)
            error = (outcome.error_text.strip().splitlines() or [""])[-1]
            if not outcome.ok and error.startswith(("SyntaxError", "IndentationError", "TabError")):
                grading.broken = error
            verdicts.append(CodeVerdict(case, passed, "" if passed else _stdin_failure(outcome, error, self.limits)))

    async def _checks(self, program: str, truth: CodeTruth, cases: Sequence[TestCase], grading: Grading) -> None:
        """Alternate between asserts and program until every result that the asserts need is available."""
        tests = {case.name: _with_open_asserts(str(case.given)) for case in cases}
        known: dict[str, list[Record]] = {name: [] for name in tests}
        found: dict[str, Record] = {}
        for _ in range(_MAX_PASSES):
            nonce = secrets.token_hex(16)
            given = {"nonce": nonce, "setup": truth.setup, "entry": truth.entry, "tests": tests}
            given["known"] = {name: known[name] for name in tests}
            asserts = f"{inspect.getsource(guest_runner)}\nrun_checks()\n"
            outcome = await self.sandbox.run(asserts, stdin=json.dumps(given).encode(), limits=self.limits)
            records = await asyncio.to_thread(_records, outcome, nonce)
            found |= {str(one["test"]): one for one in records if "verdict" in one}
            requested = [(str(one["test"]), one["call"]) for one in records if "call" in one]
            calls = [(name, call) for name, call in requested if name in tests and isinstance(call, list)]
            if not calls:
                break
            results = await self.results(program, truth.entry, [call for _, call in calls], grading)
            for (name, _), result in zip(calls, results, strict=True):
                known[name].append(result)
            tests = {name: code for name, code in tests.items() if name in dict(calls)}
        for case in cases:
            record = found.get(case.name, {})
            passed = record.get("verdict") is True and record.get("open") is False
            failure = "" if passed else str(record.get("error") or "it could not be decided")
            grading.verdicts.append(CodeVerdict(case, passed, failure))


def _verdict(case: TestCase, record: Record, loose: bool) -> CodeVerdict:
    if "value" not in record:
        return CodeVerdict(case, False, str(record.get("error", "it gave nothing")))
    try:
        value = read_value(record["value"])
    except ValueError:
        return CodeVerdict(case, False, "it gave something that cannot be read")
    if same_value(value, case.due, loose):
        return CodeVerdict(case, True)
    return CodeVerdict(case, False, f"it gave {shorten(repr(value))}")


def _exit_reason(outcome: Outcome, limits: Limits) -> str:
    """Return why a program ended early."""
    if outcome.timed_out:
        return f"{_TOO_LONG} {limits.cpu_s:g} s"
    if outcome.memory_exceeded:
        return "it needs too much memory"
    return f"the program ended by itself (exit code {outcome.exit}, signal {outcome.signal})"


def _stdin_failure(outcome: Outcome, error: str, limits: Limits) -> str:
    if outcome.timed_out or outcome.memory_exceeded:
        return _exit_reason(outcome, limits)
    if not outcome.ok:
        return f"it ended with exit code {outcome.exit}: {shorten(error)}"
    return f"it printed {shorten(outcome.text.rstrip())!r}"


def shorten(text: str, longest: int = _MAX_SHOWN) -> str:
    """Truncate a text."""
    return text if len(text) <= longest else f"{text[:longest]}..."


def _records(outcome: Outcome, nonce: str) -> list[Record]:
    found = []
    for line in outcome.text.split("\n"):
        if line.startswith(nonce):
            with suppress(ValueError, RecursionError):
                found.append(json.loads(line.removeprefix(nonce)))
    return [record for record in found if isinstance(record, dict)]


@cache
def _with_open_asserts(code: str) -> str:
    """Rewrite the code of tests so that asserts do not fail while a result is missing."""
    return ast.unparse(ast.fix_missing_locations(_OpenAsserts().visit(ast.parse(code))))


class _OpenAsserts(ast.NodeTransformer):
    """AST transformer that wraps each assert in a `try`, which ignores exceptions if a result was missing."""

    def visit_Assert(self, node: ast.Assert) -> ast.stmt:
        is_closed = ast.UnaryOp(ast.Not(), ast.Call(ast.Name("_open_", ast.Load()), [], []))
        handler = ast.ExceptHandler(ast.Name("Exception", ast.Load()), None, [ast.If(is_closed, [ast.Raise()], [])])
        return ast.Try([node], [handler], [], [])


def same_output(printed: str, due: str, loose: bool = False) -> bool:
    """Return whether lines are equal except for white space at their ends and empty lines at the end.

    `loose` compares words instead, and numbers with a decimal point within 1e-6.
    """
    if stripped_lines(printed) == stripped_lines(due):
        return True
    words, wanted = printed.split(), due.split()
    return loose and len(words) == len(wanted) and all(map(_same_word, words, wanted))


def _same_word(word: str, due: str) -> bool:
    with suppress(ValueError):
        return word == due or ("." in due and math.isclose(float(word), float(due), rel_tol=1e-6, abs_tol=1e-6))
    return False


# Comparison of results with expected values, in linear time except for sorting

_TOLERANCE = 1e-9


class LongInt(int):
    """An integer that is shown in hexadecimal, because decimal conversion takes quadratic time."""

    def __repr__(self) -> str:
        return hex(self)


@dataclass(frozen=True, slots=True, repr=False)
class Unordered:
    """A set, frozenset or dict, sorted by the texts of its elements or keys.

    `items` are pairs by text: an element and None, or a key and its value (the last one of a repeated key).
    """

    kind: str
    items: Mapping[str, Sequence[object]]

    def __repr__(self) -> str:
        is_dict = self.kind == "dict"
        listed = ", ".join(f"{one!r}: {value!r}" if is_dict else repr(one) for one, value in self.items.values())
        if is_dict or (self.kind == "set" and self.items):
            return f"{{{listed}}}"
        return f"{self.kind}({f'{{{listed}}}' if self.items else ''})"


def read_value(encoded: object) -> object:
    """Return a value encoded by `guest_runner.encode`. Raises ValueError for anything else."""
    return guest_runner.decode(encoded, _MAKERS)


def same_value(value: object, due: object, loose: bool = False) -> bool:
    """Return whether a result equals the expected plain value.

    Tuples equal lists, and floats may differ by 1e-9 relatively.
    `loose` also accepts a value if a list of it is expected, as APPS does.
    """
    try:
        wanted = read_value(guest_runner.encode(due))
    except ValueError:  # such a value equals no result
        return False
    if _equal(value, wanted):
        return True
    return loose and isinstance(wanted, list) and len(wanted) == 1 and _equal(value, wanted[0])


def _unordered(kind: str, items: list[object]) -> Unordered:
    by_key: dict[str, list[object]] = {}
    for pair in items if kind == "dict" else [[item, None] for item in items]:
        if not isinstance(pair, list) or len(pair) != 2:
            raise ValueError("a dictionary is made of pairs")
        by_key[_key(pair[0])] = pair
    return Unordered(kind, {key: by_key[key] for key in sorted(by_key)})


_MAKERS = guest_runner.MAKERS | {
    **{kind: partial(_unordered, kind) for kind in ("set", "frozenset", "dict")},
    "int": lambda text: LongInt(text, 16),
}


def _key(value: object) -> str:
    """Return a text that equal elements share. Raises ValueError for unhashable values."""
    match value:
        case None:
            return "none"
        case str():
            return f"str {value}"
        case bytes():
            return f"bytes {value.hex()}"
        case complex() if value.imag:
            return f"complex {value.real.hex()} {value.imag.hex()}"
        case int() | float() | complex():
            return f"number {number_key(value.real)}"
        case tuple():
            return f"tuple {tuple_key([_key(one) for one in value])}"
        case Unordered(kind="frozenset"):
            return f"frozenset {tuple_key([*value.items])}"
    raise ValueError("an element of a set or a key that cannot be hashed")


def _equal(value: object, due: object) -> bool:
    if isinstance(value, list | tuple) and isinstance(due, list | tuple):
        return len(value) == len(due) and all(map(_equal, value, due))
    if isinstance(value, Unordered) and isinstance(due, Unordered):
        same_keys = value.kind == due.kind and value.items.keys() == due.items.keys()
        return same_keys and all(_equal(value.items[key][1], due.items[key][1]) for key in value.items)
    if isinstance(value, int | float) and isinstance(due, int | float):
        if value == due or (isinstance(value, int) and isinstance(due, int)):
            return value == due
        with suppress(OverflowError):
            return math.isclose(value, due, rel_tol=_TOLERANCE, abs_tol=_TOLERANCE)
        return False
    return type(value) is type(due) and value == due
