"""Publish weights to inference servers: storage, version of each replica, verification.

A follower of another client sends nothing; it tracks the published versions and rejects tokens of any other.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from ludus.engines.base import BASE, DEFAULT
from ludus.engines.models.fingerprint import compare_digests
from ludus.engines.models.lora import write_adapter
from ludus.engines.remote.api_adapters import ApiAdapter, RemoteAdapter, SampledTokens
from ludus.engines.remote.gloo_broadcast import with_lm_head
from ludus.engines.remote.http_client import RemoteEngineSettings, Replica
from ludus.engines.remote.weight_broadcaster import make_broadcaster
from ludus.engines.temporary import TemporaryFolder, remove_abandoned
from ludus.errors import EngineError, RequestRejected, StorageError, SyncError

if TYPE_CHECKING:
    import torch

SHARED_MEMORY = Path("/dev/shm")
_PREFIX = "ludus-weights-"
_COPIES = 2  # the weights in use and the next


@dataclass
class WeightFolder:
    """Folders for weights under `root`, or under a temporary folder, in shared memory if there is room, which `close`
    removes."""

    root: str = ""
    shared_memory: Path = SHARED_MEMORY
    _own: TemporaryFolder | None = field(init=False, default=None)

    def folder(self, name: str, num_bytes: int) -> Path:
        """Return the path `name`, not yet created, for `num_bytes` of weights. Raises StorageError."""
        if self.root:
            return (Path(self.root) / name).absolute()
        if self._own is None:
            parent = self.shared_memory
            try:
                remove_abandoned(_PREFIX, parent)
                shared = os.access(parent, os.W_OK | os.X_OK)
                shared = shared and shutil.disk_usage(parent).free >= _COPIES * num_bytes
                self._own = TemporaryFolder(_PREFIX, parent if shared else None)
            except OSError as error:
                raise write_error(Path(tempfile.gettempdir()), error) from error
        return self._own.path / name

    def close(self) -> None:
        """Remove the temporary folder. A later `folder` recreates it."""
        if self._own is not None:
            self._own.close()
        self._own = None


def save_weights(folder: Path, state: Mapping[str, torch.Tensor]) -> None:
    """Write tensors to `model.safetensors`. Raises StorageError."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        folder.mkdir(parents=True, exist_ok=True)
        plain = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in state.items()}
        save_file(plain, folder / "model.safetensors", metadata={"format": "pt"})
    except (OSError, SafetensorError) as error:
        raise write_error(folder, error) from error


