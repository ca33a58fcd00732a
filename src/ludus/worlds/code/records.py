"""Tasks of somebody's own or of a public set: JSON lines, laid out in one of several ways.

`own` is described in the recipe's README; `humaneval`, `mbpp`, `apps`, `livecodebench` and `kodcode` are the
files that these sets are published as, one task a line.
"""

from __future__ import annotations

import ast
import base64
import gzip
import hashlib
import json
import logging
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Final, Literal

from ludus.errors import UserError
from ludus.tools.fetch import json_lines
from ludus.types import JSON, Message, Task
from ludus.untrusted.pickles import load_pickle
from ludus.worlds.code.grader import CodeTruth, TestCase

Format = Literal["own", "humaneval", "mbpp", "apps", "livecodebench", "kodcode"]
_LOG: Final = logging.getLogger(__name__)
SPLITS: Final = ("train", "validation", "test")
_SHOWN: Final = 2
_LONGEST: Final = 100_000_000
_HEAVIEST: Final = 1e9
Record = Mapping[str, JSON]


class _Fault(Exception):
    """What is wrong with a record."""


@dataclass(frozen=True)
class _Draft:
    """A task that was read: its id, what is asked for, its truth, its split and its family."""

    id: str
    asked: str
    truth: CodeTruth
    split: str
    family: str


def load_tasks(path: Path, layout: Format, system: str) -> dict[str, tuple[Task, ...]]:
    """The tasks of a file by split; a record's own `split` goes before that of its set.

    `humaneval` and `livecodebench` are the split test, `mbpp` has the published ranges of its ids, of the
    others a hash of the text decides, 8 : 1 : 1. Raises UserError, with the line, for a record that is none
    and for an id that was there before.
    """
    hint = f"A line is a task as {layout} lays it out (env.settings.format)."
    tasks: dict[str, list[Task]] = {split: [] for split in SPLITS}
    seen: dict[str, int] = {}
    for number, line in enumerate(_lines(path), 1):
        if not line.strip():
            continue
        try:
            draft = _READERS[layout](_record(line), number)
            if draft.id in seen:
                raise _Fault(f"its id {draft.id!r} is that of line {seen[draft.id]}")
            if draft.split not in SPLITS:
                raise _Fault(f'"split" is {draft.split!r}, not one of {", ".join(SPLITS)}')
        except _Fault as fault:
            raise UserError(f"{path}, line {number}, is not a task: {fault}.", hint) from None
        seen[draft.id] = number
        tasks[draft.split].append(_task(draft, system))
    if not seen:
        raise UserError(f"{path} holds no tasks.", hint)
    return {split: tuple(found) for split, found in tasks.items()}


def _lines(path: Path) -> list[str]:
    try:
        data = path.read_bytes()
        text = gzip.decompress(data) if path.suffix == ".gz" else data
        return json_lines(text.decode("utf-8"))
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read: {error}.", "Check env.settings.data.") from error


def _record(text: str) -> Record:
    try:
        record: JSON = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _Fault(f"it is no JSON ({error})") from None
    if not isinstance(record, dict):
        raise _Fault("it is no JSON object")
    return record


def _task(draft: _Draft, system: str) -> Task:
    prompt = (Message(role="system", content=system), Message(role="user", content=draft.asked))
    tags = {"split": draft.split, "family": draft.family, "style": draft.truth.style}
    return Task(draft.id, prompt, draft.truth, tags)


def _own(record: Record, line: int) -> _Draft:
    asked, tests = _text(record, "prompt"), record.get("tests")
    if not isinstance(tests, list) or not tests:
        raise _Fault('"tests" is no list of tests')
    entry = record.get("entry")
    if entry is not None and not (isinstance(entry, str) and entry.isidentifier()):
        raise _Fault('"entry" is no name of a function')
    shown = record.get("shown", min(_SHOWN, len(tests) - 1))
    if not isinstance(shown, int) or not 0 <= shown <= len(tests):
        raise _Fault('"shown" is no number of tests')
    given = [_object(test) for test in tests]
    if isinstance(entry, str):
        pairs: list[tuple[object, object]] = [(_arguments(one), one.get("result")) for one in given]
    else:
        pairs = [(_text(one, "stdin"), _text(one, "stdout")) for one in given]
    weights = [_weight(one) for one in given]
    truth = _truth(pairs, shown, str(entry or ""), _optional(record, "solution"), weights=weights)
    return _Draft(
        str(record.get("id", f"line-{line}")),
        asked,
        truth,
        str(record.get("split", _by_hash(asked))),
        str(record.get("family", "file")),
    )


