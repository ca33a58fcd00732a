"""Sampling: distribution, independence between requests, truncation, ties and edge cases."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ludus.engines.embedded import sampler
from ludus.engines.embedded.sampler import SamplingRules, sample, seed_words, uniforms
from ludus.types import SamplingParams

CPU = torch.device("cpu")


def draw(logits, params, step=0):
    rules = SamplingRules.of(params, logits.shape[1], CPU)
    drawn = sample(logits, rules, step)
    return drawn.tokens, drawn.logprobs


def chi_square(counts, probabilities):
    expected = probabilities * counts.sum()
    return float(((counts - expected) ** 2 / expected).sum())


def test_draws_follow_the_tempered_distribution():
    logits = torch.tensor([1.0, -0.5, 0.3, 2.0, -3.0, 0.0])
    rows, temperature = 40_000, 0.7
    tokens, _ = draw(logits.expand(rows, -1), [SamplingParams(temperature=temperature, seed=s) for s in range(rows)])
    counts = np.bincount(tokens.numpy(), minlength=6)
    expected = (logits / temperature).double().softmax(-1).numpy()
    assert chi_square(counts, expected) < 20.5  # 99.9 % of chi-square with 5 degrees of freedom
    assert chi_square(counts, logits.double().softmax(-1).numpy()) > 1000


def test_seeds_are_hashed_by_splitmix64():
    first_outputs = {0: 0xE220A8397B1DCDAF, 1: 0x910A2DEC89025CC1, 1234567: 0x599ED017FB08FC85}
    assert [int(word) for word in seed_words(list(first_outputs))] == list(first_outputs.values())


def test_uniforms_are_uniform_over_seeds_and_over_steps():
    over_seeds = uniforms(seed_words(range(20_000)), 3)
    over_steps = np.concatenate([uniforms(seed_words([5]), step) for step in range(20_000)])
    for numbers in (over_seeds, over_steps):
        assert numbers.min() >= 0
        assert numbers.max() < 1
        assert chi_square(np.bincount((numbers * 20).astype(int), minlength=20), np.full(20, 0.05)) < 43.8


def test_seeds_of_any_size_produce_distinct_draws():
    seeds = [0, 1, -1, 2**64 - 2, 2**63, 10**30]
    numbers = uniforms(seed_words(seeds), 0)
    assert len(set(numbers.tolist())) == len(seeds)


def test_row_samples_the_same_token_alone_and_in_a_batch():
    logits = torch.randn(8, 50, generator=torch.Generator().manual_seed(0))
    params = [SamplingParams(temperature=0.5 + row / 4, seed=row * 17) for row in range(8)]
    for step in range(20):
        together, logprobs = draw(logits, params, step)
        for row in (0, 3, 7):
            token, logprob = draw(logits[row : row + 1], params[row : row + 1], step)
            assert token[0] == together[row]
            assert logprob[0] == logprobs[row]


def test_sampled_token_does_not_depend_on_other_rows():
    logits = torch.randn(5, 30, generator=torch.Generator().manual_seed(1))
    params = [SamplingParams(temperature=t, seed=s, top_k=k) for t, s, k in
              [(0.0, 1, 0), (1.0, 2, 3), (2.0, 3, 0), (0.7, 4, 5), (1.0, 5, 0)]]  # fmt: skip
    rules = SamplingRules.of(params, 30, CPU)
    tokens = sample(logits, rules, 4).tokens
    order = [4, 0, 3]
    chosen = sample(logits[order], SamplingRules.of([params[row] for row in order], 30, CPU), 4).tokens
    assert chosen.tolist() == tokens[order].tolist()


def test_rows_sampled_in_several_parts_equal_rows_sampled_at_once(monkeypatch):
    logits = torch.randn(7, 30, generator=torch.Generator().manual_seed(2))
    params = [SamplingParams(temperature=0.5 * row, seed=row, top_p=0.9, top_logprobs=row % 3) for row in range(7)]
    rules, steps = SamplingRules.of(params, 30, CPU), np.arange(7, dtype=np.uint64)
    allowed = torch.rand(7, 30, generator=torch.Generator().manual_seed(3)) < 0.8
    whole = sample(logits, rules, steps, allowed)
    monkeypatch.setattr(sampler, "_CPU_LOGITS", 60)
    parts = sample(logits, rules, steps, allowed)
    assert torch.equal(parts.tokens, whole.tokens)
    assert torch.equal(parts.logprobs, whole.logprobs)
    assert torch.equal(parts.cut_logprobs, whole.cut_logprobs)
    assert parts.top == whole.top
    assert [len(top) for top in whole.top] == [row % 3 for row in range(7)]


def test_greedy_breaks_ties_by_lowest_id_with_temperature_one_logprobs():
    logits = torch.tensor([[0.0, 3.0, 3.0, 1.0], [2.0, 2.0, 2.0, 2.0]])
    tokens, logprobs = draw(logits, [SamplingParams(temperature=0)] * 2)
    assert tokens.tolist() == [1, 0]
    expected = 3 - math.log(1 + 2 * math.e**3 + math.e)
    assert logprobs.tolist() == pytest.approx([expected, -math.log(4)], abs=1e-6)


def test_greedy_and_sampled_rows_can_be_mixed_in_a_batch():
    logits = torch.tensor([[0.0, 0.1, 0.0]]).expand(200, -1)
    params = [SamplingParams(temperature=float(row % 2), seed=row) for row in range(200)]
    tokens, _ = draw(logits, params)
    assert set(tokens[0::2].tolist()) == {1}
    assert set(tokens[1::2].tolist()) == {0, 1, 2}


def test_top_k_and_top_p_limit_sampling_but_not_recorded_logprobs():
    logits = torch.log(torch.tensor([0.1, 0.4, 0.05, 0.3, 0.15])).expand(4000, -1)
    cases = [
        ({"top_k": 2}, {1, 3}),
        ({"top_p": 0.69}, {1, 3}),
        ({"top_p": 0.71}, {1, 3, 4}),
        ({"top_k": 3, "top_p": 0.8}, {1, 3}),
        ({"top_p": 1e-9}, {1}),
        ({"top_p": 0.0}, {1}),
        ({"top_k": 9}, {0, 1, 2, 3, 4}),
    ]
    for limits, allowed in cases:
        tokens, logprobs = draw(logits, [SamplingParams(seed=s, **limits) for s in range(4000)])
        assert set(tokens.tolist()) == allowed
        assert torch.allclose(logprobs, logits[0][tokens], atol=1e-6)
    tokens, _ = draw(logits, [SamplingParams(seed=s, top_k=2) for s in range(4000)])
    counts = np.bincount(tokens.numpy(), minlength=5)[[1, 3]]
    assert chi_square(counts, np.array([4 / 7, 3 / 7])) < 10.8


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**63), st.integers(0, 5), st.integers(1, 6))
def test_token_with_zero_probability_is_never_sampled(seed, step, support):
    logits = torch.full((16, 12), -torch.inf)
    logits[:, 3 : 3 + support] = 0.5
    tokens, logprobs = draw(logits, [SamplingParams(seed=seed + row) for row in range(16)], step)
    assert bool(((tokens >= 3) & (tokens < 3 + support)).all())
    assert torch.isfinite(logprobs).all()


def test_uniform_draw_of_one_samples_a_token_with_nonzero_probability(monkeypatch):
    monkeypatch.setattr("ludus.engines.embedded.sampler.uniforms", lambda words, step: np.ones(len(words)))
    logits = torch.tensor([[0.3, 0.1, -torch.inf, -torch.inf], [0.0, -torch.inf, 0.2, 0.7]])
    tokens, _ = draw(logits, [SamplingParams(), SamplingParams()])
    assert tokens.tolist() == [1, 3]
