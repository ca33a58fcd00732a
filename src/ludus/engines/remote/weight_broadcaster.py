"""Broadcast weights to `ludus serve` and vLLM; track the connected replicas and their versions."""

from __future__ import annotations

import asyncio
import json
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
    join_group,
    make_manifest,
    open_store,
    weight_delta,
)
from ludus.engines.remote.http_client import HttpStatusError, RemoteEngineSettings, Replica
from ludus.errors import EngineError
from ludus.untrusted.worker import run_in_thread

if TYPE_CHECKING:
    import torch

_NOT_FOUND, _NO_GROUP = 404, 409

EXTENSION = "ludus.engines.remote.vllm_worker_extension.LudusWorkerExtension"
"""Worker extension of vLLM that receives broadcast weights."""

log = logging.getLogger(__name__)


class _Results(BaseModel):
    results: list[dict[str, str | int] | str | None]


@dataclass(frozen=True, slots=True)
class _Payload:
    """Weights on the CPU, and the part of them to send, as announced by `manifest`."""

    plain: dict[str, torch.Tensor]
    tensors: dict[str, torch.Tensor]
    manifest: WeightManifest


@dataclass
class Broadcaster:
    """Broadcaster of weights to `replicas`, which reach this process at `host`; with `delta` only of changes.

    A server without the HTTP endpoints (vLLM) is called through its worker extension and always gets all
    weights. With `delta` or `keeps`, a CPU copy of the last weights is kept. A server that left the group, or
    holds other weights than the delta's base, gets all weights.
    """

    replicas: Sequence[Replica]
    api: VllmApi
    host: str
    timeout_s: float
    delta: bool = False
    keeps: bool = False
    sent_bytes: int = 0
    _group: WeightTransferGroup | None = None
    _has_left: bool = False
    """Whether a server left since the last send began."""
    _last: dict[str, torch.Tensor] = field(default_factory=dict)
    _version: int = -1
    _via_worker_rpc: set[str] = field(default_factory=set)

    async def send(self, version: int, state: Mapping[str, torch.Tensor]) -> None:
        """Send the weights to every server; even after a failure, `sync_replica` sends these. Raises EngineError."""
        self._has_left = False
        payload = await asyncio.to_thread(self._make_payload, version, state)
        group = self._group
        if group is not None:
            try:
                await self._prepare(payload.manifest)
            except HttpStatusError as error:
                if error.status != _NO_GROUP:
                    raise
                log.info("re-forming the weight transfer group: %s", error)
                group = None
        if group is None:
            if payload.manifest.base is not None:
                payload = await asyncio.to_thread(_full_payload, version, payload.plain)
            group = await self._form_group()
            await self._prepare(payload.manifest)
        self._last = {}
        if self.delta or self.keeps:
            await asyncio.to_thread(self.stage, version, payload.plain)
        if self._has_left:
            raise EngineError("A server left the weight transfer group.")
        self._group = None

        async def receive(replica: Replica) -> None:
            path = "/receive_weights"
            if replica.url in self._via_worker_rpc:  # pause vLLM meanwhile and set its version label
                await self.api.exchange(replica, version, partial(call_workers, replica, path, {}))
            else:
                await replica.send(path, {})

        sent = run_in_thread("broadcast", partial(group.broadcast, payload.tensors))  # gloo calls cannot be cancelled
        await asyncio.gather(*map(receive, self.replicas), asyncio.wrap_future(sent))
        self.sent_bytes = sum(t.nbytes for t in payload.tensors.values())
        self._group = None if self._has_left else group

    def stage(self, version: int, state: Mapping[str, torch.Tensor]) -> None:
        """Keep a copy of weights, to bring servers up to date one at a time."""
        self._last, self._version = {n: t.detach().cpu().clone() for n, t in state.items()}, version

    async def sync_replica(self, replica: Replica) -> Mapping[str, torch.Tensor]:
        """Send the last weights, if any, to a server outside the group and return them; the group is re-formed."""
        self._group, last = None, self._last
        if last:
            await Broadcaster([replica], self.api, self.host, self.timeout_s).send(self._version, last)
        return last

    def regroup(self) -> None:
        """Form a new group before the next broadcast: a server left."""
        self._group, self._has_left = None, True

    def close(self) -> None:
        self._group, self._last = None, {}

    def _make_payload(self, version: int, state: Mapping[str, torch.Tensor]) -> _Payload:
        """Select the tensors to send to a group (slow for large models)."""
        plain = {name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}
        same = {n: t.shape for n, t in plain.items()} == {n: t.shape for n, t in self._last.items()}
        if not (same and self.delta and self._group is not None):
            return _full_payload(version, plain)
        changed = weight_delta(plain, self._last)
        return _Payload(plain, changed, make_manifest(version, self._version, changed))

    async def _prepare(self, manifest: WeightManifest) -> None:
        body = manifest.model_dump()
        await asyncio.gather(*(self._command(r, "/prepare_weights", body) for r in self.replicas))

    async def _command(self, replica: Replica, path: str, body: Mapping[str, object]) -> None:
        if replica.url not in self._via_worker_rpc:
            try:
                await replica.send(path, body)
                return
            except HttpStatusError as error:
                if error.status != _NOT_FOUND:
                    raise
            self._via_worker_rpc.add(replica.url)
        await call_workers(replica, path, body)

    async def _form_group(self) -> WeightTransferGroup:
        """Form a group with all servers. Raises EngineError if one does not join in time."""
        self._group = None
        limit = self.timeout_s + 1  # Past the deadline below, so that a missing server always gives the same error.
        store = open_store(self.host, limit)
        count = len(self.replicas) + 1
        place = partial(TransferAddress, host=self.host, port=store.port, count=count, timeout_s=self.timeout_s)
        calls = [
            self._command(replica, "/join_weight_group", place(rank=rank).model_dump())
            for rank, replica in enumerate(self.replicas, 1)
        ]
        joined = run_in_thread("broadcast", partial(join_group, store, TRAINER, count, limit, self.host))
        try:
            async with asyncio.timeout(self.timeout_s):
                group, _ = await asyncio.gather(asyncio.wrap_future(joined), asyncio.gather(*calls))
        except TimeoutError as error:
            raise EngineError(
                f"Not every server joined the weight transfer group within {self.timeout_s:g} s.",
                "Check the servers' logs, or increase engine.timeout_s.",
            ) from error
        return group


