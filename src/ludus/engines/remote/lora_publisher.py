"""Versioned LoRA adapters at inference servers: each version has its own folder and unique name.

A request (or, with `keeps`, an episode) finishes on the version that it started with. A new version is loaded
in addition to the old one, which is unloaded when unused. All versions in use are reloaded on a restarted server.
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
from ludus.engines.models.lora import write_adapter
from ludus.engines.remote.api_adapters import ApiAdapter, RemoteAdapter
from ludus.engines.remote.http_client import Replica
from ludus.engines.remote.weight_folder import WeightFolder, write_error
from ludus.errors import EngineError, RequestRejected, SyncError

if TYPE_CHECKING:
    import torch

_UNLOAD_TIMEOUT_S = 5.0

log = logging.getLogger("ludus.server")


@dataclass(eq=False)
class _LoadedAdapter:
    """A version loaded at the servers. `users` counts its running requests or episodes."""

    remote: RemoteAdapter
    users: int = 0
    is_retired: bool = False


@dataclass
class LoraPublisher:
    """The adapters of one engine, current and still in use; their names begin with the unique `prefix`."""

    api: ApiAdapter
    replicas: Sequence[Replica]
    weight_folder: WeightFolder
    prefix: str
    keeps: bool = False
    """Whether an episode keeps the version that it started with."""
    _episodes: dict[str, _LoadedAdapter] = field(default_factory=dict)
    _current: dict[str, _LoadedAdapter] = field(default_factory=dict)
    _loaded: list[_LoadedAdapter] = field(default_factory=list)
    _num_sent: int = 0
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    def __bool__(self) -> bool:
        return bool(self._loaded)

    async def send(self, name: str, version: int, state: Mapping[str, torch.Tensor], scaling: float) -> None:
        """Load an adapter at every replica and retire the old version, which stays current on an error."""
        remote = await asyncio.to_thread(self._write, name, version, state, scaling)
        try:
            await asyncio.gather(*(self._load_locked(replica, remote) for replica in self.replicas))
        except BaseException:
            self._retire(_LoadedAdapter(remote))
            raise
        self.unload(name)
        self._current[name] = _LoadedAdapter(remote)
        self._loaded.append(self._current[name])

    def follow(self, remote: RemoteAdapter | None) -> None:
        """Use as default an adapter that another client sent and manages."""
        if remote is not None:
            self._current[DEFAULT] = _LoadedAdapter(remote)

    @property
    def default(self) -> RemoteAdapter | None:
        """The default adapter of requests."""
        loaded = self._current.get(DEFAULT)
        return None if loaded is None else loaded.remote

    def unload(self, name: str) -> None:
        """Retire an adapter; its running requests finish first. Does nothing if it is unknown."""
        loaded = self._current.pop(name, None)
        if loaded is not None:
            self._retire(loaded)

    @contextmanager
    def using(self, adapter: str | None, episode: str = "") -> Iterator[RemoteAdapter | None]:
        """Keep an episode's adapter (None: the base model) loaded. Raises RequestRejected for an unknown one."""
        loaded = self._episodes.get(episode) or self._current.get(DEFAULT if adapter is None else adapter)
        if loaded is None:
            if adapter not in (None, BASE):
                known = ", ".join(sorted(self._current)) or "none"
                raise RequestRejected(f"Adapter {adapter!r} is not loaded; loaded: {known}.")
            yield None
            return
        if self.keeps and episode and adapter is None and episode not in self._episodes:
            self._episodes[episode] = loaded
            loaded.users += 1
        loaded.users += 1
        try:
            yield loaded.remote
        finally:
            self._release_user(loaded)

    def release(self, episode: str) -> None:
        """End an episode and release its adapter."""
        loaded = self._episodes.pop(episode, None)
        if loaded is not None:
            self._release_user(loaded)

    def _release_user(self, loaded: _LoadedAdapter) -> None:
        loaded.users -= 1
        if loaded.is_retired:
            self._retire(loaded)

    async def restore(self, replica: Replica) -> None:
        """Reload adapters that a replica lost; the caller holds its lock."""
        if not self._loaded:
            return
        listed = await self.api.adapters(replica)
        for loaded in tuple(self._loaded):
            if loaded.remote.name not in listed:
                log.warning("%s lost adapter %s; reloading it", replica.url, loaded.remote.name)
                await self._load(replica, loaded.remote)

    async def close(self) -> None:
        """Unload all adapters from the reachable servers."""
        adapters_loaded = [loaded.remote for loaded in self._loaded]
        self._loaded, self._current = [], {}
        reachable = [replica for replica in self.replicas if not replica.is_down]
        try:
            async with asyncio.timeout(_UNLOAD_TIMEOUT_S):
                await asyncio.gather(*self._tasks)
                await asyncio.gather(*(self._unload(r, remote) for remote in adapters_loaded for r in reachable))
        except TimeoutError:
            log.warning("timed out while unloading the adapters from the servers")

    def _write(self, name: str, version: int, state: Mapping[str, torch.Tensor], scaling: float) -> RemoteAdapter:
        self._num_sent += 1
        remote = f"ludus-{self.prefix}-{self._num_sent}-{name}-{version}"
        folder = self.weight_folder.folder(remote.replace("/", "_"), sum(t.nbytes for t in state.values()))
        try:
            rank = write_adapter(folder, state, scaling)
        except OSError as error:
            raise write_error(folder, error) from error
        return RemoteAdapter(remote, str(folder), version, rank)

    async def _load_locked(self, replica: Replica, remote: RemoteAdapter) -> None:
        async with replica.lock:
            await self._load(replica, remote)

    async def _load(self, replica: Replica, remote: RemoteAdapter) -> None:
        await self.api.load_adapter(replica, remote)
        if remote.name not in await self.api.adapters(replica):
            raise SyncError(f"{replica.url} accepted the adapter {remote.name} but does not list it.")

    def _retire(self, loaded: _LoadedAdapter) -> None:
        """Unload an adapter from all servers, in the background, once it has no users."""
        loaded.is_retired = True
        if loaded.users:
            return
        if loaded in self._loaded:
            self._loaded.remove(loaded)
        task = asyncio.get_running_loop().create_task(self._drop(loaded.remote))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _drop(self, remote: RemoteAdapter) -> None:
        await asyncio.gather(*(self._unload(r, remote) for r in self.replicas if not r.is_down))
        await asyncio.to_thread(shutil.rmtree, remote.folder, ignore_errors=True)

    async def _unload(self, replica: Replica, remote: RemoteAdapter) -> None:
        try:
            await self.api.unload_adapter(replica, remote.name)
        except EngineError as error:
            log.info("%s failed to unload adapter %s: %s", replica.url, remote.name, error)
