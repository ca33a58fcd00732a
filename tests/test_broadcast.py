"""Weights over a line of processes: whole, as a difference, damaged, late and refused."""

from __future__ import annotations

import asyncio
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ludus.engines.broadcast import (
    Place,
    check_digest,
    difference,
    join_line,
    manifest_of,
    open_store,
    restored,
    room_for,
    visit_store,
)
from ludus.engines.dialects import VllmDialect
from ludus.engines.loading import load_model
from ludus.engines.sending import Broadcaster
from ludus.engines.server import ServerEngine
from ludus.engines.transport import Replica, ServerSettings
from ludus.errors import EngineError, SyncError
from ludus.training.sync import WeightSync
from served import COLD_START

PROBE = tuple(range(300, 340))
FLAT = ServerSettings(timeout_s=60, patience_s=2, broadcast_host="127.0.0.1")


@settings(deadline=None, max_examples=25)
@given(
    st.lists(st.sampled_from([0.0, -0.0, 1.0, 2.5]), min_size=24, max_size=24),
    st.lists(st.booleans(), min_size=24, max_size=24),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
)
def test_a_difference_is_exact_and_no_larger_than_it_has_to_be(values, changed, dtype):
    before = {"a": torch.tensor(values, dtype=dtype).view(4, 6), "b": torch.ones(3, dtype=dtype)}
    after = {n: t.clone() for n, t in before.items()}
    places = torch.tensor(changed).view(4, 6)
    after["a"][places] = after["a"][places] + 1
    sent = difference(after, before)
    found = {n: t.clone() for n, t in before.items()} | restored(sent, before)
    for name, tensor in after.items():
        assert torch.equal(found[name], tensor)
    assert not any(name.startswith("b") for name in sent)
    size = sum(t.numel() * t.element_size() for t in sent.values())
    assert size == min(24 * dtype.itemsize, sum(changed) * (dtype.itemsize + 4))


def test_minus_zero_is_not_zero():
    sent = difference({"a": torch.tensor([-0.0, 1.0, 1.0, 1.0])}, {"a": torch.tensor([0.0, 1.0, 1.0, 1.0])})
    assert restored(sent, {"a": torch.tensor([0.0, 1.0, 1.0, 1.0])})["a"].signbit().tolist()[0]


def test_what_is_damaged_on_its_way_or_of_another_model_is_refused():
    tensors = {"a": torch.ones(3)}
    manifest = manifest_of(1, None, tensors)
    check_digest(manifest, tensors)
    with pytest.raises(SyncError, match="damaged"):
        check_digest(manifest, {"a": torch.tensor([1.0, 1.0, 1.0001])})
    with pytest.raises(SyncError, match=r"do not belong"):
        restored(tensors, {"b": torch.ones(3)})
    manifest.tensors[0].dtype = "int8"
    with pytest.raises(SyncError, match="int8"):
        room_for(manifest)


def test_tensors_pass_a_line_and_a_broken_one_says_so():
    store = open_store(20)
    sent = {"a": torch.randn(5, 3), "b": torch.arange(4).to(torch.bfloat16)}
    manifest = manifest_of(1, None, sent)
    got = room_for(manifest)
    place = Place(host="127.0.0.1", port=store.port, rank=1, count=2, timeout_s=20)
    broken = []

    def receive():
        line = join_line(visit_store(place), 1, 2, 20, "127.0.0.1")
        line.broadcast(got)
        try:
            line.broadcast(room_for(manifest))
        except EngineError as error:
            broken.append(str(error))

    thread = threading.Thread(target=receive)
    thread.start()
    line = join_line(store, 0, 2, 20, "127.0.0.1")
    line.broadcast(sent)
    del line
    thread.join(30)
    check_digest(manifest, got)
    assert "broke" in broken[0]


def test_a_server_takes_weights_from_the_line_and_then_differences(served):
    model = load_model(str(COLD_START), device="cpu")
    original = {name: p.detach().clone() for name, p in model.named_parameters()}
    engine = ServerEngine([served.url], settings=ServerSettings(60, 2, 0.1, "", "127.0.0.1", delta=True))
    sync = WeightSync(model, engine, PROBE)
    sizes = []

    async def run():
        for version in (5, 6, 7, 0):
            with torch.no_grad():
                if version == 6:
                    model.model.layers[0].mlp.up_proj.weight[0, :3] += 0.5
                if version == 0:
                    for name, parameter in model.named_parameters():
                        parameter.copy_(original[name])
            proof = await sync.publish(version)
            sizes.append(engine._weights.line.sent_bytes)
            assert proof.fingerprint
            assert proof.probe_gap < 1e-3
        await engine.close()

    asyncio.run(run())
    assert sizes[0] == sum(t.numel() * 4 for t in original.values())
    assert sizes[1] == 3 * (4 + 4)
    assert sizes[2] == 0
    assert sizes[3] == 3 * (4 + 4)


def test_a_server_that_does_not_come_to_the_line_in_time_is_said_to():
    async def run():
        silent = await asyncio.start_server(lambda *_: asyncio.sleep(60), "127.0.0.1", 0)
        url = f"http://127.0.0.1:{silent.sockets[0].getsockname()[1]}"
        line = Broadcaster([Replica(url, FLAT)], VllmDialect(), "127.0.0.1", timeout_s=0.3)
        try:
            await line.send(1, {"a": torch.ones(3)})
        finally:
            silent.close()

    with pytest.raises(EngineError, match=r"line of weights within 0\.3 s"):
        asyncio.run(run())


def test_the_servers_own_words_are_raised(served):
    engine = ServerEngine([served.url], settings=FLAT)

    async def run():
        state = {"model.no_such.weight": torch.ones(3)}
        try:
            await engine.load_weights(1, state)
        finally:
            await engine.close()

    with pytest.raises(EngineError, match=r"do not belong to the engine's model: model\.no_such"):
        asyncio.run(run())
