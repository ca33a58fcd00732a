"""Two thousand requests with all kinds of interference; each one equals the same request alone."""

from __future__ import annotations

import asyncio
import random
import resource
from dataclasses import dataclass, replace

import pytest
import torch

from ludus.engines.base import Request
from ludus.engines.embedded.engine import EngineSettings, LocalEngine
from ludus.engines.embedded.kv_cache import PAGE, RadixCache
from ludus.engines.embedded.model_runner import RaggedForward
from ludus.engines.embedded.scheduler import BatchScheduler, SequenceState
from ludus.types import Completion, SamplingParams
from tests.engines.test_engine_batching import build, tokens, what_is_left

pytestmark = pytest.mark.scale

NUM = 2000
UPDATES = 6
CONTEXT = 256
TINY_CACHE = EngineSettings(context_tokens=CONTEXT, max_batch=24, kv_cache_tokens=2048, pass_tokens=64)


@dataclass
class FinishedRequest:
    """A request, and what came of it; None for one that was cancelled."""

    request: Request
    completion: Completion | None


def requests(source, greedy):
    """Prompts of unlike lengths, many of them beginning alike."""
    system = tokens(source, 60, 60)
    for i in range(NUM):
        history = system[: source.choice((0, 0, 31, 60))] + tokens(source, 2, 100)
        temperature = 0.0 if greedy else source.choice((0.0, 0.8, 1.0))
        params = SamplingParams(
            seed=i,
            temperature=temperature,
            top_k=source.choice((0, 30)),
            min_p=source.choice((0.0, 0.02)),
            max_new_tokens=source.choice((1, 8, 20, 60)),
            stop_token_ids=(3,),
        )
        yield Request(f"e{i}", history, params)


async def play(engine, request, source, played):
    """One episode: perhaps a second turn after a tool; perhaps cancelled or broken off on the way."""
    task = asyncio.create_task(engine.generate(request))
    fate = source.random()
    if fate < 0.08:
        await asyncio.sleep(source.random() * 0.05)
        task.cancel()
    elif fate < 0.16:
        await asyncio.sleep(source.random() * 0.05)
        engine.abort(request.episode)
    try:
        completion = await task
    except asyncio.CancelledError:
        played.append(FinishedRequest(request, None))
        engine.release(request.episode)
        return
    played.append(FinishedRequest(request, completion))
    if completion.finish_reason != "abort" and source.random() < 0.25:
        await asyncio.sleep(source.random() * 0.1)  # its tool
        history = (*request.token_ids, *completion.tokens, *tokens(source, 5, 40))
        if len(history) + 20 < CONTEXT:
            params = replace(request.params, seed=request.params.seed + NUM, max_new_tokens=20)
            again = replace(request, token_ids=history, params=params)
            played.append(FinishedRequest(again, await engine.generate(again)))
    engine.release(request.episode)


async def storm(models, settings, greedy):
    """All of them, 60 in flight, with new weights now and then."""
    source = random.Random(5)
    engine = LocalEngine(models[0], settings=settings)
    played: list[FinishedRequest] = []
    gate = asyncio.Semaphore(60)

    async def one(request):
        async with gate:
            await play(engine, request, source, played)

    async def update():
        for version in range(1, UPDATES + 1):
            while len(played) < NUM * version // (UPDATES + 1):
                await asyncio.sleep(0.005)
            await engine.load_weights(version, models[version % len(models)].state_dict())

    await asyncio.gather(update(), *(one(r) for r in requests(source, greedy)))
    await engine.fingerprint()  # the last releases come before it
    left = what_is_left(engine)
    stats = engine.stats()
    await engine.close()
    assert set(left.values()) == {0}, left
    assert stats.evicted_pages > NUM // 2
    assert stats.recomputed_tokens > 0
    return played


class UnbatchedReference:
    """One request at a time, with the weights of its tokens' versions at the same places."""

    def __init__(self, models, settings):
        self.models = models
        self.pages = -(-CONTEXT // PAGE) + 1
        self.forwards = [RaggedForward(build_copy(m), self.pages, CONTEXT, 1) for m in models]
        self.block = settings.pass_tokens

    def versions(self, request, versions):
        """The completion that these versions give. Histories are computed anew under each."""
        answer: list[int] = []
        logprobs: list[float] = []
        at = 0
        while at < len(versions):
            version = versions[at]
            run = next((i for i in range(at, len(versions)) if versions[i] != version), len(versions))
            got = self._run(request, answer, logprobs, run, version)
            answer, logprobs, at = list(got.tokens[got.num_prompt :]), got.logprobs, run
        return tuple(answer), tuple(logprobs)

    def _run(self, request, answer, logprobs, until, version):
        forward = self.forwards[version % len(self.models)]
        core = BatchScheduler(forward, None, RadixCache(self.pages), (1, CONTEXT), 64)
        core.version = version
        if not forward.invariant:
            core.block = self.block
        sequence = SequenceState(request, until, lambda _: None)
        sequence.tokens += answer
        sequence.logprobs = list(logprobs)
        core.add(sequence)
        while core.busy:
            core.step()
        return sequence


def build_copy(model):
    import copy

    return copy.deepcopy(model).requires_grad_(False)


def peak_mb():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def test_concurrent_requests_match_the_unbatched_reference_exactly():
    models = [build(0), build(1)]
    played = asyncio.run(storm(models, TINY_CACHE, greedy=False))
    alone = UnbatchedReference(models, TINY_CACHE)
    compared = spanning = cancelled = 0
    for item in played:
        if item.completion is None:
            cancelled += 1
            continue
        got = item.completion
        expected = alone.versions(item.request, got.versions)
        assert (got.tokens, got.logprobs) == expected
        compared += len(got.tokens)
        spanning += len(set(got.versions)) > 1
    print(f"{len(played)} requests, {compared} tokens, {spanning} over an update, {cancelled} cancelled")
    assert len(played) >= NUM
    assert spanning > 5
    assert cancelled > 50


def test_fast_mode_differs_from_reference_only_at_near_tied_tokens():
    models = [build(0), build(1)]
    played = asyncio.run(storm(models, replace(TINY_CACHE, batch_invariant=False), greedy=True))
    alone = UnbatchedReference(models, TINY_CACHE)
    near = compared = 0
    for item in played:
        if item.completion is None:
            continue
        got = item.completion
        expected, _ = alone.versions(item.request, got.versions)
        compared += len(got.tokens)
        if got.tokens != expected:
            at = next(i for i, (a, b) in enumerate(zip(got.tokens, expected, strict=False)) if a != b)
            history = [*item.request.token_ids, *got.tokens[:at]]
            with torch.no_grad():
                logits = models[got.versions[at] % 2](torch.tensor([history])).logits[0, -1]
            best = logits.topk(2).values
            assert best[0] - best[1] < 1e-4
            near += 1
    print(f"{compared} tokens; {near} requests part where the two best logits are within 1e-4")
    assert compared > NUM


def test_memory_does_not_grow_with_the_number_of_requests():
    models = [build(0), build(1)]
    asyncio.run(storm(models, TINY_CACHE, greedy=True))
    before = peak_mb()
    asyncio.run(storm(models, TINY_CACHE, greedy=True))
    assert peak_mb() - before < 40
