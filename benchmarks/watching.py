"""Somebody who watches a run for a benchmark."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from ludus.engines.base import Engine
from ludus.rollouts.scheduler import Episode


@dataclass
class Watch:
    """A reporter that notes when steps end, and what they say."""

    began: float = 0.0
    ends: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    metrics: list[Mapping[str, float]] = field(default_factory=list)
    timings: list[Mapping[str, float]] = field(default_factory=list)

    def phase(self, name: str, total: int | None, engine: Engine | None = None) -> None:
        """The first phase begins the run."""
        self.began = self.began or time.perf_counter()

    def episode(self, episode: Episode) -> None:
        """Not looked at."""

    def step(self, step: int, metrics: Mapping[str, float], timings: Mapping[str, float]) -> None:
        """A step is done."""
        self.ends.append(time.perf_counter())
        self.cpu.append(time.process_time())
        self.metrics.append(dict(metrics))
        self.timings.append(dict(timings))

    def alarm(self, text: str) -> None:
        """Not looked at."""