def _human_eval(record: Record, line: int) -> _Draft:
    del line
    prompt, entry = _text(record, "prompt"), _text(record, "entry_point")
    code = _parsed(f"{_text(record, 'test')}\n\ncheck(candidate)\n", "test")
    truth = CodeTruth(
        fail_to_pass=("check",),
        hidden=frozenset({"check"}),
        style="checks",
        entry=entry,
        cases=(TestCase("check", code),),
        setup=_parsed(prompt, "prompt"),
        stub=prompt + "\n",
        reference=prompt + _optional(record, "canonical_solution"),
    )
    asked = f"Complete this function. The program is the whole of it.\n\n{prompt}"
    return _Draft(_text(record, "task_id"), asked, truth, str(record.get("split", "test")), "humaneval")


def _mbpp(record: Record, line: int) -> _Draft:
    del line
    number = record.get("task_id")
    if not isinstance(number, int):
        raise _Fault('"task_id" is no number')
    asked = _text(record, "prompt" if "prompt" in record else "text")
    checks = [*_texts(record, "test_list"), *_texts(record, "challenge_test_list")]
    if not checks:
        raise _Fault('"test_list" is empty')
    solution = _parsed(_text(record, "code"), "code")
    names = tuple(f"assert {place}" for place in range(1, len(checks) + 1))
    cases = tuple(TestCase(name, _parsed(check, "test_list")) for name, check in zip(names, checks, strict=True))
    truth = CodeTruth(
        fail_to_pass=names,
        hidden=frozenset(names[1:]),
        style="checks",
        entry=_called_in(checks[0], solution),
        cases=cases,
        setup="\n".join([*_texts(record, "test_imports"), _optional(record, "test_setup_code")]),
        reference=solution,
    )
    split = "train" if number > 600 else "validation" if number > 510 else "test" if number > 10 else "train"
    shown = f"{asked}\nYour code should pass this test, and others:\n{checks[0]}"
    return _Draft(f"MBPP/{number}", shown, truth, str(record.get("split", split)), "mbpp")


def _apps(record: Record, line: int) -> _Draft:
    tests = _object(_inner(record, "input_output"))
    inputs, outputs = tests.get("inputs"), tests.get("outputs")
    if not isinstance(inputs, list) or not isinstance(outputs, list) or not inputs:
        raise _Fault('"input_output" has no inputs and outputs')
    if len(inputs) != len(outputs):
        raise _Fault(f"it has {len(inputs)} inputs and {len(outputs)} outputs")
    entry = tests.get("fn_name")
    pairs: list[tuple[object, object]] = []
    for given, due in zip(inputs, outputs, strict=True):
        if isinstance(entry, str):
            pairs.append((tuple(given) if isinstance(given, list) else (given,), due))
        else:
            pairs.append((_as_lines(given), _as_lines(due)))
    solutions = _inner(record, "solutions") if record.get("solutions") else []
    first = solutions[0] if isinstance(solutions, list) and solutions else ""
    truth = _truth(pairs, min(_SHOWN, len(pairs) - 1), str(entry or ""), str(first), loose=True)
    asked = _asked(_text(record, "question"), record, str(entry or ""))
    name = str(record.get("problem_id", record.get("id", f"line-{line}")))
    family = str(record.get("difficulty", "apps"))
    return _Draft(f"APPS/{name}", asked, truth, str(record.get("split", _by_hash(asked))), family)


def _live_code_bench(record: Record, line: int) -> _Draft:
    shown, hidden = _tests(record, "public_test_cases"), _tests(record, "private_test_cases")
    if not shown + hidden:
        raise _Fault("it has no test cases")
    metadata = _inner(record, "metadata") if record.get("metadata") else {}
    entry = _object(metadata).get("func_name")
    pairs: list[tuple[object, object]] = []
    for test in shown + hidden:
        given, due = _text(test, "input"), _text(test, "output")
        if isinstance(entry, str):
            lines = [one for one in given.split("\n") if one.strip()]
            pairs.append((tuple(_json(one) for one in lines), _json(due)))
        else:
            pairs.append((given, due))
    truth = _truth(pairs, len(shown), str(entry or ""), _optional(record, "solution"), loose=True)
    asked = _asked(_text(record, "question_content"), record, str(entry or ""))
    name = str(record.get("question_id", f"line-{line}"))
    family = str(record.get("difficulty", "livecodebench"))
    return _Draft(f"LCB/{name}", asked, truth, str(record.get("split", "test")), family)


