"""Versioned LoRA adapters at inference servers: each version has its own folder and unique name.

A request (or, with `keeps`, an episode) finishes on the version that it started with. A new version is loaded
in addition to the old one, which is unloaded when unused. A restarted server gets all versions in use again.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ludus.engines.base import BASE, DEFAULT
from ludus.engines.models.lora_files import write_adapter
from ludus.engines.remote.api_adapters import ApiAdapter, RemoteAdapter
from ludus.engines.remote.http_client import Replica
from ludus.engines.remote.weight_folder import WeightFolder, num_bytes, unwritable
from ludus.errors import EngineError, RequestRefused, SyncError

if TYPE_CHECKING:
    import torch

_UNLOAD_TIMEOUT_S = 5.0

log = logging.getLogger("ludus.server")


@dataclass(eq=False)
class _Kept:
    """A version loaded at the servers. `users` counts its running requests or episodes."""

    served: RemoteAdapter
    users: int = 0
    is_old: bool = False


@dataclass
class LoraPublisher:
    """The adapters of one engine: the current version of each, and older ones still in use.

    `prefix` begins the names at the servers and must be unique to this engine.
    """

    dialect: ApiAdapter
    replicas: Sequence[Replica]
    weight_folder: WeightFolder
    prefix: str
    keeps: bool = False
    """Whether an episode keeps the version that it started with."""
    _episodes: dict[str, _Kept] = field(default_factory=dict)
    _current: dict[str, _Kept] = field(default_factory=dict)
    _kept: list[_Kept] = field(default_factory=list)
    _num_sent: int = 0
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    def __bool__(self) -> bool:
        return bool(self._kept)

    async def send(self, name: str, version: int, state: Mapping[str, torch.Tensor], scaling: float) -> None:
        """Write an adapter, load it at every replica, make it current and retire the old version.

        Raises SyncError if the tensors are not an adapter or a server does not list it afterwards,
        EngineError if a server is unreachable or refuses; the old version then pinned current.
        """
        served = await asyncio.to_thread(self._write, name, version, state, scaling)
        try:
            await asyncio.gather(*(self._load_locked(replica, served) for replica in self.replicas))
        except BaseException:
            self._retire(_Kept(served))
            raise
        old = self._current.get(name)
        self._current[name] = _Kept(served)
        self._kept.append(self._current[name])
        if old is not None:
            self._retire(old)

    def follow(self, served: RemoteAdapter | None) -> None:
        """Use as default an adapter that another client sent and manages."""
        if served is not None:
            self._current[DEFAULT] = _Kept(served)

    @property
    def default(self) -> RemoteAdapter | None:
        """The default adapter of requests."""
        kept = self._current.get(DEFAULT)
        return None if kept is None else kept.served

    def unload(self, name: str) -> None:
        """Retire an adapter; its running requests finish first. Does nothing if it is unknown."""
        kept = self._current.pop(name, None)
        if kept is not None:
            self._retire(kept)

    @contextmanager
    def using(self, adapter: str | None, episode: str = "") -> Iterator[RemoteAdapter | None]:
        """Hold the version of an episode's adapter (None: the base model). Raises RequestRefused for an unknown one."""
        kept = self._episodes.get(episode) or self._current.get(DEFAULT if adapter is None else adapter)
        if kept is None:
            if adapter not in (None, BASE):
                known = ", ".join(sorted(self._current)) or "none"
                raise RequestRefused(f"Adapter {adapter!r} is not loaded; loaded: {known}.")
            yield None
            return
        if self.keeps and episode and adapter is None and episode not in self._episodes:
            self._episodes[episode] = kept
            kept.users += 1
        kept.users += 1
        try:
            yield kept.served
        finally:
            self._done_with(kept)

    def release(self, episode: str) -> None:
        """End an episode and release its adapter."""
        kept = self._episodes.pop(episode, None)
        if kept is not None:
            self._done_with(kept)

    def _done_with(self, kept: _Kept) -> None:
        kept.users -= 1
        if kept.is_old:
            self._retire(kept)

    async def restore(self, replica: Replica) -> None:
        """Reload adapters that a replica lost; the caller holds its lock."""
        if not self._kept:
            return
        listed = await self.dialect.adapters(replica)
        for kept in tuple(self._kept):
            if kept.served.name not in listed:
                log.warning("%s lost adapter %s; reloading it", replica.url, kept.served.name)
                await self._load(replica, kept.served)

    async def close(self) -> None:
        """Unload all adapters from the reachable servers."""
        gone = [kept.served for kept in self._kept]
        self._kept, self._current = [], {}
        reached = [replica for replica in self.replicas if not replica.is_down]
        try:
            async with asyncio.timeout(_UNLOAD_TIMEOUT_S):
                await asyncio.gather(*self._tasks)
                await asyncio.gather(*(self._unload(r, served) for served in gone for r in reached))
        except TimeoutError:
            log.warning("timed out while unloading the adapters from the servers")

    def _write(self, name: str, version: int, state: Mapping[str, torch.Tensor], scaling: float) -> RemoteAdapter:
        self._num_sent += 1
        served = f"ludus-{self.prefix}-{self._num_sent}-{name}-{version}"
        folder = self.weight_folder.folder(served.replace("/", "_"), num_bytes(state))
        try:
            rank = write_adapter(folder, state, scaling)
        except OSError as error:
            raise unwritable(folder, error) from error
        return RemoteAdapter(served, str(folder), version, rank)

    async def _load_locked(self, replica: Replica, served: RemoteAdapter) -> None:
        async with replica.lock:
            await self._load(replica, served)

    async def _load(self, replica: Replica, served: RemoteAdapter) -> None:
        await self.dialect.load_adapter(replica, served)
        if served.name not in await self.dialect.adapters(replica):
            raise SyncError(f"{replica.url} accepted the adapter {served.name} but does not list it.")

    def _retire(self, kept: _Kept) -> None:
        """Unload an adapter from all servers, in the background, once it has no users."""
        kept.is_old = True
        if kept.users:
            return
        if kept in self._kept:
            self._kept.remove(kept)
        task = asyncio.get_running_loop().create_task(self._drop(kept.served))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _drop(self, served: RemoteAdapter) -> None:
        await asyncio.gather(*(self._unload(r, served) for r in self.replicas if not r.is_down))
        await asyncio.to_thread(shutil.rmtree, served.folder, ignore_errors=True)

    async def _unload(self, replica: Replica, served: RemoteAdapter) -> None:
        try:
            await self.dialect.unload_adapter(replica, served.name)
        except EngineError as error:
            log.info("%s failed to unload adapter %s: %s", replica.url, served.name, error)
