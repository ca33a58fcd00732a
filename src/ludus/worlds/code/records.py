"""Loaders of tasks from JSON-lines files: custom tasks and published data sets.

The format `own` is described in the recipe's README; `humaneval`, `mbpp`, `apps`, `livecodebench` and `kodcode`
are the published formats of these data sets, one task per line.
"""

from __future__ import annotations

import ast
import base64
import json
import logging
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from pickle import UnpicklingError
from typing import Final, Literal, cast

from ludus.envs.task_files import Record, RecordError, load_tasks, split_by_hash, text_field
from ludus.types import JSON, Message, Task
from ludus.untrusted.pickles import load_pickle
from ludus.worlds.code.grader import CodeTruth, TestCase

Format = Literal["own", "humaneval", "mbpp", "apps", "livecodebench", "kodcode"]
log = logging.getLogger(__name__)
_NUM_SHOWN: Final = 2
_MAX_UNPACKED: Final = 100_000_000
_MAX_WEIGHT: Final = 1e9


def load_code_tasks(path: Path, layout: Format, system: str) -> dict[str, tuple[Task, ...]]:
    """Return the tasks of a file by split; the `split` of a record overrides that of its data set.

    `humaneval` and `livecodebench` belong to the split test, `mbpp` has the published ranges of ids, and the
    others are split by a hash of the text, 8 : 1 : 1. Raises UserError, naming the line, for an invalid record
    or a repeated id.
    """

    def read(record: Record, line: int) -> Task:
        id_, prompt, truth, split, family = _READERS[layout](record, line)
        tags = {"split": str(record.get("split", split)), "family": family, "style": truth.style}
        messages = (Message(role="system", content=system), Message(role="user", content=prompt))
        return Task(id_, messages, truth, tags)

    return load_tasks(path, read, f"A line is a task in the format {layout} (env.settings.format).", parse=json.loads)


_TaskFields = tuple[str, str, CodeTruth, str, str]
"""A task: its id, prompt, truth, default split and family."""
_Pair = tuple[object, object]
"""Arguments and result of a call, or stdin and stdout of a program."""


def _own(record: Record, line: int) -> _TaskFields:
    prompt, tests, entry = text_field(record, "prompt"), record.get("tests"), record.get("entry")
    if not isinstance(tests, list) or not tests:
        raise RecordError('"tests" is not a list of tests')
    if entry is not None and not (isinstance(entry, str) and entry.isidentifier()):
        raise RecordError('"entry" is not the name of a function')
    num_shown = record.get("shown", min(_NUM_SHOWN, len(tests) - 1))
    if not isinstance(num_shown, int) or not 0 <= num_shown <= len(tests):
        raise RecordError('"shown" is not a number of tests')
    given = [_object(test) for test in tests]
    pairs = [_call(one) if entry else (text_field(one, "stdin"), text_field(one, "stdout")) for one in given]
    weights = [_weight(one) for one in given]
    truth = _pair_truth(pairs, num_shown, entry, _optional(record, "solution"))
    truth = replace(truth, loose=False, weights=dict(zip(truth.fail_to_pass, weights, strict=True)))
    name, family = str(record.get("id", f"line-{line}")), str(record.get("family", "file"))
    return name, prompt, truth, split_by_hash(prompt), family


def _humaneval(record: Record, _: int) -> _TaskFields:
    prompt, entry = text_field(record, "prompt"), text_field(record, "entry_point")
    case = TestCase("check", _python(f"{text_field(record, 'test')}\n\ncheck(candidate)\n", "test"))
    solution = prompt + _optional(record, "canonical_solution")
    truth = _truth("checks", entry, [case], 0, solution)
    truth = replace(truth, setup=_python(prompt, "prompt"), stub=prompt + "\n")
    shown = f"Complete this function. The program is the whole of it.\n\n{prompt}"
    return text_field(record, "task_id"), shown, truth, "test", "humaneval"


def _mbpp(record: Record, _: int) -> _TaskFields:
    number = record.get("task_id")
    if not isinstance(number, int):
        raise RecordError('"task_id" is not a number')
    prompt = text_field(record, "prompt" if "prompt" in record else "text")
    checks = [*_texts(record, "test_list"), *_texts(record, "challenge_test_list")]
    if not checks:
        raise RecordError('"test_list" is empty')
    solution = _python(text_field(record, "code"), "code")
    cases = [TestCase(f"assert {i}", _python(check, "test_list")) for i, check in enumerate(checks, 1)]
    setup = "\n".join([*_texts(record, "test_imports"), _optional(record, "test_setup_code")])
    truth = replace(_truth("checks", _called_function(checks[0], solution), cases, 1, solution), setup=setup)
    split = "train" if number > 600 else "validation" if number > 510 else "test" if number > 10 else "train"
    return f"MBPP/{number}", _with_test(prompt, checks[0]), truth, split, "mbpp"


