"""What the progress bar of a rollout says."""

from __future__ import annotations

import asyncio
import io
from dataclasses import replace

from rich.console import Console
from rich.progress import Progress, TextColumn

from ludus.cli.console import ProgressReporter
from ludus.engines.base import EngineStats, Request
from ludus.engines.local import LocalEngine
from ludus.rollout.ledger import RolloutKey
from ludus.rollout.scheduler import Episode
from ludus.types import SamplingParams, StopReason, Task, Timings, Trajectory
from test_engine_batching import SMALL, build

DONE = EngineStats(
    steps=10,
    prefill_tokens=300,
    cached_tokens=700,
    decode_tokens=4000,
    evicted_pages=1234,
    model_s=1.5,
    sample_s=0.3,
    schedule_s=0.2,
    queue_steps=20,
    running_steps=64,
)


def test_the_line_of_an_engine_has_speed_company_cache_and_evictions():
    said = "2,000 sampled and 150 read tokens/s  6 at once, 2 waiting  cache 70%"
    assert DONE.line() == f"{said}, 1,234 pages evicted"
    assert replace(DONE, evicted_pages=0).line() == said
    assert EngineStats().line() == ""


def episode(model_s, tools_s):
    timings = Timings(model_s + tools_s, model_s, tools_s)
    trajectory = Trajectory("t", 0, (), (), StopReason.ANSWERED, timings=timings)
    return Episode(RolloutKey(1, "t", 0), Task("t", (), None), trajectory)


def shown(progress):
    (task,) = [task for task in progress.tasks if task.description == "episodes"]
    return task.fields["numbers"]


def test_the_bar_of_a_rollout_divides_the_time_between_tools_and_model():
    engine = LocalEngine(build(), settings=SMALL)
    with Progress(TextColumn("{task.fields[numbers]}"), console=Console(file=io.StringIO())) as progress:
        reporter = ProgressReporter(progress, steps=1)
        reporter.phase("episodes", 2, engine)
        asyncio.run(engine.generate(Request("e", (1, 2, 3), SamplingParams(max_new_tokens=5))))
        reporter.episode(episode(model_s=2.0, tools_s=1.0))
        reporter.episode(episode(model_s=1.0, tools_s=0.0))
        assert "sampled and" in shown(progress)
        assert shown(progress).endswith("time in tools 25%, with the model 75%")
        reporter.phase("episodes", 2)
        reporter.episode(episode(model_s=1.0, tools_s=1.0))
        assert shown(progress) == "time in tools 50%, with the model 50%"
    asyncio.run(engine.close())
