"""Passes as on a GPU, run on the CPU: attention over pages in torch, and recordings that repeat a function."""

import asyncio
import random
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from engines.test_engine_batching import SMALL, alone, build, tokens, varied_requests
from ludus.engines.base import Request
from ludus.engines.embedded import paged_pass
from ludus.engines.embedded.engine import LocalEngine
from ludus.types import SamplingParams


class Recordings:
    """A recorder that repeats a function on replay, and overwrites its first result as a CUDA graph does."""

    def __init__(self):
        self.recorded = self.replayed = 0

    def __call__(self, function):
        result = function().clone()
        self.recorded += 1

        def replay():
            self.replayed += 1
            result.copy_(function())

        return replay, result


@pytest.fixture
def recordings(monkeypatch):
    recorder = Recordings()
    monkeypatch.setattr(paged_pass, "runs_on", lambda device: True)
    monkeypatch.setattr(paged_pass, "make_recorder", lambda device: recorder)
    return recorder


def generate(engine, requests):
    return engine.generate_batch([replace(request, params=replace(request.params, top_k=0)) for request in requests])


def assert_same(answers, expected):
    for answer, other in zip(answers, expected, strict=True):
        assert answer.tokens == other.tokens
        assert answer.logprobs == pytest.approx(other.logprobs, abs=1e-4)


def test_recorded_passes_return_the_tokens_of_the_cpu_engine(recordings, monkeypatch):
    model = build()
    requests = [replace(r, params=replace(r.params, temperature=0.0)) for r in varied_requests(12)]

    async def run():
        engine = LocalEngine(model, settings=SMALL)
        first, stats = await engine.generate_batch(requests), engine.stats()
        second = await engine.generate_batch(requests)
        await engine.close()
        return first, second, stats

    first, second, stats = asyncio.run(run())
    assert recordings.recorded <= len(paged_pass.GRAPH_TOKENS)
    assert recordings.replayed >= stats.steps
    monkeypatch.undo()
    expected = alone(model, requests)
    assert_same(first, expected)
    assert_same(second, expected)


def test_engine_drops_recordings_after_sleep_and_keeps_them_after_a_weight_update(recordings, monkeypatch):
    request = Request("e", tokens(random.Random(0), 20, 20), SamplingParams(max_new_tokens=12, temperature=0.0))
    model, newer = build(), build(1)

    async def run():
        engine = LocalEngine(model, settings=SMALL)
        recordings.recorded = 0  # the comparison at the start is recorded
        before = await engine.generate(request)
        counts = [recordings.recorded]
        await engine.load_weights(1, dict(newer.named_parameters()))
        after = await engine.generate(request)
        counts.append(recordings.recorded)
        engine.release("e")
        await engine.sleep()
        again = await engine.generate(request)
        counts.append(recordings.recorded)
        await engine.close()
        return before, after, again, counts

    before, after, again, counts = asyncio.run(run())
    assert counts == [2, 2, 4]  # one size for the prompt and one for decoding
    monkeypatch.undo()
    assert_same([before, after, again], [*alone(model, [request]), *alone(newer, [request]) * 2])


def test_adapter_update_keeps_recordings_and_a_batch_of_two_adapters_is_not_recorded(recordings, monkeypatch):
    peft = pytest.importorskip("peft")
    prompt = tokens(random.Random(1), 20, 20)
    greedy = SamplingParams(max_new_tokens=8, temperature=0.0)

    def adapter(seed):
        torch.manual_seed(seed)
        adapted = peft.get_peft_model(build(), peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
        return {
            name.replace(".default", ""): torch.randn_like(tensor) * 0.3
            for name, tensor in adapted.named_parameters()
            if ".lora_" in name
        }

    async def run():
        engine = LocalEngine(build(), settings=SMALL)
        recordings.recorded = 0
        found, counts = [], []
        for version, seed in enumerate((1, 2)):
            await engine.load_adapter("a", version, adapter(seed), 2.0)
            found.append(await engine.generate(Request(f"e{seed}", prompt, greedy, adapter="a")))
            counts.append(recordings.recorded)
        both = [Request("x", prompt, greedy), Request("y", prompt, greedy, adapter="a")]
        found += await engine.generate_batch(both)
        counts.append(recordings.recorded)
        await engine.close()
        return found, counts

    found, counts = asyncio.run(run())
    assert counts == [2, 2, 2]
    monkeypatch.undo()
    expected, _ = asyncio.run(run())
    assert_same(found, expected)
    assert found[0].tokens != found[1].tokens


def test_a_failed_recording_disables_recordings_and_the_request_succeeds(recordings, monkeypatch, caplog):
    def fail(function):
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    monkeypatch.setattr(paged_pass, "make_recorder", lambda device: fail)
    requests = [replace(r, params=replace(r.params, temperature=0.0)) for r in varied_requests(3)]

    async def run():
        engine = LocalEngine(build(), settings=SMALL)
        answers = await engine.generate_batch(requests)
        await engine.close()
        return answers

    answers = asyncio.run(run())
    assert caplog.messages == [
        "CUDA graphs are disabled, so decoding is slower: operation not permitted when stream is capturing"
    ]
    monkeypatch.undo()
    assert_same(answers, alone(build(), requests))


KERNEL = """
import torch
from ludus.engines.embedded.attention import ScoreRule
from ludus.engines.embedded.paged_kernels import attention
from ludus.engines.embedded.paged_pass import gathered_attention

torch.manual_seed(0)
for query_heads, heads, width, window, softcap, tokens in (
    (4, 2, 16, 0, 0.0, 5),
    (14, 2, 64, 0, 0.0, 3),
    (4, 4, 24, 7, 0.0, 6),
    (4, 2, 32, 20, 30.0, 40),
    (8, 1, 16, 0, 0.0, 140),
):
    memory = tuple(torch.randn(40, heads, 16, width) for _ in range(2))
    table = torch.randint(40, (4, 6), dtype=torch.int32)
    slots, positions = torch.randint(4, (tokens,)), torch.randint(96, (tokens,))
    where = slots.int(), positions.int(), table
    query = torch.randn(tokens, query_heads, width).transpose(0, 1)
    found = attention(query, memory, where, (0.3, window, softcap))
    expected = gathered_attention(query, memory, where, ScoreRule(0.3, window, softcap))
    assert (found - expected).abs().max() < 1e-5, (width, window, softcap)
"""


def test_triton_kernel_agrees_with_torch_in_the_interpreter(tmp_path):
    pytest.importorskip("triton", reason="Triton comes with torch for CUDA")
    program = tmp_path / "kernel.py"
    program.write_text(KERNEL)
    subprocess.run([sys.executable, str(program)], check=True, env={"TRITON_INTERPRET": "1", "PATH": ""}, timeout=300)