def _apps(record: Record, line: int) -> _TaskFields:
    tests = _object(_decode_field(record, "input_output"))
    inputs, outputs, entry = tests.get("inputs"), tests.get("outputs"), tests.get("fn_name")
    if not isinstance(inputs, list) or not isinstance(outputs, list) or not inputs:
        raise RecordError('"input_output" has no inputs and outputs')
    if len(inputs) != len(outputs):
        raise RecordError(f"the record has {len(inputs)} inputs and {len(outputs)} outputs")
    pairs: list[_Pair] = [(_joined(given), _joined(due)) for given, due in zip(inputs, outputs, strict=True)]
    if isinstance(entry, str):
        arguments = [tuple(given) if isinstance(given, list) else (given,) for given in inputs]
        pairs = list(zip(arguments, outputs, strict=True))
    solutions = _decode_field(record, "solutions") if record.get("solutions") else []
    first = solutions[0] if isinstance(solutions, list) and solutions else ""
    truth = _pair_truth(pairs, min(_NUM_SHOWN, len(pairs) - 1), entry, str(first))
    prompt = _with_interface(text_field(record, "question"), record, entry)
    name = record.get("problem_id", record.get("id", f"line-{line}"))
    return f"APPS/{name}", prompt, truth, split_by_hash(prompt), str(record.get("difficulty", "apps"))


def _livecodebench(record: Record, line: int) -> _TaskFields:
    shown, hidden = _test_cases(record, "public_test_cases"), _test_cases(record, "private_test_cases")
    if not shown + hidden:
        raise RecordError("the record has no test cases")
    entry = _object(_decode_field(record, "metadata") if record.get("metadata") else {}).get("func_name")
    pairs: list[_Pair] = [(text_field(test, "input"), text_field(test, "output")) for test in shown + hidden]
    if isinstance(entry, str):
        lines = [(str(given).split("\n"), str(due)) for given, due in pairs]
        pairs = [(tuple(_json(one) for one in given if one.strip()), _json(due)) for given, due in lines]
    truth = _pair_truth(pairs, len(shown), entry, _optional(record, "solution"))
    prompt = _with_interface(text_field(record, "question_content"), record, entry)
    name, family = record.get("question_id", f"line-{line}"), str(record.get("difficulty", "livecodebench"))
    return f"LCB/{name}", prompt, truth, "test", family


def _kodcode(record: Record, line: int) -> _TaskFields:
    solution = _python(text_field(record, "solution"), "solution")
    module = ast.parse(_python(text_field(record, "test"), "test"))
    named = [
        n for n in module.body if isinstance(n, ast.FunctionDef | ast.ClassDef) and n.name.lower().startswith("test")
    ]
    every = [node for node in named if isinstance(node, ast.FunctionDef) and node.name.startswith("test")]
    tests = [test for test in every if _is_plain(test)]
    imports = [node for node in module.body if isinstance(node, ast.ImportFrom) and node.module == "solution"]
    names = _imported_names(imports, module, solution)
    if not tests:
        raise RecordError('"test" has no test function without fixtures, parameters or pytest')
    setup = [node for node in module.body if node not in [*imports, *named] and not _uses_pytest(node)]
    cases = [TestCase(test.name, f"{ast.unparse(test)}\n\n{test.name}()") for test in tests]
    truth = replace(_truth("checks", names[0], cases, 1, solution), setup="\n".join(map(ast.unparse, setup)))
    prompt = f"{text_field(record, 'question')}\n\n{_declarations(record, names)}"
    name, family = record.get("question_id", f"line-{line}"), str(record.get("subset", "kodcode"))
    if skipped := len(every) - len(tests):
        log.warning("KodCode/%s: skipped %d tests that use fixtures, parameters or pytest.", name, skipped)
    return f"KodCode/{name}", _with_test(prompt, ast.unparse(tests[0])), truth, split_by_hash(prompt), family


_READERS: Mapping[Format, Callable[[Record, int], _TaskFields]] = {
    "own": _own,
    "humaneval": _humaneval,
    "mbpp": _mbpp,
    "apps": _apps,
    "livecodebench": _livecodebench,
    "kodcode": _kodcode,
}


def _imported_names(imports: Sequence[ast.ImportFrom], module: ast.Module, solution: str) -> list[str]:
    """Return the names imported by the tests from the solution, or else all of its definitions that they use."""
    aliases = [alias for node in imports for alias in node.names]
    if any(alias.asname for alias in aliases):
        raise RecordError('"test" imports from "solution" under an alias')
    names = [alias.name for alias in aliases if alias.name != "*"]
    if not names:
        used = {node.id for node in ast.walk(module) if isinstance(node, ast.Name)}
        kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
        names = [n.name for n in ast.parse(solution).body if isinstance(n, kinds) and n.name in used]
    if not names:
        raise RecordError('"test" does not use any definition of "solution"')
    return list(dict.fromkeys(names))


