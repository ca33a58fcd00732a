"""Simulate a run in virtual time, with the group queue, staleness control and scheduler of training.

`simulate` follows the training modes of `ludus.training.rl.async_trainer`; only devices, tools and the clock are
simulated. Failures, evaluations, checkpoints and the overhead of the event loop are left out. All training modes run
the same episodes. In trajectories, one token represents consecutive tokens of one weight version; its id is the number
of these tokens.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise

from ludus.config.sections.rollout import RolloutConfig
from ludus.envs.base import Environment, World
from ludus.rewards.base import Reward
from ludus.rollouts.group_queue import GroupQueue
from ludus.rollouts.ledger import Ledger, RolloutKey, RolloutOutcome
from ludus.rollouts.scheduler import Episode, FailureBudget, RolloutRequest, Scheduler
from ludus.rollouts.stream_control import (
    INITIAL_STEPS,
    ConcurrencyController,
    EngineLoad,
    PassTimes,
    StalenessController,
    StalenessSchedule,
)
from ludus.simulator.costs import Costs, EpisodeShape, RunLayout, ToolCost
from ludus.simulator.devices import DevicePool, Overlap, SimEngine, SimLearner, now, run_virtual
from ludus.tools.base import Tool
from ludus.types import Action, Message, Segment, StepResult, StopReason, Task

_NO_LIMIT_S = 1e9
_ACTION = Action(Message(role="assistant", content="."))
_OBSERVATION = StepResult((Message(role="tool", content="."),))
_DONE = StepResult(done=True)


@dataclass
class EpisodeSampler:
    """Sampler of action lengths and tool latencies, seeded by the group and member of an episode."""

    shape: EpisodeShape
    tool: ToolCost
    seed: int = 0
    _source: random.Random = field(default_factory=random.Random)

    def actions(self, group: int, member: int) -> list[int]:
        source = self._seeded(group, member)
        return [self.shape.draw_action(source) for _ in range(self.shape.draw_turns(source))]

    def calls(self, group: int, member: int) -> list[float]:
        """Return the seconds of the tool calls, one after each turn except the last."""
        turns = len(self.actions(group, member))
        source = self._seeded(group, member, 1)
        return [self.tool.draw(source) for _ in range(turns - 1)]

    def _seeded(self, group: int, member: int, stream: int = 0) -> random.Random:
        self._source.seed(2 * ((self.seed * 1_000_003 + group) * 65_537 + member) + stream)
        return self._source


@dataclass
class SimChatSession:
    """Chat session of an episode; each turn occupies an engine."""

    pool: DevicePool
    actions: Sequence[int]
    prefill: float
    engine: int = -1
    _segments: list[Segment] = field(default_factory=list)
    _turn: int = 0

    @property
    def segments(self) -> tuple[Segment, ...]:
        """One action per turn, with one token per weight version."""
        return tuple(self._segments)

    def open(self, messages: Sequence[Message], tools: Sequence[Tool]) -> StopReason | None:
        self.engine = self.pool.join()
        return None

    async def act(self) -> Action | StopReason:
        spans = await self.pool.engines[self.engine].generate(self.actions[self._turn], self.prefill)
        versions, tokens = zip(*spans, strict=True)
        self._segments.append(Segment("action", tokens, self._turn, logprobs=(0.0,) * len(spans), versions=versions))
        self._turn += 1
        return _ACTION

    def observe(self, messages: Sequence[Message]) -> StopReason | None:
        return None

    def close(self) -> None:
        if self.engine >= 0:
            self.pool.leave(self.engine)


@dataclass
class SimEnvironment(Environment):
    """Environment of one episode: every action except the last is a tool call."""

    calls: Iterator[float]

    async def start(self, task: Task) -> list[Message]:
        return list(task.prompt)

    async def step(self, action: Action) -> StepResult:
        seconds = next(self.calls, None)
        if seconds is None:
            return _DONE
        await asyncio.sleep(seconds)
        return _OBSERVATION


@dataclass
class SimWorld(World):
    """World of simulated environments; the task of group `n` has the id `n`."""

    sampler: EpisodeSampler
    members: int
    name: str = "simulated"
    splits: Sequence[str] = ("train",)
    rewards: Sequence[Reward] = ()
    _started: Counter[str] = field(default_factory=Counter)

    def tasks(self, split: str) -> Sequence[Task]:
        """Return no tasks; the simulation creates them itself."""
        return ()

    def environment(self, task: Task) -> SimEnvironment:
        """Return the environment of the group's next member; the scheduler starts them in order."""
        group, member = int(task.id), self._started[task.id]
        self._started[task.id] += 1
        if self._started[task.id] == self.members:
            del self._started[task.id]
        return SimEnvironment(iter(self.sampler.calls(group, member)))

    def make_chat(self, pool: DevicePool, request: RolloutRequest) -> SimChatSession:
        actions = self.sampler.actions(int(request.task.id), request.key.sample)
        return SimChatSession(pool, actions, self.sampler.shape.read)


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
    """Simulated run. Means are over `middle`: the steps, without those at start and end, in which the group queue fills
    or drains.

    `step_s` are seconds per step, `episodes_per_s` the trained episodes per second. Idle fractions are of time, for
    engines averaged over them. `age` is the mean age of trained tokens and `oldest` the largest of the whole run, in
    versions.
    """

    layout: RunLayout
    steps: tuple[SimStep, ...]
    middle: tuple[SimStep, ...]
    step_s: float
    episodes_per_s: float
    learner_idle: float
    engine_idle: float
    age: float
    oldest: int

    @property
    def bottleneck(self) -> str:
        """The busier of learner and engines, or the slowest episodes if both are idle most of the time."""
        if min(self.learner_idle, self.engine_idle) > 0.5:
            return "stragglers"
        return "learner" if self.learner_idle < self.engine_idle else "engines"


