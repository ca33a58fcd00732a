"""Server of sessions: running rollouts sample from the policy over HTTP, in the dialects of agents' SDKs.

    server = SessionServer()
    base_url, api_key = await server.add(session)    # http://127.0.0.1:PORT/s/KEY/v1

The key names the session, as API key or in the path of the base URL; a client with one key cannot reach another
session. A reply becomes part of the rollout before its last byte is sent; a cancelled or failed request leaves nothing.
A marked retry (`x-stainless-retry-count` above 0, or `idempotency-key`) gets the sent reply again. The server has
one thread; sampling runs on the event loop of the session.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import secrets
import threading
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, partial
from queue import Empty, SimpleQueue
from typing import Final

from pydantic import BaseModel, Field
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from ludus.errors import EngineBusy
from ludus.gateway.dialects.base import Dialect, SessionRequest
from ludus.gateway.dialects.chat import CHAT
from ludus.gateway.dialects.completions import COMPLETIONS
from ludus.gateway.dialects.messages import MESSAGES
from ludus.gateway.dialects.responses import RESPONSES
from ludus.gateway.endpoints import check_json, check_origin, check_shape, error_response, json_response
from ludus.gateway.limits import http_server, model_limits, open_socket, url_of
from ludus.gateway.protocol.bodies import BadRequest, read_body
from ludus.gateway.replies import BUSY, ERRORS, count_tokens, error_reply, keep_last, respond
from ludus.rollouts.agent_runs import TaskOffer
from ludus.rollouts.agent_session import AgentSession, InvalidRequest, PendingTurn, RolloutEnded
from ludus.types import Message, StopReason

log = logging.getLogger(__name__)

MAX_RUNNING: Final = 64
"""Maximum number of requests of one session at the same time."""
_MAX_ENDED: Final = 65536
_MAX_SENT, _MAX_HISTORIES = 32, 256  # replies and histories kept per session
_UNAUTHORIZED, _NOT_FOUND, _CONFLICT = 401, 404, 409
_NO_CONTENT: Final = 204
_START_S: Final = 10.0
_POLL_S: Final = 20.0  # time that a request for a task waits
_CONTEXT: Final = 2**17  # bodies of up to this many tokens are accepted; the session's limits refuse longer dialogues


@dataclass(eq=False)
class Served:
    """A session, the event loop that samples, and its sent replies for retries and `previous_response_id`."""

    key: str
    session: AgentSession
    loop: asyncio.AbstractEventLoop
    sent: OrderedDict[bytes, Response] = field(default_factory=OrderedDict)
    histories: OrderedDict[str, Sequence[Message]] = field(default_factory=OrderedDict)
    num_running: int = 0

    async def sample(self, parsed: SessionRequest) -> list[PendingTurn]:
        """Sample all replies of a request on the session's event loop."""
        if self.num_running >= MAX_RUNNING:
            raise EngineBusy(f"The session is already sampling {MAX_RUNNING} replies.", "Retry later.")

        async def replies() -> list[PendingTurn]:
            sample = partial(self.session.sample, parsed.messages, parsed.tools, parsed.limits)
            return list(await asyncio.gather(*(sample() for _ in range(parsed.num))))

        self.num_running += 1
        client = self.session.client
        if client is not None:
            client.hold(1)
        try:
            return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(replies(), self.loop))
        finally:
            self.num_running -= 1
            if client is not None:
                client.hold(-1)

    async def commit(self, name: str, parsed: SessionRequest, turns: Sequence[PendingTurn]) -> None:
        """Add replies to the rollout."""

        async def commit_all() -> None:
            for turn in turns:
                turn.commit()

        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(commit_all(), self.loop))
        self.session.add_response(name, [turn.place for turn in turns])
        keep_last(self.histories, f"resp_{name}", [*parsed.messages, turns[0].action.message], _MAX_HISTORIES)


_Act = Callable[[Request, Served], Awaitable[Response]]


class _Reward(BaseModel):
    """A reward of the rollout or, with the id of a response, of a turn: the choice `index` of several."""

    reward: float = Field(allow_inf_nan=False)
    response_id: str | None = None
    index: int | None = Field(None, ge=0)


