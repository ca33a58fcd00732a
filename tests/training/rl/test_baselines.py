"""Baselines without a group: the greedy episode of a task."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ludus.algorithms import advantages
from ludus.algorithms.spec.resolve import PRESETS
from ludus.rollouts.ledger import RolloutKey, RolloutOutcome
from ludus.rollouts.rollout_files import read_rollouts, rollouts_path
from ludus.training.credit.advantages import assign_credit, training_rows
from ludus.training.rl.build import train
from ludus.training.run.run_dir import RunFolder, lock_run, new_run
from ludus.training.run.session import open_session
from ludus.types import Failure
from small_runs import SMALLEST, RecordingReporter, config
from tests.training.credit.test_credit import REWARDS, group, same, table


def with_greedy(reward, rewards=REWARDS):
    """A group with its greedy episode."""
    members = group(rewards)
    last = members[-1]
    greedy = replace(
        last,
        key=RolloutKey(1, last.task.id, len(members)),
        trajectory=replace(last.trajectory, sample=len(members), reward=reward),
        greedy=True,
    )
    return [*members, greedy]


def run(folder, **changes):
    reporter = RecordingReporter()
    settings = config(folder, **(SMALLEST | changes))
    with lock_run(new_run(settings, "search", "rl")):
        train(open_session(settings), RunFolder(folder), reporter)
    return reporter


def test_remax_compares_with_the_greedy_episode_and_not_with_the_group():
    credits = assign_credit([with_greedy(0.3), with_greedy(0.9)], PRESETS["remax"])
    members = [c for c in credits if not c.episode.greedy]
    found, mask = table(members)
    rewards = torch.tensor([*REWARDS, *REWARDS], dtype=torch.float64)
    greedy = torch.tensor([0.3] * 4 + [0.9] * 4, dtype=torch.float64)
    same(found, advantages.remax(rewards=rewards, greedy_rewards=greedy, mask=mask))


def test_a_greedy_episode_is_masked_and_enters_no_statistic():
    for name in ("remax", "grpo"):
        credits = assign_credit([with_greedy(0.3)], PRESETS[name])
        (greedy,) = (c for c in credits if c.episode.greedy)
        assert (greedy.outcome, greedy.reason, greedy.advantages) == (RolloutOutcome.MASKED, "baseline", None)
        assert len(training_rows(credits, mask_observations=True)) == len(REWARDS)
    plain = assign_credit([group()], PRESETS["grpo"])
    assert [c.advantages for c in credits if not c.episode.greedy] == [c.advantages for c in plain]


def test_a_failed_greedy_episode_drops_its_group():
    episodes = with_greedy(0.0)
    broken = replace(episodes[-1].trajectory, failure=Failure("engine", "gone", 3))
    credits = assign_credit([[*episodes[:-1], replace(episodes[-1], trajectory=broken)]], PRESETS["remax"])
    assert [c.outcome for c in credits] == [*[RolloutOutcome.DROPPED] * 4, RolloutOutcome.FAILED]


def test_greedy_episode_receives_the_same_length_penalty():
    algorithm = replace(PRESETS["remax"], overlong_buffer=0.5)
    credits = assign_credit([with_greedy(REWARDS[-1])], algorithm, 14)
    assert set(credits[-1].advantages) == {0.0}


def test_remax_without_a_greedy_episode_raises():
    with pytest.raises(ValueError, match="needs greedy_rewards"):
        assign_credit([group()], PRESETS["remax"])


@torch.no_grad()
def is_argmax(model, trajectory):
    """Whether each sampled token was the likeliest."""
    tokens = torch.tensor([trajectory.token_ids])
    likeliest = model(input_ids=tokens).logits[0].argmax(-1)[:-1]
    sampled = torch.tensor(trajectory.action_mask)[1:]
    return bool((likeliest == tokens[0, 1:])[sampled].all())


@pytest.mark.slow
def test_a_run_of_remax_plays_one_greedy_episode_for_each_task(tmp_path):
    reporter = run(tmp_path / "run", algorithm__preset="remax", training__steps="1", rollout__temperature="3")
    metrics = reporter.steps[0][1]
    assert metrics["ledger/masked/baseline"] == 2
    assert metrics["ledger/started"] == 6
    assert metrics["episodes/count"] == 4
    assert metrics["ledger/trained"] == 4
    model = open_session(config(tmp_path / "other", **SMALLEST)).model
    records = list(read_rollouts(rollouts_path(tmp_path / "run", 1)))
    greedy = [r for r in records if r.reason == "baseline"]
    assert [r.trajectory.sample for r in greedy] == [2, 2]
    assert [is_argmax(model, r.trajectory) for r in greedy] == [True, True]
    members = [r for r in records if r.reason != "baseline"]
    assert not all(is_argmax(model, r.trajectory) for r in members)
    baseline = {r.group: r.trajectory.reward for r in greedy}
    assert [r.advantage for r in members] == [r.trajectory.reward - baseline[r.group] for r in members]
