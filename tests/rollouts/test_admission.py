"""Bounded staleness by admission control: over random schedules no token is too old, and no slow task starves.

The admission and the stream are the real ones; the clock, the episodes and the learner are made up.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ludus.algorithms.spec.resolve import PRESETS
from ludus.config.sections.training import StalenessConfig
from ludus.envs.base import TaskOrder
from ludus.rollouts.group_queue import GroupQueue, StreamedGroup
from ludus.rollouts.ledger import Ledger, RolloutKey, RolloutOutcome
from ludus.rollouts.scheduler import Episode, RolloutRequest
from ludus.rollouts.stream_control import EngineLoad, StalenessController, StalenessSchedule, next_in_flight
from ludus.training.collection.filters import ages, mask_over_age, staleness_metrics
from ludus.training.collection.prompt_stream import PromptStream, StreamState
from ludus.training.collection.rollout_collector import RolloutCollector
from ludus.training.credit.advantages import TrainingSample, training_rows
from ludus.types import Failure, Segment, StopReason, Task, Trajectory

TASK = Task("t", (), None)


class FakeLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock jumps to the next thing that is due."""

    def __init__(self):
        super().__init__()
        self.now = 0.0
        plain = self._selector.select

        def select(timeout):
            self.now += timeout or 0.0
            return plain(0)

        self._selector.select = select

    def time(self):
        return self.now


def on_made_up_time(work):
    """What a coroutine gives."""
    with asyncio.Runner(loop_factory=FakeLoop) as runner:
        return runner.run(work)


@dataclass
class World:
    """Episodes of random length, of whose tokens one is sampled at the beginning and one at the end."""

    seed: int
    failing: float = 0.0
    worthless: float = 0.0
    version: int = 0
    lengths: dict[RolloutKey, float] = field(default_factory=dict)
    plays: Counter[RolloutKey] = field(default_factory=Counter)
    failed: set[RolloutKey] = field(default_factory=set)
    cancelled: list[RolloutKey] = field(default_factory=list)
    size: int = 2
    greedy: bool = False

    def requests(self, number):
        return [
            RolloutRequest(RolloutKey(number, "t", i), TASK, self.greedy and i == self.size - 1)
            for i in range(self.size)
        ]

    def counts(self, group):
        if any(episode.trajectory.failure for episode in group):
            return False
        return self.draw("worth", group[0].key.step).random() >= self.worthless

    def draw(self, *parts):
        return random.Random(f"{self.seed}/{parts}")

    async def play(self, request):
        draw = self.draw(request.key)
        seconds = draw.lognormvariate(0, 1) * (20 if draw.random() < 0.1 else 1)
        begun = self.version
        try:
            await asyncio.sleep(seconds)
        except asyncio.CancelledError:
            self.cancelled.append(request.key)
            raise
        self.lengths[request.key] = seconds
        self.plays[request.key] += 1
        failure = Failure("engine", "broken", 1) if draw.random() < self.failing else None
        if failure is not None:
            self.failed.add(request.key)
        action = Segment("action", (1, 2), logprobs=(0.0, 0.0), versions=(begun, self.version))
        one = Trajectory("t", request.key.sample, (action,), (), StopReason.ANSWERED, failure=failure)
        return Episode(request.key, TASK, one, request.greedy)


@dataclass
class SimulatedRun:
    """What a simulated run did: the batches, the keys of the others, its end, the groups of each step."""

    batches: list[list[Episode]]
    others: list[RolloutKey]
    seconds: float
    numbers: list[list[int]]

    @property
    def ages(self) -> list[int]:
        """The oldest age at each step."""
        return [
            max(age for e in episodes for age in ages(e.trajectory, step))
            for step, episodes in enumerate(self.batches, start=1)
        ]

    @property
    def trained(self) -> list[list[RolloutKey]]:
        return [[episode.key for episode in episodes] for episodes in self.batches]


@dataclass(frozen=True)
class StreamCase:
    """How a stream runs: the most in flight, the learner's time, and what happens to it.

    `needed` members of a group are enough, 0 is all. `drains`: new weights wait for what is in flight. After
    the step `cut` the run is killed and resumed from its checkpoint, 0 is never. `varies`: the number in
    flight changes with each step. `transfer`: the most seconds that new weights take beside the learner; with
    0 it waits for them.
    """

    in_flight: int = 8
    learning: float = 1.0
    needed: int = 0
    drains: bool = False
    cut: int = 0
    varies: bool = False
    transfer: float = 0.0


