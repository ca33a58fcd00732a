"""Ten thousand runs, one in twenty hostile, leave no process or file behind."""

from __future__ import annotations

import asyncio
import os
import random
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

from battery_run import HERE, LIMITS, a_host, descendants, expectation, judge
from ludus.sandbox import NamespacesSandbox, SandboxSettings

RUNS, CONCURRENCY, HOSTILE = 10_000, 16, 0.05
HOSTILE_ONES = (
    *("fork_bomb", "memory_bomb_one", "memory_bomb_many", "disk_filler", "inode_filler", "output_on_both"),
    *("daemon", "daemon_waits_for_the_end", "ignores_signals", "stops_itself", "signals_to_all", "orphans"),
    *("truth_file", "writes_outside", "namespaces", "files_of_another_run", "deep_folders", "threads"),
)
MOST_GROWTH_BYTES = 64 * 2**20


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def shared_memory() -> int:
    """Bytes of all file systems in memory, where files of a run would stay."""
    line = next(row for row in Path("/proc/meminfo").read_text().splitlines() if row.startswith("Shmem:"))
    return int(line.split()[1]) * 1024


async def many(host, count: int) -> list[str]:
    sandbox, rng = NamespacesSandbox(SandboxSettings(concurrency=CONCURRENCY)), random.Random(0)
    shared = {"trying.py": (HERE / "battery_trying.py").read_bytes(), "target.json": host.target}
    limits = replace(LIMITS, wall_s=30.0, cpu_s=10.0)
    numbers, found = iter(range(count)), []

    async def hostile(name: str) -> None:
        program = HERE / "battery" / f"{name}.py"
        expected = expectation(program)
        own = replace(limits, wall_s=1.0) if expected == "timed_out" else limits
        outcome = await sandbox.run(program.read_text(), files=shared, limits=own)
        found.extend(f"{name}: {line}" for line in judge(expected, outcome, host.token))

    async def worker() -> None:
        for number in numbers:
            if rng.random() < HOSTILE:
                await hostile(rng.choice(HOSTILE_ONES))
                continue
            program = f"import os; print({number} * 7, os.listdir()); open('made', 'w').write('{number}')"
            outcome = await sandbox.run(program, limits=limits)
            if outcome.text != f"{number * 7} []\n" or outcome.files != {"made": str(number).encode()}:
                found.append(f"run {number}: {outcome!r:.500}")

    await asyncio.gather(*(worker() for _ in range(CONCURRENCY)))
    await sandbox.close()
    return found


@pytest.mark.scale
def test_ten_thousand_runs_leak_no_resources():
    with a_host() as host:
        asyncio.run(many(host, 4 * CONCURRENCY))
        before = descendants(), host.state(), len(os.listdir("/proc/self/fd")), resident(), shared_memory()
        files = set(os.listdir(tempfile.gettempdir()))
        assert asyncio.run(many(host, RUNS)) == []
        assert descendants() == before[0]
        assert host.state() == before[1]
        assert host.visits() == 0
        assert host.signals == []
        assert len(os.listdir("/proc/self/fd")) == before[2]
        assert resident() - before[3] < MOST_GROWTH_BYTES
        assert shared_memory() - before[4] < MOST_GROWTH_BYTES
        assert [name for name in set(os.listdir(tempfile.gettempdir())) - files if "ludus" in name] == []
