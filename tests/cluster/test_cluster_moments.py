"""Workers and engines that exit, hang, leave or are removed at unusual times."""

from __future__ import annotations

import asyncio
import os
import queue
import sys
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import pytest

from ludus.cluster.cluster import Cluster, ClusterEngine, EventLoopThread
from ludus.cluster.local_launcher import LocalLauncher, serve
from ludus.cluster.protocol import (
    Heartbeat,
    Started,
    WorkerCommand,
    WorkerDied,
    WorkerSpec,
    decode_request,
    encode_request,
    failure_response,
)
from ludus.cluster.supervisor import WorkerGroup, WorkerLost
from ludus.cluster.worker_pool import PoolMember
from ludus.cluster.workers import WorkerServer
from ludus.config import load_config
from ludus.errors import EngineError, UserError, WorldError
from ludus.rollouts.ledger import RolloutKey
from ludus.rollouts.scheduler import RolloutRequest
from ludus.types import Task
from served import COLD_START
from small_worlds import RecordingWorld
from tests.cluster.test_cluster import (
    JOB,
    STATE,
    FakeLauncher,
    FakeRemote,
    UnpicklableResult,
    make_pool,
    plan,
    recorded,
)
from tests.engines.test_engine_server import Fake, serving
from waiting import until

SOUR = replace(JOB, request=RolloutRequest(RolloutKey(1, "t", 0), Task("t", (), UnpicklableResult())))


def test_a_request_that_cannot_be_unpickled_raises():
    with pytest.raises(UserError, match="cannot be unpickled by the receiving process: ValueError"):
        decode_request(encode_request(SOUR))


@pytest.mark.cluster
def test_a_child_reports_an_unreadable_request_and_continues():
    async def scenario():
        config = load_config("search", ["--run.threads", "1"])
        launcher = LocalLauncher()
        remote = await launcher.start("worker 0", WorkerSpec("worker", config, str(COLD_START), os.getcwd()))
        try:
            with pytest.raises(
                UserError, match=r"cannot be unpickled by the receiving process: ValueError.*must survive pickling"
            ):
                await remote.call(SOUR, 60)
            assert isinstance(await remote.call(WorkerCommand.PING, 60), Heartbeat)
        finally:
            await launcher.close()

    asyncio.run(scenario())


@dataclass
class RecordingRole:
    """A role that notes what it is asked to do, and does it for ever."""

    begun: list = field(default_factory=list)
    ended: list = field(default_factory=list)

    async def do(self, message):
        self.begun.append(message)
        try:
            await asyncio.sleep(60)
        finally:
            self.ended.append(message)


def test_call_cancelled_right_after_its_request_is_not_left_running():
    async def scenario():
        host = WorkerServer(WorkerSpec("reward worker", load_config("search", []), "m", "."), "127.0.0.1")
        role = host._worker = RecordingRole()
        inbox, outbox = asyncio.Queue(), queue.SimpleQueue()
        for request in ((1, encode_request(JOB)), (1, b""), (2, encode_request(WorkerCommand.PING))):
            inbox.put_nowait(request)
        attending = asyncio.create_task(serve(inbox, outbox, host))
        await until(lambda: WorkerCommand.PING in role.begun, 10)
        await until(lambda: role.begun.count(JOB) == role.ended.count(JOB), 2)
        assert WorkerCommand.PING not in role.ended
        attending.cancel()

    asyncio.run(scenario())


class IndexGone(WorldError):
    """An error of a world, made from something other than its words."""

    def __init__(self, path) -> None:
        super().__init__(f"The index {path} is gone.", "Make it anew.")


def test_unpicklable_error_keeps_its_base_class_message_and_cause():
    error = IndexGone("x")
    error.__cause__ = TimeoutError()
    with pytest.raises(WorldError, match=r"The index x is gone\. Make it anew\.") as caught:
        failure_response(error).take()
    assert caught.value.part == "environment"
    assert isinstance(caught.value.__cause__, TimeoutError)


@dataclass
class UnresponsiveRemote(FakeRemote):
    """One that may not hear a ping."""

    hears: bool = True

    async def call(self, message, deadline_s):
        if message is WorkerCommand.PING and not self.hears:
            await asyncio.sleep(deadline_s)
            raise WorkerDied(f"{self.number} is silent.") from TimeoutError()
        return await super().call(message, deadline_s)


@dataclass
class SlowToStopRemote(FakeRemote):
    """One that takes its time to end."""

    may_end: asyncio.Event = field(default_factory=asyncio.Event)

    async def kill(self):
        await self.may_end.wait()
        self.killed = True