async def send_beside(step, stream, world, way) -> None:
    """The engine takes weights while the learner goes on."""
    await asyncio.sleep(world.draw("transfer", step).random() * way.transfer)
    world.version = step
    await asyncio.sleep(world.draw("sync", step).random() * 0.1)
    stream.on_serve(step)


async def publish(step, stream, world, way) -> None:
    """The learner waits until the engine has the weights."""
    if way.drains:
        await stream.drain()
    world.version = step
    await asyncio.sleep(world.draw("sync", step).random() * 0.1)
    stream.on_publish(step)


async def resumed(stream, world, pace, way) -> GroupQueue:
    """A stream that goes on from the checkpoint of this one, which ends."""
    text = StreamState(stream.next_number, tuple(stream.in_progress())).to_text()
    await stream.close()
    state = StreamState.from_text(text, {"t": TASK}, lambda number, *_: world.requests(number))
    admission = StalenessController(pace, world.version)
    again = GroupQueue(
        admission, world, world.play, way.in_flight, way.needed, state.next_number, restored=state.groups
    )
    again.start()
    return again


def simulate(world, pace, way=StreamCase()) -> SimulatedRun:
    async def run():
        stream = GroupQueue(StalenessController(pace), world, world.play, way.in_flight, needed=way.needed)
        played = SimulatedRun([], [], 0.0, [])
        sending = asyncio.create_task(asyncio.sleep(0))
        stream.start()
        for step in range(1, pace.last_step + 1):
            batch = await stream.take()
            played.batches.append([episode for group in batch.groups for episode in group.episodes])
            played.others += [e.key for group in batch.others for e in group.episodes]
            played.numbers.append([group.number for group in batch.groups])
            await asyncio.sleep(world.draw("learner", step).random() * way.learning)
            await sending
            if way.varies:
                stream.in_flight = world.draw("in flight", step).randint(1, way.in_flight)
            if way.transfer and not way.drains and step not in (way.cut, pace.last_step):
                stream.on_publish(step, everywhere=False)
                sending = asyncio.create_task(send_beside(step, stream, world, way))
            else:
                await publish(step, stream, world, way)
            if step == way.cut:
                stream = await resumed(stream, world, pace, way)
        assert stream.num_in_flight == stream.num_waiting == 0
        rest = stream.in_progress()
        assert not any(group.counts for group in rest)
        played.others += [episode.key for group in rest for episode in group.episodes]
        played.seconds = asyncio.get_running_loop().time()
        return played

    return on_made_up_time(run())


def without_the_old(episodes, step, bound):
    """The ages of the tokens that a step trains where those over age are masked, and what is reported."""
    made = [TrainingSample(e, RolloutOutcome.TRAINED, "trained", advantages=(1.0, 1.0)) for e in episodes]
    credits = mask_over_age(made, step, bound)
    rows = training_rows(credits, mask_observations=True)
    trained = [credit.episode.trajectory for credit in credits if credit.outcome is RolloutOutcome.TRAINED]
    kept = [
        step - 1 - version
        for row, one in zip(rows, trained, strict=True)
        for trains, version in zip(row.trains, one.versions, strict=True)
        if trains
    ]
    config = StalenessConfig(max_staleness=bound, on_stale="mask")
    return kept, staleness_metrics(credits, step, config, [], "right")


PACES = st.builds(StalenessSchedule, st.integers(1, 5), st.integers(0, 4), st.integers(1, 12), st.booleans())
WAYS = st.builds(
    StreamCase,
    in_flight=st.integers(1, 40),
    learning=st.sampled_from([0.01, 1.0, 30.0]),
    needed=st.sampled_from([0, 2]),
    drains=st.booleans(),
    cut=st.integers(0, 8),
    varies=st.booleans(),
    transfer=st.sampled_from([0.0, 1.0, 40.0]),
)


