"""Control endpoints for trainers, as in vLLM's development mode."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import AfterValidator, AliasChoices, BaseModel, Field
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from ludus.engines.remote.gloo_broadcast import TransferAddress, WeightManifest
from ludus.gateway.endpoints import EndpointResult, NoBody, endpoint
from ludus.gateway.protocol.requests import BadRequest
from ludus.gateway.service import CompletionService, PauseMode
from ludus.gateway.weights import WeightReceiver

_LONGEST_PATH, _LONGEST_VERSION = 4096, 18


def _path(text: str) -> str:
    if "\0" in text or not text.isprintable():
        raise ValueError("it must be a path without control characters")
    return text


def _version(text: str) -> int:
    if not (text.isascii() and text.isdecimal()) or len(text) > _LONGEST_VERSION:
        raise ValueError(f"it must be an integer of at most {_LONGEST_VERSION} digits")
    return int(text)


ServerPath = Annotated[str, Field(min_length=1, max_length=_LONGEST_PATH), AfterValidator(_path)]
Version = Annotated[str, AfterValidator(lambda text: str(_version(text)))]
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
    request_ids: list[str] | None = Field(None)


@dataclass(frozen=True)
class Control:
    """The control endpoints."""

    service: CompletionService
    desk: WeightReceiver

    def endpoints(self) -> list[EndpointResult]:
        """List the endpoints."""
        return [
            endpoint("/pause", NoBody, self.pause),
            endpoint("/resume", NoBody, self.resume),
            endpoint("/abort", _Abort, self.abort),
            endpoint("/abort_requests", _Abort, self.abort),
            endpoint("/start_weight_update", NoBody, self.start),
            endpoint("/update_weights", _Update, self.update),
            endpoint("/finish_weight_update", _Finish, self.finish),
            endpoint("/collective_rpc", _Rpc, self.rpc),
            endpoint("/join_weight_line", TransferAddress, self.join_line),
            endpoint("/prepare_weights", WeightManifest, self.prepare),
            endpoint("/receive_weights", NoBody, self.receive),
            endpoint("/update_weight_version", _Relabel, self.relabel),
            endpoint("/reset_prefix_cache", NoBody, self.reset_cache),
            endpoint("/weight_checker", _Check, self.check),
            endpoint("/fingerprint", NoBody, self.fingerprint, method="GET"),
            endpoint("/v1/load_lora_adapter", _LoadAdapter, self.load_adapter),
            endpoint("/v1/unload_lora_adapter", _UnloadAdapter, self.unload_adapter),
        ]

    async def pause(self, request: Request, __: NoBody) -> Response:
        mode = request.query_params.get("mode", "abort")
        modes: dict[str, PauseMode] = {"abort": "abort", "wait": "wait", "keep": "keep"}
        if mode not in modes:
            raise BadRequest(f"mode is {mode!r}, but must be one of abort, wait, keep.")
        await self.service.pause(modes[mode])
        return JSONResponse({"status": "paused"})

    async def resume(self, _: Request, __: NoBody) -> Response:
        await self.service.resume()
        return JSONResponse({"status": "resumed"})

    async def abort(self, _: Request, asked: _Abort) -> Response:
        return JSONResponse({"status": "aborted", "aborted": self.service.abort(asked.request_ids or ())})

    async def start(self, _: Request, __: NoBody) -> Response:
        self.desk.start()
        return JSONResponse({"message": "Weight update started"})

    async def update(self, _: Request, asked: _Update) -> Response:
        await self.desk.update(asked.update_info.weights_path)
        return JSONResponse({"message": "Weights updated"})

    async def finish(self, _: Request, asked: _Finish) -> Response:
        await self.desk.finish(None if asked.weight_version is None else int(asked.weight_version))
        return JSONResponse({"message": "Weight update finished"})

    async def join_line(self, _: Request, asked: TransferAddress) -> Response:
        await self.desk.join(asked)
        return JSONResponse({"message": "Joined the weight transfer group"})

    async def prepare(self, _: Request, asked: WeightManifest) -> Response:
        self.desk.prepare(asked)
        return JSONResponse({"message": "Ready to receive weights"})

    async def receive(self, _: Request, __: NoBody) -> Response:
        await self.desk.receive()
        return JSONResponse({"message": "Weights received"})

    async def rpc(self, _: Request, asked: _Rpc) -> Response:
        path = asked.keywords.get("weights_path")
        if asked.method != "reload_weights" or path is None or asked.args or len(asked.keywords) > 1:
            raise BadRequest("The only method is reload_weights, with kwargs = {weights_path: ...}.")
        await self.desk.reload(path)
        return JSONResponse({"results": [None]})

    async def relabel(self, _: Request, asked: _Relabel) -> Response:
        version = asked.new_version
        await self.service.engine.relabel(int(version))
        return JSONResponse({"success": True, "new_version": version})

    async def reset_cache(self, _: Request, __: NoBody) -> Response:
        """Do nothing: weight updates already clear the cache."""
        return JSONResponse({"success": True})

    async def check(self, _: Request, asked: _Check) -> Response:
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

    async def fingerprint(self, request: Request, __: NoBody) -> Response:
        with self.service.under(request.query_params.get("model")) as adapter:
            return JSONResponse({"fingerprint": await self.service.engine.fingerprint(adapter=adapter)})

    async def load_adapter(self, _: Request, asked: _LoadAdapter) -> Response:
        if asked.lora_name == self.service.model.name:
            raise BadRequest(f"{asked.lora_name!r} is the name of the base model.")
        version = None if asked.weight_version is None else int(asked.weight_version)
        await self.service.adapters.load(asked.lora_name, asked.lora_path, version, in_place=asked.load_inplace)
        return PlainTextResponse(f"Success: LoRA adapter {asked.lora_name!r} added successfully.")

    async def unload_adapter(self, _: Request, asked: _UnloadAdapter) -> Response:
        await self.service.adapters.unload(asked.lora_name)
        return PlainTextResponse(f"Success: LoRA adapter {asked.lora_name!r} removed successfully.")
