"""Reward workers: their results, and the loss of one during a computation."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace

import pytest

from ludus.cluster.protocol import Heartbeat, RolloutJob, Started, WorkerCommand, WorkerDied, WorkerSpec
from ludus.cluster.supervisor import WorkerGroup
from ludus.cluster.worker_pool import MAX_ATTEMPTS, RewardWorkers, ScoringLost
from ludus.cluster.workers import WorkerServer
from ludus.config import load_config
from ludus.config.sections.cluster import ClusterConfig
from ludus.errors import ConfigError, WorldError
from ludus.rewards.base import Reward
from ludus.rollouts.reward_executor import RewardTimeout
from ludus.rollouts.reward_process import ScoredEpisode, ScoreRequest
from ludus.types import StopReason, Task, Trajectory
from small_worlds import RecordingEnv, RecordingWorld, make_requests, make_scheduler, scripted
from tests.cluster.test_cluster import JOB, FakeLauncher, plan
from tests.engines.test_engine_server import Fake, serving
from waiting import until

PLAYED = Trajectory("t", 0, (), (), StopReason.ANSWERED)
TASK = Task("t", (), None)

WORLD = """
import time
from pathlib import Path
from ludus.envs.tool_world import ToolWorld
from ludus.rewards.base import Reward
from ludus.rollouts.reward_executor import RewardTimeout

def turns(task, trajectory):
    here = Path(trajectory.tags["waits"])
    (here / f"begun-{trajectory.sample}").touch()
    while not (here / "go").exists():
        time.sleep(0.005)
    if task.id == "broken":
        raise KeyError("no such verdict")
    return 1.0

def make_world(settings, limits):
    rewards = (Reward("solved", turns, outcome=True), Reward("shape", lambda task, t: 0.5, weight=0.1))
    return ToolWorld("judged", {"train": ()}, (), rewards, limits)
