"""A run whose tools fail in three of ten calls continues, accounts for all episodes and trains on no failed one."""

import gzip
import json
import math
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from ludus.config.load import load_config
from ludus.training.run.preflight import model_path
from small_runs import words
from tiny_run import ludus

WORLD = Path(__file__).parents[1] / "faulty_world.py"
STEPS, TASKS, GROUP = 3, 8, 4


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of the run, and how often each kind of fault was injected."""
    folder = tmp_path_factory.mktemp("faulty") / "run"
    changes = {
        "env__name": str(WORLD),
        "model__path": model_path(load_config("search")),
        "training__steps": str(STEPS),
        "training__prompts_per_step": str(TASKS),
        "algorithm__group_size": str(GROUP),
        "algorithm__filter_zero_variance": "false",
        "rollout__max_failure_rate": "0.6",
        "evaluation__every": "9",
        "evaluation__tasks": "4",
    }
    said = ludus("train", "search", *words(folder, **changes))
    assert said.code == 0, said
    return folder, sys.modules["ludus_plugin_faulty_world"].TALLY


def metrics_of(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def rollouts_of(folder, step):
    with gzip.open(folder / "rollouts" / f"step-{step:06d}.jsonl.gz", "rt") as lines:
        return [json.loads(line) for line in lines]


@pytest.mark.fault
def test_run_completes_with_a_third_of_tool_calls_failing(run):
    folder, tally = run
    assert [row["step"] for row in metrics_of(folder)] == list(range(1, STEPS + 1))
    assert tally.total() > 100
    assert min(tally[kind] for kind in ("late", "raised", "garbage", "fault")) > 2
    assert 1 - tally["fine"] / tally.total() == pytest.approx(0.3, abs=0.1)
    assert all(row["ledger/trained"] > 0 for row in metrics_of(folder))


@pytest.mark.fault
def test_ledger_counts_match_the_recorded_attempts(run):
    folder, _ = run
    for row in metrics_of(folder):
        lines = rollouts_of(folder, row["step"])
        assert len(lines) == TASKS * GROUP
        ended = {name: row[f"ledger/{name}"] for name in ("trained", "masked", "dropped", "failed")}
        assert row["ledger/started"] == sum(ended.values())
        assert row["ledger/started"] == sum(line["attempt"] + 1 for line in lines)
        lost = [line for line in lines if line["outcome"] == "failed"]
        assert ended["failed"] == len(lost) + sum(line["attempt"] for line in lines)
        assert ended["failed"] == row.get("ledger/failed/tool", 0)
        assert ended["trained"] == sum(line["outcome"] == "trained" for line in lines)
        assert row["episodes/finished"] == len(lines) - len(lost)


@pytest.mark.fault
def test_episodes_failed_by_infrastructure_have_no_reward_or_training(run):
    folder, _ = run
    lost = 0
    for row in metrics_of(folder):
        lines = rollouts_of(folder, row["step"])
        groups = defaultdict(list)
        for line in lines:
            failure = line["trajectory"]["failure"]
            assert (failure is not None) == (line["outcome"] == "failed")
            if failure is None:
                groups[line["group"]].append(line)
                continue
            lost += 1
            assert (failure["part"], failure["attempts"]) == ("tool", 3)
            assert "The index is gone." in failure["error"]
            assert line["advantage"] is None
            assert line["trajectory"]["rewards"] == {}
            assert line["trajectory"]["segments"] == []
        finished = [line["trajectory"]["reward"] for group in groups.values() for line in group]
        assert row["reward/mean"] == pytest.approx(math.fsum(finished) / len(finished))
        for group in groups.values():
            advantages = [line["advantage"] for line in group if line["outcome"] == "trained"]
            if len(advantages) == len(group) > 1:
                assert math.fsum(advantages) == pytest.approx(0, abs=1e-4)
    assert lost > 0


@pytest.mark.fault
def test_tool_errors_are_shown_to_the_model_and_counted(run):
    folder, _ = run
    calls = [
        outcome
        for step in range(1, STEPS + 1)
        for line in rollouts_of(folder, step)
        for outcome in line["trajectory"]["outcomes"]
        if outcome["tool"] == "search"
    ]
    statuses = {call["status"] for call in calls}
    assert {"ok", "raised", "timed_out"} <= statuses
    late = [call for call in calls if call["status"] == "timed_out"]
    assert {call["output"] for call in late} == {"Error: search took longer than 2 s."}
    assert any(call["truncated"] and "\ufffd" in call["output"] for call in calls)
    assert not any("\x00" in call["output"] for call in calls)
    assert {call["cost"] for call in calls if call["status"] in ("ok", "raised", "timed_out")} >= {0.5}
    rows = metrics_of(folder)
    assert sum(row["tools/search/timeout_rate"] * row["tools/search/calls"] for row in rows) == pytest.approx(len(late))
    assert any(row["ledger/clock_limited"] for row in rows)
    spent = math.fsum(row["tools/search/cost"] * row["episodes/finished"] for row in rows)
    assert spent == pytest.approx(math.fsum(call["cost"] for call in calls))
