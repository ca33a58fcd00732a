"""Statistics of servers, and their effect on concurrency."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

import pytest

from ludus.diagnostics.timings import StepTimings
from ludus.engines.base import EngineStats, Request, drain_stats
from ludus.engines.remote import metrics
from ludus.engines.remote.engine import ServerEngine
from ludus.engines.remote.metrics import MetricsReading, PolledServer, reading_of
from ludus.rollouts.stream_control import ConcurrencyController, StreamThroughput
from ludus.types import Message, SamplingParams, Segment, StopReason, Trajectory
from tests.engines.test_engine_server import QUICK, Fake, serving
from waiting import until

VLLM = """# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{{engine="0",model_name="a {{b}}"}} {running}
vllm:num_requests_running{{engine="1",model_name="a {{b}}"}} 2.0
vllm:num_requests_waiting{{engine="0",model_name="m"}} 1.0
vllm:prompt_tokens_total{{engine="0",model_name="m"}} {prompt}
vllm:prefix_cache_hits_total{{engine="0",model_name="m"}} 40.0
vllm:generation_tokens_total{{engine="0",model_name="m"}} {sampled}
vllm:iteration_tokens_total_bucket{{engine="0",le="+Inf",model_name="m"}} 5.0
process_cpu_seconds_total 1.234e+01
"""


def vllm(running=3.0, prompt=100.0, sampled=50.0) -> str:
    return VLLM.format(running=running, prompt=prompt, sampled=sampled)


def test_vllm_metrics_are_parsed_into_token_and_queue_counts():
    counts = EngineStats(prefill_tokens=60, cached_tokens=40, decode_tokens=50)
    assert reading_of(vllm()) == MetricsReading(counts, (5, 1))
    assert reading_of("") is reading_of("{}") is reading_of("<html>404</html>") is None
    assert reading_of("vllm:num_requests_running many\n") is None
    assert reading_of(vllm().replace("vllm:generation", "sglang:generation")) is None


def test_sglang_metrics_are_parsed_like_vllm_metrics():
    text = vllm().replace("vllm:", "sglang:").replace("requests_running", "running_reqs")
    text = text.replace("requests_waiting", "queue_reqs").replace("prefix_cache_hits", "cached_tokens")
    assert reading_of(text) == reading_of(vllm())


def test_server_counts_start_at_first_reading_and_continue_after_a_restart():
    watched = PolledServer()
    for at_s, sampled, running in ((10.0, 1000, 8), (11.0, 1060, 6), (13.0, 1100, 2), (14.0, 30, 4)):
        watched.take(MetricsReading(EngineStats(decode_tokens=sampled), (running, 1)), at_s)
    assert watched.total == EngineStats(steps=3, decode_tokens=130, running_steps=12, queue_steps=3, wall_s=4.0)
    found = watched.total.metrics()
    assert found["engine/decode_tokens_per_s"] == 130 / 4
    assert (found["engine/requests_running"], found["engine/requests_waiting"]) == (4, 1)
    assert "engine/busy_s" not in found
    assert watched.total.line()


def test_token_counts_of_servers_are_summed_at_each_step(monkeypatch):
    monkeypatch.setattr(metrics, "_POLL_INTERVAL_S", 3600)  # a look between the steps would be counted too
    monkeypatch.setattr(metrics, "_TIMEOUT_S", 60)

    async def scenario(first, second, silent):
        engine = ServerEngine([first.url, second.url, silent.url], "vllm", QUICK)
        assert (await drain_stats(engine)).metrics() == {}
        first.metrics = vllm(running=1.0, sampled=90)
        found = await drain_stats(engine)
        assert (found.decode_tokens, found.steps, found.running_steps) == (40, 2, 3 + 5)
        assert found.wall_s > 0
        await engine.close()
        assert len(asyncio.all_tasks()) == 1

    fakes = Fake(metrics=vllm()), Fake(metrics=vllm()), Fake()
    with serving(*fakes):
        asyncio.run(scenario(*fakes))


@dataclass
class CachingFake(Fake):
    """Says once how it is, and keeps that for a while: what is asked later is answered before."""

    waits: bool = False

    def answer(self, path, body):
        said = super().answer(path, body)
        if self.waits and path == "/metrics":
            self.waits = False
            time.sleep(0.3)
        return said


def test_late_reading_is_not_counted_as_a_server_restart(monkeypatch):
    monkeypatch.setattr(metrics, "_POLL_INTERVAL_S", 3600)
    monkeypatch.setattr(metrics, "_TIMEOUT_S", 60)

    async def scenario(fake):
        engine = ServerEngine([fake.url], "vllm", QUICK)
        await engine.measure()
        fake.metrics, fake.waits = vllm(sampled=90), True
        first = asyncio.create_task(engine.measure())
        await until(lambda: not fake.waits)
        fake.metrics = vllm(sampled=120)
        await asyncio.gather(engine.measure(), first)
        assert engine.stats().decode_tokens == 120 - 50
        await engine.close()

    fake = CachingFake(metrics=vllm())
    with serving(fake):
        asyncio.run(scenario(fake))


def test_server_metrics_are_polled_between_requests():
    async def scenario(fake):
        engine = ServerEngine([fake.url], "vllm", QUICK)
        await drain_stats(engine)
        fake.metrics = vllm(sampled=250)
        await until(lambda: engine.stats().decode_tokens == 200)
        await engine.close()
        assert len(asyncio.all_tasks()) == 1

    fake = Fake(metrics=vllm())
    with serving(fake):
        asyncio.run(scenario(fake))


def test_engine_idle_share_is_omitted_if_busy_time_is_unknown():
    clock = StepTimings({"rollout": 3.0, "train": 1.0}, EngineStats().metrics())
    assert clock.metrics([])["idle/learner"] == 0.75
    assert "idle/engine" not in clock.metrics([])
    clock.engine = EngineStats(steps=1, decode_tokens=5, wall_s=4.0).metrics()
    assert "idle/engine" not in clock.metrics([])
    clock.engine = EngineStats(steps=1, model_s=1.0).metrics()
    assert clock.metrics([])["idle/engine"] == 0.75


def in_flight_after(stats: list[EngineStats]) -> list[int]:
    """The limits after steps in which the learner waited for half of the time, and the engine did that."""
    limit = ConcurrencyController(32, 8, 512)
    seconds, flow = {"rollout": 1.0, "train": 1.0}, StreamThroughput(64.0, 1.0)
    return [limit.after_step(StepTimings(seconds, one.metrics()).metrics([]), 0.0, flow, True) for one in stats]


def test_concurrency_control_ignores_unknown_engine_measurements():
    assert in_flight_after([EngineStats()] * 4) == [32] * 4
    idle = EngineStats(steps=10, running_steps=320, decode_tokens=320, model_s=0.5)
    assert in_flight_after([idle] * 2) == [64, 128]

    def full(running):  # a pass takes as much longer as there are sequences in it
        return EngineStats(steps=2, running_steps=2 * running, decode_tokens=1000, wall_s=2.0)

    limits = in_flight_after([full(32), full(64), full(64), full(64)])
    assert limits[-1] == limits[-2] < 512
    unseen = EngineStats(steps=3, decode_tokens=50, wall_s=3.0)  # sampled between the looks at what runs
    assert in_flight_after([unseen]) == [64]
    queued = EngineStats(steps=2, running_steps=20, queue_steps=40, decode_tokens=1000, wall_s=2.0)
    assert in_flight_after([queued])[0] < 32


def test_ludus_serve_exports_all_engine_counters(served):
    async def scenario():
        engine = ServerEngine([served.url], "vllm", QUICK)
        await drain_stats(engine)
        params = SamplingParams(max_new_tokens=4)
        await engine.generate_batch([Request(name, (1, 2, 3), params) for name in ("a", "b")])
        found = await drain_stats(engine)
        await engine.close()
        return found

    found = asyncio.run(scenario())
    assert 0 < found.steps <= found.running_steps
    assert 0 < found.decode_tokens <= 8
    assert found.wall_s == 0
    assert found.metrics()["engine/busy_s"] > 0


def test_concurrent_sampling_speed_is_computed_over_the_whole_step():
    seconds = {"rollout": 0.0001, "learn": 3.0, "sync": 1.0, "evaluate": 6.0}
    said = (Message(role="assistant", content="x"),)
    one = Trajectory("t", 0, (Segment("action", tuple(range(40))),), said, StopReason.ANSWERED)
    speeds = [
        StepTimings(seconds, concurrent=beside).metrics([one])["speed/sampled_tokens_per_s"] for beside in (True, False)
    ]
    assert speeds == pytest.approx([40 / 4.0001, 400_000])
