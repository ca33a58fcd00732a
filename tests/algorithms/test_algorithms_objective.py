"""The objective of a microbatch: its parts, the sum over microbatches, and edge cases."""

import operator
from dataclasses import astuple, replace
from functools import reduce

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import algorithms_oracle as oracle
from ludus.algorithms.algorithm import PartOptions
from ludus.algorithms.objective import AGGREGATIONS, Normalizer, objective
from ludus.algorithms.spec.resolve import PRESETS
from ludus.algorithms.tensors import TokenBatch

quick = settings(max_examples=30, deadline=None, derandomize=True)
CONSTANT = 11
FULL = replace(PRESETS["grpo"], kl_coef=0.3, kl="k3", entropy_coef=0.02, correction="tis", tis_cap=1.3, dual_clip=1.5)
VARIANTS = [replace(FULL, aggregation=how) for how in AGGREGATIONS] + [
    PRESETS["grpo"],
    PRESETS["dr_grpo"],
    replace(PRESETS["reinforce"], kl="k3_k2grad", kl_coef=0.1),
]
algorithms = st.sampled_from(VARIANTS)


def token_batch(batch, logprobs):
    return TokenBatch(
        logprobs=logprobs,
        old_logprobs=batch.old,
        behavior_logprobs=batch.behavior,
        advantages=batch.advantages,
        mask=batch.mask,
        ref_logprobs=batch.ref,
        entropy=batch.entropy,
    )


def part_of(batch, chosen):
    """The given rows, cut to the length that they need."""
    columns = batch.mask[chosen].any(0).nonzero()
    width = int(columns.max()) + 1 if len(columns) else 0

    def cut(values):
        return None if values is None else values[chosen][:, :width]

    return TokenBatch(
        logprobs=cut(batch.logprobs),
        old_logprobs=cut(batch.old_logprobs),
        behavior_logprobs=cut(batch.behavior_logprobs),
        advantages=cut(batch.advantages),
        mask=cut(batch.mask),
        ref_logprobs=cut(batch.ref_logprobs),
        entropy=cut(batch.entropy),
    )


@pytest.mark.parametrize(
    ("advantage", "options", "share"),
    [
        ("vtrace", {}, 0.75),
        ("vtrace", {"rho_bar": 3.0, "c_bar": 1.5}, 0.5),
        ("retrace", {"lam": 0.5}, 0.75),
        ("gae", {}, 0.0),
    ],
)
def test_truncated_share_is_reported_for_vtrace_and_retrace(advantage, options, share):
    """Ratios of 0.5, 1.2, 2 and 4, of which V-trace and Retrace cut those above 1 or their own bounds."""
    behavior = torch.tensor([[-3.0, -3.0, -3.0, -3.0, -9.0]], dtype=torch.float64)
    old = behavior + torch.tensor([[0.5, 1.2, 2.0, 4.0, 7.0]], dtype=torch.float64).log()
    batch = TokenBatch(
        logprobs=old,
        old_logprobs=old,
        behavior_logprobs=behavior,
        advantages=torch.ones_like(old),
        mask=torch.tensor([[True] * 4 + [False]]),
    )
    algorithm = replace(PRESETS["ppo"], advantage=advantage, options=PartOptions(advantage=options))
    statistics = objective(batch, algorithm, Normalizer(4, 1, CONSTANT))[1]
    assert statistics.mismatch.truncated_share == share
    assert statistics.mismatch.dropped_share == 0.0


def loop(batch, logprobs, algorithm):
    """Policy loss, KL and entropy token by token; the total after aggregation."""

    def policy(i, t):
        old, a = batch.old[i, t], batch.advantages[i, t]
        if algorithm.loss == "reinforce":
            loss = -a * logprobs[i, t]
        else:
            eps = (algorithm.clip_low, algorithm.clip_high)
            loss = oracle.ppo_token(logprobs[i, t], old, a, eps, algorithm.dual_clip)
        if algorithm.correction == "tis":
            loss = loss * min(float((old - batch.behavior[i, t]).exp()), algorithm.tis_cap)
        return loss

    def kl(i, t):
        if algorithm.kl != "k3_k2grad":
            return oracle.kl_token(algorithm.kl, logprobs[i, t], batch.ref[i, t])
        value, slope = (oracle.kl_token(k, logprobs[i, t], batch.ref[i, t]) for k in ("k3", "k2"))
        return value.detach() + slope - slope.detach()

    terms = [
        (1.0, oracle.tokens(batch.mask, policy)),
        (algorithm.kl_coef, oracle.tokens(batch.mask, kl)),
        (-algorithm.entropy_coef, oracle.tokens(batch.mask, lambda i, t: batch.entropy[i, t])),
    ]
    return sum(c * oracle.aggregate(term, batch.mask, algorithm.aggregation, CONSTANT) for c, term in terms)