def _declarations(record: Record, names: Sequence[str]) -> str:
    """Return the prompt's list of names to define, with the declarations of `test_info` if present."""
    infos = record.get("test_info")
    declared = {
        str(info.get("function_name")): str(info.get("function_declaration") or "").strip().rstrip(":")
        for info in (infos if isinstance(infos, list) else [])
        if isinstance(info, dict)
    }
    return "Define " + ", ".join(f"`{declared.get(name) or name}`" for name in names) + "."


def _is_plain(test: ast.FunctionDef) -> bool:
    """Return whether a test has no fixtures and does not use pytest."""
    parameters = [*test.args.posonlyargs, *test.args.args, *test.args.kwonlyargs]
    return not parameters and not test.decorator_list and not _uses_pytest(test)


def _uses_pytest(node: ast.AST) -> bool:
    named = {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}
    return "pytest" in named | {one.name for one in ast.walk(node) if isinstance(one, ast.alias)}


def _pair_truth(pairs: Sequence[_Pair], num_shown: int, entry: JSON, reference: str) -> CodeTruth:
    """Return the truth for tests of the function `entry`, or, if it is empty, of stdin and stdout."""
    cases = [TestCase(f"test {number}", given, due) for number, (given, due) in enumerate(pairs, 1)]
    return replace(_truth("function" if entry else "stdin", str(entry or ""), cases, num_shown, reference), loose=True)


def _truth(
    style: Literal["function", "stdin", "checks"], entry: str, cases: Sequence[TestCase], num_shown: int, reference: str
) -> CodeTruth:
    names = tuple(case.name for case in cases)
    hidden = frozenset(names[num_shown:])
    return CodeTruth(names, hidden=hidden, style=style, entry=entry, cases=tuple(cases), reference=reference)


def _with_test(prompt: str, test: str) -> str:
    return f"{prompt}\nYour code should pass this test, and others:\n{test}"


def _with_interface(question: str, record: Record, entry: JSON) -> str:
    starter = _optional(record, "starter_code").strip()
    if starter:
        return f"{question}\n\nBegin with:\n{starter}"
    if entry:
        return f"{question}\n\nWrite a function {entry}."
    return f"{question}\n\nThe program reads from standard input and prints to standard output."


def _test_cases(record: Record, key: str) -> list[Record]:
    """Return test cases given as a list, as JSON text, or compressed as in LiveCodeBench."""
    given: JSON = record.get(key) or []
    if isinstance(given, str):
        text = given
        try:
            given = json.loads(text)
        except ValueError:
            given = _json(_decompress(text, key))
    if not isinstance(given, list):
        raise RecordError(f'"{key}" is not a list')
    return [_object(test) for test in given]


def _decompress(text: str, key: str) -> str:
    try:
        value = load_pickle(zlib.decompressobj().decompress(base64.b64decode(text, validate=True), _MAX_UNPACKED))
    except (ValueError, zlib.error, UnpicklingError) as error:
        raise RecordError(f'"{key}" cannot be unpacked ({error})') from None
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    if not isinstance(value, str):
        raise RecordError(f'"{key}" is not text')
    return value


def _called_function(check: str, solution: str) -> str:
    """Return the name of the solution's function that an assert calls."""
    defined = {node.name for node in ast.walk(ast.parse(solution)) if isinstance(node, ast.FunctionDef)}
    for node in ast.walk(ast.parse(check)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in defined:
            return node.func.id
    raise RecordError("the first test does not call a function of the solution")


def _python(code: str, key: str) -> str:
    """Return the code. Raises RecordError unless it is Python."""
    try:
        ast.parse(code)
    except (SyntaxError, ValueError, RecursionError) as error:
        raise RecordError(f'"{key}" is not Python ({error})') from None
    return code


def _decode_field(record: Record, key: str) -> JSON:
    """Return a value, decoded if it is JSON text."""
    value = record.get(key)
    return _json(value) if isinstance(value, str) else value


def _json(text: str) -> JSON:
    try:
        return cast(JSON, json.loads(text))
    except (ValueError, RecursionError):
        raise RecordError(f"{text[:40]!r} is not JSON") from None


def _object(value: JSON) -> Record:
    if isinstance(value, dict):
        return value
    raise RecordError(f"{str(value)[:40]!r} is not a JSON object")


def _call(test: Record) -> _Pair:
    given = test.get("args")
    if not isinstance(given, list) or "result" not in test:
        raise RecordError('a test is {"args": [...], "result": ...}')
    return tuple(given), test["result"]


def _weight(test: Record) -> float:
    weight = test.get("weight", 1)
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight < _MAX_WEIGHT:
        raise RecordError(f'"weight" is not a number above 0 and below {_MAX_WEIGHT:g}')
    return float(weight)


def _optional(record: Record, key: str) -> str:
    return text_field(record, key) if record.get(key) is not None else ""


def _texts(record: Record, key: str) -> list[str]:
    value = record.get(key) or []
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        raise RecordError(f'"{key}" is not a list of strings')
    return [str(one) for one in value]


def _joined(value: JSON) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)
