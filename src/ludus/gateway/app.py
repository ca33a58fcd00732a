"""The HTTP server: public endpoints, and control endpoints for trainers as in vLLM's development mode.

Needs the `serve` extra (starlette and uvicorn). Every error is JSON with a message. Control endpoints return 403 if the
server has no control token, and 401 if the request does not send it. Weight updates read files or receive a trainer's
broadcast.
"""

from __future__ import annotations

import asyncio
import math
import secrets
import tomllib
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache, partial
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import AfterValidator, AliasChoices, BaseModel, BeforeValidator, Field
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse

from ludus.engines.models.fingerprint import tensor_digest
from ludus.engines.remote.gloo_broadcast import (
    TransferAddress,
    WeightManifest,
    WeightTransferGroup,
    apply_delta,
    join_as_server,
    receive_tensors,
)
from ludus.errors import EngineError, LudusError
from ludus.gateway.dialects.base import Dialect
from ludus.gateway.dialects.messages import MESSAGES
from ludus.gateway.dialects.responses import RESPONSES
from ludus.gateway.endpoints import ControlAccess, HttpRouter, NoBody, json_response, until_disconnect
from ludus.gateway.generation import complete, complete_chat, read_dialect, sample_dialect, stream, stream_chat
from ludus.gateway.protocol.bodies import (
    BadRequest,
    ChatRequest,
    CompletionRequest,
    JsonBody,
    Sampling,
    error_body,
    json_bytes,
)
from ludus.gateway.recording import SessionRecorder
from ludus.gateway.replies import CLIENT_GONE, count_tokens, error_reply, keep_last, respond
from ludus.gateway.service import CompletionService, PauseMode
from ludus.rollouts.agent_session import PendingTurn
from ludus.types import Message
from ludus.untrusted.worker import run_in_thread

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

_MESSAGES_PATH = "/v1/messages"
_CONFLICT, _FAILED = 409, 500
_MAX_HISTORIES = 1024


def make_app(service: CompletionService, model: PreTrainedModel, recorder: SessionRecorder | None = None) -> Starlette:
    """Create the application. `model` is the engine's model, hashed by `/weight_checker`.

    The endpoints of a `recorder` replace those of the same path.
    """
    access = ControlAccess(service.control_token, service.control_hosts) if service.control_token else None
    router = HttpRouter(service.threads, service.engine.context_tokens, access)
    PublicEndpoints(service).add_to(router)
    ControlEndpoints(service, model).add_to(router)
    kinds = (BadRequest, LudusError, HTTPException, Exception)
    handlers = dict.fromkeys(kinds, _error)
    if recorder is None:
        return Starlette(routes=router.routes, exception_handlers=handlers)
    routes = [*recorder.app().routes, *router.routes]
    return Starlette(routes=routes, exception_handlers=handlers, lifespan=recorder.lifespan)


@dataclass(frozen=True)
class PublicEndpoints:
    """Public endpoints. `histories` are the dialogues of the last responses by id, for `previous_response_id`."""

    service: CompletionService
    histories: OrderedDict[str, Sequence[Message]] = field(default_factory=OrderedDict)

    def add_to(self, router: HttpRouter) -> None:
        router.add("/v1/models", NoBody, self.models, method="GET")
        router.add("/v1/completions", CompletionRequest, self.completions)
        router.add("/v1/chat/completions", ChatRequest, self.chat)
        router.add("/v1/responses", NoBody, partial(self.dialect, RESPONSES))
        router.add(_MESSAGES_PATH, NoBody, partial(self.dialect, MESSAGES))
        router.add(f"{_MESSAGES_PATH}/count_tokens", NoBody, self.count_tokens)
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

    async def dialect(self, dialect: Dialect, request: Request, _: NoBody) -> Response:
        raw, threads = await request.body(), self.service.threads
        parsed, chat = await threads.do(partial(read_dialect, dialect, self.histories, raw), len(raw))

        async def commit(name: str, turns: Sequence[PendingTurn], _: Response) -> None:
            if dialect is RESPONSES:
                keep_last(self.histories, f"resp_{name}", [*parsed.messages, turns[0].action.message], _MAX_HISTORIES)

        sample = partial(sample_dialect, self.service, chat)
        return await respond(request, dialect, parsed, self.service.model.renderer, sample, commit)

    async def count_tokens(self, request: Request, _: NoBody) -> Response:
        raw = await request.body()
        count = partial(count_tokens, raw, self.service.model.renderer)
        return json_response(await self.service.threads.do(count, len(raw)))

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
        content = await until_disconnect(request, pending)
        if content is None:
            return Response(status_code=CLIENT_GONE)
        if name is not None and b'"finish_reason":"abort"' in content:
            self.service.responses.discard(name)
        return Response(content, media_type="application/json")


