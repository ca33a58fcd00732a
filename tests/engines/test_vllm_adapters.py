"""LoRA adapters on a real vLLM on the CPU, in a separate file because it needs another server."""

from __future__ import annotations

import pytest

import adapter_conformance as suite
from ludus.engines.models.loading import load_model
from served import COLD_START
from tests.engines.test_vllm import URL, command, running

pytestmark = pytest.mark.vllm

_MIXED = suite.requests_without_an_adapter_may_share_a_batch
CHECKS = [
    pytest.param(check, marks=pytest.mark.xfail(reason="vLLM on a CPU mixes them up: docs/use/server.md"))
    if check is _MIXED
    else check
    for check in suite.CHECKS
]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """What the server holds: the packaged cold start, its head tied."""
    words = [word for word in command("raw_logprobs") if "tie_word" not in word and word != "--hf-overrides"]
    words += ["--enable-lora", "--max-loras", "4", "--max-lora-rank", str(suite.RANK)]
    with running(words, tmp_path_factory.mktemp("vllm") / "log.txt"):
        yield load_model(str(COLD_START))


@pytest.mark.parametrize("check", CHECKS)
def test_vllm_passes_the_adapter_conformance_checks(base, check, monkeypatch):
    monkeypatch.setattr(suite, "LONG", 80)  # adapters are slow there
    suite.run_check(check, URL, base)
