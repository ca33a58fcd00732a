"""Advantages and filters against slow references and by hand, and their degenerate cases."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import algorithms_oracle as oracle
from algorithm_parts import ADVANTAGES
from ludus.algorithms import advantages, filters
from ludus.algorithms.advantages import grpo, opo, rloo, whiten
from ludus.algorithms.spec.resolve import PRESETS
from ludus.algorithms.tensors import Outcomes

GRPO = PRESETS["grpo"]
COMPARING = ["grpo", "dr_grpo", "rloo", "opo", "reinforce_pp_baseline"]
ALL = [*COMPARING, "raw"]
quick = settings(max_examples=25, deadline=None, derandomize=True)


def compute(name, batch, **numbers):
    outcomes = Outcomes(batch.rewards, batch.group, batch.mask)
    return ADVANTAGES[name](outcomes, replace(GRPO, **numbers))


def float64(*values):
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize("name", ALL)
@quick
@given(batch=oracle.batches(), ddof=st.sampled_from([0, 1]))
def test_equals_the_loop(name, batch, ddof):
    expected = oracle.advantages(name, batch, ddof)
    torch.testing.assert_close(compute(name, batch, std_ddof=ddof), expected, **oracle.TOLERANCE)


def test_grpo_matches_hand_computed_values():
    mask = torch.tensor([[0, 1, 0, 1], [1, 0, 0, 0], [0, 0, 1, 1]])
    rewards, group = float64(1, 0, 0), torch.tensor([5, 5, 5])
    high, low = (2 / 3) / (3**-0.5 + 1e-6), (-1 / 3) / (3**-0.5 + 1e-6)
    expected = float64([0, high, 0, high], [low, 0, 0, 0], [0, 0, low, low])
    torch.testing.assert_close(grpo(rewards=rewards, group=group, mask=mask), expected, **oracle.TOLERANCE)


def test_grpo_with_the_other_deviation_and_a_floor():
    rewards, group, mask = float64(1, 0), torch.tensor([0, 0]), torch.ones(2, 1)
    population = grpo(rewards=rewards, group=group, mask=mask, ddof=0, eps=0.0)
    torch.testing.assert_close(population, float64([1], [-1]), **oracle.TOLERANCE)
    floored = grpo(rewards=rewards, group=group, mask=mask, eps=0.0, std_floor=2.0)
    torch.testing.assert_close(floored, float64([0.25], [-0.25]), **oracle.TOLERANCE)


def test_rloo_and_opo_match_hand_computed_values():
    mask = torch.tensor([[1, 0, 0], [1, 1, 1], [0, 1, 0]])
    ones = {"rewards": float64(1, 0, 0), "group": torch.tensor([1, 1, 1]), "mask": mask}
    expected = float64([1, 0, 0], [-0.5, -0.5, -0.5], [0, -0.5, 0])
    torch.testing.assert_close(rloo(**ones), expected, **oracle.TOLERANCE)
    expected = float64([0.8, 0, 0], [-0.2, -0.2, -0.2], [0, -0.2, 0])
    torch.testing.assert_close(opo(**ones), expected, **oracle.TOLERANCE)


@pytest.mark.parametrize("name", COMPARING)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("equal", [[0.1 + 0.2, 0.3, 0.3], [1 - 0.9 - 0.1, 0.0, 0.0], [1e6 / 3, 1e6 / 3, 1e6 / 3]])
def test_equal_rewards_give_exactly_zero(name, dtype, equal):
    rewards = torch.tensor([*equal, *equal], dtype=dtype)
    group, mask = torch.tensor([0, 0, 0, 1, 1, 1]), torch.ones(6, 2)
    result = ADVANTAGES[name](Outcomes(rewards, group, mask), GRPO)
    assert torch.equal(result, torch.zeros(6, 2, dtype=dtype))


@pytest.mark.parametrize("name", COMPARING)
def test_small_reward_difference_is_not_treated_as_rounding(name):
    rewards, mask = float64(1.0, 1.0 + 1e-9, 0.0, 0.0), torch.ones(4, 1)
    result = ADVANTAGES[name](Outcomes(rewards, torch.tensor([2, 2, 9, 9]), mask), GRPO)
    assert result[0] < 0 < result[1]
    assert torch.equal(result[2:], torch.zeros(2, 1, dtype=torch.float64))


@pytest.mark.parametrize("name", ALL)
@quick
@given(batch=oracle.batches(), data=st.data())
def test_rows_may_come_in_any_order(name, batch, data):
    order = torch.tensor(data.draw(st.permutations(range(len(batch.rewards)))))
    shuffled = replace(batch, rewards=batch.rewards[order], group=batch.group[order], mask=batch.mask[order])
    torch.testing.assert_close(compute(name, shuffled), compute(name, batch)[order], **oracle.TOLERANCE)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_non_finite_reward_raises_with_its_index(name, bad):
    outcomes = Outcomes(float64(1, 0, bad, 0), torch.tensor([0, 0, 1, 1]), torch.ones(4, 2))
    with pytest.raises(ValueError, match=r"rewards\[2\] is (nan|inf|-inf)"):
        ADVANTAGES[name](outcomes, GRPO)


@pytest.mark.parametrize("name", COMPARING)
def test_a_group_of_one_is_refused(name):
    outcomes = Outcomes(float64(1, 0, 1), torch.tensor([4, 4, 8]), torch.ones(3, 2))
    with pytest.raises(ValueError, match="row 2 is alone in its group 8"):
        ADVANTAGES[name](outcomes, GRPO)


def test_unfit_shapes_and_ids_are_refused():
    rewards, group, mask = float64(1, 0), torch.tensor([0, 0]), torch.ones(2, 3)
    with pytest.raises(ValueError, match=r"mask must be \[2, L\]"):
        grpo(rewards=rewards, group=group, mask=mask[:1])
    with pytest.raises(ValueError, match="rewards and group"):
        grpo(rewards=rewards, group=group[:1], mask=mask)
    with pytest.raises(ValueError, match="integers"):
        grpo(rewards=rewards, group=group.double(), mask=mask)


def test_row_without_action_tokens_counts_toward_group_baseline():
    mask = torch.tensor([[True, True], [False, False], [True, False]])
    result = advantages.dr_grpo(rewards=float64(0, 3, 0), group=torch.tensor([1, 1, 1]), mask=mask)
    torch.testing.assert_close(result, float64([-1, -1], [0, 0], [-1, 0]), **oracle.TOLERANCE)


@quick
@given(batch=oracle.batches(), ddof=st.sampled_from([0, 1]))
def test_whitening_sees_action_tokens_only(batch, ddof):
    """More padding, and anything in it, changes nothing; what is left has mean 0 and deviation 1."""
    result = whiten(values=batch.advantages, mask=batch.mask, ddof=ddof)
    torch.testing.assert_close(result, oracle.whitened(batch.advantages, batch.mask, ddof), **oracle.TOLERANCE)
    off = torch.zeros(len(batch.mask), 5, dtype=torch.bool)
    wider = whiten(
        values=torch.cat([batch.advantages, torch.full(off.shape, 1e9)], 1),
        mask=torch.cat([batch.mask, off], 1),
        ddof=ddof,
    )
    torch.testing.assert_close(wider[:, : batch.mask.shape[1]], result, **oracle.TOLERANCE)
    kept = result[batch.mask]
    if len(kept) > 3:
        assert abs(float(kept.mean())) < 1e-9
        assert float(kept.std(correction=ddof)) == pytest.approx(1, abs=1e-3)


def test_one_action_token_is_whitened_to_zero():
    values = float64([torch.nan, 3.0, 7.0])
    assert whiten(values=values, mask=torch.tensor([[0, 1, 0]])).tolist() == [[0.0, 0.0, 0.0]]


def test_integer_rewards_are_converted_to_float32():
    result = grpo(rewards=torch.tensor([1, 0]), group=torch.tensor([0, 0]), mask=torch.ones(2, 1))
    assert result.dtype == torch.float32
    torch.testing.assert_close(result, torch.tensor([[0.5], [-0.5]]) / (0.5**0.5 + 1e-6))


def test_zero_variance_drops_whole_groups_and_ignores_rounding_differences():
    keep = filters.zero_variance(rewards=[0.1 + 0.2, 1, 0.3, 0, 5], group=[3, -1, 3, -1, 2])
    assert keep.tolist() == [False, True, False, True, False]


@quick
@given(batch=oracle.batches())
def test_zero_variance_drops_exactly_the_groups_without_advantage(batch):
    keep = filters.zero_variance(rewards=batch.rewards, group=batch.group)
    scores = oracle.advantage_scores("dr_grpo", batch)
    useful = {g for g, score in zip(batch.group.tolist(), scores, strict=True) if score}
    assert keep.tolist() == [g in useful for g in batch.group.tolist()]


def test_variance_top_keeps_the_groups_that_differ_most():
    rewards, group = [0, 1, 0, 10, 5, 5, 0, 2], [1, 1, 2, 2, 3, 3, 4, 4]
    top = filters.variance_top(rewards=rewards, group=group, p=0.5)
    assert top.tolist() == [False, False, True, True, False, False, True, True]
    assert filters.variance_top(rewards=rewards, group=group, p=0.01).sum() == 2
    assert filters.variance_top(rewards=rewards, group=group, p=1.0).all()
    with pytest.raises(ValueError, match="above 0"):
        filters.variance_top(rewards=rewards, group=group, p=0.0)


def test_overlong_mask_drops_the_truncated():
    assert filters.overlong_mask(truncated=[True, False]).tolist() == [False, True]