def test_dead_member_is_replaced_even_if_the_caller_is_cancelled():
    async def scenario():
        made = []

        async def start(number):
            made.append(SlowToStopRemote(number) if number == 0 else FakeRemote(number))
            return made[-1]

        pool, _, _ = make_pool(start, target=1, heartbeat_timeout_s=5)
        pool.reconcile()
        await pool.wait_until_full()
        losing = asyncio.create_task(pool.replace_dead(pool.members[0], WorkerDied("It is gone.")))
        await until(lambda: not pool.members, 5)
        losing.cancel()
        await asyncio.wait({losing})
        made[0].may_end.set()
        await asyncio.wait_for(pool.wait_for_any(), 5)
        assert (made[0].killed, list(pool.members)) == (True, [1])
        await pool.close()

    asyncio.run(scenario())


def test_closing_pool_waits_until_lost_members_have_ended():
    async def scenario():
        made = []

        async def start(number):
            made.append(SlowToStopRemote(number))
            return made[-1]

        pool, _, _ = make_pool(start, target=1, heartbeat_timeout_s=5)
        pool.reconcile()
        await pool.wait_until_full()
        pool.run_in_background(pool.replace_dead(pool.members[0], WorkerDied("It is gone.")))
        await until(lambda: not pool.members, 5)
        closing = asyncio.create_task(pool.close())
        await asyncio.sleep(0.05)
        assert not closing.done()
        made[0].may_end.set()
        await closing
        assert (made[0].killed, len(made)) == (True, 1)

    asyncio.run(scenario())


def test_member_hanging_while_it_leaves_is_killed_after_heartbeat_timeout():
    async def scenario():
        made = []

        async def start(number):
            made.append(UnresponsiveRemote(number))
            return made[-1]

        pool, _, left = make_pool(start, target=2)
        pool.reconcile()
        await pool.wait_until_full()
        members = [await pool.take(1), await pool.take(1)]
        working = asyncio.create_task(members[0].remote.call(JOB, 60))
        await pool.release(members[1])
        pool.target = 0
        pool.reconcile()
        await until(lambda: len(left) == 2, 5)
        made[members[0].number].hears = False
        with pytest.raises(WorkerDied):  # whoever waits for its work hears of it
            await asyncio.wait_for(working, 10)
        await pool.close()

    asyncio.run(scenario())


def test_member_hanging_while_joining_is_killed_and_replaced():
    async def scenario():
        made, start = recorded()
        pool, _, _ = make_pool(start, target=1, wait_s=0.01)
        cancelled = []

        async def joined(member):
            if member.number == 0:
                return
            if member.number == 1:
                made[1].silent = True
                try:
                    await asyncio.sleep(60)
                finally:
                    cancelled.append(member.number)

        pool.joined = joined
        pool.reconcile()
        await pool.wait_until_full()
        await pool.replace_dead(pool.members[0], WorkerDied("It is gone."))
        await until(lambda: list(pool.members) == [2], 20)
        assert (made[1].killed, cancelled) == (True, [1])
        await pool.close()

    asyncio.run(scenario())


@dataclass
class VanishingServer(Fake):
    """A server that can be held up while it takes weights, and then be gone."""

    holds_up: str = "nothing"
    held: threading.Event = field(default_factory=threading.Event)
    go: threading.Event = field(default_factory=threading.Event)
    is_gone: bool = False

    def answer(self, path, body):
        if path.startswith(self.holds_up):
            self.held.set()
            self.go.wait(20)
        return ("drop", b"") if self.is_gone else super().answer(path, body)


@contextmanager
def two_engines():
    fakes = [VanishingServer(), VanishingServer()]
    with serving(*fakes):
        launcher = FakeLauncher([fake.url for fake in fakes])
        yield WorkerGroup(plan(), launcher), launcher, fakes


def test_an_engine_released_during_a_weight_transfer_does_not_block_others():
    async def scenario(group, fakes):
        await group.open()
        await group.load_weights(1, STATE)
        first = next(iter(group.engines.members.values())).started.url
        leaves = next(fake for fake in fakes if fake.url == first)
        leaves.holds_up = "/collective_rpc"
        sending = asyncio.create_task(group.load_weights(2, STATE))
        await until(leaves.held.is_set, 10)
        await group.scale(1, None, None)
        leaves.is_gone = True
        leaves.go.set()
        await sending
        assert [fake.label for fake in fakes if fake is not leaves] == ["2"]
        await group.close()

    with two_engines() as (group, _, fakes):
        asyncio.run(scenario(group, fakes))


