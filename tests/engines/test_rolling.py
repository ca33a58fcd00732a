"""Rolling weight updates: which engine starts an episode, which one updates, and that no request waits.

The simulated runs have the real stream, admission and placement; clock, episodes, engines and learner are
made up. What goes over the wire is tried with servers that speak as vLLM does, and with two embedded engines.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ludus.cluster.protocol import RolloutJob
from ludus.cluster.supervisor import WorkerGroup
from ludus.diagnostics.trackers import read_metrics
from ludus.engines.base import WeightCheck
from ludus.engines.embedded.engine import EngineSettings, LocalEngine
from ludus.engines.models.loading import load_model, load_tokenizer
from ludus.engines.remote.engine import ServerEngine
from ludus.engines.remote.http_client import RemoteEngineSettings, Replica
from ludus.engines.remote.rolling_update import EpisodePin, Placement, RollingUpdates
from ludus.errors import EngineError, SyncError
from ludus.rollouts.group_queue import GroupQueue
from ludus.rollouts.ledger import RolloutKey
from ludus.rollouts.rollout_files import read_rollouts, rollouts_path
from ludus.rollouts.scheduler import Episode, episode_name
from ludus.rollouts.stream_control import StalenessController, StalenessSchedule
from ludus.training.rl.async_trainer import track_version
from ludus.types import Segment, StopReason, Trajectory
from tests.cluster.test_cluster import JOB, QUICK, FakeLauncher, ask, plan, views
from tests.engines.test_engine_server import Fake, serving
from tests.rollouts.test_admission import TASK, FakeLoop, World
from tiny_run import cold_start, ludus, make_recipe
from waiting import until

TOKEN = "a token of these tests"


def engines(count: int, lag: int = 1) -> Placement:
    return Placement([Replica(f"http://{i}", RemoteEngineSettings()) for i in range(count)], 0, lag)


def publish(placement: Placement, version: int) -> list[str]:
    """New weights, which all engines that hold others are to take; gives those that may at once."""
    for one in placement.replicas:
        one.stale_version = placement.latest if one.stale_version is None else one.stale_version
    placement.latest = version
    return [one.url for one in placement.due_updates()]


def take(placement: Placement, *numbers: int) -> None:
    for number in numbers:
        placement.replicas[number].stale_version = None
    placement.due_updates()


def test_idle_engine_updates_at_once_and_busy_engine_after_its_episodes():
    placement = engines(2)
    assert placement.begin("a") == EpisodePin("http://0", 0)
    assert publish(placement, 1) == ["http://1"]
    take(placement, 1)
    assert placement.begin("b") == placement.begin("c") == EpisodePin("http://1", 1)  # busier, but the other waits
    assert placement.min_version == 1
    placement.end("a")
    assert [one.url for one in placement.due_updates()] == ["http://0"]


def test_engine_with_fewer_episodes_drains_while_the_other_keeps_serving():
    placement = engines(2)
    for name in "abc":
        placement.begin(name)
    assert publish(placement, 1) == []
    assert [placement.begin(name).url for name in "de"] == ["http://0"] * 2  # 1 has fewer, so it waits
    assert placement.min_version == 0
    placement.end("b")
    placement.due_updates()
    take(placement, 1)
    assert placement.begin("f") == EpisodePin("http://1", 1)
    assert placement.min_version == 1


def test_open_and_draining_engines_swap_beyond_the_version_lag():
    placement = engines(2, lag=1)
    for name in "abc":
        placement.begin(name)
    for version in (1, 2):
        publish(placement, version)
        assert [one.url for one in placement.open] == ["http://0"]
    publish(placement, 3)
    assert [one.url for one in placement.open] == ["http://1"]


def test_half_of_the_engines_drain_and_more_when_too_stale():
    placement = engines(4, lag=1)
    for i in range(8):
        placement.begin(str(i))
    publish(placement, 1)
    assert len(placement.open) == 2
    publish(placement, 2)
    assert len(placement.open) == 1  # never none


def test_no_episode_starts_on_an_older_version_if_the_newest_engine_dies():
    placement = engines(2)
    placement.begin("a")
    publish(placement, 1)
    take(placement, 1)
    assert placement.min_version == 1
    placement.replicas.pop().removed = True
    placement.due_updates()
    assert placement.begin("b") is None
    placement.replicas.append(Replica("http://2", RemoteEngineSettings()))
    assert placement.begin("b") == EpisodePin("http://2", 1)


def test_episodes_wait_for_an_engine_with_the_newest_weights():
    placement = engines(2)
    placement.begin("a")
    placement.begin("b")
    publish(placement, 1)
    assert len(placement.open) == 1
    placement.min_version = placement.latest
    assert placement.begin("c") is None
    placement.end("b")
    assert [one.url for one in placement.due_updates()] == ["http://1"]
    take(placement, 1)
    assert placement.begin("c") == EpisodePin("http://1", 1)


@dataclass
class EngineFleetWorld(World):
    """A world whose episodes stay at an engine. `dying` is the chance that an engine dies in a step."""

    engines: int = 2
    lag: int = 1
    dying: float = 0.0
    rolling: RollingUpdates = field(init=False)
    log: list = field(default_factory=list)
    begun: list = field(default_factory=list)

    def __post_init__(self):
        self.rolling = RollingUpdates(engines(self.engines, self.lag), self.hold, self.give, self.lives)

    async def lives(self, url):
        return True

    async def give(self, replica, check):
        await asyncio.sleep(self.draw("give", replica.url, check.version).random())
        replica.stale_version = None

    async def play(self, job, attempt=0):
        name, draw = f"{job.key}/{attempt}", self.draw(job.key, attempt)
        pin = await self.rolling.place(name)
        (replica,) = (one for one in self.rolling.placement.replicas if one.url == pin.url)
        self.log.append(("begin", job.key, pin.version))
        try:
            await asyncio.sleep(self.seconds(job, draw))
        finally:
            self.rolling.release(name)
        if replica.removed:
            return await self.play(job, attempt + 1)
        versions = (pin.version, self.rolling.placement.version_of(replica))
        self.lengths[job.key] = 0.0
        self.log.append(("end", job.key, pin.version))
        action = Segment("action", (1, 2), logprobs=(0.0, 0.0), versions=versions)
        return Episode(job.key, TASK, Trajectory("t", job.key.sample, (action,), (), StopReason.ANSWERED))

    def seconds(self, job, draw):
        return draw.lognormvariate(0, 1) * (20 if draw.random() < 0.1 else 1)

    def dies(self, step):
        """An engine dies, and another joins in its place."""
        draw, replicas = self.draw("dies", step), self.rolling.placement.replicas
        if draw.random() < self.dying:
            replicas.pop(draw.randrange(len(replicas))).removed = True
            replicas.append(Replica(f"http://new-{step}", RemoteEngineSettings()))
            self.rolling.start_due_updates()

    async def hold(self, version, state):
        for one in self.rolling.placement.replicas:
            one.stale_version = version - 1 if one.stale_version is None else one.stale_version

    async def push_weights(self, step):
        await self.rolling.push_weights(WeightCheck(step, (), lambda *_: None, 1e6), {})


def train(
    fleet: EngineFleetWorld, pace: StalenessSchedule, in_flight=8, learning=1.0, evaluates=0
) -> list[list[Episode]]:
    """The episodes that trained, by step; the events are in the log of the fleet."""

    async def run():
        stream = GroupQueue(StalenessController(pace), fleet, fleet.play, in_flight)
        stream.start()
        following = asyncio.create_task(track_version(stream, fleet.rolling, 0))
        trained = []
        for step in range(1, pace.last_step + 1):
            batch = await stream.take()
            trained.append([episode for group in batch.groups for episode in group.episodes])
            await asyncio.sleep(fleet.draw("learner", step).random() * learning)
            await fleet.push_weights(step)
            stream.on_publish(step, everywhere=False)
            fleet.log.append(("published", step))
            fleet.dies(step)
            if evaluates and step % evaluates == 0:
                await fleet.rolling.wait_until_current()
                fleet.log.append(("newest", step, fleet.rolling.placement.min_version))
        assert stream.num_in_flight == stream.num_waiting == 0
        following.cancel()
        async with fleet.rolling.pause_transfers():
            fleet.rolling.close()
        return trained

    loop = FakeLoop()
    try:
        return loop.run_until_complete(run())
    finally:
        loop.close()


def versions_of(episode: Episode) -> set[int]:
    return {version for segment in episode.trajectory.segments for version in segment.versions}


PACES = st.builds(StalenessSchedule, st.integers(1, 4), st.integers(0, 5), st.integers(1, 12))


@settings(max_examples=25, deadline=None)
@given(
    pace=PACES,
    seed=st.integers(0, 10**6),
    count=st.integers(1, 5),
    in_flight=st.integers(1, 30),
    learning=st.sampled_from([0.01, 1.0, 30.0]),
    dying=st.sampled_from([0.0, 0.3]),
    evaluates=st.sampled_from([0, 3]),
)
def test_trained_episodes_use_one_version_within_the_staleness_bound(
    pace, seed, count, in_flight, learning, dying, evaluates
):
    fleet = EngineFleetWorld(seed, engines=count, lag=pace.max_staleness // 2, dying=dying)
    trained = train(fleet, pace, in_flight, learning, evaluates)
    for step, episodes in enumerate(trained, 1):
        for episode in episodes:
            (version,) = versions_of(episode)
            assert 0 <= step - 1 - version <= pace.max_staleness
    keys = [episode.key for episodes in trained for episode in episodes]
    assert len(set(keys)) == len(keys) == len(fleet.lengths) == 2 * pace.groups_per_step * pace.last_step
    assert all(event[1] == event[2] for event in fleet.log if event[0] == "newest")


class LosingWorld(EngineFleetWorld):
    """What it holds has gone from under it."""

    async def give(self, replica, check):
        raise FileNotFoundError("model.safetensors")


def test_transfer_error_propagates_to_the_learner_waiting_for_weights():
    async def run():
        fleet = LosingWorld(0)
        stream = GroupQueue(StalenessController(StalenessSchedule(1, 0, 4)), fleet, fleet.play, 4)
        stream.start()
        following = asyncio.create_task(track_version(stream, fleet.rolling, 0))
        await stream.take()
        await fleet.push_weights(1)
        stream.on_publish(1, everywhere=False)
        await asyncio.wait_for(stream.take(), 60)
        await following

    loop = FakeLoop()
    try:
        with pytest.raises(FileNotFoundError, match="safetensors"):
            loop.run_until_complete(run())
    finally:
        loop.close()


class OneSlowWorld(EngineFleetWorld):
    """The first episode takes a thousand times as long as each other."""

    def seconds(self, job, draw):
        return 1000.0 if (job.key.step, job.key.sample) == (0, 0) else 1.0


@pytest.mark.parametrize(("bound", "last"), [(2, 2), (6, 6)])
def test_learner_waits_for_a_slow_episode_only_at_the_staleness_bound(bound, last):
    """The group that it belongs to begins at version 0, so that step `bound + 1` has to have it."""
    fleet = OneSlowWorld(1, engines=2, lag=bound // 2)
    train(fleet, StalenessSchedule(2, bound, 10), in_flight=6)
    slow = next(i for i, event in enumerate(fleet.log) if event[0] == "begin")
    key = fleet.log[slow][1]
    end = next(i for i, event in enumerate(fleet.log) if event[:2] == ("end", key))
    beside = fleet.log[slow:end]
    assert [event[1] for event in beside if event[0] == "published"] == list(range(1, last + 1))
    assert {event[2] for event in beside if event[0] == "end"} > {0}  # while it stayed at 0


CHECKED: list = []
CHECK = WeightCheck(8, (1, 2, 3), lambda theirs, scores: CHECKED.append((theirs, scores)), 20)
STATE = {"w": torch.zeros(2)}


def label(*fakes: Fake) -> list[str]:
    return [fake.label for fake in fakes]


@dataclass
class Vllm(Fake):
    """It knows no digest of all weights, and refuses what comes to a path."""

    refuses: str = "none"

    def answer(self, path, body):
        if path.startswith(self.refuses):
            return 400, {"error": "not today"}
        if path == "/fingerprint":
            return 404, {}
        return super().answer(path, body)


@pytest.fixture
def pair():
    first, second = Vllm(tells_versions=True), Vllm(tells_versions=True)
    with serving(first, second) as engine:
        yield engine, first, second


async def rolled(engine: ServerEngine) -> RollingUpdates:
    await engine.load_weights(7, STATE)
    CHECKED.clear()
    return await engine.roll(1)


def test_replica_loads_and_verifies_weights_after_its_episodes_end(pair):
    engine, first, second = pair

    async def scenario():
        rolling = await rolled(engine)
        assert (await ask(engine, "slow")).versions == (7, 7)
        await rolling.push_weights(CHECK, STATE)
        assert await rolling.wait_for_version(7) == 8
        assert label(first, second) == ["7", "8"]
        assert CHECKED == [(None, [0.0, -2.0, -2.0])]
        assert (await ask(engine, "quick")).versions == (8, 8)
        assert (await ask(engine, "slow")).versions == (7, 7)
        engine.release("slow")
        await until(lambda: label(first, second) == ["8", "8"], 10)
        await until(lambda: len(CHECKED) == 2, 10)
        await engine.close()

    asyncio.run(scenario())


def test_episode_moves_between_turns_to_let_its_engine_update(pair):
    engine, first, second = pair
    engine._settings = replace(engine._settings, moves_episodes=True)

    async def scenario():
        rolling = await rolled(engine)
        assert (await ask(engine, "slow")).versions == (7, 7)
        assert rolling.move("slow") is None  # its engine is open
        await rolling.push_weights(CHECK, STATE)
        assert await rolling.wait_for_version(7) == 8
        assert label(first, second) == ["7", "8"]
        assert (await ask(engine, "slow")).versions == (8, 8)
        await until(lambda: label(first, second) == ["8", "8"], 10)  # though the episode goes on
        assert (await ask(engine, "slow")).versions == (8, 8)
        engine.release("slow")
        await engine.close()

    asyncio.run(scenario())


def test_pinned_episode_fails_when_its_server_loses_the_weights(pair):
    engine, first, second = pair

    async def scenario():
        rolling = await rolled(engine)
        await ask(engine, "slow")
        await rolling.push_weights(CHECK, STATE)
        await rolling.wait_for_version(7)
        first.label = "default"  # it was started anew, unseen
        with pytest.raises(EngineError, match="lost weights 7, to which an episode is pinned"):
            await ask(engine, "slow")
        assert first.label == "8"
        engine.release("slow")
        assert (await ask(engine, "again")).versions == (8, 8)
        engine.leave(first.url)
        engine.leave(second.url)
        with pytest.raises(EngineError, match="was removed; its episodes are pinned to version 8"):
            await ask(engine, "again")
        await engine.close()

    asyncio.run(scenario())


def wrong(theirs, scores):
    raise SyncError("The probe is off.")


@pytest.mark.parametrize(
    ("changes", "check", "words"),
    [
        ({"digests": {"w": "0" * 64}}, CHECK, "does not hold the weights of version 8"),
        ({"refuses": "/collective_rpc"}, CHECK, "failed to load weights 8: .* not today"),
        ({}, replace(CHECK, check=wrong), "The probe is off"),
        ({}, replace(CHECK, deadline_s=0.0), "took longer than 0 s"),
    ],
)
def test_failed_weight_load_or_verification_raises_in_all_waiters(pair, changes, check, words):
    engine, first, second = pair

    async def scenario():
        rolling = await rolled(engine)
        for fake in (first, second):
            vars(fake).update(changes)
        await rolling.push_weights(check, STATE)
        for waits in (rolling.wait_for_version(7), rolling.wait_until_current(), ask(engine)):
            with pytest.raises(SyncError, match=words):
                await waits
        await engine.close()

    asyncio.run(scenario())


def jobs(remote) -> list[RolloutJob]:
    return [message for message in remote.said if isinstance(message, RolloutJob)]


def test_worker_keeps_pinned_replica_and_replacement_engine_gets_newest_weights():
    async def scenario(fakes):
        launcher = FakeLauncher([fake.url for fake in fakes])
        group = WorkerGroup(plan(), launcher)
        await group.open()
        await group.load_weights(7, STATE)
        await group.roll(1)
        first = asyncio.create_task(group.run_attempt(JOB, 60))
        workers = [remote for remote in launcher.made if not remote.url]
        await until(lambda: sum(map(len, map(jobs, workers))) == 1, 10)
        (sent,) = (job for worker in workers for job in jobs(worker))
        stays = next(fake for fake in fakes if fake.url == sent.pin.url)
        other = next(fake for fake in fakes[:2] if fake is not stays)
        assert sent.pin.version == 7
        await group.push_weights(CHECK, STATE)
        assert await group.rolling.wait_for_version(7) == 8
        assert (stays.label, other.label) == ("7", "8")
        later = asyncio.create_task(group.run_attempt(replace(JOB, request=replace(JOB.request, greedy=True)), 60))
        await until(lambda: sum(map(len, map(jobs, workers))) == 2, 10)
        pins = [job.pin for worker in workers for job in jobs(worker)]
        assert EpisodePin(other.url, 8) in pins
        next(remote for remote in launcher.made if remote.url == stays.url).dead = True
        await until(lambda: fakes[2].label == "8", 20)
        for task in (first, later):
            task.cancel()
        await asyncio.gather(first, later, return_exceptions=True)
        await group.close()

    fakes = [Vllm(), Vllm(), Vllm()]
    with serving(*fakes):
        asyncio.run(scenario(fakes))


def test_removed_engine_is_killed_only_after_its_episodes_end():
    async def scenario(fakes):
        launcher = FakeLauncher([fake.url for fake in fakes])
        group = WorkerGroup(plan(), launcher)
        await group.open()
        await group.load_weights(7, STATE)
        await group.roll(1)
        workers = [remote for remote in launcher.made if not remote.url]
        attempts = [asyncio.create_task(group.run_attempt(JOB, 60))]
        await until(lambda: sum(map(len, map(jobs, workers))) == 1, 10)
        (sent,) = (job for worker in workers for job in jobs(worker))
        goes = sent.pin.url
        assert next(iter(group.engines.members.values())).started.url == goes
        await group.scale(1)
        later = replace(JOB, request=replace(JOB.request, key=RolloutKey(2, "t", 0)))
        attempts.append(asyncio.create_task(group.run_attempt(later, 60)))
        await until(lambda: sum(map(len, map(jobs, workers))) == 2, 10)
        (begun,) = (job for worker in workers for job in jobs(worker) if job.request == later.request)
        assert begun.pin.url != goes
        assert all(goes in views(worker)[-1].urls for worker in workers)
        attempts[0].cancel()
        await until(lambda: all(goes not in views(worker)[-1].urls for worker in workers), 10)
        await until(lambda: next(one for one in launcher.made if one.url == goes).killed, 10)
        attempts[1].cancel()
        await asyncio.gather(*attempts, return_exceptions=True)
        await group.close()

    fakes = [Vllm(), Vllm()]
    with serving(*fakes):
        asyncio.run(scenario(fakes))


def test_worker_rejects_weights_of_a_version_other_than_the_pinned_one(pair):
    _, first, second = pair

    async def scenario():
        engine = ServerEngine([first.url], "vllm", QUICK)
        engine.follow([first.url], 8, None)
        first.label, second.label = "7", "8"
        name = episode_name(JOB.request.key)
        engine.pin(name, EpisodePin(first.url, 7))  # one that lags; this worker is new and never heard of 7
        assert (await ask(engine, name)).versions == (7, 7)
        engine.pin("new", EpisodePin(second.url, 8))  # it joined a moment ago
        assert (await ask(engine, "new")).versions == (8, 8)
        first.label = "8"
        with pytest.raises(EngineError, match="holds unknown weights 8"):
            await ask(engine, name)
        await engine.close()

    asyncio.run(scenario())


@contextmanager
def embedded(path, count: int):
    """Embedded engines of a model, each behind HTTP in this process."""
    import uvicorn

    from ludus.gateway.app import make_app
    from ludus.gateway.limits import open_socket
    from ludus.gateway.service import CompletionService, served_model

    made, servers = [], []
    for _ in range(count):
        tokenizer, model = load_tokenizer(str(path)), load_model(str(path), "float32", "cpu")
        engine = LocalEngine(model, tokenizer, EngineSettings(context_tokens=320), copy=False)
        app = make_app(
            CompletionService(engine, served_model(model, tokenizer, "policy", str(path), None), TOKEN), model
        )
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off"))
        listener = open_socket("127.0.0.1", 0)
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        servers.append((server, thread))
        made.append((engine, f"http://127.0.0.1:{listener.getsockname()[1]}"))
    try:
        yield made
    finally:
        for server, thread in servers:
            server.should_exit = True
            thread.join()
        for engine, _ in made:
            asyncio.run(engine.close())


SLOW = """
import asyncio
import tiny_world
from dataclasses import dataclass
from ludus.envs.tool_world import ToolWorld
from tests.engines.test_rolling import ORDER