@settings(max_examples=30, deadline=None)
@given(
    pace=PACES,
    way=WAYS,
    seed=st.integers(0, 10**6),
    worthless=st.sampled_from([0.0, 0.3]),
    failing=st.sampled_from([0.0, 0.2]),
)
def test_staleness_bound_holds_and_each_episode_trains_once_under_any_schedule(pace, way, seed, worthless, failing):
    world = World(seed, failing, worthless, size=4 if way.needed else 2)
    played = simulate(world, pace, way)
    for step, episodes in enumerate(played.batches, start=1):
        every = [age for e in episodes for age in ages(e.trajectory, step)]
        if pace.hold:
            assert max(every) <= pace.max_staleness
        trained, reported = without_the_old(episodes, step, pace.max_staleness)
        assert sorted(trained) == sorted(age for age in every if age <= pace.max_staleness)
        assert reported["staleness/over_age_tokens"] == len(every) - len(trained)
        assert reported["staleness/max"] <= pace.max_staleness
        if way.drains:
            assert all(len({v for s in e.trajectory.segments for v in s.versions}) == 1 for e in episodes)
    assert all(len(numbers) == pace.groups_per_step for numbers in played.numbers)
    ended = [key for step in played.trained for key in step] + played.others
    assert len(set(ended)) == len(ended)
    replaced = world.failed if way.needed else set()  # by members to spare
    assert set(world.lengths) - replaced <= set(ended) <= set(world.lengths)
    assert {key for key, plays in world.plays.items() if plays > 1} <= world.failed
    if not worthless and not failing and not way.needed:  # lengths that train are those that were sampled
        assert sorted(ended) == sorted(world.lengths)
        assert not played.others


def test_without_holding_the_staleness_bound_is_exceeded_and_all_episodes_train():
    pace = StalenessSchedule(2, 1, 30, hold=False)
    world = World(3)
    played = simulate(world, pace, StreamCase(learning=0.1))
    assert max(played.ages) > pace.max_staleness
    assert len(world.lengths) == sum(map(len, played.trained))
    assert played.seconds < simulate(World(3), StalenessSchedule(2, 1, 30), StreamCase(learning=0.1)).seconds


def test_larger_staleness_bound_is_faster():
    seconds = [
        simulate(World(5), StalenessSchedule(4, bound, 20), StreamCase(in_flight=100, learning=3.0)).seconds
        for bound in (0, 1, 8)
    ]
    assert seconds[0] > 1.3 * seconds[1] > 1.3 * seconds[2]


def test_oldest_groups_train_first_and_a_due_slow_group_blocks():
    admission = StalenessController(StalenessSchedule(2, 1, 10))
    for number in range(4):
        admission.admit(number)
    assert admission.capacity == 0
    for number in (1, 2, 3):
        admission.ready(number)
    assert admission.take() == [1, 2]  # two of version 0 may still train at step 2: 0 and 3
    assert (admission.capacity, admission.next_step) == (0, 2)
    admission.on_publish(1)
    admission.admit(4)
    admission.admit(5)
    admission.ready(4)
    assert admission.take() is None
    assert admission.is_held  # 0 is due now
    admission.ready(0)
    assert admission.take() == [0, 3]


def test_stream_reports_concurrency_limit_and_waiting_for_a_due_group():
    class SlowWorld(World):
        async def play(self, request):
            await asyncio.sleep(50.0 if request.key.step == 0 else 1.0)
            action = Segment("action", (1,), logprobs=(0.0,), versions=(self.version,))
            return Episode(request.key, TASK, Trajectory("t", 0, (action,), (), StopReason.ANSWERED))

    async def run(in_flight):
        world, found = SlowWorld(0, size=1), []
        stream = GroupQueue(StalenessController(StalenessSchedule(1, 1, 20)), world, world.play, in_flight)
        stream.start()
        limited = stream.is_limited
        for step in (1, 2):
            await stream.take()
            found.append(stream.held)
            world.version = step
            stream.on_publish(step)
        await stream.close()
        return limited, found

    loop = FakeLoop()
    try:
        # one alone keeps the second group out; two fill the room, and the learner then waits for the first,
        # which is due at step 2, though the third is complete
        assert loop.run_until_complete(run(1)) == (True, [False, False])
        assert loop.run_until_complete(run(2)) == (False, [False, True])
    finally:
        loop.close()


