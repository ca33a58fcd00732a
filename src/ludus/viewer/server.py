"""HTTP server of the viewer: the API, the static files, and the checks of every request."""

from __future__ import annotations

import hmac
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from urllib.parse import parse_qs

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import FileResponse, RedirectResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ludus.errors import LudusError
from ludus.evaluation.exports import json_text
from ludus.viewer.pages import RunPages

STATIC = Path(__file__).parent / "static"
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
}
_COOKIE = "ludus_viewer"
_LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
_REFRESH_S = 2.0
_MAX_BODY = 64 * 1024


@dataclass(frozen=True)
class Guard:
    """ASGI middleware that adds `HEADERS` and rejects requests without the token, or for another host.

    Without a token, the Host header must name the loopback interface, so that a page of another site cannot reach the
    server through a domain that resolves to it (DNS rebinding).
    """

    app: ASGIApp
    token: str

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                added = [(name.encode(), value.encode()) for name, value in HEADERS.items()]
                message = {**message, "headers": [*message.get("headers", []), *added]}
            await send(message)

        refusal = self._refusal(Request(scope))
        await (refusal or self.app)(scope, receive, send_with_headers)

    def _refusal(self, request: Request) -> Response | None:
        if not self.token:
            host = request.headers.get("host", "").rpartition(":")
            name = host[0] if host[2].isdigit() and host[0] else "".join(host)
            return None if name in _LOOPBACK else Response("unknown host", 400)
        given = request.query_params.get("token", "")
        if given and hmac.compare_digest(given.encode(), self.token.encode()):
            response = RedirectResponse("/", 303)
            response.set_cookie(_COOKIE, self.token, httponly=True, samesite="strict")
            return response
        cookie = request.cookies.get(_COOKIE, "")
        return None if hmac.compare_digest(cookie.encode(), self.token.encode()) else Response("no token", 401)


@dataclass
class ViewerApi:
    """Handlers of the API. With `live`, requests for the run index new files first, at most every 2 s."""

    pages: RunPages
    live: bool = False
    _refreshed: float = 0.0

    def routes(self) -> list[Route]:
        """Return the routes."""
        gets: Mapping[str, Callable[[Request], object]] = {
            "/api/run": self.run,
            "/api/rollouts": self.rollouts,
            "/api/rollout/{id:int}": lambda request: self.pages.rollout(request.path_params["id"]),
            "/api/group/{id:int}": lambda request: self.pages.group(request.path_params["id"]),
            "/api/task": lambda request: self.pages.task(request.query_params.get("task", "")),
            "/api/compare": lambda request: self.pages.compare(*(request.query_params.get(name, "") for name in "ab")),
            "/api/pair/{a:int}/{b:int}": lambda request: self.pages.pair(**request.path_params),
            "/api/timeline/{step:int}": lambda request: self.pages.timeline(request.path_params["step"]),
            "/api/curves": lambda _: self.pages.curves(),
            "/api/unlabelled": lambda _: self.pages.unlabelled(),
            "/api/probes": lambda _: self.pages.probes(),
            "/api/labels": lambda _: self.pages.labelled(),
        }
        posts = [Route("/api/label/{id:int}", self.label, methods=["POST"])]
        return [*(Route(path, partial(_answer, handler)) for path, handler in gets.items()), *posts]

    def run(self, _: Request) -> object:
        """Return the run, after indexing new files if it is live."""
        if self.live and time.monotonic() - self._refreshed > _REFRESH_S:
            self._refreshed = time.monotonic()
            self.pages.index.refresh()
        return {**self.pages.run(), "live": self.live}

    def rollouts(self, request: Request) -> object:
        """Return a page of rollouts."""
        query = {name: values[-1] for name, values in parse_qs(request.url.query).items()}
        numbers = {name: int(query.pop(name, default)) for name, default in (("limit", "50"), ("offset", "0"))}
        sort = query.pop("sort", "id")
        empty = {"source": ""} if "training" in query and query.pop("training") else {}
        total, rows = self.pages.index.select({**query, **empty}, sort, **{k: max(0, v) for k, v in numbers.items()})
        return {"total": total, "rows": rows}

    async def label(self, request: Request) -> Response:
        """Store a label. Only JSON is accepted, which other sites cannot send without permission."""
        if request.headers.get("content-type", "") != "application/json":
            return Response("send JSON", 415)
        body = await request.body()
        if len(body) > _MAX_BODY:
            return Response("too large", 413)

        def store() -> object:
            data = json.loads(body)
            if not isinstance(data, dict):
                raise ValueError("not an object")
            return self.pages.add_label(request.path_params["id"], data.get("label"), data.get("note", ""))

        return await run_in_threadpool(_answer, store)


def _answer(make: Callable[..., object], *values: object) -> Response:
    """Return the JSON of what a function returns, or its error with status 400."""
    try:
        return Response(json_text(make(*values)), media_type="application/json")
    except (LudusError, ValueError) as error:
        text = str(error) if isinstance(error, LudusError) else "The request is invalid."
        return Response(json_text({"error": text}), 400, media_type="application/json")


def make_app(pages: RunPages, *, token: str = "", live: bool = False) -> ASGIApp:
    """Return the application. Without a token, it must be bound to the loopback interface."""
    index = Route("/", lambda _: FileResponse(STATIC / "index.html"))
    static = Mount("/static", StaticFiles(directory=STATIC))
    return Guard(Starlette(routes=[index, *ViewerApi(pages, live).routes(), static]), token)
