"""Closed forms: what a run's step takes at least, and who then stands still.

Three bounds, of which the largest holds: the engines, the learner, the slowest members of groups. The
simulation has no such formula in it and agrees with them where one bound is far above the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ludus.planning.costs import Costs, RunLayout
from ludus.planning.episodes import Draws

_DRAWS = 4000


@dataclass(frozen=True, slots=True)
class StepEstimate:
    """Seconds of a step, the bounds that it is the largest of, idle shares, and the mean age of tokens.

    `engine_s`, `learner_s` and `straggler_s` are the seconds that a step takes at least by engines, learner
    (the transfer included) and the groups' slowest members.
    """

    step_s: float
    engine_s: float
    learner_s: float
    straggler_s: float
    learner_idle: float
    engine_idle: float
    age: float

    @property
    def binds(self) -> str:
        """What the step waits for."""
        bounds = {"engines": self.engine_s, "learner": self.learner_s, "stragglers": self.straggler_s}
        return max(bounds, key=bounds.__getitem__)


def model_seconds(costs: Costs, running: float) -> float:
    """Of an episode's turns in an engine with so many sequences: `turns * (action * (pass_s + running *
    sequence_s) + running * read * read_s)`; what one sequence reads holds up all."""
    engine, shape = costs.engine, costs.episode
    sampling = shape.action * engine.seconds(running)
    return shape.turns * (sampling + running * shape.read * engine.read_s)


def running_of(costs: Costs, in_flight: float) -> float:
    """Sequences that run in an engine with so many episodes: the fixed point of `n = F * M(n) / (M(n) + T)`.

    `M` is `model_seconds` and `T` the mean seconds of an episode's calls (Little's law).
    """
    tools_s = (costs.episode.turns - 1) * costs.tool.mean_s
    low, high = 0.0, min(in_flight, costs.engine.slots)
    if in_flight * model_seconds(costs, high) >= high * (model_seconds(costs, high) + tools_s):
        return high
    for _ in range(60):
        middle = (low + high) / 2
        inside = model_seconds(costs, middle)
        if middle < in_flight * inside / (inside + tools_s):
            low = middle
        else:
            high = middle
    return (low + high) / 2


def slowest_of(sizes: Sequence[int], costs: Costs, running: float) -> list[float]:
    """The expected seconds of the slowest of so many episodes: `sum x_i ((i/N)^n - ((i-1)/N)^n)` over sorted
    draws, engines having `running` sequences each."""
    draws = Draws(costs.episode, costs.tool)
    token_s = model_seconds(costs, running) / costs.episode.turns / costs.episode.action
    lengths = sorted(token_s * sum(draws.actions(number, 0)) + sum(draws.calls(number, 0)) for number in range(_DRAWS))
    return [sum(x * ((i / _DRAWS) ** n - ((i - 1) / _DRAWS) ** n) for i, x in enumerate(lengths, 1)) for n in sizes]


def estimate(costs: Costs, setup: RunLayout) -> StepEstimate:
    """The bounds of a run of this layout, and what follows from them.

    In step: the slowest episode of all, or the engines, then the learner. Streaming: the largest of the
    engines' `episodes * M(n) / n`, the learner's seconds, and a group's slowest member over
    `max_staleness + 1`, since no more groups are on their way than so many steps take. While learner and
    engines slow each other to `overlap`, the smaller of both is paid `1/overlap - 1` times on top. Weights
    that go to engines beside the learner's next step stop those alone, and it waits for the copy. The age of
    a token is the time from its sampling to its training, in steps.
    """
    episodes, shape = setup.episodes, costs.episode
    in_flight = min(setup.in_flight or setup.most, setup.most) / setup.engines
    if setup.mode != "async":
        in_flight = min(in_flight, episodes / setup.engines)
    running = running_of(costs, in_flight)
    alone_s = model_seconds(costs, running) + (shape.turns - 1) * costs.tool.mean_s
    engine_s = episodes * model_seconds(costs, running) / running / setup.engines
    learn_s = costs.learner.seconds(episodes * shape.tokens, setup.learners)
    group_s, all_s = slowest_of((setup.members, episodes), costs, running)
    extra_s = min(engine_s, learn_s) * (1 / costs.overlap - 1)
    beside_s = costs.transfer_s if setup.mode == "async" else 0.0
    waits_s = costs.sync_s + costs.transfer_s - beside_s
    if setup.mode == "sync":
        rollout_s = max(engine_s, all_s)
        step_s = rollout_s + learn_s + waits_s
        bounds = (engine_s, learn_s + waits_s, all_s)
        return StepEstimate(step_s, *bounds, 1 - learn_s / step_s, 1 - engine_s / step_s, 0.0)
    straggler_s = all_s if setup.mode == "one_step" else group_s / (setup.max_staleness + 1)
    still_s = beside_s or waits_s
    bounds = (engine_s + still_s, max(learn_s, beside_s) + waits_s, straggler_s)
    step_s = max(max(bounds), max(bounds[:2]) + extra_s)
    wall_s = learn_s + (extra_s if learn_s < engine_s else 0.0)
    busy_s = engine_s + (extra_s if engine_s <= learn_s else 0.0)
    life_s = max(alone_s, in_flight * setup.engines * step_s / episodes)
    waits = life_s / alone_s * group_s - life_s / 2
    age = 1.0 if setup.mode == "one_step" else min(float(setup.max_staleness), waits / step_s)
    idle = (max(0.0, 1 - wall_s / step_s), max(0.0, 1 - busy_s / step_s))
    return StepEstimate(step_s, *bounds, *idle, max(0.0, age))
