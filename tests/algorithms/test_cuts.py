"""The clip fraction of each loss: the fraction of tokens whose ratio removes their gradient."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from algorithm_parts import CLIPPING_LOSSES, CUTS, LOSSES
from ludus.algorithms.algorithm import PartOptions
from ludus.algorithms.objective import Normalizer, objective
from ludus.algorithms.spec.resolve import PRESETS
from ludus.algorithms.tensors import TokenBatch
from tests.algorithms.test_losses_batch import batch_of

NARROW = {"clip_low": 0.05, "clip_high": 0.08}
CASES = [
    ("ppo_clip", NARROW | {"dual_clip": 1.2}, {}),
    ("clip_cov", NARROW, {}),
    ("mixed_policy", NARROW, {}),
    ("gspo", NARROW, {}),
    ("gspo_token", NARROW, {}),
    ("gmpo", NARROW, {}),
    ("dppo", {}, {"bound": 0.02}),
    ("dppo", {}, {"bound": 0.01, "divergence": "kl"}),
    ("sapo", {}, {}),
    ("gtpo", {}, {}),
    ("kl_cov", {}, {}),
    ("reinforce", {}, {}),
]


def given(logprobs=None):
    batch = batch_of(16, seed=5)
    none = torch.zeros_like(batch.mask)
    return TokenBatch(
        batch.logprobs if logprobs is None else logprobs,
        batch.old,
        batch.behavior,
        batch.advantages,
        batch.mask,
        chosen=none,
        expert=torch.arange(16) % 4 == 0,
    )


def fraction(batch, algorithm):
    return objective(batch, algorithm, Normalizer.of(batch.mask))[1].clip.fraction


@pytest.mark.parametrize(("loss", "fields", "options"), CASES)
def test_clip_fraction_equals_share_of_tokens_with_zero_gradient(loss, fields, options):
    algorithm = replace(PRESETS["grpo"], loss=loss, options=PartOptions(loss=options), **fields)
    leaf = given().logprobs.clone().requires_grad_()
    batch = given(leaf)
    (gradient,) = torch.autograd.grad(LOSSES[loss](batch, algorithm).sum(), leaf)
    found = fraction(batch, algorithm)
    assert found == pytest.approx(float((gradient == 0)[batch.mask].double().mean()), abs=1e-12)
    assert (0 < found < 1) == (loss in CUTS)


def test_cispo_clip_fraction_counts_ratios_outside_clip_range():
    batch = given()
    algorithm = replace(PRESETS["cispo"], clip_low=0.05, clip_high=0.08)
    ratios = (batch.logprobs - batch.old_logprobs)[batch.mask].exp().tolist()
    expected = sum(not 0.95 <= ratio <= 1.08 for ratio in ratios) / len(ratios)
    assert 0 < expected < 1
    assert fraction(batch, algorithm) == pytest.approx(expected, abs=1e-12)


def test_unit_sequence_ratio_is_not_clipped_despite_token_ratios():
    zeros = torch.zeros(1, 2, dtype=torch.float64)
    moved = torch.tensor([[0.3, -0.3]], dtype=torch.float64)
    batch = TokenBatch(moved, zeros, zeros, zeros + 1, torch.ones(1, 2, dtype=torch.bool))
    assert fraction(batch, PRESETS["gspo"]) == 0
    assert fraction(batch, PRESETS["gmpo"]) == 0
    assert fraction(batch, PRESETS["grpo"]) == 0.5


def test_share_of_tokens_selected_by_a_loss_is_reported():
    batch = given()
    chosen = torch.zeros_like(batch.mask)
    chosen[tuple(batch.mask.nonzero()[:3].T)] = True
    stats = objective(replace(batch, chosen=chosen), PRESETS["clip_cov"], Normalizer.of(batch.mask))[1]
    assert stats.chosen_sum == 3
    assert (stats + stats).chosen_sum == 6


def test_every_clipping_loss_has_a_clip_fraction_function():
    assert set(CLIPPING_LOSSES) <= set(CUTS) <= set(LOSSES)
