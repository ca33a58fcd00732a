"""Handwritten rows in the formats of published benchmarks become tasks that grade answers."""

import base64
import hashlib
import itertools
import json

import pytest

from ludus.envs.benchmarks import BENCHMARKS, TauBenchTruth, load_tau_bench
from ludus.errors import ConfigError, UserError
from ludus.types import Message, StopReason, Trajectory
from ludus.worlds.math.grader import solved
from ludus.worlds.math.sources import load_problems
from ludus.worlds.math.world import make_math_world
from ludus.worlds.swe.tasks import load_instances


def encrypt(text, canary):
    key = itertools.cycle(hashlib.sha256(canary.encode()).digest())
    return base64.b64encode(bytes(a ^ b for a, b in zip(text.encode(), key, strict=False))).decode()


HOTPOT = {
    "_id": "5a",
    "question": "Were Ada and Grace of one country?",
    "answer": "no",
    "type": "comparison",
    "level": "easy",
    "supporting_facts": {"title": ["Ada", "Grace"], "sent_id": [0, 0]},
    "context": {"title": ["Ada"], "sentences": [["Ada was English."]]},
}
GSM = {"question": "3 boxes of 400?", "answer": "3*400=<<3*400=1200>>1200\n#### 1,200"}
MATH = {
    "problem": "Half?",
    "level": "Level 2",
    "type": "Algebra",
    "solution": r"First \boxed{3}, so $\boxed{\frac{1}{2}}$.",
}
MATH_500 = {"problem": "x?", "solution": "-", "answer": r"\sqrt{2}", "subject": "Algebra", "level": 2, "unique_id": "a"}
GAIA = {
    "task_id": "c6",
    "Question": "How much?",
    "Level": 1,
    "Final answer": "$1,500",
    "file_name": "",
    "file_path": "",
    "Annotator Metadata": {"Steps": "1."},
}
BROWSE = {
    "problem": encrypt("Who wrote it? é", "CANARY 1"),
    "answer": encrypt("Ada Lovelace", "CANARY 1"),
    "problem_topic": "Art",
    "canary": "CANARY 1",
}
FULL_NQ = {
    "id": "1",
    "question": {"text": "who sang it", "tokens": ["who", "sang", "it"]},
    "annotations": {"id": ["7"], "short_answers": [{"text": []}, {"text": ["Ada", "Ada L."]}], "yes_no_answer": [-1]},
}
CASES = {
    "hotpotqa": (HOTPOT, ["No", "The answer is no."], ["yes"], "comparison"),
    "nq": ({"question": "who sang it", "answer": ["Ada", "Ada L."]}, ["ada l", "Ada"], ["Grace"], "nq"),
    "nq golden": ({"question": "who sang it", "golden_answers": ["Ada"]}, ["ada"], ["Grace"], "nq"),
    "nq full": (FULL_NQ, ["ada l", "Ada"], ["Grace"], "nq"),
    "gsm8k": (GSM, ["1200", "1,200.0"], ["400", "3*400"], "gsm8k"),
    "math": (MATH, ["1/2", r"\boxed{\frac12}"], ["3", "2"], "Algebra"),
    "math bare": ({**MATH, "solution": r"So $\boxed 2$ it is."}, ["2"], ["3"], "Algebra"),
    "math 500": (MATH_500, [r"\sqrt{2}", r"2^{1/2}"], ["2"], "Algebra"),
    "aime": ({"id": 60, "problem": "n?", "answer": "033", "url": "u", "year": "2024"}, ["33", "033"], ["34"], "aime"),
    "aime old": ({"ID": "2024-I-1", "Problem": "n?", "Solution": "-", "Answer": 204}, ["204"], ["203"], "aime"),
    "gaia": (GAIA, ["1500", "1,500"], ["15"], "1"),
    "gaia text": ({**GAIA, "Final answer": "right, left"}, ["Right, left"], ["left, right"], "1"),
    "browsecomp": (BROWSE, ["Ada Lovelace"], ["Ada"], "Art"),
}


