"""Episodes at once on an environment server: turns per second and memory, local and remote.

    python benchmarks/env_servers.py [EPISODES [PROCESSES]]

Plays EPISODES (2,000) episodes of the world guess at once by bisection, and PROCESSES (200) episodes whose environment
is a Python process each, in this process and through one `ludus env serve` on this machine. Memory is the proportional
set size of the server and of its children while all episodes are open.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import psutil

from ludus.config import load_config
from ludus.envs.base import Environment, World
from ludus.envs.registry import build_world
from ludus.envs.remote.world import make_remote_world
from ludus.envs.tool_env import ToolLimits
from ludus.rewards.base import Reward
from ludus.types import Action, Message, StepResult, Task, Trajectory

TURNS = 5
CHILD = "import sys\nfor line in sys.stdin: print(line.upper(), end='', flush=True)"


class ProcessEnv(Environment):
    """An episode whose state is in a child process, which returns each line in capitals."""

    def __init__(self, rewards: Sequence[Reward]) -> None:
        self.rewards = rewards
        self._child: asyncio.subprocess.Process | None = None

    async def start(self, task: Task) -> list[Message]:
        pipe = asyncio.subprocess.PIPE
        self._child = await asyncio.create_subprocess_exec(sys.executable, "-S", "-c", CHILD, stdin=pipe, stdout=pipe)
        return list(task.prompt)

    async def step(self, action: Action) -> StepResult:
        assert self._child is not None
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        self._child.stdin.write(action.message["content"].encode() + b"\n")
        line = await self._child.stdout.readline()
        return StepResult((Message(role="user", content=line.decode()),))

    async def close(self) -> None:
        if self._child is not None:
            self._child.kill()
            await self._child.wait()


def answered(task: Task, trajectory: Trajectory) -> float:
    """Return 1 if the process replied."""
    return float(trajectory.messages[-1]["content"].startswith("LINE"))


@dataclass(frozen=True)
class ProcessWorld(World):
    """One task; each episode has a process."""

    name: str = "processes"
    splits: Sequence[str] = ("train",)
    rewards: Sequence[Reward] = (Reward("answered", answered, outcome=True),)

    def tasks(self, split: str) -> Sequence[Task]:
        return [Task("echo", (Message(role="user", content="Write a line."),), None)]

    def environment(self, task: Task) -> ProcessEnv:
        return ProcessEnv(self.rewards)


def make_world(settings: Mapping[str, object], limits: ToolLimits) -> ProcessWorld:
    return ProcessWorld()


async def play(environment: Environment, task: Task, ready: asyncio.Barrier) -> int:
    """Play an episode, by bisection if it is a guess; return the number of turns."""
    await environment.start(task)
    await ready.wait()
    low, high = int(task.tags.get("low", 0)), int(task.tags.get("high", 0))
    turn = 0
    while turn < TURNS:
        turn += 1
        middle = (low + high) // 2
        text = str(middle) if high else f"line {turn}"
        result = await environment.step(Action(Message(role="assistant", content=text)))
        if result.done:
            break
        low, high = (middle + 1, high) if result.messages[-1]["content"] == "higher" else (low, middle - 1)
    await environment.close()
    return turn


async def measure(world: World, num: int) -> tuple[float, float, float]:
    """Return the turns per second and the memory of children in MB with all episodes open, and the seconds to start."""
    tasks = world.tasks("train")
    ready = asyncio.Barrier(num + 1)
    begin = time.perf_counter()
    playing = [
        asyncio.create_task(play(world.environment(task), task, ready))
        for task in (tasks[i % len(tasks)] for i in range(num))
    ]
    while ready.n_waiting < num:
        await asyncio.sleep(0.01)
    started = time.perf_counter() - begin
    children = psutil.Process().children(recursive=True)
    memory = sum(child.memory_full_info().pss for child in children) / 2**20
    begin = time.perf_counter()
    await ready.wait()
    turns = sum(await asyncio.gather(*playing))
    seconds = time.perf_counter() - begin
    await world.close()
    return turns / seconds, memory, started


def local_world(name: str) -> World:
    config = load_config(None, ["--env.name", name])
    return build_world(config.env, config.rollout)


def main() -> None:
    num_texts, num_processes = (int(word) for word in (*sys.argv[1:], "2000", "200")[:2])
    print("world              episodes  turns/s  memory of children (MB)  start (s)")
    for name, num in (("guess", num_texts), (__file__, num_processes)):
        command = [sys.executable, "-m", "ludus", "env", "serve", name, "--port", "0", "--until-eof"]
        worlds = {"local": local_world(name), "remote": make_remote_world({"command": command}, ToolLimits())}
        for where, world in worlds.items():
            speed, memory, started = asyncio.run(measure(world, num))
            print(f"{where:7}{world.name:11}{num:9}{speed:9.0f}{memory:25.0f}{started:11.1f}")


if __name__ == "__main__":
    main()
