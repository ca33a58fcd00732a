"""Simulate a run in virtual time, with the group queue, staleness control and scheduler of training.

`simulate` follows the training modes of `ludus.training.rl.async_trainer`. `GroupQueue`, `StalenessController`,
`Scheduler`, `Ledger` and `ConcurrencyController` are those of training; only devices, tools and the clock are
simulated. Failures, evaluations, checkpoints and the overhead of the event loop are not simulated.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise

from ludus.rollouts.episode import EpisodeLimits
from ludus.rollouts.group_queue import GroupQueue
from ludus.rollouts.ledger import Ledger, RolloutKey, RolloutOutcome
from ludus.rollouts.scheduler import Episode, FailureBudget, RolloutRequest, Scheduler, SchedulerLimits
from ludus.rollouts.stream_control import (
    ConcurrencyController,
    EngineLoad,
    PassTimes,
    StalenessController,
    StalenessSchedule,
    first_in_flight,
)
from ludus.simulator.costs import Costs, RunLayout
from ludus.simulator.devices import DevicePool, Overlap, SimEngine, SimLearner, now, run_virtual
from ludus.simulator.episodes import EpisodeSampler, NoRewards, SimWorld, num_sampled, token_ages
from ludus.types import Task

_NO_LIMIT_S = 1e9


@dataclass(frozen=True, slots=True)
class SimStep:
    """Times (seconds), idle fractions and token ages (in versions) of one step.

    `running` and `waiting` are mean numbers of sequences over the passes of the engines.
    """

    end_s: float
    rollout_s: float
    learn_s: float
    sync_s: float
    learner_idle: float
    engine_idle: float
    running: float
    waiting: float
    in_flight: int
    age: float
    oldest: int
    tokens: int


@dataclass(frozen=True, slots=True)
class SimRun:
    """Simulated run. Means exclude the steps at its start and end, in which the group queue fills or drains."""

    layout: RunLayout
    steps: tuple[SimStep, ...]

    @property
    def middle(self) -> Sequence[SimStep]:
        """Steps without those at start and end, at least one."""
        num = len(self.steps)
        edge = min(self.layout.max_staleness + 1, (num - 1) // 3) if self.layout.mode == "async" else 0
        return self.steps[edge : num - edge]

    @property
    def step_s(self) -> float:
        """Mean seconds per step."""
        middle = self.middle
        first = self.steps.index(middle[0])
        begin = self.steps[first - 1].end_s if first else 0.0
        return (middle[-1].end_s - begin) / len(middle)

    @property
    def episodes_per_s(self) -> float:
        """Episodes trained per second."""
        return self.layout.episodes / self.step_s

    @property
    def learner_idle(self) -> float:
        """Fraction of time in which the learner is idle."""
        return self._weighted([step.learner_idle for step in self.middle])

    @property
    def engine_idle(self) -> float:
        """Fraction of time in which engines are idle, averaged over engines."""
        return self._weighted([step.engine_idle for step in self.middle])

    @property
    def age(self) -> float:
        """Mean age of trained tokens, in versions."""
        tokens = sum(step.tokens for step in self.middle)
        return sum(step.age * step.tokens for step in self.middle) / tokens

    @property
    def oldest(self) -> int:
        """Largest token age of the whole run, in versions."""
        return max(step.oldest for step in self.steps)

    def _weighted(self, values: Sequence[float]) -> float:
        weights = [step.rollout_s + step.learn_s + step.sync_s for step in self.middle]
        return sum(v * w for v, w in zip(values, weights, strict=True)) / (sum(weights) or 1.0)


def simulate(costs: Costs, layout: RunLayout) -> SimRun:
    """Simulate a run. The result is deterministic."""

    async def run_steps() -> list[SimStep]:
        run = _Simulation(costs, layout)
        modes = {"sync": run.sync, "one_step": run.one_step, "async": run.asynchronous}
        return await modes[layout.mode]()

    steps, _ = run_virtual(run_steps())
    return SimRun(layout, tuple(steps))


@dataclass
class _GroupSource:
    layout: RunLayout

    def requests(self, number: int) -> list[RolloutRequest]:
        """Return the requests of a group."""
        task, step = Task(str(number), (), None), number // self.layout.groups + 1
        return [RolloutRequest(RolloutKey(step, task.id, member), task) for member in range(self.layout.members)]

    def counts(self, group: Sequence[Episode]) -> bool:
        """Return True, since every group is trained."""
        return True


@dataclass
class _Simulation:
    costs: Costs
    layout: RunLayout
    steps: list[SimStep] = field(default_factory=list)

    def __post_init__(self) -> None:
        costs, layout, overlap = self.costs, self.layout, Overlap(self.costs.overlap)
        self.pool = DevicePool([SimEngine(costs.engine, overlap) for _ in range(layout.engines)])
        self.learner = SimLearner(overlap)
        self.source = _GroupSource(layout)
        self.ledger = Ledger(spanning=True)
        world = SimWorld(EpisodeSampler(costs.episode, costs.tool, layout.seed), layout.members)
        self.scheduler = Scheduler(
            world=world,
            make_chat=partial(world.make_chat, self.pool),
            episode_limits=EpisodeLimits(max_turns=10**9, environment_timeout_s=_NO_LIMIT_S),
            limits=SchedulerLimits(layout.max_in_flight),
            ledger=self.ledger,
            scoring=NoRewards(),
        )

    async def sync(self) -> list[SimStep]:
        """Sample, train and send the weights, one after another."""
        for step in range(1, self.layout.steps + 1):
            marks = [now()]
            episodes = await self._sample(step)
            marks.append(now())
            await self._train(episodes)
            marks.append(now())
            await self._send_weights(step)
            marks.append(now())
            self._record_step(step, episodes, marks, self.layout.episodes)
        return self.steps

    async def one_step(self) -> list[SimStep]:
        """Sample the next batch while training on this one."""
        last = self.layout.steps
        episodes = await self._sample(1)
        for step in range(1, last + 1):
            begin = now()
            sampling = asyncio.create_task(self._sample(step + 1)) if step < last else None
            await self._train(episodes)
            trained = now()
            next_episodes = await sampling if sampling is not None else []
            waited = now()
            await self._send_weights(step)
            self._record_step(step, episodes, [begin, begin + waited - trained, waited, now()], self.layout.episodes)
            episodes = next_episodes
        return self.steps

    async def asynchronous(self) -> list[SimStep]:
        """Train on batches from the group queue."""
        layout, budget = self.layout, FailureBudget(self.layout.episodes)
        limit = ConcurrencyController(first_in_flight(layout.episodes), layout.members, layout.max_in_flight)
        queue = GroupQueue(
            admission=StalenessController(StalenessSchedule(layout.groups, layout.max_staleness, layout.steps)),
            source=self.source,
            run_request=lambda request: self.scheduler.run_one(request, budget),
            in_flight=layout.in_flight or limit.limit,
        )
        queue.start()
        sending = asyncio.create_task(asyncio.sleep(0))
        for step in range(1, layout.steps + 1):
            marks = [now()]
            ready = queue.admission.num_ready / layout.groups
            batch = await queue.take()
            episodes = [episode for group in batch.groups for episode in group.episodes]
            marks.append(now())
            with self._throttled(queue):
                await self._train(episodes)
            marks.append(now())
            await sending
            if self.costs.transfer_s and step < layout.steps:
                await asyncio.sleep(self.costs.sync_s)
                queue.on_publish(step, everywhere=False)
                sending = asyncio.create_task(self._send_in_background(step, queue))
            else:
                await self._send_weights(step)
                queue.on_publish(step)
            marks.append(now())
            queue.pop_ended()
            done, passes = self._record_step(step, episodes, marks, queue.in_flight)
            if not layout.in_flight:
                load = EngineLoad(
                    learner_idle=done.learner_idle,
                    engine_idle=done.engine_idle,
                    engine_queue=done.waiting / max(done.running, 1.0),
                    ready=ready,
                    limited=queue.is_limited and not queue.held,
                    seconds=sum(b - a for a, b in pairwise(marks)),
                )
                queue.in_flight = limit.after(load, passes, queue.flow())
        await queue.close()
        return self.steps

    def _throttled(self, queue: GroupQueue) -> AbstractContextManager[None]:
        """Throttle the engine while the learner works, if it is the only engine and shares the learner's process."""
        if self.layout.engines > 1 or self.costs.transfer_s:
            return nullcontext()
        return queue.throttled(self.learner.overlap.throttle)

    async def _send_weights(self, step: int) -> None:
        await self.pool.load_weights(step, self.costs.sync_s + self.costs.transfer_s)

    async def _send_in_background(self, step: int, queue: GroupQueue) -> None:
        await self.pool.load_weights(step, self.costs.transfer_s)
        queue.on_serve(step)

    async def _sample(self, step: int) -> list[Episode]:
        numbers = range((step - 1) * self.layout.groups, step * self.layout.groups)
        return await self.scheduler.run([request for number in numbers for request in self.source.requests(number)])

    async def _train(self, episodes: Sequence[Episode]) -> None:
        tokens = sum(num_sampled(episode.trajectory) for episode in episodes)
        total = tokens + self.costs.episode.context * len(episodes)
        await self.learner.work(self.costs.learner.seconds(total, self.layout.learners))

    def _record_step(
        self, step: int, episodes: Sequence[Episode], marks: Sequence[float], in_flight: int
    ) -> tuple[SimStep, PassTimes | None]:
        """Record a step, given the start and end times of its phases; return it and the engines' pass times."""
        for episode in episodes:
            self.ledger.finish(episode.key, RolloutOutcome.TRAINED, "trained")
        self.ledger.close(step, trained=len(episodes))
        rollout_s, learn_s, sync_s = (b - a for a, b in pairwise(marks))
        total_s = rollout_s + learn_s + sync_s
        counts, ages = self.pool.drain_counts(), token_ages(episodes, step)
        tokens = ages.total()
        passes = counts.passes or 1.0
        done = SimStep(
            end_s=now(),
            rollout_s=rollout_s,
            learn_s=learn_s,
            sync_s=sync_s,
            learner_idle=1 - learn_s / total_s if total_s else 0.0,
            engine_idle=max(0.0, 1 - counts.busy_s / self.layout.engines / total_s) if total_s else 0.0,
            running=counts.tokens / passes,
            waiting=counts.waiting / passes,
            in_flight=in_flight,
            age=sum(age * number for age, number in ages.items()) / tokens,
            oldest=max(ages),
            tokens=tokens,
        )
        self.steps.append(done)
        return done, PassTimes(counts.tokens / passes, counts.busy_s / passes) if counts.passes else None
