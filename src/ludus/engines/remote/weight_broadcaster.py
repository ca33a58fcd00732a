"""The trainer's end of a line of weights to `ludus serve` and vLLM: who is on it, and what they hold."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from pydantic import BaseModel

from ludus.engines.remote.api_adapters import ApiAdapter, VllmApi
from ludus.engines.remote.gloo_broadcast import (
    TRAINER,
    TransferAddress,
    WeightManifest,
    WeightTransferGroup,
    aside,
    difference,
    join_line,
    manifest_of,
    open_store,
)
from ludus.engines.remote.http_client import HttpRefusal, RemoteEngineSettings, Replica
from ludus.engines.remote.vllm_rpc import receive, tell_workers
from ludus.errors import EngineError

if TYPE_CHECKING:
    import torch

_NOT_FOUND, _NO_LINE = 404, 409

log = logging.getLogger("ludus.server")


class _Anything(BaseModel):
    """An answer whose content does not matter."""


@dataclass(frozen=True, slots=True)
class _Parcel:
    """Weights on the CPU, and what of them is sent, as `manifest` announces it."""

    plain: dict[str, torch.Tensor]
    tensors: dict[str, torch.Tensor]
    manifest: WeightManifest


@dataclass
class Broadcaster:
    """Sends weights to `replicas`, which reach this process at `host`; with `delta` what changed alone.

    A server without paths for it is asked through its workers, as vLLM is, and has all of them sent. With
    `delta`, or where it `keeps` them, a copy of the last weights is kept on the CPU. A server that has left
    the line, or holds other weights than the difference is to, has all of them sent.
    """

    replicas: Sequence[Replica]
    dialect: VllmApi
    host: str
    timeout_s: float
    delta: bool = False
    keeps: bool = False
    sent_bytes: int = 0
    _line: WeightTransferGroup | None = None
    _has_left: bool = False
    """Whether a server has left since the last weights began to be sent."""
    _last: dict[str, torch.Tensor] = field(default_factory=dict)
    _version: int = -1
    _by_workers: set[str] = field(default_factory=set)

    async def send(self, version: int, state: Mapping[str, torch.Tensor]) -> None:
        """Have every server take the weights. Raises EngineError with a server's own words.

        Whatever comes of it: a server that is brought the last weights has these from then on.
        """
        self._has_left = False
        parcel = await asyncio.to_thread(self._pack, version, state)
        line = self._line if await self._ready_for(parcel.manifest) else None
        if line is None:
            if parcel.manifest.base is not None:
                parcel = await asyncio.to_thread(_whole, version, parcel.plain)
            line = await self._line_up()
            await self._prepare(parcel.manifest)
        self._last = {}
        if self.delta or self.keeps:
            self._last, self._version = await asyncio.to_thread(_copy, parcel.plain), version
        if self._has_left:
            raise EngineError("A server has left the line of weights that it was to be on.")
        self._line = None
        await self._send(line, parcel.tensors, version)
        self.sent_bytes = sum(t.numel() * t.element_size() for t in parcel.tensors.values())
        self._line = None if self._has_left else line

    def keep(self, version: int, state: Mapping[str, torch.Tensor]) -> None:
        """Keep a copy of weights, for servers to be brought one by one."""
        self._last, self._version = {n: t.detach().cpu().clone() for n, t in state.items()}, version

    async def bring(self, replica: Replica) -> Mapping[str, torch.Tensor]:
        """Send the last weights to a server that is not on the line, and give them; there may be none.

        The next ones go over a new line.
        """
        self._line, last = None, self._last
        if last:
            await Broadcaster([replica], self.dialect, self.host, self.timeout_s).send(self._version, last)
        return last

    def relay(self) -> None:
        """Lay the line anew before the next weights: a server has left."""
        self._line, self._has_left = None, True

    def close(self) -> None:
        """Leave the line."""
        self._line, self._last = None, {}

    def _pack(self, version: int, state: Mapping[str, torch.Tensor]) -> _Parcel:
        """What those on the line are to be sent: of large models this takes a while."""
        plain = {name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}
        same = {n: t.shape for n, t in plain.items()} == {n: t.shape for n, t in self._last.items()}
        if not (same and self.delta and self._line is not None):
            return _whole(version, plain)
        changed = difference(plain, self._last)
        return _Parcel(plain, changed, manifest_of(version, self._version, changed))

    async def _ready_for(self, manifest: WeightManifest) -> bool:
        """Whether all servers are on the line and can take what the manifest says."""
        if self._line is None:
            return False
        try:
            await self._prepare(manifest)
        except HttpRefusal as error:
            if error.status != _NO_LINE:
                raise
            log.info("a line of weights is laid anew: %s", error)
            return False
        return True

    async def _prepare(self, manifest: WeightManifest) -> None:
        body = manifest.model_dump()
        await asyncio.gather(*(self._tell(r, "/prepare_weights", body) for r in self.replicas))

    async def _tell(self, replica: Replica, path: str, body: Mapping[str, object]) -> None:
        """A message of the line, to the server or to its workers."""
        if replica.url not in self._by_workers:
            try:
                await replica.post(path, body, _Anything)
                return
            except HttpRefusal as error:
                if error.status != _NOT_FOUND:
                    raise
            self._by_workers.add(replica.url)
        await tell_workers(replica, path, body)

    async def _line_up(self) -> WeightTransferGroup:
        """Meet all servers at a new place. Raises EngineError where one does not come in time."""
        self._line = None
        store = open_store(self.host, self.timeout_s)
        count = len(self.replicas) + 1
        places = [
            TransferAddress(host=self.host, port=store.port, rank=i, count=count, timeout_s=self.timeout_s)
            for i in range(1, count)
        ]
        asked = [
            self._tell(replica, "/join_weight_line", place.model_dump())
            for replica, place in zip(self.replicas, places, strict=True)
        ]
        joined = aside(partial(join_line, store, TRAINER, count, self.timeout_s, self.host))
        try:
            async with asyncio.timeout(self.timeout_s):
                line, _ = await asyncio.gather(joined, asyncio.gather(*asked))
        except TimeoutError as error:
            raise EngineError(
                f"Not every server joined the line of weights within {self.timeout_s:g} s.",
                "Look at the servers' logs, or raise engine.timeout_s.",
            ) from error
        return line

    async def _send(
        self, line: WeightTransferGroup, tensors: Mapping[str, torch.Tensor], version: int
    ) -> None:
        asked = [
            receive(replica, self.dialect, version)
            if replica.url in self._by_workers
            else replica.post("/receive_weights", {}, _Anything)
            for replica in self.replicas
        ]
        await asyncio.gather(*asked, aside(partial(line.broadcast, tensors)))


def _whole(version: int, plain: dict[str, torch.Tensor]) -> _Parcel:
    return _Parcel(plain, plain, manifest_of(version, None, plain))


def _copy(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in tensors.items()}


def broadcaster_of(
    replicas: Sequence[Replica], dialect: ApiAdapter, settings: RemoteEngineSettings
) -> Broadcaster | None:
    """What broadcasts to `replicas`, where the settings name an address for it.

    Raises EngineError for servers that do not speak as vLLM does.
    """
    if not settings.broadcast_host:
        return None
    if not isinstance(dialect, VllmApi):
        raise EngineError(
            f"{replicas[0].url} takes no weights over a line.",
            "Leave engine.broadcast_host out: they go by a folder.",
        )
    return Broadcaster(
        replicas, dialect, settings.broadcast_host, settings.timeout_s, settings.delta, settings.keeps_weights
    )
