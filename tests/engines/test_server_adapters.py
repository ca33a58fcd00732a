"""LoRA adapters on servers: `ludus serve`, a run that trains through it, and servers that fail or refuse."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys

import httpx
import pytest
import torch
from peft import get_peft_model_state_dict
from safetensors.torch import load_file

from adapter_conformance import CHECKS, PROMPT, SCALING, adapted, factors, reference, run_check
from ludus.cli.main import main
from ludus.engines.base import Request
from ludus.engines.embedded.engine import LocalEngine
from ludus.engines.models.fingerprint import fingerprint_module
from ludus.engines.models.loading import load_model
from ludus.engines.models.lora import read_adapter, write_adapter
from ludus.engines.remote.api_adapters import RemoteAdapter, SampledTokens, VersionRange, VllmApi
from ludus.engines.remote.engine import ServerEngine
from ludus.engines.remote.http_client import RemoteEngineSettings
from ludus.engines.remote.weight_publisher import KNOWN_LABELS, WeightFolder, WeightPublisher, read_weights
from ludus.errors import EngineError, StorageError
from ludus.types import SamplingParams
from served import COLD_START, counted, serving_model, start_server, until_counts
from small_runs import words
from tests.engines.test_engine_server import Fake, serving


@pytest.fixture(scope="module")
def base():
    return load_model(str(COLD_START))


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_ludus_serve_passes_the_adapter_conformance_checks(served, base, check):
    run_check(check, served.url, base)


@pytest.fixture
def folder(tmp_path, base):
    write_adapter(tmp_path / "a", factors(adapted(base, 1)), SCALING)
    return tmp_path / "a"


def post(served, path, status=200, **body):
    answer = httpx.post(f"{served.url}{path}", json=body, headers=served.headers, timeout=60)
    assert answer.status_code == status, answer.text
    return answer.json()["error"]["message"] if status >= 400 else answer


def test_clients_select_an_adapter_by_model_name(served, base, folder):
    post(served, "/v1/load_lora_adapter", lora_name="mine", lora_path=str(folder), weight_version="6")
    try:
        cards = httpx.get(f"{served.url}/v1/models", timeout=60).json()["data"]
        shown = [(card["id"], card["parent"], card["root"], card["weight_version"]) for card in cards[1:]]
        assert shown == [("mine", "policy", str(folder), "6")]
        asked = {"prompt": list(PROMPT), "max_tokens": 0, "echo": True, "prompt_logprobs": 0}
        made = adapted(base, 1)
        for name, model in (("mine", made), ("policy", base)):
            answer = post(served, "/v1/completions", model=name, **asked).json()
            rows = answer["choices"][0]["prompt_logprobs"][1:]
            scores = [row[str(t)]["logprob"] for t, row in zip(PROMPT[1:], rows, strict=True)]
            assert scores == pytest.approx(reference(model, PROMPT), abs=1e-4)
            assert answer["model"] == name
            digest = httpx.get(f"{served.url}/fingerprint?model={name}", headers=served.headers, timeout=60).json()[
                "fingerprint"
            ]
            assert digest == fingerprint_module(model)
        chat = {"messages": [{"role": "user", "content": "Where is Paris?"}], "return_token_ids": True}
        (choice,) = post(served, "/v1/chat/completions", model="mine", max_tokens=4, **chat).json()["choices"]
        assert {span["version"] for span in choice["weight_versions"]} == {"6"}
        body = {"model": "mine", "prompt": list(PROMPT), "max_tokens": 3, "stream": True}
        pieces = post(served, "/v1/completions", **body).text
        assert '"model":"mine"' in pieces
    finally:
        post(served, "/v1/unload_lora_adapter", lora_name="mine")
    assert "'mine' is not served; available" in post(served, "/v1/completions", 404, model="mine", **asked)


def test_replacing_an_adapter_in_place_affects_a_running_request(served, base, folder, tmp_path):
    write_adapter(tmp_path / "b", factors(adapted(base, 2)), SCALING)
    load = {"lora_name": "mine", "lora_path": str(folder)}
    post(served, "/v1/load_lora_adapter", **load)
    try:
        assert "already loaded" in post(served, "/v1/load_lora_adapter", 400, **load)

        async def run():
            async with httpx.AsyncClient(base_url=served.url, headers=served.headers, timeout=60) as client:
                body = {"model": "mine", "prompt": list(PROMPT), "max_tokens": 300, "ignore_eos": True}
                before = counted((await client.get("/metrics")).text)["decode_tokens_total"]
                running = asyncio.create_task(client.post("/v1/completions", json=body | {"return_token_ids": True}))
                await until_counts(client, lambda now: now["decode_tokens_total"] > before)
                again = load | {"lora_path": str(tmp_path / "b"), "load_inplace": True}
                (await client.post("/v1/load_lora_adapter", json=again)).raise_for_status()
                return (await running).json()["choices"][0]

        spans = asyncio.run(run())["weight_versions"]
        assert [span["version"] for span in spans] == ["0", "1"]
        assert spans[-1]["end"] == 300
    finally:
        post(served, "/v1/unload_lora_adapter", lora_name="mine")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"r": 4}, "rank 4"),
        ({"use_dora": True}, "not plain LoRA"),
        ({"rank_pattern": {"q_proj": 2}}, "not plain LoRA"),
        ({"peft_type": "IA3"}, "not plain LoRA"),
        ({"r": "many"}, "not a valid adapter configuration"),
    ],
)
def test_adapter_with_mismatched_or_unsupported_config_is_rejected(served, folder, change, words):
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    assert words in post(served, "/v1/load_lora_adapter", 400, lora_name="x", lora_path=str(folder))


def test_missing_corrupt_or_mismatched_adapters_are_rejected(served, base, folder, tmp_path):
    load = "/v1/load_lora_adapter"
    assert "adapter at" in post(served, load, 400, lora_name="x", lora_path=str(tmp_path / "none"))
    assert "name of the base model" in post(served, load, 400, lora_name="policy", lora_path=str(folder))
    assert "lora_name" in post(served, load, 400, lora_path=str(folder))
    assert "Adapter 'x' is not loaded" in post(served, "/v1/unload_lora_adapter", 404, lora_name="x")
    state = {name: p[:, :64] if "lora_A" in name else p for name, p in factors(adapted(base, 1)).items()}
    write_adapter(tmp_path / "narrow", state, SCALING)
    words = post(served, load, 400, lora_name="x", lora_path=str(tmp_path / "narrow"))
    assert "whose weight is (" in words
    head = {"lm_head.lora_A.weight": torch.ones(2, 128), "lm_head.lora_B.weight": torch.ones(2048, 2)}
    write_adapter(tmp_path / "head", head, SCALING)
    words = post(served, load, 400, lora_name="x", lora_path=str(tmp_path / "head"))
    assert "no supported linear layer: base_model.model.lm_head" in words
    (folder / "adapter_model.safetensors").write_bytes(b"no")
    assert "adapter at" in post(served, load, 400, lora_name="x", lora_path=str(folder))


def test_written_adapter_is_readable_by_peft_and_read_adapter(base, folder):
    from peft import PeftModel

    made = adapted(base, 1)
    again = PeftModel.from_pretrained(load_model(str(COLD_START)), str(folder)).eval()
    assert fingerprint_module(again) == fingerprint_module(made) != fingerprint_module(adapted(base, 2))
    files = read_adapter(folder)
    assert (files.rank, files.scaling) == (8, SCALING)
    stored = get_peft_model_state_dict(made)
    assert files.state.keys() == stored.keys()


def test_adapter_fingerprint_covers_base_factors_and_scaling(base):
    made = adapted(base, 1)

    async def run():
        engine = LocalEngine(base)
        try:
            await engine.load_adapter("a", 1, factors(made), SCALING)
            await engine.load_adapter("b", 1, factors(made), SCALING * 2)
            return [await engine.fingerprint(adapter=name) for name in ("a", "b", None)]
        finally:
            await engine.close()

    right, scaled, plain = asyncio.run(run())
    assert right == fingerprint_module(made)
    assert plain == fingerprint_module(base)
    assert len({right, scaled, plain}) == 3


def test_error_for_server_without_lora_lists_required_startup_options(base, served):
    class NoLoraServer(Fake):
        def answer(self, path, body):
            if "lora" in path:
                return 404, {"detail": "Not Found"}
            return super().answer(path, body)

    async def send(engine):
        try:
            await engine.load_adapter("a", 1, factors(adapted(base, 1, rank=32)), SCALING)
        finally:
            await engine.close()

    fake = NoLoraServer()
    with serving(fake) as engine, pytest.raises(EngineError, match="does not support LoRA adapters") as info:
        asyncio.run(send(engine))
    assert "--enable-lora --max-loras 2 --max-lora-rank 32" in info.value.hint
    assert "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1" in info.value.hint


@pytest.mark.fault
def test_adapter_is_reloaded_after_a_server_restart(base):
    made = adapted(base, 1)
    first = start_server("--control")
    second = None
    try:
        engine = ServerEngine([first.url], settings=RemoteEngineSettings(connect_timeout_s=60), lora_scaling=SCALING)

        async def before():
            await engine.load_weights(5, factors(made))
            await engine._replicas[0].close()

        async def after():
            params = SamplingParams(max_new_tokens=8)
            done = await engine.generate(Request("e", PROMPT, params))
            await engine.close()
            return done

        asyncio.run(before())
        first.kill()
        second = start_server("--control", port=first.port)
        done = asyncio.run(after())
    finally:
        for server in (first, second):
            if server is not None:
                server.kill()
    assert set(done.versions) == {5}
    expected = reference(made, PROMPT + done.tokens)[len(PROMPT) - 1 :]
    assert list(done.logprobs) == pytest.approx(expected, abs=1e-4)


@pytest.mark.fault
def test_adapter_run_through_a_server_matches_the_embedded_engine(tmp_path):
    lora = {"training__steps": "2", "model__lora__rank": "4", "training__learning_rate": "1e-3"}
    assert main(["train", "search", *words(tmp_path / "local", **lora)]) == 0
    with serving_model("--control") as server:
        through = lora | {"engine__url": server.url}
        assert main(["train", "search", *words(tmp_path / "served", **through)]) == 0
        again = ["train", "--resume", str(tmp_path / "served"), "--training.steps", "3"]
        assert main(again) == 0
        cards = httpx.get(f"{server.url}/v1/models", timeout=60).json()["data"]
    assert [card["id"] for card in cards] == ["policy"]
    local, remote = (
        load_file(tmp_path / name / "checkpoints" / "step-000002" / "adapter_model.safetensors")
        for name in ("local", "served")
    )
    assert local.keys() == remote.keys()
    assert any(tensor.any() for name, tensor in remote.items() if "lora_B" in name)
    assert all(torch.equal(local[name], remote[name]) for name in local)
    rows = [json.loads(line) for line in (tmp_path / "served" / "metrics.jsonl").read_text().splitlines()]
    assert len(rows) == 3
    assert all(row["sync/probe_gap"] < 1e-4 for row in rows)


def test_weight_folder_uses_shared_memory_if_space_suffices_otherwise_disk(tmp_path, monkeypatch):
    shared, disk = tmp_path / "shm", tmp_path / "disk"
    shared.mkdir()
    disk.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(disk))
    room = WeightFolder(shared_memory=shared)
    folder = room.folder("w-1", 1000)
    assert folder.is_relative_to(shared)
    beside = WeightFolder(shared_memory=shared)
    assert beside.folder("w-1", 1000).parent != folder.parent
    assert len(list(shared.iterdir())) == 2
    for one in (room, beside):
        one.close()
    assert not list(shared.iterdir())
    for full in (WeightFolder(shared_memory=shared), WeightFolder(shared_memory=tmp_path / "none")):
        assert full.folder("w-1", 1 << 60 if full.shared_memory == shared else 1).is_relative_to(disk)
        full.close()
    assert WeightFolder(str(tmp_path / "own"), shared).folder("w-1", 1) == tmp_path / "own" / "w-1"


def test_missing_or_invalid_weights_are_reported(tmp_path):
    with pytest.raises(StorageError, match="cannot be read"):
        read_weights(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"no weights")
    with pytest.raises(StorageError, match="cannot be read"):
        read_weights(tmp_path)


@pytest.mark.slow
def test_shared_memory_folder_of_a_killed_process_is_removed(tmp_path):
    code = (
        "import os, sys; from pathlib import Path\n"
        "from ludus.engines.remote.weight_publisher import WeightFolder\n"
        "shelf = WeightFolder(shared_memory=Path(sys.argv[1]))\nshelf.folder('x', 1)\n"
        "os.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.DEVNULL, check=False)
    (left,) = tmp_path.iterdir()
    shelf = WeightFolder(shared_memory=tmp_path)
    mine = shelf.folder("x", 1).parent
    assert [mine] == list(tmp_path.iterdir()) != [left]
    shelf.close()


def test_only_labels_of_the_newest_versions_are_accepted():
    sent = WeightPublisher(VllmApi(), [], RemoteEngineSettings(), "trainer", reports_versions=True)
    for version in range(KNOWN_LABELS + 5):
        sent.follow(version, None)

    def known(version: int) -> bool:
        return sent.accepts(SampledTokens((1,), (0.0,), "stop", (VersionRange(str(version), 0, 1),)), None)

    newest = KNOWN_LABELS + 4
    assert [known(version) for version in (4, 5, newest, newest + 1)] == [False, True, True, False]


def test_adapter_without_users_is_not_counted():
    sent = WeightPublisher(VllmApi(), [], RemoteEngineSettings(), "follower", reports_versions=False)
    for version in range(3):
        sent.follow(version, RemoteAdapter(f"a-{version}", "folder", version, 4))
        with sent.adapters.using(None):
            assert len(sent.adapters._users) == 1
    assert not sent.adapters._users
