"""The HTTP server: routes, errors, and clients that go away.

Needs the `serve` extra (starlette and uvicorn). Every error is JSON with a sentence. What clients may not do
without `control` answers 403; it is meant for a trainer on the same machine or a trusted network.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from pydantic import AliasChoices, BaseModel, Field
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from ludus.engines.broadcast import Manifest, Place
from ludus.errors import EngineBusy, EngineError, RequestRefused
from ludus.gateway import chat, completions
from ludus.gateway.answers import ErrorAnswer, ErrorInfo, ModelCard, ModelList
from ludus.gateway.metrics import prometheus_text
from ludus.gateway.requests import BadRequest, ChatRequest, CompletionRequest, Sampling, read_body
from ludus.gateway.service import PauseMode, Service
from ludus.gateway.weights import WeightDesk

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Asked = TypeVar("Asked", bound=Sampling)
Result = TypeVar("Result")

_FORBIDDEN, _FAILED, _CLIENT_GONE = 403, 500, 499

_REFUSED, _BUSY = 400, 429


def make_app(service: Service, model: PreTrainedModel) -> Starlette:
    """The application; `model` is the engine's own, whose parameters are hashed."""
    public, control = _Public(service), _Control(service, WeightDesk(service, model))
    post, get = ["POST"], ["GET"]
    routes = [
        Route("/v1/models", public.models, methods=get),
        Route("/v1/completions", public.completions, methods=post),
        Route("/v1/chat/completions", public.chat, methods=post),
        Route("/health", public.health, methods=get),
        Route("/metrics", public.metrics, methods=get),
        Route("/weight_info", public.weight_info, methods=get),
        Route("/is_paused", public.is_paused, methods=get),
    ]
    acts: dict[str, tuple[Callable[[Request], Awaitable[Response]], list[str]]] = {
        "/pause": (control.pause, post),
        "/resume": (control.resume, post),
        "/abort": (control.abort, post),
        "/abort_requests": (control.abort, post),
        "/start_weight_update": (control.start, post),
        "/update_weights": (control.update, post),
        "/finish_weight_update": (control.finish, post),
        "/collective_rpc": (control.rpc, post),
        "/join_weight_line": (control.join_line, post),
        "/prepare_weights": (control.prepare, post),
        "/receive_weights": (control.receive, post),
        "/update_weight_version": (control.relabel, post),
        "/reset_prefix_cache": (control.reset_cache, post),
        "/weight_checker": (control.check, post),
        "/fingerprint": (control.fingerprint, get),
        "/v1/load_lora_adapter": (control.load_adapter, post),
        "/v1/unload_lora_adapter": (control.unload_adapter, post),
    }
    routes += [Route(path, control.guarded(act), methods=methods) for path, (act, methods) in acts.items()]
    handlers = {
        BadRequest: _refuse,
        RequestRefused: _refuse_in_words,
        EngineBusy: _put_off,
        EngineError: _fail,
        HTTPException: _http_error,
        Exception: _fail,
    }
    return Starlette(routes=routes, exception_handlers=handlers)  # type: ignore[arg-type]


@dataclass(frozen=True)
class _Public:
    """What every client may ask."""

    service: Service

    async def models(self, _: Request) -> Response:
        model, engine = self.service.model, self.service.engine
        named: list[tuple[str, str, str | None, str]]
        named = [(model.name, model.root, None, str(engine.version))]
        named += [(a.name, a.root, model.name, str(a.version)) for a in self.service.adapters.listed]
        cards = [
            ModelCard(
                id=name,
                created=model.created,
                root=root,
                parent=parent,
                weight_version=version,
                max_model_len=engine.context_tokens,
                batch_invariant=engine.batch_invariant,
            )
            for name, root, parent, version in named
        ]
        return _json(ModelList(data=cards))

    async def completions(self, request: Request) -> Response:
        asked, body = await self._read(request, CompletionRequest)
        name = f"cmpl-{asked.request_id or secrets.token_hex(12)}"
        if asked.stream:
            return await _streamed(completions.stream(self.service, name, asked))

        async def work() -> bytes:
            answer = await completions.complete(self.service, name, asked)
            return _bytes(answer)

        return await self._answer(request, asked, body, work)

    async def chat(self, request: Request) -> Response:
        asked, body = await self._read(request, ChatRequest)
        name = f"chatcmpl-{asked.request_id or secrets.token_hex(12)}"
        if asked.stream:
            return await _streamed(chat.stream(self.service, name, asked))

        async def work() -> bytes:
            answer = await chat.complete(self.service, name, asked)
            return _bytes(answer)

        return await self._answer(request, asked, body, work)

    async def health(self, _: Request) -> Response:
        return JSONResponse({"status": "paused" if self.service.is_paused else "ok"})

    async def metrics(self, _: Request) -> Response:
        return PlainTextResponse(prometheus_text(self.service), media_type="text/plain; version=0.0.4")

    async def weight_info(self, _: Request) -> Response:
        return JSONResponse({"weight_version": str(self.service.engine.version)})

    async def is_paused(self, _: Request) -> Response:
        return JSONResponse({"is_paused": self.service.is_paused})

    async def _read(self, request: Request, kind: type[Asked]) -> tuple[Asked, bytes]:
        body = await request.body()
        asked = read_body(kind, body)
        self.service.adapter(asked.model)
        return asked, body

    async def _answer(
        self, request: Request, asked: Sampling, body: bytes, work: Callable[[], Awaitable[bytes]]
    ) -> Response:
        """Compute, at most once for a name that the client gave, and only while the client is there."""
        name = asked.request_id
        doing = work() if name is None else self.service.answers.once(name, body, work)
        done = await _while_there(request, doing)
        if done is None:
            return Response(status_code=_CLIENT_GONE)
        if name is not None and b'"finish_reason":"abort"' in done:
            self.service.answers.forget(name)
        return Response(done, media_type="application/json")


