"""The share of the gradient on few tokens and the mismatch by probability, by hand and over any split."""

import math

import pytest
import torch

from ludus.algorithms.tensors import TokenBatch
from ludus.algorithms.token_statistics import token_statistics


def statistics(rows=slice(None), num_tokens=300, **changes):
    """Three rows of 100 tokens with an advantage of 1, and 100 on two tokens of the last row."""
    advantages = torch.ones(3, 100)
    advantages[2, :2] = 100.0
    inputs = {
        "logprobs": torch.zeros(3, 100),
        "old_logprobs": torch.zeros(3, 100),
        "behavior_logprobs": torch.full((3, 100), -0.01),
        "advantages": advantages,
        "mask": torch.ones(3, 100),
    } | changes
    weights = inputs.pop("weights", torch.ones(3, 100))
    batch = TokenBatch(**{name: value[rows] for name, value in inputs.items()})
    return token_statistics(batch, weights[rows], num_tokens)


def test_the_top_share_is_that_of_the_largest_hundredth_over_any_split():
    whole = statistics()
    assert whole.top_share == pytest.approx((100 + 100 + 1) / (298 + 200))
    assert sum([statistics(slice(1, 3))], start=statistics(slice(0, 1))) == whole
    assert statistics(advantages=torch.ones(3, 100)).top_share == pytest.approx(0.01)
    assert statistics(advantages=torch.zeros(3, 100)).top_share == 0.0


def test_ratios_and_correction_weights_count_and_masked_tokens_do_not():
    ratios = torch.zeros(3, 100)
    ratios[0, 0] = math.log(200.0)
    flat = {"advantages": -torch.ones(3, 100), "num_tokens": 100}
    assert statistics(logprobs=ratios, **flat).top_share == pytest.approx(200 / 499)
    assert statistics(weights=ratios.exp(), **flat).top_share == pytest.approx(200 / 499)
    mask = torch.ones(3, 100)
    mask[0, 0] = 0
    masked = statistics(logprobs=ratios.masked_fill(ratios > 0, math.nan), mask=mask, **flat)
    assert masked.top_share == pytest.approx(1 / 299)


def test_the_mismatch_is_a_mean_by_the_engines_probability():
    behavior = torch.full((3, 100), math.log(0.95))
    behavior[0] = math.log(0.005)
    found = statistics(behavior_logprobs=behavior, old_logprobs=behavior - torch.tensor([[0.3], [0.1], [0.1]]))
    assert found.gap_means == pytest.approx({"<=0.01": 0.3, "<=1": 0.1}, rel=1e-5)
