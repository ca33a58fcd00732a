"""Recipes raise held-out success, search by 25 points, greedy and sampled."""

from __future__ import annotations

import pytest

from ludus.cli.main import main
from ludus.evaluation.evaluate import load_evaluation
from ludus.evaluation.stats import paired_difference


@pytest.mark.learning
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_search_recipe_gains_25_points_on_the_test_split(tmp_path, seed):
    folder = tmp_path / "run"
    fixed = ["--run.dir", str(folder), "--run.seed", str(seed), "--run.threads", "1"]
    assert main(["train", "search", *fixed, "--evaluation.tasks_before", "1000"]) == 0
    for sampling in ("greedy", "t1"):
        gain = gain_on_test(folder, sampling)
        assert gain.num_tasks >= 500
        assert gain.interval.low > 0.25, gain


@pytest.mark.learning
@pytest.mark.parametrize(("recipe", "least"), [("math", 0.2), ("sql", 0.05)])
def test_recipe_improves_sampled_test_success(tmp_path, recipe, least):
    folder = tmp_path / "run"
    quick = ["--evaluation.every", "1000", "--evaluation.splits", '["test"]', "--evaluation.tasks_before", "1000"]
    assert main(["train", recipe, "--run.dir", str(folder), "--run.threads", "1", *quick]) == 0
    gain = gain_on_test(folder, "t1")
    assert gain.interval.low > least, gain


def gain_on_test(folder, sampling):
    """The difference of the last evaluation on `test` and the first, paired over tasks."""
    first, *_, last = sorted(folder.glob(f"evaluations/step-*-test-{sampling}.json"))
    return paired_difference(by_task(load_evaluation(last)), by_task(load_evaluation(first)))


def by_task(result):
    return dict(zip(result.task_ids, map(float, result.successes), strict=True))
