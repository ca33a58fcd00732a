"""`ludus behavior` on a finished run: an evaluation, a step, a comparison, its files and its errors."""

import json

import pytest

from ludus.evaluation.evaluate import load_evaluation
from ludus.rollouts.rollout_files import read_rollouts, rollouts_path
from tiny_run import copy_run, ludus, refused


@pytest.mark.slow
def test_the_newest_evaluation_is_measured_and_written(tiny_run, tmp_path):
    files = ("--json", tmp_path / "b.json", "--markdown", tmp_path / "b.md")
    said = ludus("behavior", tiny_run, *files)
    assert said.code == 0, said
    (run,) = json.loads((tmp_path / "b.json").read_text())["runs"]
    result = load_evaluation(tiny_run / "evaluations" / "step-000002-test-t1.json")
    assert run["file"].endswith("step-000002-test-t1.jsonl.gz")
    assert run["measures"]["success"]["by_task"] == result.scores
    assert run["measures"]["success"]["mean"] == result.rate
    assert (run["measures"]["success"]["low"], run["measures"]["success"]["high"]) == pytest.approx(
        (result.interval.low, result.interval.high)
    )
    assert f"success | {result.rate:.1%}" in (tmp_path / "b.md").read_text()
    assert f"{result.rate:.1%} [" in said.out


def test_behavior_reports_step_measures_and_differences_between_runs(tiny_run, tmp_path):
    run = copy_run(tiny_run, tmp_path)
    said = ludus("behavior", tiny_run, "--step", "1", "--json", tmp_path / "b.json")
    assert said.code == 0, said
    measures = json.loads((tmp_path / "b.json").read_text())["runs"][0]["measures"]
    records = list(read_rollouts(rollouts_path(tiny_run, 1)))
    calls = [len(record.trajectory.call_outcomes) for record in records]
    assert measures["calls"]["mean"] == pytest.approx(sum(calls) / len(calls))
    assert measures["diversity"]["tasks"] == len({record.group for record in records})
    said = ludus("behavior", tiny_run, "--step", "1", "--against", run, "--json", tmp_path / "c.json")
    assert said.code == 0, said
    differences = json.loads((tmp_path / "c.json").read_text())["differences"]
    assert {one["difference"] for one in differences.values()} == {0.0}


def test_two_evaluations_of_a_run_are_compared(tiny_run, tmp_path):
    start = tiny_run / "evaluations" / "step-000000-test-greedy.json"
    words = ("--evaluation", "step-000002-test-greedy", "--json", tmp_path / "b.json")
    said = ludus("behavior", tiny_run, "--against", start, *words)
    assert said.code == 0, said
    change = json.loads((tmp_path / "b.json").read_text())["differences"]["success"]
    last = load_evaluation(tiny_run / "evaluations" / "step-000002-test-greedy.json")
    assert change["difference"] == pytest.approx(load_evaluation(start).rate - last.rate)
    assert change["low"] <= change["difference"] <= change["high"]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("nope",), "nope does not exist"),
        (("RUN", "--evaluation", "x"), "The run has no evaluation 'x'"),
        (("RUN", "--step", "9"), "no rollouts of step 9"),
        (("RUN", "--against", "nope"), "nope does not exist"),
        (("RUN", "--against", "OTHER"), "The second run has no evaluation with the split"),
        (("RUN", "--markdown", "nope/x.md"), "nope/x.md cannot be written"),
        (("RUN", "--evaluation.tasks", "2"), "has no argument --evaluation.tasks"),
    ],
)
def test_bad_input_is_one_sentence(words, expected, tiny_run, tmp_path):
    run = copy_run(tiny_run, tmp_path)
    for path in run.glob("evaluations/*-t1*"):
        path.unlink()
    stand_for = {"RUN": tiny_run, "OTHER": run}
    assert expected in refused("behavior", *(stand_for.get(word, word) for word in words))