def simulate(costs: Costs, layout: RunLayout) -> SimRun:
    """Simulate a run. The result is deterministic."""

    async def run_steps() -> list[SimStep]:
        run = _Simulation(costs, layout)
        modes = {"sync": run.sync, "one_step": run.one_step, "async": run.asynchronous}
        return await modes[layout.mode]()

    steps, _ = run_virtual(run_steps())
    num = len(steps)
    edge = min(layout.max_staleness + 1, (num - 1) // 3) if layout.mode == "async" else 0
    middle = steps[edge : num - edge]
    step_s = (middle[-1].end_s - (steps[edge - 1].end_s if edge else 0.0)) / len(middle)
    weights = [step.rollout_s + step.learn_s + step.sync_s for step in middle]
    total_s = sum(weights) or 1.0
    return SimRun(
        layout=layout,
        steps=tuple(steps),
        middle=tuple(middle),
        step_s=step_s,
        episodes_per_s=layout.episodes / step_s,
        learner_idle=sum(step.learner_idle * weight for step, weight in zip(middle, weights, strict=True)) / total_s,
        engine_idle=sum(step.engine_idle * weight for step, weight in zip(middle, weights, strict=True)) / total_s,
        age=sum(step.age * step.tokens for step in middle) / sum(step.tokens for step in middle),
        oldest=max(step.oldest for step in steps),
    )


@dataclass
class _Simulation:
    """A run in one mode; the source of its groups, all of which are trained."""

    costs: Costs
    layout: RunLayout
    steps: list[SimStep] = field(default_factory=list)

    def __post_init__(self) -> None:
        costs, layout, overlap = self.costs, self.layout, Overlap(self.costs.overlap)
        self.pool = DevicePool([SimEngine(costs.engine, overlap) for _ in range(layout.engines)])
        self.learner = SimLearner(overlap)
        self.ledger = Ledger(spanning=True)
        world = SimWorld(EpisodeSampler(costs.episode, costs.tool, layout.seed), layout.members)
        self.scheduler = Scheduler(
            world=world,
            make_chat=partial(world.make_chat, self.pool),
            rollout=RolloutConfig(max_turns=10**9, environment_timeout_s=_NO_LIMIT_S, concurrency=layout.max_in_flight),
            ledger=self.ledger,
            scores=False,  # code in virtual time cannot wait for threads
        )

    def requests(self, number: int) -> list[RolloutRequest]:
        task, step = Task(str(number), (), None), number // self.layout.groups + 1
        return [RolloutRequest(RolloutKey(step, task.id, member), task) for member in range(self.layout.members)]

    def counts(self, group: Sequence[Episode]) -> bool:
        return True

    async def sync(self) -> list[SimStep]:
        for step in range(1, self.layout.steps + 1):
            begin, episodes = now(), await self._sample(step)
            sampled = now()
            await self._train(episodes)
            trained = now()
            await self._send_weights(step)
            self._record_step(step, episodes, [begin, sampled, trained, now()], self.layout.episodes)
        return self.steps

    async def one_step(self) -> list[SimStep]:
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
        layout, budget = self.layout, FailureBudget(self.layout.episodes)
        limit = ConcurrencyController(INITIAL_STEPS * layout.episodes, layout.members, layout.max_in_flight)
        queue = GroupQueue(
            admission=StalenessController(StalenessSchedule(layout.groups, layout.max_staleness, layout.steps)),
            source=self,
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
        return await self.scheduler.run([request for number in numbers for request in self.requests(number)])

    async def _train(self, episodes: Sequence[Episode]) -> None:
        segments = (segment for episode in episodes for segment in episode.trajectory.segments)
        total = sum(sum(segment.tokens) for segment in segments) + self.costs.episode.context * len(episodes)
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
        counts, ages = self.pool.drain_counts(), Counter[int]()
        for segment in (segment for episode in episodes for segment in episode.trajectory.segments):
            for number, version in zip(segment.tokens, segment.versions, strict=True):
                ages[step - 1 - version] += number
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
