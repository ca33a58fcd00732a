"""Several versions of LoRA adapters in one engine: an episode keeps its first version."""

from __future__ import annotations

import asyncio

import pytest

from adapter_conformance import PROMPT, SCALING, factors
from adapter_conformance import adapted as with_adapter
from ludus.engines.base import Request
from ludus.engines.embedded.engine import EngineSettings, LocalEngine
from ludus.engines.models.loading import load_model
from ludus.engines.remote.engine import ServerEngine
from ludus.engines.remote.http_client import RemoteEngineSettings
from ludus.rollouts.group_queue import GroupQueue
from ludus.types import SamplingParams
from served import COLD_START
from tests.engines.test_engine_features import adapted, build, with_engine
from tests.training.rl.test_async_run import records, run

KEEPS = EngineSettings(context_tokens=128, max_batch=8, kv_cache_tokens=2048, adapter_versions=True)
GREEDY = SamplingParams(temperature=0.0, max_new_tokens=6)


def asked(episode: str, *ids: int) -> Request:
    return Request(episode, ids or (1, 2, 3), GREEDY)


def state(model) -> dict:
    return {name: p.detach().clone() for name, p in model.named_parameters() if "lora_" in name}


def test_adapter_versions_coexist_until_no_episode_uses_them():
    base = build()
    one, two = adapted(base, 1), adapted(base, 2)

    async def alone(model):
        engine = LocalEngine(model, None, KEEPS)
        try:
            first = await engine.generate(asked("x"))
            second = await engine.generate(asked("y", 1, 2, 3, *first.tokens, 9))
            return first, second, await engine.fingerprint()
        finally:
            await engine.close()

    alone_one, alone_two = asyncio.run(alone(one)), asyncio.run(alone(two))
    assert alone_one[0].tokens != alone_two[0].tokens

    async def work(engine):
        await engine.load_weights(1, state(one))
        old = await engine.generate(asked("old"))
        await engine.load_weights(2, state(two))
        new = await engine.generate(asked("new"))
        later = await engine.generate(asked("old", 1, 2, 3, *old.tokens, 9))
        held = sorted(engine._forward.adapters.names)
        found = engine.version, await engine.fingerprint()
        engine.release("old")
        engine.release("new")
        await engine.load_weights(3, state(one))
        return old, new, later, held, found, sorted(engine._forward.adapters.names)

    old, new, later, held, found, left = with_engine(one, work, settings=KEEPS)
    assert (old.tokens, new.tokens) == (alone_one[0].tokens, alone_two[0].tokens)
    assert later.tokens == alone_one[1].tokens
    assert (old.versions, new.versions, later.versions) == ((1,) * 6, (2,) * 6, (1,) * 6)
    assert held == ["default", "default#1", "default#2"]
    assert found == (2, alone_two[2])
    assert left == ["default", "default#3"]


@pytest.mark.slow
def test_run_keeping_adapter_versions_drains_episodes_only_at_the_last_step(tiny_run, tmp_path, monkeypatch):
    drains, drain = [], GroupQueue.drain

    async def draining(stream):
        drains.append(stream.admission.version)
        await drain(stream)

    monkeypatch.setattr(GroupQueue, "drain", draining)
    lora = {"model__lora__rank": 2, "model__lora__alpha": 4, "training__steps": 4}
    folder = run(tiny_run, tmp_path / "a", "async", staleness__in_flight_weight_updates="false", **lora)
    assert drains == [3]  # the last step alone: its weights are published to an engine at rest
    found = records(folder, 4)
    for step, record in found:
        (version,) = {v for s in record.trajectory.segments for v in s.versions}
        assert 0 <= step - 1 - version <= 2
    assert len({record.key for _, record in found}) == len(found)


def test_server_keeps_the_adapter_version_of_an_episode_until_release(served):
    base = load_model(str(COLD_START))
    states = [factors(with_adapter(base, seed)) for seed in (1, 2)]

    async def scenario():
        engine = ServerEngine([served.url], settings=RemoteEngineSettings(keeps_adapters=True), lora_scaling=SCALING)
        try:
            found = []
            await engine.load_weights(1, states[0])
            found.append(await engine.generate(asked("old", *PROMPT)))
            await engine.load_weights(2, states[1])
            found += [await engine.generate(asked(name, *PROMPT)) for name in ("new", "old")]
            engine.release("old")
            return [*found, await engine.generate(asked("old", *PROMPT))]
        finally:
            await engine.close()

    old, new, again, after = asyncio.run(scenario())
    assert [one.versions[0] for one in (old, new, again, after)] == [1, 2, 1, 2]
    assert old.logprobs == again.logprobs != new.logprobs == after.logprobs