@pytest.mark.parametrize("what", ["score", "fingerprint"])
@pytest.mark.parametrize("leaves", [0, 1])
def test_engine_leaving_during_score_or_fingerprint_is_excluded_from_the_result(what, leaves):
    """The second is asked when the first has answered."""

    async def scenario(engine, fakes):
        paths = {"score": "/v1/completions", "fingerprint": "/fingerprint"}
        await engine.load_weights(1, STATE)
        held = fakes[1 - leaves]
        held.holds_up = paths[what]
        asked = engine.score((1, 2, 3)) if what == "score" else engine.fingerprint()
        asking = asyncio.create_task(asked)
        await until(held.held.is_set, 10)
        engine.leave(fakes[leaves].url)
        fakes[leaves].is_gone = True
        held.go.set()
        assert await asking == ([0.0, -2.0, -2.0] if what == "score" else "same")
        engine.leave(held.url)
        with pytest.raises(EngineError, match="all were removed"):
            await engine.score((1, 2, 3))
        await engine.close()

    class TellingServer(VanishingServer):
        def answer(self, path, body):
            status, said = super().answer(path, body)
            return status, {"fingerprint": "same"} if path.startswith("/fingerprint") else said

    fakes = [TellingServer(), TellingServer()]
    with serving(*fakes) as engine:
        asyncio.run(scenario(engine, fakes))


def test_cluster_can_roll_weights_while_one_of_its_engines_is_missing():
    async def scenario(group):
        await group.open()
        await group.engines.replace_dead(group.engines.members[0], WorkerDied("It is gone."))
        await until(lambda: len(group.server.urls) == 1, 5)
        assert ClusterEngine(group, None, group.server).can_roll
        await group.close()

    with two_engines() as (group, _, _):  # and no address for a third
        asyncio.run(scenario(group))


def test_engine_stats_can_be_read_while_engines_join_and_leave():
    group, ended = WorkerGroup(plan(), FakeLauncher()), threading.Event()

    def come_and_go():
        members, member = group.engines.members, PoolMember(0, None, Started("here", 1))
        deadline = time.monotonic() + 0.5
        while time.monotonic() < deadline:
            for number in range(3):
                members[number] = member
            for number in range(3):
                members.pop(number)
        ended.set()

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threading.Thread(target=come_and_go).start()
        while not ended.is_set():
            group.stats()
    finally:
        sys.setswitchinterval(before)


def deadline(*words: str) -> float:
    config = load_config("search", ["--cluster.kind", "local", *words])
    return Cluster(config, RecordingWorld(), None, None).deadline_s(Task("t", (), None))


def test_attempt_deadline_includes_reward_timeouts_of_concurrent_episodes():
    words = ["--rollout.episode_timeout_s", "30", "--rollout.reward_timeout_s", "500"]
    assert deadline(*words, "--cluster.episodes_per_worker", "3") > 30 + 3 * 500
    assert deadline(*words, "--cluster.reward_workers", "1") < 500  # these have a clock of their own


def test_cancelled_attempt_during_worker_shutdown_leaves_the_pool_usable():
    """As where a group has enough members in the moment in which the worker of another one dies."""

    class Launcher(FakeLauncher):
        async def start(self, name, spec):
            remote = await super().start(name, spec)
            if name == "worker 0":
                remote = self.made[-1] = SlowToStopRemote(remote.number)
            return remote

    def play(group):
        return group.run_attempt(JOB, 60)

    background, fake = EventLoopThread("test"), Fake()
    with serving(fake):
        launcher = Launcher([fake.url])

        async def make():
            group = WorkerGroup(plan(engines=1, workers=1), launcher)
            await group.open()
            return group

        group = background.wait(make())
        worker = next(remote for remote in launcher.made if isinstance(remote, SlowToStopRemote))

        async def given_up():
            attempt = asyncio.create_task(background.do(play(group)))
            await until(lambda: JOB in worker.said, 10)
            worker.dead = True
            await until(lambda: not group.workers.members, 10)
            attempt.cancel()
            await asyncio.wait({attempt})

        asyncio.run(given_up())

        async def goes_on():
            worker.may_end.set()
            next_one = asyncio.create_task(play(group))
            await until(lambda: launcher.made[-1] is not worker and JOB in launcher.made[-1].said, 10)
            launcher.made[-1].dead = True
            with pytest.raises(WorkerLost):
                await next_one
            await group.close()

        background.wait(goes_on())
        background.close()
