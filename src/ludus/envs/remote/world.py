"""The remote world: its episodes run on environment servers (`ludus env serve`), with the same protocol over HTTP.

The server has the truth of the tasks: it computes the rewards after each step, and the rewards of the client read them
from a hidden outcome. An episode on a server that dies is an infrastructure failure.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Final, Literal, TypeVar, cast

from pydantic import BaseModel, Field

from ludus.engines.control_tokens import read_token
from ludus.envs.base import Environment, World
from ludus.envs.remote.connection import Pool, Server, ServerProcess
from ludus.envs.remote.messages import (
    CloseRequest,
    EpisodeReply,
    InfoRequest,
    PageRequest,
    Schema,
    Solutions,
    StepRequest,
    TaskPage,
    TaskRequest,
    WorldInfo,
    same_task,
    unpack_chat,
    unpack_dialogue,
)
from ludus.envs.settings import WorldSettings, read_settings
from ludus.envs.tool_env import ToolLimits
from ludus.envs.tool_world import Dialogue, check_split
from ludus.errors import ConfigError, UserError, WorldError
from ludus.rewards.base import Reward
from ludus.rewards.extract import last_output
from ludus.tools.base import Tool, ToolSchema, described_tool
from ludus.types import Action, Message, StepResult, Task, ToolOutcome, ToolStatus, Trajectory
from ludus.untrusted.json_client import JsonClient
from ludus.untrusted.worker import run_in_thread

T = TypeVar("T")
Reply = TypeVar("Reply", bound=BaseModel)

GRADES: Final = "remote_grades"
"""Tool name of the outcomes with the reward parts, as JSON."""
_STREAM_PAGE: Final = 100


class RemoteSettings(WorldSettings):
    """Settings of the remote world (`env.settings`): give either `urls` or `command`."""

    urls: tuple[str, ...] = ()
    """URLs of servers of the same world. An episode runs on the server with the fewest episodes of this process."""
    token_file: str = ""
    """File with the token of the servers. A file, because settings are saved in the run folder."""
    command: tuple[str, ...] = ()
    """Program and arguments of a server that this process starts, such as `/envs/PYTHON -m ludus env serve NAME
    --port 0 --until-eof`; it is started again if it ends."""
    processes: int = Field(1, ge=1)
    """Number of processes of `command`."""
    start_timeout_s: float = Field(120.0, gt=0)
    """Timeout for a process to print its URL."""
    timeout_s: float = Field(120.0, gt=0)
    """Timeout of a request, such as a step with its rewards."""
    connections: int = Field(64, ge=1)
    """Maximum number of requests of this process at a time."""
    name: str = ""
    """Name of the world in messages and records; empty: that of the served world."""


@dataclass(frozen=True, slots=True)
class ServerGrade:
    """Reward function that returns a part computed by the server after the last step; 0 before the first step."""

    part: str

    def __call__(self, task: Task, trajectory: Trajectory) -> float:
        grades: Mapping[str, float] = json.loads(last_output(GRADES)(trajectory) or "{}")
        return grades.get(self.part, 0.0)


class RemoteEnv(Environment):
    """One episode on a server, the one with the fewest episodes at its start."""

    def __init__(self, world: RemoteWorld, request: TaskRequest, tools: Sequence[Tool]) -> None:
        self.tools, self.rewards = tools, world.rewards
        self._pool, self._info, self._request = world.pool, world.info, request
        self._name = secrets.token_urlsafe(24)
        self._server: Server | None = None
        self._step = 0
        self._state = ""

    def implements(self, method: str) -> bool:
        return self._info.has_state_key if method == "state_key" else super().implements(method)

    async def start(self, task: Task) -> list[Message]:
        self._server = self._pool.choose()
        self._server.load += 1
        reply = await self._post("start", self._request)
        return list(unpack_chat(reply.messages))

    async def step(self, action: Action) -> StepResult:
        """Send the action; the server executes its tool calls."""
        self._step += 1
        reply = await self._post("step", StepRequest.of(self._step, action))
        grades = ToolOutcome("", GRADES, ToolStatus.OK, json.dumps(reply.grades))
        return StepResult(unpack_chat(reply.messages), reply.done, reply.reward, (*reply.outcomes, grades))

    async def close(self) -> None:
        """Close the episode. Failures are ignored: the server closes idle episodes."""
        if self._server is None:
            return
        server, self._server = self._server, None
        server.load -= 1
        try:
            if server.can_retry:
                await self._pool.post(server, f"/v1/episodes/{self._name}/close", CloseRequest(), CloseRequest)
        except WorldError:
            return

    def state_key(self) -> str:
        return self._state

    async def _post(self, operation: Literal["start", "step"], message: BaseModel) -> EpisodeReply:
        assert self._server is not None
        try:
            path = f"/v1/episodes/{self._name}/{operation}"
            reply = await self._pool.post(self._server, path, message, EpisodeReply)
        except UserError as error:  # the server refused the request; the model did nothing wrong
            raise WorldError(error.message, error.hint) from error
        if reply.step != self._step:
            raise WorldError(f"The environment server replied to step {reply.step}, not {self._step}.")
        self._state = reply.state
        return reply


@dataclass(frozen=True)
class RemoteWorld(World):
    """A world on environment servers. Its tasks have no truth."""

    settings: RemoteSettings
    pool: Pool
    _tasks: dict[str, list[Task]] = field(default_factory=dict)
    _tools: dict[tuple[object, ...], tuple[str, tuple[Tool, ...]]] = field(default_factory=dict)
    """Split and tools of each task."""

    @cached_property
    def info(self) -> WorldInfo:
        """Description of the world. Raises UserError if the servers have different worlds."""

        async def ask(pool: Pool) -> list[WorldInfo]:
            jobs = (pool.post(one, "/v1/world", InfoRequest(), WorldInfo) for one in pool.servers)
            return list(await asyncio.gather(*jobs))

        first, *others = self._run(ask)
        for server, other in zip(self.pool.servers[1:], others, strict=True):
            if other.model_copy(update={"episodes_at_once": first.episodes_at_once}) != first:
                raise UserError(f"{server.url} serves another world than {self.pool.servers[0].url}.")
        return first

    @property
    def name(self) -> str:
        return self.settings.name or self.info.name

    @cached_property
    def rewards(self) -> tuple[Reward, ...]:
        return tuple(Reward(p.name, ServerGrade(p.name), p.weight, p.outcome, low=p.low) for p in self.info.rewards)

    @property
    def splits(self) -> Sequence[str]:
        return tuple(self.info.splits)

    @property
    def emits_turn_rewards(self) -> bool:
        return self.info.emits_turn_rewards

    @property
    def episodes_at_once(self) -> int | None:
        return self.info.episodes_at_once * len(self.pool.servers)

    def implements(self, method: str) -> bool:
        """Return whether an optional method is available: those of solutions, if the served world defines them."""
        offered = ("demonstrations", "texts", "expert", "paraphrases", "alternative_solutions", "cheats")
        return method in self.info.implements if method in offered else super().implements(method)

    def tasks(self, split: str) -> Sequence[Task]:
        check_split(split, self.splits, self.name)
        if split not in self._tasks:
            tasks: list[Task] = []
            for page in self._pages(PageRequest(kind="tasks", split=split)):
                tools = _tools_of(page.tools)
                for one in page.tasks:
                    task = Task(one.id, unpack_chat(one.prompt), None, one.tags, one.seed)
                    self._tools[same_task(task)] = split, tuple(tools[i] for i in one.tools)
                    tasks.append(task)
            self._tasks[split] = tasks
        return self._tasks[split]

    def environment(self, task: Task) -> RemoteEnv:
        split, tools = self._place(task)
        return RemoteEnv(self, TaskRequest(split=split, id=task.id), tools)

    def demonstrations(self, seed: int) -> Iterator[Dialogue]:
        for page in self._pages(PageRequest(kind="demonstrations", seed=seed, num=_STREAM_PAGE)):
            yield from (unpack_dialogue(one, page.tools) for one in page.dialogues)

    def texts(self) -> Iterator[str]:
        for page in self._pages(PageRequest(kind="texts")):
            yield from page.texts

    def expert(self, task: Task) -> Dialogue | None:
        found = self._solutions(task)
        return None if found.expert is None else unpack_dialogue(found.expert, found.tools)

    def paraphrases(self, task: Task) -> Sequence[str]:
        return self._solutions(task).paraphrases

    def alternative_solutions(self, task: Task) -> Sequence[Sequence[Message]]:
        return tuple(map(unpack_chat, self._solutions(task).alternatives))

    def cheats(self, task: Task) -> Mapping[str, Sequence[Message]]:
        return {name: unpack_chat(messages) for name, messages in self._solutions(task).cheats.items()}

    def difficulty_report(self) -> str:
        return self.info.difficulty_report

    async def close(self) -> None:
        """Close the connections, and stop the processes."""
        await self.pool.client.close()
        await asyncio.to_thread(self.pool.stop)

    def _place(self, task: Task) -> tuple[str, tuple[Tool, ...]]:
        key = same_task(task)
        for split in self.splits:
            if key in self._tools:
                break
            self.tasks(split)
        if key not in self._tools:
            raise WorldError(f"The environment server has no task {task.id!r}.")
        return self._tools[key]

    def _solutions(self, task: Task) -> Solutions:
        return self._ask("/v1/solutions", TaskRequest(split=self._place(task)[0], id=task.id), Solutions)

    def _pages(self, request: PageRequest) -> Iterator[TaskPage]:
        while True:
            page = self._ask("/v1/pages", request, TaskPage)
            yield page
            num = len(page.tasks) + len(page.dialogues) + len(page.texts)
            if page.is_last or not num:
                return
            request = request.model_copy(update={"start": request.start + num})

    def _ask(self, path: str, message: BaseModel, reply: type[Reply]) -> Reply:
        return self._run(lambda pool: pool.post(pool.choose(), path, message, reply))

    def _run(self, work: Callable[[Pool], Coroutine[object, object, T]]) -> T:
        """Wait for requests over new connections, inside or outside an event loop."""

        async def run() -> T:
            client = replace(self.pool.client)
            try:
                return await work(replace(self.pool, client=client))
            finally:
                await client.close()

        return run_in_thread("remote-world", lambda: asyncio.run(run())).result()


def _tools_of(schemas: Sequence[Schema]) -> list[Tool]:
    return [described_tool(cast(ToolSchema, schema)) for schema in schemas]


def make_remote_world(settings: Mapping[str, object], limits: ToolLimits) -> RemoteWorld:
    """Build the world (the registered factory). Raises ConfigError for invalid settings."""
    chosen = read_settings(RemoteSettings, settings)
    if bool(chosen.urls) == bool(chosen.command):
        raise ConfigError("The remote world needs either env.settings.urls or env.settings.command.")
    if invalid := [url for url in chosen.urls if not url.startswith(("http://", "https://"))]:
        raise ConfigError(f"env.settings.urls: {invalid[0]!r} is not a URL.", "Start it with http://.")
    servers: list[Server] = [Server(url) for url in chosen.urls]
    if chosen.command:
        servers = [ServerProcess(chosen.command, chosen.start_timeout_s) for _ in range(chosen.processes)]
    token = read_token(Path(chosen.token_file)) if chosen.token_file else ""
    hint = "Check its log, or start it with `ludus env serve`."
    client = JsonClient("environment server", token, hint, connections=chosen.connections)
    return RemoteWorld(chosen, Pool(servers, client, chosen.timeout_s))
