"""Verified weight sync: wrong, late or missing weights stop the run."""

from __future__ import annotations

import asyncio
import copy

import pytest
import torch

from ludus.engines.embedded.engine import LocalEngine
from ludus.engines.models import fingerprint
from ludus.errors import EngineError, SyncError
from ludus.training.rl.weight_sync import WeightSync
from tests.training.learner.test_learner import tiny_model

PROBE = tuple(range(3, 19))


def publish(engine, model, version=1, **options):
    async def run():
        try:
            return await WeightSync(model, engine, PROBE, **options).publish(version)
        finally:
            await engine.close()

    return asyncio.run(run())


@pytest.fixture
def model():
    return tiny_model(torch.float32)


def moved(model):
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(0.01)
    return other


def test_published_weights_are_loaded_and_verified(model):
    engine = LocalEngine(tiny_model(torch.float32, seed=3))
    gap = publish(engine, model, version=7)
    assert engine.version == 7
    assert gap < 1e-5


def test_frozen_weights_are_hashed_once_unless_they_change(model, monkeypatch):
    hashed = []
    hash_chunk = fingerprint._hash
    monkeypatch.setattr(fingerprint, "_hash", lambda chunk: hashed.append(chunk.data_ptr()) or hash_chunk(chunk))
    frozen = model.get_input_embeddings().weight.requires_grad_(False)

    async def run():
        engine = LocalEngine(model)
        sync = WeightSync(model, engine, PROBE)
        try:
            for version in (1, 2, 3):
                await sync.publish(version)
            assert hashed.count(frozen.data_ptr()) == 1
            with torch.no_grad():
                frozen[0] += 1
            with pytest.raises(SyncError, match="digest"):
                await sync.publish(4)
        finally:
            await engine.close()

    asyncio.run(run())


def test_engine_keeping_its_old_weights_raises_sync_error(model):
    class IgnoringEngine(LocalEngine):
        async def load_weights(self, version, state):
            self._version = version

    with pytest.raises(SyncError, match="digest"):
        publish(IgnoringEngine(model), moved(model))


def test_engine_dropping_one_tensor_raises_sync_error(model):
    class LossyEngine(LocalEngine):
        async def load_weights(self, version, state):
            await super().load_weights(version, dict(list(state.items())[:-1]))

    with pytest.raises(SyncError, match="digest"):
        publish(LossyEngine(model), moved(model))


def test_probe_detects_wrong_scores_with_correct_weights(model):
    class InexactEngine(LocalEngine):
        async def score(self, token_ids):
            return [x + 0.01 for x in await super().score(token_ids)]

    with pytest.raises(SyncError, match="probe"):
        publish(InexactEngine(model), model)


def test_hanging_transfer_raises_sync_error_at_its_deadline(model):
    class HangingEngine(LocalEngine):
        async def load_weights(self, version, state):
            await asyncio.sleep(60)

    with pytest.raises(SyncError, match="longer than"):
        publish(HangingEngine(model), model, deadline_s=0.1)


def test_sync_error_contains_the_engine_error_message(model):
    class OutOfMemoryEngine(LocalEngine):
        async def load_weights(self, version, state):
            raise EngineError("no memory left on the device")

    with pytest.raises(SyncError, match="no memory left on the device"):
        publish(OutOfMemoryEngine(model), model)


def test_copied_weights_are_unaffected_by_later_parameter_updates(model):
    async def run():
        engine = LocalEngine(tiny_model(torch.float32, seed=3))
        sync = WeightSync(model, engine, PROBE)

        async def direct(work):
            return work()

        kept = await sync.copy_weights(1, direct)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.01)
        try:
            return await sync.send_copy(*kept), engine.version
        finally:
            await engine.close()

    gap, version = asyncio.run(run())
    assert gap < 1e-5
    assert version == 1
