"""Runs programs against tests in a sandbox and compares here, on the host.

Into the sandbox go a program and the arguments of a test, out of it come results as data. What is due never
goes in, so that a program that ends early, patches builtins, overloads `==`, prints the protocol or looks for
the tests has nothing to gain: it has to give the right values. Foreign tests that are code (asserts) run in a
sandbox too, but in a run of their own that has the results of the program as data and not the program.
"""

from __future__ import annotations

import ast
import asyncio
import inspect
import json
import math
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Final, Literal

from ludus.rewards.code.unit_tests import Suite
from ludus.sandbox.base import MIB, Limits, Outcome, Sandbox
from ludus.worlds.code import guest_runner
from ludus.worlds.code.results import read_value, same_value, show_value

Record = dict[str, object]
LIMITS: Final = Limits(wall_s=6.0, cpu_s=5.0, output_bytes=MIB, files_out=0)
MOST_CHARACTERS = 200_000
_MOST_RUNS = 3
"""Runs of a program that ends before it has answered all calls."""
_MOST_PASSES = 60
_BATCH = 4
_LONGEST = 240


@dataclass(frozen=True, slots=True)
class TestCase:
    """A test. `given` is a tuple of arguments, a text for stdin, or the code of asserts; `due` the value, the
    text that has to be printed, or nothing."""

    name: str
    given: object
    due: object = None


@dataclass(frozen=True, slots=True)
class CodeTruth(Suite):
    """The truth of a task of programming.

    `function` calls `entry`, `stdin` runs a program, `checks` are asserts about `entry`. `setup` is what
    asserts need beforehand; `stub` stands before each program. `loose` accepts what public graders do: a
    value for a list of one, numbers that are printed otherwise. `reference` is a right program, `shape` its
    shape; both may be empty.
    """

    style: Literal["function", "stdin", "checks"] = "function"
    entry: str = "solve"
    cases: tuple[TestCase, ...] = ()
    setup: str = ""
    stub: str = ""
    loose: bool = False
    reference: str = ""
    shape: str = ""

    def chosen(self, which: Literal["visible", "all"]) -> tuple[TestCase, ...]:
        """The tests of one sort, in their order."""
        return self.cases if which == "all" else tuple(c for c in self.cases if c.name not in self.hidden)


@dataclass(frozen=True, slots=True)
class CodeVerdict:
    """Whether a test passed, and what happened in words."""

    case: TestCase
    passed: bool
    said: str = ""


@dataclass(frozen=True)
class Grading:
    """What tests gave. `broken` says why the program does not load, and is empty where it does."""

    verdicts: tuple[CodeVerdict, ...]
    broken: str = ""
    seconds: float = 0.0
    memory_bytes: int = 0

    def report(self, measured: bool) -> str:
        """As JSON for `ludus.rewards.code.unit_tests.read_report`; seconds and memory only if wanted, as they
        do not repeat."""
        said: Record = {"passed": {one.case.name: one.passed for one in self.verdicts}}
        said["loads"] = not self.broken
        if measured:
            said |= {"seconds": round(self.seconds, 4), "memory_bytes": self.memory_bytes}
        return json.dumps(said)


@dataclass
class _Use:
    """What the runs of a grading have used."""

    seconds: float = 0.0
    memory_bytes: int = 0
    broken: str = field(default="", init=False)

    def add(self, outcome: Outcome) -> None:
        """Count a run."""
        self.seconds += outcome.cpu_s
        self.memory_bytes = max(self.memory_bytes, outcome.peak_memory_bytes)


