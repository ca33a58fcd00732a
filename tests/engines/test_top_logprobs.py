"""Top log-probabilities: correct, and without effect on the completion."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ludus.engines.base import Request
from ludus.engines.embedded.engine import EngineSettings, LocalEngine
from ludus.engines.embedded.sampler import SamplingRules, sample, top_tokens
from ludus.errors import RequestRejected
from ludus.types import Guide, SamplingParams
from scripted_engine import ScriptedEngine
from tests.engines.test_engine_local import VOCAB, build, byte_tokenizer

CPU = torch.device("cpu")
SMALL = EngineSettings(context_tokens=256, max_batch=32, kv_cache_tokens=4096, pass_tokens=64)
PROMPT = (5, 6, 7, 8, 200, 9)


def with_engine(work, model=None, settings=SMALL):
    async def run():
        engine = LocalEngine(model or build(), byte_tokenizer(), settings)
        try:
            return await work(engine)
        finally:
            await engine.close()

    return asyncio.run(run())


def sampled(*requests):
    return with_engine(lambda engine: engine.generate_batch(requests))


@torch.no_grad()
def rows(model, tokens, temperature=1.0):
    """Log-probabilities `[T, V]` of a plain forward pass, float64."""
    return (model(torch.tensor([list(tokens)])).logits[0].double() / temperature).log_softmax(-1)


def check_against(expected, found, num):
    """One row of alternatives against all log-probabilities of its place."""
    assert len(found) == num
    values = [logprob for _, logprob in found]
    assert values == pytest.approx(expected[[token for token, _ in found]].tolist(), abs=1e-5)
    assert values == pytest.approx(expected.topk(num).values.tolist(), abs=1e-5)
    assert values == sorted(values, reverse=True)


def by_hand(row, num):
    ranked = sorted(range(len(row)), key=lambda token: (-row[token], token))
    return tuple((token, row[token]) for token in ranked[:num] if row[token] > -math.inf)


@pytest.mark.parametrize("temperature", [0.0, 0.6, 1.0, 1.7])
def test_top_logprobs_are_the_most_likely_tokens_of_the_tempered_distribution(temperature):
    params = SamplingParams(temperature=temperature, max_new_tokens=12, seed=3, top_logprobs=7)
    model = build()
    (done,) = with_engine(lambda e: e.generate_batch([Request("a", PROMPT, params)]), model)
    expected = rows(model, PROMPT + done.tokens, temperature or 1.0)[len(PROMPT) - 1 :]
    assert len(done.top_logprobs) == len(done.tokens) == 12
    for row, found, token, logprob in zip(expected, done.top_logprobs, done.tokens, done.logprobs, strict=False):
        check_against(row, found, 7)
        assert dict(found).get(token, logprob) == logprob
        assert temperature > 0 or found[0] == (token, logprob)


def test_top_k_and_guides_do_not_change_top_logprobs():
    free = SamplingParams(temperature=0.0, max_new_tokens=1, top_logprobs=20)
    cut = replace(free, temperature=1.0, top_k=1)
    guided = replace(free, guide=Guide("regex", "[ab]{3}"))
    plain, less, led = sampled(*(Request(p, PROMPT, q) for p, q in zip("abc", (free, cut, guided), strict=True)))
    assert plain.top_logprobs == less.top_logprobs == led.top_logprobs
    assert led.tokens != plain.tokens


def test_top_logprobs_are_returned_only_on_request_without_changing_sampling():
    asked = [
        Request(f"e{i}", PROMPT[: 2 + i], SamplingParams(max_new_tokens=10, seed=i, temperature=t, top_k=k))
        for i, (t, k) in enumerate(((0.0, 0), (0.5, 9), (1.0, 0), (0.0, 0), (0.5, 0)))
    ]
    nums = (0, 3, 0, 20, 1)
    before = sampled(*asked)
    asking = [replace(r, params=replace(r.params, top_logprobs=num)) for r, num in zip(asked, nums, strict=True)]
    after = sampled(*asking)
    assert [replace(done, top_logprobs=()) for done in after] == before
    assert [{len(row) for row in done.top_logprobs} for done in after] == [{n} if n else set() for n in nums]


def test_top_logprobs_are_bitwise_equal_in_any_batch():
    asked = [
        Request(f"e{i}", PROMPT + tuple(range(9 * i)), SamplingParams(max_new_tokens=8, seed=i, top_logprobs=n))
        for i, n in enumerate((2, 20, 5, 7))
    ]
    together = sampled(*asked)
    alone = [sampled(request)[0] for request in asked]
    assert together == alone


def test_scored_top_logprobs_are_bitwise_equal_to_sampled_ones():
    model, long = build(), tuple((7 * i) % VOCAB for i in range(200))

    async def work(engine):
        params = SamplingParams(max_new_tokens=9, seed=4, top_logprobs=5)
        done = await engine.generate(Request("a", PROMPT, params))
        scored = await engine.score_top(PROMPT + done.tokens, 5)
        return done, scored, await engine.score_top(long, 3), await engine.score(long)

    done, (scores, top), (far, far_top), plain = with_engine(work, model)
    assert tuple(scores[len(PROMPT) :]) == done.logprobs
    assert tuple(top[len(PROMPT) :]) == done.top_logprobs
    assert (top[0], far_top[0], len(far_top)) == ((), (), len(long))
    assert far == plain
    for row, found in zip(rows(model, long), far_top[1:], strict=False):
        check_against(row, found, 3)


def test_scoring_interrupted_by_new_weights_counts_each_token_once():
    tokens = tuple((7 * i) % VOCAB for i in range(200))

    async def work(engine):
        step, left = engine._scheduler.step, [2]

        def interrupted():
            step()
            left[0] -= 1
            if left[0] == 0:
                engine._scheduler.new_weights(1, recompute=True)

        engine._scheduler.step = interrupted
        return await engine.score_top(tokens, 2), await engine.score_top(tokens, 2)

    broken, whole = with_engine(work)
    assert broken == whole
    assert len(whole[0]) == len(whole[1]) == len(tokens)


def test_streamed_pieces_carry_the_top_logprobs_of_their_tokens():
    request = Request("a", PROMPT, SamplingParams(max_new_tokens=120, seed=1, top_logprobs=3))

    async def work(engine):
        whole = await engine.generate(request)
        return whole, [piece async for piece in engine.stream(request)]

    whole, pieces = with_engine(work)
    assert all(len(piece.top_logprobs) == len(piece.tokens) for piece in pieces)
    assert sum((piece.top_logprobs for piece in pieces), ()) == whole.top_logprobs


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.lists(st.sampled_from([-math.inf, -3.0, -2.0, -1.0]), min_size=9, max_size=9), min_size=1, max_size=4),
    st.data(),
)
def test_top_tokens_order_ties_by_id_and_omit_impossible_tokens(table, data):
    nums = data.draw(st.lists(st.integers(0, 12), min_size=len(table), max_size=len(table)).filter(any))
    found = top_tokens(torch.tensor(table), nums)
    assert found == [by_hand(row, num) for row, num in zip(table, nums, strict=True)]


def test_top_tokens_of_a_row_do_not_depend_on_other_rows():
    logits = torch.randn(3, 30, generator=torch.Generator().manual_seed(0))
    params = [SamplingParams(seed=i, top_logprobs=num) for i, num in enumerate((4, 0, 2))]
    rules = SamplingRules.of(params, 30, CPU)
    whole = sample(logits, rules, 0)
    some = sample(logits[[2, 1]], SamplingRules.of([params[2], params[1]], 30, CPU), 0)
    assert [len(row) for row in whole.top] == [4, 0, 2]
    assert list(some.top) == [whole.top[2], whole.top[1]]
    assert sample(logits[1:2], SamplingRules.of(params[1:2], 30, CPU), 0).tokens == whole.tokens[1]


@pytest.mark.parametrize("num", [-1, 21])
def test_top_logprobs_outside_0_to_20_are_rejected(num):
    with pytest.raises(RequestRejected, match=f"top_logprobs is {num}; it must be 0 to 20"):
        sampled(Request("a", PROMPT, SamplingParams(top_logprobs=num)))
    with pytest.raises(RequestRejected, match=f"top_logprobs is {num}"):
        with_engine(lambda engine: engine.score_top(PROMPT, num))


def test_scripted_engine_top_logprobs_contain_only_the_returned_token():
    engine = ScriptedEngine({"a": ["ab", "ab"]}, byte_tokenizer(), 0)

    async def run():
        asked = [Request("a", PROMPT, SamplingParams(top_logprobs=num)) for num in (3, 0)]
        return await engine.generate_batch(asked)

    told, silent = asyncio.run(run())
    assert [row for (row,) in told.top_logprobs] == list(zip(told.tokens, told.logprobs, strict=True))
    assert silent.top_logprobs == ()
