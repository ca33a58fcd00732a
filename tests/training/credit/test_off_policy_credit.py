"""V-trace and Retrace in a run: inputs from the engine's record, the learner's pass and the critic."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from ludus.algorithms.spec.resolve import PRESETS, algorithm_of, resolve
from ludus.config.load import load_config
from ludus.config.sections.algorithm import AlgorithmConfig
from ludus.errors import ConfigError
from ludus.training.credit.advantages import assign_credit, training_rows
from ludus.training.rl.train_step import filter_and_estimate
from ludus.training.rl.validate import check_old_logprobs
from ludus.training.value_models.factory import train_value_model
from tests.training.credit.test_credit import real_group
from tests.training.value_models.test_critic import critic

SHIFT = 0.4
"""By how much the engine recorded less than the learner finds, in the first episode: w = exp(0.4) there."""
OPTIONS = {"vtrace": {"gamma": 0.9, "rho_bar": 1.3, "c_bar": 0.8}, "retrace": {"gamma": 0.9, "lam": 0.8}}


def token_rewards(trajectory):
    """The turns' rewards on their last tokens, the outcome on the last of all."""
    found = []
    actions = [s for s in trajectory.segments if s.kind == "action"]
    for reward, action in zip(trajectory.turn_rewards, actions, strict=True):
        found += [0.0] * (len(action.tokens) - 1) + [reward]
    found[-1] += trajectory.reward
    return found


def vtrace(rewards, values, w, *, gamma, rho_bar, c_bar):
    """Advantages and targets of one row, in a loop."""
    rho, c = min(rho_bar, w), min(c_bar, w)
    v, value, advantages, targets = 0.0, 0.0, [], []
    for r, own in reversed(list(zip(rewards, values, strict=True))):
        advantages.append(rho * (r + gamma * v - own))
        v = own + rho * (r + gamma * value - own) + gamma * c * (v - value)
        targets.append(v)
        value = own
    return advantages[::-1], targets[::-1]


def retrace(rewards, values, w, *, gamma, lam):
    """The same; the weight of a token is on what comes after the one before it."""
    ahead, value, advantages = 0.0, 0.0, []
    for r, own in reversed(list(zip(rewards, values, strict=True))):
        ahead = r + gamma * value - own + gamma * lam * min(1.0, w) * ahead
        advantages.append(ahead)
        value = own
    advantages.reverse()
    return advantages, [a + v for a, v in zip(advantages, values, strict=True)]


def judged_credits(name, options):
    episodes, one = real_group(shift=SHIFT)
    given = AlgorithmConfig(preset="ppo", advantage=name, options={"advantage": options | {"whiten": 0}})
    one.algorithm = resolve(given)
    judge = critic(one.scorer.model, clip=None)
    for _ in range(3):
        train_value_model(judge, filter_and_estimate(assign_credit([episodes], one.algorithm), one, 0, judge))
    return filter_and_estimate(assign_credit([episodes], one.algorithm), one, 0, judge), one, judge


@pytest.mark.parametrize(("name", "loop"), [("vtrace", vtrace), ("retrace", retrace)])
def test_advantages_and_value_targets_equal_a_reference_loop(name, loop):
    credits, one, judge = judged_credits(name, OPTIONS[name])
    for i, credit in enumerate(credits):
        w = math.exp(SHIFT) if i == 0 else 1.0
        rewards = token_rewards(credit.episode.trajectory)
        advantages, targets = loop(rewards, credit.values, w, **OPTIONS[name])
        assert all(credit.values)
        assert credit.advantages == pytest.approx(advantages, abs=1e-9)
        assert credit.targets == pytest.approx(targets, abs=1e-6)
    assert train_value_model(judge, credits)["critic/loss"] > 0
    metrics = one.train(training_rows(credits, mask_observations=True), seed=0)
    assert metrics["optim/grad_norm"] > 0


def test_on_policy_vtrace_equals_gae():
    episodes, one = real_group()
    found = {}
    for name in ("vtrace", "gae"):
        one.algorithm = replace(PRESETS["ppo"], advantage=name, options=replace(PRESETS["ppo"].options, advantage={}))
        found[name] = filter_and_estimate(assign_credit([episodes], one.algorithm), one, 0, critic(one.scorer.model))
    for ours, theirs in zip(found["vtrace"], found["gae"], strict=True):
        assert ours.advantages == pytest.approx(theirs.advantages, abs=1e-9)
        assert ours.targets == pytest.approx(theirs.targets, abs=1e-6)


@pytest.mark.parametrize("name", ["vtrace", "retrace"])
def test_off_policy_advantage_with_a_second_correction_raises(name):
    with pytest.raises(ConfigError, match="twice"):
        resolve(AlgorithmConfig(preset="ppo", advantage=name, correction="tis"))
    words = ["--algorithm.preset", "ppo", "--algorithm.advantage", name, "--training.mode", "async"]
    assert algorithm_of(load_config("search", words)).correction == "none"
    config = load_config("search", [*words, "--training.learner.old_logprobs", "engine"])
    with pytest.raises(ConfigError, match=f"algorithm.advantage = '{name}' compares the two"):
        check_old_logprobs(config, algorithm_of(config))
