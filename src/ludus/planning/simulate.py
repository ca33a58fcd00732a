"""A run of many engines in seconds: the real stream, admission and scheduler on a clock that jumps.

`simulate` plays the modes as `ludus.training.rl.async_trainer` does: `GroupQueue`, `StalenessController`,
`Scheduler` with its episodes, `Ledger` and the rule for episodes in flight are those of training, unchanged;
only devices, tools and the clock are made up. What leaves out: failures, evaluations, checkpoints, and what
the event loop itself costs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial

from ludus.planning.clock import run_virtual
from ludus.planning.costs import Costs, RunLayout
from ludus.planning.devices import DevicePool, Overlap, SimEngine, SimLearner
from ludus.planning.episodes import Draws, NoRewards, SimWorld, ages, sampled
from ludus.rollout.episode import EpisodeLimits
from ludus.rollout.group_queue import GroupQueue
from ludus.rollout.ledger import Ledger, RolloutKey, RolloutOutcome
from ludus.rollout.scheduler import Episode, FailureBudget, RolloutRequest, Scheduler, SchedulerLimits
from ludus.rollout.stream_control import (
    ConcurrencyController,
    EngineLoad,
    PassTimes,
    StalenessController,
    StalenessSchedule,
    first_in_flight,
)

_NO_LIMIT_S = 1e9


@dataclass(frozen=True, slots=True)
class SimStep:
    """One step as it went: when it ended, what it waited for, who stood still, and how old its tokens were.

    Seconds, shares in [0, 1], versions. `running` and `waiting` are means over the engines' passes.
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
    """A simulated run, and what it says of the steps in its middle.

    The middle leaves out the steps in which a stream fills and empties.
    """

    setup: RunLayout
    steps: tuple[SimStep, ...]

    @property
    def middle(self) -> Sequence[SimStep]:
        """At least one step."""
        num = len(self.steps)
        edge = min(self.setup.max_staleness + 1, (num - 1) // 3) if self.setup.mode == "async" else 0
        return self.steps[edge : num - edge]

    @property
    def seconds(self) -> float:
        """Of the whole run."""
        return self.steps[-1].end_s

    @property
    def step_s(self) -> float:
        """Mean seconds of a step."""
        inner = self.middle
        before = self.steps.index(inner[0])
        begin = self.steps[before - 1].end_s if before else 0.0
        return (inner[-1].end_s - begin) / len(inner)

    @property
    def episodes_per_s(self) -> float:
        """Episodes trained a second."""
        return self.setup.episodes / self.step_s

    @property
    def learner_idle(self) -> float:
        """Share of the time in which the learner stood still."""
        return self._share([step.learner_idle for step in self.middle])

    @property
    def engine_idle(self) -> float:
        """Share of the time in which engines had no work, mean over them."""
        return self._share([step.engine_idle for step in self.middle])

    @property
    def age(self) -> float:
        """Mean age of trained tokens, in versions."""
        tokens = sum(step.tokens for step in self.middle)
        return sum(step.age * step.tokens for step in self.middle) / tokens

    @property
    def oldest(self) -> int:
        """Of the whole run."""
        return max(step.oldest for step in self.steps)

    def _share(self, values: Sequence[float]) -> float:
        weights = [step.rollout_s + step.learn_s + step.sync_s for step in self.middle]
        return sum(v * w for v, w in zip(values, weights, strict=True)) / (sum(weights) or 1.0)


def simulate(costs: Costs, setup: RunLayout) -> SimRun:
    """Play a whole run. The same arguments give the same run."""

    async def play() -> list[SimStep]:
        run = _Run.of(costs, setup)
        match setup.mode:
            case "sync":
                return await run.in_step()
            case "one_step":
                return await run.one_step()
            case _:
                return await run.streaming()

    steps, _ = run_virtual(play())
    return SimRun(setup, tuple(steps))


@dataclass
class _Source:
    """Groups for a stream."""

    world: SimWorld
    setup: RunLayout

    def jobs(self, number: int) -> list[RolloutRequest]:
        """All members of a group."""
        task, step = self.world.task(number), number // self.setup.groups + 1
        return [RolloutRequest(RolloutKey(step, task.id, member), task) for member in range(self.setup.members)]

    def counts(self, group: Sequence[Episode]) -> bool:
        """Every group does."""
        return True


@dataclass
class _Clock:
    """When the phases of a step began."""

    marks: list[float] = field(default_factory=lambda: [_now()])

    def mark(self) -> None:
        """A phase is over."""
        self.marks.append(_now())

    @property
    def seconds(self) -> list[float]:
        """Of each phase."""
        return [b - a for a, b in zip(self.marks, self.marks[1:], strict=False)]


@dataclass
class _Run:
    """The parts of a run."""

    costs: Costs
    setup: RunLayout
    pool: DevicePool
    learner: SimLearner
    source: _Source
    scheduler: Scheduler
    ledger: Ledger
    steps: list[SimStep] = field(default_factory=list)

    @classmethod
    def of(cls, costs: Costs, setup: RunLayout) -> _Run:
        """Everything idle, at version 0."""
        overlap = Overlap(costs.overlap)
        pool = DevicePool([SimEngine(costs.engine, overlap) for _ in range(setup.engines)])
        world = SimWorld(Draws(costs.episode, costs.tool, setup.seed), setup.members)
        ledger = Ledger(spanning=True)
        scheduler = Scheduler(
            world=world,
            make_chat=partial(world.make_chat, pool),
            episode_limits=EpisodeLimits(max_turns=10**9, environment_timeout_s=_NO_LIMIT_S),
            limits=SchedulerLimits(setup.most),
            ledger=ledger,
            scoring=NoRewards(),
        )
        source = _Source(world, setup)
        return cls(costs, setup, pool, SimLearner(overlap), source, scheduler, ledger)

    async def in_step(self) -> list[SimStep]:
        """Sample, learn, send, and again."""
        for step in range(1, self.setup.steps + 1):
            clock = _Clock()
            episodes = await self._sample(step)
            clock.mark()
            await self._learn(episodes)
            clock.mark()
            await self._send(step)
            clock.mark()
            self._close(step, episodes, clock, self.setup.episodes)
        return self.steps

    async def one_step(self) -> list[SimStep]:
        """Sample the next batch while learning on this one."""
        last = self.setup.steps
        episodes = await self._sample(1)
        for step in range(1, last + 1):
            clock = _Clock()
            sampling = asyncio.create_task(self._sample(step + 1)) if step < last else None
            await self._learn(episodes)
            clock.mark()
            following = await sampling if sampling is not None else []
            clock.mark()
            await self._send(step)
            clock.mark()
            begun, learned, waited, sent = clock.marks
            clock.marks = [begun, begun + waited - learned, waited, sent]
            self._close(step, episodes, clock, self.setup.episodes)
            episodes = following
        return self.steps

    async def streaming(self) -> list[SimStep]:
        """Take batches from the stream."""
        setup, budget = self.setup, FailureBudget(self.setup.episodes)
        limit = ConcurrencyController(first_in_flight(setup.episodes), setup.members, setup.most)
        stream = GroupQueue(
            admission=StalenessController(StalenessSchedule(setup.groups, setup.max_staleness, setup.steps)),
            source=self.source,
            run_request=lambda job: self.scheduler.run_one(job, budget),
            in_flight=setup.in_flight or limit.now,
        )
        stream.start()
        sending = asyncio.create_task(asyncio.sleep(0))
        for step in range(1, setup.steps + 1):
            clock = _Clock()
            ready = stream.admission.num_ready / setup.groups
            batch = await stream.take()
            episodes = [episode for group in batch.groups for episode in group.episodes]
            clock.mark()
            with self._throttled(stream):
                await self._learn(episodes)
            clock.mark()
            await sending
            if self.costs.transfer_s and step < setup.steps:
                await asyncio.sleep(self.costs.sync_s)
                stream.published(step, everywhere=False)
                sending = asyncio.create_task(self._send_beside(step, stream))
            else:
                await self._send(step)
                stream.published(step)
            clock.mark()
            stream.pop_ended()
            done, passes = self._close(step, episodes, clock, stream.in_flight)
            if not setup.in_flight:
                load = EngineLoad(
                    learner_idle=done.learner_idle,
                    engine_idle=done.engine_idle,
                    engine_queue=done.waiting / max(done.running, 1.0),
                    ready=ready,
                    limited=stream.is_limited and not stream.held,
                    seconds=sum(clock.seconds),
                )
                stream.in_flight = limit.after(load, passes, stream.flow())
        await stream.close()
        return self.steps

    def _throttled(self, stream: GroupQueue) -> AbstractContextManager[None]:
        """An engine in the learner's process rests: a single one, to which weights need no transfer."""
        if self.setup.engines > 1 or self.costs.transfer_s:
            return nullcontext()
        return stream.throttled(self.learner.overlap.rest)

    async def _send(self, step: int) -> None:
        """Have the engines take new weights, and wait for them."""
        await self.pool.load_weights(step, self.costs.sync_s + self.costs.transfer_s)

    async def _send_beside(self, step: int, stream: GroupQueue) -> None:
        """The same, while the learner goes on."""
        await self.pool.load_weights(step, self.costs.transfer_s)
        stream.serves(step)

    async def _sample(self, step: int) -> list[Episode]:
        numbers = range((step - 1) * self.setup.groups, step * self.setup.groups)
        return await self.scheduler.run([job for number in numbers for job in self.source.jobs(number)])

    async def _learn(self, episodes: Sequence[Episode]) -> None:
        tokens = sum(sampled(episode.trajectory) for episode in episodes)
        whole = tokens + self.costs.episode.context * len(episodes)
        await self.learner.work(self.costs.learner.seconds(whole, self.setup.learners))

    def _close(
        self, step: int, episodes: Sequence[Episode], clock: _Clock, in_flight: int
    ) -> tuple[SimStep, PassTimes | None]:
        """Account for a step; gives it, and what the engines did."""
        for episode in episodes:
            self.ledger.finish(episode.key, RolloutOutcome.TRAINED, "trained")
        self.ledger.close(step, trained=len(episodes))
        rollout_s, learn_s, sync_s = clock.seconds
        total_s = rollout_s + learn_s + sync_s
        counts, old = self.pool.counts(), ages(episodes, step)
        tokens = old.total()
        passes = counts.passes or 1.0
        self.steps.append(
            SimStep(
                end_s=_now(),
                rollout_s=rollout_s,
                learn_s=learn_s,
                sync_s=sync_s,
                learner_idle=1 - learn_s / total_s if total_s else 0.0,
                engine_idle=max(0.0, 1 - counts.busy_s / self.setup.engines / total_s) if total_s else 0.0,
                running=counts.tokens / passes,
                waiting=counts.waiting / passes,
                in_flight=in_flight,
                age=sum(age * number for age, number in old.items()) / tokens,
                oldest=max(old),
                tokens=tokens,
            )
        )
        found = PassTimes(counts.tokens / passes, counts.busy_s / passes) if counts.passes else None
        return self.steps[-1], found


def _now() -> float:
    return asyncio.get_running_loop().time()