async def _event_stream(pieces: AsyncIterator[JsonBody]) -> Response:
    """Send server-sent events. Invalid requests are rejected before the first byte."""
    first = await anext(pieces)

    async def events() -> AsyncIterator[bytes]:
        try:
            yield b"data: " + json_bytes(first) + b"\n\n"
            async for piece in pieces:
                yield b"data: " + json_bytes(piece) + b"\n\n"
        except EngineError as error:
            yield b"data: " + json_bytes(error_body(_FAILED, str(error))) + b"\n\n"
        yield b"data: [DONE]\n\n"

    return StreamingResponse(events(), media_type="text/event-stream")


async def _error(request: Request, error: Exception) -> Response:
    response = error_reply(error, MESSAGES.error if request.url.path.startswith(_MESSAGES_PATH) else error_body)
    if isinstance(error, HTTPException):
        response.headers.update(error.headers or {})
    return response


@cache
def _metric_families() -> Mapping[str, Mapping[str, tuple[str, str]]]:
    """Return the source and description of each metric, by kind."""
    families: Mapping[str, Mapping[str, tuple[str, str]]] = tomllib.loads(
        (files(__package__) / "metrics.toml").read_text("utf-8")
    )
    return families


def prometheus_text(service: CompletionService) -> str:
    """Return counters and gauges in text format 0.0.4."""
    values = {
        "requests": service.num_requests,
        "unfinished": service.num_unfinished,
        "paused": int(service.is_paused),
        "version": service.engine.version,
        **asdict(service.engine.stats()),
    }
    return "".join(
        f"# HELP ludus_{name} {description}\n# TYPE ludus_{name} {kind}\nludus_{name} {values[source]}\n"
        for kind, family in _metric_families().items()
        for name, (source, description) in family.items()
    )


_SPARE = 2**20
_VERSION_DIGITS = 18
_WORKER = "dp0:pp0:pcp0:tp0:"  # prefix of tensor names in vLLM with a single worker


