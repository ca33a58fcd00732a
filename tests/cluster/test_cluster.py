"""Parts of a cluster: worker pools, lost workers, routing of episodes to engines, and a real worker process."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from cluster_runs import all_gone
from ludus.cluster.cluster import check_cluster
from ludus.cluster.local_launcher import LocalLauncher, LocalWorkerHandle
from ludus.cluster.protocol import (
    MAX_RECORDS,
    EngineSet,
    Heartbeat,
    LogForwarder,
    RolloutJob,
    Started,
    WorkerCommand,
    WorkerDied,
    WorkerResponse,
    WorkerSpec,
    decode_request,
    decode_response,
    encode_request,
    encode_response,
    failure_response,
    log_records,
)
from ludus.cluster.supervisor import ClusterPlan, WorkerGroup, WorkerLost
from ludus.cluster.worker_pool import WorkerPool
from ludus.cluster.workers import RolloutWorker, sandbox_of
from ludus.config import load_config
from ludus.config.sections.cluster import ClusterConfig
from ludus.engines.base import EngineStats, Request, combined
from ludus.engines.remote.engine import ServerEngine
from ludus.engines.remote.http_client import HttpStatusError, RemoteEngineSettings
from ludus.errors import ConfigError, EngineError, SyncError, UserError, WorldError
from ludus.ipc import read_frame, split_number
from ludus.rollouts.ledger import RolloutKey
from ludus.rollouts.scheduler import RolloutRequest, SamplingPlan
from ludus.types import SamplingParams, StopReason, Task, Trajectory
from served import COLD_START
from small_worlds import RecordingWorld, call, make_requests, make_scheduler, scripted, tool_of
from tests.engines.test_engine_server import Fake, serving
from waiting import until

JOB = RolloutJob(RolloutRequest(RolloutKey(1, "t", 0), Task("t", (), None)), SamplingPlan("train", 1.0, 0))
QUICK = RemoteEngineSettings(timeout_s=5, connect_timeout_s=0.2, backoff_s=0.01)


@dataclass
class FakeRemote:
    """A role that does what it is told to do. `dead` ones raise, `silent` ones never answer."""

    number: int
    url: str = ""
    dead: bool = False
    silent: bool = False
    killed: bool = False
    said: list = field(default_factory=list)
    under_way: int = 0

    async def call(self, message, deadline_s):
        self.said.append(message)
        if self.dead or self.killed:
            raise WorkerDied(f"{self.number} is gone.")
        if self.silent or isinstance(message, RolloutJob):
            try:
                async with asyncio.timeout(deadline_s):
                    while not (self.dead or self.killed):
                        await asyncio.sleep(0.005)
            except TimeoutError as error:
                raise WorkerDied(f"{self.number} is silent.") from error
            raise WorkerDied(f"{self.number} is gone.")
        match message:
            case WorkerCommand.START:
                return Started("here", self.number, self.url)
            case WorkerCommand.PING:
                return Heartbeat(in_flight=self.under_way)
        return None

    async def kill(self):
        self.killed = True


class FakeLauncher:
    """Starts such roles; `urls` are those of the engines, in their order."""

    host = ""

    def __init__(self, urls=()) -> None:
        self.urls = list(urls)
        self.made: list[FakeRemote] = []

    async def start(self, name, spec):
        url = self.urls.pop(0) if spec.role == "engine" else ""
        self.made.append(FakeRemote(len(self.made), url))
        return self.made[-1]

    async def close(self):
        pass


def make_pool(start, target=2, restarts=3, heartbeat_timeout_s=0.1, **limits: float) -> tuple[WorkerPool, list, list]:
    joined, left = [], []

    async def on_joined(member):
        joined.append(member.number)

    async def on_left(member):
        left.append(member.number)

    config = ClusterConfig(startup_timeout_s=5, heartbeat_timeout_s=heartbeat_timeout_s, restarts=restarts)
    return WorkerPool("worker", target, start, config, on_joined, on_left, **limits), joined, left


def recorded() -> tuple[list, object]:
    """What was started so far, and what starts it."""
    made = []

    async def start(number):
        made.append(FakeRemote(number))
        return made[-1]

    return made, start


def test_pool_keeps_members_when_growing_and_stops_the_rest_when_shrinking():
    async def scenario():
        made, start = recorded()
        pool, joined, left = make_pool(start)
        pool.reconcile()
        await pool.wait_until_full()
        pool.target = 4
        pool.reconcile()
        await pool.wait_until_full()
        assert (sorted(pool.members), sorted(joined), left) == ([0, 1, 2, 3], [0, 1, 2, 3], [])
        pool.target = 1
        pool.reconcile()
        await until(lambda: len(left) == 3, 10)
        assert len(pool.members) == 1
        assert pool.num_lost == 0
        await pool.close()
        assert (len(made), all(remote.killed for remote in made)) == (4, True)

    asyncio.run(scenario())


def test_pool_replaces_dead_and_unresponsive_members():
    async def scenario():
        made, start = recorded()
        pool, joined, left = make_pool(start)
        pool.reconcile()
        await pool.wait_until_full()
        made[0].dead = made[1].silent = True
        await until(lambda: sorted(pool.members) == [2, 3], 10)
        assert sorted(joined) == [0, 1, 2, 3]
        assert sorted(left) == [0, 1]
        assert made[0].killed
        assert made[1].killed
        assert pool.num_lost == 2
        await pool.close()
        assert all(remote.killed for remote in made)

    asyncio.run(scenario())


def test_pool_exceeding_its_restart_limit_raises_the_last_error():
    async def scenario():
        async def start(number):
            return FakeRemote(number)

        pool, _, _ = make_pool(start, target=1, restarts=1)
        pool.reconcile()
        await pool.wait_until_full()
        for _ in range(2):
            await pool.wait_for_any()
            (member,) = pool.members.values()
            await pool.replace_dead(member, WorkerDied("The machine burns."))
        with pytest.raises(WorkerDied, match="no worker left: The machine burns") as caught:
            await pool.wait_for_any()
        assert caught.value.exit_code == 7
        await pool.close()

    asyncio.run(scenario())


def test_pool_raises_the_start_error_of_its_first_member_immediately():
    async def scenario():
        async def start(number):
            raise UserError("There is no folder.", "Make one.")

        pool, _, _ = make_pool(start)
        pool.reconcile()
        with pytest.raises(UserError, match=r"There is no folder\. Make one\."):
            await pool.wait_until_full()
        await pool.close()

    asyncio.run(scenario())


def test_pool_with_one_member_left_retries_failed_starts_with_exponential_backoff(caplog):
    async def scenario():
        loop, tries, room = asyncio.get_running_loop(), [], [True]

        async def start(number):
            tries.append(loop.time())
            if number > 1 and not room:
                raise WorkerDied("There is no room.")
            return FakeRemote(number)

        pool, _, _ = make_pool(start, restarts=2, wait_s=0.02, longest_wait_s=0.08)
        pool.reconcile()
        await pool.wait_until_full()
        room.clear()
        await pool.replace_dead(pool.members[1], WorkerDied("Its machine is gone."))
        await until(lambda: len(tries) >= 8)
        await pool.wait_for_any()
        assert (list(pool.members), pool.failed) == ([0], None)
        waits = [after - before for before, after in itertools.pairwise(tries[2:])]
        assert all(wait > 0.9 * least for wait, least in zip(waits, (0.02, 0.04, 0.08, 0.08), strict=False))
        room.append(True)
        await until(lambda: len(pool.members) == 2)
        await pool.close()

    asyncio.run(scenario())
    assert "did not start: There is no room" in caplog.text


def test_pool_that_cannot_start_all_members_runs_with_fewer():
    async def scenario():
        async def start(number):
            await asyncio.sleep(0.01 * number)
            if number >= 2:
                raise UserError("There is no room.")
            return FakeRemote(number)

        pool, _, _ = make_pool(start, target=0)
        await pool.wait_until_full()
        pool, _, _ = make_pool(start, target=4, wait_s=60.0)
        pool.reconcile()
        await asyncio.wait_for(pool.wait_until_full(), 10)
        assert sorted(pool.members) == [0, 1]
        await pool.close()

    asyncio.run(scenario())


def test_empty_pool_without_replacements_raises_the_start_error():
    async def scenario():
        async def start(number):
            if number:
                raise UserError("There is no room.")
            return FakeRemote(number)

        pool, _, _ = make_pool(start, target=1, restarts=3, wait_s=0.01)
        pool.reconcile()
        await pool.wait_until_full()
        await pool.replace_dead(pool.members[0], WorkerDied("It is gone."))
        with pytest.raises(UserError, match="no worker left: There is no room"):
            await pool.wait_for_any()
        assert pool.num_lost == 4
        await pool.close()

    asyncio.run(scenario())


@pytest.mark.parametrize(("proven_s", "goes_on"), [(0.0, True), (600.0, False)])
def test_pool_forgets_losses_after_a_member_has_run_long_enough(proven_s, goes_on):
    async def scenario():
        _, start = recorded()
        pool, _, _ = make_pool(start, target=1, restarts=2, proven_s=proven_s)
        pool.reconcile()
        for _ in range(3):
            await pool.wait_for_any()
            (member,) = pool.members.values()
            await pool.replace_dead(member, WorkerDied("It is gone."))
        assert (pool.failed is None) == goes_on
        await pool.close()

    asyncio.run(scenario())


def test_member_leaving_a_pool_finishes_its_work_first():
    async def scenario():
        made = []

        async def start(number):
            made.append(FakeRemote(number))
            return made[-1]

        pool, _, left = make_pool(start, heartbeat_timeout_s=5)
        pool.reconcile()
        await pool.wait_until_full()
        member = await pool.take(1)
        other = await pool.take(1)
        assert {member.number, other.number} == {0, 1}
        await pool.release(other)
        pool.target = 1
        pool.reconcile()
        await until(lambda: left)
        assert left == [other.number]
        pool.target = 0
        pool.reconcile()
        await until(lambda: len(left) == 2)
        await asyncio.sleep(0.4)
        assert sorted(left) == [0, 1]
        assert not member.remote.killed
        await pool.release(member)
        await until(lambda: member.remote.killed)
        assert any(message is WorkerCommand.SHUTDOWN for message in member.remote.said)
        await pool.close()

    asyncio.run(scenario())


def plan(engines=2, workers=2, connect=None, **changes) -> ClusterPlan:
    config = load_config("search", ["--cluster.kind", "local"])
    sizes = {"engines": engines, "workers": workers, "heartbeat_timeout_s": 5, "episodes_per_worker": 1}
    own = ClusterConfig(**sizes | changes)
    client = connect or (lambda urls: ServerEngine(urls, "vllm", QUICK))
    return ClusterPlan(WorkerSpec("worker", config.model_copy(update={"cluster": own}), "m", "."), client)


def views(remote: FakeRemote) -> list[EngineSet]:
    return [message for message in remote.said if isinstance(message, EngineSet)]


STATE = {"w": torch.zeros(2)}


def test_replacement_engine_loads_the_weights_before_workers_are_notified():
    async def scenario(urls, fakes):
        launcher = FakeLauncher(urls)
        group = WorkerGroup(plan(), launcher)
        await group.open()
        await group.load_weights(7, STATE)
        assert [fake.label for fake in fakes] == ["7", "7", "default"]
        engine = next(remote for remote in launcher.made if remote.url == urls[0])
        worker = next(remote for remote in launcher.made if not remote.url)
        heard = len(views(worker))
        engine.dead = True
        await until(lambda: any(urls[2] in view.urls for view in views(worker)), 20)
        assert fakes[2].label == "7"
        assert [set(view.urls) for view in views(worker)[heard:]][-2:] == [{urls[1]}, {urls[1], urls[2]}]
        assert all(view.version == 7 for view in views(worker)[heard:])
        await group.close()

    fakes = [Fake(), Fake(), Fake()]
    with serving(*fakes):
        asyncio.run(scenario([fake.url for fake in fakes], fakes))


def test_engine_with_mismatched_weights_is_rejected_on_join():
    async def scenario(urls):
        launcher = FakeLauncher([urls[0], urls[1]])
        group = WorkerGroup(plan(engines=1), launcher)
        await group.open()
        await group.load_weights(1, STATE)
        with pytest.raises(SyncError, match="does not hold the weights of version 1"):
            await group.server.join(urls[1])
        assert list(group.server.urls) == [urls[0]]
        await group.close()

    good, bad = Fake(), Fake(digests={"w": "0" * 64})
    with serving(good, bad):
        asyncio.run(scenario([good.url, bad.url]))


def test_rollout_attempt_on_a_dying_worker_raises_worker_lost():
    async def scenario(url):
        launcher = FakeLauncher([url])
        group = WorkerGroup(plan(engines=1, workers=1), launcher)
        await group.open()
        worker = next(remote for remote in launcher.made if not remote.url)
        attempt = asyncio.create_task(group.run_attempt(JOB, 60))
        await until(lambda: any(isinstance(message, RolloutJob) for message in worker.said), 5)
        worker.dead = True
        with pytest.raises(WorkerLost, match="is gone") as caught:
            await attempt
        assert caught.value.part == "worker"
        await until(lambda: len(group.workers.members) == 1, 5)
        assert views(launcher.made[-1])[-1].urls == (url,)  # the next one knows where the engine is
        await group.close()

    fake = Fake()
    with serving(fake):
        asyncio.run(scenario(fake.url))


def test_late_attempt_is_lost_without_affecting_others_on_its_responsive_worker():
    async def scenario(url):
        launcher = FakeLauncher([url])
        group = WorkerGroup(plan(engines=1, workers=1, episodes_per_worker=2), launcher)
        await group.open()
        other = asyncio.create_task(group.run_attempt(JOB, 60))
        with pytest.raises(WorkerLost, match="is silent"):
            await group.run_attempt(JOB, 0.05)
        assert not other.done()
        assert (len(group.workers.members), group.workers.num_lost) == (1, 0)
        next(remote for remote in launcher.made if not remote.url).dead = True
        with pytest.raises(WorkerLost, match="is gone"):
            await other
        await until(lambda: group.workers.num_lost == 1, 5)
        await group.close()

    fake = Fake()
    with serving(fake):
        asyncio.run(scenario(fake.url))


def test_timed_out_call_sends_a_cancellation_to_the_worker(tmp_path):
    async def scenario():
        ours, theirs = socket.socketpair()
        line = await asyncio.open_connection(sock=ours)
        with subprocess.Popen(["sleep", "60"], start_new_session=True) as process, theirs:
            remote = LocalWorkerHandle("worker 0", process, tmp_path / "said", *line)
            with pytest.raises(WorkerDied, match=r"did not respond within 0\.05 s"):
                await remote.call(WorkerCommand.PING, 0.05)
            await asyncio.sleep(0)
            sent = theirs.makefile("rb")
            (number, body), cancelled = (split_number(read_frame(sent)) for _ in range(2))
            assert (number, decode_request(body), cancelled) == (1, WorkerCommand.PING, (1, b""))
            await remote.kill()

    asyncio.run(scenario())


def ask(engine, episode="e"):
    return engine.generate(Request(episode, (1, 2), SamplingParams(max_new_tokens=2)))


def test_episodes_move_to_a_new_engine_when_theirs_leaves():
    async def scenario(first, second):
        engine = ServerEngine([first.url], "vllm", QUICK)
        await ask(engine)
        engine.leave(first.url)
        with pytest.raises(EngineError, match="all were removed"):
            await ask(engine)
        await engine.join(second.url)
        await ask(engine)
        assert [sum("completions" in path for path, _ in fake.asked) for fake in (first, second)] == [1, 1]
        await engine.close()

    first, second = Fake(), Fake()
    with serving(first, second):
        asyncio.run(scenario(first, second))


def test_request_waiting_for_a_server_fails_when_the_server_leaves():
    fake = Fake()
    with serving(fake):
        patient = RemoteEngineSettings(timeout_s=60, connect_timeout_s=60, backoff_s=0.01)
        engine = ServerEngine([fake.url], "vllm", patient)

    async def leaves():
        waiting = asyncio.create_task(ask(engine))
        await asyncio.sleep(0.1)
        assert not waiting.done()
        engine.leave(fake.url)
        with pytest.raises(EngineError, match="is unreachable"):
            await asyncio.wait_for(waiting, 10)

    asyncio.run(leaves())


def test_a_follower_samples_with_the_expected_version_and_rejects_other_weights():
    async def scenario(fake):
        engine = ServerEngine([fake.url], "vllm", QUICK)
        engine.follow([fake.url], 3, None)
        fake.label = "3"
        assert (await ask(engine)).versions == (3, 3)
        fake.label = "-1"
        with pytest.raises(EngineError, match="holds unknown weights -1"):
            await ask(engine, "another")
        fake.label = "4"
        engine.follow([fake.url], 4, None)
        assert (await ask(engine, "third")).versions == (4, 4)
        await engine.close()

    fake = Fake()
    with serving(fake):
        asyncio.run(scenario(fake))


def test_serialized_errors_keep_message_class_and_cause():
    cause = EngineError("It was late.", "Wait.")
    cause.__cause__ = TimeoutError()
    answer = pickle.loads(pickle.dumps(failure_response(cause)))
    with pytest.raises(EngineError, match=r"It was late\. Wait\.") as caught:
        answer.take()
    assert isinstance(caught.value.__cause__, TimeoutError)
    with pytest.raises(HttpStatusError) as refused:
        pickle.loads(pickle.dumps(failure_response(HttpStatusError("No.", status=409)))).take()
    assert refused.value.status == 409

    class OtherProcessError(WorldError):
        pass

    with pytest.raises(Exception, match="The index is gone"):
        pickle.loads(pickle.dumps(failure_response(OtherProcessError("The index is gone.")))).take()
    with pytest.raises(Exception, match="ZeroDivisionError: by nothing"):
        pickle.loads(pickle.dumps(failure_response(ZeroDivisionError("by nothing")))).take()


def test_unpicklable_response_raises_user_error_and_keeps_log_records():
    class LocalFloat(float):
        """A number of a class that no other process can know."""

    answer = WorkerResponse(LocalFloat(1.0), records=(logging.makeLogRecord({"msg": "heard"}),))
    reply = decode_response(encode_response(answer))
    assert [record.getMessage() for record in reply.records] == ["heard"]
    with pytest.raises(UserError, match=r"A LocalFloat cannot be sent .*must survive pickling"):
        reply.take()
    with pytest.raises(UserError, match="pickle"):
        encode_request(LocalFloat(1.0))


class UnpicklableResult:
    """Pickles, and cannot be read again."""

    def __reduce__(self):
        return int, ("not a number",)


def test_response_that_fails_unpickling_raises_user_error():
    reply = decode_response(encode_response(WorkerResponse(UnpicklableResult())))
    with pytest.raises(UserError, match="cannot be unpickled: ValueError"):
        reply.take()


def test_combined_engine_stats_sum_tokens_and_average_seconds():
    now = {0: EngineStats(steps=4, decode_tokens=30, model_s=3.0), 2: EngineStats(steps=2, model_s=1.0)}
    found = combined(now, {0: EngineStats(steps=1, decode_tokens=10, model_s=1.0)})
    assert (found.steps, found.decode_tokens, found.model_s) == (5, 20, 1.5)


LOGS = """
import logging
import sys
sys.path.insert(0, {here!r})
from tiny_world import make_world as plain

