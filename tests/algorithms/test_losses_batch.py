"""Losses that need the whole batch: selection by covariance, custom normalisers, any split of the batch."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import algorithms_oracle as oracle
import algorithms_oracle_losses as slow
from ludus.algorithms import corrections, losses, preference
from ludus.algorithms.algorithm import Algorithm, PartOptions
from ludus.algorithms.objective import Normalizer, aggregate, objective
from ludus.algorithms.spec.resolve import PRESETS, check_corrections
from ludus.algorithms.tensors import TokenBatch
from ludus.errors import ConfigError

quick = settings(max_examples=12, deadline=None, derandomize=True)


def batch_of(num_rows=7, seed=0):
    """Turns of observations and actions in every order, one row with one action token, one with none."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(num_rows, 9, generator=generator) < 0.55
    mask[0] = False
    mask[1] = torch.arange(9) == 4
    group = torch.arange(num_rows) // 2
    return oracle.make_batch(mask, group, torch.zeros(num_rows, dtype=torch.float64), seed)


def rows_of(batch, rows):
    names = oracle.Batch.__dataclass_fields__
    return oracle.Batch(**{name: getattr(batch, name)[rows] for name in names})


def covariance_of(batch):
    given = {"old_logprobs": batch.old, "advantages": batch.advantages, "mask": batch.mask}
    means = losses.CovarianceMeans.of(**given)
    return losses.token_covariance(**given, means=means)


@quick
@given(batch=oracle.batches(), share=st.sampled_from([1e-4, 0.3, 1.0]), seed=st.integers(-5, 2**40))
def test_covariances_and_choices_equal_the_loop(batch, share, seed):
    expected = slow.covariances(batch)
    covariance = covariance_of(batch)
    loop = oracle.tokens(batch.mask, lambda i, t: torch.tensor(expected[i, t], dtype=torch.float64))
    torch.testing.assert_close(covariance, loop, **oracle.TOLERANCE)
    count = max(1, math.floor(share * len(expected) + 1e-9))
    highest = losses.select_kl_cov(covariance=covariance, mask=batch.mask, share=share)
    best = sorted(expected.values(), reverse=True)[:count]
    assert sorted(covariance[highest].tolist(), reverse=True) == pytest.approx(best, abs=1e-10)
    band = {p for p, c in expected.items() if -0.2 < c < 0.5}
    chosen = losses.select_clip_cov(covariance=covariance, mask=batch.mask, seed=seed, share=share, low=-0.2, high=0.5)
    places = {tuple(p) for p in chosen.nonzero().tolist()}
    assert places <= band
    assert len(places) == min(count, len(band))


def test_random_token_choice_is_uniform():
    """Of 400 equal tokens each seed takes a quarter; over 60 seeds every token is taken about 15 times."""
    mask = torch.ones(20, 20)
    given = {"covariance": torch.ones(20, 20), "mask": mask, "share": 0.25, "low": 0.0, "high": 2.0}
    taken = sum(losses.select_clip_cov(**given, seed=seed).double() for seed in range(60))
    assert taken.sum() == 60 * 100
    assert taken.std().item() == pytest.approx(math.sqrt(60 * 0.25 * 0.75), rel=0.15)
    assert abs(taken.mean(0) - 15).max() < 4
    assert abs(taken.mean(1) - 15).max() < 4


@quick
@given(batch=oracle.batches())
def test_the_covariance_losses_equal_the_loop(batch):
    chosen = losses.select_kl_cov(covariance=covariance_of(batch), mask=batch.mask, share=0.4)
    given = {"old_logprobs": batch.old, "advantages": batch.advantages, "mask": batch.mask, "chosen": chosen}

    def clipped(lp, i, t):
        token = oracle.ppo_token(lp[i, t], batch.old[i, t], batch.advantages[i, t], (0.2, 0.2), None)
        return token * 0 if chosen[i, t] else token

    def penalised(lp, i, t):
        gap = lp[i, t] - batch.old[i, t]
        extra = 0.5 * (gap if gap.item() > 0 else -gap) if chosen[i, t] else 0.0
        return -gap.exp() * batch.advantages[i, t] + extra

    for ours, loop in (
        (lambda lp: losses.clip_cov(logprobs=lp, **given), clipped),
        (lambda lp: losses.kl_cov(logprobs=lp, **given, coef=0.5), penalised),
    ):
        results = []
        for function in (ours, lambda lp, loop=loop: oracle.tokens(batch.mask, lambda i, t: loop(lp, i, t))):
            leaf = batch.logprobs.clone().requires_grad_()
            loss = function(leaf)
            uneven = loss * torch.arange(1.0, loss.numel() + 1, dtype=torch.float64).reshape(loss.shape)
            anchor = 0 * torch.where(batch.mask, leaf, 0.0).sum()
            results.append((loss.detach(), torch.autograd.grad(uneven.sum() + anchor, leaf)[0]))
        torch.testing.assert_close(results[0], results[1], **oracle.TOLERANCE)


