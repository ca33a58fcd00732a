"""Drafts for speculative decoding change no result and save passes."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace

import pytest
import torch

from ludus.engines.base import Request
from ludus.engines.embedded.drafts import ORDER, PASS_TOKENS, DraftIndex
from ludus.engines.embedded.engine import EngineSettings, LocalEngine
from ludus.types import SamplingParams
from tests.engines.test_engine_batching import SMALL, build, varied_requests


def last_continuation(texts, tokens, num):
    """Oracle: search all texts, the latest first, from their end."""
    for text in reversed(texts):
        for at in range(len(text) - 1, ORDER - 1, -1):
            if text[at - ORDER : at] == tokens[-ORDER:]:
                return tuple(text[at : at + num])
    return ()


def test_a_draft_is_the_continuation_of_the_last_occurrence():
    source, index, texts, drafts = random.Random(0), DraftIndex(8), [], 0
    for _ in range(60):
        text = [source.randrange(3) for _ in range(source.randint(1, 12))]
        begin = source.choice((0, 0, source.randint(0, len(text))))
        if begin:
            index.add(text[:begin], 0)
            texts.append(text[:begin])
        index.add(text, begin)
        texts.append(text[max(0, begin - ORDER) :])
        tail, num = [source.randrange(3) for _ in range(5)], source.randint(0, 8)
        assert index.draft(tail, num) == last_continuation(texts, tail, num)
        drafts += bool(index.draft(tail, num))
    assert drafts > 20


def test_sequences_share_the_drafts_of_a_pass():
    index = DraftIndex(8)
    assert [index.share(num, num) for num in (0, 1, 10, 24, PASS_TOKENS)] == [0, 8, 8, 3, 0]
    assert index.share(4, PASS_TOKENS + 50) == 0
    assert DraftIndex(0).share(1, 1) == 0


def completions(engine, requests):
    """Two rounds of the same requests: the second finds its actions in the index."""

    async def run():
        try:
            return [await asyncio.gather(*(engine.generate(request) for request in requests)) for _ in range(2)]
        finally:
            await engine.close()

    return asyncio.run(run())


def test_drafts_change_no_token_and_no_probability_and_save_passes():
    requests = varied_requests(24)
    requests += [
        replace(r, params=replace(r.params, top_logprobs=3, stop_token_ids=(5, 9), temperature=0.3)) for r in requests
    ]
    model, answers, stats = build(), {}, {}
    for num in (0, 8):
        engine = LocalEngine(model, settings=replace(SMALL, draft_tokens=num))
        total = engine._scheduler.tree.num_available
        answers[num] = completions(engine, requests)
        stats[num] = engine.stats()
        engine._scheduler.tree.clear()
        assert engine._scheduler.tree.num_available == total
    assert answers[0] == answers[8]
    assert answers[8][0] == answers[8][1]
    assert any(a.finish_reason == "stop" for a in answers[8][0])
    assert stats[0].draft_tokens == stats[0].draft_hits == 0 < stats[8].draft_hits < stats[8].draft_tokens
    assert stats[8].decode_tokens == stats[0].decode_tokens == 2 * sum(len(a.tokens) for a in answers[0][0])
    assert stats[8].steps < stats[0].steps
    metrics = stats[8].metrics()
    assert metrics["engine/draft_acceptance"] == stats[8].draft_hits / stats[8].draft_tokens


def test_a_repeated_request_needs_a_ninth_of_the_passes():
    request = Request("a", (1, 2, 3, 4, 5), SamplingParams(temperature=0, max_new_tokens=90))
    engine = LocalEngine(build(), settings=replace(SMALL, draft_tokens=8))

    async def run():
        first = await engine.generate(request)
        engine.stats(reset=True)
        return first, await engine.generate(request), engine.stats()

    first, second, stats = asyncio.run(run())
    assert second == first
    assert stats.steps <= 90 // 9 + 3  # the first tokens have no draft: the prompt ends with its first occurrence


@pytest.mark.parametrize(("dtype", "settings", "longest"), [
    (torch.float32, SMALL, 8),
    (torch.bfloat16, SMALL, 0),
    (torch.bfloat16, replace(SMALL, draft_tokens=4), 4),
    (torch.float32, replace(SMALL, batch_invariant=False), 8),
])  # fmt: skip
def test_drafts_are_off_by_default_only_if_they_break_reproducibility(dtype, settings: EngineSettings, longest):
    engine = LocalEngine(build().to(dtype), settings=settings)
    assert engine._scheduler.drafts.longest == (longest if engine._scheduler.runner.compiled else 0)
