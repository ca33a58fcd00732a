"""Publish weights to inference servers: storage, version of each replica, verification.

A follower of another client sends nothing; it tracks the published versions and rejects tokens of any other.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ludus.engines.base import DEFAULT
from ludus.engines.models.fingerprint import compare_digests
from ludus.engines.remote.api_adapters import ApiAdapter, RemoteAdapter, SampledTokens
from ludus.engines.remote.gloo_broadcast import with_lm_head
from ludus.engines.remote.http_client import RemoteEngineSettings, Replica
from ludus.engines.remote.lora_publisher import LoraPublisher
from ludus.engines.remote.weight_broadcaster import make_broadcaster
from ludus.engines.remote.weight_folder import WeightFolder, read_weights, save_weights
from ludus.errors import EngineError, SyncError

if TYPE_CHECKING:
    import torch

log = logging.getLogger("ludus.server")


KNOWN_LABELS = 1000
"""Maximum number of version labels stored, the newest; no running request spans as many."""


@dataclass
class _Sent:
    """The last full weights sent, their folder, and the labels of all versions sent."""

    version: int = 0
    folder: Path | None = None
    labels: tuple[str, ...] = ()

    def labels_with(self, version: int) -> tuple[str, ...]:
        """Return the labels after sending `version`."""
        earlier = (label for label in self.labels if label != str(version))
        return (*earlier, str(version))[-KNOWN_LABELS:]


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
        self._api = api
        self._replicas = replicas
        self._name = name
        self._reports_versions = reports_versions
        self._follows = False
        self._unverified: set[str] = set()
        self._sent = _Sent()
        self._outdated_folders: list[Path] = []
        self._weight_folder = WeightFolder(settings.weights_folder)
        self.adapters = LoraPublisher(api, replicas, self._weight_folder, name, settings.keeps_adapters)
        self.broadcaster = make_broadcaster(replicas, api, settings)

    async def send(self, version: int, state: Mapping[str, torch.Tensor]) -> None:
        """Send full weights to every replica. Raises as `ServerEngine.load_weights`."""
        if self.broadcaster is not None:
            await self._broadcast(version, state)
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
            self._announce(version, None)
        else:
            self._announce(version, await self._save(version, with_lm_head(state)))
        for replica in self._replicas:
            replica.stale_version = old if replica.stale_version is None else replica.stale_version
        await self._remove_outdated()

    async def push_staged(self, replica: Replica) -> None:
        """Send the staged weights to one replica and verify them. Raises as `ServerEngine.load_weights`."""
        async with replica.lock:
            if self.broadcaster is not None:
                await self._verify_digests(replica, await self.broadcaster.sync_replica(replica))
            else:
                assert self._sent.folder is not None
                await self._update(replica, await asyncio.to_thread(read_weights, self._sent.folder))
            replica.weight_version, replica.stale_version = self.version, None

    async def _save(self, version: int, state: Mapping[str, torch.Tensor]) -> Path:
        folder = self._weight_folder.folder(f"{self._name}-{version}", sum(t.nbytes for t in state.values()))
        await asyncio.to_thread(save_weights, folder, state)
        return folder

    def _announce(self, version: int, folder: Path | None) -> None:
        """Record the weights that replicas should hold."""
        outdated = {*self._outdated_folders, self._sent.folder} - {folder, None}
        self._outdated_folders = [one for one in outdated if one is not None]
        self._sent = _Sent(version, folder, self._sent.labels_with(version))
        self.version = version

    async def _remove_outdated(self) -> None:
        """Remove outdated folders once no replica is being checked; after a failure, with the next transfer."""
        while self._outdated_folders:
            for replica in tuple(self._replicas):
                async with replica.lock:
                    pass
            await asyncio.to_thread(shutil.rmtree, self._outdated_folders.pop(), ignore_errors=True)

    async def _broadcast(self, version: int, state: Mapping[str, torch.Tensor]) -> None:
        """Broadcast the weights; no file is kept to resend them."""
        assert self.broadcaster is not None
        self.add_version(version)  # the first replica may sample before the last has them
        await self.broadcaster.send(version, state)
        self._announce(version, None)
        for replica in tuple(self._replicas):
            await self._verify_digests(replica, state)
            replica.weight_version, replica.stale_version = version, None

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
        labels = self._sent.labels if adapter is not None else self._sent.labels_with(version)
        self._sent = _Sent(version, None, labels)
        self.version = version

    def add_version(self, version: int) -> None:
        """Record a version sent in addition to the last one, possibly by another client."""
        self._sent = replace(self._sent, labels=self._sent.labels_with(version))

    async def sync_replica(self, replica: Replica) -> None:
        """Send the last weights to a new replica and verify them."""
        if self.broadcaster is not None:
            last = await self.broadcaster.sync_replica(replica)
            if last:
                await self._verify_digests(replica, last)
                replica.weight_version = self.version
        await self.ensure_weights(replica, first_turn=True)

    async def ensure_weights(self, replica: Replica, *, first_turn: bool, pinned: int | None = None) -> None:
        """Ensure that a replica holds the expected weights. One that reports versions with its tokens is queried only
        when in doubt, others once per episode. Raises EngineError if it does not hold the version `pinned`."""
        if self._follows:
            if replica.weight_version != self.version or (first_turn and not self._reports_versions):
                await self._check_label(replica, pinned)
            return
        if self._sent.folder is None and not self.adapters:
            await self._check_broadcast(replica)
        else:
            await self._ensure_latest(replica, first_turn)
        if pinned is not None and pinned != self._expected_version(replica):
            raise EngineError(f"{replica.url} lost weights {pinned}, to which an episode is pinned.")

    async def _ensure_latest(self, replica: Replica, first_turn: bool) -> None:
        """Resend the last weights if the replica lost them."""
        in_doubt = replica.weight_version != self._expected_version(replica)
        reports = self._reports_versions or self._sent.folder is None
        if not in_doubt and (reports or not first_turn):
            return
        async with replica.lock:
            if replica.weight_version == self._expected_version(replica) and in_doubt:
                return
            folder, version = self._sent.folder, self._sent.version
            expected = str(version if replica.stale_version is None else replica.stale_version)
            if folder is not None and (label := await self._api.version(replica)) != expected:
                log.warning("%s holds weights %s; sending version %d", replica.url, label, version)
                await self._update(replica, await asyncio.to_thread(read_weights, folder))
            await self.adapters.restore(replica)
            replica.weight_version = self._expected_version(replica)

    def _expected_version(self, replica: Replica) -> int:
        return self.version if replica.stale_version is None else replica.stale_version

    def starting_version(self, adapter: RemoteAdapter | None, pinned: int | None = None) -> int:
        """Return the version that a request starts under."""
        if adapter is not None:
            return adapter.version
        return self._sent.version if pinned is None else pinned

    def accepts(self, sampled: SampledTokens, adapter: RemoteAdapter | None, pinned: int | None = None) -> bool:
        """Return whether all tokens are of known versions (of `pinned`, if set), or the server reports none."""
        labels = self._sent.labels if adapter is None else (str(adapter.version),)
        if pinned is not None:
            labels = (str(pinned),)
        return not labels or all(span.version in labels for span in sampled.spans or ())

    async def close(self) -> None:
        """Unload adapters from the servers and remove temporary folders."""
        await self.adapters.close()
        if not self._weight_folder.root:
            self._sent.folder = None
        self._weight_folder.close()
        if self.broadcaster is not None:
            self.broadcaster.close()

    async def _check_label(self, replica: Replica, pinned: int | None) -> None:
        """Raise EngineError if a replica holds weights that no client sent."""
        labels = self._sent.labels if pinned is None else {str(pinned)}
        if labels:
            label = await self._api.version(replica)
            if label not in labels:
                raise EngineError(f"{replica.url} holds unknown weights {label}.")
        replica.weight_version = self.version

    async def _check_broadcast(self, replica: Replica) -> None:
        """Raise EngineError if a replica that was unreachable lacks the last broadcast."""
        expected = self._expected_version(replica)
        if self.broadcaster is None or not self._sent.labels or replica.weight_version == expected:
            return
        if await self._api.version(replica) != str(expected):
            raise EngineError(
                f"{replica.url} lost the broadcast weights of version {expected}.",
                "Resume the run to resend them. Weights in a folder are resent automatically.",
            )
        replica.weight_version = expected

    async def _update(self, replica: Replica, state: Mapping[str, torch.Tensor]) -> None:
        """Load the weights in the folder at one replica and verify its digests against `state`."""
        await self._api.update(replica, str(self._sent.folder), self._sent.version)
        await self._verify_digests(replica, state)
        replica.weight_version, replica.stale_version = self.version, None

    async def _verify_digests(self, replica: Replica, state: Mapping[str, torch.Tensor]) -> None:
        digests = await self._api.digests(replica)
        proof = await asyncio.to_thread(compare_digests, digests or {}, state)
        if not proof.proved and replica.url not in self._unverified:
            self._unverified.add(replica.url)
            log.warning("%s reports no weight digests: only the probe verifies them", replica.url)
        if proof.wrong:
            raise SyncError(
                f"{replica.url} does not hold the weights of version {self._sent.version}: "
                f"{len(proof.wrong)} tensors differ, including {', '.join(proof.wrong[:3])}.",
                "The rollouts would come from another policy; nothing was trained on them.",
            )
        log.info("%s: %d tensors verified, %d without digests", replica.url, proof.proved, proof.silent)
