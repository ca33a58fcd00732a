"""Means and deviations over the batch cover only trained samples, without filtered ones."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from algorithm_parts import ADVANTAGES, GREEDY_ADVANTAGES, WHITENED_ADVANTAGES
from ludus.algorithms import advantages
from ludus.algorithms.kl import penalised_advantages
from ludus.algorithms.spec.resolve import PRESETS
from ludus.rollouts.ledger import RolloutKey, RolloutOutcome
from ludus.training.collection.filters import mask_over_age
from ludus.training.credit.advantages import Estimates, assign_credit, training_rows, with_estimates
from ludus.training.rl.train_step import filter_and_estimate
from ludus.types import StopReason
from tests.training.batches.test_branches import episodes as branching
from tests.training.batches.test_branches import tree
from tests.training.credit.test_credit import REWARDS, group, inputs, real_group, table

BASELINE = replace(PRESETS["reinforce_pp_baseline"], kl_coef=0.0)


def with_cut(episodes, *places):
    """The episodes, those at `places` ended by a limit."""
    return [
        replace(e, trajectory=replace(e.trajectory, stop_reason=StopReason.TRUNCATED)) if i in places else e
        for i, e in enumerate(episodes)
    ]


def moments(credits):
    """Mean and standard deviation of the advantages of what trains, and how many tokens that are."""
    rows = training_rows(credits, mask_observations=True)
    each = [a for row in rows for a, trains in zip(row.advantages, row.trains, strict=True) if trains]
    numbers = torch.tensor(each, dtype=torch.float64)
    return float(numbers.mean()), float(numbers.std()), len(numbers)


def standard(tokens):
    return pytest.approx((0.0, 1.0, tokens), abs=1e-6)


@pytest.mark.parametrize("name", ["reinforce_pp", "reinforce_pp_baseline", "ppo", "step_ppo", "vapo"])
def test_overlong_masked_samples_are_excluded_from_whitening(name):
    algorithm = replace(PRESETS[name], kl_coef=0.0, overlong_mask=True)
    assert algorithm.advantage in WHITENED_ADVANTAGES
    credits = assign_credit([with_cut(group(), 0)], algorithm)
    assert credits[0].outcome is RolloutOutcome.MASKED
    assert moments(credits) == standard(31)


def test_zero_variance_groups_are_excluded_from_whitening():
    algorithm = replace(BASELINE, filter_zero_variance=True)
    credits = assign_credit([group(), group((1.0,) * 4, "u")], algorithm)
    assert moments(credits) == standard(38)
    assert assign_credit([group()], algorithm) == credits[:4]


def test_rejected_samples_are_excluded_from_whitening():
    episodes, one = real_group(shift=1.0)
    one.algorithm = replace(BASELINE, correction="reject_sequence")
    credits = filter_and_estimate(assign_credit([episodes], one.algorithm), one, 0)
    assert [c.reason for c in credits] == ["rejected", *["trained"] * 3]
    assert moments(credits) == standard(31)


def test_samples_over_age_are_excluded_from_whitening():
    episodes, one = real_group()
    one.algorithm = BASELINE
    old = episodes[0].trajectory
    versions = tuple(replace(s, versions=tuple(-9 for _ in s.versions)) for s in old.segments)
    episodes[0] = replace(episodes[0], trajectory=replace(old, segments=versions))
    credits = mask_over_age(assign_credit([episodes], one.algorithm), 1, bound=2)
    assert [c.reason for c in credits] == ["over_age", *["trained"] * 3]
    assert moments(filter_and_estimate(credits, one, 0)) == standard(31)


@pytest.mark.parametrize("name", sorted(WHITENED_ADVANTAGES))
def test_tokens_over_age_are_excluded_from_whitening(name):
    """An attempt that began under weights beyond the bound and went on under newer ones."""
    episodes, one = real_group()
    one.algorithm = replace(PRESETS["grpo"], advantage=name)
    first = episodes[0].trajectory
    began = next(i for i, segment in enumerate(first.segments) if segment.versions)
    segments = list(first.segments)
    segments[began] = replace(segments[began], versions=(-9,) * len(segments[began].tokens))
    episodes[0] = replace(episodes[0], trajectory=replace(first, segments=tuple(segments)))
    credits = mask_over_age(assign_credit([episodes], one.algorithm), 1, bound=2)
    assert [c.reason for c in credits] == ["trained"] * 4
    left = 38 - len(segments[began].tokens)
    assert credits[0].trains == tuple(i >= 38 - left for i in range(first.num_action_tokens))
    assert moments(filter_and_estimate(credits, one, 0)) == standard(left)


def test_tree_tokens_over_age_are_excluded_from_whitening():
    """A mean is over the paths, in each of which a token that they share counts."""
    old, new = tree(), tree(1, (0.0, 0.0, 1.0))
    began = replace(old.segments[1], versions=(-9, -9))
    old = replace(old, segments=(old.segments[0], began, *old.segments[2:]))
    credits = mask_over_age(assign_credit([branching(old, new)], BASELINE), 1, bound=2)
    ways = [path for credit in credits for path in credit.episode.trajectory.paths()]
    lengths = torch.tensor([len(path.places) for path in ways])
    mask = torch.arange(int(lengths.max())) < lengths[:, None]
    trains = mask.clone()
    trains[:3, :2] = False
    expected = advantages.reinforce_pp_baseline(
        rewards=torch.tensor([path.trajectory.reward for path in ways], dtype=torch.float64),
        group=torch.zeros(len(ways), dtype=torch.int64),
        mask=mask,
        trains=trains,
    )
    owners = [credit for credit in with_estimates(credits, BASELINE, 0, Estimates()) for _ in range(3)]
    ends = [owner.advantages[path.places[-1]] for owner, path in zip(owners, ways, strict=True)]
    assert ends == pytest.approx(expected[:, 2].tolist(), abs=1e-12)
    assert [credit.trains for credit in credits] == [(False, False, *(True,) * 8), None]


def test_advantage_kl_is_centred_over_trained_tokens():
    algorithm = replace(PRESETS["grpo"], kl_coef=0.5, kl_placement="advantage", overlong_mask=True)
    credits = assign_credit([with_cut(group(), 2)], algorithm)
    mask, _, _ = inputs(credits)
    kl = torch.rand(mask.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * mask
    rows = [kl[i, : len(c.advantages)] for i, c in enumerate(credits)]
    found, _ = table(with_estimates(credits, algorithm, 0, Estimates(kl=rows)))
    trains = mask.clone()
    trains[2] = False
    plain = advantages.grpo(
        rewards=torch.tensor(REWARDS, dtype=torch.float64), group=torch.zeros(4, dtype=torch.int64), mask=mask
    )
    mean = float(kl[trains].sum() / trains.sum())
    expected = torch.where(mask, plain - 0.5 * (kl - mean), 0.0)
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=0)
    ours = penalised_advantages(advantages=plain, kl=kl, mask=mask, coef=0.5, trains=trains)
    torch.testing.assert_close(ours, expected, atol=1e-12, rtol=0)


def test_whitening_uses_all_samples_if_all_are_masked():
    algorithm = replace(BASELINE, overlong_mask=True)
    cut = assign_credit([with_cut(group(), 0, 1, 2, 3)], algorithm)
    assert {c.outcome for c in cut} == {RolloutOutcome.MASKED}
    assert [c.advantages for c in cut] == [c.advantages for c in assign_credit([group()], algorithm)]


def test_whitening_equals_a_loop_over_trained_tokens():
    draw = torch.Generator().manual_seed(1)
    values = torch.randn(5, 7, dtype=torch.float64, generator=draw)
    mask, trains = (torch.rand(5, 7, generator=draw) < 0.6 for _ in range(2))
    values[~mask] = torch.nan
    kept = [float(values[i, t]) for i in range(5) for t in range(7) if mask[i, t] and trains[i, t]]
    mean = sum(kept) / len(kept)
    variance = sum((x - mean) ** 2 for x in kept) / (len(kept) - 1)
    found = advantages.whiten(values=values, mask=mask, trains=trains)
    for i, t in torch.nonzero(mask).tolist():
        expected = (float(values[i, t]) - mean) / (variance + 1e-8) ** 0.5
        assert float(found[i, t]) == pytest.approx(expected, abs=1e-12)
    assert not found[~mask].any()


def of_first_group(algorithm, rewards):
    """The advantages of a group beside another one that has these rewards."""
    groups = [group((1.0, 0.0, 1.0, 0.0)), group(rewards, "u")]
    if algorithm.advantage in GREEDY_ADVANTAGES:
        groups = [[*g, replace(g[-1], key=RolloutKey(1, g[0].task.id, 4), greedy=True)] for g in groups]
    return [c.advantages for c in assign_credit(groups, algorithm) if c.group == 0]


@pytest.mark.parametrize("name", ADVANTAGES)
def test_only_whitened_advantages_depend_on_other_groups(name):
    """So that the table of them is complete: only those are computed again where a filter acts late."""
    algorithm = replace(PRESETS["grpo"], advantage=name, filter_zero_variance=False)
    apart = of_first_group(algorithm, (1.0, 0.0, 0.0, 0.0)) != of_first_group(algorithm, (1.0, 1.0, 1.0, 0.0))
    assert apart == (name in WHITENED_ADVANTAGES)