"""


@dataclass
class LocalRewardWorker:
    """A reward worker in this process; it ends at what it scores, or is late with the tasks of that name."""

    number: int
    ends: bool = False
    late: str = ""
    killed: bool = False
    go: asyncio.Event | None = None
    scored: list[ScoreRequest] = field(default_factory=list)

    async def call(self, message, deadline_s):
        match message:
            case WorkerCommand.START:
                return Started("here", self.number)
            case WorkerCommand.PING:
                return Heartbeat()
            case ScoreRequest():
                self.scored.append(message)
                if message.task.id == self.late:
                    await asyncio.sleep(deadline_s)
                    raise WorkerDied(f"worker {self.number} gave no answer.") from TimeoutError()
                if self.go is not None:
                    await self.go.wait()
                if self.ends or self.killed:
                    raise WorkerDied(f"worker {self.number} is gone.")
                return ScoredEpisode({"solved": 1.0}, 1.0, 0.25)
        return None

    async def kill(self):
        self.killed = True


def workers(made, **changes) -> RewardWorkers:
    async def start(number):
        return made[number]

    timeouts = {"startup_timeout_s": 5, "heartbeat_timeout_s": 5, "restarts": 10, "scoring_timeout_s": 0.05}
    config = ClusterConfig(**{"reward_workers": 1} | timeouts | changes)
    return RewardWorkers("reward worker", config.reward_workers, start, config)


def test_scoring_of_a_lost_reward_worker_is_retried_on_another():
    async def scenario(made):
        rewards = workers(made)
        rewards.reconcile()
        found = await rewards.scored(TASK, PLAYED)
        await rewards.close()
        return found

    made = [LocalRewardWorker(0, ends=True), LocalRewardWorker(1, ends=True), LocalRewardWorker(2)]
    found = asyncio.run(scenario(made))
    assert (found.rewards, found.reward) == ({"solved": 1.0}, 1.0)
    assert found.timings.grading_s == 0.25
    assert found.timings.scoring_s > 0
    assert [len(one.scored) for one in made] == [1, 1, 1]
    assert all(one.killed for one in made)


def test_scoring_timeout_raises_and_is_not_counted_as_worker_loss(caplog):
    async def scenario(made):
        rewards = workers(made)
        rewards.config = rewards.config.model_copy(update={"restarts": 0})
        rewards.reconcile()
        for _ in range(2):
            with pytest.raises(RewardTimeout, match=r"task t took longer than 0\.05 s") as late:
                await rewards.scored(TASK, PLAYED)
            assert isinstance(late.value.__cause__, TimeoutError)  # the ledger notes the clock
        assert (await rewards.scored(replace(TASK, id="another"), PLAYED)).reward == 1.0
        await until(lambda: all(one.killed for one in made[:2]))
        assert rewards.num_lost == 0
        await rewards.close()

    made = [LocalRewardWorker(number, late="t") for number in range(3)]
    asyncio.run(scenario(made))
    assert [len(one.scored) for one in made] == [1, 1, 1]
    assert "reward worker 0 is replaced" in caplog.text


def test_concurrent_scoring_finishes_before_a_timed_out_worker_is_killed():
    async def scenario(made):
        made[0].go = asyncio.Event()
        rewards = workers(made, scorings_per_worker=2)
        rewards.reconcile()
        await rewards.wait_until_full()
        beside = asyncio.create_task(rewards.scored(replace(TASK, id="another"), PLAYED))
        with pytest.raises(RewardTimeout):
            await rewards.scored(TASK, PLAYED)
        await rewards.wait_until_full()
        assert list(rewards.members) == [1]
        assert not made[0].killed
        made[0].go.set()
        assert (await beside).reward == 1.0
        await until(lambda: made[0].killed)
        await rewards.close()

    made = [LocalRewardWorker(0, late="t"), LocalRewardWorker(1)]
    asyncio.run(scenario(made))
    assert [len(one.scored) for one in made] == [2, 0]


def test_episode_that_kills_several_reward_workers_raises_scoring_lost():
    async def scenario(made):
        rewards = workers(made)
        rewards.reconcile()
        with pytest.raises(ScoringLost, match=f"{MAX_ATTEMPTS} reward workers died scoring task t: .*2 is gone"):
            await rewards.scored(TASK, PLAYED)
        made[MAX_ATTEMPTS].ends = False
        assert (await rewards.scored(TASK, PLAYED)).reward == 1.0
        await rewards.close()

    assert ScoringLost.part == "reward"
    asyncio.run(scenario([LocalRewardWorker(number, ends=True) for number in range(MAX_ATTEMPTS + 1)]))


def test_exhausted_reward_worker_pool_raises_worker_died():
    async def scenario(made):
        rewards = workers(made)
        rewards.config = rewards.config.model_copy(update={"restarts": 0})
        rewards.reconcile()
        with pytest.raises(WorkerDied, match="no reward worker left"):
            await rewards.scored(TASK, PLAYED)
        await rewards.close()

    asyncio.run(scenario([LocalRewardWorker(0, ends=True), LocalRewardWorker(1)]))


class InstantLauncher(FakeLauncher):
    """Starts a worker that plays at once, and reward workers."""

    async def start(self, name, spec):
        if spec.role == "reward worker":
            self.made.append(LocalRewardWorker(len(self.made)))
            return self.made[-1]
        remote = await super().start(name, spec)
        inner = remote.call

        async def call(message, deadline_s):
            return PLAYED if isinstance(message, RolloutJob) else await inner(message, deadline_s)

        remote.call = call
        return remote


def test_played_episode_is_scored_by_a_reward_worker():
    async def scenario(url):
        launcher = InstantLauncher([url])
        group = WorkerGroup(plan(engines=1, workers=1, reward_workers=2), launcher)
        assert [need.cpus for need in group.plan.needs] == [1, 1, 1, 1]
        await group.open()
        found = await group.run_attempt(JOB, 5)
        assert (found.rewards, found.reward) == ({"solved": 1.0}, 1.0)
        (job,) = [job for one in launcher.made if isinstance(one, LocalRewardWorker) for job in one.scored]
        assert job == ScoreRequest(JOB.request.task, PLAYED)
        await group.scale(None, None, 3)
        assert sum(isinstance(one, LocalRewardWorker) for one in launcher.made) == 3
        await group.close()
        assert all(one.killed for one in launcher.made)

    fake = Fake()
    with serving(fake):
        asyncio.run(scenario(fake.url))


@pytest.fixture
def host(tmp_path):
    world = tmp_path / "judged.py"
    world.write_text(WORLD)
    words = ["--env.name", str(world), "--cluster.scorings_per_worker", "2", "--run.threads", "1"]
    return WorkerServer(WorkerSpec("reward worker", load_config("search", words), "m", str(tmp_path)), "127.0.0.1")


def test_reward_worker_answers_pings_while_scoring_with_its_world(host, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)

    async def scenario():
        assert isinstance((await host.call(0, WorkerCommand.START)).take(), Started)
        played = [replace(PLAYED, sample=n, tags={"waits": str(tmp_path)}) for n in (1, 2)]
        both = [asyncio.create_task(host.call(one.sample, ScoreRequest(TASK, one))) for one in played]
        await until(lambda: len(list(tmp_path.glob("begun-*"))) == 2)  # two at once, as set
        assert (await host.call(3, WorkerCommand.PING)).take() == Heartbeat(in_flight=2)
        (tmp_path / "go").touch()
        for one in both:
            found = (await one).take()
            assert (found.parts, found.total) == ({"solved": 1.0, "shape": 0.5}, 1.05)
            assert found.seconds > 0
        with pytest.raises(WorldError, match=r"A reward of task broken raised .*no such verdict"):
            (await host.call(4, ScoreRequest(Task("broken", (), None), played[0]))).take()
        (await host.call(5, WorkerCommand.SHUTDOWN)).take()

    asyncio.run(scenario())


@dataclass
class LocalRewardHost:
    """A reward worker's host in this process, which is asked as one elsewhere is."""

    host: WorkerServer
    scored: list[ScoreRequest] = field(default_factory=list)

    async def call(self, message, deadline_s):
        number = len(self.scored) + 1000 * (message is WorkerCommand.PING)
        if isinstance(message, ScoreRequest):
            self.scored.append(message)
        try:
            async with asyncio.timeout(deadline_s):
                return (await asyncio.shield(self.host.call(number, message))).take()
        except asyncio.CancelledError:
            self.host.cancel(number)
            raise
        except TimeoutError as error:
            self.host.cancel(number)
            raise WorkerDied("It gave no answer.") from error

    async def kill(self):
        pass


