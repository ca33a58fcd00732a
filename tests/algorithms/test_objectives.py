"""GDPO and the Lagrange multiplier, against independent computations."""

import math
import random
import statistics

import pytest
import torch

from ludus.algorithms.shaping import LagrangeMultiplier, gdpo, gdpo_batch


def test_gdpo_equals_an_independent_computation():
    rng = random.Random(0)
    groups = [0] * 4 + [1] * 3 + [2] * 5
    parts = [[rng.random(), float(rng.random() < 0.5), 0.3] for _ in groups]
    weights = [1.0, 0.4, 2.0]
    expected = []
    for row, group in zip(parts, groups, strict=True):
        total = 0.0
        for k, weight in enumerate(weights):
            own = [other[k] for other, name in zip(parts, groups, strict=True) if name == group]
            total += weight * (row[k] - statistics.fmean(own)) / (statistics.stdev(own) + 1e-4)
        expected.append(total)
    table, ids = torch.tensor(parts, dtype=torch.float64), torch.tensor(groups)
    found = gdpo(parts=table, weights=weights, group=ids)
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), atol=1e-12, rtol=0)
    batch = (found - statistics.fmean(expected)) / (statistics.stdev(expected) + 1e-4)
    torch.testing.assert_close(gdpo_batch(found), batch, atol=1e-12, rtol=0)


def test_gdpo_distinguishes_what_a_sum_before_normalization_does_not():
    """The example of the paper: (1, 0) and (0, 1) against (1, 1) and (0, 0)."""
    parts = torch.tensor([[0.0, 1.0], [0.0, 2.0], [1.0, 1.0], [0.0, 1.0]], dtype=torch.float64)
    found = gdpo(parts=parts, weights=[1.0, 1.0], group=torch.tensor([0, 0, 1, 1]))
    both = gdpo(parts=torch.tensor([[0.0, 1.0], [1.0, 2.0]]), weights=[1.0, 1.0], group=torch.tensor([0, 0]))
    assert float(found[1]) == pytest.approx(1 / math.sqrt(2), rel=1e-3)
    assert float(both[1]) == pytest.approx(2 / math.sqrt(2), rel=1e-3)


def test_equal_parts_add_exactly_nothing():
    parts = torch.tensor([[0.1, 1.0], [0.1, 0.0]], dtype=torch.float64)
    alone = gdpo(parts=parts[:, 1:], weights=[1.0], group=torch.tensor([0, 0]))
    assert gdpo(parts=parts, weights=[3.0, 1.0], group=torch.tensor([0, 0])).tolist() == alone.tolist()
    assert gdpo_batch(torch.full((3,), 0.1, dtype=torch.float64)).tolist() == [0.0] * 3
    assert gdpo_batch(torch.tensor([0.7], dtype=torch.float64)).tolist() == [0.0]


def test_multiplier_follows_dual_ascent_on_its_logarithm():
    """Safe-RLHF: SGD on `-(cost - limit) exp(log_lambda)`, clamped from above."""
    log_value = torch.nn.Parameter(torch.tensor(math.log(0.8), dtype=torch.float64))
    optimizer = torch.optim.SGD([log_value], lr=0.3)
    one = LagrangeMultiplier(math.log(0.8))
    for cost in (0.5, 0.9, 0.0, 0.1, 1.0, 1.0, 1.0, 1.0, 1.0):
        optimizer.zero_grad()
        (-(cost - 0.2) * log_value.exp()).backward()
        optimizer.step()
        with torch.no_grad():
            log_value.clamp_(max=math.log(1.5))
        one = one.updated(cost=cost, limit=0.2, learning_rate=0.3, largest=1.5)
        assert one.log_value == pytest.approx(log_value.item(), abs=1e-12)
    assert one.value == pytest.approx(1.5)
    rewards, costs = torch.tensor([1.0, 0.0]), torch.tensor([1.0, 0.5])
    assert one.penalise(rewards=rewards, costs=costs).tolist() == pytest.approx([-0.2, -0.3])
