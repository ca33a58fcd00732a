"""The trainer's end of a line of weights to `ludus serve`: who is on it, and what they hold."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pydantic import BaseModel

from ludus.engines.broadcast import (
    TRAINER,
    Line,
    Manifest,
    Place,
    difference,
    join_line,
    manifest_of,
    open_store,
)
from ludus.engines.transport import Refused, Replica, ServerSettings

if TYPE_CHECKING:
    import torch

_NO_LINE = 409

log = logging.getLogger("ludus.server")


class _Anything(BaseModel):
    """An answer whose content does not matter."""


@dataclass
class Broadcaster:
    """Sends weights to `replicas`, which reach this process at `host`; with `delta` what changed alone.

    Then, or where it `keeps` them, a copy of the last weights is kept on the CPU. A server that has left the
    line, or holds other weights than the difference is to, has all of them sent.
    """

    replicas: Sequence[Replica]
    host: str
    timeout_s: float
    delta: bool = False
    keeps: bool = False
    sent_bytes: int = 0
    _line: Line | None = None
    _last: dict[str, torch.Tensor] = field(default_factory=dict)
    _version: int = -1

    async def send(self, version: int, state: Mapping[str, torch.Tensor]) -> None:
        """Have every server take the weights. Raises EngineError with a server's own words."""
        plain = {name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}
        same = {n: t.shape for n, t in plain.items()} == {n: t.shape for n, t in self._last.items()}
        differs = same and self.delta
        tensors, base = (difference(plain, self._last), self._version) if differs else (plain, None)
        if not await self._ready_for(manifest_of(version, base, tensors)):
            tensors = plain
            await self._line_up()
            await self._prepare(manifest_of(version, None, plain))
        self._last = {}
        await self._send(tensors)
        self.sent_bytes = sum(t.numel() * t.element_size() for t in tensors.values())
        if self.delta or self.keeps:
            self._last, self._version = {n: t.clone() for n, t in plain.items()}, version

    async def bring(self, replica: Replica) -> Mapping[str, torch.Tensor]:
        """Send the last weights to a server that is not on the line, and give them; there may be none.

        The next ones go over a new line.
        """
        self._line = None
        if self._last:
            await Broadcaster([replica], self.host, self.timeout_s).send(self._version, self._last)
        return self._last

    def relay(self) -> None:
        """Lay the line anew before the next weights: the servers are others."""
        self._line = None

    def close(self) -> None:
        """Leave the line."""
        self._line, self._last = None, {}

    async def _ready_for(self, manifest: Manifest) -> bool:
        """Whether all servers are on the line and can take what the manifest says."""
        if self._line is None:
            return False
        try:
            await self._prepare(manifest)
        except Refused as error:
            if error.status != _NO_LINE:
                raise
            log.info("a line of weights is laid anew: %s", error)
            return False
        return True

    async def _prepare(self, manifest: Manifest) -> None:
        body = manifest.model_dump()
        await asyncio.gather(*(r.post("/prepare_weights", body, _Anything) for r in self.replicas))

    async def _line_up(self) -> None:
        """Meet all servers at a new place."""
        self._line = None
        store = open_store(self.timeout_s)
        count = len(self.replicas) + 1
        places = [
            Place(host=self.host, port=store.port, rank=i, count=count, timeout_s=self.timeout_s)
            for i in range(1, count)
        ]
        asked = [
            replica.post("/join_weight_line", place.model_dump(), _Anything)
            for replica, place in zip(self.replicas, places, strict=True)
        ]
        joined = asyncio.to_thread(join_line, store, TRAINER, count, self.timeout_s, self.host)
        async with asyncio.timeout(self.timeout_s):
            self._line, _ = await asyncio.gather(joined, asyncio.gather(*asked))

    async def _send(self, tensors: Mapping[str, torch.Tensor]) -> None:
        assert self._line is not None
        line, self._line = self._line, None  # it is back once all went well
        asked = [replica.post("/receive_weights", {}, _Anything) for replica in self.replicas]
        await asyncio.gather(*asked, asyncio.to_thread(line.broadcast, tensors))
        self._line = line


def broadcaster_of(replicas: Sequence[Replica], settings: ServerSettings) -> Broadcaster | None:
    """What broadcasts to `replicas`, where the settings name an address for it."""
    if not settings.broadcast_host:
        return None
    return Broadcaster(
        replicas, settings.broadcast_host, settings.timeout_s, settings.delta, settings.keeps_weights
    )
