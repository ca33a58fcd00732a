"""Reward models: training data, three losses, held-out quality, bit-identical resume, and use in a run."""

from __future__ import annotations

import asyncio
import math
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ludus.config import load_config
from ludus.config.schema import Config
from ludus.diagnostics.trackers import read_metrics
from ludus.errors import UserError, WorldError
from ludus.rewards.base import Reward
from ludus.rollouts.ledger import Ledger, RolloutKey, RolloutOutcome
from ludus.rollouts.rollout_files import RolloutRecord, read_rollouts, rollouts_path, write_rollouts
from ludus.rollouts.scheduler import RolloutRequest, SamplingPlan, engine_scheduler
from ludus.training.learner.optimizer import Optimizer, OptimizerSettings
from ludus.training.reward_model.data import hold_out, load_examples, sample_continuations
from ludus.training.reward_model.train import measure
from ludus.training.run.session import make_engine, open_session
from ludus.training.run.supervised import split_by_tokens
from ludus.training.value_models.base import HeadModel
from ludus.training.value_models.labels import TurnLabels, examples_of_rollouts
from ludus.training.value_models.reward_model import (
    RewardExample,
    RewardModel,
    ScoredSequence,
    load_reward_model,
    losses,
    reward_step,
)
from ludus.types import Segment, StopReason, Trajectory
from small_runs import lasting_files, words
from tests.training.learner.test_learner import tiny_model
from tiny_run import ludus, make_recipe, refused

REWARDS = (Reward("right", lambda task, trajectory: 0.0, outcome=True),)
WORDS = ("--reward_model.batch_size", "4", "--reward_model.checkpoint_every", "2")
QUICK = (*WORDS, "--reward_model.learning_rate", "1e-3", "--reward_model.evaluate_every", "2")


def rollout(first: int, second: int, right: bool, task: str = "a") -> tuple[str, RolloutRecord]:
    segments = (
        Segment("prompt", (1, 2)),
        Segment("action", (3, first), 0, logprobs=(-1.0, -1.0), versions=(0, 0), finish_reason="stop"),
        Segment("observation", (9,), 0),
        Segment("action", (second,), 1, logprobs=(-1.0,), versions=(0,), finish_reason="stop"),
    )
    rewards = {"right": float(right)}
    trajectory = Trajectory(task, 0, segments, (), StopReason.ANSWERED, rewards=rewards)
    return "x", RolloutRecord(1, task, RolloutOutcome.TRAINED, "trained", trajectory)


def test_the_last_action_token_is_judged_by_the_success():
    (one,) = examples_of_rollouts([rollout(4, 5, True)], REWARDS, None)
    assert (one.prompt_length, one.sequences) == (2, (ScoredSequence((1, 2, 3, 4, 9, 5), (5,), (1.0,)),))


def test_target_of_a_turn_is_the_mean_return_of_its_rollouts():
    records = [rollout(4, 5, True), rollout(4, 6, False), rollout(7, 5, True)]
    found = [example.sequences[0] for example in examples_of_rollouts(records, REWARDS, TurnLabels(discount=0.5))]
    assert [sequence.positions for sequence in found] == [(3, 5)] * 3
    # Two pass through the first action [3, 4]: (0.5 * 1 + 0.5 * 0) / 2; the others are alone with their own.
    assert [sequence.targets for sequence in found] == [(0.25, 1.0), (0.25, 0.0), (0.5, 1.0)]


def test_additional_rollouts_count_in_means_but_are_no_examples():
    records = [rollout(4, 5, True), rollout(7, 5, True)]
    further = [rollout(4, last, right)[1].trajectory for last, right in ((6, False), (8, False), (5, True))]
    found = examples_of_rollouts(records, REWARDS, TurnLabels(discount=0.5), further)
    assert [example.sequences[0].targets for example in found] == [(0.5 * 2 / 4, 1.0), (0.5, 1.0)]


