"""Poll `/metrics` of `ludus serve`, vLLM and SGLang, on request and then every second.

Counts start at the first reading; a server without known metrics contributes nothing. A server's failure never raises.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import httpx

from ludus.engines.base import EngineStats, combined
from ludus.untrusted.json_client import bounded_client

_POLL_INTERVAL_S = 1.0
_TIMEOUT_S = 2.0
_MAX_BYTES = 2**20
_LINE = re.compile(r"^([A-Za-z_:][\w:]*)(?:\{.*\})?\s+(\S+)", re.MULTILINE)
_LUDUS_METRICS = {
    "steps": "ludus_passes_total",
    "prefill_tokens": "ludus_prefill_tokens_total",
    "cached_tokens": "ludus_cached_tokens_total",
    "decode_tokens": "ludus_decode_tokens_total",
    "recomputed_tokens": "ludus_recomputed_tokens_total",
    "batch_tokens": "ludus_batch_tokens_total",
    "evicted_pages": "ludus_evicted_pages_total",
    "queue_steps": "ludus_waiting_sum_total",
    "running_steps": "ludus_running_sum_total",
}
_SERVER_METRICS = {
    "vllm": ("prefix_cache_hits_total", "num_requests_running", "num_requests_waiting"),
    "sglang": ("cached_tokens_total", "num_running_reqs", "num_queue_reqs"),
}
"""Metrics of cached tokens, running and waiting requests, by prefix."""


@dataclass(frozen=True, slots=True)
class MetricsReading:
    """Counters since a server's start; `now`: running and waiting requests of a server that reports no steps."""

    counts: EngineStats
    now: tuple[int, int] | None = None


def reading_of(text: str) -> MetricsReading | None:
    """Parse a metrics page, summed over labels; None if it has no known metric."""
    found: dict[str, float] = {}
    for name, value in _LINE.findall(text):
        try:
            found[name] = found.get(name, 0.0) + float(value)
        except ValueError:
            return None
    if _LUDUS_METRICS["steps"] in found:
        counts = EngineStats(**{name: int(found.get(key, 0.0)) for name, key in _LUDUS_METRICS.items()})
        model_s, sample_s, schedule_s = (
            found.get(f"ludus_{part}_seconds_total", 0.0) for part in ("model", "sample", "schedule")
        )
        return MetricsReading(replace(counts, model_s=model_s, sample_s=sample_s, schedule_s=schedule_s))
    for prefix, names in _SERVER_METRICS.items():
        cached, running, waiting = (found.get(f"{prefix}:{name}") for name in names)
        sampled = found.get(f"{prefix}:generation_tokens_total")
        if sampled is not None and running is not None:
            prompt = found.get(f"{prefix}:prompt_tokens_total", 0.0)
            counts = EngineStats(
                prefill_tokens=int(max(0.0, prompt - (cached or 0.0))),
                cached_tokens=int(min(prompt, cached or 0.0)),
                decode_tokens=int(sampled),
            )
            return MetricsReading(counts, (int(running), int(waiting or 0.0)))
    return None


@dataclass
class PolledServer:
    """A server's counters since its first reading. Each poll of its queue counts as a step."""

    total: EngineStats = field(default_factory=EngineStats)
    _last: EngineStats | None = None
    _at_s: float = 0.0

    def take(self, reading: MetricsReading, at_s: float) -> None:
        """Add the difference to a reading at time `at_s`; if counts fell, the server was restarted."""
        if self._last is not None:
            new = reading.counts - self._last
            if new.decode_tokens < 0 or new.steps < 0:
                new = reading.counts
            if reading.now is not None:
                running, waiting = reading.now
                new += EngineStats(steps=1, running_steps=running, queue_steps=waiting, wall_s=at_s - self._at_s)
            self.total += new
        self._last, self._at_s = reading.counts, at_s


@dataclass
class ServerStats:
    """Poller of the servers at the addresses returned by `urls`."""

    urls: Callable[[], Sequence[str]]
    _servers: dict[str, PolledServer] = field(default_factory=dict)
    _before: dict[str, EngineStats] = field(default_factory=dict)
    _poll_task: asyncio.Task[None] | None = None
    _read_lock: tuple[asyncio.AbstractEventLoop, asyncio.Lock] | None = None

    async def measure(self) -> None:
        """Read all servers now, and every second from now on."""

        async def poll() -> None:
            while True:
                await asyncio.sleep(_POLL_INTERVAL_S)
                await self._read()

        await self._read()
        loop = asyncio.get_running_loop()
        if self._poll_task is None or self._poll_task.done() or self._poll_task.get_loop() is not loop:
            self._poll_task = loop.create_task(poll())

    def stats(self, *, reset: bool) -> EngineStats:
        """Return the servers' total since the last reset, as of the last reading."""
        now = {url: self._servers[url].total for url in self.urls() if url in self._servers}
        found = combined(now, self._before)
        if reset:
            self._before = now
        return found

    async def close(self) -> None:
        poll_task, self._poll_task = self._poll_task, None
        if poll_task is not None and poll_task.get_loop() is asyncio.get_running_loop():
            poll_task.cancel()
            await asyncio.wait({poll_task})

    async def _read(self) -> None:
        """Read the servers, one reading at a time: a late older reading would look like a restart."""
        loop = asyncio.get_running_loop()
        if self._read_lock is None or self._read_lock[0] is not loop:
            self._read_lock = loop, asyncio.Lock()
        async with self._read_lock[1], bounded_client(most=_MAX_BYTES) as client:
            await asyncio.gather(*(self._fetch(client, url) for url in self.urls()))

    async def _fetch(self, client: httpx.AsyncClient, url: str) -> None:
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                response = await client.get(f"{url}/metrics")
        except (httpx.HTTPError, TimeoutError):
            return
        reading = reading_of(response.text) if response.is_success else None
        if reading is not None:
            self._servers.setdefault(url, PolledServer()).take(reading, time.monotonic())