@dataclass(frozen=True)
class CodeGrader:
    """Grades programs. Raises WorldError where the sandbox breaks, never because of a program."""

    sandbox: Sandbox
    limits: Limits = LIMITS

    async def grade(self, program: str, truth: CodeTruth, cases: Sequence[TestCase]) -> Grading:
        """The verdicts on a program, one for each case."""
        if not program.strip() or len(program) > MOST_CHARACTERS:
            said = "there is no program" if not program.strip() else "the program is too long"
            return Grading(tuple(CodeVerdict(case, False, said) for case in cases), said)
        use = _Use()
        match truth.style:
            case "function":
                verdicts = await self._function(program, truth, cases, use)
            case "stdin":
                verdicts = await self._stdin(program, truth, cases, use)
            case "checks":
                verdicts = await self._checks(program, truth, cases, use)
        return Grading(tuple(verdicts), use.broken, use.seconds, use.memory_bytes)

    async def _function(
        self, program: str, truth: CodeTruth, cases: Sequence[TestCase], use: _Use
    ) -> list[CodeVerdict]:
        calls = [[guest_runner.encode(one) for one in _arguments(case)] for case in cases]
        results = await self._called(truth.stub + program, truth.entry, calls, use)
        return await asyncio.to_thread(_verdicts, cases, results, truth)

    async def _called(self, program: str, entry: str, calls: Sequence[list[object]], use: _Use) -> list[Record]:
        """A record for each call, in order; a program that ended early is started again behind that one."""
        results: list[Record] = []
        for _ in range(_MOST_RUNS):
            if len(results) == len(calls) or use.broken:
                break
            nonce = secrets.token_hex(16)
            lines = [nonce, entry, *(json.dumps(call) for call in calls[len(results) :])]
            outcome = await self.sandbox.run(
                f"{_inside()}\nrun_calls()\n",
                files={"solution.py": program.encode("utf-8", "surrogatepass")},
                stdin="\n".join(lines).encode(),
                limits=self.limits,
            )
            use.add(outcome)
            records = await asyncio.to_thread(_records, outcome, nonce)
            use.broken = next((str(one["broken"]) for one in records if "broken" in one), "")
            left = range(len(calls) - len(results))
            numbered = [one for one in records if type(one.get("number")) is int]
            done = {one["number"]: one for one in numbered if one["number"] in left}
            for number in left:
                if number not in done:
                    if not any("loaded" in one for one in records) and not use.broken:
                        use.broken = _end_of(outcome, self.limits)
                    results.append({"says": _end_of(outcome, self.limits)})
                    break
                results.append(done[number])
        rest: Record = {"says": use.broken or "not run: the program kept ending before its tests were done"}
        return [*results, *([rest] * (len(calls) - len(results)))]

    async def _stdin(self, program: str, truth: CodeTruth, cases: Sequence[TestCase], use: _Use) -> list[CodeVerdict]:
        verdicts: list[CodeVerdict] = []
        late = False
        for case in cases:
            if late or use.broken:
                verdicts.append(CodeVerdict(case, False, use.broken or "not run: an earlier test took too long"))
                continue
            stdin = str(case.given).encode("utf-8", "surrogatepass")
            outcome = await self.sandbox.run(truth.stub + program, stdin=stdin, limits=self.limits)
            use.add(outcome)
            passed = outcome.ok and same_output(outcome.text, str(case.due), truth.loose)
            error = (outcome.error_text.strip().splitlines() or [""])[-1]
            if not outcome.ok and error.startswith(("SyntaxError", "IndentationError", "TabError")):
                use.broken = error
            verdicts.append(CodeVerdict(case, passed, "" if passed else _printed(outcome, error, self.limits)))
            late = len([one for one in verdicts if one.said.startswith(_LATE)]) > 1
        return verdicts

    async def _checks(self, program: str, truth: CodeTruth, cases: Sequence[TestCase], use: _Use) -> list[CodeVerdict]:
        """The asserts ask for results, the program gives them, and so on until all of them are known."""
        tests = {case.name: _passing_over(str(case.given)) for case in cases}
        known: dict[str, list[Record]] = {name: [] for name in tests}
        found: dict[str, Record] = {}
        for _ in range(_MOST_PASSES):
            records = await self._tested(tests, known, truth)
            found |= {str(one["test"]): one for one in records if "verdict" in one}
            asked = [(str(one["test"]), one["call"]) for one in records if "call" in one]
            calls = [(name, call) for name, call in asked if name in tests and isinstance(call, list)]
            if not calls:
                break
            program_ = truth.stub + program
            results = await self._called(program_, truth.entry, [call for _, call in calls], use)
            for (name, _), result in zip(calls, results, strict=True):
                known[name].append(result)
            tests = {name: code for name, code in tests.items() if name in dict(calls)}
        return [_checked(case, found.get(case.name, {})) for case in cases]

    async def _tested(
        self, tests: Mapping[str, str], known: Mapping[str, list[Record]], truth: CodeTruth
    ) -> list[Record]:
        nonce = secrets.token_hex(16)
        given = {
            "nonce": nonce,
            "setup": truth.setup,
            "entry": truth.entry,
            "tests": tests,
            "known": {name: known[name] for name in tests},
        }
        outcome = await self.sandbox.run(
            f"{_inside()}\nrun_checks()\n", stdin=json.dumps(given).encode(), limits=self.limits
        )
        return await asyncio.to_thread(_records, outcome, nonce)