def test_no_batch_is_ready_while_a_due_group_is_missing():
    admission = StalenessController(StalenessSchedule(2, 1, 20))
    for number in range(4):  # due at step 2
        admission.admit(number)
    admission.ready(0)
    assert admission.batches_ready == 0
    admission.ready(1)
    assert admission.batches_ready == 1
    assert admission.take() == [0, 1]
    assert admission.batches_ready == 0
    admission.on_publish(1)
    for number in (4, 5):  # due at step 3
        admission.admit(number)
        admission.ready(number)
    assert (admission.batches_ready, admission.take()) == (0, None)
    admission.ready(2)
    assert admission.batches_ready == 0
    admission.ready(3)
    assert admission.batches_ready == 2
    assert admission.take() == [2, 3]
    assert admission.batches_ready == 1


def test_stream_counts_seconds_in_flight_and_completed_batches():
    async def run():
        world, lengths = World(0), []

        async def play(request):
            begin = asyncio.get_running_loop().time()
            try:
                return await world.play(request)
            finally:
                lengths.append(asyncio.get_running_loop().time() - begin)

        stream = GroupQueue(StalenessController(StalenessSchedule(2, 4, 20)), world, play, 7)
        stream.start()
        await asyncio.sleep(1e4)
        first, flown = stream.flow(), sum(lengths)
        await asyncio.sleep(1e4)
        await stream.take()
        await asyncio.sleep(1e4)
        return first, flown, stream.flow()

    first, flown, later = on_made_up_time(run())
    assert first.in_flight_s == pytest.approx(flown)
    assert first.batches == 5  # as many as the bound lets there be
    assert (later.in_flight_s, later.batches) == (0, 0)  # no room, as the step has not ended


@pytest.mark.parametrize("held", [False, True])
def test_engine_is_throttled_only_while_a_batch_waits_and_learner_computes(held):
    async def run():
        world, rests = World(0), []
        stream = GroupQueue(StalenessController(StalenessSchedule(2, 4, 20)), world, world.play, 100)
        stream.start()
        await stream.take()
        stream.held = held  # by a group that was due: then they are in a hurry
        with stream.throttled(rests.append):
            first = list(rests)
            await asyncio.sleep(1e4)
        learned = list(rests)
        await asyncio.sleep(1e4)
        later = list(rests)
        await stream.close()
        return first, learned, later, stream.admission.num_ready

    first, learned, later, ready = on_made_up_time(run())
    assert ready == 8  # four batches, as many as the bound lets there be
    assert first == [0]
    assert learned == [0] * 10 if held else [0, 0, 1, 1, 1, 1, 1, 1, 1, 0]
    assert later == learned


def test_a_resumed_run_keeps_episodes_within_staleness_and_repeats_the_rest():
    world, pace = World(9), StalenessSchedule(2, 1, 12)
    kept = [StreamedGroup(n, world.requests(n), version) for n, version in ((3, 2), (5, 3), (6, 3), (7, 4), (8, 4))]

    async def run():
        world.version = 4
        for group in kept[:3]:
            group.done[0] = await world.play(group.requests[0])
        stream = GroupQueue(StalenessController(pace, 4), world, world.play, 8, next_number=9, restored=kept)
        stayed = {episode.key.step for episode in stream.start()}
        late = [episode.key for episode in stream.late]
        found = []
        for step in range(5, pace.last_step + 1):
            batch = await stream.take()
            found += [(step, group) for group in batch.groups]
            world.version = step
            stream.on_publish(step)
        return stayed, late, found

    stayed, late, found = on_made_up_time(run())
    assert stayed == {5, 6}  # group 3 was due at step 4
    assert late == [kept[0].requests[0].key]
    anew = [e.key for _, group in found if group.number == 3 for e in group.episodes]
    assert [key.attempt for key in anew] == [1, *[0] * (len(anew) - 1)]  # another attempt than the late one
    assert {group.number for _, group in found} >= {3, 5, 6, 7, 8}
    for step, group in found:
        ages = [step - 1 - v for e in group.episodes for s in e.trajectory.segments for v in s.versions]
        assert max(ages) <= 1
    assert len(found) == 16


def read_again(world, greedy, counts=True):
    """A whole group of this world, and what a checkpoint gives again of it; `greedy` members are wanted."""

    def requests(number, task, members):
        size = members + greedy
        return World(0, size=size, greedy=greedy).requests(number)

    group = StreamedGroup(0, world.requests(0), 0, counts=counts)
    loop = FakeLoop()
    try:
        for index, request in enumerate(group.requests):
            group.done[index] = loop.run_until_complete(world.play(request))
    finally:
        loop.close()
    return group, StreamState.from_text(StreamState(1, (group,)).to_text(), {"t": TASK}, requests)


