"""It learns: the recipe as it ships raises held-out success by 25 points or more, greedy and as sampled."""

from __future__ import annotations

import pytest

from ludus.cli.main import main
from ludus.evaluation.evaluate import load_evaluation
from ludus.evaluation.stats import paired_difference


@pytest.mark.learning
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_search_recipe_gains_25_points_on_unseen_heads(tmp_path, seed):
    folder = tmp_path / "run"
    fixed = ["--run.folder", str(folder), "--run.seed", str(seed), "--run.threads", "1"]
    assert main(["train", "search", *fixed]) == 0
    for sampling in ("greedy", "t1"):
        before = load_evaluation(folder / "evaluations" / f"step-000000-test-{sampling}.json")
        (path,) = (
            p for p in folder.glob(f"evaluations/step-*-test-{sampling}.json") if "000000" not in p.name
        )
        after = load_evaluation(path)
        assert len(after.task_ids) >= 500
        gain = paired_difference(by_task(after), by_task(before), seed=0)
        assert gain.interval.low > 0.25, (sampling, before.rate, after.rate, gain)


def by_task(result):
    return dict(zip(result.task_ids, map(float, result.successes), strict=True))
