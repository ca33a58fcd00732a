"""Episodes truncated by a token limit bootstrap from the critic's value if enabled."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from algorithm_parts import CRITIC_ADVANTAGES
from ludus.algorithms.spec.resolve import resolve
from ludus.config.sections.algorithm import AlgorithmConfig
from ludus.training.batches.rows import last_actions
from ludus.training.credit.advantages import assign_credit
from ludus.training.learner.logprobs import model_precision
from ludus.training.rl.train_step import filter_and_estimate
from ludus.training.value_models.factory import train_value_model
from ludus.types import StopReason
from tests.training.batches.test_branches import episodes as episodes_of
from tests.training.batches.test_branches import tree
from tests.training.credit.test_credit import real_group
from tests.training.learner.test_learner import learner, tiny_model
from tests.training.value_models.test_critic import critic

CUT = (StopReason.TRUNCATED, StopReason.ANSWERED, StopReason.MAX_TOKENS, StopReason.MAX_TURNS)


def algorithm(name="gae", **options):
    given = {"advantage": {"whiten": 0, **options}}
    return resolve(AlgorithmConfig(preset="ppo", advantage=name, options=given))


def taught(one, episodes, rounds=4):
    """A critic whose values are not 0."""
    judge = critic(one.scorer.model, clip=None)
    for _ in range(rounds):
        train_value_model(judge, filter_and_estimate(assign_credit([episodes], one.algorithm), one, 0, judge))
    return judge


def cut_group():
    episodes, one = real_group()
    one.algorithm = algorithm()
    cut = [replace(e, trajectory=replace(e.trajectory, stop_reason=s)) for e, s in zip(episodes, CUT, strict=True)]
    return cut, one, taught(one, cut)


def value_after(judge, tokens):
    """V of the state after a whole sequence, by the critic's own body and head."""
    model = judge.model
    with model_precision(model):
        states = model["body"](input_ids=torch.tensor([tokens]), use_cache=False).last_hidden_state
    return float(model["head"](states[0, -1]).detach())


def test_last_token_of_a_truncated_episode_bootstraps_from_the_next_value():
    episodes, one, judge = cut_group()
    plain = filter_and_estimate(assign_credit([episodes], one.algorithm), one, 0, judge)
    one.algorithm = algorithm(gamma=0.9, lam=0.8, lam_critic=0.8, bootstrap=1)
    asked = filter_and_estimate(assign_credit([episodes], one.algorithm), one, 0, judge)
    one.algorithm = algorithm(gamma=0.9, lam=0.8, lam_critic=0.8)
    without = filter_and_estimate(assign_credit([episodes], one.algorithm), one, 0, judge)
    for i, (before, after) in enumerate(zip(without, asked, strict=True)):
        v = value_after(judge, episodes[i].trajectory.token_ids) if i in (0, 2) else 0.0
        assert (v != 0) == (i in (0, 2))
        n = len(before.advantages)
        added = [0.9 * (0.9 * 0.8) ** (n - 1 - t) * v for t in range(n)]
        expected = [a + d for a, d in zip(before.advantages, added, strict=True)]
        assert after.advantages == pytest.approx(expected, abs=1e-9)
        assert after.targets == pytest.approx([t + d for t, d in zip(before.targets, added, strict=True)], abs=1e-6)
    assert plain[1].values == asked[1].values


@pytest.mark.parametrize("name", CRITIC_ADVANTAGES)
def test_every_critic_advantage_bootstraps_truncated_episodes(name):
    episodes, one, judge = cut_group()
    found = {}
    for bootstrap in (0, 1):
        one.algorithm = algorithm(name, bootstrap=bootstrap)
        found[bootstrap] = filter_and_estimate(assign_credit([episodes], one.algorithm), one, 0, judge)
    changed = [a.advantages != b.advantages for a, b in zip(found[0], found[1], strict=True)]
    assert changed == [True, False, True, False]
    assert [a.targets != b.targets for a, b in zip(found[0], found[1], strict=True)] == changed


def test_each_path_of_a_tree_bootstraps_from_its_end():
    one = learner(tiny_model(), algorithm(bootstrap=1, lam=1.0))
    cut = [replace(tree(i, (1.0, 0.0, 0.5)), stop_reason=StopReason.TRUNCATED) for i in range(2)]
    group = episodes_of(*cut)
    judge = taught(one, group)
    row_ends = last_actions(cut[0])
    assert row_ends == {0: 16, 1: 33, 2: 52}
    asked = filter_and_estimate(assign_credit([group], one.algorithm), one, 0, judge)
    one.algorithm = algorithm(lam=1.0)
    without = filter_and_estimate(assign_credit([group], one.algorithm), one, 0, judge)
    paths = [[*range(20, 30), 4, 5, 6, 7, *end] for end in ((8, 9, 10), (8, 12), (11, 13, 14, 15))]
    own = [value_after(judge, path) for path in paths]
    gained = [a - b for a, b in zip(asked[0].advantages, without[0].advantages, strict=True)]
    assert gained == pytest.approx([sum(own) / 3] * 2 + [own[0]] * 3 + [own[1]] * 2 + [own[2]] * 3, abs=1e-6)
