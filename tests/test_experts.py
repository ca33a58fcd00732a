"""Experts inside the group: where they come from, what they change, and what they stay out of."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace

import pytest
import torch

from ludus.algorithms import advantages
from ludus.algorithms.presets import PRESETS
from ludus.cli.main import main
from ludus.config.schema import Config
from ludus.errors import ConfigError, UserError
from ludus.rollout.ledger import Ledger, RolloutKey
from ludus.rollout.scheduler import Episode
from ludus.rollout.store import read_rollouts
from ludus.training.credit import EXPERT, assign_credit, settle, training_rows
from ludus.training.experts import check_experts, make_experts
from ludus.training.refine import refine
from ludus.training.run import RunFolder, locked, new_run
from ludus.training.session import open_session
from ludus.training.start import train
from small_runs import SMALLEST, Cut, Cutting, Silent, config, lasting_files
from test_credit import real_group, trajectory
from test_learner import gradients, largest_difference, learner, tiny_model
from test_terms import plain_logprobs

MIXED = SMALLEST | {"algorithm__preset": "mixed_policy", "evaluation__tasks": "1"}


def with_expert(episodes):
    one = trajectory(len(episodes), 1.0)
    foreign = tuple(replace(s, agent=EXPERT, logprobs=(), versions=()) for s in one.segments)
    key = RolloutKey(1, "t", len(episodes))
    return [*episodes, Episode(key, episodes[0].task, replace(one, segments=foreign))]


def test_an_expert_counts_in_its_group_and_trains_with_its_own_shaping():
    model, algorithm = tiny_model(), replace(PRESETS["mixed_policy"], entropy_coef=0.0)
    group = with_expert(real_group((0.0, 0.0, 0.4, 0.0))[0])
    one = learner(model, algorithm)
    credits = refine(assign_credit([group], algorithm), one, 0, check=True)
    rewards = torch.tensor([0.0, 0.0, 0.4, 0.0, 1.0], dtype=torch.float64)
    index, mask = torch.zeros(5, dtype=torch.int64), torch.ones(5, 1, dtype=torch.bool)
    expected = advantages.dr_grpo(rewards=rewards, group=index, mask=mask)[:, 0].tolist()
    assert [credit.advantage for credit in credits] == pytest.approx(expected, abs=1e-12)
    rows = training_rows(credits, mask_observations=True)
    assert [row.expert for row in rows] == [False] * 4 + [True]
    loss = torch.zeros((), dtype=torch.float64)
    for row, gain in zip(rows, expected, strict=True):
        lp = plain_logprobs(model, row)[torch.tensor(row.trains)]
        loss = loss - gain * (lp.exp() / (lp.exp() + 0.1) if row.expert else lp).sum()
    (loss / (5 * one.settings.trajectory_tokens)).backward()
    wanted = gradients(model)
    statistics, _ = one.gradient(rows)
    assert largest_difference(wanted, gradients(model)) < 1e-10
    assert statistics.mismatch.gap_mean < 1e-9
    one.gradient([replace(row, expert=False) for row in rows])
    assert largest_difference(wanted, gradients(model)) > 1e-6


def test_the_ledger_knows_no_expert():
    group = with_expert(real_group()[0])
    ledger = Ledger()
    for episode in group[:-1]:
        ledger.start(episode.key)
    settle(ledger, assign_credit([group], PRESETS["mixed_policy"]))
    assert ledger.close(1, trained=4).started == 4


@pytest.fixture(scope="module")
def session(tmp_path_factory):
    return open_session(config(tmp_path_factory.mktemp("experts"), **MIXED))


def test_the_search_world_shows_its_tasks(session):
    experts = make_experts(session, PRESETS["mixed_policy"])
    solved = 0
    tasks = session.world.tasks("train")[:20]
    own = [Episode(RolloutKey(3, task.id, 0), task, trajectory(0, 0.0)) for task in tasks]
    groups = asyncio.run(experts.join([[one, one] for one in own]))
    for task, joined in zip(tasks, groups, strict=True):
        for episode in joined[2:]:
            solved += 1
            one = episode.trajectory
            tools = session.world.environment(task).tools
            assert one.rewards["exact_match"] == 1.0
            assert one.segments[0].tokens == tuple(session.renderer.prompt(task.prompt, tools))
            assert episode.key == RolloutKey(3, task.id, 2)
    assert solved >= 15


def test_a_file_shows_the_tasks_that_it_names(session, tmp_path):
    first, second = session.world.tasks("train")[:2]
    asked = [{"role": "user", "content": "What?"}]
    said = [{"role": "assistant", "content": first.truth.accepted[0]}]
    lines = [{"task": first.id, "messages": [*asked, *said]}] * 2
    path = tmp_path / "experts.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    settings = session.config.model_copy(
        update={"experts": session.config.experts.model_copy(update={"path": str(path)})}
    )
    experts = make_experts(replace(session, config=settings), PRESETS["mixed_policy"])
    groups = [[Episode(RolloutKey(1, t.id, 0), t, trajectory(0, 0.0))] for t in (first, second)]
    joined = asyncio.run(experts.join(groups))
    assert [len(group) for group in joined] == [2, 1]
    assert joined[0][1].trajectory.rewards["exact_match"] == 1.0
    assert joined[0][1].trajectory.messages[0] == first.prompt[0]
    path.write_text(json.dumps({"messages": [*asked, *said]}) + "\n")
    with pytest.raises(UserError, match="names a task"):
        make_experts(replace(session, config=settings), PRESETS["mixed_policy"])


def test_experts_that_nobody_reads_or_gives_are_refused():
    class World:
        name = "mute"

    for settings in ({"path": "some.jsonl"}, {"per_group": 2}):
        given = Config.model_validate({"experts": settings})
        with pytest.raises(ConfigError, match="would have no effect"):
            check_experts(given, PRESETS["grpo"], World())
    with pytest.raises(ConfigError, match="shows none"):
        check_experts(Config(), PRESETS["mixed_policy"], World())


def run(folder, reporter):
    settings = config(folder, **MIXED)
    with locked(new_run(settings, "search", "rl")):
        train(open_session(settings), RunFolder(folder), reporter)
    return [metrics for _, metrics in reporter.steps]


@pytest.mark.fault
def test_a_run_with_experts_that_is_cut_and_resumed_equals_the_uninterrupted_one(tmp_path):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    steps = run(whole, Silent())
    for metrics in steps:
        assert metrics["experts/trained"] > 0
        assert metrics["ledger/started"] == metrics["episodes/count"] == 4
        assert metrics["batch/trained_rows"] == metrics["ledger/trained"] + metrics["experts/trained"]
    records = list(read_rollouts(whole / "rollouts" / "step-000001.jsonl.gz"))
    assert len(records) == 4

    with pytest.raises(Cut):
        run(cut, Cutting(2))
    assert main(["train", "--resume", str(cut)]) == 0
    one, other = lasting_files(whole), lasting_files(cut)
    assert [name for name in one if one[name] != other.get(name)] == []
