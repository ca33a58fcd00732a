"""Weights over a gloo process group: full, as a delta, damaged, late and refused."""

from __future__ import annotations

import asyncio
import threading
import time
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ludus.engines.embedded.engine import LocalEngine
from ludus.engines.models.loading import load_model
from ludus.engines.remote.api_adapters import VllmApi
from ludus.engines.remote.engine import ServerEngine
from ludus.engines.remote.gloo_broadcast import (
    TransferAddress,
    WeightManifest,
    WeightTransferGroup,
    apply_delta,
    check_digest,
    connect_store,
    empty_tensors,
    join_as_server,
    join_group,
    make_manifest,
    open_store,
    receive_tensors,
    weight_delta,
)
from ludus.engines.remote.http_client import RemoteEngineSettings, Replica
from ludus.engines.remote.weight_broadcaster import Broadcaster
from ludus.errors import EngineError, SyncError
from ludus.gateway.app import ControlEndpoints
from ludus.gateway.endpoints import NoBody
from ludus.gateway.service import CompletionService, ServedModel
from ludus.training.rl.weight_sync import WeightSync
from served import COLD_START
from tests.engines.test_engine_server import Fake, serving
from tests.training.learner.test_learner import tiny_model
from waiting import until

PROBE = tuple(range(300, 340))
FLAT = RemoteEngineSettings(timeout_s=60, connect_timeout_s=2, broadcast_host="127.0.0.1")


@settings(deadline=None, max_examples=25)
@given(
    st.lists(st.sampled_from([0.0, -0.0, 1.0, 2.5]), min_size=24, max_size=24),
    st.lists(st.booleans(), min_size=24, max_size=24),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
)
def test_weight_delta_is_exact_and_of_minimal_size(values, changed, dtype):
    before = {"a": torch.tensor(values, dtype=dtype).view(4, 6), "b": torch.ones(3, dtype=dtype)}
    after = {n: t.clone() for n, t in before.items()}
    places = torch.tensor(changed).view(4, 6)
    after["a"][places] = after["a"][places] + 1
    sent = weight_delta(after, before)
    found = {n: t.clone() for n, t in before.items()} | apply_delta(sent, before)
    for name, tensor in after.items():
        assert torch.equal(found[name], tensor)
    assert not any(name.startswith("b") for name in sent)
    size = sum(t.numel() * t.element_size() for t in sent.values())
    assert size == min(24 * dtype.itemsize, sum(changed) * (dtype.itemsize + 4))


def test_weight_delta_distinguishes_negative_zero_from_zero():
    sent = weight_delta({"a": torch.tensor([-0.0, 1.0, 1.0, 1.0])}, {"a": torch.tensor([0.0, 1.0, 1.0, 1.0])})
    assert apply_delta(sent, {"a": torch.tensor([0.0, 1.0, 1.0, 1.0])})["a"].signbit().tolist()[0]


def test_corrupted_or_mismatched_weight_transfer_raises_sync_error():
    tensors = {"a": torch.ones(3)}
    manifest = make_manifest(1, None, tensors)
    check_digest(manifest, tensors)
    with pytest.raises(SyncError, match="corrupted"):
        check_digest(manifest, {"a": torch.tensor([1.0, 1.0, 1.0001])})
    with pytest.raises(SyncError, match=r"do not match"):
        apply_delta(tensors, {"b": torch.ones(3)})
    manifest.tensors[0].dtype = "int8"
    with pytest.raises(SyncError, match="int8"):
        empty_tensors(manifest)


def test_group_transfers_tensors_and_raises_after_the_connection_breaks():
    store = open_store("127.0.0.1", 20)
    sent = {"a": torch.randn(5, 3), "b": torch.arange(4).to(torch.bfloat16)}
    manifest = make_manifest(1, None, sent)
    got = empty_tensors(manifest)
    place = TransferAddress(host="127.0.0.1", port=store.port, rank=1, count=2, timeout_s=20)
    broken = []

    def receive():
        line = join_group(connect_store(place), 1, 2, 20, "127.0.0.1")
        line.broadcast(got)
        try:
            line.broadcast(empty_tensors(manifest))
        except EngineError as error:
            broken.append(str(error))

    thread = threading.Thread(target=receive)
    thread.start()
    line = join_group(store, 0, 2, 20, "127.0.0.1")
    line.broadcast(sent)
    del line
    thread.join(30)
    check_digest(manifest, got)
    assert "failed" in broken[0]