class _UpdateInfo(BaseModel):
    weights_path: str


class _Update(BaseModel):
    update_info: _UpdateInfo


class _Finish(BaseModel):
    weight_version: str | None = None


class _Relabel(BaseModel):
    new_version: str


class _Rpc(BaseModel):
    method: str
    args: list[str] = []
    keywords: dict[str, str] = Field({}, validation_alias=AliasChoices("kwargs"))


class _LoadAdapter(BaseModel):
    lora_name: str = Field(min_length=1)
    lora_path: str = Field(min_length=1)
    load_inplace: bool = False
    weight_version: str | None = None


class _UnloadAdapter(BaseModel):
    lora_name: str = Field(min_length=1)


class _Check(BaseModel):
    action: str
    baseline: dict[str, str] | None = None


class _Abort(BaseModel):
    request_ids: list[str] | None = Field(None)


@dataclass(frozen=True)
class _Control:
    """What a trainer may do besides, as in vLLM's development mode."""

    service: Service
    desk: WeightDesk

    def guarded(
        self, act: Callable[[Request], Awaitable[Response]]
    ) -> Callable[[Request], Awaitable[Response]]:
        """The act, refused unless the server was started with control."""

        async def checked(request: Request) -> Response:
            if not self.service.control:
                raise BadRequest("This server is not to be controlled; start it with --control.", _FORBIDDEN)
            return await act(request)

        return checked

    async def pause(self, request: Request) -> Response:
        mode = request.query_params.get("mode", "abort")
        modes: dict[str, PauseMode] = {"abort": "abort", "wait": "wait", "keep": "keep"}
        if mode not in modes:
            raise BadRequest(f"mode is {mode!r}, but must be one of abort, wait, keep.")
        await self.service.pause(modes[mode])
        return JSONResponse({"status": "paused"})

    async def resume(self, _: Request) -> Response:
        await self.service.resume()
        return JSONResponse({"status": "resumed"})

    async def abort(self, request: Request) -> Response:
        asked = read_body(_Abort, await request.body() or b"{}")
        return JSONResponse({"status": "aborted", "aborted": self.service.abort(asked.request_ids or ())})

    async def start(self, _: Request) -> Response:
        self.desk.start()
        return JSONResponse({"message": "Weight update started"})

    async def update(self, request: Request) -> Response:
        await self.desk.update(read_body(_Update, await request.body()).update_info.weights_path)
        return JSONResponse({"message": "Weights updated"})

    async def finish(self, request: Request) -> Response:
        asked = read_body(_Finish, await request.body() or b"{}")
        await self.desk.finish(None if asked.weight_version is None else _version(asked.weight_version))
        return JSONResponse({"message": "Weight update finished"})

    async def join_line(self, request: Request) -> Response:
        await self.desk.join(read_body(Place, await request.body()))
        return JSONResponse({"message": "On the line"})

    async def prepare(self, request: Request) -> Response:
        self.desk.prepare(read_body(Manifest, await request.body()))
        return JSONResponse({"message": "Weights are expected"})

    async def receive(self, _: Request) -> Response:
        await self.desk.receive()
        return JSONResponse({"message": "Weights taken"})

    async def rpc(self, request: Request) -> Response:
        asked = read_body(_Rpc, await request.body())
        path = asked.keywords.get("weights_path")
        if asked.method != "reload_weights" or path is None or asked.args or len(asked.keywords) > 1:
            raise BadRequest("The one method is reload_weights, with kwargs = {weights_path: ...}.")
        await self.desk.reload(path)
        return JSONResponse({"results": [None]})

    async def relabel(self, request: Request) -> Response:
        version = read_body(_Relabel, await request.body()).new_version
        await self.service.engine.relabel(_version(version))
        return JSONResponse({"success": True, "new_version": version})

    async def reset_cache(self, _: Request) -> Response:
        """New weights drop what was cached under the old ones, so that there is nothing to do."""
        return JSONResponse({"success": True})

    async def check(self, request: Request) -> Response:
        asked = read_body(_Check, await request.body())
        if asked.action not in ("checksum", "compare"):
            raise BadRequest(f"action is {asked.action!r}, but must be checksum or compare.")
        own = await self.desk.digests()
        if asked.action == "checksum":
            return JSONResponse({"checksums": own})
        if asked.baseline is None:
            raise BadRequest("action = compare needs a baseline.")
        other = asked.baseline
        wrong = sorted(name for name in own.keys() | other.keys() if own.get(name) != other.get(name))
        return JSONResponse({"match": not wrong, "mismatches": wrong})

    async def fingerprint(self, request: Request) -> Response:
        with self.service.under(request.query_params.get("model")) as adapter:
            return JSONResponse({"fingerprint": await self.service.engine.fingerprint(adapter=adapter)})

    async def load_adapter(self, request: Request) -> Response:
        asked = read_body(_LoadAdapter, await request.body())
        if asked.lora_name == self.service.model.name:
            raise BadRequest(f"{asked.lora_name!r} is the name of the model itself.")
        version = None if asked.weight_version is None else _version(asked.weight_version)
        await self.service.adapters.load(
            asked.lora_name, asked.lora_path, version, in_place=asked.load_inplace
        )
        return PlainTextResponse(f"Success: LoRA adapter {asked.lora_name!r} added successfully.")

    async def unload_adapter(self, request: Request) -> Response:
        asked = read_body(_UnloadAdapter, await request.body())
        await self.service.adapters.unload(asked.lora_name)
        return PlainTextResponse(f"Success: LoRA adapter {asked.lora_name!r} removed successfully.")


