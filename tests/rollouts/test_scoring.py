"""Reward computation: off the event loop, in another process, with a deadline."""

import asyncio
import os
import pickle
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace

import pytest

from ludus.config import load_config
from ludus.envs.registry import build_world
from ludus.errors import WorldError
from ludus.ipc import frame
from ludus.rewards.base import Reward
from ludus.rollouts.reward_executor import (
    ProcessRewardExecutor,
    RewardFault,
    RewardTimeout,
    ThreadRewardExecutor,
    _Connection,
    _ConnectionClosed,
    _ProcessExited,
)
from ludus.types import Message, StopReason, Task, Trajectory

WORLD = """
import os
import time
from ludus.envs.tool_env import ToolEnv
from ludus.envs.tool_world import ToolWorld
from ludus.rewards.base import Reward

def verdict(task, trajectory):
    match task.id:
        case "slow":
            return float(sum(i % 2 for i in range(3_000_000)) > 0)
        case "greedy":
            return float(sum(range(20_000_000)) > 0)
        case "hangs":
            for _ in iter(int, 1):
                pass
        case "raises":
            raise KeyError("no such verdict")
        case "ends":
            os._exit(3)
        case "where":
            return os.getpid() / 2**22
    return float(trajectory.answer == task.truth)

def make_world(settings, limits):
    return ToolWorld("judged", {"train": ()}, (), (Reward("solved", verdict, outcome=True),), limits)
"""
PLAYED = Trajectory("t", 0, (), (Message(role="assistant", content="Paris"),), StopReason.ANSWERED)


def task(name="t") -> Task:
    return Task(name, (), "Paris")


@pytest.fixture
def scoring(tmp_path):
    def make(**settings):
        file = tmp_path / "judged.py"
        file.write_text(WORLD)
        given = ["--env.name", str(file), "--env.check", "false"]
        given += [text for name, value in settings.items() for text in (f"--rollout.{name}", str(value))]
        config = load_config(None, given)
        return ProcessRewardExecutor.of(config), build_world(config.env, config.rollout)

    return make


async def score(made, world, name="t"):
    return await made.scored(world, world.environment(task(name)), task(name), PLAYED)


def test_rewards_computed_in_another_process_equal_those_of_this_process(scoring):
    made, world = scoring()

    async def scenario():
        return await score(made, world), await score(made, world, "where"), await score(made, world, "where")

    found, where, again = asyncio.run(scenario())
    assert found == replace(PLAYED, rewards={"solved": 1.0}, reward=1.0)
    assert where.reward == again.reward != os.getpid() / 2**22
    here, _ = scoring(reward_processes=0)
    assert asyncio.run(score(here, world, "where")).reward == os.getpid() / 2**22


@pytest.mark.parametrize("slow", ["slow", "greedy"])
def test_slow_reward_does_not_block_the_event_loop(scoring, slow):
    made, world = scoring()

    async def scenario():
        await score(made, world)
        work = asyncio.ensure_future(score(made, world, slow))
        begin, last, longest = time.perf_counter(), time.perf_counter(), 0.0
        while not work.done():
            await asyncio.sleep(0.005)
            longest = max(longest, time.perf_counter() - last)
            last = time.perf_counter()
        assert (await work).reward == 1.0
        return longest, last - begin

    tries = (asyncio.run(scenario()) for _ in range(5))  # the machine itself may stall
    assert any(longest < 0.5 * took for longest, took in tries)


def test_hanging_reward_is_stopped_at_its_deadline_and_reported(scoring):
    made, world = scoring(reward_timeout_s=1.5)

    async def scenario():
        with pytest.raises(
            RewardFault, match=r"task hangs took longer than 1\.5 s: verdict, at .*judged\.py, line 1[56]"
        ) as late:
            await score(made, world, "hangs")
        return late.value, (await score(made, world)).reward

    error, after = asyncio.run(scenario())
    assert isinstance(error.__cause__, TimeoutError)
    assert error.part == "reward"
    assert after == 1.0


def test_late_reward_is_reported_with_its_part_after_further_requests(scoring):
    made, world = scoring(reward_timeout_s=2)
    long = replace(PLAYED, messages=(Message(role="assistant", content="x" * 300_000), *PLAYED.messages))

    async def one(name):
        return await made.scored(world, world.environment(task(name)), task(name), long)

    async def scenario():
        asked = (one("hangs"), *(one(f"t{i}") for i in range(6)))
        return await asyncio.gather(*asked, return_exceptions=True)

    late, *others = asyncio.run(scenario())
    assert isinstance(late, RewardTimeout)
    assert "judged.py, line 1" in late.message
    assert [other.reward for other in others] == [1.0] * 6


