"""`ludus compare`: evaluations are paired by task and must have the same tasks."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from ludus.evaluation.evaluate import Conditions, Evaluation, EvaluationPlan, save_evaluation
from ludus.evaluation.stats import mcnemar, tasks_needed, wilson
from tiny_run import copy_run, ludus, refused

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


def test_compare_pairs_newest_matching_evaluations_of_two_folders(tmp_path):
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


def test_runs_with_other_numbers_of_tasks_are_compared_after_training(tmp_path):
    a, b = tmp_path / "a" / "evaluations", tmp_path / "b" / "evaluations"
    for folder, trained in ((a, [1, 1, 1]), (b, [0, 1, 0, 1])):
        saved(folder, [0, 0], step=0)
        saved(folder, trained, step=80)
    saved(b, [0, 1], step=80, name="step-000080-test-greedy-2-tasks")
    said = ludus("compare", tmp_path / "a", tmp_path / "b")
    assert "paired: step-000080-test-greedy of A with step-000080-test-greedy of B" in said.out
    assert [cells[2:5] for cells in row(said)] == [["3", "100.0%", "33.3%"]]
    assert "have 3 tasks in A and 4 in B; only common tasks are compared" in said.out


def test_compare_notes_differing_evaluation_conditions(tmp_path):
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
    assert "2 tasks in A and 4 in B; only common tasks are compared" in " ".join(said.out.split())


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
        ("runs", "others", "have no evaluation of the same split and sampling"),
    ],
)
def test_compare_rejects_incompatible_or_missing_evaluations(tmp_path, a, b, expected):
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


def test_compare_without_matching_evaluations_suggests_an_eval_command(tmp_path):
    a, b = tmp_path / "a", tmp_path / "b"
    saved(a / "evaluations", [0, 1])
    saved(b / "evaluations", [4, 1, 0], temperature=0.5, samples=4)
    said = refused("compare", a, b).splitlines()
    assert said[1:3] == [f"  {a}: test, greedy, 2 tasks", f"  {b}: test, temperature 0.5, 4 attempts, 3 tasks"]
    words = "--evaluation.splits '[\"test\"]' --evaluation.temperatures '[0.0]' --evaluation.samples 1"
    assert said[3] == f"Evaluate one like the other: ludus eval --run {b} {words} --evaluation.tasks 2"
    assert said[4].startswith("Or name two .json files of the same split")


def test_interval_of_identical_results_has_nonzero_width(tmp_path):
    a, b = saved(tmp_path / "a", [0] * 50), saved(tmp_path / "b", [0] * 50)
    high = wilson(0, 50).high
    assert row(ludus("compare", a, b))[0][5] == f"+0.0% [{-high:+.1%}, {high:+.1%}]"


def test_the_verdict_is_a_sentence(tmp_path):
    a = saved(tmp_path / "a", [0] * 30 + [1] * 10)
    b = saved(tmp_path / "b", [1] * 30 + [1] * 10)
    assert "B is better by 75.0 points [" in ludus("compare", a, b).out
    assert "A is better by 75.0 points [" in ludus("compare", b, a).out
    c = saved(tmp_path / "c", [1] + [0] * 29 + [1] * 10)
    assert "no difference seen; these 40 tasks show differences above" in ludus("compare", a, c).out


def test_power_is_the_number_of_tasks_that_a_difference_needs(tmp_path):
    a, b = saved(tmp_path / "a", [0, 1] * 20), saved(tmp_path / "b", [1, 1] * 20)
    said = " ".join(ludus("compare", a, b, "--power", "0.05").out.split())
    assert f"A difference of 5 points needs {tasks_needed(0.05, 22 / 44)} tasks" in said


def test_several_seeds_are_compared_over_seeds_and_tasks(tmp_path):
    a = [saved(tmp_path / f"a{i}", [0] * (20 + i) + [1] * (20 - i)) for i in range(3)]
    b = [saved(tmp_path / f"b{i}", [0] * (5 + i) + [1] * (35 - i)) for i in range(3)]
    said = ludus("compare", *a, "--against", *b)
    assert said.code == 0, said
    (cells,) = row(said)
    assert cells[2:6] == ["40", "3 / 3", "47.5%", "85.0%"]
    assert cells[6].startswith("+37.5% [")
    assert "B is better by 37.5 points" in said.out
    folders = [tmp_path / name for name in ("a0", "a1", "b0")]
    assert row(ludus("compare", *folders[:2], "--against", folders[2]))[0][3] == "2 / 1"
    assert "named twice" in refused("compare", a[0], a[0], "--against", b[0])
    other = saved(tmp_path / "other", [0] * 40, tasks="u")
    assert "does not have the 40 tasks" in refused("compare", a[0], other, "--against", b[0])


def test_runs_that_are_equal_are_called_equal(tmp_path):
    same = [saved(tmp_path / name, [0, 1, 1, 0]) for name in "abc"]
    assert "all runs have the same scores" in ludus("compare", *same[:2], "--against", same[2]).out


def test_the_boundary_shows_whether_training_only_sharpened(tmp_path):
    base = saved(tmp_path / "a", [2] * 30 + [0] * 10, samples=16, temperature=1.0)
    sharp = saved(tmp_path / "b", [16] * 20 + [0] * 20, samples=16, temperature=1.0)
    said = ludus("compare", base, sharp, "--boundary")
    assert said.code == 0, said
    lines = [line.split("│")[1].strip() for line in said.out.splitlines() if line.startswith("│ ")]
    assert lines == ["1", "2", "4", "8", "16"]
    assert "the curves cross" in said.out
    wide = saved(tmp_path / "c", [12] * 40, samples=16, temperature=1.0)
    assert "the curves stay apart" in ludus("compare", base, wide, "--boundary").out
    greedy = saved(tmp_path / "d", [1] * 40)
    assert "needs evaluations with several attempts" in refused("compare", greedy, greedy_copy(greedy), "--boundary")


def greedy_copy(path):
    return Path(shutil.copy(path, path.parent / "copy.json"))


def test_steps_to_a_target_are_interpolated_between_evaluations(tiny_run, tmp_path):
    run = copy_run(tiny_run, tmp_path)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    name = next(name for name in rows[-1] if name.startswith("eval/") and name.endswith("/success"))
    rows = [{**line, name: value} for line, value in zip(rows, (0.3, 0.5), strict=True)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in rows))
    said = ludus("compare", run, tiny_run, "--target", "0.4")
    assert said.code == 0, said
    assert " 1.5 " in said.out
    assert "not reached" in ludus("compare", run, run, "--target", "0.99").out
    assert "no metrics.jsonl" in refused("compare", tmp_path, run, "--target", "0.5")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("A",), "Without --against, name two runs or evaluations"),
        (("A", "B", "C"), "Without --against, name two runs or evaluations"),
        (("A", "B", "--power", "0"), "--power is 0"),
        (("A", "B", "--target", "7"), "--target is 7"),
        (("A", "B", "--against", "C", "--boundary"), "--boundary compares one A with one B"),
        (("A", "B", "--boundary", "--target", "0.5"), "exclude each other"),
    ],
)
def test_arguments_that_exclude_each_other_are_refused(words, expected):
    assert expected in refused("compare", *words)


def test_evaluations_of_different_worlds_are_refused(tmp_path):
    a = saved(tmp_path / "a", [0, 1])
    b = saved(tmp_path / "b", [0, 1], tasks="u", conditions=replace(CONDITIONS, world="v"))
    assert "different worlds have no common task" in refused("compare", a, b)