def _version(text: str) -> int:
    if not text.isdecimal():
        raise BadRequest(f"The weight version {text!r} is no whole number.")
    return int(text)


async def _while_there(request: Request, work: Awaitable[Result]) -> Result | None:
    """The result, or None (and the work cancelled) once the client has hung up."""
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_hung_up(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        gone.cancel()
        task.cancel()


async def _hung_up(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _streamed(pieces: AsyncIterator[BaseModel]) -> Response:
    """Server-sent events. What is wrong with the request is known before the first byte is sent."""
    first = await anext(pieces)

    async def events() -> AsyncIterator[bytes]:
        try:
            yield b"data: " + _bytes(first) + b"\n\n"
            async for piece in pieces:
                yield b"data: " + _bytes(piece) + b"\n\n"
        except EngineError as error:
            yield b"data: " + _bytes(_error(str(error), _FAILED)) + b"\n\n"
        yield b"data: [DONE]\n\n"

    return StreamingResponse(events(), media_type="text/event-stream")


def _bytes(body: BaseModel) -> bytes:
    """A body as JSON. Text that is no Unicode (half of a pair) is escaped, not refused."""
    return json.dumps(body.model_dump(), separators=(",", ":")).encode()


def _json(body: BaseModel, status: int = 200) -> Response:
    return Response(_bytes(body), status, media_type="application/json")


def _error(message: str, status: int, code: str | None = None) -> ErrorAnswer:
    kind = "invalid_request_error" if status < _FAILED else "server_error"
    return ErrorAnswer(error=ErrorInfo(message=message, type=kind, code=code or status))


async def _refuse(_: Request, error: BadRequest) -> Response:
    return _json(_error(error.message, error.status, error.code), error.status)


async def _fail(_: Request, error: Exception) -> Response:
    words = str(error) if isinstance(error, EngineError) else f"{type(error).__name__}: {error}"
    return _json(_error(words, _FAILED), _FAILED)


async def _refuse_in_words(_: Request, error: RequestRefused) -> Response:
    return _json(_error(str(error), _REFUSED), _REFUSED)


async def _put_off(_: Request, error: EngineBusy) -> Response:
    answer = _json(_error(str(error), _BUSY), _BUSY)
    answer.headers["Retry-After"] = "1"
    return answer


async def _http_error(_: Request, error: HTTPException) -> Response:
    return _json(_error(f"{error.detail}.", error.status_code), error.status_code)
