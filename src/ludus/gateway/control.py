"""Control endpoints for trainers, as in vLLM's development mode, and the weight updates behind them.

Weights come from files or from a trainer's broadcast.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import AfterValidator, AliasChoices, BaseModel, Field
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from ludus.engines.models.fingerprint import tensor_digest
from ludus.engines.remote.gloo_broadcast import (
    TransferAddress,
    WeightManifest,
    WeightTransferGroup,
    apply_delta,
    join_as_server,
    receive_tensors,
    run_in_thread,
)
from ludus.errors import EngineError, SyncError
from ludus.gateway.endpoints import EndpointResult, NoBody, endpoint
from ludus.gateway.protocol.requests import BadRequest
from ludus.gateway.service import CompletionService, PauseMode

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel


_CONFLICT = 409
_SPARE = 2**20
_WORKER = "dp0:pp0:pcp0:tp0:"
"""vLLM's prefix of tensor names with one worker."""


@dataclass
class WeightReceiver:
    """Loads new weights into the engine.

    `start`, any number of `update`s and `finish` replace all weights between two passes; `reload` does so in
    one call; `prepare` and `receive` receive a trainer's broadcast. Requests may run meanwhile: their later
    tokens use the new weights and carry the new version.
    """

    service: CompletionService
    model: PreTrainedModel
    _parts: dict[str, torch.Tensor] | None = field(init=False, default=None)
    _line: WeightTransferGroup | None = field(init=False, default=None)
    _expected: WeightManifest | None = field(init=False, default=None)

    def start(self) -> None:
        """Open an update. Raises BadRequest if one is open."""
        if self._parts is not None:
            raise BadRequest("A weight update is open already; finish it first.", _CONFLICT)
        self._parts = {}

    async def update(self, path: str) -> None:
        """Add the tensors of a folder or file to the open update."""
        if self._parts is None:
            raise BadRequest("No weight update is open; start one first.", _CONFLICT)
        self._parts |= await asyncio.to_thread(read_weights, path)

    async def finish(self, version: int | None) -> None:
        """Load the open update into the engine, which keeps its weights on an error."""
        if self._parts is None:
            raise BadRequest("No weight update is open; start one first.", _CONFLICT)
        parts, self._parts = self._parts, None
        await self._load(parts, version)

    async def reload(self, path: str) -> None:
        """Load the tensors of a folder or file under the current version."""
        await self._load(await asyncio.to_thread(read_weights, path), None)

    async def join(self, place: TransferAddress) -> None:
        """Join a trainer's process group in place of an earlier one. Raises BadRequest if unreachable."""
        self._line = None
        try:
            self._line = await run_in_thread(partial(join_as_server, place))
        except EngineError as error:
            raise BadRequest(str(error)) from error

    def prepare(self, manifest: WeightManifest) -> None:
        """Announce the next weights. Raises BadRequest without a group or with a different base version."""
        version = self.service.engine.version
        if self._line is None:
            raise BadRequest("This server has not joined a weight transfer group.", _CONFLICT)
        if manifest.base is not None and manifest.base != version:
            raise BadRequest(f"The delta's base is version {manifest.base}, but {version} is loaded.", _CONFLICT)
        most = 2 * sum(parameter.numel() for parameter in self.model.state_dict(keep_vars=True).values())
        if sum(math.prod(tensor.shape) for tensor in manifest.tensors) > most + _SPARE:
            raise BadRequest("tensors: they have more than twice as many elements as the model.")
        self._expected = manifest

    async def receive(self) -> None:
        """Receive the trainer's weights.

        Raises EngineError on a lost connection, BadRequest for weights that do not fit.
        """
        line, manifest = self._line, self._expected
        if line is None or manifest is None:
            raise BadRequest("No weights are expected.", _CONFLICT)
        self._expected = None
        try:
            tensors = await run_in_thread(partial(receive_tensors, line, manifest))
            own = dict(self.model.state_dict(keep_vars=True))
            found = await asyncio.to_thread(apply_delta, tensors, own)
        except EngineError:
            if self._line is line:  # it may have joined another group meanwhile
                self._line = None
            raise
        except SyncError as error:
            raise BadRequest(str(error)) from error
        if found:
            await self._load(found, manifest.version)
        else:
            await self.service.engine.relabel(manifest.version)

    async def digests(self) -> dict[str, str]:
        """Return the SHA-256 of each parameter by name, with vLLM's worker prefix."""
        return await asyncio.to_thread(self._digests)

    def _digests(self) -> dict[str, str]:
        return {f"{_WORKER}{name}": tensor_digest(parameter) for name, parameter in self.model.named_parameters()}

    async def _load(self, state: Mapping[str, torch.Tensor], version: int | None) -> None:
        engine = self.service.engine
        try:
            await engine.load_weights(engine.version if version is None else version, state)
        except SyncError as error:
            raise BadRequest(str(error)) from error


def read_weights(path: str) -> dict[str, torch.Tensor]:
    """Read all tensors of a safetensors file or folder. Raises BadRequest."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    place = Path(path)
    found: dict[str, torch.Tensor] = {}
    try:
        files = sorted(place.glob("*.safetensors")) if place.is_dir() else [place]
        if not files or not files[0].is_file():
            raise BadRequest(f"No safetensors files at {path}.")
        for file in files:
            found |= load_file(file)
    except (OSError, SafetensorError) as error:
        raise BadRequest(f"{path} cannot be read: {error}.") from error
    return found


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
    weights: WeightReceiver

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
        self.weights.start()
        return JSONResponse({"message": "Weight update started"})

    async def update(self, _: Request, asked: _Update) -> Response:
        await self.weights.update(asked.update_info.weights_path)
        return JSONResponse({"message": "Weights updated"})

    async def finish(self, _: Request, asked: _Finish) -> Response:
        await self.weights.finish(None if asked.weight_version is None else int(asked.weight_version))
        return JSONResponse({"message": "Weight update finished"})

    async def join_line(self, _: Request, asked: TransferAddress) -> Response:
        await self.weights.join(asked)
        return JSONResponse({"message": "Joined the weight transfer group"})

    async def prepare(self, _: Request, asked: WeightManifest) -> Response:
        self.weights.prepare(asked)
        return JSONResponse({"message": "Ready to receive weights"})

    async def receive(self, _: Request, __: NoBody) -> Response:
        await self.weights.receive()
        return JSONResponse({"message": "Weights received"})

    async def rpc(self, _: Request, asked: _Rpc) -> Response:
        path = asked.keywords.get("weights_path")
        if asked.method != "reload_weights" or path is None or asked.args or len(asked.keywords) > 1:
            raise BadRequest("The only method is reload_weights, with kwargs = {weights_path: ...}.")
        await self.weights.reload(path)
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
        own = await self.weights.digests()
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