def test_restored_group_keeps_its_original_members():
    group, state = read_again(World(1, size=5, greedy=True), greedy=True)
    assert state.groups[0].requests == group.requests
    assert state.groups[0].episodes == group.episodes
    assert state.unwanted == ()


def test_unneeded_greedy_member_of_a_restored_group_is_discarded():
    group, state = read_again(World(1, size=5, greedy=True), greedy=False)
    assert state.groups[0].episodes == group.episodes[:4]
    assert [episode.key for episode in state.unwanted] == [group.requests[4].key]


def test_failed_greedy_member_of_a_restored_group_is_not_discarded():
    world = World(1, failing=1.0, size=3, greedy=True)
    group, state = read_again(world, greedy=False, counts=False)
    assert [episode.trajectory.failure is None for episode in group.episodes] == [False] * 3
    assert state.unwanted == ()
    assert state.groups[0].episodes == group.episodes[:2]


def test_group_over_the_capacity_is_not_admitted():
    admission = StalenessController(StalenessSchedule(2, 0, 10))
    admission.admit(0)
    admission.admit(1)
    with pytest.raises(ValueError, match="exceeds the capacity"):
        admission.admit(2)
    with pytest.raises(ValueError, match="already admitted"):
        admission.admit(1)
    admission.discard(1)
    assert admission.capacity == 1
    with pytest.raises(ValueError, match="follows"):
        admission.on_publish(1)


def test_group_keeps_its_first_finished_members_and_cancels_the_others():
    world = World(1, size=5)
    played = simulate(world, StalenessSchedule(2, 2, 8), StreamCase(needed=3))
    assert all(len(step) == 6 for step in played.trained)
    kept = {key for step in played.trained for key in step}
    for key in kept:  # no member that was cancelled was done earlier
        assert key not in world.cancelled
    assert world.cancelled
    every = [world.draw(key).lognormvariate(0, 1) for key in world.cancelled]
    assert len(every) == len(set(world.cancelled))


def test_failed_members_are_replaced_by_spares_and_groups_are_complete():
    world = World(2, failing=0.25, size=5)
    played = simulate(world, StalenessSchedule(2, 2, 8), StreamCase(needed=3))
    assert all(len(step) == 6 for step in played.trained)


def test_a_greedy_member_is_always_waited_for():
    world = World(4, size=5, greedy=True)
    played = simulate(world, StalenessSchedule(2, 2, 8), StreamCase(needed=2))
    for step in played.trained:
        assert len(step) >= 6  # who ends before the greedy one takes part
        assert sum(key.sample == 4 for key in step) == 2


def test_episode_error_is_raised_in_the_consumer():
    class BrokenWorld(World):
        async def play(self, request):
            await asyncio.sleep(1)
            raise RuntimeError("no such luck")

    with pytest.raises(RuntimeError, match="no such luck"):
        simulate(BrokenWorld(0), StalenessSchedule(1, 1, 1))


BUSY = EngineLoad(learner_idle=0.0, engine_idle=0.0, engine_queue=0.0, ready=0.0)


@pytest.mark.parametrize(
    ("load", "expected"),
    [
        (EngineLoad(0.5, 0.5, 0.0, 0.0), 13),
        (EngineLoad(0.5, 0.0, 0.0, 0.0), 10),
        (EngineLoad(0.5, 0.0, 0.0, 0.0, gain=0.1), 13),
        (EngineLoad(0.5, 0.5, 0.0, 0.0, limited=False), 10),
        (EngineLoad(0.5, 0.5, 0.0, 1.5, needed=7.0), 10),
        (EngineLoad(0.5, 0.0, 1.0, 0.0), 8),
        (BUSY, 10),
        (replace(BUSY, ready=1.5, needed=9.0), 9),
        (replace(BUSY, ready=2.5, needed=10.0), 8),
        (replace(BUSY, ready=4.0, needed=9.0), 7),
        (replace(BUSY, ready=0.5, needed=10.0), 12),
        (replace(BUSY, ready=0.0, needed=20.0), 13),
        (replace(BUSY, ready=0.0, needed=20.0, limited=False), 10),
    ],
    ids=[
        "both wait for tools",
        "the engine is full",
        "the engine gets faster",
        "no more may start",
        "a group is due",
        "a queue",
        "both busy",
        "what the learner needs",
        "a batch too many waits",
        "slowly fewer",
        "a batch is missing",
        "slowly more",
        "no more may start for the learner",
    ],
)
def test_concurrency_is_the_minimum_that_keeps_engine_and_learner_busy(load, expected):
    assert next_in_flight(10, load, 2, 100) == expected
    assert next_in_flight(10, load, 10, 10) == 10