@dataclass
class SlowEngine:
    inner: object
    def __getattr__(self, name):
        return getattr(self.inner, name)
    async def step(self, action):
        await ORDER.step()
        return await self.inner.step(action)

class SlowWorld(ToolWorld):
    def environment(self, task):
        found = super().environment(task)
        return SlowEngine(found) if task.id.startswith("train:") else found

def make_world(settings, limits):
    return SlowWorld(**vars(tiny_world.make_world(settings, limits)))
"""


@dataclass
class Order:
    """The first call of training lasts until two versions have been in use at once, after two steps."""

    engines: list = field(default_factory=list)
    metrics: Path = Path()
    begun: bool = False
    before: int | None = None
    seen: list = field(default_factory=list)

    async def step(self):
        if self.begun:
            return
        self.begun = True
        deadline = time.monotonic() + 150
        while not self.both_in_use():
            assert time.monotonic() < deadline
            await asyncio.sleep(0.02)
        self.seen.append((self.steps(), *sorted(engine.version for engine in self.engines)))

    def steps(self) -> int:
        return len(read_metrics(self.metrics)) if self.metrics.exists() else 0

    def both_in_use(self) -> bool:
        """Whether the newer engine has sampled since it was newer."""
        old, new = sorted(self.engines, key=lambda engine: engine.version)
        if old.version == new.version:
            return False
        sampled = new.stats().decode_tokens
        self.before = sampled if self.before is None else self.before
        return self.steps() >= 2 and sampled > self.before


ORDER = Order()


@pytest.mark.cluster
def test_two_engine_run_keeps_training_during_a_slow_episode(tiny_run, tmp_path):
    world, folder, token_file = tmp_path / "slow.py", tmp_path / "run", tmp_path / "token"
    world.write_text(SLOW)
    token_file.write_text(TOKEN)
    bound, steps = 6, 8
    settings_of_run = {
        "env.name": world,
        "env.check": "false",
        "training.mode": "async",
        "training.steps": steps,
        "training.checkpoint_every": steps,
        "staleness.max_staleness": bound,
        "staleness.in_flight_weight_updates": "false",
        "staleness.max_concurrent_rollouts": 6,
        "rollout.environment_timeout_s": 200,
        "staleness.min_ess": 0,
        "evaluation.every": 2,
        "evaluation.tasks": 2,
        "run.dir": folder,
        "engine.token_file": token_file,
    }
    start = cold_start(tiny_run)
    words = [word for key, value in settings_of_run.items() for word in (f"--{key}", value)]
    with embedded(start, 2) as made:
        vars(ORDER).update(vars(Order([engine for engine, _ in made], folder / "metrics.jsonl")))
        urls = ",".join(url for _, url in made)
        said = ludus("train", make_recipe(tmp_path), "--model", start, "--engine.url", urls, *words)
        assert said.code == 0, said
        assert [engine.version for engine, _ in made] == [steps, steps]
    ((steps_done, old, new),) = ORDER.seen
    assert steps_done >= 2
    assert old < new
    ages, found = set(), []
    for step in range(1, steps + 1):
        for record in read_rollouts(rollouts_path(folder, step)):
            (version,) = {v for s in record.trajectory.segments for v in s.versions}
            ages.add(step - 1 - version)
            found.append(record.key)
    assert max(ages) <= bound
    assert len(set(found)) == len(found) == steps * 9
    evaluations = list((folder / "evaluations").glob("*.json"))
    assert len(evaluations) >= 5
    for path in evaluations:
        played = list(read_rollouts(path.with_suffix(".jsonl.gz")))
        versions = {v for record in played for s in record.trajectory.segments for v in s.versions}
        assert versions == {json.loads(path.read_text())["plan"]["step"]}
    rows = [row.metrics for row in read_metrics(folder / "metrics.jsonl")]
    assert sum(m.get("sync/engines", 0) for m in rows) >= 2
    assert max(m.get("sync/probe_gap", 0) for m in rows) < 1e-3