def load(path, name, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return load_problems(path, name.split()[0])


@pytest.mark.parametrize("case", CASES)
def test_a_published_row_becomes_a_task(tmp_path, case):
    row, right, wrong, family = CASES[case]
    (task,) = itertools.chain.from_iterable(load(tmp_path / "rows.jsonl", case, row).values())
    said = [Trajectory("", 0, (), (Message(role="assistant", content=t),), StopReason.ANSWERED) for t in right + wrong]
    assert [solved(task, one) for one in said] == [1.0] * len(right) + [0.0] * len(wrong)
    assert task.tags["family"] == family
    if BENCHMARKS[case.split()[0]].split:
        assert task.tags["split"] == "test"
    if case == "browsecomp":
        assert task.prompt[-1]["content"] == "Who wrote it? é"


def test_rows_that_cannot_be_used_are_skipped_and_counted(tmp_path, caplog):
    file = tmp_path / "rows.jsonl"
    found = load(file, "gaia", {**GAIA, "file_name": "a.png"}, GAIA, {**GAIA, "Final answer": "?"})
    assert [task.id for task in found["test"]] == ["test:line-2"]
    assert f"{file}: 2 rows without a usable answer" in caplog.text
    assert sum(map(len, load(file, "nq", {"question": "a", "answer": []}, CASES["nq"][0]).values())) == 1


@pytest.mark.parametrize(
    ("name", "row", "said"),
    [
        ("math", GSM, "its fields are question, answer, and the format has problem and solution"),
        ("math", {**MATH, "solution": "none"}, r"has no \\boxed"),
        ("gsm8k", {**GSM, "answer": "1200"}, 'has no "####"'),
        ("hotpotqa", {"question": "Who?"}, '"answer" is not a text'),
        ("browsecomp", {**BROWSE, "canary": "CANARY 2"}, "cannot be decrypted with its canary"),
        ("nq", {"question": "Who?", "answer": ["?"]}, "must be a list of texts with words"),
    ],
)
def test_row_of_another_format_is_reported(tmp_path, name, row, said):
    with pytest.raises(UserError, match=f"line 1, is not a task: .*{said}"):
        load(tmp_path / "rows.jsonl", name, row)


def test_a_folder_of_splits_is_played(tmp_path):
    for split in ("train", "test"):
        load(tmp_path / f"{split}.jsonl", "gsm8k", GSM, GSM)
    world = make_math_world({"data": str(tmp_path), "format": "gsm8k", "tool": "none"}, limits=None)
    assert [[task.id for task in world.tasks(split)] for split in world.splits] == [
        ["train:line-3", "train:line-4"],
        [],
        ["test:line-1", "test:line-2"],
    ]
    with pytest.raises(ConfigError, match="data is not set"):
        make_math_world({"format": "gsm8k"}, limits=None)


def test_swe_bench_is_read_from_a_table(tmp_path):
    row = {"instance_id": "a__b-1", "repo": "a/b", "base_commit": "c", "patch": "", "test_patch": ""}
    row |= {"problem_statement": "It fails.", "hints_text": None, "FAIL_TO_PASS": '["t.py::test_t"]'}
    (tmp_path / "test.json").write_text(json.dumps([row], indent=1))
    (case,) = load_instances(str(tmp_path / "test.json"), "", 1.0)
    assert (case.task.id, case.task.truth.fail_to_pass) == ("a__b-1", ("t.py::test_t",))


def test_tau_bench_becomes_truth_records(tmp_path):
    row = {"annotator": "0", "user_id": "u_1", "instruction": "You are Ada.", "outputs": ["10"]}
    row |= {"actions": [{"name": "cancel_order", "kwargs": {"order_id": "#W1"}}]}
    file = tmp_path / "tasks.json"
    file.write_text(json.dumps([row], indent=1))
    (task,) = load_tau_bench(file)["test"]
    assert task.truth == TauBenchTruth("u_1", "You are Ada.", (("cancel_order", {"order_id": "#W1"}),), ("10",))
    file.write_text(json.dumps([{**row, "actions": [{"name": "x"}]}]))
    with pytest.raises(UserError, match='an action has no "name" and "kwargs"'):
        load_tau_bench(file)