@quick
@given(batch=oracle.batches(), algorithm=algorithms)
def test_equals_the_loop_in_value_and_gradient(batch, algorithm):
    leaf = batch.logprobs.clone().requires_grad_()
    total, _ = objective(token_batch(batch, leaf), algorithm, Normalizer.of(batch.mask, CONSTANT))
    expected = loop(batch, leaf, algorithm)
    torch.testing.assert_close(total, expected, **oracle.TOLERANCE)
    (gradient,) = torch.autograd.grad(total, leaf)
    expected_gradient = torch.zeros_like(gradient)
    if batch.mask.any():
        (expected_gradient,) = torch.autograd.grad(expected, leaf)
    torch.testing.assert_close(gradient, expected_gradient, **oracle.TOLERANCE)


@quick
@given(batch=oracle.batches(), algorithm=algorithms, data=st.data())
def test_microbatches_add_up_in_any_split_and_order(batch, algorithm, data):
    """Trap 2: values, gradients and statistics of the parts are those of the whole."""
    normaliser = Normalizer.of(batch.mask, CONSTANT)
    leaf = batch.logprobs.clone().requires_grad_()
    whole = token_batch(batch, leaf)
    total, statistics = objective(whole, algorithm, normaliser)
    (gradient,) = torch.autograd.grad(total, leaf)
    order = data.draw(st.permutations(range(len(batch.mask))))
    sizes = data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=6))
    chunks = [order[sum(sizes[:i]) : sum(sizes[: i + 1])] for i in range(len(sizes))] + [order[sum(sizes) :]]
    results = []
    for rows in (rows for rows in chunks if rows):
        loss, stats = objective(part_of(whole, rows), algorithm, normaliser)
        loss.backward()
        results.append((loss.detach(), stats))
    torch.testing.assert_close(sum(r[0] for r in results), total.detach(), **oracle.TOLERANCE)
    torch.testing.assert_close(leaf.grad, gradient, **oracle.TOLERANCE)
    joined = reduce(operator.add, [r[1] for r in results])
    assert numbers(joined) == pytest.approx(numbers(statistics), rel=1e-10, abs=1e-10)


def numbers(stats):
    def flat(entry):
        if isinstance(entry, dict):
            return list(entry.values())
        return [number for part in entry for number in flat(part)] if isinstance(entry, tuple) else [entry]

    return [0.0 if number is None else number for number in flat(astuple(stats))]


def test_mean_of_microbatch_means_differs_from_the_batch_mean():
    """The batch on which trap 2 shows: 1 and 3 tokens with losses 4 and 0."""
    logprobs = torch.zeros(2, 3, dtype=torch.float64)
    mask = torch.tensor([[True, False, False], [True, True, True]])
    advantages = torch.tensor([[-4.0, 0, 0], [0, 0, 0]], dtype=torch.float64)
    batch = TokenBatch(logprobs, logprobs, logprobs, advantages, mask)
    parts = [objective(part_of(batch, [i]), PRESETS["grpo"], Normalizer.of(mask))[0] for i in range(2)]
    own = [objective(part_of(batch, [i]), PRESETS["grpo"], Normalizer.of(mask[i : i + 1]))[0] for i in range(2)]
    assert float(sum(parts)) == 1.0
    assert float(sum(own)) / 2 == 2.0


@quick
@given(batch=oracle.batches(), algorithm=algorithms)
def test_values_at_masked_positions_do_not_affect_objective(batch, algorithm):
    """The batches hold NaN and infinities there; zeros there give the same bits."""
    zeros = replace(
        batch,
        old=batch.clean(batch.old),
        behavior=batch.clean(batch.behavior),
        ref=batch.clean(batch.ref),
        advantages=batch.clean(batch.advantages),
        entropy=batch.clean(batch.entropy),
    )
    results = []
    for variant, logprobs in ((batch, batch.logprobs), (zeros, batch.clean(batch.logprobs))):
        leaf = logprobs.clone().requires_grad_()
        total, stats = objective(token_batch(variant, leaf), algorithm, Normalizer.of(batch.mask, CONSTANT))
        (gradient,) = torch.autograd.grad(total, leaf)
        results.append((total.detach(), gradient, stats))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])
    assert results[0][1].isfinite().all()
    assert results[0][2] == results[1][2]