class _Result(BaseModel):
    answer: str | None = None
    reward: float | None = Field(None, allow_inf_nan=False)
    error: str = ""


@dataclass(eq=False)
class SessionServer:
    """A server that starts with the first session. Clients with the `token` (empty: none) may request tasks."""

    host: str = "127.0.0.1"
    port: int = 0
    token: str = ""
    offers: SimpleQueue[TaskOffer] = field(default_factory=SimpleQueue, init=False)
    _served: dict[str, Served] = field(default_factory=dict, init=False)
    _ended: OrderedDict[str, StopReason] = field(default_factory=OrderedDict, init=False)
    _url: str = field(default="", init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)

    async def add(self, session: AgentSession) -> tuple[str, str]:
        """Accept requests for a session; return its base URL and API key."""
        with self._lock:
            self._url = self._url or self._start()
        key = f"sk-{secrets.token_urlsafe(24)}"
        self._served[key] = Served(key, session, asyncio.get_running_loop())
        return f"{self._url}/s/{key}/v1", key

    def remove(self, session: AgentSession) -> None:
        """Refuse requests for a session."""
        for key in [key for key, served in self._served.items() if served.session is session]:
            keep_last(self._ended, key, session.stop or StopReason.ANSWERED, _MAX_ENDED)
            del self._served[key]

    def app(self) -> Starlette:
        """Return the application."""
        endpoints: list[tuple[str, str, Dialect, _Act]] = [
            ("POST", "chat/completions", CHAT, partial(self._respond, CHAT)),
            ("POST", "completions", COMPLETIONS, partial(self._respond, COMPLETIONS)),
            ("POST", "responses", RESPONSES, partial(self._respond, RESPONSES)),
            ("POST", "messages", MESSAGES, partial(self._respond, MESSAGES)),
            ("POST", "messages/count_tokens", MESSAGES, self._count),
            ("POST", "reward", CHAT, self._reward),
            ("POST", "done", CHAT, self._done),
            ("GET", "models", CHAT, self._models),
            ("GET", "models/{model:path}", CHAT, self._models),
        ]
        routes = [
            Route(
                f"{prefix}/{path}", partial(self._answered, dialect, partial(self._in_session, act)), methods=[method]
            )
            for prefix in ("/s/{key}/v1", "/s/{key}", "/v1", "", "/s/{key}/v1/v1", "/v1/v1")
            for method, path, dialect, act in endpoints
        ]
        return Starlette(routes=[*routes, Route("/tasks", self._tasks)])

    def has_token(self, request: Request) -> bool:
        """Return whether a request has the `token`, which must not be empty."""
        header = request.headers.get("authorization", "")
        return bool(self.token) and secrets.compare_digest(header.encode(), f"Bearer {self.token}".encode())

    def _start(self) -> str:
        listener = open_socket(self.host, self.port)
        server = http_server(self.app(), model_limits(_CONTEXT), error_response)
        started = threading.Event()

        async def serve() -> None:
            asyncio.get_running_loop().call_soon(started.set)
            await server.serve(sockets=[listener])

        threading.Thread(target=lambda: asyncio.run(serve()), name="ludus-sessions", daemon=True).start()
        started.wait(_START_S)
        return url_of(listener)

    async def _in_session(self, act: _Act, request: Request) -> Response:
        served = self._find(request)
        try:
            return await act(request, served)
        except (BadRequest, InvalidRequest) as error:
            if not served.session.refused:  # agents may hide it
                log.warning("A request of the agent was refused: %s", error)
            served.session.refused = str(error)
            raise

    async def _answered(
        self, dialect: Dialect, act: Callable[[Request], Awaitable[Response]], request: Request
    ) -> Response:
        """Answer a request; errors have the dialect's form."""
        try:
            check_origin(request)
            return await act(request)
        except ERRORS as error:
            response = error_reply(error, dialect.error)
        except Exception as error:  # boundary: a bug, whose request SDKs must not repeat
            log.exception("A request of an agent failed.")
            response = error_reply(error, dialect.error)
        response.headers["x-should-retry"] = "true" if response.status_code == BUSY else "false"
        return response

    def _find(self, request: Request) -> Served:
        """Return the session of a request: that of the path, which an API key of another session may not read."""
        scheme, _, header = request.headers.get("authorization", "").partition(" ")
        header = header if scheme.lower() == "bearer" else ""
        given = [request.path_params.get("key", ""), header, request.headers.get("x-api-key", "")]
        found = {key for key in given if key in self._served}
        if not found and (ended := next((self._ended[key] for key in given if key in self._ended), None)):
            raise RolloutEnded(ended)
        if len(found) != 1 or (given[0] and given[0] not in found):
            raise BadRequest("The request has no API key of a running session.", _UNAUTHORIZED, "invalid_api_key")
        return self._served[found.pop()]

    async def _respond(self, dialect: Dialect, request: Request, served: Served) -> Response:
        raw = await request.body()
        check_json(request)
        check_shape(raw, _CONTEXT)
        retry = _retry_key(request, raw)
        if _is_retry(request) and retry in served.sent:
            return served.sent[retry]
        parsed = dialect.parse(raw, served.histories)
        renderer = served.session.renderer if parsed.stream else None

        async def commit(name: str, turns: Sequence[PendingTurn], response: Response) -> None:
            await served.commit(name, parsed, turns)
            keep_last(served.sent, retry, response, _MAX_SENT)

        return await respond(request, dialect, parsed, renderer, served.sample, commit)

    async def _count(self, request: Request, served: Served) -> Response:
        raw = await request.body()
        check_json(request)
        return json_response(await asyncio.to_thread(count_tokens, raw, served.session.renderer))

    async def _models(self, request: Request, served: Served) -> Response:
        card = {"id": "policy", "object": "model", "created": 0, "owned_by": "ludus"}
        if name := request.path_params.get("model"):
            return JSONResponse(card | {"id": name})
        return JSONResponse({"object": "list", "data": [card]})

    async def _reward(self, request: Request, served: Served) -> Response:
        check_json(request)
        given = read_body(_Reward, await request.body())
        if given.response_id is None:
            served.session.reward = given.reward
        else:
            try:
                served.session.reward_reply(given.response_id, given.reward, given.index)
            except LookupError as error:
                raise BadRequest(str(error), _NOT_FOUND) from error
            except ValueError as error:
                raise BadRequest(str(error)) from error
        if served.session.client is not None:
            served.session.client.touch()
        return JSONResponse({"status": "ok"})

    async def _done(self, request: Request, served: Served) -> Response:
        """End the rollout of a remote agent."""
        check_json(request)
        found = read_body(_Result, await request.body())
        if served.session.client is None:
            raise BadRequest("The agent of this session is not remote.", _CONFLICT)
        served.session.client.finish(found.answer, found.reward, found.error)
        return JSONResponse({"status": "ok"})

    async def _tasks(self, request: Request) -> Response:
        """Return a task and its address; 204 if there is none within `_POLL_S`."""
        if not self.has_token(request):
            return error_response(_UNAUTHORIZED, "This path needs the token of rollout.agent.token_file.")
        deadline = asyncio.get_running_loop().time() + _POLL_S
        while asyncio.get_running_loop().time() < deadline and not await request.is_disconnected():
            with suppress(Empty):
                offer = self.offers.get_nowait()
                if offer.take():
                    return JSONResponse(offer.body(str(request.base_url).rstrip("/")))
                continue
            await asyncio.sleep(0.05)
        return Response(status_code=_NO_CONTENT)


def _retry_key(request: Request, raw: bytes) -> bytes:
    name = f"{request.url.path}\n{request.headers.get('idempotency-key', '')}\n"
    return hashlib.blake2b(name.encode() + raw, digest_size=16).digest()


def _is_retry(request: Request) -> bool:
    count = request.headers.get("x-stainless-retry-count", "0")
    return (count.isdecimal() and int(count[:9]) > 0) or "idempotency-key" in request.headers


@cache
def session_server(host: str = "127.0.0.1", port: int = 0, token: str = "") -> SessionServer:
    """Return the server of this process with an address."""
    return SessionServer(host, port, token)
