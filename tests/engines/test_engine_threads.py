"""The number of threads of the embedded engine; the learner keeps its own number."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Qwen3Config, Qwen3ForCausalLM

from ludus.engines.base import Request
from ludus.engines.embedded import engine as engine_module
from ludus.engines.embedded.engine import LocalEngine
from ludus.training.run.session import engine_settings
from ludus.types import SamplingParams
from small_runs import config
from tests.engines.test_engine_batching import SMALL, VOCAB, build


@pytest.fixture
def two_threads():
    """Two threads for whoever makes the engine."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_small_model_uses_one_thread_and_large_model_the_default(tmp_path):
    with torch.device("meta"):
        large = Qwen3ForCausalLM(Qwen3Config(vocab_size=200_000, hidden_size=128, num_hidden_layers=1))
    assert large.num_parameters() > 20_000_000
    assert engine_settings(config(tmp_path), build()).threads == 1
    assert engine_settings(config(tmp_path), large).threads == 0


def test_context_length_is_read_from_n_positions_for_gpt2(tmp_path):
    shape = GPT2Config(vocab_size=VOCAB, n_positions=64, n_embd=32, n_layer=1, n_head=2)
    assert engine_settings(config(tmp_path), GPT2LMHeadModel(shape)).context_tokens == 64


class ThreadRecordingLinear(torch.nn.Linear):
    """Notes with how many threads it is computed."""

    seen: ClassVar[list[int]] = []

    def forward(self, input):
        self.seen.append(torch.get_num_threads())
        return super().forward(input)


def test_model_check_and_generation_use_the_configured_thread_count(two_threads):
    model = build()
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            module.__class__ = ThreadRecordingLinear
    engine = LocalEngine(model, settings=replace(SMALL, threads=1))
    assert torch.get_num_threads() == 2
    asyncio.run(engine.generate(Request("e", (1, 2, 3), SamplingParams(max_new_tokens=2))))
    asyncio.run(engine.close())
    assert set(ThreadRecordingLinear.seen) == {1}


@pytest.mark.parametrize(("threads", "expected"), [(1, 1), (0, 2)])
def test_engine_thread_count_does_not_change_the_callers_thread_count(two_threads, threads, expected):
    async def run():
        engine = LocalEngine(build(), settings=replace(SMALL, threads=threads))
        inside = await engine._worker.call(torch.get_num_threads)
        await engine.close()
        return inside

    assert asyncio.run(run()) == expected
    assert torch.get_num_threads() == 2


def test_a_cancelled_command_is_not_executed_and_the_engine_continues():
    async def run():
        engine, busy = LocalEngine(build(), settings=replace(SMALL, threads=1)), threading.Event()
        engine._worker.submit(busy.wait)
        task = asyncio.create_task(engine.relabel(7))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait({task})
        busy.set()
        request = Request("e", (1, 2, 3), SamplingParams(max_new_tokens=2))
        versions = (await asyncio.wait_for(engine.generate(request), 10)).versions
        await engine.close()
        return versions

    assert asyncio.run(run()) == (0, 0)


def test_throttled_engine_loads_weights_without_steps_and_resumes_when_unthrottled():
    async def run():
        model = build()
        engine = LocalEngine(model, settings=replace(SMALL, threads=1))
        request = Request("e", (1, 2, 3), SamplingParams(max_new_tokens=4))
        await engine.generate(request)
        engine.throttle(1e9)
        before = engine.stats().steps
        going = asyncio.create_task(engine.generate(replace(request, episode="f")))
        await asyncio.wait_for(engine.load_weights(1, model.state_dict()), 10)
        await asyncio.sleep(0.1)
        resting = engine.stats().steps - before
        engine.throttle(0)
        versions = (await asyncio.wait_for(going, 10)).versions
        await engine.close()
        return resting, versions

    assert asyncio.run(run()) == (0, (1, 1, 1, 1))


def test_throttled_engine_pauses_for_the_configured_multiple_of_pass_time():
    async def run(times):
        engine = LocalEngine(build(), settings=replace(SMALL, threads=1))
        step = engine._scheduler.step

        def slow():
            time.sleep(0.01)
            step()

        engine._scheduler.step = slow
        engine.throttle(times)
        begin = time.monotonic()
        await engine.generate(Request("e", (1, 2, 3), SamplingParams(max_new_tokens=10)))
        seconds = time.monotonic() - begin
        passes = engine.stats().steps
        await engine.close()
        return seconds / passes

    assert asyncio.run(run(5)) > 0.05  # no rest after the last pass


def test_request_timeout_aborts_while_the_engine_is_throttled():
    async def run():
        engine = LocalEngine(build(), settings=replace(SMALL, threads=1))
        request = Request("e", (1, 2, 3), SamplingParams(max_new_tokens=4), timeout_s=0.05)
        await engine.generate(replace(request, timeout_s=None))
        engine.throttle(1e9)
        done = await asyncio.wait_for(engine.generate(replace(request, episode="f")), 10)
        await engine.close()
        return done.finish_reason, done.tokens

    assert asyncio.run(run()) == ("abort", ())


def test_throttle_pause_expiring_during_the_clock_check_does_not_hang(monkeypatch):
    clock = itertools.count()  # a hundredth of a second passes whenever it is looked at
    monkeypatch.setattr(engine_module, "time", SimpleNamespace(monotonic=lambda: next(clock) / 100))

    async def run():
        engine = LocalEngine(build(), settings=replace(SMALL, threads=1))
        engine.throttle(1.5)
        request = Request("e", (1, 2, 3), SamplingParams(max_new_tokens=10))
        done = await asyncio.wait_for(engine.generate(request), 10)
        await engine.close()
        return len(done.tokens)

    assert asyncio.run(run()) == 10