def read_weights(path: str) -> dict[str, torch.Tensor]:
    """Read all tensors of a safetensors file or folder. Raises BadRequest."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    root = Path(path)
    found: dict[str, torch.Tensor] = {}
    try:
        shards = sorted(root.glob("*.safetensors")) if root.is_dir() else [root]
        if not shards or not shards[0].is_file():
            raise BadRequest(f"No safetensors files at {path}.")
        for shard in shards:
            found |= load_file(shard)
    except (OSError, SafetensorError) as error:
        raise BadRequest(f"{path} cannot be read: {error}.") from error
    return found


def _path(text: str) -> str:
    if not text.isprintable():
        raise ValueError("it must be a path without control characters")
    return text


def _version(value: object) -> int:
    if not (isinstance(value, str) and value.isascii() and value.isdecimal() and len(value) <= _VERSION_DIGITS):
        raise ValueError(f"it must be a string that is an integer of at most {_VERSION_DIGITS} digits")
    return int(value)


ServerPath = Annotated[str, Field(min_length=1, max_length=4096), AfterValidator(_path)]
Version = Annotated[int, BeforeValidator(_version)]
AdapterName = Annotated[str, Field(min_length=1, max_length=512)]


class _UpdateInfo(BaseModel):
    weights_path: ServerPath


class _Update(BaseModel):
    update_info: _UpdateInfo


class _Finish(BaseModel):
    weight_version: Version | None = None


class _Relabel(BaseModel):
    new_version: Version


class _Rpc(BaseModel):
    method: str
    args: list[str] = []
    keywords: dict[str, ServerPath] = Field({}, validation_alias=AliasChoices("kwargs"))


class _LoadAdapter(BaseModel):
    lora_name: AdapterName
    lora_path: ServerPath
    load_inplace: bool = False
    weight_version: Version | None = None


class _UnloadAdapter(BaseModel):
    lora_name: AdapterName


class _Check(BaseModel):
    action: str
    baseline: dict[str, str] | None = None


class _Abort(BaseModel):
    request_ids: list[str] | None = None


@dataclass
class ControlEndpoints:
    """Control endpoints. Weight updates load new weights into the engine of `model`.

    `/start_weight_update`, any number of `/update_weights` and `/finish_weight_update` replace all weights between
    two passes; `/collective_rpc` does so in one call; `/prepare_weights` and `/receive_weights` receive a trainer's
    broadcast. Running requests continue; tokens sampled after the update have the new version.
    """

    service: CompletionService
    model: PreTrainedModel
    _parts: dict[str, torch.Tensor] | None = field(init=False, default=None)
    _group: WeightTransferGroup | None = field(init=False, default=None)
    _expected: WeightManifest | None = field(init=False, default=None)

    def add_to(self, router: HttpRouter) -> None:
        add = partial(router.add, control=True)
        add("/pause", NoBody, self.pause)
        add("/resume", NoBody, self.resume)
        add("/abort", _Abort, self.abort)
        add("/abort_requests", _Abort, self.abort)
        add("/start_weight_update", NoBody, self.start)
        add("/update_weights", _Update, self.update)
        add("/finish_weight_update", _Finish, self.finish)
        add("/collective_rpc", _Rpc, self.rpc)
        add("/join_weight_group", TransferAddress, self.join)
        add("/prepare_weights", WeightManifest, self.prepare)
        add("/receive_weights", NoBody, self.receive)
        add("/update_weight_version", _Relabel, self.relabel)
        add("/reset_prefix_cache", NoBody, self.reset_cache)
        add("/weight_checker", _Check, self.check)
        add("/fingerprint", NoBody, self.fingerprint, method="GET")
        add("/v1/load_lora_adapter", _LoadAdapter, self.load_adapter)
        add("/v1/unload_lora_adapter", _UnloadAdapter, self.unload_adapter)

    async def pause(self, request: Request, _: NoBody) -> Response:
        mode = request.query_params.get("mode", "abort")
        modes: dict[str, PauseMode] = {"abort": "abort", "wait": "wait", "keep": "keep"}
        if mode not in modes:
            raise BadRequest(f"mode is {mode!r}, but must be one of abort, wait, keep.")
        await self.service.pause(modes[mode])
        return JSONResponse({"status": "paused"})

    async def resume(self, _: Request, __: NoBody) -> Response:
        await self.service.resume()
        return JSONResponse({"status": "resumed"})

    async def abort(self, _: Request, body: _Abort) -> Response:
        return JSONResponse({"status": "aborted", "aborted": self.service.abort(body.request_ids or ())})

    async def start(self, _: Request, __: NoBody) -> Response:
        """Open a weight update. Raises BadRequest if another is open."""
        if self._parts is not None:
            raise BadRequest("A weight update is open already; finish it first.", _CONFLICT)
        self._parts = {}
        return JSONResponse({"message": "Weight update started"})

    async def update(self, _: Request, body: _Update) -> Response:
        """Add the tensors of a folder or file to the open update. Raises BadRequest if none is open."""
        parts = self._open_parts()
        found = await asyncio.to_thread(read_weights, body.update_info.weights_path)
        if self._parts is not parts:
            raise BadRequest("The weight update was finished while the file was read.", _CONFLICT)
        parts |= found
        return JSONResponse({"message": "Weights updated"})

    async def finish(self, _: Request, body: _Finish) -> Response:
        """Load the open update into the engine. On an error, the engine's weights do not change."""
        parts, self._parts = self._open_parts(), None
        await self._load(parts, body.weight_version)
        return JSONResponse({"message": "Weight update finished"})

    def _open_parts(self) -> dict[str, torch.Tensor]:
        if self._parts is None:
            raise BadRequest("No weight update is open; start one first.", _CONFLICT)
        return self._parts

    async def rpc(self, _: Request, body: _Rpc) -> Response:
        """Load the tensors of a folder or file without a new version."""
        path = body.keywords.get("weights_path")
        if body.method != "reload_weights" or path is None or body.args or len(body.keywords) > 1:
            raise BadRequest("The only method is reload_weights, with kwargs = {weights_path: ...}.")
        await self._load(await asyncio.to_thread(read_weights, path), None)
        return JSONResponse({"results": [None]})

    async def join(self, _: Request | None, address: TransferAddress) -> Response:
        """Join a trainer's process group and leave any earlier one. Raises BadRequest if it is unreachable."""
        self._group = None
        try:
            self._group = await asyncio.wrap_future(run_in_thread("broadcast", partial(join_as_server, address)))
        except EngineError as error:
            raise BadRequest(str(error)) from error
        return JSONResponse({"message": "Joined the weight transfer group"})

    async def prepare(self, _: Request | None, manifest: WeightManifest) -> Response:
        """Store the manifest of the next weights. Raises BadRequest without a group or for another base version."""
        version = self.service.engine.version
        if self._group is None:
            raise BadRequest("This server has not joined a weight transfer group.", _CONFLICT)
        if manifest.base is not None and manifest.base != version:
            raise BadRequest(f"The delta's base is version {manifest.base}, but {version} is loaded.", _CONFLICT)
        max_elements = 2 * sum(parameter.numel() for parameter in self.model.state_dict(keep_vars=True).values())
        if sum(math.prod(tensor.shape) for tensor in manifest.tensors) > max_elements + _SPARE:
            raise BadRequest("The tensors have more than twice as many elements as the model.")
        self._expected = manifest
        return JSONResponse({"message": "Ready to receive weights"})

    async def receive(self, _: Request | None, __: NoBody) -> Response:
        """Receive the trainer's weights. Raises EngineError if the trainer is lost, SyncError if they do not fit."""
        group, manifest = self._group, self._expected
        if group is None or manifest is None:
            raise BadRequest("No weights are expected.", _CONFLICT)
        self._expected = None
        try:
            tensors = await asyncio.wrap_future(run_in_thread("broadcast", partial(receive_tensors, group, manifest)))
            found = await asyncio.to_thread(apply_delta, tensors, dict(self.model.state_dict(keep_vars=True)))
        except EngineError:
            if self._group is group:  # unless it has joined another group since
                self._group = None
            raise
        if found:
            await self._load(found, manifest.version)
        else:
            await self.service.engine.relabel(manifest.version)
        return JSONResponse({"message": "Weights received"})

    async def _load(self, state: Mapping[str, torch.Tensor], version: int | None) -> None:
        engine = self.service.engine
        await engine.load_weights(engine.version if version is None else version, state)

    async def relabel(self, _: Request, body: _Relabel) -> Response:
        await self.service.engine.relabel(body.new_version)
        return JSONResponse({"success": True, "new_version": str(body.new_version)})

    async def reset_cache(self, _: Request, __: NoBody) -> Response:
        """Do nothing, since weight updates clear the cache."""
        return JSONResponse({"success": True})

    async def check(self, _: Request, body: _Check) -> Response:
        """Return or compare the SHA-256 of each parameter by name, with vLLM's worker prefix."""
        if body.action not in ("checksum", "compare"):
            raise BadRequest(f"action is {body.action!r}, but must be checksum or compare.")
        named = dict(self.model.named_parameters())
        own = await asyncio.to_thread(lambda: {f"{_WORKER}{name}": tensor_digest(p) for name, p in named.items()})
        if body.action == "checksum":
            return JSONResponse({"checksums": own})
        if body.baseline is None:
            raise BadRequest("action = compare needs a baseline.")
        wrong = sorted({name for name, _ in own.items() ^ body.baseline.items()})
        return JSONResponse({"match": not wrong, "mismatches": wrong})

    async def fingerprint(self, request: Request, _: NoBody) -> Response:
        with self.service.use_adapter(request.query_params.get("model")) as adapter:
            return JSONResponse({"fingerprint": await self.service.engine.fingerprint(adapter=adapter)})

    async def load_adapter(self, _: Request, body: _LoadAdapter) -> Response:
        name = body.lora_name
        if name == self.service.model.name:
            raise BadRequest(f"{name!r} is the name of the base model.")
        await self.service.adapters.load(name, body.lora_path, body.weight_version, in_place=body.load_inplace)
        return PlainTextResponse(f"Success: LoRA adapter {name!r} added successfully.")

    async def unload_adapter(self, _: Request, body: _UnloadAdapter) -> Response:
        await self.service.adapters.unload(body.lora_name)
        return PlainTextResponse(f"Success: LoRA adapter {body.lora_name!r} removed successfully.")
