"""`ludus compare`: evaluations are paired by task and must have the same tasks."""

from dataclasses import replace

import pytest

from ludus.evaluation.evaluate import Conditions, Evaluation, EvaluationPlan, save_evaluation
from ludus.evaluation.stats import mcnemar, wilson
from tiny_run import ludus, refused

CONDITIONS = Conditions("w", "{}", "chat", "auto", 1.0, 0, 6, 64, 640, 3, 2000)


def saved(folder, successes, name=None, conditions=CONDITIONS, tasks="t", **plan):
    """An evaluation file with these successes by task."""
    count = len(successes)
    plan = EvaluationPlan(
        **{"split": "test", "samples": 1, "temperature": 0.0, "seed": 0} | plan, num_tasks=count, conditions=conditions
    )
    ids = tuple(f"{tasks}{i}" for i in range(count))
    result = Evaluation(plan, ids, tuple(successes), ("all",) * count, {}, 0)
    return save_evaluation(folder, result, [], name)


def row(said, first="test"):
    """The cells of the table's row that begins so."""
    lines = [line for line in said.out.splitlines() if line.startswith(f"│ {first}")]
    return [[cell.strip() for cell in line.strip("│").split("│")] for line in lines]


def test_the_difference_is_b_minus_a_over_the_same_tasks(tmp_path):
    a = saved(tmp_path / "a", [1, 1, 0, 0, 0, 0, 0, 0])
    b = saved(tmp_path / "b", [0, 1, 1, 1, 1, 1, 1, 0])
    said = ludus("compare", a, b)
    assert "detectable: the smallest difference over these tasks that is detected with a power of 80 %" in said.out
    (cells,) = row(said)
    assert cells[:5] == ["test", "greedy", "8", "25.0%", "75.0%"]
    assert cells[5].startswith("+50.0% [")
    assert cells[6] == "80.9%"
    assert cells[7:] == ["1", "5", f"{mcnemar(5, 1):.3g}"]
    (back,) = row(ludus("compare", b, a))
    assert back[5].startswith("-50.0% [")
    assert back[7:9] == ["5", "1"]


def test_several_attempts_have_no_mcnemar(tmp_path):
    a = saved(tmp_path / "a", [4, 1, 2], samples=4)
    b = saved(tmp_path / "b", [4, 3, 3], samples=4)
    said = ludus("compare", a, b)
    assert "detectable:" not in said.out
    (cells,) = row(said)
    assert cells[3:5] == ["58.3%", "83.3%"]
    assert cells[6:] == ["", "", "", ""]


def test_folders_are_paired_by_their_newest_own_evaluations(tmp_path):
    a, b = tmp_path / "a" / "evaluations", tmp_path / "b" / "evaluations"
    saved(a, [0, 0, 0, 1], step=0)
    saved(a, [0, 0, 1, 1], step=10)
    saved(a, [1, 1, 1, 1], step=20, policy="baseline none", name="step-000020-test-greedy-baseline-none")
    saved(a, [0, 1, 1, 1], step=10, temperature=1.0)
    saved(a, [1, 1], step=10, split="validation")
    saved(b, [0, 1, 1, 1], step=5)
    saved(b, [1, 1, 1, 1], step=5, temperature=1.0)
    greedy, warm = row(ludus("compare", tmp_path / "a", tmp_path / "b"))
    assert greedy[1:5] == ["greedy", "4", "50.0%", "75.0%"]
    said = ludus("compare", tmp_path / "a", tmp_path / "b").out
    assert "paired: step-000010-test-greedy of A with step-000005-test-greedy of B" in said
    assert "paired: step-000010-test-t1 of A with step-000005-test-t1 of B" in said
    assert warm[1:5] == ["temperature 1", "4", "75.0%", "100.0%"]


def test_what_else_differs_is_noted(tmp_path):
    a = saved(tmp_path / "a", [0, 1])
    b = saved(tmp_path / "b", [1, 1], conditions=replace(CONDITIONS, max_turns=9), temperature=0.5, step=7)
    notes = [line for line in ludus("compare", a, b).out.splitlines() if line.startswith("note: ")]
    assert notes == ["note: temperature is 0.0 in A and 0.5 in B", "note: max_turns is 6 in A and 9 in B"]


def test_the_evaluations_of_a_run_can_be_compared(tiny_run):
    shelf = tiny_run / "evaluations"
    said = ludus("compare", shelf / "step-000000-test-greedy.json", shelf / "step-000002-test-greedy.json")
    assert said.code == 0, said
    assert len(row(said)) == 1


def test_a_smaller_evaluation_is_compared_with_a_larger_one_over_the_tasks_of_both(tmp_path):
    a = saved(tmp_path / "a", [0, 1])
    b = saved(tmp_path / "b", [1, 1, 0, 0], step=7)
    said = ludus("compare", a, b)
    assert said.code == 0, said
    assert row(said)[0][2:5] == ["2", "50.0%", "100.0%"]
    assert "2 tasks in A and 4 in B; those of both are compared" in " ".join(said.out.split())


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ("a.json", "other.json", "the two runs differ in 4 tasks, for example 't0'"),
        ("one.json", "one_too.json", "A single task cannot be compared"),
        ("a.json", "a.json", "A and B are both"),
        ("a.json", "empty", "a.json is a file, and "),
        ("a.json", "none.json", "none.json is neither an evaluation nor a run"),
        ("nowhere", "a.json", "is neither an evaluation nor a run"),
        ("a.json", "words.json", "is not an evaluation"),
        ("empty", "runs", "There are no evaluations in"),
        ("runs", "others", "have no evaluation of the same split, sampling and number of tasks"),
    ],
)
def test_what_cannot_be_compared_is_refused(tmp_path, a, b, expected):
    for name, tasks, successes in (
        ("a", "t", [0, 1]),
        ("other", "u", [0, 1]),
        ("one", "t", [0]),
        ("one_too", "t", [1]),
    ):
        saved(tmp_path, successes, name=name, tasks=tasks)
    (tmp_path / "words.json").write_text("[]")
    (tmp_path / "empty").mkdir()
    saved(tmp_path / "runs" / "evaluations", [0, 1])
    saved(tmp_path / "others" / "evaluations", [0, 1], temperature=1.0)
    assert expected in refused("compare", tmp_path / a, tmp_path / b)


def test_evaluations_that_have_nothing_in_common_are_listed_with_the_command_that_makes_one(tmp_path):
    a, b = tmp_path / "a", tmp_path / "b"
    saved(a / "evaluations", [0, 1])
    saved(b / "evaluations", [4, 1, 0], temperature=0.5, samples=4)
    said = refused("compare", a, b).splitlines()
    assert said[1:3] == [f"  {a}: test, greedy, 2 tasks", f"  {b}: test, temperature 0.5, 4 attempts, 3 tasks"]
    words = "--evaluation.splits '[\"test\"]' --evaluation.temperatures '[0.0]' --evaluation.samples 1"
    assert said[3] == f"Evaluate one like the other: ludus eval --run {b} {words} --evaluation.tasks 2"
    assert said[4].startswith("Or name two .json files of the same split")


def test_where_no_task_differs_the_interval_is_not_of_width_zero(tmp_path):
    a, b = saved(tmp_path / "a", [0] * 50), saved(tmp_path / "b", [0] * 50)
    high = wilson(0, 50).high
    assert row(ludus("compare", a, b))[0][5] == f"+0.0% [{-high:+.1%}, {high:+.1%}]"
