"""A reporter that records the steps of a run for benchmarks."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from ludus.engines.base import Engine
from ludus.rollouts.scheduler import Episode


@dataclass
class Watch:
    """Records the end times, metrics and timings of the steps."""

    began: float = 0.0
    ends: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    metrics: list[Mapping[str, float]] = field(default_factory=list)
    timings: list[Mapping[str, float]] = field(default_factory=list)

    def phase(self, name: str, total: int | None, engine: Engine | None = None) -> None:
        """Record the start of the first phase."""
        self.began = self.began or time.perf_counter()

    def episode(self, episode: Episode) -> None:
        """Ignore the episode."""

    def step(self, step: int, metrics: Mapping[str, float], timings: Mapping[str, float]) -> None:
        """Record the end of a step."""
        self.ends.append(time.perf_counter())
        self.cpu.append(time.process_time())
        self.metrics.append(dict(metrics))
        self.timings.append(dict(timings))

    def alarm(self, text: str) -> None:
        """Ignore the alarm."""