def read_weights(folder: Path) -> dict[str, torch.Tensor]:
    """Read the tensors of `save_weights`. Raises StorageError."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(folder / "model.safetensors")
    except (OSError, SafetensorError) as error:
        raise StorageError(
            f"The weights for the server cannot be read from {folder}: {error}.",
            "They were removed or changed: check engine.weights_folder.",
        ) from error


def write_error(folder: Path, error: Exception) -> StorageError:
    """Return the error for weights that cannot be written."""
    return StorageError(
        f"The weights for the server cannot be written to {folder}: {error}.",
        "Set engine.weights_folder to a folder with free space that the server can also access.",
    )


_UNLOAD_TIMEOUT_S = 5.0

log = logging.getLogger(__name__)


@dataclass
class LoraPublisher:
    """The adapters of one engine, current and still in use; their names begin with the unique `prefix`.

    A request (or, with `keeps`, an episode) finishes on the version that it started with. A new version, with its own
    folder and name, is loaded in addition to the old one, which is unloaded when unused. All versions in use are
    reloaded on a restarted server.
    """

    api: ApiAdapter
    replicas: Sequence[Replica]
    weight_folder: WeightFolder
    prefix: str
    keeps: bool = False
    """Whether an episode keeps the version that it started with."""
    _episodes: dict[str, RemoteAdapter] = field(default_factory=dict)
    _current: dict[str, RemoteAdapter] = field(default_factory=dict)
    _loaded: list[RemoteAdapter] = field(default_factory=list)
    _users: Counter[RemoteAdapter] = field(default_factory=Counter)
    """Number of running requests, and of episodes that keep it, by adapter."""
    _num_sent: int = 0
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    def __bool__(self) -> bool:
        return bool(self._loaded)

    async def send(self, name: str, version: int, state: Mapping[str, torch.Tensor], scaling: float) -> None:
        """Load an adapter at every replica and unload the old version, which stays current on an error."""
        remote = await asyncio.to_thread(self._write, name, version, state, scaling)

        async def load(replica: Replica) -> None:
            async with replica.lock:
                await self._load(replica, remote)

        try:
            await asyncio.gather(*map(load, self.replicas))
            self._current[name] = remote
        finally:
            self._loaded.append(remote)
            self._unload_unused()

    def follow(self, remote: RemoteAdapter | None) -> None:
        """Use as default an adapter that another client sent and manages."""
        if remote is not None:
            self._current[DEFAULT] = remote

    @property
    def default(self) -> RemoteAdapter | None:
        return self._current.get(DEFAULT)

    def unload(self, name: str) -> None:
        """Unload an adapter; its running requests finish first. Does nothing if it is unknown."""
        self._current.pop(name, None)
        self._unload_unused()

    @contextmanager
    def using(self, adapter: str | None, episode: str = "") -> Iterator[RemoteAdapter | None]:
        """Keep an episode's adapter (None: the base model) loaded. Raises RequestRejected for an unknown one."""
        remote = self._episodes.get(episode) or self._current.get(DEFAULT if adapter is None else adapter)
        if remote is None:
            if adapter not in (None, BASE):
                known = ", ".join(sorted(self._current)) or "none"
                raise RequestRejected(f"Adapter {adapter!r} is not loaded; loaded: {known}.")
            yield None
            return
        if self.keeps and episode and adapter is None and episode not in self._episodes:
            self._episodes[episode] = remote
            self._users[remote] += 1
        self._users[remote] += 1
        try:
            yield remote
        finally:
            self._release_user(remote)

    def release(self, episode: str) -> None:
        if (remote := self._episodes.pop(episode, None)) is not None:
            self._release_user(remote)

    def _release_user(self, remote: RemoteAdapter) -> None:
        self._users[remote] -= 1
        if not self._users[remote]:
            del self._users[remote]
        self._unload_unused()

    async def restore(self, replica: Replica) -> None:
        """Reload adapters that a replica lost; the caller holds its lock."""
        if not self._loaded:
            return
        listed = await self.api.adapters(replica)
        for remote in tuple(self._loaded):
            if remote.name not in listed:
                log.warning("%s lost adapter %s; reloading it", replica.url, remote.name)
                await self._load(replica, remote)

    async def close(self) -> None:
        """Unload all adapters from the reachable servers."""
        adapters_loaded, self._loaded, self._current = self._loaded, [], {}
        try:
            async with asyncio.timeout(_UNLOAD_TIMEOUT_S):
                await asyncio.gather(*self._tasks)
                await asyncio.gather(*map(self._unload, adapters_loaded))
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

    async def _load(self, replica: Replica, remote: RemoteAdapter) -> None:
        await self.api.load_adapter(replica, remote)
        if remote.name not in await self.api.adapters(replica):
            raise SyncError(f"{replica.url} accepted the adapter {remote.name} but does not list it.")

    def _unload_unused(self) -> None:
        """Unload outdated adapters without users from all servers, in the background."""

        async def drop(remote: RemoteAdapter) -> None:
            await self._unload(remote)
            await asyncio.to_thread(shutil.rmtree, remote.folder, ignore_errors=True)

        for remote in [one for one in self._loaded if not (self._users[one] or one in self._current.values())]:
            self._loaded.remove(remote)
            task = asyncio.get_running_loop().create_task(drop(remote))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _unload(self, remote: RemoteAdapter) -> None:
        """Unload an adapter from the reachable servers."""

        async def unload(replica: Replica) -> None:
            try:
                await self.api.unload_adapter(replica, remote.name)
            except EngineError as error:
                log.info("%s failed to unload adapter %s: %s", replica.url, remote.name, error)

        await asyncio.gather(*(unload(replica) for replica in self.replicas if not replica.is_down))


KNOWN_LABELS = 1000
"""Maximum number of version labels stored, the newest; no running request spans as many."""