def _kod_code(record: Record, line: int) -> _Draft:
    solution = _parsed(_text(record, "solution"), "solution")
    module = ast.parse(_parsed(_text(record, "test"), "test"))
    tests = [node for node in module.body if isinstance(node, ast.FunctionDef) and _is_plain_test(node)]
    taken = [node for node in module.body if isinstance(node, ast.ImportFrom) and node.module == "solution"]
    names = _taken_names(taken, module, solution)
    if not tests:
        raise _Fault('"test" has no test function without fixtures, parameters and pytest')
    aside = (ast.FunctionDef, ast.ClassDef)
    setup = [
        node
        for node in module.body
        if node not in taken and not (isinstance(node, aside) and node.name.lower().startswith("test"))
    ]
    cases = tuple(TestCase(test.name, f"{ast.unparse(test)}\n\n{test.name}()") for test in tests)
    truth = CodeTruth(
        fail_to_pass=tuple(case.name for case in cases),
        hidden=frozenset(case.name for case in cases[1:]),
        style="checks",
        entry=names[0],
        cases=cases,
        setup="\n".join(ast.unparse(node) for node in setup if not _names_pytest(node)),
        reference=solution,
    )
    asked = f"{_text(record, 'question')}\n\n{_to_define(record, names)}"
    shown = f"{asked}\nYour code should pass this test, and others:\n{ast.unparse(tests[0])}"
    name = str(record.get("question_id", f"line-{line}"))
    family = str(record.get("subset", "kodcode"))
    if left_out := sum(_is_test(node) for node in module.body) - len(tests):
        _LOG.warning("KodCode/%s: %d of its tests use fixtures, parameters or pytest, left out.", name, left_out)
    return _Draft(f"KodCode/{name}", shown, truth, str(record.get("split", _by_hash(asked))), family)


def _taken_names(taken: Sequence[ast.ImportFrom], module: ast.Module, solution: str) -> list[str]:
    """What the tests take from the solution: by name, or without one all of its definitions that they use."""
    aliases = [alias for node in taken for alias in node.names]
    if any(alias.asname for alias in aliases):
        raise _Fault('"test" imports something of "solution" by another name')
    names = [alias.name for alias in aliases if alias.name != "*"]
    if not names:
        used = {node.id for node in ast.walk(module) if isinstance(node, ast.Name)}
        kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
        defined = [node.name for node in ast.parse(solution).body if isinstance(node, kinds)]
        names = [name for name in defined if name in used]
    if not names:
        raise _Fault('"test" uses nothing of "solution"')
    return list(dict.fromkeys(names))


def _to_define(record: Record, names: Sequence[str]) -> str:
    """What the program has to define, by the declarations of `test_info` if it has them."""
    infos = record.get("test_info")
    told = {
        str(info.get("function_name")): str(info.get("function_declaration") or "").strip().rstrip(":")
        for info in (infos if isinstance(infos, list) else [])
        if isinstance(info, dict)
    }
    return "Define " + ", ".join(f"`{told.get(name) or name}`" for name in names) + "."


def _is_plain_test(node: ast.FunctionDef) -> bool:
    """Whether a test is called without fixtures and uses nothing of pytest."""
    arguments = node.args
    given = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    return node.name.startswith("test") and not given and not node.decorator_list and not _names_pytest(node)


def _is_test(node: ast.stmt) -> bool:
    return isinstance(node, ast.FunctionDef) and node.name.startswith("test")


def _names_pytest(node: ast.AST) -> bool:
    named = {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}
    return "pytest" in named | {one.name for one in ast.walk(node) if isinstance(one, ast.alias)}


_READERS: Mapping[Format, Callable[[Record, int], _Draft]] = {
    "own": _own,
    "humaneval": _human_eval,
    "mbpp": _mbpp,
    "apps": _apps,
    "livecodebench": _live_code_bench,
    "kodcode": _kod_code,
}