def every_loss(batch):
    """Name to (rows, leaf) -> the loss of those rows, normalised by the whole batch."""
    whole = Normalizer.of(batch.mask, constant=50)
    covariance = covariance_of(batch)
    highest = losses.select_kl_cov(covariance=covariance, mask=batch.mask, share=0.2)
    between = losses.select_clip_cov(covariance=covariance, mask=batch.mask, seed=1, share=0.2, low=-1.0, high=1.0)
    ids = torch.randint(2, batch.mask.shape, generator=torch.Generator().manual_seed(2))
    weights = losses.conflict_weights(token_ids=ids, group=batch.group, advantages=batch.advantages, mask=batch.mask)
    positive = torch.arange(len(batch.mask)) % 2 == 1
    num_positive = int(batch.mask[positive].sum())

    def mean(part, loss):
        return aggregate(loss=loss, mask=part.mask, how="token_mean", normaliser=whole)

    def ratio(name, **more):
        def loss(rows, lp):
            part = rows_of(batch, rows)
            rest = {key: value[rows] for key, value in more.items()}
            given = {"old_logprobs": part.old, "advantages": part.advantages, "mask": part.mask}
            return mean(part, getattr(losses, name)(logprobs=lp, **given, **rest))

        return loss

    def dppo(rows, lp):
        part = rows_of(batch, rows)
        return mean(
            part, losses.dppo(logprobs=lp, behavior_logprobs=part.behavior, advantages=part.advantages, mask=part.mask)
        )

    def distill(rows, lp):
        part = rows_of(batch, rows)
        return mean(part, losses.distill(logprobs=lp, teacher_logprobs=part.ref, mask=part.mask))

    def corrected(rows, lp):
        part = rows_of(batch, rows)
        given = {"old_logprobs": part.old, "behavior_logprobs": part.behavior, "mask": part.mask}
        loss = losses.ppo_clip(logprobs=lp, old_logprobs=part.old, advantages=part.advantages, mask=part.mask)
        return mean(part, loss * corrections.tis(**given, level="sequence"))

    def nll(rows, lp):
        part = rows_of(batch, rows)
        return losses.positive_nll(logprobs=lp, positive=positive[rows], mask=part.mask, num_tokens=num_positive)

    def echo(rows, lp):  # here the tokens of the mask are the observations
        mask = batch.mask[rows]
        return losses.echo(logprobs=lp, observations=mask, coef=0.3, num_tokens=whole.tokens)

    plain = ("ppo_clip", "cispo", "sapo", "gspo", "gspo_token", "gmpo")
    return {
        **{name: ratio(name) for name in plain},
        "clip_cov": ratio("clip_cov", chosen=between),
        "kl_cov": ratio("kl_cov", chosen=highest),
        "gtpo": ratio("gtpo", weights=weights),
        "mixed_policy": ratio("mixed_policy", expert=positive),
        "dppo": dppo,
        "distill": distill,
        "sequence_tis": corrected,
        "positive_nll": nll,
        "echo": echo,
    }


@pytest.mark.parametrize("name", sorted(every_loss(batch_of())))
def test_any_split_of_the_batch_has_the_same_gradient(name):
    batch = batch_of()
    loss = every_loss(batch)[name]
    num = len(batch.mask)
    order = torch.randperm(num, generator=torch.Generator().manual_seed(4))
    results = []
    for rows in (torch.arange(num), order):
        for size in (num, 2, 1):
            leaf = batch.logprobs.clone().requires_grad_()
            value = 0.0
            for part in rows.split(size):
                total = loss(part, leaf[part])
                total.backward()
                value += total.item()
            results.append((value, leaf.grad))
    assert results[0][1].abs().max() > 1e-3
    for value, gradient in results[1:]:
        assert value == pytest.approx(results[0][0], abs=1e-10)
        torch.testing.assert_close(gradient, results[0][1], **oracle.TOLERANCE)


