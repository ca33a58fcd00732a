"""One episode of 250 tool calls and more than 64,000 tokens, through chat, engine, tools and trajectory."""

from __future__ import annotations

import asyncio
import json

import pytest

from ludus.chat.parse_json import JSON_STYLE
from ludus.config.sections.rollout import RolloutConfig
from ludus.engines.base import Request
from ludus.engines.embedded.engine import EngineSettings, LocalEngine
from ludus.rollouts.episode import EngineChatSession, run_episode
from ludus.tools.base import tool
from ludus.types import Guide, SamplingParams, StopReason
from small_worlds import RecordingWorld, make_task, renderer, tokenizer
from tests.engines.test_engine_batching import build

pytestmark = pytest.mark.scale

CALLS = 250
CONTEXT = 80_000


@tool
def page(number: int) -> str:
    """A page of a long book."""
    return f"Page {number}: " + " ".join(str((number * 7919 + i) % 1000) for i in range(55))


class RecordingEngine(LocalEngine):
    """The embedded engine, which keeps what it was asked."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.requests: list[Request] = []

    async def generate(self, request):
        self.requests.append(request)
        return await super().generate(request)


def calls_a_page() -> Guide:
    """The action is one call of the tool with some number: the script, which the engine samples under."""
    added = tokenizer().get_added_vocab()
    begin, end = (f"<[{added[tag]}]>" for tag in ("<tool_call>", "</tool_call>"))
    schema = {
        "type": "object",
        "properties": {"number": {"type": "integer", "minimum": 1, "maximum": 999}},
        "required": ["number"],
        "additionalProperties": False,
        **JSON_STYLE,
    }
    head = json.dumps('\n{"name": "page", "arguments": ')
    return Guide("lark", f'start: {begin} {head} %json {json.dumps(schema)} "}}\\n" {end}\n')


def test_episode_of_250_calls_and_64k_tokens_completes_with_prefix_caching():
    model = build(vocab_size=len(tokenizer()), max_position_embeddings=CONTEXT)
    settings = EngineSettings(context_tokens=CONTEXT, max_batch=2, kv_cache_tokens=CONTEXT + 64, pass_tokens=512)
    world = RecordingWorld(tools=(page,))

    async def run():
        engine = RecordingEngine(model, tokenizer(), settings)
        params = SamplingParams(max_new_tokens=200, guide=calls_a_page())
        conversation = EngineChatSession(engine, renderer(), params, CONTEXT, "long", seed=1)
        task = make_task()
        limits = RolloutConfig(max_turns=CALLS)
        trajectory = await run_episode(task, 0, world.environment(task), conversation, limits)
        stats = engine.stats()
        tokens = [token for segment in trajectory.segments for token in segment.tokens]
        scores = await engine.score(tokens)
        await engine.close()
        return trajectory, tokens, scores, stats, engine.requests

    trajectory, tokens, scores, stats, requests = asyncio.run(run())
    print(f"{len(tokens)} tokens, {len(trajectory.outcomes)} calls, {stats.line()}")
    assert trajectory.stop_reason is StopReason.MAX_TURNS
    assert len(trajectory.outcomes) == CALLS
    assert all(outcome.status == "ok" for outcome in trajectory.outcomes)
    assert len(tokens) > 64_000
    actions = [segment for segment in trajectory.segments if segment.kind == "action"]
    assert len(actions) == len(requests) == CALLS
    for request in requests[::20]:
        assert tuple(tokens[: len(request.token_ids)]) == request.token_ids
    assert stats.prefill_tokens < len(tokens)
    assert stats.hit_rate > 0.98
    at, gap = 0, 0.0
    for segment in trajectory.segments:
        for i, logprob in enumerate(segment.logprobs):
            gap = max(gap, abs(logprob - scores[at + i]))
        at += len(segment.tokens)
    assert gap < 1e-4
