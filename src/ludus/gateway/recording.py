"""Sessions of a served policy that are stored as rollouts, with the feedback of their clients (`ludus serve --record`).

    POST /sessions                       with the server's token: {"id", "base_url", "api_key"}
    POST BASE_URL/chat/completions, ...  as in `sessions`
    POST BASE_URL/reward, /done          feedback; the end, which an idle time is as well

A session is stored when it ends, before the response to `done`: a crash loses the open ones only. A rollout without
feedback has the reason `no reward`, and no entry in `rewards`. All runs on the event loop of the server.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Final

from pydantic import BaseModel, Field
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ludus.config.sections.rollout import RolloutConfig
from ludus.errors import EngineBusy, EngineError, LudusError, WorldError
from ludus.gateway.dialects.chat import CHAT
from ludus.gateway.endpoints import check_json, json_response
from ludus.gateway.protocol.bodies import BadRequest, read_body
from ludus.gateway.sessions import Served, SessionServer
from ludus.rollouts.agent_runs import AgentResult, TaskOffer, trajectory_of
from ludus.rollouts.agent_session import AgentSession
from ludus.rollouts.episode import ChatSession
from ludus.rollouts.ledger import RolloutOutcome
from ludus.rollouts.rollout_files import NO_REWARD, SESSION_PREFIX, RolloutRecord, append_rollout, rollouts_path
from ludus.types import Failure, StopReason, Task, Trajectory

log = logging.getLogger(__name__)

_REPORTED: Final = "reported"  # name of the reward part
_PER_FILE: Final = 256  # rollouts per file
_UNAUTHORIZED: Final = 401


class _OpenSession(BaseModel):
    """A new session. Sessions of one `task` in one file are a group."""

    task: str | None = Field(None, min_length=1, max_length=200, pattern="^[ -~]+$")


@dataclass(frozen=True)
class RecordingLimits:
    """Limits of the sessions: those of a rollout, seconds without a request, and the number of open ones."""

    rollout: RolloutConfig
    idle_s: float = 600.0
    max_sessions: int = 256


class SessionRecorder(SessionServer):
    """Sessions that are stored in a run folder. `make_chat` returns a dialogue of the session with a name."""

    def __init__(
        self, folder: Path, make_chat: Callable[[str], ChatSession], limits: RecordingLimits, token: str
    ) -> None:
        super().__init__(token=token)
        self._url = "http://server"  # no listener: `app` is part of the server, whose address clients get
        self._folder, self._make_chat, self._limits = folder, make_chat, limits
        self._open: dict[AgentSession, asyncio.Task[None]] = {}
        self._writing = asyncio.Lock()
        files = folder.glob("rollouts/step-*.jsonl.gz")
        first = max((int(file.name.split("-")[1].split(".")[0]) for file in files), default=0) + 1
        self._names = (f"{SESSION_PREFIX}{first:06d}-{number:06d}" for number in count(1))
        self._places = ((step, place) for step in count(first) for place in range(_PER_FILE))

    def app(self) -> Starlette:
        """Return the application."""
        app = super().app()
        app.routes.append(Route("/sessions", partial(self._answered, CHAT, self._start_session), methods=["POST"]))
        return app

    @asynccontextmanager
    async def lifespan(self, _: Starlette) -> AsyncIterator[None]:
        """Store the open sessions when the server stops."""
        try:
            yield
        finally:
            for session in self._open:
                if session.client is not None:
                    session.client.finish(None, None, "")
            await asyncio.gather(*self._open.values(), return_exceptions=True)

    async def _start_session(self, request: Request) -> Response:
        """Open a session."""
        if not self.has_token(request):
            raise BadRequest("This path needs the server's session token.", _UNAUTHORIZED)
        check_json(request)
        parsed = read_body(_OpenSession, await request.body())
        if len(self._open) >= self._limits.max_sessions:
            raise EngineBusy(f"{self._limits.max_sessions} sessions are open.", "Retry later.")
        name = next(self._names)
        task = Task(parsed.task or name, (), None)
        session = AgentSession(partial(self._make_chat, name), self._limits.rollout)
        session.address = await self.add(session)
        offer = TaskOffer(task, (), session.address)
        session.client = offer
        offer.take()
        running = self._open[session] = asyncio.create_task(self._record(task, session, offer))
        running.add_done_callback(partial(self._forget, session))
        found = offer.body(str(request.base_url).rstrip("/"))
        return json_response({"id": name, "base_url": str(found["base_url"]), "api_key": session.address[1]})

    def _forget(self, session: AgentSession, running: asyncio.Task[None]) -> None:
        del self._open[session]
        if not running.cancelled() and (error := running.exception()) is not None:
            log.error("a session was not stored: %s", error)

    async def _record(self, task: Task, session: AgentSession, offer: TaskOffer) -> None:
        """Wait for the end of a session and store it, unless it has no reply. Raises EngineError."""
        result = AgentResult()
        with suppress(WorldError):  # idle
            result = await offer.finished(self._limits.idle_s)
        session.answer, reward = result.answer, _feedback(session, result)
        stop = session.stop or (StopReason.AGENT_FAILED if result.error else StopReason.ANSWERED)
        session.close()
        self.remove(session)
        if not session.num_turns:
            return
        trajectory = trajectory_of(task, 0, session, stop)
        async with self._writing:
            step, place = next(self._places)
            record = _record_of(replace(trajectory, sample=place), step, reward, session.error)
            try:
                await asyncio.to_thread(append_rollout, rollouts_path(self._folder, step), record)
            except LudusError as error:
                raise EngineError(f"The session could not be stored: {error}") from error

    async def _done(self, request: Request, served: Served) -> Response:
        """End a session; the response is sent when it is stored."""
        running = self._open.get(served.session)
        response = await super()._done(request, served)
        if running is not None:
            await asyncio.shield(running)
        return response


def _feedback(session: AgentSession, result: AgentResult) -> float | None:
    """Return the reward of a session, the last that was reported, or else the sum of those of its replies."""
    reported = session.reward if result.reward is None else result.reward
    replies = session.rewards_by_place.values()
    return sum(replies) if reported is None and replies else reported


def _record_of(trajectory: Trajectory, step: int, reward: float | None, error: LudusError | None) -> RolloutRecord:
    """Return the record of a session. Without feedback it has no reward part."""
    if error is not None:
        failed = replace(trajectory, failure=Failure(error.part, str(error), 1))
        return RolloutRecord(step, trajectory.task_id, RolloutOutcome.FAILED, error.part, failed)
    if reward is None:
        return RolloutRecord(step, trajectory.task_id, RolloutOutcome.DROPPED, NO_REWARD, trajectory)
    rewarded = replace(trajectory, reward=reward, rewards={_REPORTED: reward})
    return RolloutRecord(step, trajectory.task_id, RolloutOutcome.DROPPED, "recorded", rewarded)
