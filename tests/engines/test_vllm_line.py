"""Weights over a process group into vLLM's worker: the worker extension behind a server that behaves like vLLM."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace

import pytest
import torch

from ludus.engines.remote.engine import APIS, ServerEngine
from ludus.engines.remote.http_client import Replica
from ludus.engines.remote.vllm_worker_extension import LudusWorkerExtension
from ludus.engines.remote.weight_broadcaster import make_broadcaster
from ludus.errors import EngineError
from tests.engines.test_engine_server import QUICK, Fake, serving

LINE = replace(QUICK, broadcast_host="127.0.0.1")
STATE = {"model.embed_tokens.weight": torch.randn(8, 4), "model.norm.weight": torch.ones(4)}


class Worker(LudusWorkerExtension):
    """What vLLM makes: its own worker, and the line mixed in."""

    def __init__(self, rank=0, broken=False):
        self.rank, self.broken, self.held = rank, broken, []

    def reload_weights(self, weights_iterator):
        if self.broken:
            raise ValueError("there is no parameter of that name")
        self.held.append({name: tensor.clone() for name, tensor in weights_iterator})


@dataclass
class Vllm(Fake):
    """No path of its own for a line, and workers that do what they are called for."""

    worker: object = field(default_factory=Worker)

    def answer(self, path, body):
        if path in ("/join_weight_group", "/prepare_weights", "/receive_weights"):
            return 404, {"detail": "Not Found"}
        if path != "/collective_rpc":
            return super().answer(path, body)
        method = getattr(self.worker, body["method"], None)
        if method is None:
            return 400, {"error": {"message": f"no method {body['method']}"}}
        return 200, {"results": [method(**body["kwargs"])]}


def send(server, *states, **settings):
    async def run(engine):
        try:
            for version, state in enumerate(states, 1):
                await engine.load_weights(version, state)
        finally:
            await engine.close()

    with serving(server):
        asyncio.run(run(ServerEngine([server.url], settings=replace(LINE, **settings))))


@pytest.mark.parametrize("delta", [False, True])
def test_vllm_model_receives_all_weights_including_the_tied_head(delta):
    server, later = Vllm(), {name: tensor.clone() for name, tensor in STATE.items()}
    later["model.norm.weight"][2] = 3.0
    send(server, STATE, later, delta=delta)
    for held, sent in zip(server.worker.held, (STATE, later), strict=True):
        assert held.keys() == {*STATE, "lm_head.weight"}
        assert all(torch.equal(held[name], tensor) for name, tensor in sent.items())
        assert torch.equal(held["lm_head.weight"], sent["model.embed_tokens.weight"])
    assert server.label == "2"
    loads = [i for i, (_, body) in enumerate(server.asked) if body.get("method") == "ludus_receive_weights"]
    around = [server.asked[i + step][0].partition("?")[0] for i in loads for step in (-1, 1, 2, 3)]
    assert around == ["/pause", "/reset_prefix_cache", "/update_weight_version", "/resume"] * 2


def test_broadcast_to_a_server_with_another_api_raises_engine_error():
    with pytest.raises(EngineError, match="http://there does not support weight broadcasts"):
        make_broadcaster([Replica("http://there", LINE)], APIS["sglang"](), LINE)


@pytest.mark.parametrize(
    ("worker", "words"),
    [
        (Worker(rank=1), "several workers"),
        (Worker(broken=True), "no parameter of that name"),
        (object(), "no method ludus_join_weight_group"),
    ],
)
def test_worker_error_is_raised_with_its_message(worker, words):
    server = Vllm(worker=worker)
    with pytest.raises(EngineError, match=words) as caught:
        send(server, STATE, timeout_s=3)
    assert server.url in str(caught.value)
    if worker.__class__ is object:
        assert (
            "--worker-extension-cls ludus.engines.remote.vllm_worker_extension.LudusWorkerExtension"
            in caught.value.hint
        )
