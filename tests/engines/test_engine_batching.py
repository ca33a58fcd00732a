"""Continuous batching: sharing, preemption, cancellation, eviction and weight updates change no tokens of other
requests.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import threading
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from ludus.engines.base import Request
from ludus.engines.embedded import attention
from ludus.engines.embedded.attention import KernelPass, QuerySpan, ScoreRule, TorchPass
from ludus.engines.embedded.engine import EngineSettings, LocalEngine
from ludus.engines.embedded.kv_cache import PAGE, LayerShape, PagePool, RadixCache
from ludus.engines.embedded.model_runner import RaggedForward, largest_difference
from ludus.engines.embedded.paged_pass import PagedPass
from ludus.engines.embedded.scheduler import BatchScheduler, SequenceState
from ludus.errors import EngineError
from ludus.types import Completion, SamplingParams
from waiting import until

VOCAB = 300
SMALL = EngineSettings(context_tokens=256, max_batch=32, kv_cache_tokens=4096, pass_tokens=64)


def build(seed=0, **changes):
    shape = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "initializer_range": 0.3,
    }
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Qwen3ForCausalLM(Qwen3Config(**(shape | changes))).eval()


def tokens(source, low, high):
    return tuple(source.randrange(VOCAB) for _ in range(source.randint(low, high)))


def alone(model, requests, version=0):
    """What each request gives with an engine of its own."""

    async def one(request):
        engine = LocalEngine(model, settings=SMALL, version=version)
        try:
            return await engine.generate(request)
        finally:
            await engine.close()

    return [asyncio.run(one(request)) for request in requests]


def varied_requests(count, seed=0):
    """Requests of unlike lengths; some are greedy, some share prefixes, some come back with more."""
    source = random.Random(seed)
    system = tokens(source, 40, 40)
    requests = []
    for i in range(count):
        history = system[: source.choice((0, 16, 23, 40))] + tokens(source, 3, 90)
        if requests and source.random() < 0.3:
            history = source.choice(requests).token_ids[:100] + tokens(source, 1, 9)
        params = SamplingParams(
            seed=i,
            temperature=source.choice((0.0, 0.7, 1.0)),
            top_k=source.choice((0, 20)),
            max_new_tokens=source.randint(1, 40),
            stop_token_ids=tuple(range(source.choice((0, 3)))),
        )
        requests.append(Request(f"e{i}", history, params))
    return requests


def test_outputs_are_bitwise_independent_of_the_batch():
    model = build()
    requests = varied_requests(24)
    expected = alone(model, requests)

    async def group():
        engine = LocalEngine(model, settings=SMALL)
        source = random.Random(1)

        async def late(request):
            await asyncio.sleep(source.random() * 0.2)
            return await engine.generate(request)

        answers = await asyncio.gather(*map(late, requests))
        again = await engine.generate_batch(requests)
        assert engine.batch_invariant
        assert engine.stats().cached_tokens > 0
        await engine.close()
        return answers, again

    answers, again = asyncio.run(group())
    assert answers == expected
    assert again == expected


class ShapeDependentLinear(torch.nn.Linear):
    """A matrix product that rounds differently with the number of rows, as some processors' do."""

    def forward(self, input):
        return super().forward(input) * (1.0 + 1e-6 * (input.shape[-2] // 16))


def on_another_processor(model):
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            module.__class__ = ShapeDependentLinear
    return model


@pytest.mark.slow
def test_shape_dependent_model_uses_one_pass_shape_with_identical_bits(monkeypatch):
    model = on_another_processor(build())
    requests = varied_requests(20)
    expected = alone(model, requests)
    shapes = set()
    plain = RaggedForward.logits

    def noting(self, chunks, table, keep, block):
        shapes.add((sum(len(chunk.ids) for chunk in chunks) > 16, len(keep) > 16, block))
        return plain(self, chunks, table, keep, block)

    async def group():
        engine = LocalEngine(model, settings=SMALL)
        monkeypatch.setattr(RaggedForward, "logits", noting)
        answers = await asyncio.gather(*map(engine.generate, requests))
        again = await engine.generate_batch(requests)
        scores = [await engine.score(r.token_ids + a.tokens) for r, a in zip(requests, answers, strict=True)]
        assert engine.batch_invariant
        engine._scheduler.block = 16  # as where the rows are alike
        apart = await engine.generate_batch(requests)
        await engine.close()
        return answers, again, scores, apart

    answers, again, scores, apart = asyncio.run(group())
    assert answers == again == expected
    assert apart != expected
    assert {block for *_, block in shapes} == {64, 16}
    assert {(many, rows) for many, rows, block in shapes if block == 64} >= {(True, True), (False, False)}
    for answer, scored, request in zip(answers, scores, requests, strict=True):
        if request.params.temperature in (0.0, 1.0):
            assert tuple(scored[-len(answer.tokens) :]) == answer.logprobs


def test_invariant_block_size_depends_on_the_configured_pass_tokens(monkeypatch):
    """Up to 112 tokens rows are alike here, above they are not."""
    model = on_another_processor(build())
    monkeypatch.setattr(
        ShapeDependentLinear,
        "forward",
        lambda self, x: torch.nn.Linear.forward(self, x) * (1.0 + (x.shape[-2] > 112) * 1e-5),
    )
    for pass_tokens, block in ((64, 16), (256, 256)):
        engine = LocalEngine(model, settings=replace(SMALL, pass_tokens=pass_tokens))
        assert (engine._forward.invariant, engine._scheduler.block) == (True, block)
        asyncio.run(engine.close())


@pytest.mark.parametrize(
    ("dtype", "changes", "company", "plain"),
    [
        (torch.float32, {}, 0.0, 1e-4),
        (torch.float32, {"batch_invariant": False}, 1e-4, 1e-4),
        (torch.float32, {"no_kernel": True}, 1e-4, 1e-4),
        (torch.float64, {}, 1e-12, 1e-9),
        (torch.bfloat16, {}, 0.1, 0.3),
    ],
)
def test_logprobs_are_within_the_documented_tolerances(dtype, changes, company, plain, monkeypatch):
    """Beside others against a score alone, and against a plain forward pass."""
    changes = dict(changes)
    compiled = dtype != torch.float64 and "no_kernel" not in changes
    if changes.pop("no_kernel", False):
        monkeypatch.setattr(attention, "_library", lambda: None)
    model, settings = build().to(dtype), replace(SMALL, **changes)
    requests = [replace(r, params=replace(r.params, temperature=1.0)) for r in varied_requests(10)]

    async def run():
        engine, single = (LocalEngine(model, settings=settings) for _ in range(2))
        answers = await asyncio.gather(*map(engine.generate, requests))
        histories = [r.token_ids + a.tokens for r, a in zip(requests, answers, strict=True)]
        scores = [await single.score(history) for history in histories]
        assert engine.batch_invariant == (company == 0)
        assert engine._forward.compiled == compiled
        await asyncio.gather(engine.close(), single.close())
        return answers, scores

    for request, answer, scored in zip(requests, *asyncio.run(run()), strict=True):
        own = torch.tensor(answer.logprobs, dtype=torch.float64)
        beside = torch.tensor(scored[-len(answer.tokens) :], dtype=torch.float64)
        assert float((own - beside).abs().max()) <= company
        with torch.no_grad():
            logits = model(torch.tensor([request.token_ids + answer.tokens])).logits[0].double()
        fresh = logits[len(request.token_ids) - 1 : -1].log_softmax(-1)
        fresh = fresh.gather(1, torch.tensor(answer.tokens)[:, None])[:, 0]
        assert float((own - fresh).abs().max()) < plain


def test_an_improbable_token_alone_does_not_make_16_bit_passes_differ():
    expected = torch.randn(3, 1000).log_softmax(-1)
    rounded, wrong = expected.clone(), expected.roll(1, -1)
    rounded[1, 7] += 0.6
    assert largest_difference(rounded, expected, torch.bfloat16) == pytest.approx(0.6 / 1000**0.5, rel=1e-4)
    assert largest_difference(wrong, expected, torch.bfloat16) > 1
    assert largest_difference(rounded, expected, torch.float32) == pytest.approx(0.6, rel=1e-4)


@pytest.mark.scale
def test_cancellation_and_eviction_do_not_change_other_requests():
    model = build()
    requests = varied_requests(60, seed=3)
    expected = alone(model, requests)
    tiny = replace(SMALL, kv_cache_tokens=512, max_batch=6)

    async def group():
        engine = LocalEngine(model, settings=tiny)
        source = random.Random(2)

        async def play(request):
            await asyncio.sleep(source.random() * 0.2)
            task = asyncio.create_task(engine.generate(request))
            if source.random() < 0.3:
                await asyncio.sleep(source.random() * 0.1)
                task.cancel()
            try:
                return await task
            except asyncio.CancelledError:
                return None

        answers = await asyncio.gather(*map(play, requests))
        stats, held = engine.stats(), engine._scheduler.tree.num_pages - engine._scheduler.tree.num_available
        await engine.close()
        return answers, stats, held

    answers, stats, held = asyncio.run(group())
    assert stats.evicted_pages > 0
    assert held == 0
    finished = [(a, e) for a, e in zip(answers, expected, strict=True) if a is not None]
    assert len(finished) > 30
    assert all(a == e for a, e in finished)


def what_is_left(engine):
    """Of requests that are over and episodes that were released: nothing, when no page or slot is lost."""
    tree, core = engine._scheduler.tree, engine._scheduler
    pages = sorted([*tree._free, *(node.page for node in tree._idle)])
    return {
        "requests": len(engine._unfinished) + len(core.running) + len(core.waiting),
        "names": len(engine._sessions),
        "pages": tree.num_pages - len(pages) + (pages != list(range(tree.num_pages))),
        "reserved": core._reserved,
        "slots": len(core._table) - len(core._free_slots),
    }


@pytest.mark.parametrize("recompute", [True, False])
def test_cancelled_aborted_or_updated_requests_leave_no_state_behind(recompute):
    settings = replace(SMALL, kv_cache_tokens=320, max_batch=6, recompute_on_update=recompute)

    async def run():
        engine, source = LocalEngine(build(), settings=settings), random.Random(4)

        async def play(request):
            task = asyncio.create_task(engine.generate(request))
            fate = source.random()
            await asyncio.sleep(source.random() * 0.1)
            if fate < 0.25:
                task.cancel()
            elif fate < 0.5:
                engine.abort(request.episode)
            await asyncio.gather(task, return_exceptions=True)
            engine.release(request.episode)

        async def update():
            for version in range(1, 4):
                await asyncio.sleep(0.05)
                await engine.load_weights(version, dict(build(version).named_parameters()))

        await asyncio.gather(update(), *map(play, varied_requests(30)))
        for again in range(20):  # how full the cache gets is a matter of time
            if engine.stats().evicted_pages:
                break
            requests = (replace(r, episode=f"{r.episode}-{again}") for r in varied_requests(30))
            await asyncio.gather(*map(play, requests))
        await engine.fingerprint()  # what was posted before has been done
        left, evicted = what_is_left(engine), engine.stats().evicted_pages
        await engine.close()
        return left, evicted

    left, evicted = asyncio.run(run())
    assert set(left.values()) == {0}, left
    assert evicted > 0


@pytest.mark.parametrize("recompute", [True, False])
def test_weight_update_keeps_running_requests_and_marks_each_token_version(recompute):
    old, new = build(0), build(1)
    settings = replace(SMALL, recompute_on_update=recompute)
    requests = [
        Request(f"e{i}", tokens(random.Random(i), 20, 60), SamplingParams(temperature=0, max_new_tokens=60))
        for i in range(6)
    ]

    async def run():
        engine = LocalEngine(old, settings=settings)
        tasks = [asyncio.create_task(engine.generate(request)) for request in requests]
        await until(lambda: engine.stats().decode_tokens >= 60)
        await engine.load_weights(1, dict(new.named_parameters()))
        answers = await asyncio.gather(*tasks)
        stats = engine.stats()
        await engine.close()
        return answers, stats

    answers, stats = asyncio.run(run())
    assert (stats.recomputed_tokens > 0) == recompute
    exact = True
    for request, answer in zip(requests, answers, strict=True):
        assert len(answer.tokens) == 60
        assert set(answer.versions) == {0, 1}
        assert list(answer.versions) == sorted(answer.versions)
        cut = answer.versions.index(1)
        history = request.token_ids + answer.tokens
        for model, part in ((old, slice(0, cut)), (new, slice(cut, None))):
            with torch.no_grad():
                logits = model(torch.tensor([history])).logits[0, len(request.token_ids) - 1 : -1]
            fresh = logits.log_softmax(-1).gather(1, torch.tensor(answer.tokens)[:, None])[:, 0]
            gap = float((fresh[part] - torch.tensor(answer.logprobs)[part]).abs().max())
            exact &= gap < 1e-4
    # Kept keys and values are those of the old weights: then the later log-probabilities are a mixture.
    assert exact == recompute


def test_cache_computed_with_old_weights_is_reused_only_by_its_episode():
    """An episode goes on from what older weights computed; one that begins later never finds that."""
    old, new = build(0), build(1)
    prompt = tokens(random.Random(0), 40, 40)
    params = SamplingParams(temperature=0, max_new_tokens=8)

    async def run():
        engine = LocalEngine(old, settings=replace(SMALL, recompute_on_update=False))
        first = await engine.generate(Request("early", prompt, params))
        await engine.load_weights(1, dict(new.named_parameters()))
        engine.stats(reset=True)
        await engine.generate(Request("early", prompt + first.tokens + prompt[:5], params))
        kept = engine.stats(reset=True).cached_tokens
        late = await engine.generate(Request("late", prompt, params))
        found = engine.stats(reset=True).cached_tokens
        again = await engine.generate(Request("later", prompt, params))
        shared = engine.stats().cached_tokens
        for version in range(2, 12):
            await engine.load_weights(version, dict(new.named_parameters()))
        for episode in ("early", "late", "later"):
            engine.release(episode)
        await engine.load_weights(12, dict(new.named_parameters()))
        roots = len(engine._scheduler.tree._roots)
        await engine.close()
        return kept, found, late, again, shared, roots

    kept, found, late, again, shared, roots = asyncio.run(run())
    assert kept >= 40
    assert found == 0
    assert late == again
    assert shared >= 32
    assert roots <= 2  # one beginning for each version would be a leak
    (fresh,) = alone(new, [Request("late", prompt, params)])
    assert late.tokens == fresh.tokens


def test_episode_starting_during_a_weight_update_reuses_no_old_cache():
    old, new = build(0), build(1)
    prompt = tokens(random.Random(0), 40, 40)
    params = SamplingParams(temperature=0, max_new_tokens=8)

    async def run():
        engine, go = LocalEngine(old, settings=replace(SMALL, recompute_on_update=False)), threading.Event()
        await engine.generate(Request("early", prompt, params))
        engine.stats(reset=True)
        engine._worker.submit(go.wait)
        loading = asyncio.create_task(engine.load_weights(1, dict(new.named_parameters())))
        await asyncio.sleep(0)
        beginning = asyncio.create_task(engine.generate(Request("late", prompt, params)))
        await asyncio.sleep(0)
        go.set()
        await loading
        late = await beginning
        found = engine.stats().cached_tokens
        await engine.close()
        return late, found

    late, found = asyncio.run(run())
    assert (set(late.versions), found) == ({1}, 0)
    (fresh,) = alone(new, [Request("late", prompt, params)])
    assert late.tokens == fresh.tokens


def test_an_aborted_request_returns_its_tokens_so_far():
    model = build()
    request = Request("e", tokens(random.Random(0), 30, 30), SamplingParams(seed=3, max_new_tokens=80))
    (whole,) = alone(model, [request])

    async def run():
        engine = LocalEngine(model, settings=SMALL)
        task = asyncio.create_task(engine.generate(request))
        await until(lambda: engine.stats().decode_tokens >= 10)
        await engine.pause()
        engine.abort("e")
        await engine.resume()
        part = await task
        await engine.close()
        return part

    part = asyncio.run(run())
    assert isinstance(part, Completion)
    assert part.finish_reason == "abort"
    assert 10 <= len(part.tokens) < 80
    assert part.tokens == whole.tokens[: len(part.tokens)]
    assert part.logprobs == whole.logprobs[: len(part.tokens)]


@pytest.mark.parametrize("recompute", [True, False])
def test_aborted_request_continues_under_new_weights_with_versions_per_token(recompute):
    old, new = build(0), build(1)
    request = Request("e", tokens(random.Random(0), 30, 30), SamplingParams(seed=3, max_new_tokens=60))

    async def run():
        engine = LocalEngine(old, settings=replace(SMALL, recompute_on_update=recompute))
        task = asyncio.create_task(engine.generate(request))
        await until(lambda: engine.stats().decode_tokens >= 10)
        await engine.pause()
        engine.abort("e")
        await engine.resume()
        part = await task
        history = request.token_ids + part.tokens
        early = await engine.score(history)
        await engine.load_weights(1, dict(new.named_parameters()))
        engine.stats(reset=True)
        rest = await engine.generate(
            replace(request, token_ids=history, params=replace(request.params, max_new_tokens=20))
        )
        cached = engine.stats().cached_tokens
        late = await engine.score(history + rest.tokens)
        await engine.close()
        return part, rest, cached, early[30:], late[30 + len(part.tokens) :]

    part, rest, cached, early, late = asyncio.run(run())
    assert 10 <= len(part.tokens) < 60
    assert (len(rest.tokens), rest.finish_reason) == (20, "length")
    assert part.versions + rest.versions == (0,) * len(part.tokens) + (1,) * 20
    (whole,) = alone(old, [request])
    assert (part.tokens, part.logprobs) == (whole.tokens[: len(part.tokens)], whole.logprobs[: len(part.tokens)])
    assert part.logprobs == tuple(early)
    longer = replace(request, token_ids=request.token_ids + part.tokens)
    (fresh,) = alone(new, [replace(longer, params=replace(request.params, max_new_tokens=20))], version=1)
    # Where the old weights' keys and values are kept, the rest is of a mixture that no score gives.
    assert (rest == fresh, rest.logprobs == tuple(late), cached == 0) == (recompute, recompute, recompute)


def test_a_paused_engine_computes_nothing_and_resumes():
    async def run():
        engine = LocalEngine(build(), settings=SMALL)
        await engine.pause()
        task = asyncio.create_task(engine.generate(Request("e", (1, 2, 3), SamplingParams(max_new_tokens=4))))
        await asyncio.sleep(0.05)
        assert engine.stats().steps == 0
        await engine.resume()
        assert len((await task).tokens) == 4
        await engine.close()

    asyncio.run(run())


def test_long_prompt_does_not_stall_decoding_requests():
    model = build(max_position_embeddings=2048)
    forward = RaggedForward(model, 128, 1100, 1)
    core = BatchScheduler(forward, None, RadixCache(128), (8, 1100), 64)
    done = []
    short = SequenceState(Request("s", (7, 7, 7), SamplingParams(temperature=0)), 40, done.append)
    long = SequenceState(Request("l", tuple(range(1, 251)) * 4, SamplingParams()), 1, done.append)
    core.add(short)
    core.step()
    core.add(long)
    sizes = []
    while long not in done:
        before = core.stats.batch_tokens, len(short.logprobs)
        core.step()
        sizes.append(core.stats.batch_tokens - before[0])
        assert len(short.logprobs) == before[1] + 1
    forward.close()
    assert sizes == [64] * 15 + [1000 - 15 * 63 + 1]


def small_core(num_pages, num_slots, pass_tokens=64):
    forward = RaggedForward(build(), num_pages, 256, 1)
    return BatchScheduler(forward, None, RadixCache(num_pages), (num_slots, 256), pass_tokens), forward


def test_requests_are_admitted_in_order_under_load():
    """Each step brings another small request; the large ones need most of the cache."""
    core, forward = small_core(num_pages=16, num_slots=4)
    source, added, ended = random.Random(0), [], {}
    while len(added) < 60 or core.busy:
        if len(added) < 60:
            large = len(added) % 20 == 10
            history = tokens(source, 190, 200) if large else tokens(source, 3, 30)
            limit = 20 if large else source.randint(1, 12)
            request = Request(str(len(added)), history, SamplingParams(temperature=0))
            added.append(SequenceState(request, limit, lambda s: ended.update({s: len(s.logprobs)})))
            core.add(added[-1])
        before = {s: len(s.logprobs) for s in core.running}
        steps = core.stats.steps
        core.step()
        assert core.stats.steps == steps + 1
        assert list(core.waiting) == added[len(added) - len(core.waiting) :]
        assert all(len(s.logprobs) == count + 1 for s, count in before.items() if count)
    forward.close()
    assert ended == {s: s.limit for s in added}


def test_a_request_waits_for_a_prefix_without_blocking_others():
    core, forward = small_core(num_pages=64, num_slots=8, pass_tokens=32)
    shared, params = tokens(random.Random(1), 100, 100), SamplingParams(temperature=0)
    first, twin, other = (
        SequenceState(Request(str(i), history, params), 8, lambda _: None)
        for i, history in enumerate((shared, (*shared, 5), (9, 9, 9)))
    )
    for sequence in (first, twin, other):
        core.add(sequence)
    core.step()
    assert (first in core.running, twin in core.waiting, other in core.running) == (True, True, True)
    while not first.logprobs:
        assert twin in core.waiting
        core.step()
    core.step()
    assert twin in core.running
    assert twin.num_computed >= 100
    assert core.stats.cached_tokens == 100
    forward.close()


def test_kernel_does_not_flush_subnormal_numbers_to_zero():
    if attention._library() is None:
        pytest.skip("no compiler here")
    assert np.float32(1e-40) * np.float32(0.5) > 0
    assert torch.tensor(1e-40).mul(0.5).item() > 0


def test_scores_are_bitwise_equal_to_sampling_logprobs():
    model = build()
    request = varied_requests(1, seed=5)[0]
    request = replace(request, params=SamplingParams(seed=1, max_new_tokens=30))

    async def run():
        engine = LocalEngine(model, settings=SMALL)
        answer = await engine.generate(request)
        scores = await engine.score(request.token_ids + answer.tokens)
        await engine.close()
        return answer, scores

    answer, scores = asyncio.run(run())
    assert tuple(scores[-len(answer.tokens) :]) == answer.logprobs


@pytest.mark.parametrize(("window", "softcap"), [(0, 0.0), (20, 0.0), (20, 1.5)])
def test_kernel_sparse_and_paged_attention_agree_with_a_loop(window, softcap, monkeypatch):
    """Ragged lengths, grouped heads, pages out of order, padding; one turn is without MKL."""
    source = np.random.default_rng(0)
    shape, num_pages, query_heads = LayerShape(2, 16, 16), 40, 6
    compiled = attention.make_kernel([shape], 256, threads=2)
    cpu = torch.device("cpu")
    pool, pools = (
        PagePool([shape], num_pages, torch.float32, cpu, transposed=True),
        [PagePool([shape], num_pages, torch.float32, cpu) for _ in range(2)],
    )
    table = source.permutation(num_pages).astype(np.int32).reshape(4, 10)
    torch.manual_seed(0)
    known = [(torch.zeros(2, 0, 16), torch.zeros(2, 0, 16)) for _ in range(4)]
    for turn in range(6):
        monkeypatch.setattr(torch._C, "has_mkl", turn != 2)
        counts = source.integers(1, 25, size=4) if turn % 2 else np.array([1, 1, 3, 1])
        bounds = np.cumsum([0, *counts])
        slots = np.append(np.repeat(np.arange(4), counts), [-1, -1]).astype(np.int32)
        query = torch.randn(query_heads, len(slots), 16)
        new = torch.randn(2, len(slots), 16), torch.randn(2, len(slots), 16)
        expected, positions = torch.zeros(len(slots), query_heads, 16), np.zeros(len(slots), dtype=np.int32)
        for s, (first, last) in enumerate(itertools.pairwise(bounds.tolist())):
            known[s] = tuple(torch.cat([old, x[:, first:last]], 1) for old, x in zip(known[s], new, strict=True))
            for t in range(first, last):
                end = known[s][0].shape[1] - (last - t) + 1
                positions[t] = end - 1
                key, value = (x[:, max(0, end - window) if window else 0 : end] for x in known[s])
                for head in range(query_heads):
                    products = key[head // 3] @ query[head, t] * 0.3
                    if softcap:
                        products = softcap * torch.tanh(products / softcap)
                    expected[t, head] = products.softmax(0) @ value[head // 3]
        spans = tuple(
            QuerySpan(first, last, int(positions[last - 1]) + 1, table[s])
            for s, (first, last) in enumerate(itertools.pairwise(bounds.tolist()))
        )
        scores = ScoreRule(0.3, window, softcap)
        places = positions[:-2].astype(np.int64)
        new_pages, offsets = table[slots[:-2], places // PAGE].astype(np.int64), places % PAGE
        sparse = TorchPass(pools[0], spans, new_pages, offsets).attend(0, (query, *new), scores)
        assert torch.allclose(sparse, expected, atol=1e-5)
        arrays = (torch.from_numpy(array) for array in (slots[:-2], positions[:-2], table))
        paged = PagedPass(pools[1], *arrays).attend(0, tuple(x[:, :-2] for x in (query, *new)), scores)
        assert torch.allclose(paged, expected[:-2], atol=1e-5)
        if compiled is not None:
            got = KernelPass(pool, slots, positions, table, compiled).attend(0, (query, *new), scores)
            assert torch.allclose(got, expected, atol=1e-5)
    if compiled is not None:
        compiled.close()


def test_engine_without_a_compiler_returns_the_same_tokens(monkeypatch):
    model = build()
    requests = [replace(r, params=replace(r.params, temperature=0.0)) for r in varied_requests(12)]
    expected = alone(model, requests)
    monkeypatch.setattr(attention, "_library", lambda: None)

    async def run():
        engine = LocalEngine(model, settings=SMALL)
        assert not engine.batch_invariant
        answers = await engine.generate_batch(requests)
        await engine.close()
        return answers

    for answer, other in zip(asyncio.run(run()), expected, strict=True):
        assert answer.tokens == other.tokens
        assert answer.logprobs == pytest.approx(other.logprobs, abs=1e-4)


def test_scores_without_a_compiler_match_turns_across_weight_updates(monkeypatch):
    """Turns of several episodes with new weights between them; each agrees with a score from nothing."""
    monkeypatch.setattr(attention, "_library", lambda: None)
    source = random.Random(0)

    async def run():
        engine = LocalEngine(build(), settings=SMALL)
        prompt = tokens(source, 40, 41)
        histories = [prompt for _ in range(4)]
        for turn in range(4):
            if turn == 2:  # while somebody holds the pages of the prompt
                other = Request("other", prompt, SamplingParams(max_new_tokens=100))
                holder = asyncio.create_task(engine.generate(other))
                await asyncio.sleep(0.05)
                await engine.load_weights(1, dict(build(1).named_parameters()))
                await holder
            params = SamplingParams(max_new_tokens=20, seed=turn)
            answers = await engine.generate_batch(
                [Request(f"e{i}", history, params) for i, history in enumerate(histories)]
            )
            histories = [h + a.tokens for h, a in zip(histories, answers, strict=True)]
            for history, answer in zip(histories, answers, strict=True):
                scores = await engine.score(history)
                assert scores[-20:] == pytest.approx(answer.logprobs, abs=1e-4)
            histories = [h + tokens(source, 5, 30) for h in histories]
        await engine.close()

    asyncio.run(run())


def test_make_kernel_returns_none_when_the_compiler_fails(tmp_path, monkeypatch):
    monkeypatch.setattr(attention.Path, "home", lambda: tmp_path)
    monkeypatch.setattr(attention.shutil, "which", lambda name: "/bin/false")
    attention._library.cache_clear()
    try:
        assert attention.make_kernel([LayerShape(1, 8, 8)], 64, 1) is None
        assert not list(tmp_path.rglob("*.so"))
    finally:
        attention._library.cache_clear()


def test_unsupported_head_widths_fall_back_to_torch():
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=VOCAB, hidden_size=20, intermediate_size=32, num_hidden_layers=1,
                    num_attention_heads=2, num_key_value_heads=2)
    ).eval()  # fmt: skip
    engine = LocalEngine(model, settings=SMALL)
    assert not engine.batch_invariant
    assert len(asyncio.run(engine.generate(Request("e", (1, 2), SamplingParams(max_new_tokens=3)))).tokens) == 3


def test_radix_cache_finds_the_longest_prefix_and_frees_unreferenced_pages():
    tree = RadixCache(8)
    history = tuple(range(40))
    path = tree.acquire(tree.match(history))
    assert path == []
    for at in range(0, 40, PAGE):
        tree.allocate(path, history[at : at + PAGE], listed=True)
    assert tree.match((*history, 99)).wait  # announced, not computed
    for place in range(3):
        tree.commit(path, place, history[place * PAGE : (place + 1) * PAGE])
    found = tree.match((*history[:37], 7, 8))
    assert (len(found.nodes), found.num_copied, found.owned, found.wait) == (2, 5, False, False)
    tree.release(path)
    assert tree.num_available == tree.num_pages
    back = tree.match((*history, 50, 51))
    assert (back.num_tokens, back.owned) == (40, True)
    other: list = []
    for at in range(7):  # more than is free: the oldest leaf goes, then what is above it
        tree.allocate(other, (100 + at,) * PAGE, listed=False)
    assert tree.num_evicted == 2
    assert tree.match((*history, 50)).num_tokens == PAGE
    tree.allocate(other, (), listed=False)
    with pytest.raises(IndexError):
        tree.allocate(other, (), listed=False)


@pytest.mark.parametrize("compiled", [True, False])
def test_an_engine_releases_its_cache_and_allocates_it_again(compiled, monkeypatch):
    if not compiled:
        monkeypatch.setattr(attention, "_library", lambda: None)
    requests = varied_requests(6, seed=3)

    async def run():
        engine = LocalEngine(build(), settings=SMALL)
        before = await engine.generate_batch(requests)
        under_way = asyncio.create_task(engine.generate(replace(requests[0], episode="long")))
        await asyncio.sleep(0)
        with pytest.raises(EngineError, match="it has requests"):
            await engine.sleep()
        await under_way
        await engine.sleep()
        await engine.sleep()
        pool = engine._forward.pool
        assert not pool.keys
        engine.stats(reset=True)
        after = await engine.generate_batch(requests)
        cached = engine.stats().cached_tokens
        await engine.close()
        return before, after, cached, bool(pool.keys)

    before, after, cached, there = asyncio.run(run())
    assert [a.tokens for a in after] == [b.tokens for b in before]
    for one, other in zip(after, before, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)
    assert there
    assert cached <= sum(len(r.token_ids) for r in requests)
