"""A long asynchronous run under faults leaks no threads, processes, files or memory."""

from __future__ import annotations

import gc
import os
import threading
from pathlib import Path

import pytest

from ludus.diagnostics.trackers import read_metrics
from ludus.errors import EngineError
from ludus.training.rl import build
from ludus.training.run.session import make_engine
from tests.training.rl.test_async_run import ludus, words

STEPS = 60
FLAT_MB = 60.0
"""Maximum growth of the memory between the first third of the run and its end."""


def memory_mb() -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(float(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS:"))


def children() -> set[str]:
    return set(Path(f"/proc/self/task/{threading.get_native_id()}/children").read_text().split())


@pytest.mark.fault
def test_threads_processes_files_and_memory_stay_flat_under_faults(tiny_run, tmp_path, monkeypatch):
    sizes: list[float] = []
    calls = 0

    def faulty(session):
        engine = make_engine(session)
        plain = engine.generate

        async def generate(request):
            nonlocal calls
            calls += 1
            if calls % 97 == 0:
                raise EngineError("A fault, on purpose.")
            return await plain(request)

        engine.generate = generate
        sizes.append(memory_mb())
        return engine

    monkeypatch.setattr(build, "make_engine", faulty)
    gc.collect()
    before = threading.active_count(), len(os.listdir("/proc/self/fd")), children()
    done = 0
    for steps in (STEPS // 3, 2 * STEPS // 3, STEPS):
        folder = tmp_path / "run"
        first = words(tiny_run, tmp_path, "async", training__steps=steps, training__checkpoint_every=10)
        again = ["train", "--resume", str(folder), "--training.steps", str(steps)]
        assert ludus(*(again if done else first)).code == 0
        done = steps
    gc.collect()
    assert (threading.active_count(), len(os.listdir("/proc/self/fd")), children()) == before
    assert memory_mb() - sizes[1] < FLAT_MB
    rows = [row.metrics for row in read_metrics(folder / "metrics.jsonl")]
    assert len(rows) == STEPS
    assert sum(m["ledger/failed"] for m in rows) > 3