_LATE = "it took longer than"


def _verdicts(cases: Sequence[TestCase], results: Sequence[Record], truth: CodeTruth) -> list[CodeVerdict]:
    return [_verdict(case, one, truth) for case, one in zip(cases, results, strict=True)]


def _verdict(case: TestCase, record: Record, truth: CodeTruth) -> CodeVerdict:
    if "value" not in record:
        return CodeVerdict(case, False, str(record.get("says", "it gave nothing")))
    try:
        value = read_value(record["value"])
    except ValueError:
        return CodeVerdict(case, False, "it gave something that cannot be read")
    if same_value(value, case.due, truth.loose):
        return CodeVerdict(case, True)
    return CodeVerdict(case, False, f"it gave {show_value(value, _LONGEST)}")


def _checked(case: TestCase, record: Record) -> CodeVerdict:
    passed = record.get("verdict") is True and record.get("open") is False
    return CodeVerdict(case, passed, "" if passed else str(record.get("says") or "it could not be decided"))


def _arguments(case: TestCase) -> tuple[object, ...]:
    assert isinstance(case.given, tuple)
    return case.given


def _end_of(outcome: Outcome, limits: Limits) -> str:
    """How a program ended that should have gone on."""
    if outcome.timed_out:
        return f"{_LATE} {limits.cpu_s:g} s"
    if outcome.memory_exceeded:
        return "it needs too much memory"
    return f"the program ended by itself (exit code {outcome.exit}, signal {outcome.signal})"


def _printed(outcome: Outcome, error: str, limits: Limits) -> str:
    if outcome.timed_out or outcome.memory_exceeded:
        return _end_of(outcome, limits)
    if not outcome.ok:
        return f"it ended with exit code {outcome.exit}: {_short(error)}"
    return f"it printed {_short(outcome.text.rstrip())!r}"


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def _records(outcome: Outcome, nonce: str) -> list[Record]:
    """The records of a run, those that are none left out."""
    found = []
    for line in outcome.text.split("\n"):
        if line.startswith(nonce):
            try:
                record = json.loads(line.removeprefix(nonce))
            except (ValueError, RecursionError):
                continue
            if isinstance(record, dict):
                found.append(record)
    return found


@cache
def _inside() -> str:
    return inspect.getsource(guest_runner)


@cache
def _passing_over(code: str) -> str:
    """The code of tests, whose failed asserts are passed over where a result is not known yet."""
    return ast.unparse(ast.fix_missing_locations(_Over().visit(ast.parse(code))))


class _Over(ast.NodeTransformer):
    """Puts each assert into a `try` that asks whether a result was missing."""

    def visit_Assert(self, node: ast.Assert) -> ast.stmt:
        asks = ast.UnaryOp(ast.Not(), ast.Call(ast.Name("_open_", ast.Load()), [], []))
        handler = ast.ExceptHandler(ast.Name("Exception", ast.Load()), None, [ast.If(asks, [ast.Raise()], [])])
        return ast.Try([node], [handler], [], [])


def same_output(printed: str, due: str, loose: bool = False) -> bool:
    """Whether lines are equal but for white space at their ends and empty lines at the end.

    `loose` compares words instead, and numbers among them that have a point within 1e-6.
    """
    if _lines(printed) == _lines(due):
        return True
    if not loose:
        return False
    words, wanted = printed.split(), due.split()
    return len(words) == len(wanted) and all(map(_same_word, words, wanted))


def _lines(text: str) -> list[str]:
    lines = [line.rstrip() for line in text.split("\n")]
    while lines and not lines[-1]:
        lines.pop()
    return lines


def _same_word(word: str, due: str) -> bool:
    if word == due:
        return True
    try:
        return "." in due and math.isclose(float(word), float(due), rel_tol=1e-6, abs_tol=1e-6)
    except ValueError:
        return False