def test_cancelled_scoring_keeps_its_slot_until_it_has_ended(host, monkeypatch, tmp_path):
    """Its thread cannot be interrupted: the clock of the next one would run while that waits for it."""
    monkeypatch.chdir(tmp_path)
    places = [tmp_path / "first", tmp_path / "next"]

    async def scenario():
        near = LocalRewardHost(host)
        rewards = workers([near], scoring_timeout_s=20)
        rewards.reconcile()
        for place in places:
            place.mkdir()
        played = [replace(PLAYED, sample=n, tags={"waits": str(place)}) for n, place in enumerate(places)]
        given_up = asyncio.create_task(rewards.scored(TASK, played[0]))
        await until((places[0] / "begun-0").exists, 10)
        given_up.cancel()
        (places[1] / "go").touch()
        following = asyncio.create_task(rewards.scored(TASK, played[1]))
        await asyncio.sleep(0.1)
        assert len(near.scored) == 1
        (places[0] / "go").touch()
        assert (await following).reward == 1.05
        assert given_up.cancelled()
        await rewards.close()

    asyncio.run(scenario())


def test_rollout_worker_does_not_score_when_reward_workers_are_configured():
    scheduler = make_scheduler(scripted(lambda request, turn: "Paris"), RecordingWorld())
    (job,) = make_requests(1)
    assert asyncio.run(scheduler.attempt(job)).rewards
    scheduler.scores = False
    assert asyncio.run(scheduler.attempt(job)).rewards == {}


def test_environment_bound_rewards_with_reward_workers_raise_config_error():
    class OwnRewardEnv(RecordingEnv):
        """An environment whose own method is its reward, or which has other rewards than its world."""

        bound = True

        def looks(self, task, trajectory):
            return float(len(self.events))

        @property
        def rewards(self):
            return (Reward("right", self.looks, outcome=True),) if self.bound else ()

    class World(RecordingWorld):
        def environment(self, task):
            inner = super().environment(task)
            return OwnRewardEnv(inner.inner, inner.number, inner.hooks)

    for bound, words in ((True, "'right' is a method of the environment"), (False, "have other rewards")):
        OwnRewardEnv.bound = bound
        scheduler = make_scheduler(scripted(lambda request, turn: "Paris"), World())
        scheduler.scores = False
        with pytest.raises(ConfigError, match=words):
            asyncio.run(scheduler.attempt(make_requests(1)[0]))


def test_reward_workers_do_not_get_the_token_of_the_engines():
    own = plan()
    own = replace(own, spec=replace(own.spec, token="secret"))
    assert own.spec_of("engine").token == own.spec_of("worker").token == "secret"
    assert own.spec_of("reward worker").token == ""
