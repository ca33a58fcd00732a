"""Weight updates of a served engine, from files or a trainer's broadcast, and weight digests."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ludus.engines.models.fingerprint import tensor_digest
from ludus.engines.remote.gloo_broadcast import (
    TransferAddress,
    WeightManifest,
    WeightTransferGroup,
    aside,
    enter_line,
    restored,
    take,
)
from ludus.errors import EngineError, SyncError
from ludus.gateway.protocol.requests import BadRequest
from ludus.gateway.service import CompletionService

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
            self._line = await aside(partial(enter_line, place))
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
            tensors = await aside(partial(take, line, manifest))
            own = dict(self.model.state_dict(keep_vars=True))
            found = await asyncio.to_thread(restored, tensors, own)
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
