"""What a critic learns: the advantage of each token plus its value, before anything is done to advantages."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ludus.algorithms import advantages
from ludus.algorithms.algorithm import PartOptions
from ludus.algorithms.presets import PRESETS
from ludus.training.credit import Estimates, assign_credit, with_estimates
from test_credit import REWARDS, group, inputs

GAE = replace(PRESETS["ppo"], options=PartOptions(advantage={"lam": 0.9}))


def estimated(algorithm, *, kl_scale=1.0, dtype=torch.float64):
    """Credits of a group with values and KL of each action token; and both as `[N, L]`."""
    credits = assign_credit([group()], algorithm)
    mask, _, _ = inputs(credits)
    draw = torch.Generator().manual_seed(3)
    values = torch.rand(mask.shape, dtype=torch.float64, generator=draw).to(dtype)
    kl = kl_scale * torch.rand(mask.shape, dtype=torch.float64, generator=draw)
    rows = [[table[i, : len(c.advantages)] for i, c in enumerate(credits)] for table in (values, kl)]
    return with_estimates(credits, algorithm, 0, Estimates(values=rows[0], kl=rows[1])), values, kl


def expected(credits, values, **given):
    mask, turn, turn_rewards = inputs(credits)
    rewards = torch.tensor(REWARDS, dtype=torch.float64)
    found = advantages.gae(
        values=values, mask=mask, rewards=rewards, turn=turn, turn_rewards=turn_rewards, lam=0.9, **given
    )
    return advantages.value_targets(advantages=found, values=values, mask=mask)


def check(credits, wanted):
    for i, credit in enumerate(credits):
        assert credit.targets == pytest.approx(wanted[i, : len(credit.targets)].tolist(), abs=1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_targets_are_exact_in_float64_whatever_the_critic_computes_in(dtype):
    credits, values, _ = estimated(GAE, dtype=dtype)
    check(credits, expected(credits, values.double()))


def test_a_kl_in_the_advantage_is_no_part_of_the_targets():
    plain, values, _ = estimated(GAE)
    placed, _, _ = estimated(replace(GAE, kl_coef=1.0, kl_placement="advantage"), kl_scale=6.0)
    assert placed[0].advantages != plain[0].advantages
    check(placed, expected(placed, values))


def test_a_kl_in_the_reward_is_part_of_the_targets():
    placed, values, kl = estimated(replace(GAE, kl="k1", kl_coef=0.3, kl_placement="reward"))
    check(placed, expected(placed, values, kl=kl, kl_coef=0.3))
