"""JSON Lines files: characters that JSON allows within a line do not end it, and none causes a traceback."""

import contextlib
import json

import pytest

from ludus.errors import LudusError
from ludus.tools.fetch import load_corpus
from ludus.worlds.code.records import load_code_tasks as code_tasks
from ludus.worlds.functions.bfcl.reader import load_tasks as function_tasks
from ludus.worlds.math.sources import load_problems
from ludus.worlds.swe.tasks import load_instances

ODD = "one\N{LINE SEPARATOR}two\N{PARAGRAPH SEPARATOR}three\x85four"
FUNCTION = {"name": "f", "parameters": {"type": "dict", "properties": {"x": {"type": "integer"}}}}
CODE = {"prompt": ODD, "entry": "f", "tests": [{"args": [1], "result": 2}]}
APPS = {"question": ODD, "input_output": json.dumps({"inputs": ["1"], "outputs": ["2"]})}
CALLS = {"id": "a_1", "question": ODD, "function": [FUNCTION], "ground_truth": [{"f": {"x": [1]}}]}
SWE = {"instance_id": "a", "repo": "b/c", "base_commit": "d", "patch": "", "test_patch": "", "split": "test"}
SWE |= {"problem_statement": ODD, "FAIL_TO_PASS": ["t.py::test_t"], "PASS_TO_PASS": []}
LOADERS = {
    "math": (load_problems, {"question": ODD, "answer": "4", "split": "test"}),
    "code": (lambda file: code_tasks(file, "own", ""), CODE | {"split": "test"}),
    "apps": (lambda file: code_tasks(file, "apps", ""), APPS | {"split": "test"}),
    "functions": (lambda file: function_tasks(file, None, "test"), CALLS),
    "swe": (lambda file: load_instances(str(file), "", 1.0), SWE),
    "fetch": (load_corpus, {"url": "u", "text": ODD}),
}


@pytest.mark.parametrize("name", LOADERS)
def test_only_a_line_feed_ends_a_line(tmp_path, name):
    load, record = LOADERS[name]
    file = tmp_path / "tasks.jsonl"
    line = json.dumps(record, ensure_ascii=False)
    for text in (line, line + "\r\n", f"\N{ZERO WIDTH NO-BREAK SPACE}{line}\n"):
        file.write_bytes(text.encode())
        assert "one" in repr(list(load(file).values()) if isinstance(load(file), dict) else load(file))


@pytest.mark.parametrize("line", ["1" * 5_000, "[" * 100_000 + "]" * 100_000, '{"a": ' * 900 + "1" + "}" * 900])
@pytest.mark.parametrize("name", LOADERS)
def test_unbounded_numbers_and_brackets_are_rejected(tmp_path, name, line):
    load, record = LOADERS[name]
    for key in (*record, "other"):
        whole = json.dumps(record | {key: "HERE"}).replace('"HERE"', line, 1)
        (tmp_path / "tasks.jsonl").write_text(f"\n{whole}")
        with contextlib.suppress(LudusError):
            load(tmp_path / "tasks.jsonl")
