"""The HTTP server: routes, errors and client disconnects.

Needs the `serve` extra (starlette and uvicorn). Every error is JSON with a message. Control endpoints return
403 if the server has no control token, and 401 if the request does not send it.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse

from ludus.errors import EngineBusy, EngineError, RequestRejected
from ludus.gateway.control import ControlEndpoints
from ludus.gateway.endpoints import ControlAccess, HttpRouter, NoBody, error_response, json_response
from ludus.gateway.generation import complete, complete_chat, stream, stream_chat
from ludus.gateway.protocol.bodies import (
    BadRequest,
    ChatRequest,
    CompletionRequest,
    JsonBody,
    Sampling,
    error_body,
    json_bytes,
)
from ludus.gateway.service import CompletionService

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Result = TypeVar("Result")

_CLIENT_GONE = 499
_REFUSED, _BUSY, _FAILED = 400, 429, 500


def make_app(service: CompletionService, model: PreTrainedModel) -> Starlette:
    """Create the application. `model` is the engine's model, hashed by `/weight_checker`."""
    access = ControlAccess(service.control_token, service.control_hosts) if service.control_token else None
    router = HttpRouter(service.threads, service.engine.context_tokens, access)
    PublicEndpoints(service).add_to(router)
    ControlEndpoints(service, model).add_to(router)
    kinds = (BadRequest, EngineError, HTTPException, Exception)
    return Starlette(routes=router.routes, exception_handlers=dict.fromkeys(kinds, _error))


@dataclass(frozen=True)
class PublicEndpoints:
    """Public endpoints."""

    service: CompletionService

    def add_to(self, router: HttpRouter) -> None:
        router.add("/v1/models", NoBody, self.models, method="GET")
        router.add("/v1/completions", CompletionRequest, self.completions)
        router.add("/v1/chat/completions", ChatRequest, self.chat)
        router.add("/health", NoBody, self.health, method="GET")
        router.add("/metrics", NoBody, self.metrics, method="GET")
        router.add("/weight_info", NoBody, self.weight_info, method="GET")
        router.add("/is_paused", NoBody, self.is_paused, method="GET")

    async def models(self, _: Request, __: NoBody) -> Response:
        model, engine = self.service.model, self.service.engine
        named: list[tuple[str, str, str | None, int]] = [(model.name, model.root, None, engine.version)]
        named += [(a.name, a.root, model.name, a.version) for a in self.service.adapters.by_name.values()]
        common = {"object": "model", "created": model.created, "owned_by": "ludus"}
        traits = {"max_model_len": engine.context_tokens, "batch_invariant": engine.batch_invariant}
        cards = [
            {"id": name, **common, "root": root, "parent": parent, "weight_version": str(version), **traits}
            for name, root, parent, version in named
        ]
        return json_response({"object": "list", "data": cards})

    async def completions(self, request: Request, body: CompletionRequest) -> Response:
        name = self._name("cmpl", body)
        if body.stream:
            return await _event_stream(stream(self.service, name, body))
        return await self._respond(request, body, partial(complete, self.service, name, body))

    async def chat(self, request: Request, body: ChatRequest) -> Response:
        name = self._name("chatcmpl", body)
        if body.stream:
            return await _event_stream(stream_chat(self.service, name, body))
        return await self._respond(request, body, partial(complete_chat, self.service, name, body))

    def _name(self, kind: str, body: Sampling) -> str:
        self.service.adapter(body.model)  # raises BadRequest if it is not served
        return f"{kind}-{body.request_id or secrets.token_hex(12)}"

    async def health(self, _: Request, __: NoBody) -> Response:
        return JSONResponse({"status": "paused" if self.service.is_paused else "ok"})

    async def metrics(self, _: Request, __: NoBody) -> Response:
        return PlainTextResponse(prometheus_text(self.service), media_type="text/plain; version=0.0.4")

    async def weight_info(self, _: Request, __: NoBody) -> Response:
        return JSONResponse({"weight_version": str(self.service.engine.version)})

    async def is_paused(self, _: Request, __: NoBody) -> Response:
        return JSONResponse({"is_paused": self.service.is_paused})

    async def _respond(self, request: Request, body: Sampling, complete: Callable[[], Awaitable[JsonBody]]) -> Response:
        """Compute a response until the client disconnects; a repeated `request_id` shares one computation."""

        async def work() -> bytes:
            return await self.service.threads.do(partial(json_bytes, await complete()))

        name = body.request_id
        pending = work() if name is None else self.service.responses.get_or_compute(name, await request.body(), work)
        content = await _until_disconnect(request, pending)
        if content is None:
            return Response(status_code=_CLIENT_GONE)
        if name is not None and b'"finish_reason":"abort"' in content:
            self.service.responses.discard(name)
        return Response(content, media_type="application/json")