@quick
@given(batch=oracle.batches())
def test_an_unchanged_policy_has_ratio_one(batch):
    """Trap 7, the half that lies here: equal log-probabilities give ratio 1, no clipping, gradient -A/M."""
    leaf = batch.logprobs.clone().requires_grad_()
    same = TokenBatch(leaf, batch.logprobs, batch.logprobs, batch.advantages, batch.mask)
    normaliser = Normalizer.of(batch.mask)
    total, stats = objective(same, PRESETS["grpo"], normaliser)
    total.backward()
    expected = -batch.clean(batch.advantages) / max(normaliser.tokens, 1)
    torch.testing.assert_close(leaf.grad, expected, **oracle.TOLERANCE)
    assert stats.clip.fraction == 0
    assert stats.clip.ratio_sum == normaliser.tokens
    assert stats.mismatch.gap_max == 0


def test_a_policy_that_differs_by_dropout_shows_in_the_statistics():
    """Trap 7, the other half: a learner that computes `old` otherwise shows in ratio and clip share."""
    old = torch.full((1, 4), -1.0, dtype=torch.float64)
    logprobs = old + torch.tensor([[0.5, -0.5, 0.5, 0.0]], dtype=torch.float64)
    ones = torch.ones_like(old)
    _, stats = objective(TokenBatch(logprobs, old, old, ones, ones), PRESETS["grpo"], Normalizer(4, 1))
    assert stats.clip.fraction == 0.5
    assert stats.clip.ratio_max == pytest.approx(1.6487212707)


def test_objective_statistics_match_hand_computed_values():
    zeros = torch.zeros(2, 2, dtype=torch.float64)
    batch = TokenBatch(
        logprobs=zeros,
        old_logprobs=zeros,
        behavior_logprobs=zeros - 1,
        advantages=zeros + 2,
        mask=torch.tensor([[True, False], [True, True]]),
        ref_logprobs=zeros - 3,
        entropy=zeros + 0.5,
    )
    algorithm = replace(PRESETS["grpo"], kl="k1", kl_coef=0.1, entropy_coef=0.2, correction="tis", tis_cap=2.0)
    total, stats = objective(batch, algorithm, Normalizer.of(batch.mask))
    assert stats.policy_loss == pytest.approx(-4.0)
    assert float(total) == stats.loss == pytest.approx(-4.0 + 0.1 * 3 - 0.2 * 0.5)
    assert (stats.kl_sum, stats.entropy_sum) == (9.0, 1.5)
    assert (stats.mismatch.truncated, stats.mismatch.gap_mean) == (3, 1.0)
    assert (stats.clip.tokens, stats.clip.ratio_mean) == (3, 1.0)


def test_kl_outside_the_loss_is_reported_and_not_added():
    zeros, ones = torch.zeros(1, 2, dtype=torch.float64), torch.ones(1, 2, dtype=torch.float64)
    batch = TokenBatch(zeros, zeros, zeros, ones, ones, ref_logprobs=zeros - 3)
    algorithm = replace(PRESETS["grpo"], kl="k1", kl_coef=0.5, kl_placement="reward")
    total, stats = objective(batch, algorithm, Normalizer.of(ones))
    assert float(total) == -1.0
    assert (stats.kl_sum, stats.entropy_sum) == (6.0, None)


def test_objective_raises_when_required_inputs_are_missing():
    ones = torch.ones(1, 2)
    batch, counts = TokenBatch(ones, ones, ones, ones, ones), Normalizer(2, 1)
    with pytest.raises(ValueError, match="no ref_logprobs"):
        objective(batch, PRESETS["grpo_paper"], counts)
    with pytest.raises(ValueError, match="no entropy"):
        objective(batch, replace(PRESETS["grpo"], entropy_coef=0.1), counts)
    with pytest.raises(ValueError, match="ref_logprobs has shape"):
        replace(batch, ref_logprobs=torch.ones(1, 1))


def test_a_microbatch_without_action_tokens_is_zero_and_still_has_a_gradient():
    logprobs = torch.full((2, 3), torch.nan, requires_grad=True)
    nothing = torch.zeros(2, 3)
    total, stats = objective(
        TokenBatch(logprobs, nothing, nothing, nothing, nothing), PRESETS["grpo"], Normalizer(5, 1)
    )
    total.backward()
    assert total.item() == 0.0
    assert torch.equal(logprobs.grad, nothing)
    assert (stats.clip.tokens, stats.clip.fraction, stats.clip.ratio_mean) == (0, 0.0, 0.0)