def test_server_receives_full_weights_then_deltas_over_the_process_group(served):
    model = load_model(str(COLD_START), device="cpu")
    original = {name: p.detach().clone() for name, p in model.named_parameters()}
    engine = ServerEngine([served.url], settings=RemoteEngineSettings(60, 2, 0.1, "", "127.0.0.1", delta=True))
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
            gap = await sync.publish(version)
            sizes.append(engine._weights.broadcaster.sent_bytes)
            assert await engine.fingerprint()
            assert gap < 1e-3
        await engine.close()

    asyncio.run(run())
    assert sizes[0] == sum(t.numel() * 4 for t in original.values())
    assert sizes[1] == 3 * (4 + 4)
    assert sizes[2] == 0
    assert sizes[3] == 3 * (4 + 4)


def test_server_missing_the_rendezvous_raises_engine_error():
    async def run():
        silent = await asyncio.start_server(lambda *_: asyncio.sleep(60), "127.0.0.1", 0)
        url = f"http://127.0.0.1:{silent.sockets[0].getsockname()[1]}"
        line = Broadcaster([Replica(url, FLAT)], VllmApi(), "127.0.0.1", timeout_s=0.3)
        try:
            await line.send(1, {"a": torch.ones(3)})
        finally:
            silent.close()

    with pytest.raises(EngineError, match=r"weight transfer group within 0\.3 s"):
        asyncio.run(run())


def test_engine_error_contains_the_server_message(served):
    engine = ServerEngine([served.url], settings=FLAT)

    async def run():
        state = {"model.no_such.weight": torch.ones(3)}
        try:
            await engine.load_weights(1, state)
        finally:
            await engine.close()

    with pytest.raises(EngineError, match=r"do not match the engine's model: model\.no_such"):
        asyncio.run(run())


@dataclass
class OnLine(Fake):
    """A server that is on the trainer's line. `waits_at` a path it waits until it may `go` on; one that
    `fails` leaves the line when it should take weights."""

    waits_at: str = "nothing"
    fails: bool = False
    held: threading.Event = field(default_factory=threading.Event)
    go: threading.Event = field(default_factory=threading.Event)
    line: WeightTransferGroup | None = None
    expected: WeightManifest | None = None

    def answer(self, path, body):
        if path == "/join_weight_group":
            self.line = join_as_server(TransferAddress(**body))
        elif path == "/prepare_weights":
            self.expected = WeightManifest(**body)
        elif path == "/receive_weights" and self.fails:
            self.line = None
            return 500, {"message": "no memory"}
        elif path == "/receive_weights":
            receive_tensors(self.line, self.expected)
            self.label = str(self.expected.version)
        if path == self.waits_at:
            self.held.set()
            self.go.wait(20)
        return super().answer(path, body)


KEPT = RemoteEngineSettings(timeout_s=20, connect_timeout_s=0.2, broadcast_host="127.0.0.1", keeps_weights=True)
ONES = {"a": torch.ones(3)}


def on_line(fakes) -> ServerEngine:
    return ServerEngine([fake.url for fake in fakes], settings=KEPT)


def test_weights_are_resent_in_a_group_without_the_removed_server():
    async def scenario(stays, leaves):
        engine = on_line((stays, leaves))
        stays.waits_at = "/prepare_weights"
        sending = asyncio.create_task(engine.load_weights(1, ONES))
        await until(lambda: stays.held.is_set() and leaves.expected is not None, 20)
        engine.leave(leaves.url)
        stays.waits_at = "nothing"
        stays.go.set()
        with pytest.raises(EngineError, match="left the weight transfer group"):
            await sending
        await engine.load_weights(1, ONES)
        assert stays.label == "1"
        await engine.close()

    fakes = OnLine(), OnLine()
    with serving(*fakes):
        asyncio.run(scenario(*fakes))


