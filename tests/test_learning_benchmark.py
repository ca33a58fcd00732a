"""The verdict of the learning benchmark on modes of training: what its two intervals say."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from ludus.evaluation.evaluate import Evaluation, EvaluationPlan

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
TASKS = tuple(f"test:{i}" for i in range(200))


def evaluated(*rights: int) -> list[Evaluation]:
    """One evaluation a seed, in which so many of the tasks were solved."""
    plan = EvaluationPlan(split="test", num_tasks=len(TASKS), samples=1, temperature=0.0, seed=0)
    return [
        Evaluation(plan, TASKS, tuple(int(i < right) for i in range(len(TASKS))), ("",) * len(TASKS), {}, 0)
        for right in rights
    ]


@pytest.mark.parametrize(
    ("found", "verdict"),
    [
        ((160, 160, 160), "yes"),
        ((161, 158, 160), "yes"),
        ((80, 82, 78), "no"),
        ((150, 170, 130), "not shown"),  # over seeds
        ((151, 151, 151), "not shown"),  # over tasks: nine of them were lost
    ],
)
def test_a_mode_is_called_no_worse_where_neither_interval_reaches_five_points_below(
    found, verdict, monkeypatch
):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    learning = importlib.import_module("learning")
    gap = learning.less_sync(evaluated(*found), evaluated(160, 160, 160))
    assert gap.verdict == verdict
    assert gap.seeds.mean == pytest.approx(sum(found) / 6 - 80)
    assert gap.tasks.difference == pytest.approx((sum(found) / 6 - 80) / 100)