def make_world(settings, limits):
    logging.getLogger("ludus.prices").warning("the index is from %s", "yesterday")
    return plain(settings, limits)
"""


@pytest.mark.slow
def test_worker_process_forwards_logs_and_errors_and_reports_its_death(tmp_path, caplog):
    """No tokens: the engine that it is told of is a fake."""
    world = tmp_path / "logs.py"
    world.write_text(LOGS.format(here=str(Path(__file__).parents[1])))

    async def scenario(url):
        config = load_config("search", ["--run.threads", "1", "--env.name", str(world)])
        launcher = LocalLauncher()
        remote = await launcher.start("worker 0", WorkerSpec("worker", config, str(COLD_START), os.getcwd()))
        try:
            started = await remote.call(WorkerCommand.START, 120)
            assert started.pid != os.getpid()
            (record,) = [one for one in caplog.records if one.name == "ludus.prices"]
            assert record.getMessage() == "worker 0: the index is from yesterday"
            assert (record.levelname, record.process) == ("WARNING", started.pid)
            assert time.time() - 120 < record.created < time.time()
            with pytest.raises(WorldError, match="before the worker received engines"):
                await remote.call(JOB, 30)
            await remote.call(EngineSet(0, (url,), None, None), 30)
            os.kill(started.pid, signal.SIGSTOP)
            with pytest.raises(WorkerDied, match=r"did not respond within 0\.3 s"):
                await remote.call(WorkerCommand.PING, 0.3)
            waits = asyncio.create_task(remote.call(WorkerCommand.PING, 60))
            await asyncio.sleep(0.05)
            os.kill(started.pid, signal.SIGKILL)
            with pytest.raises(WorkerDied, match=r"has exited \(-9\)"):
                await waits
            said = remote.output.read_text()
            await remote.kill()
            assert not remote.output.exists()
            with pytest.raises(WorkerDied, match="has exited") as lost:
                await remote.call(WorkerCommand.PING, 60)
            assert said.strip() in str(lost.value)
        finally:
            await launcher.close()
        assert all_gone({started.pid})

    fake = Fake()
    with serving(fake):
        asyncio.run(scenario(fake.url))


def test_ray_startup_timeout_raises_user_error(monkeypatch):
    ray = pytest.importorskip("ray")
    from ludus.cluster.ray_launcher import RayLauncher

    def late(**settings):
        raise Exception("The current node timed out during startup. This could happen because ...")

    monkeypatch.setattr(ray, "init", late)
    with pytest.raises(UserError, match=r"Ray did not start.*timed out during startup.*--cluster local"):
        RayLauncher(ClusterConfig(kind="ray"), [])


def test_missing_ray_error_names_the_cluster_extra(monkeypatch):
    from ludus.cluster.ray_launcher import RayLauncher

    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UserError, match=r"pip install 'ludus\[cluster\]'"):
        RayLauncher(ClusterConfig(), [])


def test_unsupported_cluster_settings_raise_config_error():
    words = ["--engine.url", "http://a:1", "--training.mode", "async", "--model.lora.rank", "4"]
    with pytest.raises(ConfigError, match=r"engine\.url"):
        check_cluster(load_config("search", [*words, "--cluster.kind", "local"]))
    trajectory = Trajectory("t", 0, (), (), StopReason.ANSWERED)
    assert pickle.loads(pickle.dumps(trajectory)) == trajectory


def test_logs_of_a_process_are_buffered_up_to_a_limit(caplog):
    ear = LogForwarder()
    elsewhere = logging.Logger("ludus.far", logging.INFO)  # as in another process: it has no parents here
    elsewhere.addHandler(ear)
    try:
        raise ValueError("no index")
    except ValueError:
        elsewhere.exception("a search failed: %d", 7)
    said = pickle.loads(pickle.dumps(ear.take()))
    log_records("worker 3", said)
    (record,) = caplog.records
    assert (record.name, record.levelname) == ("ludus.far", "ERROR")
    assert record.getMessage().startswith("worker 3: a search failed: 7\nTraceback")
    assert record.getMessage().endswith("ValueError: no index")
    assert ear.take() == ()
    for number in range(MAX_RECORDS + 5):
        elsewhere.info("%d", number)
    said = ear.take()
    assert (len(said), said[-1].getMessage()) == (MAX_RECORDS + 1, "5 more were dropped")


@pytest.mark.parametrize(("bound", "workers", "share"), [(4, 2, 2), (3, 2, 1), (2, 8, 1), (4, 1, 4)])
def test_tool_concurrency_limit_is_divided_among_workers(bound, workers, share):
    running, most = 0, 0

    async def searches() -> str:
        nonlocal running, most
        running, most = running + 1, max(most, running + 1)
        await until(lambda: most >= share)
        await asyncio.sleep(0.005)
        running -= 1
        return "found"

    world = RecordingWorld(tools=(tool_of(searches, "search", concurrency=bound),))
    said = f"Search. {call('search')}", "Paris"
    config = load_config("search", ["--cluster.kind", "local", "--cluster.workers", str(workers)])
    role = RolloutWorker(WorkerSpec("worker", config, "m", "."), world, None, None)
    role._schedulers[JOB.plan] = make_scheduler(scripted(said), world)

    async def plays():
        return await asyncio.gather(*(role.do(RolloutJob(job, JOB.plan)) for job in make_requests(6)))

    found = asyncio.run(plays())
    assert all(len(one.outcomes) == 1 for one in found)
    assert most == share


@pytest.mark.parametrize(("kind", "given", "share"), [("local", 7, 3), ("local", 1, 1), ("ray", 7, 7)])
def test_sandbox_concurrency_is_divided_among_workers_of_a_machine(kind, given, share):
    words = ["--cluster.kind", kind, "--cluster.workers", "2", "--sandbox.concurrency", str(given)]
    assert sandbox_of(load_config("search", words)).concurrency == share
    assert sandbox_of(load_config("search", ["--cluster.kind", "local"])).concurrency == max(2, os.cpu_count())