def test_preferences_do_not_depend_on_the_split():
    batch, other = batch_of(), batch_of(seed=9)
    given = [batch.logprobs, other.logprobs, batch.ref, other.ref, batch.mask, other.mask]
    names = ["chosen_logprobs", "rejected_logprobs", "ref_chosen_logprobs", "ref_rejected_logprobs"]
    names += ["chosen_mask", "rejected_mask"]
    whole = preference.dpo(**dict(zip(names, given, strict=True)))
    parts = [preference.dpo(**{n: g[i : i + 1] for n, g in zip(names, given, strict=True)}) for i in range(7)]
    torch.testing.assert_close(torch.cat(parts), whole, **oracle.TOLERANCE)


def test_positive_nll_and_echo_match_hand_computed_values():
    logprobs = torch.tensor([[-1.0, -2.0, -4.0], [-8.0, torch.nan, -3.0]], dtype=torch.float64)
    mask = torch.tensor([[1, 0, 1], [1, 0, 0]])
    nll = losses.positive_nll(logprobs=logprobs, positive=torch.tensor([True, False]), mask=mask)
    assert nll.item() == pytest.approx(0.1 * 2.5, abs=1e-12)
    observed = torch.tensor([[0, 1, 0], [0, 0, 1]])
    assert losses.echo(logprobs=logprobs, observations=observed, coef=2.0).item() == pytest.approx(5.0)
    nothing = torch.zeros_like(observed)
    assert losses.echo(logprobs=logprobs, observations=nothing, coef=2.0).item() == 0
    none = losses.positive_nll(logprobs=logprobs, positive=torch.tensor([False, False]), mask=mask)
    assert none.item() == 0


LEVELS = st.sampled_from(["token", "sequence", "geometric"])


@quick
@given(batch=oracle.batches(), level=LEVELS, cap=st.sampled_from([0.75, 1.5]))
def test_corrections_equal_the_loop(batch, level, cap):
    given = {"old_logprobs": batch.old, "behavior_logprobs": batch.behavior, "mask": batch.mask}

    def loop(weight):
        return oracle.tokens(batch.mask, lambda i, t: torch.tensor(weight(i, t), dtype=torch.float64))

    def ratio(i, t):
        return slow.ratio_of(batch, i, t, level)

    def within(value):
        return 0.8 <= value <= cap + 0.1

    pairs = [
        (corrections.tis(**given, cap=cap, level=level), lambda i, t: min(ratio(i, t), cap)),
        (
            corrections.icepop(**given, low=0.8, high=cap + 0.1, level=level),
            lambda i, t: ratio(i, t) if within(ratio(i, t)) else 0.0,
        ),
        (
            corrections.reject_sequence(**given, low=0.8, high=cap + 0.1),
            lambda i, t: float(within(slow.ratio_of(batch, i, t, "geometric"))),
        ),
        (
            corrections.reject_sequence(**given, low=0.8, high=cap + 0.1, by="largest"),
            lambda i, t: float(within(slow.largest_ratio(batch, i))),
        ),
        (corrections.decoupled(**given, cap=cap), lambda i, t: min(slow.ratio_of(batch, i, t, "token"), cap)),
    ]
    for ours, weight in pairs:
        torch.testing.assert_close(ours, loop(weight), **oracle.TOLERANCE)


def test_correction_levels_match_hand_computed_values():
    """Log-ratios 1 and -0.5 on the two action tokens; a masked token of infinity between."""
    given = {
        "old_logprobs": torch.tensor([[0.0, torch.inf, -1.0]], dtype=torch.float64),
        "behavior_logprobs": torch.tensor([[-1.0, 0.0, -0.5]], dtype=torch.float64),
        "mask": torch.tensor([[1, 0, 1]]),
    }
    expected = {"token": [math.e, 0, math.exp(-0.5)], "sequence": [math.exp(0.5), 0, math.exp(0.5)]}
    expected["geometric"] = [math.exp(0.25), 0, math.exp(0.25)]
    for level, row in expected.items():
        weights = corrections.tis(**given, cap=9.0, level=level)
        assert weights.tolist() == [pytest.approx(row, abs=1e-12)]
        inside = corrections.icepop(**given, low=0.0, high=9.0, level=level)
        assert torch.equal(inside, weights)
    with pytest.raises(ValueError, match="level"):
        corrections.tis(**given, level="turn")
    with pytest.raises(ValueError, match="bounds of a ratio"):
        corrections.icepop(**given, low=2.0, high=1.0)


