"""HTTP server of a world, for `ludus env serve`. Needs the `serve` extra.

An episode is an asyncio task that starts, steps and closes its environment. Its client chooses its name, a secret, and
numbers its requests: 0 starts the episode, n is the n-th action. A request with the number of the last reply returns
that reply again, so that a client may repeat any request. An exception of the environment, or idle time, ends it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice

from pydantic import BaseModel
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from ludus.envs.base import Demonstration, Environment, World
from ludus.envs.remote.messages import (
    CloseRequest,
    EpisodeReply,
    InfoRequest,
    PageRequest,
    RewardRecord,
    Solutions,
    StepRequest,
    TaskPage,
    TaskRecord,
    TaskRequest,
    ToolTable,
    WorldInfo,
    pack_chat,
)
from ludus.envs.tool_env import describe_error
from ludus.errors import LudusError, UserError, WorldError
from ludus.rewards.base import score
from ludus.types import Action, Message, Segment, StepResult, StopReason, Task, ToolOutcome, Trajectory
from ludus.untrusted.json_service import JsonService, parse

log = logging.getLogger(__name__)
MAX_BODY_BYTES = 8 * 2**20
_PAGE_CHARS = 8 * 2**20
"""Characters of prompts after which a page ends."""
_MIN_NAME = 20
_MAX_CURSORS = 16
_OFFERS = ("demonstrations", "texts", "expert", "paraphrases", "alternative_solutions", "cheats")


@dataclass(frozen=True, slots=True)
class EnvServerSettings:
    """Without a token, clients must be on this machine. `max_episodes` bounds open episodes, `idle_s` their idle time.

    `hosts` are the host names by which this machine is reached without a token.
    """

    token: str = ""
    max_episodes: int = 4096
    idle_s: float = 900.0
    hosts: tuple[str, ...] = ("127.0.0.1", "localhost", "::1")


def placeholder_trajectory(
    task: Task, messages: Sequence[Message], outcomes: Sequence[ToolOutcome], stop: StopReason
) -> Trajectory:
    """Return an episode for rewards: each message of the model is a segment with one placeholder token."""
    num = sum(message["role"] == "assistant" for message in messages[len(task.prompt) :])
    segments = tuple(Segment("action", (0,), turn, logprobs=(0.0,), versions=(0,)) for turn in range(num))
    return Trajectory(task.id, 0, segments, tuple(messages), stop, tuple(outcomes), tags=dict(task.tags))


@dataclass(eq=False)
class _Episode:
    """One episode. `requests` are its pending requests, each with the number and action of a step."""

    environment: Environment
    task: Task
    idle_s: float
    requests: asyncio.Queue[tuple[StepRequest | None, asyncio.Future[EpisodeReply]]] = field(
        default_factory=asyncio.Queue
    )
    messages: list[Message] = field(default_factory=list)
    outcomes: list[ToolOutcome] = field(default_factory=list)
    reply: EpisodeReply | None = None

    async def ask(self, request: StepRequest | None) -> EpisodeReply:
        """Queue a request, None for the start, and wait for its reply."""
        future: asyncio.Future[EpisodeReply] = asyncio.get_running_loop().create_future()
        self.requests.put_nowait((request, future))
        return await future

    async def play(self) -> None:
        """Serve requests until idle for too long, an exception, or cancellation; then close the environment."""
        future: asyncio.Future[EpisodeReply] | None = None
        error: LudusError = WorldError("The episode has ended on the environment server.")
        try:
            while (found := await self._next()) is not None:
                request, future = found
                if (wrong := self._order_error(request)) is not None:
                    future.set_exception(wrong)
                else:
                    future.set_result(await self._answer(request))
        except LudusError as raised:
            error = raised
        except Exception as raised:  # boundary: user code; the client receives its message
            error = WorldError(f"The environment raised {describe_error(raised)}")
        finally:
            pending = [future] if future is not None else []
            while not self.requests.empty():
                pending.append(self.requests.get_nowait()[1])
            for one in pending:
                if not one.done():
                    one.set_exception(error)
            await self._close()

    async def _close(self) -> None:
        try:
            await self.environment.close()
        except Exception as error:  # boundary: user code; the result of the episode is known
            log.warning("The environment of task %s failed to close: %s", self.task.id, describe_error(error))

    async def _next(self) -> tuple[StepRequest | None, asyncio.Future[EpisodeReply]] | None:
        with suppress(TimeoutError):
            async with asyncio.timeout(self.idle_s):
                return await self.requests.get()
        return None

    def _order_error(self, request: StepRequest | None) -> UserError | None:
        step, last = request.step if request else 0, self.reply
        follows = step == 0 if last is None else step == last.step or (step == last.step + 1 and not last.done)
        return None if follows else UserError(f"Step {step} does not follow the last step of the episode.")

    async def _answer(self, request: StepRequest | None) -> EpisodeReply:
        step = request.step if request else 0
        if self.reply is None or step != self.reply.step:
            self.reply = await (self._start() if request is None else self._step(step, request.action))
        return self.reply

    async def _start(self) -> EpisodeReply:
        self.messages += await self.environment.start(self.task)
        return EpisodeReply(step=0, messages=pack_chat(self.messages), state=self._state())

    async def _step(self, step: int, action: Action) -> EpisodeReply:
        result: StepResult = await self.environment.step(action)
        self.messages += [action.message, *result.messages]
        self.outcomes += result.outcomes
        stop = StopReason.ANSWERED if result.done else StopReason.MAX_TURNS
        ended = placeholder_trajectory(self.task, self.messages, self.outcomes, stop)
        graded = await asyncio.to_thread(score, self.environment.rewards, self.task, ended)
        return EpisodeReply(
            step=step,
            messages=pack_chat(result.messages),
            done=result.done,
            reward=result.reward,
            outcomes=result.outcomes,
            grades=dict(graded.rewards),
            state=self._state(),
        )

    def _state(self) -> str:
        return self.environment.state_key() if self.environment.implements("state_key") else ""


@dataclass
class _Service:
    world: World
    settings: EnvServerSettings
    episodes: dict[str, tuple[_Episode, asyncio.Task[None]]] = field(default_factory=dict)
    cursors: dict[tuple[str, int], tuple[int, Iterator[Demonstration | str]]] = field(default_factory=dict)
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    @cached_property
    def tasks(self) -> Mapping[str, Mapping[str, Task]]:
        """The tasks by split and id."""
        return {split: {task.id: task for task in self.world.tasks(split)} for split in self.world.splits}

    async def describe(self, _: Request, body: bytes) -> BaseModel:
        await parse(InfoRequest, body)
        async with self.lock:
            return await asyncio.to_thread(self._info)

    async def page(self, _: Request, body: bytes) -> BaseModel:
        request = await parse(PageRequest, body)
        async with self.lock:
            if request.kind == "tasks":
                return await self._task_page(request)
            return await asyncio.to_thread(self._stream_page, request)

    async def solutions(self, _: Request, body: bytes) -> BaseModel:
        task = self._find(await parse(TaskRequest, body))
        async with self.lock:
            return await asyncio.to_thread(self._solutions, task)

    async def start(self, request: Request, body: bytes) -> BaseModel:
        name, message = request.path_params["name"], await parse(TaskRequest, body)
        if name not in self.episodes:
            if len(name) < _MIN_NAME:
                raise UserError(f"The name of an episode needs at least {_MIN_NAME} random characters.")
            if len(self.episodes) >= self.settings.max_episodes:
                raise WorldError(f"The environment server is at its limit of {len(self.episodes)} episodes.")
            task = self._find(message)
            self._open(name, task)
        return await self.episodes[name][0].ask(None)

    async def step(self, request: Request, body: bytes) -> BaseModel:
        message = await parse(StepRequest, body)
        found = self.episodes.get(request.path_params["name"])
        if found is None:
            raise WorldError(
                "The episode does not exist on the environment server: it failed, was idle, or was closed."
            )
        return await found[0].ask(message)

    async def close(self, request: Request, body: bytes) -> BaseModel:
        message = await parse(CloseRequest, body)
        found = self.episodes.pop(request.path_params["name"], None)
        if found is not None:
            found[1].cancel()
            await asyncio.wait({found[1]})
        return message

    async def health(self, _: Request) -> Response:
        return JSONResponse({"status": "ok", "episodes": len(self.episodes)})

    async def shut_down(self) -> None:
        tasks = [task for _, task in self.episodes.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.world.close()

    def _open(self, name: str, task: Task) -> None:
        try:
            environment = self.world.environment(task)
        except LudusError:
            raise
        except Exception as error:  # boundary: user code; the client receives its message
            raise WorldError(f"No environment for task {task.id}: {describe_error(error)}") from error
        episode = _Episode(environment, task, self.settings.idle_s)
        playing = asyncio.create_task(episode.play())
        playing.add_done_callback(lambda _: self.episodes.pop(name, None))
        self.episodes[name] = episode, playing

    def _find(self, request: TaskRequest) -> Task:
        found = self.tasks.get(request.split, {}).get(request.id)
        if found is None:
            raise UserError(f"The split {request.split!r} has no task {request.id!r}.")
        return found

    def _info(self) -> WorldInfo:
        world, sizes = self.world, {split: len(tasks) for split, tasks in self.tasks.items()}
        first = next(task for tasks in self.tasks.values() for task in tasks.values())
        parts = [RewardRecord(name=p.name, weight=p.weight, outcome=p.outcome, low=p.low) for p in world.rewards]
        return WorldInfo(
            name=world.name,
            splits=sizes,
            rewards=tuple(parts),
            implements=tuple(name for name in _OFFERS if world.implements(name)),
            emits_turn_rewards=world.emits_turn_rewards,
            has_state_key=world.environment(first).implements("state_key"),
            num_text_dialogues=world.num_text_dialogues,
            episodes_at_once=min(self.settings.max_episodes, world.episodes_at_once or self.settings.max_episodes),
            difficulty_report=world.difficulty_report(),
        )

    async def _task_page(self, request: PageRequest) -> TaskPage:
        """Return tasks with their tools, which are those of an environment that is closed without a start."""
        if request.split not in self.tasks:
            raise UserError(f"The world has no split {request.split!r}.")
        tasks = list(self.tasks[request.split].values())
        records, table, size, end = list[TaskRecord](), ToolTable(), 0, request.start
        while end < len(tasks) and len(records) < request.num and size < _PAGE_CHARS:
            task, end = tasks[end], end + 1
            environment = self.world.environment(task)
            tools = table.add([tool.schema for tool in environment.tools])
            await environment.close()
            prompt, tags = pack_chat(task.prompt), dict(task.tags)
            records.append(TaskRecord(id=task.id, prompt=prompt, tags=tags, seed=task.seed, tools=tools))
            size += sum(len(message.content) for message in prompt)
        return TaskPage(tasks=tuple(records), tools=table.schemas, is_last=end >= len(tasks))

    def _stream_page(self, request: PageRequest) -> TaskPage:
        """Return items of a stream; its iterator is kept for the next page."""
        key = request.kind, request.seed
        position, items = self.cursors.pop(key, (-1, iter(())))
        if position != request.start:
            items = iter(self.world.texts() if key[0] == "texts" else self.world.demonstrations(request.seed))
            items = islice(items, request.start, None)
        found, table = list(islice(items, request.num)), ToolTable()
        self.cursors[key] = request.start + len(found), items
        if len(self.cursors) > _MAX_CURSORS:
            del self.cursors[next(iter(self.cursors))]
        dialogues = tuple(table.pack(one) for one in found if not isinstance(one, str))
        texts, is_last = tuple(one for one in found if isinstance(one, str)), len(found) < request.num
        return TaskPage(dialogues=dialogues, texts=texts, tools=table.schemas, is_last=is_last)

    def _solutions(self, task: Task) -> Solutions:
        shown, table = self.world.expert(task), ToolTable()
        expert = None if shown is None else table.pack(shown)
        return Solutions(
            expert=expert,
            tools=table.schemas,
            alternatives=tuple(map(pack_chat, self.world.alternative_solutions(task))),
            cheats={name: pack_chat(messages) for name, messages in self.world.cheats(task).items()},
            paraphrases=tuple(self.world.paraphrases(task)),
        )


def make_app(world: World, settings: EnvServerSettings) -> Starlette:
    """Create the application, which closes the world on shutdown. Raises UserError for a world of other episodes."""
    if world.runs_agents or world.roles or world.needs_opponents:
        text = f"The world {world.name!r} has agents that own their loop, several agents, or opponents."
        raise UserError(text, "Train on it in the process of the trainer.")
    service = _Service(world, settings)
    if not any(service.tasks.values()):
        raise UserError(f"The world {world.name!r} has no tasks.")
    http = JsonService("environment server", settings.token, settings.hosts)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        try:
            yield
        finally:
            await service.shut_down()

    routes = [
        Route("/health", service.health),
        http.route("/v1/world", service.describe),
        http.route("/v1/pages", service.page),
        http.route("/v1/solutions", service.solutions),
        http.route("/v1/episodes/{name}/start", service.start),
        http.route("/v1/episodes/{name}/step", service.step),
        http.route("/v1/episodes/{name}/close", service.close),
    ]
    handlers = {HTTPException: http.handle_error, Exception: http.handle_error}
    return Starlette(routes=routes, lifespan=lifespan, exception_handlers=handlers)
