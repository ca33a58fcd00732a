"""Bounded staleness by admission: over random schedules no token is too old, and nothing slow is starved.

The admission and the stream are the real ones; the clock, the episodes and the learner are made up.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ludus.rollout.admission import Admission, Pace
from ludus.rollout.in_flight import Load, next_in_flight
from ludus.rollout.ledger import RolloutKey
from ludus.rollout.scheduler import Episode, Job
from ludus.rollout.stream import Stream, StreamedGroup
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


@dataclass
class World:
    """Episodes of random length, of whose tokens one is sampled at the beginning and one at the end."""

    seed: int
    failing: float = 0.0
    worthless: float = 0.0
    version: int = 0
    lengths: dict[RolloutKey, float] = field(default_factory=dict)
    cancelled: list[RolloutKey] = field(default_factory=list)
    size: int = 2
    greedy: bool = False

    def jobs(self, number):
        return [
            Job(RolloutKey(number, "t", i), TASK, self.greedy and i == self.size - 1)
            for i in range(self.size)
        ]

    def counts(self, group):
        if any(episode.trajectory.failure for episode in group):
            return False
        return self.draw("worth", group[0].key.step).random() >= self.worthless

    def draw(self, *parts):
        return random.Random(f"{self.seed}/{parts}")

    async def play(self, job):
        draw = self.draw(job.key)
        seconds = draw.lognormvariate(0, 1) * (20 if draw.random() < 0.1 else 1)
        begun = self.version
        try:
            await asyncio.sleep(seconds)
        except asyncio.CancelledError:
            self.cancelled.append(job.key)
            raise
        self.lengths[job.key] = seconds
        failure = Failure("engine", "broken", 1) if draw.random() < self.failing else None
        action = Segment("action", (1, 2), logprobs=(0.0, 0.0), versions=(begun, self.version))
        one = Trajectory("t", job.key.sample, (action,), (), StopReason.ANSWERED, failure=failure)
        return Episode(job.key, TASK, one, job.greedy)


@dataclass
class Played:
    """What a simulated run did: the oldest age at each step, the keys that trained, the others, its end."""

    ages: list[int]
    trained: list[list[RolloutKey]]
    others: list[RolloutKey]
    seconds: float
    numbers: list[list[int]]
    held: int = 0


def simulate(world, pace, in_flight=8, learning=1.0, needed=0) -> Played:
    async def run():
        stream = Stream(Admission(pace), world, world.play, in_flight, needed=needed)
        played = Played([], [], [], 0.0, [])
        stream.start()
        for step in range(1, pace.last_step + 1):
            batch = await stream.take()
            episodes = [episode for group in batch.groups for episode in group.episodes]
            oldest = min(v for e in episodes for s in e.trajectory.segments for v in s.versions)
            played.ages.append(step - 1 - oldest)
            played.trained.append([episode.key for episode in episodes])
            played.others += [e.key for group in batch.others for e in group.episodes]
            played.numbers.append([group.number for group in batch.groups])
            await asyncio.sleep(world.draw("learner", step).random() * learning)
            world.version = step
            await asyncio.sleep(world.draw("sync", step).random() * 0.1)
            stream.published(step)
        assert stream.num_in_flight == stream.num_waiting == len(stream.on_their_way()) == 0
        played.seconds = asyncio.get_running_loop().time()
        return played

    loop = FakeLoop()
    try:
        return loop.run_until_complete(run())
    finally:
        loop.close()


PACES = st.builds(Pace, st.integers(1, 5), st.integers(0, 4), st.integers(1, 12))


@settings(max_examples=60, deadline=None)
@given(
    pace=PACES,
    seed=st.integers(0, 10**6),
    in_flight=st.integers(1, 40),
    learning=st.sampled_from([0.01, 1.0, 30.0]),
    worthless=st.sampled_from([0.0, 0.3]),
    failing=st.sampled_from([0.0, 0.2]),
)
def test_no_trained_token_is_older_than_the_bound_and_all_that_is_sampled_is_trained(
    pace, seed, in_flight, learning, worthless, failing
):
    world = World(seed, failing, worthless)
    played = simulate(world, pace, in_flight, learning)
    assert max(played.ages) <= pace.max_staleness
    assert all(len(numbers) == pace.groups_per_step for numbers in played.numbers)
    trained = [key for step in played.trained for key in step]
    assert len(set(trained)) == len(trained)
    assert sorted([*trained, *played.others]) == sorted(world.lengths)
    if not worthless and not failing:  # then the lengths of what trains are exactly those of what was sampled
        assert sorted(world.lengths[key] for key in trained) == sorted(world.lengths.values())


def test_without_waiting_the_bound_is_passed_and_nothing_is_starved():
    pace = Pace(2, 1, 30, hold=False)
    world = World(3)
    played = simulate(world, pace, in_flight=8, learning=0.1)
    assert max(played.ages) > pace.max_staleness
    assert len(world.lengths) == sum(map(len, played.trained))
    assert played.seconds < simulate(World(3), Pace(2, 1, 30), in_flight=8, learning=0.1).seconds


def test_a_bound_of_none_is_in_step_and_a_larger_one_is_faster():
    seconds = [
        simulate(World(5), Pace(4, bound, 20), in_flight=100, learning=3.0).seconds for bound in (0, 1, 8)
    ]
    assert seconds[0] > 1.3 * seconds[1] > 1.3 * seconds[2]


def test_the_oldest_train_first_and_a_slow_group_is_waited_for():
    admission = Admission(Pace(2, 1, 10))
    for number in range(4):
        admission.admit(number)
    assert admission.room == 0
    for number in (1, 2, 3):
        admission.ready(number)
    assert admission.take() == [1, 2]  # two of version 0 may still train at step 2: 0 and 3
    assert (admission.room, admission.next_step) == (0, 2)
    admission.published(1)
    admission.admit(4)
    admission.admit(5)
    admission.ready(4)
    assert admission.take() is None
    assert admission.is_held  # 0 is due now
    admission.ready(0)
    assert admission.take() == [0, 3]


def test_a_stream_says_what_keeps_more_episodes_from_starting():
    class Slow(World):
        async def play(self, job):
            await asyncio.sleep(50.0 if job.key.step == 0 else 1.0)
            action = Segment("action", (1,), logprobs=(0.0,), versions=(self.version,))
            return Episode(job.key, TASK, Trajectory("t", 0, (action,), (), StopReason.ANSWERED))

    async def run(in_flight):
        world, found = Slow(0, size=1), []
        stream = Stream(Admission(Pace(1, 1, 20)), world, world.play, in_flight)
        stream.start()
        limited = stream.is_limited
        for step in (1, 2):
            await stream.take()
            found.append(stream.held)
            world.version = step
            stream.published(step)
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


def test_a_resumed_run_goes_on_with_what_can_still_be_in_time_and_plays_the_rest_anew():
    world, pace = World(9), Pace(2, 1, 12)
    kept = [
        StreamedGroup(n, world.jobs(n), version) for n, version in ((3, 2), (5, 3), (6, 3), (7, 4), (8, 4))
    ]

    async def run():
        world.version = 4
        for group in kept[:3]:
            group.done[0] = await world.play(group.jobs[0])
        stream = Stream(Admission(pace, 4), world, world.play, 8, next_number=9, kept=kept)
        stayed = {episode.key.step for episode in stream.start()}
        found = []
        for step in range(5, pace.last_step + 1):
            batch = await stream.take()
            found += [(step, group) for group in batch.groups]
            world.version = step
            stream.published(step)
        return stayed, found

    loop = FakeLoop()
    try:
        stayed, found = loop.run_until_complete(run())
    finally:
        loop.close()
    assert stayed == {5, 6}  # group 3 was due at step 4
    assert {group.number for _, group in found} >= {3, 5, 6, 7, 8}
    for step, group in found:
        ages = [step - 1 - v for e in group.episodes for s in e.trajectory.segments for v in s.versions]
        assert max(ages) <= 1
    assert len(found) == 16


def test_what_cannot_be_in_time_is_not_admitted():
    admission = Admission(Pace(2, 0, 10))
    admission.admit(0)
    admission.admit(1)
    with pytest.raises(ValueError, match="no room"):
        admission.admit(2)
    with pytest.raises(ValueError, match="on its way"):
        admission.admit(1)
    admission.discard(1)
    assert admission.room == 1
    with pytest.raises(ValueError, match="follows"):
        admission.published(1)


def test_the_first_members_that_end_are_enough_and_the_others_stop():
    world = World(1, size=5)
    played = simulate(world, Pace(2, 2, 8), needed=3)
    assert all(len(step) == 6 for step in played.trained)
    kept = {key for step in played.trained for key in step}
    for key in kept:  # no member that was cancelled was done earlier
        assert key not in world.cancelled
    assert world.cancelled
    every = [world.draw(key).lognormvariate(0, 1) for key in world.cancelled]
    assert len(every) == len(set(world.cancelled))


def test_failed_members_are_replaced_by_spare_ones_and_their_groups_are_whole():
    world = World(2, failing=0.25, size=5)
    played = simulate(world, Pace(2, 2, 8), needed=3)
    assert all(len(step) == 6 for step in played.trained)


def test_a_greedy_member_is_always_waited_for():
    world = World(4, size=5, greedy=True)
    played = simulate(world, Pace(2, 2, 8), needed=2)
    for step in played.trained:
        assert len(step) >= 6  # who ends before the greedy one takes part
        assert sum(key.sample == 4 for key in step) == 2


def test_what_an_episode_raises_reaches_whoever_waits_for_a_batch():
    class Broken(World):
        async def play(self, job):
            await asyncio.sleep(1)
            raise RuntimeError("no such luck")

    with pytest.raises(RuntimeError, match="no such luck"):
        simulate(Broken(0), Pace(1, 1, 1))


BUSY = Load(learner_idle=0.0, engine_idle=0.0, engine_queue=0.0, ahead=False)


@pytest.mark.parametrize(
    ("load", "expected"),
    [
        (Load(0.5, 0.5, 0.0, False), 13),
        (Load(0.5, 0.0, 0.0, False), 10),
        (Load(0.5, 0.0, 0.0, False, gain=0.1), 13),
        (Load(0.0, 0.5, 0.0, True), 8),
        (Load(0.5, 0.0, 1.0, False), 8),
        (BUSY, 10),
    ],
    ids=[
        "both wait for tools",
        "the engine is full",
        "the engine gets faster",
        "the learner is full",
        "a queue",
        "both busy",
    ],
)
def test_the_fewest_episodes_fly_that_keep_both_busy(load, expected):
    assert next_in_flight(10, load, 2, 100) == expected
    assert next_in_flight(10, load, 10, 10) == 10


def test_what_a_checkpoint_gets_of_the_stream_does_not_change_any_more():
    world = World(6)

    async def run():
        stream = Stream(Admission(Pace(2, 2, 9)), world, world.play, 4)
        stream.start()
        await asyncio.sleep(0.5)
        kept = stream.on_their_way()
        before = [dict(group.done) for group in kept]
        await asyncio.sleep(30)
        assert any(
            len(group.done) > len(old) for group, old in zip(stream.on_their_way(), before, strict=False)
        )
        await stream.close()
        return kept, before

    loop = FakeLoop()
    try:
        kept, before = loop.run_until_complete(run())
    finally:
        loop.close()
    assert [group.done for group in kept] == before
