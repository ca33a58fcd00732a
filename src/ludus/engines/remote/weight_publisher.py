"""Publish weights to inference servers: where they are stored, which replica holds them, verification.

Weights are sent through a shared folder or broadcast (`Broadcaster`); LoRA adapters are sent alone
(`LoraPublisher`). A client that follows another one sends nothing; it tracks the versions sent and rejects
tokens sampled under any other.
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
from ludus.engines.remote.gloo_broadcast import with_head
from ludus.engines.remote.http_client import RemoteEngineSettings, Replica
from ludus.engines.remote.lora_publisher import LoraPublisher
from ludus.engines.remote.weight_broadcaster import broadcaster_of
from ludus.engines.remote.weight_folder import WeightFolder, num_bytes, read_weights, save_weights
from ludus.errors import EngineError, SyncError

if TYPE_CHECKING:
    import torch

log = logging.getLogger("ludus.server")


KNOWN_LABELS = 1000
"""Number of newest version labels remembered; no running request spans as many."""


@dataclass
class _Sent:
    """The last full weights sent, their folder, and the labels of all versions sent."""

    version: int = 0
    folder: Path | None = None
    labels: tuple[str, ...] = ()

    def and_then(self, version: int) -> tuple[str, ...]:
        """Return the labels after sending `version`."""
        earlier = (label for label in self.labels if label != str(version))
        return (*earlier, str(version))[-KNOWN_LABELS:]


class WeightPublisher:
    """Weights sent by one client to `replicas`, a list that may change in place. `name` is unique to the
    client.

    `tells_versions`: the servers label each token with its weight version.
    """

    def __init__(
        self,
        dialect: ApiAdapter,
        replicas: list[Replica],
        settings: RemoteEngineSettings,
        name: str,
        *,
        tells_versions: bool,
    ) -> None:
        self.version = 0
        self._dialect = dialect
        self._replicas = replicas
        self._name = name
        self._tells_versions = tells_versions
        self._follows = False
        self._unproved: set[str] = set()
        self._sent = _Sent()
        self._old: list[Path] = []
        """Folders of outdated weights, to be removed."""
        self._shelf = WeightFolder(settings.weights_folder)
        self.adapters = LoraPublisher(dialect, replicas, self._shelf, name, settings.keeps_adapters)
        self.line = broadcaster_of(replicas, dialect, settings)

    async def send(self, version: int, state: Mapping[str, torch.Tensor]) -> None:
        """Send full weights to every replica. Raises as `ServerEngine.load_weights`."""
        if self.line is not None:
            await self._broadcast(version, state)
            return
        state, replicas = with_head(state), tuple(self._replicas)
        folder = await self._save(version, state)
        async with AsyncExitStack() as held:
            for replica in replicas:  # a replica checked meanwhile would seem to lack them
                await held.enter_async_context(replica.lock)
            self._announce(version, folder)
            updates = (self._update(replica, state) for replica in replicas)
            ended = await asyncio.gather(*updates, return_exceptions=True)
        for error in ended:
            if error is not None:
                raise error
        await self._remove_old()

    async def hold(self, version: int, state: Mapping[str, torch.Tensor]) -> None:
        """Store full weights for `give`, not during one; replicas keep their version. Raises StorageError."""
        old = self.version
        if self.line is not None:
            await asyncio.to_thread(self.line.stage, version, state)
            self._announce(version, None)
        else:
            self._announce(version, await self._save(version, with_head(state)))
        for replica in self._replicas:
            replica.behind = old if replica.behind is None else replica.behind
        await self._remove_old()

    async def give(self, replica: Replica) -> None:
        """Send the held weights to one replica and verify them. Raises as `ServerEngine.load_weights`."""
        async with replica.lock:
            if self.line is not None:
                await self._prove(replica, await self.line.bring(replica))
            else:
                assert self._sent.folder is not None
                await self._update(replica, await asyncio.to_thread(read_weights, self._sent.folder))
            replica.holds, replica.behind = self.version, None

    async def _save(self, version: int, state: Mapping[str, torch.Tensor]) -> Path:
        """Write weights and return their folder."""
        folder = self._shelf.folder(f"{self._name}-{version}", num_bytes(state))
        await asyncio.to_thread(save_weights, folder, state)
        return folder

    def _announce(self, version: int, folder: Path | None) -> None:
        """Record the weights that replicas should hold."""
        every = {*self._old, self._sent.folder} - {folder, None}
        self._old = [one for one in every if one is not None]
        self._sent = _Sent(version, folder, self._sent.and_then(version))
        self.version = version

    async def _remove_old(self) -> None:
        """Remove outdated folders once no replica is being checked; after a failure, with the next transfer."""
        while self._old:
            for replica in tuple(self._replicas):
                async with replica.lock:
                    pass
            await asyncio.to_thread(shutil.rmtree, self._old.pop(), ignore_errors=True)

    async def _broadcast(self, version: int, state: Mapping[str, torch.Tensor]) -> None:
        """Broadcast the weights; no file is kept to resend them."""
        assert self.line is not None
        self.know(version)  # the first replica may sample before the last has them
        await self.line.send(version, state)
        self._announce(version, None)
        for replica in tuple(self._replicas):
            await self._prove(replica, state)
            replica.holds, replica.behind = version, None

    async def send_adapter(self, name: str, version: int, state: Mapping[str, torch.Tensor], scaling: float) -> None:
        """Send an adapter to every replica. Raises as `ServerEngine.load_adapter`."""
        await self.adapters.send(name, version, state, scaling)
        if name != DEFAULT:
            return
        for replica in self._replicas:
            replica.holds = version if replica.holds == self.version else None
        self.version = version

    def follow(self, version: int | None, adapter: RemoteAdapter | None) -> None:
        """Record that another client sent `version` (None: nothing yet), as `adapter` if it sends adapters.

        The last `KNOWN_LABELS` versions stay known, since requests may still run under them.
        """
        self._follows = True
        self.adapters.follow(adapter)
        if version is None:
            return
        labels = self._sent.labels if adapter is not None else self._sent.and_then(version)
        self._sent = _Sent(version, None, labels)
        self.version = version

    def know(self, version: int) -> None:
        """Record a version sent in addition to the last one, possibly by another client."""
        self._sent = replace(self._sent, labels=self._sent.and_then(version))

    async def bring(self, replica: Replica) -> None:
        """Send the last weights to a new replica and verify them."""
        if self.line is not None:
            last = await self.line.bring(replica)
            if last:
                await self._prove(replica, last)
                replica.holds = self.version
        await self.ready(replica, first_turn=True)

    async def ready(self, replica: Replica, *, first_turn: bool, stays: int | None = None) -> None:
        """Ensure that a replica holds the expected weights, as far as it reports them.

        A replica that reports versions with its tokens is queried only when in doubt, others once per
        episode. Raises EngineError if it does not hold the version to which the episode is pinned (`stays`).
        """
        if self._follows:
            if replica.holds != self.version or (first_turn and not self._tells_versions):
                await self._check_label(replica, stays)
            return
        if self._sent.folder is None and not self.adapters:
            await self._check_broadcast(replica)
        else:
            await self._make_ready(replica, first_turn)
        if stays is not None and stays != self._due(replica):
            raise EngineError(f"{replica.url} lost weights {stays}, to which an episode is pinned.")

    async def _make_ready(self, replica: Replica, first_turn: bool) -> None:
        """Resend the last weights if the replica lost them."""
        in_doubt = replica.holds != self._due(replica)
        tells = self._tells_versions or self._sent.folder is None
        if not in_doubt and (tells or not first_turn):
            return
        async with replica.lock:
            if replica.holds == self._due(replica) and in_doubt:
                return
            folder, version = self._sent.folder, self._sent.version
            label = str(version if replica.behind is None else replica.behind)
            if folder is not None and await self._dialect.version(replica) != label:
                log.warning("%s holds weights %s; sending version %d", replica.url, label, version)
                await self._update(replica, await asyncio.to_thread(read_weights, folder))
            await self.adapters.restore(replica)
            replica.holds = self._due(replica)

    def _due(self, replica: Replica) -> int:
        """Return the version that a replica should hold."""
        return self.version if replica.behind is None else replica.behind

    def before(self, adapter: RemoteAdapter | None, stays: int | None = None) -> int:
        """Return the version that a request starts under."""
        if adapter is not None:
            return adapter.version
        return self._sent.version if stays is None else stays

    def knows(self, sampled: SampledTokens, adapter: RemoteAdapter | None, stays: int | None = None) -> bool:
        """Return whether all tokens are of known versions (of `stays`, if set), or the server reports none."""
        labels = self._sent.labels if adapter is None else (str(adapter.version),)
        if stays is not None:
            labels = (str(stays),)
        return not labels or all(span.version in labels for span in sampled.spans or ())

    async def close(self) -> None:
        """Unload adapters from the servers and remove temporary folders."""
        await self.adapters.close()
        if not self._shelf.root:
            self._sent.folder = None
        self._shelf.close()
        if self.line is not None:
            self.line.close()

    async def _check_label(self, replica: Replica, stays: int | None) -> None:
        """Raise EngineError if a replica holds weights that no client sent."""
        labels = self._sent.labels if stays is None else {str(stays)}
        if labels:
            label = await self._dialect.version(replica)
            if label not in labels:
                raise EngineError(f"{replica.url} holds unknown weights {label}.")
        replica.holds = self.version

    async def _check_broadcast(self, replica: Replica) -> None:
        """Raise EngineError if a replica that was unreachable lacks the last broadcast."""
        due = self._due(replica)
        if self.line is None or not self._sent.labels or replica.holds == due:
            return
        if await self._dialect.version(replica) != str(due):
            raise EngineError(
                f"{replica.url} lost the broadcast weights of version {due}.",
                "Resume the run to resend them. Weights in a folder are resent automatically.",
            )
        replica.holds = due

    async def _update(self, replica: Replica, state: Mapping[str, torch.Tensor]) -> None:
        """Load the weights in the folder at one replica and verify its digests against `state`."""
        await self._dialect.update(replica, str(self._sent.folder), self._sent.version)
        await self._prove(replica, state)
        replica.holds, replica.behind = self.version, None

    async def _prove(self, replica: Replica, state: Mapping[str, torch.Tensor]) -> None:
        """Compare the digests of a replica's tensors with `state`."""
        version, digests = self._sent.version, await self._dialect.digests(replica)
        if digests is None:
            self._say_unproved(replica)
            return
        proof = await asyncio.to_thread(compare_digests, digests, state)
        if not proof.proved:
            self._say_unproved(replica)
        if proof.wrong:
            raise SyncError(
                f"{replica.url} does not hold the weights of version {version} that it was sent: "
                f"{len(proof.wrong)} tensors differ, {', '.join(proof.wrong[:3])} among them.",
                "The rollouts would come from another policy; nothing was trained on them.",
            )
        log.info("%s: %d tensors verified, %d without digests", replica.url, proof.proved, proof.silent)

    def _say_unproved(self, replica: Replica) -> None:
        """Warn once per server that only log-probabilities verify its weights."""
        if replica.url not in self._unproved:
            self._unproved.add(replica.url)
            log.warning("%s reports no weight digests: only the probe verifies them", replica.url)
