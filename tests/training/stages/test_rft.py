"""Rejection-sampling fine-tuning: selection, correct counts, rounds that resume bit for bit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from ludus.config import load_config
from ludus.diagnostics.trackers import read_metrics
from ludus.evaluation.evaluate import load_evaluation
from ludus.rollouts.ledger import RolloutKey, RolloutOutcome
from ludus.rollouts.rollout_files import read_rollouts, rollouts_path
from ludus.rollouts.scheduler import Episode
from ludus.training.rft import select_samples
from ludus.training.run.session import open_session
from ludus.types import Failure, Message, Segment, StopReason, Task, Trajectory
from small_runs import lasting_files
from tiny_run import ludus, make_recipe, refused

TINY = {
    "rft.rounds": "2",
    "rft.tasks_per_round": "6",
    "rft.samples": "4",
    "rft.batch_size": "4",
    "rft.learning_rate": "1e-3",
    "evaluation.temperatures": "[0.0]",
}
WORDS = [word for key, value in TINY.items() for word in (f"--{key}", value)]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """A tiny model that solves some tasks of its world."""
    folder = tmp_path_factory.mktemp("model")
    steps = ("--sft.steps", "60", "--run.dir", folder / "run")
    said = ludus("sft", make_recipe(folder), "--from-scratch", *steps)
    assert said.code == 0, said
    return folder / "run" / "checkpoints" / "step-000060"


def train(model: Path, folder: Path, *words: str):
    recipe = make_recipe(folder.parent)
    return ludus("rft", recipe, "--model", model, *WORDS, "--run.dir", folder, *words)


@pytest.fixture(scope="module")
def finished(model, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("rft") / "run"
    said = train(model, folder)
    assert said.code == 0, said
    assert f"ludus rft --resume {folder} --rft.rounds 4" in said.out
    return folder


@pytest.mark.slow
def test_the_account_of_each_round_adds_up_and_agrees_with_the_rollouts(finished):
    rows = [row.metrics for row in read_metrics(finished / "metrics.jsonl")]
    assert len(rows) == 2
    for number, row in enumerate(rows, start=1):
        parts = [row[f"ledger/{name}"] for name in ("trained", "masked", "dropped", "failed")]
        assert row["ledger/started"] == sum(parts) == 24
        records = list(read_rollouts(rollouts_path(finished, number)))
        kept = [record for record in records if record.outcome == "trained"]
        assert len(records) == 24
        assert len(kept) == row["ledger/trained"] == row["rft/kept"] > 0
        assert all(record.trajectory.rewards["exact_match"] == 1.0 for record in kept)
        ways = {(r.group, tuple(s.tokens for s in r.trajectory.segments if s.kind == "action")) for r in kept}
        assert len(ways) == len(kept)
        lost = [r for r in records if r.reason == "unsolved"]
        assert all(record.trajectory.rewards["exact_match"] < 1.0 for record in lost)


def test_rft_round_trains_on_kept_samples_and_evaluates(finished, model):
    rows = [row.metrics for row in read_metrics(finished / "metrics.jsonl")]
    for number, row in enumerate(rows, start=1):
        kept = [r for r in read_rollouts(rollouts_path(finished, number)) if r.outcome == "trained"]
        assert row["rft/updates"] == -(-len(kept) // 4)
        mean = sum(r.trajectory.num_action_tokens for r in kept) / row["rft/updates"]
        assert row["batch/trained_tokens"] == pytest.approx(mean)
        assert "eval/validation/greedy/success" in row
    names = {path.stem for path in (finished / "evaluations").glob("*.json")}
    assert {"step-000000-test-greedy", "step-000001-validation-greedy", "step-000002-test-greedy"} <= names
    assert load_evaluation(finished / "evaluations" / "step-000002-test-greedy.json").plan.num_tasks == 8
    trained = AutoModelForCausalLM.from_pretrained(finished / "checkpoints" / "step-000002")
    start = AutoModelForCausalLM.from_pretrained(model)
    assert any(not torch.equal(a, b) for a, b in zip(trained.parameters(), start.parameters(), strict=True))
    said = ludus("show", finished, "--episodes", "0")
    assert "rejection sampling" in said.out
    assert "rollouts kept for training" in said.out
    assert "48 rollouts started" in said.out


@pytest.mark.slow
def test_a_run_that_is_cut_after_a_round_and_resumed_equals_the_uninterrupted_one(finished, model, tmp_path):
    cut = tmp_path / "run"
    assert train(model, cut, "--rft.rounds", "1", "--evaluation.splits", "[]").code == 0
    said = ludus("rft", "--resume", cut, "--rft.rounds", "2", "--evaluation.splits", '["test"]')
    assert said.code == 0, said
    whole = lasting_files(finished)
    for name in [name for name in whole if "step-000000-test" in name]:
        del whole[name]
    assert lasting_files(cut) == whole
    assert "complete" in ludus("rft", "--resume", cut).out


@pytest.fixture(scope="module")
def session(model, tmp_path_factory):
    recipe = make_recipe(tmp_path_factory.mktemp("session"))
    return open_session(load_config(recipe, ["--model.path", str(model), "--rft.max_per_task", "2"]))


def episode(task: str, sample: int, tokens: tuple[int, ...], right: bool = True) -> Episode:
    segments = (Segment("prompt", (1,)), Segment("action", tokens, logprobs=(-1.0,) * len(tokens)))
    rewards = {"exact_match": float(right), "f1": 1.0, "well_formed": 1.0}
    trajectory = Trajectory(task, sample, segments, (), StopReason.ANSWERED, rewards=rewards, reward=1.1)
    given = Task(task, (Message(role="user", content="?"),), None)
    return Episode(RolloutKey(1, task, sample), given, trajectory)


def test_judging_keeps_distinct_solutions_up_to_the_limit(session):
    group = [episode("a", i, tokens) for i, tokens in enumerate([(2, 3), (2, 3), (4,), (5,)])]
    wrong = episode("b", 0, (2, 3), right=False)
    other = episode("b", 1, (2, 3))
    broken = episode("b", 2, ())
    failure = Failure("engine", "gone", 3)
    lost = replace(broken.trajectory, segments=(), failure=failure, stop_reason=StopReason.FAILED)
    fates = select_samples([group, [wrong, other, replace(broken, trajectory=lost)]], session)
    assert [(credit.outcome, credit.reason) for credit in fates] == [
        (RolloutOutcome.TRAINED, "trained"),
        (RolloutOutcome.DROPPED, "duplicate"),
        (RolloutOutcome.TRAINED, "trained"),
        (RolloutOutcome.DROPPED, "max_per_task"),
        (RolloutOutcome.DROPPED, "unsolved"),
        (RolloutOutcome.TRAINED, "trained"),
        (RolloutOutcome.FAILED, "engine"),
    ]


def test_bad_input_is_reported_in_one_sentence_and_nothing_is_written(model, finished, tmp_path):
    base = ("rft", make_recipe(tmp_path), "--model", model, *WORDS, "--run.dir", tmp_path / "run")
    assert "A round needs 99 tasks" in refused(*base, "--rft.tasks_per_round", "99")
    assert "rft.rounds" in refused(*base, "--rft.rounds", "0")
    assert "ludus sft" in refused("rft", make_recipe(tmp_path), "--model.from_scratch", "true")
    assert not (tmp_path / "run").exists()
    assert "rft.rounds is 1, but 2 rounds" in refused("rft", "--resume", finished, "--rft.rounds", "1")
    assert f"ludus rft --resume {finished}" in refused("sft", "--resume", finished)