def _truth(
    pairs: Sequence[tuple[object, object]],
    shown: int,
    entry: str,
    reference: str,
    loose: bool = False,
    weights: Sequence[float] = (),
) -> CodeTruth:
    """Tests of a function, or without one of a program that reads and prints; the first ones are shown."""
    names = tuple(f"test {number}" for number in range(1, len(pairs) + 1))
    return CodeTruth(
        fail_to_pass=names,
        hidden=frozenset(names[shown:]),
        weights=dict(zip(names, weights, strict=False)),
        style="function" if entry else "stdin",
        entry=entry,
        cases=tuple(TestCase(name, given, due) for name, (given, due) in zip(names, pairs, strict=True)),
        loose=loose,
        reference=reference,
    )


def _asked(question: str, record: Record, entry: str) -> str:
    starter = _optional(record, "starter_code").strip()
    if starter:
        return f"{question}\n\nBegin with:\n{starter}"
    if entry:
        return f"{question}\n\nWrite a function {entry}."
    return f"{question}\n\nThe program reads from standard input and prints to standard output."


def _tests(record: Record, key: str) -> list[Record]:
    """Test cases: a list, JSON text of one, or that compressed as LiveCodeBench does."""
    given: JSON = record.get(key) or []
    if isinstance(given, str):
        text = given
        try:
            given = json.loads(text)
        except ValueError:
            given = _json(_unpacked(text, key))
    if not isinstance(given, list):
        raise _Fault(f'"{key}" is no list')
    return [_object(test) for test in given]


def _unpacked(text: str, key: str) -> str:
    try:
        data = zlib.decompressobj().decompress(base64.b64decode(text, validate=True), _LONGEST)
        value = load_pickle(data)
    except (ValueError, zlib.error, UnpicklingError) as error:
        raise _Fault(f'"{key}" cannot be unpacked ({error})') from None
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    if not isinstance(value, str):
        raise _Fault(f'"{key}" holds no text')
    return value


def _called_in(check: str, solution: str) -> str:
    """The function of the solution that an assert calls."""
    defined = {node.name for node in ast.walk(ast.parse(solution)) if isinstance(node, ast.FunctionDef)}
    called = [
        node.func.id
        for node in ast.walk(ast.parse(check))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in defined
    ]
    if not called:
        raise _Fault("its first test calls no function of its code")
    return called[0]


def _parsed(code: str, key: str) -> str:
    """Python code. Raises _Fault for what is none."""
    try:
        ast.parse(code)
    except (SyntaxError, ValueError, RecursionError) as error:
        raise _Fault(f'"{key}" is no Python ({error})') from None
    return code


def _inner(record: Record, key: str) -> JSON:
    """A value that may be given as JSON text."""
    value = record.get(key)
    return _json(value) if isinstance(value, str) else value


def _json(text: str) -> JSON:
    try:
        value: JSON = json.loads(text)
    except (ValueError, RecursionError):
        raise _Fault(f"{text[:40]!r} is no JSON") from None
    return value


def _object(value: JSON) -> Record:
    if not isinstance(value, dict):
        raise _Fault(f"{str(value)[:40]!r} is no JSON object")
    return value


def _arguments(test: Record) -> tuple[JSON, ...]:
    given = test.get("args")
    if not isinstance(given, list) or "result" not in test:
        raise _Fault('a test is {"args": [...], "result": ...}')
    return tuple(given)


def _weight(test: Record) -> float:
    weight = test.get("weight", 1)
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight < _HEAVIEST:
        raise _Fault(f'"weight" is no number above 0 and below {_HEAVIEST:g}')
    return float(weight)


def _text(record: Record, key: str) -> str:
    value = record.get(key)
    if not isinstance(value, str):
        raise _Fault(f'"{key}" is not a text')
    return value


def _optional(record: Record, key: str) -> str:
    return _text(record, key) if record.get(key) is not None else ""


def _texts(record: Record, key: str) -> list[str]:
    value = record.get(key) or []
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        raise _Fault(f'"{key}" is no list of texts')
    return [str(one) for one in value]


def _as_lines(value: JSON) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _by_hash(text: str) -> str:
    share = hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()[0] / 256
    return "train" if share < 0.8 else "validation" if share < 0.9 else "test"