def test_cancelled_request_frees_its_queue_slot(scoring):
    made, world = scoring(reward_timeout_s=20)
    long = replace(PLAYED, messages=(Message(role="assistant", content="x" * 1_000_000), *PLAYED.messages))

    async def one(name):
        return await made.scored(world, world.environment(task(name)), task(name), long)

    async def scenario():
        await one("t")
        first = asyncio.create_task(one("hangs"))
        others = [asyncio.create_task(one("t")) for _ in range(3)]
        await asyncio.sleep(0.1)  # one of them is being sent, the others wait for their turn
        first.cancel()
        return await asyncio.wait_for(asyncio.gather(*others), 15)

    assert [found.reward for found in asyncio.run(scenario())] == [1.0] * 3


def test_closing_a_connection_wakes_readers_and_writers_and_frees_its_socket():
    async def scenario():
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        line = _Connection(ours)
        with theirs:
            reads = asyncio.create_task(line.request(b"short", 30))
            writes = asyncio.create_task(line.request(b"x" * 4_000_000, 30))
            waits = asyncio.create_task(line.request(b"short", 30))
            await asyncio.sleep(0.05)
            line.close()
            found = await asyncio.wait_for(asyncio.gather(reads, writes, waits, return_exceptions=True), 20)
        assert [type(one) for one in found] == [_ConnectionClosed] * 3
        assert ours.fileno() == -1

    asyncio.run(scenario())


def test_scoring_request_times_out_if_the_process_does_not_read_it():
    async def scenario():
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        with theirs, pytest.raises(_ProcessExited) as lost:
            await _Connection(ours).request(b"x" * 4_000_000, 0.05)
        assert isinstance(lost.value.__cause__, TimeoutError)

    asyncio.run(asyncio.wait_for(scenario(), 30))


def test_exception_or_exit_in_a_reward_fails_the_episode_with_its_message(scoring):
    made, world = scoring()

    async def scenario():
        with pytest.raises(WorldError, match="A reward of task raises raised KeyError: 'no such verdict'"):
            await score(made, world, "raises")
        with pytest.raises(RewardFault, match="The reward process of task ends has exited"):
            await score(made, world, "ends")
        return (await score(made, world)).reward

    assert asyncio.run(scenario()) == 1.0


def test_rewards_that_cannot_be_pickled_run_in_this_process_with_a_warning(scoring, caplog):
    made, world = scoring()
    own = world.environment(task())
    own.rewards = (Reward("own", lambda task, trajectory: 0.5, outcome=True),)
    found = asyncio.run(made.scored(world, own, task(), PLAYED))
    local = replace(task(), truth=lambda: "Paris")
    asyncio.run(made.scored(world, world.environment(local), local, PLAYED))
    other = replace(world, rewards=(Reward("another", lambda task, trajectory: 0.25, outcome=True),))
    assert asyncio.run(score(made, other)).rewards == {"another": 0.25}
    assert found.rewards == {"own": 0.5}
    said = "\n".join(record.getMessage() for record in caplog.records)
    assert "Its episodes have other rewards" in said
    assert "Task t cannot be sent to another process" in said
    assert "has different rewards from the run" in said


def test_reward_on_a_thread_has_a_deadline():
    over = threading.Event()

    async def scenario(made, environment):
        with pytest.raises(RewardFault, match=r"took longer than 0\.05 s"):
            await made.scored(None, environment, task(), PLAYED)
        over.set()

    class SlowRewardWorld:
        rewards = (Reward("slow", lambda task, trajectory: float(over.wait(20)), outcome=True),)

    asyncio.run(scenario(ThreadRewardExecutor(0.05), SlowRewardWorld()))


def test_scoring_concurrency_equals_the_number_of_processes(scoring):
    made, world = scoring(reward_processes=2)

    async def scenario():
        return await asyncio.gather(*(score(made, world, "where") for _ in range(12)))

    assert len({one.reward for one in asyncio.run(scenario())}) == 2


def test_processes_end_with_their_parent(scoring):
    made, world = scoring()
    pid = int(asyncio.run(score(made, world, "where")).reward * 2**22)
    os.kill(pid, 0)
    del made
    for _ in range(6000):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return
        time.sleep(0.01)
    raise AssertionError("it is still there")


def test_an_idle_process_exits_silently(scoring):
    made, _ = scoring()
    ours, theirs = socket.socketpair()
    program = "import sys; from ludus.rollouts.reward_process import answer; answer(sys.argv[1])"
    command = [sys.executable, "-c", program, str(theirs.fileno())]
    place = pickle.dumps(made.location)
    with theirs, subprocess.Popen(command, pass_fds=[theirs.fileno()], stderr=subprocess.PIPE) as child:
        ours.sendall(frame(place))
        ours.close()
        theirs.close()
        assert child.communicate()[1] == b""
    assert child.returncode == 0