def test_concurrency_rises_above_one_if_the_learner_needs_it():
    assert next_in_flight(1, replace(BUSY, needed=20.0), 1, 100) == 2


def test_stream_state_captured_for_a_checkpoint_does_not_change_later():
    world = World(6)

    async def run():
        stream = GroupQueue(StalenessController(StalenessSchedule(2, 2, 9)), world, world.play, 4)
        stream.start()
        await asyncio.sleep(0.5)
        kept = stream.in_progress()
        before = [dict(group.done) for group in kept]
        await asyncio.sleep(30)
        assert any(len(group.done) > len(old) for group, old in zip(stream.in_progress(), before, strict=False))
        await stream.close()
        return kept, before

    kept, before = on_made_up_time(run())
    assert [group.done for group in kept] == before


def test_source_error_is_raised_in_the_consumer():
    class ShortWorld(World):
        def requests(self, number):
            if number > 2:
                raise RuntimeError("there are no more tasks")
            return super().requests(number)

    async def run():
        world = ShortWorld(0)
        stream = GroupQueue(StalenessController(StalenessSchedule(2, 4, 9)), world, world.play, 2)
        stream.start()
        async with asyncio.timeout(1e6):
            for step in (1, 2):
                await stream.take()
                world.version = step
                stream.on_publish(step)

    loop = FakeLoop()
    try:
        with pytest.raises(RuntimeError, match="no more tasks"):
            loop.run_until_complete(run())
    finally:
        loop.close()


def test_raising_the_concurrency_limit_starts_episodes_immediately():
    async def run():
        world = World(0, size=1)
        stream = GroupQueue(StalenessController(StalenessSchedule(1, 3, 9)), world, world.play, 1)
        stream.start()
        stream.in_flight = 3
        taking = asyncio.create_task(stream.take())
        await asyncio.sleep(0)
        found = stream.num_in_flight
        await taking
        await stream.close()
        return found

    loop = FakeLoop()
    try:
        assert loop.run_until_complete(run()) == 3
    finally:
        loop.close()


def test_restored_groups_keep_their_keys_and_new_groups_reuse_none():
    """Two groups a step were six groups later: those that were begun then are of a later step than now."""
    order = TaskOrder([Task(name, (), None) for name in "abcdefghijkl"], 0, 2)
    sampler = RolloutCollector(None, None, PRESETS["grpo"], None, Ledger())
    old, new = PromptStream(sampler, order, 2), PromptStream(sampler, order, 6)
    groups = tuple(StreamedGroup(number, old.requests(number), 3) for number in (20, 21))
    text = StreamState(22, groups).to_text()
    state = StreamState.from_text(text, {task.id: task for task in order.tasks}, new.jobs_of)
    assert [group.requests for group in state.groups] == [group.requests for group in groups]
    taken = {request.key for group in groups for request in group.requests}
    first = new.free(state.next_number, state.groups)
    assert not taken & {request.key for number in range(first, first + 60) for request in new.requests(number)}
    assert old.free(22, groups) == 22


def test_new_group_never_reuses_the_key_of_a_kept_group():
    """As with another number of rounds: the step that is begun would go on with a task that it has."""
    tasks = [Task(name, (), None) for name in "abcdefghij"]
    sampler = RolloutCollector(None, None, PRESETS["grpo"], None, Ledger())
    old, new = (PromptStream(sampler, TaskOrder(tasks, 0, chunk), 2) for chunk in (2, 4))
    met = 0
    for number in range(11, 99, 2):
        kept = StreamedGroup(number - 1, old.requests(number - 1), 3)
        met += new.requests(number) == kept.requests
        first = new.free(number, [kept])
        taken = {request.key for request in kept.requests}
        assert not taken & {request.key for n in range(first, first + 20) for request in new.requests(n)}
        assert old.free(number, [kept]) == number
    assert met  # it would have
