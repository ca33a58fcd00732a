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


def test_a_small_model_has_one_thread_and_a_large_one_those_of_the_learner(tmp_path):
    with torch.device("meta"):
        large = Qwen3ForCausalLM(Qwen3Config(vocab_size=200_000, hidden_size=128, num_hidden_layers=1))
    assert large.num_parameters() > 20_000_000
    assert engine_settings(config(tmp_path), build()).threads == 1
    assert engine_settings(config(tmp_path), large).threads == 0


def test_a_model_with_another_name_for_its_length_is_not_exceeded(tmp_path):
    shape = GPT2Config(vocab_size=VOCAB, n_positions=64, n_embd=32, n_layer=1, n_head=2)
    assert engine_settings(config(tmp_path), GPT2LMHeadModel(shape)).context_tokens == 64


class ThreadRecordingLinear(torch.nn.Linear):
    """Notes with how many threads it is computed."""

    seen: ClassVar[list[int]] = []

    def forward(self, input):
        self.seen.append(torch.get_num_threads())
        return super().forward(input)


def test_the_engine_tries_the_model_with_the_threads_that_it_computes_with(two_threads):
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
def test_the_engine_computes_with_its_number_and_the_caller_keeps_its_own(two_threads, threads, expected):
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


def test_an_engine_that_rests_makes_no_pass_but_takes_weights_and_goes_on_at_once_when_it_rests_no_more():
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


def test_an_engine_pauses_for_the_configured_multiple_of_a_pass():
    async def run(times):
        engine = LocalEngine(build(), settings=replace(SMALL, threads=1))
        step = engine._core.step

        def slow():
            time.sleep(0.01)
            step()

        engine._core.step = slow
        engine.throttle(times)
        begin = time.monotonic()
        await engine.generate(Request("e", (1, 2, 3), SamplingParams(max_new_tokens=10)))
        seconds = time.monotonic() - begin
        passes = engine.stats().steps
        await engine.close()
        return seconds / passes

    assert asyncio.run(run(5)) > 0.05  # no rest after the last pass


def test_a_request_whose_time_ends_during_a_rest_ends_then():
    async def run():
        engine = LocalEngine(build(), settings=replace(SMALL, threads=1))
        request = Request("e", (1, 2, 3), SamplingParams(max_new_tokens=4), timeout_s=0.05)
        await engine.generate(replace(request, timeout_s=None))
        engine.throttle(1e9)
        done = await asyncio.wait_for(engine.generate(replace(request, episode="f")), 10)
        await engine.close()
        return done.finish_reason, done.tokens

    assert asyncio.run(run()) == ("abort", ())


def test_a_rest_that_ends_while_the_engine_makes_up_its_mind_is_over(monkeypatch):
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