def test_server_removed_after_receiving_weights_does_not_block_the_next_transfer():
    async def scenario(stays, leaves):
        engine = on_line((stays, leaves))
        stays.waits_at = "/receive_weights"
        sending = asyncio.create_task(engine.load_weights(1, ONES))
        await until(lambda: stays.held.is_set() and leaves.label == "1", 20)
        engine.leave(leaves.url)
        leaves.line = None
        stays.waits_at = "nothing"
        stays.go.set()
        await sending
        await engine.load_weights(2, ONES)
        assert stays.label == "2"
        await engine.close()

    fakes = OnLine(), OnLine()
    with serving(*fakes):
        asyncio.run(scenario(*fakes))


def test_new_server_replaces_one_that_failed_during_a_weight_transfer():
    async def scenario(goes, comes):
        engine = on_line((goes,))
        with pytest.raises(EngineError):
            await engine.load_weights(1, ONES)
        engine.leave(goes.url)
        await engine.join(comes.url)
        assert comes.label == "1"
        await engine.load_weights(1, ONES)
        await engine.load_weights(2, ONES)
        assert comes.label == "2"
        await engine.close()

    fakes = OnLine(fails=True), OnLine()
    with serving(*fakes):
        asyncio.run(scenario(*fakes))


def test_closing_does_not_wait_for_a_failed_connection():
    class RefusingServer(Fake):
        def answer(self, path, body):
            return (400, {"message": "No."}) if path == "/join_weight_group" else super().answer(path, body)

    async def scenario(fake):
        engine = on_line((fake,))
        with pytest.raises(EngineError, match=r"No\."):
            await engine.load_weights(1, ONES)
        await engine.close()

    fake, begin = RefusingServer(), time.monotonic()
    with serving(fake):
        asyncio.run(scenario(fake))
    assert time.monotonic() - begin < KEPT.timeout_s / 2


class SlowWeights(dict):
    """Weights that take a while to be read, as large ones do."""

    def items(self):
        time.sleep(0.5)
        return super().items()


def test_preparing_weights_does_not_block_the_event_loop():
    async def scenario(fake):
        engine, longest, ended = on_line((fake,)), 0.0, False

        async def others():
            nonlocal longest
            while not ended:
                before = time.monotonic()
                await asyncio.sleep(0.01)
                longest = max(longest, time.monotonic() - before)

        beside = asyncio.create_task(others())
        await asyncio.sleep(0.05)
        await engine.load_weights(1, SlowWeights(ONES))
        ended = True
        await beside
        await engine.close()
        assert fake.label == "1"
        assert longest < 0.45

    fake = OnLine()
    with serving(fake):
        asyncio.run(scenario(fake))


def test_server_remains_in_its_new_group_after_the_old_one_breaks():
    async def scenario():
        model = tiny_model(torch.float32)
        engine = LocalEngine(model, copy=False)
        desk = ControlEndpoints(
            CompletionService(engine, ServedModel("m", "m", 0, None, (), 8), "a-token-of-tests"), model
        )
        state = {name: p.detach() + 1 for name, p in model.named_parameters()}
        manifest = make_manifest(7, None, state)
        trainers: list[WeightTransferGroup | None] = []
        for _ in range(2):
            store = open_store("127.0.0.1", 20)
            place = TransferAddress(host="127.0.0.1", port=store.port, rank=1, count=2, timeout_s=20)
            met = asyncio.to_thread(join_group, store, 0, 2, 20, "127.0.0.1")
            line, _ = await asyncio.gather(met, desk.join(None, place))
            trainers.append(line)
            del line
            await desk.prepare(None, manifest)
            if len(trainers) == 1:
                waiting = asyncio.create_task(desk.receive(None, NoBody()))
                await asyncio.sleep(0.05)
        trainers[0] = None
        with pytest.raises(EngineError, match="failed"):
            await waiting
        await asyncio.gather(desk.receive(None, NoBody()), asyncio.to_thread(trainers[1].broadcast, state))
        assert engine.version == 7
        await engine.close()

    asyncio.run(scenario())