async def _until_disconnect(request: Request, work: Awaitable[Result]) -> Result | None:
    """Return the result of `work`. If the client disconnects first, cancel it and return None."""

    async def wait() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    task, disconnected = asyncio.ensure_future(work), asyncio.ensure_future(wait())
    try:
        await asyncio.wait({task, disconnected}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        disconnected.cancel()
        task.cancel()


async def _event_stream(pieces: AsyncIterator[JsonBody]) -> Response:
    """Send server-sent events. Invalid requests are rejected before the first byte."""
    first = await anext(pieces)

    async def events() -> AsyncIterator[bytes]:
        try:
            yield b"data: " + json_bytes(first) + b"\n\n"
            async for piece in pieces:
                yield b"data: " + json_bytes(piece) + b"\n\n"
        except EngineError as error:
            yield b"data: " + json_bytes(error_body(str(error), _FAILED)) + b"\n\n"
        yield b"data: [DONE]\n\n"

    return StreamingResponse(events(), media_type="text/event-stream")


async def _error(_: Request, error: Exception) -> Response:
    match error:
        case BadRequest():
            return error_response(error.status, error.message, error.code)
        case HTTPException():
            response = error_response(error.status_code, f"{error.detail}.")
            response.headers.update(error.headers or {})
            return response
        case EngineBusy():
            response = error_response(_BUSY, str(error))
            response.headers["Retry-After"] = "1"
            return response
        case EngineError():
            return error_response(_REFUSED if isinstance(error, RequestRejected) else _FAILED, str(error))
    return error_response(_FAILED, f"{type(error).__name__}: {error}")


def prometheus_text(service: CompletionService) -> str:
    """Return counters and gauges in text format 0.0.4."""
    stats = service.engine.stats()
    counters = {
        "requests_total": ("Choices requested.", service.num_requests),
        "passes_total": ("Forward passes.", stats.steps),
        "prefill_tokens_total": ("Tokens computed as context.", stats.prefill_tokens),
        "cached_tokens_total": ("Context tokens read from the cache.", stats.cached_tokens),
        "decode_tokens_total": ("Tokens sampled.", stats.decode_tokens),
        "recomputed_tokens_total": ("Tokens recomputed after weight updates.", stats.recomputed_tokens),
        "batch_tokens_total": ("Tokens of all passes.", stats.batch_tokens),
        "evicted_pages_total": ("Evicted cache pages.", stats.evicted_pages),
        "model_seconds_total": ("Seconds in forward passes.", stats.model_s),
        "sample_seconds_total": ("Seconds in sampling.", stats.sample_s),
        "running_sum_total": ("Running requests, summed over the passes.", stats.running_steps),
        "waiting_sum_total": ("Waiting requests, summed over the passes.", stats.queue_steps),
        "schedule_seconds_total": ("Seconds in the rest of the passes.", stats.schedule_s),
    }
    gauges = {
        "choices_under_way": ("Waiting and running choices.", service.num_under_way),
        "paused": ("1 while paused.", int(service.is_paused)),
        "weight_version": ("Version of the current weights.", service.engine.version),
    }
    return "".join(
        f"# HELP ludus_{name} {description}\n# TYPE ludus_{name} {kind}\nludus_{name} {value}\n"
        for kind, family in (("counter", counters), ("gauge", gauges))
        for name, (description, value) in family.items()
    )
