"""How many episodes are in flight: the fewest that keep learner and engine busy, found by measurement."""

from __future__ import annotations

from dataclasses import dataclass

IDLE = 0.05
"""Share of the time from which something counts as idle."""
QUEUED = 0.25
"""Requests that wait in the engine for each one that runs, from which there are too many."""
GAIN = 0.02
"""Growth of the engine's speed from which larger batches are worth it."""
MORE, FEWER = 1.3, 0.85


@dataclass(frozen=True, slots=True)
class Load:
    """What a step measured: idle shares in [0, 1], requests waiting for each that ran, and whether a whole
    batch was ready when the learner came back.

    `gain` is by how much the engine's tokens per second of work have grown since the step before: larger
    batches cost it less per token, up to a point.
    """

    learner_idle: float
    engine_idle: float
    engine_queue: float
    ahead: bool
    gain: float = 0.0


def next_in_flight(now: int, load: Load, least: int, most: int) -> int:
    """The number for the next step, from `least` to `most`.

    More where both wait: then it is tools that everyone waits for; and where the learner waits for an engine
    that gets faster by it. Fewer where episodes only grow old, in front of the learner or in the engine's
    queue.
    """
    wanted = float(now)
    if load.learner_idle > IDLE and (load.engine_idle > IDLE or load.gain > GAIN):
        wanted = max(now + 1, now * MORE)
    elif (load.learner_idle <= IDLE and load.ahead) or load.engine_queue > QUEUED:
        wanted = min(now - 1, now * FEWER)
    return max(least, min(most, round(wanted)))
