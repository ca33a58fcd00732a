"""The conformance suite and a training run against a real vLLM on the CPU, which `make vllm` installs."""

from __future__ import annotations

import asyncio
import copy
import json
import os
import re
import subprocess
import time
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import httpx
import pytest
import torch

from engine_conformance import CHECKS, Case, count_sampled
from ludus.cli.main import main
from ludus.engines.models.loading import load_model, load_tokenizer
from ludus.engines.remote.engine import ServerEngine
from ludus.engines.remote.http_client import RemoteEngineSettings
from ludus.engines.remote.weight_broadcaster import EXTENSION
from ludus.errors import EngineError
from served import COLD_START, CONTEXT
from small_runs import words

pytestmark = pytest.mark.vllm

PYTHON = Path(os.environ.get("LUDUS_VLLM_PYTHON", Path(__file__).parents[2] / ".venv-vllm/bin/python"))
PORT = 8197
URL = f"http://127.0.0.1:{PORT}"
START_S = 900
SOURCE = Path(__file__).parents[2] / "src"
PROOF = re.compile(r"(\d+) tensors verified")
MODES = ("raw_logprobs", "processed_logprobs")


def command(mode: str) -> list[str]:
    """One replica of the packaged cold start, its output head untied (see docs/use/server.md)."""
    options = {
        "--model": str(COLD_START),
        "--served-model-name": "policy",
        "--host": "127.0.0.1",
        "--port": str(PORT),
        "--dtype": "float32",
        "--max-model-len": str(CONTEXT),
        "--max-num-seqs": "64",
        "--logprobs-mode": mode,
        "--hf-overrides": json.dumps({"tie_word_embeddings": False}),
    }
    options["--worker-extension-cls"] = EXTENSION
    words = [word for pair in options.items() for word in pair]
    return [str(PYTHON), "-m", "vllm.entrypoints.openai.api_server", "--enforce-eager", *words]


@pytest.fixture(scope="module", params=MODES)
def vllm(request, tmp_path_factory):
    """A server that holds the packaged cold start, head included: its first update has given it that."""
    with running(command(request.param), tmp_path_factory.mktemp("vllm") / "log.txt"):
        yield request.param


@contextmanager
def running(words: list[str], log: Path):
    """A server for the time of a block."""
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    env |= {"VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    env |= {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1", "PYTHONPATH": str(SOURCE)}
    with log.open("wb") as out:
        process = subprocess.Popen(words, env=env, stdout=out, stderr=out)
        try:
            wait_until_healthy(process, log)
            yield
        finally:
            process.terminate()
            process.wait(60)


def wait_until_healthy(process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_S
    while True:
        assert process.poll() is None, log.read_text()[-3000:]
        assert time.monotonic() < deadline, log.read_text()[-3000:]
        try:
            httpx.get(f"{URL}/health").raise_for_status()
            return
        except httpx.HTTPError:
            time.sleep(1)


@pytest.fixture(scope="module")
def case(vllm):
    model, tokenizer = load_model(str(COLD_START)), load_tokenizer(str(COLD_START))
    engine = ServerEngine([URL])

    async def untie():
        await engine.load_weights(0, dict(model.named_parameters()))
        for replica in engine._replicas:
            await replica.close()

    asyncio.run(untie())
    return Case(engine, model, tokenizer, partial(count_sampled, URL), tells_versions=False)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_vllm_passes_the_engine_conformance_checks(case, check):
    async def run():
        await check(case)
        for replica in case.engine._replicas:
            await replica.close()

    asyncio.run(run())


def test_training_against_vllm_verifies_transferred_weights(vllm, tmp_path):
    run = {"training__steps": "2", "rollout__reproducible": "false", "engine__url": URL}
    assert main(["train", "search", *words(tmp_path / "run", **run)]) == 0
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert len(rows) == 2
    for row in rows:
        assert row["sync/probe_gap"] < 1e-4
        assert row["mismatch/logprob_diff"] < 1e-4
    proofs = PROOF.findall((tmp_path / "run" / "log.txt").read_text())
    assert len(proofs) >= 2
    assert all(int(num_proved) > 0 for num_proved in proofs), proofs


def scored_by(model, tokens):
    with torch.no_grad():
        table = model(torch.tensor([tokens])).logits[0].log_softmax(-1)
    return [0.0, *(float(table[i, token]) for i, token in enumerate(tokens[1:]))]


def test_weights_are_broadcast_without_a_file(case):
    tokens, changed = list(range(40, 90)), copy.deepcopy(case.model)
    engine = ServerEngine([URL], settings=RemoteEngineSettings(broadcast_host="127.0.0.1", timeout_s=120))

    async def run():
        for version in (101, 102):
            with torch.no_grad():
                for parameter in changed.parameters():
                    parameter.mul_(1.05)
            await engine.load_weights(version, dict(changed.named_parameters()))
            assert await engine.score(tokens) == pytest.approx(scored_by(changed, tokens), abs=1e-3)
            assert engine.version == version
        with pytest.raises(EngineError, match=URL):
            await engine.load_weights(103, {"no.such.weight": torch.zeros(3)})
        await engine.load_weights(104, dict(case.model.named_parameters()))
        assert await engine.score(tokens) == pytest.approx(scored_by(case.model, tokens), abs=1e-3)
        await engine.close()

    asyncio.run(run())