def _full_payload(version: int, plain: dict[str, torch.Tensor]) -> _Payload:
    return _Payload(plain, plain, make_manifest(version, None, plain))


def make_broadcaster(
    replicas: Sequence[Replica], api: ApiAdapter, settings: RemoteEngineSettings
) -> Broadcaster | None:
    """Return a broadcaster if a broadcast address is set. Raises EngineError for servers without vLLM's API."""
    if not settings.broadcast_host:
        return None
    if not isinstance(api, VllmApi):
        raise EngineError(
            f"{replicas[0].url} does not support weight broadcasts.",
            "Unset engine.broadcast_host to send weights through a folder.",
        )
    return Broadcaster(
        replicas, api, settings.broadcast_host, settings.timeout_s, settings.delta, settings.keeps_weights
    )


async def call_workers(replica: Replica, path: str, body: Mapping[str, object]) -> None:
    """Call the worker method of `path` (as in `ludus serve`). Raises HttpStatusError with its error."""
    method = "ludus_" + path.removeprefix("/")
    request = {"method": method, "kwargs": {"text": json.dumps(body)}}
    try:
        responses = (await replica.post("/collective_rpc", request, _Results)).results
    except HttpStatusError as error:
        error.hint = (
            f"Start vLLM with --worker-extension-cls {EXTENSION} and VLLM_SERVER_DEV_MODE=1 in an "
            "environment with Ludus installed; or unset engine.broadcast_host."
        )
        raise
    for answer in responses:
        if isinstance(answer, dict):
            raise HttpStatusError(f"{replica.url}: {answer['error']}", status=int(answer["status"]))