def test_held_out_split_keeps_prompts_whole():
    examples = [RewardExample("", 1, (ScoredSequence((i // 3, i), (1,), (1.0,)),)) for i in range(12)]
    found = hold_out(examples, 0.3, 0)
    aside = [example.held_out for example in found]
    assert sum(aside) == 6
    assert all(len(set(aside[i : i + 3])) == 1 for i in (0, 3, 6, 9))
    assert any(hold_out(examples, 0.3, seed) != found for seed in range(1, 5))
    assert not any(example.held_out for example in hold_out(examples, 0.0, 0))
    assert not any(example.held_out for example in hold_out(examples[:3], 0.9, 0))


def model_of(kind, seed: int = 0) -> RewardModel:
    states = HeadModel(tiny_model(), "reward model", "")
    with torch.no_grad():
        states.head.weight.copy_(torch.randn(states.head.weight.shape, generator=torch.Generator().manual_seed(seed)))
    return RewardModel(states, kind)


def by_hand(model: RewardModel, sequence: ScoredSequence) -> list[float]:
    """Scores by a plain forward pass of one row with all hidden states."""
    body = model.states.model["body"]
    with torch.no_grad():
        states = body(input_ids=torch.tensor([sequence.tokens]), use_cache=False).last_hidden_state[0]
        return [float(model.states.head(states[place])) for place in sequence.positions]


PAIR = RewardExample("", 2, (ScoredSequence((1, 2, 3, 4), (3,), (1.0,)), ScoredSequence((1, 2, 5), (2,), (0.0,))))
TURNS = RewardExample("", 1, (ScoredSequence((1, 6, 7, 8, 9), (1, 4), (0.25, 1.0)),))
ALONE = RewardExample("", 1, (ScoredSequence((2, 6, 3), (2,), (0.0,)),))


def test_reward_model_losses_match_their_formulas():
    model = model_of("pairwise")
    (chosen,), (rejected,) = (by_hand(model, sequence) for sequence in PAIR.sequences)
    expected = -math.log(1 / (1 + math.exp(rejected - chosen)))
    assert losses(model, [PAIR]).item() == pytest.approx(expected, rel=1e-4)
    model = model_of("process")
    scores = [*by_hand(model, TURNS.sequences[0]), *by_hand(model, ALONE.sequences[0])]
    wanted = [
        -(target * math.log(p) + (1 - target) * math.log(1 - p))
        for score, target in zip(scores, (0.25, 1.0, 0.0), strict=True)
        for p in [1 / (1 + math.exp(-score))]
    ]
    assert losses(model, [TURNS, ALONE]).tolist() == pytest.approx(wanted, rel=1e-4)
    judged = model.predict([*TURNS.sequences, *ALONE.sequences], 3)
    assert [p for sequence in judged for p in sequence] == pytest.approx(
        [1 / (1 + math.exp(-score)) for score in scores], rel=1e-4
    )


@pytest.mark.parametrize(("kind", "batch"), [("pairwise", [PAIR] * 3), ("process", [TURNS, ALONE, TURNS])])
def test_step_gradient_is_independent_of_microbatches(kind, batch):
    found = []
    for tokens in (10**6, 1):
        model = model_of(kind)
        optimizer = Optimizer(model.states.model, OptimizerSettings(learning_rate=1e-3, total_steps=1))
        found.append(reward_step(model, optimizer, batch, tokens) | measure(model, batch, tokens))
    assert found[0] == pytest.approx(found[1], rel=2e-3, abs=1e-5)
    assert len(split_by_tokens(batch, 1)) == 3
    assert found[0]["optim/grad_norm"] > 0


def test_learnable_signal_is_learned_and_measured():
    model = RewardModel(HeadModel(tiny_model(), "reward model", ""), "pointwise")
    batch = [RewardExample("", 1, (ScoredSequence((1, 2, last), (2,), (float(last > 5),)),)) for last in range(2, 10)]
    before = measure(model, batch, 999)
    assert before == pytest.approx({"loss": math.log(2), "error": 0.5, "auc": 0.5})
    optimizer = Optimizer(model.states.model, OptimizerSettings(learning_rate=1e-2, total_steps=30))
    for _ in range(30):
        reward_step(model, optimizer, batch, 999)
    after = measure(model, batch, 999)
    assert after["auc"] == 1.0
    assert after["loss"] < 0.3


@pytest.fixture(scope="module")
def source(tiny_run, tmp_path_factory) -> Path:
    """A copy of the tiny run in which the earlier samples of each group were right."""
    run = Path(shutil.copytree(tiny_run, tmp_path_factory.mktemp("source") / "run"))
    for step in (1, 2):
        path = rollouts_path(run, step)
        write_rollouts(path, [_marked(record) for record in list(read_rollouts(path))])
    return run


def _marked(record: RolloutRecord) -> RolloutRecord:
    right = float(record.trajectory.sample == 0)
    trajectory = replace(record.trajectory, rewards={"exact_match": right}, reward=right)
    return replace(record, trajectory=trajectory)


def model_words(source: Path) -> tuple[str, ...]:
    return ("--model", str(sorted((source / "cold_start" / "checkpoints").iterdir())[-1]))


def train(source: Path, folder: Path, *words: str):
    recipe = make_recipe(folder.parent)
    given = ("reward-model", recipe, "--run", source, *model_words(source), *QUICK, "--run.dir", folder)
    return ludus(*given, *words)


@pytest.fixture(scope="module")
def trained(source, tmp_path_factory) -> Path:
    """A process model of four steps."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    said = train(source, folder, "--reward_model.steps", "4", "--reward_model.kind", "process")
    assert said.code == 0, said
    assert f"--rewards.model {folder / 'checkpoints' / 'step-000004'}" in said.out
    return folder


def test_reward_model_run_reports_held_out_metrics(trained):
    rows = [row.metrics for row in read_metrics(trained / "metrics.jsonl")]
    assert len(rows) == 4
    assert rows[0]["loss/total"] == pytest.approx(math.log(2), abs=1e-3)
    assert ["held_out/loss" in row for row in rows] == [False, True, False, True]
    examples = load_examples(trained / "examples.jsonl.gz")
    aside = {e.sequences[0].tokens[: e.prompt_length] for e in examples if e.held_out}
    learned = {e.sequences[0].tokens[: e.prompt_length] for e in examples if not e.held_out}
    assert aside
    assert learned
    assert not aside & learned
    assert "reward model, process" in ludus("show", trained, "--episodes", "0").out


def test_a_run_that_is_cut_and_resumed_equals_the_uninterrupted_one(trained, source, tmp_path):
    cut = tmp_path / "run"
    words = ("--reward_model.kind", "process")
    assert train(source, cut, "--reward_model.steps", "2", *words).code == 0
    said = ludus("reward-model", "--resume", cut, "--reward_model.steps", "4")
    assert said.code == 0, said
    assert lasting_files(cut) == lasting_files(trained)
    assert "complete" in ludus("reward-model", "--resume", cut).out


def test_a_reward_model_loads_with_its_head(trained):
    config = load_config(trained / "config.toml")
    model = load_reward_model(trained, config)
    assert model.kind == "process"
    assert float(model.states.head.weight.detach().abs().sum()) > 0
    sequences = [example.sequences[0] for example in load_examples(trained / "examples.jsonl.gz")][:3]
    judged = model.predict(sequences, 400)
    assert [len(values) for values in judged] == [len(sequence.positions) for sequence in sequences]
    for sequence, values in zip(sequences, judged, strict=True):
        plain = [1 / (1 + math.exp(-score)) for score in by_hand(model, sequence)]
        assert values == pytest.approx(plain, abs=1e-4)
    with pytest.raises(UserError, match="does not contain a reward model"):
        load_reward_model(trained / "checkpoints", Config())


@pytest.mark.slow
def test_rollouts_from_a_later_turn_start_with_the_recorded_messages(tmp_path):
    session = open_session(load_config("search", words(tmp_path, rollout__temperature="1.5")))
    scheduler = engine_scheduler(
        session.world,
        make_engine(session),
        session.renderer,
        session.config.rollout,
        SamplingPlan("first", 1.5, 0),
        Ledger(),
    )
    tasks = session.world.tasks("train")[:3]
    episodes = asyncio.run(scheduler.run([RolloutRequest(RolloutKey(1, task.id, 0), task) for task in tasks]))
    records = [("x", RolloutRecord(1, e.task.id, RolloutOutcome.TRAINED, "", e.trajectory)) for e in episodes]
    turns = [t for e in episodes for t in range(e.trajectory.num_turns - 1)]
    assert turns
    found = sample_continuations(session, records, 2)
    assert len(found) == 2 * len(turns)
    assert found == sample_continuations(session, records, 2)
    beginnings = [
        one.segments[: 2 * t + 2] for e in episodes for one in [e.trajectory] for t in range(one.num_turns - 1)
    ]
    for i, one in enumerate(found):
        own = beginnings[i // 2]
        assert one.segments[: len(own)] == own
    assert any(a.segments != b.segments for a, b in zip(found[::2], found[1::2], strict=True))
    first = next(e.trajectory for e in episodes if e.trajectory.num_turns > 2)
    seen = replace(first.segments[2], tokens=(9, *first.segments[2].tokens))
    other = replace(first, segments=(*first.segments[:2], seen, *first.segments[3:]))
    with pytest.raises(WorldError, match="is not deterministic: turn 1"):
        sample_continuations(session, [("x", replace(records[0][1], trajectory=other))], 1)


def test_a_process_model_learns_from_further_rollouts(source, tmp_path):
    given = ("--reward_model.kind", "process", "--reward_model.rollouts", "1")
    said = train(source, tmp_path / "run", "--reward_model.steps", "1", *given)
    assert said.code == 0, said


def test_bad_input_is_reported_in_one_sentence_and_nothing_is_written(source, tmp_path, trained):
    recipe, folder = make_recipe(tmp_path), tmp_path / "run"
    base = ("reward-model", recipe, *model_words(source), "--run.dir", folder)
    assert "no training data" in refused(*base)
    assert "is not a run folder" in refused(*base, "--run", tmp_path)
    assert "are mutually exclusive" in refused(*base, "--run", source, "--reward_model.data", "x")
    assert "is for the kind process" in refused(*base, "--run", source, "--reward_model.discount", "0.9")
    words = ("--reward_model.rollouts", "2")
    assert "rollouts is for the kind process" in refused(*base, "--run", source, *words)
    assert "has no pair" in refused(*base, "--run", source, "--reward_model.min_reward_gap", "9")
    one = tmp_path / "one.jsonl.gz"
    wrong = [r for r in read_rollouts(rollouts_path(source, 1)) if r.trajectory.sample > 0]
    write_rollouts(one, wrong)
    data = ("--reward_model.data", one, "--reward_model.kind")
    assert "it is a rollout" in refused(*base, *data, "pairwise")
    assert "failed, and a reward model needs both outcomes" in refused(*base, *data, "pointwise")
    assert "ludus sft" in refused("reward-model", recipe, "--run", source, "--model.from_scratch", "true")
    assert not folder.exists()
    assert "reward_model.kind" in refused("reward-model", "--resume", trained, "--reward_model.kind", "pairwise")
    assert f"ludus reward-model --resume {trained}" in refused("train", "--resume", trained)
    for words in (("eval", "--run", trained), ("chat", trained), ("serve", trained)):
        assert "is a run of a reward model, which cannot act" in refused(*words)


@pytest.mark.parametrize("kind", ["pairwise", "pointwise"])
def test_the_other_kinds_train(source, tmp_path, kind):
    said = train(source, tmp_path / "run", "--reward_model.steps", "1", "--reward_model.kind", kind)
    assert said.code == 0, said
    (row,) = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert ("held_out/accuracy" in row.metrics) == (kind == "pairwise")


def test_adapters_and_head_learn_and_load_together(trained, source, tmp_path):
    pytest.importorskip("peft")
    words = ("--reward_model.steps", "2", "--reward_model.kind", "pointwise", "--model.lora.rank", "2")
    said = train(source, tmp_path / "run", *words)
    assert said.code == 0, said
    model = load_reward_model(tmp_path / "run", load_config(trained / "config.toml"))
    assert float(model.states.head.weight.detach().abs().sum()) > 0
    again = ludus("reward-model", "--resume", tmp_path / "run", "--reward_model.steps", "3")
    assert again.code == 0, again