def test_two_corrections_at_once_are_refused():
    for part, other in (("loss", "dppo"), ("advantage", "vtrace"), ("advantage", "retrace")):
        one = Algorithm("x", "", "", **{part: other})
        with pytest.raises(ConfigError, match=f"tis and {other}"):
            check_corrections(replace(one, correction="tis"))
        for correction in ("none", "reject_sequence", "m2po"):
            check_corrections(replace(one, correction=correction))


@quick
@given(batch=oracle.batches(), seed=st.integers(0, 999))
def test_mismatch_by_length_equals_the_parts(batch, seed):
    given = {"old_logprobs": batch.old, "behavior_logprobs": batch.behavior}
    places = torch.randint(0, 12, batch.mask.shape, generator=torch.Generator().manual_seed(seed))
    bounds = (2, 4, 8)
    ours = corrections.mismatch_by_length(**given, mask=batch.mask, positions=places, bounds=bounds)
    edges = [(0, 2), (2, 4), (4, 8), (8, 99)]
    for bucket, (low, high) in zip(ours.buckets, edges, strict=True):
        inside = batch.mask & (places + 1 > low) & (places + 1 <= high)
        assert bucket == corrections.mismatch(**given, mask=inside)
    halves = [
        corrections.mismatch_by_length(
            old_logprobs=batch.old[rows],
            behavior_logprobs=batch.behavior[rows],
            mask=batch.mask[rows],
            positions=places[rows],
            bounds=bounds,
        )
        for rows in (slice(0, 1), slice(1, None))
    ]
    joined = halves[0] + halves[1]
    for one, two in zip(joined.buckets, ours.buckets, strict=True):
        assert one.tokens == two.tokens
        assert one.gap_sum == pytest.approx(two.gap_sum, abs=1e-10)
        assert one.k3_sum == pytest.approx(two.k3_sum, abs=1e-10)


def test_mismatch_by_length_counts_places_from_the_start_of_the_sequence():
    batch = batch_of()
    given = {"old_logprobs": batch.old, "behavior_logprobs": batch.behavior, "mask": batch.mask}
    by_length = corrections.mismatch_by_length(**given, bounds=(4, 6))
    assert by_length.labels == ("<=4", "<=6", ">6")
    expected = [int(batch.mask[:, part].sum()) for part in (slice(0, 4), slice(4, 6), slice(6, 9))]
    assert [b.tokens for b in by_length.buckets] == expected
    default = corrections.mismatch_by_length(**given)
    assert default.labels[0] == "<=512"
    assert default.buckets[0] == corrections.mismatch(**given)
    assert sum(b.tokens for b in default.buckets[1:]) == 0
    with pytest.raises(ValueError, match="ascend"):
        corrections.mismatch_by_length(**given, bounds=(6, 4))
    with pytest.raises(ValueError, match="add up"):
        replace(by_length) + default


CORRECTED = [("tis", level, {"level": level}, lambda w: min(w, 1.1)) for level in ("token", "sequence", "geometric")]
CORRECTED += [
    ("icepop", level, {"level": level, "low": 0.6, "high": 2.0}, lambda w: w if 0.6 <= w <= 2.0 else 0.0)
    for level in ("token", "sequence", "geometric")
]
CORRECTED += [
    ("decoupled", "token", {"cap": 1.1}, lambda w: min(w, 1.1)),
    ("none", "token", {}, lambda w: w),
    ("reject_sequence", "token", {}, lambda w: w),
]


@pytest.mark.parametrize(("name", "level", "options", "limit"), CORRECTED)
def test_truncated_and_dropped_shares_are_computed_from_correction_weights(name, level, options, limit):
    batch = batch_of(12, seed=3)
    algorithm = replace(PRESETS["grpo"], correction=name, tis_cap=1.1, options=PartOptions(correction=options))
    given = TokenBatch(batch.old, batch.old, batch.behavior, batch.advantages, batch.mask)
    found = objective(given, algorithm, Normalizer.of(batch.mask))[1].mismatch
    ratios = [float(slow.ratio_of(batch, i, t, level)) for i, t in batch.mask.nonzero().tolist()]
    cut = sum(0 < limit(w) < w for w in ratios) / len(ratios)
    gone = sum(limit(w) == 0 for w in ratios) / len(ratios)
    if name in ("tis", "decoupled", "icepop"):
        assert 0 < cut + gone < 1
    assert (found.truncated_share, found.dropped_share) == pytest.approx((cut, gone), abs=1e-12)
    ess = sum(ratios) ** 2 / (len(ratios) * sum(w * w for w in ratios))
    assert found.effective_share == pytest.approx(ess, rel=1e-10)