class WeightPublisher:
    """Weights sent by one client, of the unique `name`, to `replicas`, a list that may change in place.
    `reports_versions`: the servers label each token with its weight version."""

    def __init__(
        self,
        api: ApiAdapter,
        replicas: list[Replica],
        settings: RemoteEngineSettings,
        name: str,
        *,
        reports_versions: bool,
    ) -> None:
        self.version = 0
        self._api, self._replicas, self._name = api, replicas, name
        self._reports_versions = reports_versions
        self._follows = False
        self._unverified: set[str] = set()
        self._base_version, self._folder = 0, ""
        """Version and folder of the last full weights sent; the folder is "" after a broadcast."""
        self._labels: tuple[str, ...] = ()
        self._outdated_folders: set[str] = set()
        self._weight_folder = WeightFolder(settings.weights_folder)
        self.adapters = LoraPublisher(api, replicas, self._weight_folder, name, settings.keeps_adapters)
        self.broadcaster = make_broadcaster(replicas, api, settings)

    async def send(self, version: int, state: Mapping[str, torch.Tensor]) -> None:
        """Send full weights to every replica. Raises as `ServerEngine.load_weights`."""
        if self.broadcaster is not None:  # no file is kept to resend the weights
            self.add_version(version)  # the first replica may sample before the last has them
            await self.broadcaster.send(version, state)
            self._announce(version, "")
            for replica in tuple(self._replicas):
                await self._verify(replica, state)
            return
        state, replicas = with_lm_head(state), tuple(self._replicas)
        folder = await self._save(version, state)
        async with AsyncExitStack() as held:
            for replica in replicas:  # a concurrent check would report a mismatch
                await held.enter_async_context(replica.lock)
            self._announce(version, folder)
            updates = (self._update(replica, state) for replica in replicas)
            ended = await asyncio.gather(*updates, return_exceptions=True)
        for error in ended:
            if error is not None:
                raise error
        await self._remove_outdated()

    async def stage(self, version: int, state: Mapping[str, torch.Tensor]) -> None:
        """Store full weights for `push_staged`, not during one; replicas keep their version. Raises StorageError."""
        old = self.version
        if self.broadcaster is not None:
            await asyncio.to_thread(self.broadcaster.stage, version, state)
            self._announce(version, "")
        else:
            self._announce(version, await self._save(version, with_lm_head(state)))
        for replica in self._replicas:
            replica.stale_version = old if replica.stale_version is None else replica.stale_version
        await self._remove_outdated()

    async def push_staged(self, replica: Replica) -> None:
        """Send the staged weights to one replica and verify them. Raises as `ServerEngine.load_weights`."""
        async with replica.lock:
            if self.broadcaster is not None:
                await self._verify(replica, await self.broadcaster.sync_replica(replica))
            else:
                await self._update(replica)

    async def _save(self, version: int, state: Mapping[str, torch.Tensor]) -> str:
        folder = self._weight_folder.folder(f"{self._name}-{version}", sum(t.nbytes for t in state.values()))
        await asyncio.to_thread(save_weights, folder, state)
        return str(folder)

    def _announce(self, version: int, folder: str) -> None:
        self._outdated_folders = {*self._outdated_folders, self._folder} - {folder, ""}
        self.version = self._base_version = version
        self._folder = folder
        self.add_version(version)

    async def _remove_outdated(self) -> None:
        """Remove outdated folders once no replica is being checked; after a failure, with the next transfer."""
        while self._outdated_folders:
            for replica in tuple(self._replicas):
                async with replica.lock:
                    pass
            await asyncio.to_thread(shutil.rmtree, self._outdated_folders.pop(), ignore_errors=True)

    async def send_adapter(self, name: str, version: int, state: Mapping[str, torch.Tensor], scaling: float) -> None:
        """Send an adapter to every replica. Raises as `ServerEngine.load_adapter`."""
        await self.adapters.send(name, version, state, scaling)
        if name != DEFAULT:
            return
        for replica in self._replicas:
            replica.weight_version = version if replica.weight_version == self.version else None
        self.version = version

    def follow(self, version: int | None, adapter: RemoteAdapter | None) -> None:
        """Record that another client sent `version` (None: nothing yet), as `adapter` if it sends adapters."""
        self._follows = True
        self.adapters.follow(adapter)
        if version is None:
            return
        if adapter is None:
            self.add_version(version)
        self.version, self._base_version, self._folder = version, version, ""

    def add_version(self, version: int) -> None:
        """Record a version sent in addition to the last one, possibly by another client."""
        earlier = (label for label in self._labels if label != str(version))
        self._labels = (*earlier, str(version))[-KNOWN_LABELS:]

    async def sync_replica(self, replica: Replica) -> None:
        if self.broadcaster is not None and (last := await self.broadcaster.sync_replica(replica)):
            await self._verify(replica, last)
        await self.ensure_weights(replica, first_turn=True)

    async def ensure_weights(self, replica: Replica, *, first_turn: bool, pinned: int | None = None) -> None:
        """Ensure that a replica holds the expected weights. One that reports versions with its tokens is queried only
        when in doubt, others once per episode. Raises EngineError if it does not hold the version `pinned`."""
        if self._follows:
            if replica.weight_version != self.version or (first_turn and not self._reports_versions):
                labels = self._labels if pinned is None else (str(pinned),)
                if labels and (label := await self._api.version(replica)) not in labels:
                    raise EngineError(f"{replica.url} holds unknown weights {label}.")
                replica.weight_version = self.version
            return
        if not self._folder and not self.adapters:
            await self._check_broadcast(replica)
        else:
            await self._ensure_latest(replica, first_turn)
        if pinned is not None and pinned != self._expected_version(replica):
            raise EngineError(f"{replica.url} lost weights {pinned}, to which an episode is pinned.")

    async def _ensure_latest(self, replica: Replica, first_turn: bool) -> None:
        in_doubt = replica.weight_version != self._expected_version(replica)
        reports = self._reports_versions or not self._folder
        if not in_doubt and (reports or not first_turn):
            return
        async with replica.lock:
            if replica.weight_version == self._expected_version(replica) and in_doubt:
                return
            if self._folder:  # not an adapter's version
                expected = self._base_version if replica.stale_version is None else replica.stale_version
                if (label := await self._api.version(replica)) != str(expected):
                    log.warning("%s holds weights %s; sending version %d", replica.url, label, self._base_version)
                    await self._update(replica)
            await self.adapters.restore(replica)
            replica.weight_version = self._expected_version(replica)

    def _expected_version(self, replica: Replica) -> int:
        return self.version if replica.stale_version is None else replica.stale_version

    def starting_version(self, adapter: RemoteAdapter | None, pinned: int | None = None) -> int:
        """Return the version that a request starts under."""
        if adapter is not None:
            return adapter.version
        return self._base_version if pinned is None else pinned

    def accepts(self, sampled: SampledTokens, adapter: RemoteAdapter | None, pinned: int | None = None) -> bool:
        """Return whether all tokens are of known versions (of `pinned`, if set), or the server reports none."""
        labels = self._labels if adapter is None else (str(adapter.version),)
        if pinned is not None:
            labels = (str(pinned),)
        return not labels or all(span.version in labels for span in sampled.spans or ())

    async def close(self) -> None:
        """Unload adapters from the servers and remove temporary folders."""
        await self.adapters.close()
        if not self._weight_folder.root:
            self._folder = ""
        self._weight_folder.close()
        if self.broadcaster is not None:
            self.broadcaster.close()

    async def _check_broadcast(self, replica: Replica) -> None:
        """Raise EngineError if a replica that was unreachable lacks the last broadcast."""
        expected = self._expected_version(replica)
        if self.broadcaster is None or not self._labels or replica.weight_version == expected:
            return
        if await self._api.version(replica) != str(expected):
            raise EngineError(
                f"{replica.url} lost the broadcast weights of version {expected}.",
                "Resume the run to resend them. Weights in a folder are resent automatically.",
            )
        replica.weight_version = expected

    async def _update(self, replica: Replica, state: Mapping[str, torch.Tensor] | None = None) -> None:
        """Load the weights in the folder at one replica and verify its digests, against `state` if it is at hand."""
        if state is None:
            state = await asyncio.to_thread(read_weights, Path(self._folder))
        await self._api.update(replica, self._folder, self._base_version)
        await self._verify(replica, state)

    async def _verify(self, replica: Replica, state: Mapping[str, torch.Tensor]) -> None:
        """Raise SyncError if a replica's digests differ from those of `state`; else record that it is current."""
        digests = await self._api.digests(replica)
        proof = await asyncio.to_thread(compare_digests, digests or {}, state)
        if not proof.proved and replica.url not in self._unverified:
            self._unverified.add(replica.url)
            log.warning("%s reports no weight digests: only the probe verifies them", replica.url)
        if proof.wrong:
            raise SyncError(
                f"{replica.url} does not hold the weights of version {self._base_version}: "
                f"{len(proof.wrong)} tensors differ, including {', '.join(proof.wrong[:3])}.",
                "The rollouts would come from another policy; nothing was trained on them.",
            )
        log.info("%s: %d tensors verified, %d without digests", replica.url, proof.proved, proof.silent)
        replica.weight_version, replica.stale_version = self.version, None
