"""Closed-form lower bounds of a step's duration by the engines, the learner and the slowest members of groups.

An independent check of the simulator: both agree if one bound is far above the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ludus.simulator.costs import Costs, RunLayout
from ludus.simulator.simulate import EpisodeSampler

_DRAWS = 4000


@dataclass(frozen=True, slots=True)
class StepEstimate:
    """Seconds of a step, its three lower bounds, idle fractions, and the mean age of tokens in versions.

    `engine_s`, `learner_s` and `straggler_s` are the bounds by engines, learner (the transfer included) and the
    slowest members of groups.
    """

    step_s: float
    engine_s: float
    learner_s: float
    straggler_s: float
    learner_idle: float
    engine_idle: float
    age: float


def model_seconds(costs: Costs, running: float) -> float:
    """Return the seconds of an episode's turns in an engine with `running` sequences.

    `turns * (action * (pass_s + running * sequence_s) + running * read * read_s)`: the prefill of one sequence delays
    all others.
    """
    engine, shape = costs.engine, costs.episode
    sampling = shape.action * engine.seconds(running)
    return shape.turns * (sampling + running * shape.read * engine.read_s)


def running_sequences(costs: Costs, in_flight: float) -> float:
    """Return the running sequences of an engine with `F` episodes, the fixed point of `n = F M(n) / (M(n) + T)`.

    `M` is `model_seconds` and `T` the mean seconds of an episode's calls (Little's law).
    """
    tools_s = (costs.episode.turns - 1) * costs.tool.mean_s
    low, high = 0.0, min(in_flight, costs.engine.slots)
    if in_flight * model_seconds(costs, high) >= high * (model_seconds(costs, high) + tools_s):
        return high
    for _ in range(60):
        middle = (low + high) / 2
        engine_s = model_seconds(costs, middle)
        if middle < in_flight * engine_s / (engine_s + tools_s):
            low = middle
        else:
            high = middle
    return (low + high) / 2


def slowest_episode(sizes: Sequence[int], costs: Costs, running: float) -> list[float]:
    """Return the expected seconds of the slowest of `n` episodes, for each `n` in `sizes`.

    `sum x_i ((i/N)^n - ((i-1)/N)^n)` over sorted draws, with `running` sequences per engine.
    """
    sampler = EpisodeSampler(costs.episode, costs.tool)
    token_s = model_seconds(costs, running) / costs.episode.turns / costs.episode.action
    lengths = sorted(token_s * sum(sampler.actions(i, 0)) + sum(sampler.calls(i, 0)) for i in range(_DRAWS))
    return [sum(x * ((i / _DRAWS) ** n - ((i - 1) / _DRAWS) ** n) for i, x in enumerate(lengths, 1)) for n in sizes]


def estimate(costs: Costs, layout: RunLayout) -> StepEstimate:
    """Return lower bounds of the step time of a run, and its step time, idle fractions and token age.

    Synchronous: the larger of the slowest episode and the engines, plus the learner. Asynchronous: the largest of
    `episodes * M(n) / n` for the engines, the learner's seconds, and the slowest member of a group divided by
    `max_staleness + 1`, the number of steps with groups in flight. While both work, learner and engines run at
    the speed `overlap`, which adds `1/overlap - 1` times the smaller of both durations. A weight transfer that
    overlaps with the learner's next step pauses only the engines. The age of a token is the time from its sampling to
    its training, in steps.
    """
    episodes, shape = layout.episodes, costs.episode
    most = layout.max_in_flight if layout.mode == "async" else min(layout.max_in_flight, episodes)
    in_flight = min(layout.in_flight or most, most) / layout.engines
    running = running_sequences(costs, in_flight)
    alone_s = model_seconds(costs, running) + (shape.turns - 1) * costs.tool.mean_s
    engine_s = episodes * model_seconds(costs, running) / running / layout.engines
    learn_s = costs.learner.seconds(episodes * shape.tokens, layout.learners)
    group_s, all_s = slowest_episode((layout.members, episodes), costs, running)
    extra_s = min(engine_s, learn_s) * (1 / costs.overlap - 1)
    overlapped_s = costs.transfer_s if layout.mode == "async" else 0.0
    sync_s = costs.sync_s + costs.transfer_s - overlapped_s
    if layout.mode == "sync":
        step_s = max(engine_s, all_s) + learn_s + sync_s
        bounds = (engine_s, learn_s + sync_s, all_s)
        return StepEstimate(step_s, *bounds, 1 - learn_s / step_s, 1 - engine_s / step_s, 0.0)
    straggler_s = all_s if layout.mode == "one_step" else group_s / (layout.max_staleness + 1)
    paused_s = overlapped_s or sync_s
    bounds = (engine_s + paused_s, max(learn_s, overlapped_s) + sync_s, straggler_s)
    step_s = max(max(bounds), max(bounds[:2]) + extra_s)
    wall_s = learn_s + (extra_s if learn_s < engine_s else 0.0)
    busy_s = engine_s + (extra_s if engine_s <= learn_s else 0.0)
    life_s = max(alone_s, in_flight * layout.engines * step_s / episodes)
    waits = life_s / alone_s * group_s - life_s / 2
    age = 1.0 if layout.mode == "one_step" else min(float(layout.max_staleness), waits / step_s)
    idle = (max(0.0, 1 - wall_s / step_s), max(0.0, 1 - busy_s / step_s))
    return StepEstimate(step_s, *bounds, *idle, max(0.0, age))
