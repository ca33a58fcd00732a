"""Losses, aggregation, KL and corrections against slow references."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import algorithms_oracle as oracle
from ludus.algorithms import corrections
from ludus.algorithms.kl import KLS, k1, k2, k3, k3_k2grad, penalised_advantages, penalised_rewards
from ludus.algorithms.losses import ClipRange, clip_stats, ppo_clip, ppo_cut, reinforce, sft
from ludus.algorithms.objective import AGGREGATIONS, Normalizer, aggregate

quick = settings(max_examples=25, deadline=None, derandomize=True)
CLIPS = st.sampled_from([(0.2, 0.2, None), (0.2, 0.28, None), (0.1, 0.3, 1.2), (0.0, 0.0, 3.0)])


def rows(*values):
    return torch.tensor(values, dtype=torch.float64)


def value_and_gradient(function, logprobs, mask):
    """The token losses, and the gradient of an uneven sum of them (even sums hide swapped tokens)."""
    leaf = logprobs.clone().requires_grad_()
    loss = function(leaf)
    weights = torch.arange(1.0, loss.numel() + 1, dtype=torch.float64).reshape(loss.shape)
    (gradient,) = torch.autograd.grad((loss * weights).sum() + 0 * torch.where(mask, leaf, 0.0).sum(), leaf)
    return loss.detach(), gradient


def assert_same(ours, loop, batch):
    value, gradient = value_and_gradient(ours, batch.logprobs, batch.mask)
    expected, expected_gradient = value_and_gradient(loop, batch.logprobs, batch.mask)
    torch.testing.assert_close(value, expected, **oracle.TOLERANCE)
    torch.testing.assert_close(gradient, expected_gradient, **oracle.TOLERANCE)
    assert torch.equal(gradient[~batch.mask], torch.zeros_like(gradient[~batch.mask]))


@quick
@given(batch=oracle.batches(), clip=CLIPS)
def test_ppo_clip_equals_the_loop(batch, clip):
    low, high, dual = clip
    given = {"old_logprobs": batch.old, "advantages": batch.advantages, "mask": batch.mask}
    assert_same(
        lambda lp: ppo_clip(logprobs=lp, **given, eps_low=low, eps_high=high, dual_clip=dual),
        lambda lp: oracle.tokens(
            batch.mask,
            lambda i, t: oracle.ppo_token(lp[i, t], batch.old[i, t], batch.advantages[i, t], (low, high), dual),
        ),
        batch,
    )


@quick
@given(batch=oracle.batches())
def test_reinforce_and_sft_equal_the_loop(batch):
    assert_same(
        lambda lp: reinforce(logprobs=lp, advantages=batch.advantages, mask=batch.mask),
        lambda lp: oracle.tokens(batch.mask, lambda i, t: -batch.advantages[i, t] * lp[i, t]),
        batch,
    )
    assert_same(
        lambda lp: sft(logprobs=lp, mask=batch.mask),
        lambda lp: oracle.tokens(batch.mask, lambda i, t: -lp[i, t]),
        batch,
    )


def test_ppo_clip_matches_hand_computed_values():
    """Ratio 1.5 and 0.5 with either sign of the advantage, ratio 6 with a negative one, a masked token."""
    logprobs = rows([math.log(1.5), math.log(1.5), math.log(0.5), math.log(0.5), math.log(6), torch.nan])
    rest = {"advantages": rows([2, -2, 2, -2, -1, 9]), "mask": torch.tensor([[1, 1, 1, 1, 1, 0]])}
    old = torch.zeros(1, 6, dtype=torch.float64)
    loss = ppo_clip(logprobs=logprobs, old_logprobs=old, **rest, eps_low=0.2, eps_high=0.28)
    torch.testing.assert_close(loss, rows([-2.56, 3, -1, 1.6, 6, 0]), **oracle.TOLERANCE)
    dual = ppo_clip(logprobs=logprobs, old_logprobs=old, **rest, dual_clip=3.0)
    torch.testing.assert_close(dual, rows([-2.4, 3, -1, 1.6, 3, 0]), **oracle.TOLERANCE)


def test_ppo_clip_defaults_and_refused_options():
    given = {"logprobs": rows([1.0]), "old_logprobs": rows([0.0]), "mask": torch.ones(1, 1)}
    assert ppo_clip(**given, advantages=rows([1.0])).item() == pytest.approx(-1.2)
    with pytest.raises(TypeError, match="eps_hi"):
        ppo_clip(**given, advantages=rows([1.0]), eps_hi=0.3)
    with pytest.raises(ValueError, match="dual_clip must be above 1"):
        ppo_clip(**given, advantages=rows([1.0]), dual_clip=0.5)
    with pytest.raises(ValueError, match="advantages has shape"):
        ppo_clip(**given, advantages=rows([1.0, 2.0]))


def test_a_ratio_is_clamped_in_log_space():
    far = rows([500.0, -500.0])
    given = {"old_logprobs": torch.zeros_like(far), "mask": torch.ones(1, 2)}
    loss = ppo_clip(logprobs=far, **given, advantages=rows([-1.0, 1.0]))
    torch.testing.assert_close(loss, rows([math.exp(20), -math.exp(-20)]), **oracle.TOLERANCE)


def test_ppo_clip_detaches_old_logprobs_and_advantages():
    """The same tensor as new and old: ratio 1, gradient -A."""
    logprobs = rows([-0.3, -2.0]).requires_grad_()
    advantages = rows([2.0, -1.0]).requires_grad_()
    loss = ppo_clip(logprobs=logprobs, old_logprobs=logprobs, advantages=advantages, mask=torch.ones(1, 2))
    loss.sum().backward()
    assert loss.tolist() == [[-2.0, 1.0]]
    assert logprobs.grad.tolist() == [[-2.0, 1.0]]
    assert advantages.grad is None


@quick
@given(batch=oracle.batches(), clip=CLIPS)
def test_clip_stats_count_the_tokens_without_gradient(batch, clip):
    given = {"old_logprobs": batch.old, "advantages": batch.advantages, "mask": batch.mask}
    ratio = (batch.logprobs - batch.old).exp()
    cut = ppo_cut(ratio=ratio, advantages=batch.advantages, mask=batch.mask, clip=ClipRange(*clip))
    stats = clip_stats(logprobs=batch.logprobs, old_logprobs=batch.old, mask=batch.mask, cut=cut)
    leaf = batch.logprobs.clone().requires_grad_()
    low, high, dual = clip
    loss = ppo_clip(logprobs=leaf, **given, eps_low=low, eps_high=high, dual_clip=dual)
    (gradient,) = torch.autograd.grad(loss.sum(), leaf)
    ratios = (batch.logprobs - batch.old)[batch.mask].exp().tolist()
    assert stats.tokens == len(ratios)
    assert stats.clipped_low + stats.clipped_high + stats.clipped_dual == int((gradient == 0)[batch.mask].sum())
    assert stats.ratio_mean == pytest.approx(sum(ratios) / max(len(ratios), 1), abs=1e-10)
    assert stats.ratio_max == pytest.approx(max(ratios, default=0.0), abs=1e-10)


def test_clip_stats_over_masked_tokens_match_hand_computed_values():
    """Three of four action tokens are cut off; the padding would halve the share."""
    logprobs = rows([math.log(1.5), math.log(0.5), math.log(6), 0.0, 9.0, 9.0, 9.0, 9.0])
    mask = torch.tensor([[1, 1, 1, 1, 0, 0, 0, 0]])
    cut = ppo_cut(
        ratio=logprobs.exp(), advantages=rows([1, -1, -1, 1, 1, 1, 1, 1]), mask=mask, clip=ClipRange(0.2, 0.2, 3.0)
    )
    stats = clip_stats(logprobs=logprobs, old_logprobs=torch.zeros_like(logprobs), mask=mask, cut=cut)
    assert (stats.clipped_high, stats.clipped_low, stats.clipped_dual) == (1, 1, 1)
    assert stats.fraction == 0.75
    assert stats.ratio_mean == pytest.approx((1.5 + 0.5 + 6 + 1) / 4)
    assert (stats + stats).fraction == 0.75
    assert (stats + stats).ratio_max == pytest.approx(6)


@pytest.mark.parametrize("how", list(AGGREGATIONS))
@quick
@given(batch=oracle.batches(), constant=st.integers(1, 20))
def test_aggregate_equals_the_loop(how, batch, constant):
    leaf = batch.logprobs.clone().requires_grad_()
    value = aggregate(loss=leaf, mask=batch.mask, how=how, constant=constant)
    expected = oracle.aggregate(leaf, batch.mask, how, constant)
    torch.testing.assert_close(value, expected, **oracle.TOLERANCE)
    if batch.mask.any():
        (gradient,) = torch.autograd.grad(value, leaf)
        (expected_gradient,) = torch.autograd.grad(expected, leaf)
        torch.testing.assert_close(gradient, expected_gradient, **oracle.TOLERANCE)


def test_aggregate_matches_hand_computed_values():
    loss = rows([1, 2, 3, 9], [5, 9, 9, 9], [9, 9, 9, 9])
    mask = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0], [0, 0, 0, 0]])
    values = [float(aggregate(loss=loss, mask=mask, how=how, constant=8)) for how in AGGREGATIONS]
    assert values == pytest.approx([11 / 4, (2 + 5) / 2, (6 + 5) / 2, 11 / 16])
    assert float(aggregate(loss=loss, mask=mask, how="constant")) == pytest.approx(11 / 8)
    assert float(aggregate(loss=loss, mask=mask)) == pytest.approx(11 / 4)


def test_trajectory_loss_is_averaged_over_trajectories_with_action_tokens():
    mask = torch.tensor([[1, 1], [0, 0], [0, 1]])
    loss = torch.tensor([3.0, torch.nan, 6.0], dtype=torch.float64)
    assert float(aggregate(loss=loss, mask=mask)) == 4.5
    parts = [aggregate(loss=loss[i : i + 1], mask=mask[i : i + 1], normaliser=Normalizer(3, 2)) for i in range(3)]
    assert float(sum(parts)) == 4.5


def test_aggregate_rejects_unknown_mode_missing_constant_and_wrong_shape():
    loss, mask = torch.ones(2, 3), torch.ones(2, 3)
    with pytest.raises(ValueError, match=r"'mean' is not one of token_mean"):
        aggregate(loss=loss, mask=mask, how="mean")
    with pytest.raises(ValueError, match=r"needs normaliser\.constant"):
        aggregate(loss=loss, mask=mask, how="constant", normaliser=Normalizer(6, 2))
    with pytest.raises(ValueError, match="loss has shape"):
        aggregate(loss=loss[:1], mask=mask)
    assert float(aggregate(loss=loss, mask=torch.zeros(2, 3))) == 0.0


def test_normalisers_of_microbatches_sum_to_that_of_the_batch():
    mask = torch.tensor([[1, 1, 0], [0, 0, 0], [0, 1, 0]])
    assert Normalizer.of(mask[:1], 9) + Normalizer.of(mask[1:], 9) == Normalizer.of(mask, 9) == Normalizer(3, 2, 9)
    with pytest.raises(ValueError, match="one constant"):
        Normalizer(1, 1, 8) + Normalizer(1, 1, 9)


@pytest.mark.parametrize("name", ["k1", "k2", "k3", "abs"])
@quick
@given(batch=oracle.batches())
def test_kl_equals_the_loop(name, batch):
    batch = replace(batch, logprobs=batch.clean(batch.logprobs))
    ref = batch.clean(batch.ref)
    assert_same(
        lambda lp: torch.where(batch.mask, KLS[name](logprobs=lp, ref_logprobs=ref), 0.0),
        lambda lp: oracle.tokens(batch.mask, lambda i, t: oracle.kl_token(name, lp[i, t], ref[i, t])),
        batch,
    )


def test_k3_k2grad_has_the_value_of_one_and_the_gradient_of_the_other():
    logprobs, ref = rows([-1.0, -0.2, -3.0]).requires_grad_(), rows([-1.5, -0.9, -0.1])
    mixed = k3_k2grad(logprobs=logprobs, ref_logprobs=ref)
    torch.testing.assert_close(mixed, k3(logprobs=logprobs, ref_logprobs=ref), **oracle.TOLERANCE)
    (gradient,) = torch.autograd.grad(mixed.sum(), logprobs)
    torch.testing.assert_close(gradient, (logprobs - ref).detach(), **oracle.TOLERANCE)


def test_kl_estimators_match_hand_computed_values_including_large_gaps():
    pair = {"logprobs": rows([0.0, -100.0]), "ref_logprobs": rows([math.log(2.0), 0.0])}
    torch.testing.assert_close(k1(**pair), rows([-math.log(2), -100.0]), **oracle.TOLERANCE)
    torch.testing.assert_close(k2(**pair), rows([math.log(2) ** 2 / 2, 5000.0]), **oracle.TOLERANCE)
    torch.testing.assert_close(k3(**pair), rows([1 - math.log(2), math.exp(20) - 101]), **oracle.TOLERANCE)


def test_expected_gradients_of_kl_estimators_match_documentation():
    """Summed over a whole distribution: k1 in the loss has none, k2 the reverse KL's, k3 the forward KL's."""
    logits, ref = rows([0.3, -1.0, 0.8])[0], rows([0.0, 0.5, -0.4])[0].log_softmax(-1)

    def gradient(function):
        leaf = logits.clone().requires_grad_()
        (result,) = torch.autograd.grad(function(leaf.log_softmax(-1)), leaf)
        return result

    p = logits.softmax(-1)
    reverse = gradient(lambda lp: (lp.exp() * (lp - ref)).sum())
    forward = gradient(lambda lp: (ref.exp() * (ref - lp)).sum())

    def in_loss(name):
        return gradient(lambda lp: (p * KLS[name](logprobs=lp, ref_logprobs=ref)).sum())

    torch.testing.assert_close(in_loss("k1"), torch.zeros(3, dtype=torch.float64), **oracle.TOLERANCE)
    torch.testing.assert_close(in_loss("k2"), reverse, **oracle.TOLERANCE)
    torch.testing.assert_close(in_loss("k3_k2grad"), reverse, **oracle.TOLERANCE)
    torch.testing.assert_close(in_loss("k3"), forward, **oracle.TOLERANCE)


@quick
@given(batch=oracle.batches(), coef=st.sampled_from([0.0, 0.1, 2.0]))
def test_penalties_equal_the_loop(batch, coef):
    kl, counts = batch.entropy, oracle.lengths(batch.mask)
    sums = [sum(row[mask].tolist()) for row, mask in zip(kl, batch.mask, strict=True)]
    rewards = penalised_rewards(rewards=batch.rewards, kl=kl, mask=batch.mask, coef=coef)
    expected = [r - coef * s for r, s in zip(batch.rewards.tolist(), sums, strict=True)]
    torch.testing.assert_close(rewards, rows(*expected), **oracle.TOLERANCE)
    total = max(sum(counts), 1)
    for granularity, mean in (
        ("token", sum(sums) / total),
        ("trajectory", sum(s * n for s, n in zip(sums, counts, strict=True)) / total),
    ):
        ours = penalised_advantages(
            advantages=batch.advantages, kl=kl, mask=batch.mask, coef=coef, granularity=granularity
        )
        loop = oracle.tokens(
            batch.mask,
            lambda i, t, token=granularity == "token", mean=mean: (
                batch.advantages[i, t] - coef * ((kl[i, t] if token else sums[i]) - mean)
            ),
        )
        torch.testing.assert_close(ours, loop, **oracle.TOLERANCE)


@quick
@given(batch=oracle.batches(), cap=st.sampled_from([0.5, 1.0, 2.0]))
def test_tis_and_mismatch_equal_the_loop(batch, cap):
    pair = {"old_logprobs": batch.old, "behavior_logprobs": batch.behavior, "mask": batch.mask}
    weights = corrections.tis(**pair, cap=cap)
    loop = oracle.tokens(batch.mask, lambda i, t: (batch.old[i, t] - batch.behavior[i, t]).exp().clamp(max=cap))
    torch.testing.assert_close(weights, loop, **oracle.TOLERANCE)
    gaps = (batch.old - batch.behavior)[batch.mask].tolist()
    stats = corrections.mismatch(**pair, weights=weights)
    ratios = [math.exp(g) for g in gaps]
    num = max(len(gaps), 1)
    assert stats.tokens == len(gaps)
    assert stats.gap_mean == pytest.approx(sum(abs(g) for g in gaps) / num, abs=1e-10)
    assert stats.gap_max == pytest.approx(max((abs(g) for g in gaps), default=0.0), abs=1e-10)
    assert stats.k3 == pytest.approx(sum(math.exp(g) - g - 1 for g in gaps) / num, abs=1e-10)
    assert stats.truncated_share == sum(r > cap for r in ratios) / num
    if gaps:
        ess = sum(ratios) ** 2 / (len(ratios) * sum(r * r for r in ratios))
        assert stats.effective_share == pytest.approx(ess, rel=1e-10)
    assert corrections.none(**pair).tolist() == batch.mask.double().tolist()


def test_weights_carry_no_gradient_and_agreement_is_weight_one():
    logprobs = rows([-1.0, -2.0]).requires_grad_()
    pair = {"old_logprobs": logprobs, "behavior_logprobs": logprobs.detach(), "mask": torch.ones(1, 2)}
    weights = corrections.tis(**pair)
    assert weights.tolist() == [[1.0, 1.0]]
    assert not weights.requires_grad
    stats = corrections.mismatch(**pair, weights=weights)
    assert (stats.gap_max, stats.k3, stats.effective_share, stats.truncated) == (0.0, 0.0, 1.0, 0)


def test_mismatch_of_empty_batch_is_finite():
    empty = torch.zeros(2, 0)
    stats = corrections.mismatch(old_logprobs=empty, behavior_logprobs=empty, mask=empty)
    assert (stats.gap_mean, stats.k3, stats.effective_share, stats.truncated_share) == (0.0, 0.0, 1.0, 0.0)
