"""Rewards from the policy's logits, against the full table of logits in float64."""

from __future__ import annotations

import statistics
from dataclasses import replace

import pytest
import torch

from ludus.algorithms.spec.resolve import PRESETS
from ludus.config.sections.parts.terms import UnsupervisedConfig
from ludus.rollouts.ledger import RolloutKey, RolloutOutcome
from ludus.rollouts.scheduler import Episode
from ludus.training.credit.advantages import assign_credit
from ludus.training.rl.train_step import with_learner_rewards
from ludus.types import Failure, Segment, StopReason, Task, Trajectory
from tests.training.learner.test_learner import VOCAB, learner, tiny_model


def attempt(sample: int, **changes) -> Episode:
    generator = torch.Generator().manual_seed(sample)
    tokens = torch.randint(VOCAB, (12,), generator=generator).tolist()
    segments = (
        Segment("prompt", (7, 8)),
        Segment(
            "action", tuple(tokens[: 3 + sample]), 0, logprobs=(-1.0,) * (3 + sample), versions=(0,) * (3 + sample)
        ),
        Segment("observation", (9, 2), 0),
        Segment("action", tuple(tokens[9:]), 1, logprobs=(-1.0,) * 3, versions=(0,) * 3),
    )
    trajectory = Trajectory("t", sample, segments, (), StopReason.ANSWERED, rewards={"right": 1.0}, reward=0.25)
    return Episode(RolloutKey(1, "t", sample), Task("t", (), None), replace(trajectory, **changes))


def expected(model, one: Trajectory, kind: str, span: str) -> float:
    logits = model(torch.tensor([one.token_ids])).logits[0].double()
    values = []
    turns = one.turn_index
    for place, is_action in enumerate(one.action_mask):
        if is_action and (span == "response" or turns[place] == 1):
            row = logits[place - 1]
            chances = torch.softmax(row, 0)
            entropy = -float((chances * chances.log()).sum())
            certainty = float(row.exp().sum().log() - row.mean())
            values.append(certainty if kind == "self_certainty" else -entropy)
    return statistics.fmean(values)


@pytest.mark.parametrize("kind", ["self_certainty", "entropy"])
@pytest.mark.parametrize("span", ["response", "last_turn"])
@torch.no_grad()
def test_part_is_the_mean_over_the_sampled_tokens(kind, span):
    model = tiny_model()
    one = learner(model, PRESETS["grpo"])
    samples = assign_credit([[attempt(i) for i in range(3)]], one.algorithm)
    assert {(sample.advantage, sample.reason) for sample in samples} == {(0.0, "zero_variance")}
    settings = UnsupervisedConfig(kind=kind, span=span, weight=0.5)
    found = with_learner_rewards(samples, one, settings, 0)
    assert {sample.outcome for sample in found} == {RolloutOutcome.TRAINED}
    values = [expected(model, sample.episode.trajectory, kind, span) for sample in samples]
    assert [s.episode.trajectory.rewards[kind] for s in found] == pytest.approx(values, abs=1e-9)
    rewards = [0.25 + 0.5 * value for value in values]
    assert [s.episode.trajectory.reward for s in found] == pytest.approx(rewards, abs=1e-9)
    spread, mean = statistics.stdev(rewards), statistics.fmean(rewards)
    wanted = [(reward - mean) / (spread + 1e-6) for reward in rewards]
    assert [s.advantage for s in found] == pytest.approx(wanted, abs=1e-6)
    assert with_learner_rewards(found, one, settings, 0) == found  # is added once


def test_attempts_without_tokens_have_the_lowest_value_and_failed_ones_none():
    one = learner(tiny_model(), PRESETS["grpo"])
    silent = {"segments": (Segment("prompt", (7, 8)),), "stop_reason": StopReason.PROMPT_TOO_LONG}
    failed = attempt(2, failure=Failure("engine", "gone", 1), stop_reason=StopReason.FAILED, rewards={})
    samples = assign_credit([[attempt(0), attempt(1), attempt(2, **silent)], [attempt(1), failed]], one.algorithm)
    found = with_learner_rewards(samples, one, UnsupervisedConfig(kind="entropy"), 0)
    by_outcome = [s for s in found if s.outcome is RolloutOutcome.FAILED]
    assert [dict(s.episode.trajectory.rewards) for s in by_outcome] == [{}]
    values = [s.episode.trajectory.rewards["entropy"] for s in found if "entropy" in s.episode.trajectory.rewards]
    (quiet,) = [s.episode.trajectory.rewards["entropy"] for s in found if not s.episode.trajectory.num_action_tokens]
    assert quiet == min(values) < max(values) < 0


def test_other_kinds_leave_the_samples_alone():
    one = learner(tiny_model(), PRESETS["grpo"])
    samples = assign_credit([[attempt(i) for i in range(2)]], one.algorithm)
    assert with_learner_rewards(samples, one, UnsupervisedConfig(kind="majority"), 0) == samples
