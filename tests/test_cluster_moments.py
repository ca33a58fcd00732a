"""Roles that end, hang, leave or are given up at an unusual moment of what is done with them."""

from __future__ import annotations

import asyncio
import os
import queue
from dataclasses import dataclass, field, replace

import pytest

from ludus.cluster.child import attend
from ludus.cluster.frames import LENGTH_BYTES, Call, Cancel, Unread, pack, unpack
from ludus.cluster.local import LocalLauncher
from ludus.cluster.messages import Begin, Ping, Pulse, RewardSpec, WorkerSpec, failed
from ludus.cluster.remote import Needs
from ludus.cluster.roles import Host
from ludus.config import load_config
from ludus.errors import UserError, WorldError
from ludus.rollout.ledger import RolloutKey
from ludus.rollout.scheduler import Job
from ludus.types import Task
from served import COLD_START
from test_cluster import JOB, Sour
from waiting import until

SOUR = replace(JOB, job=Job(RolloutKey(1, "t", 0), Task("t", (), Sour())))


def test_a_call_that_cannot_be_read_is_one_and_its_number_is_known():
    frame = unpack(pack(Call(7, SOUR))[LENGTH_BYTES:])
    assert isinstance(frame, Unread)
    assert frame.number == 7
    assert "cannot be read there: ValueError" in str(frame.error)


def test_a_child_that_cannot_read_what_it_is_asked_says_so_and_goes_on():
    async def scenario():
        config = load_config("search", ["--run.threads", "1"])
        launcher = LocalLauncher()
        remote = await launcher.start("worker 0", WorkerSpec(config, str(COLD_START), os.getcwd()), Needs())
        try:
            with pytest.raises(UserError, match=r"cannot be read there: ValueError.*must pickle"):
                await remote.call(SOUR, 60)
            assert isinstance(await remote.call(Ping(), 60), Pulse)
        finally:
            await launcher.close()

    asyncio.run(scenario())


@dataclass
class Noting:
    """A role that notes what it is asked to do, and does it for ever."""

    begun: list = field(default_factory=list)
    ended: list = field(default_factory=list)

    async def do(self, message):
        self.begun.append(message)
        try:
            await asyncio.sleep(60)
        finally:
            self.ended.append(message)


def test_a_call_that_is_cancelled_in_the_same_breath_is_not_done():
    async def scenario():
        host = Host(RewardSpec(load_config("search", []), "."), "127.0.0.1")
        role = host._role = Noting()
        inbox, outbox = asyncio.Queue(), queue.SimpleQueue()
        for frame in (Call(1, JOB), Cancel(1), Call(2, Begin())):
            inbox.put_nowait(frame)
        attending = asyncio.create_task(attend(inbox, outbox, host))
        await until(lambda: Begin() in role.begun, 10)
        await until(lambda: role.begun.count(JOB) == role.ended.count(JOB), 2)
        assert Begin() not in role.ended
        attending.cancel()

    asyncio.run(scenario())


class IndexGone(WorldError):
    """An error of a world, made from something other than its words."""

    def __init__(self, path) -> None:
        super().__init__(f"The index {path} is gone.", "Make it anew.")


def test_an_error_of_a_class_that_does_not_pickle_is_still_of_its_kind():
    error = IndexGone("x")
    error.__cause__ = TimeoutError()
    with pytest.raises(WorldError, match=r"The index x is gone\. Make it anew\.") as caught:
        failed(error).take()
    assert caught.value.part == "environment"
    assert isinstance(caught.value.__cause__, TimeoutError)
