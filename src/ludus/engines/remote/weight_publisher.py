"""The weights that were sent to inference servers: where they lie, who holds them, and the proof.

They go through a folder that the servers see, or over a line between processes (`Broadcaster`); LoRA
adapters go alone (`LoraPublisher`). A client that follows another one sends nothing: it knows what was sent,
and refuses what a server samples from anything else.
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
from ludus.engines.models.checksums import compare_digests
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
"""Labels of versions that stay known, the newest: no request runs under as many."""


@dataclass
class _Sent:
    """The whole weights that were sent last, where they lie, and the labels of those that were sent."""

    version: int = 0
    folder: Path | None = None
    labels: tuple[str, ...] = ()

    def and_then(self, version: int) -> tuple[str, ...]:
        """The labels once `version` is sent as well."""
        earlier = (label for label in self.labels if label != str(version))
        return (*earlier, str(version))[-KNOWN_LABELS:]


class WeightPublisher:
    """What one client has sent to `replicas`, a list that may change in place. `name` is the client's own.

    `tells_versions` says whether the servers label each token with the weights that sampled it.
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
        """Folders of weights before the last, which are to go."""
        self._shelf = WeightFolder(settings.weights_folder)
        self.adapters = LoraPublisher(dialect, replicas, self._shelf, name, settings.keeps_adapters)
        self.line = broadcaster_of(replicas, dialect, settings)

    async def send(self, version: int, state: Mapping[str, torch.Tensor]) -> None:
        """Have every replica take whole weights. Raises as `ServerEngine.load_weights`."""
        if self.line is not None:
            await self._broadcast(version, state)
            return
        state, replicas = with_head(state), tuple(self._replicas)
        folder = await self._save(version, state)
        async with AsyncExitStack() as held:
            for replica in replicas:  # one that is looked at meanwhile would seem to have lost them
                await held.enter_async_context(replica.lock)
            self._announce(version, folder)
            updates = (self._update(replica, state) for replica in replicas)
            ended = await asyncio.gather(*updates, return_exceptions=True)
        for error in ended:
            if error is not None:
                raise error
        await self._remove_old()

    async def hold(self, version: int, state: Mapping[str, torch.Tensor]) -> None:
        """Keep whole weights for `give`; each replica stays at the version that it has until then.

        Not while a replica is given any. Raises StorageError.
        """
        old = self.version
        if self.line is not None:
            await asyncio.to_thread(self.line.keep, version, state)
            self._announce(version, None)
        else:
            self._announce(version, await self._save(version, with_head(state)))
        for replica in self._replicas:
            replica.behind = old if replica.behind is None else replica.behind
        await self._remove_old()

    async def give(self, replica: Replica) -> None:
        """Have one replica take what is held, and prove it. Raises as `ServerEngine.load_weights`."""
        async with replica.lock:
            if self.line is not None:
                await self._prove(replica, await self.line.bring(replica))
            else:
                assert self._sent.folder is not None
                await self._update(replica, await asyncio.to_thread(read_weights, self._sent.folder))
            replica.holds, replica.behind = self.version, None

    async def _save(self, version: int, state: Mapping[str, torch.Tensor]) -> Path:
        """Write weights; gives their folder."""
        folder = self._shelf.folder(f"{self._name}-{version}", num_bytes(state))
        await asyncio.to_thread(save_weights, folder, state)
        return folder

    def _announce(self, version: int, folder: Path | None) -> None:
        """These are the weights that replicas are to have."""
        every = {*self._old, self._sent.folder} - {folder, None}
        self._old = [one for one in every if one is not None]
        self._sent = _Sent(version, folder, self._sent.and_then(version))
        self.version = version

    async def _remove_old(self) -> None:
        """Remove folders that nobody reads any more, once no replica is looked at.

        Those of a transfer that failed go with the next one that does not.
        """
        while self._old:
            for replica in tuple(self._replicas):
                async with replica.lock:
                    pass
            await asyncio.to_thread(shutil.rmtree, self._old.pop(), ignore_errors=True)

    async def _broadcast(self, version: int, state: Mapping[str, torch.Tensor]) -> None:
        """Send the weights over a line; no file is left to send them from again."""
        assert self.line is not None
        self.know(version)  # the first to have them may sample before the last one has
        await self.line.send(version, state)
        self._announce(version, None)
        for replica in tuple(self._replicas):
            await self._prove(replica, state)
            replica.holds, replica.behind = version, None

    async def send_adapter(
        self, name: str, version: int, state: Mapping[str, torch.Tensor], scaling: float
    ) -> None:
        """Have every replica take an adapter. Raises as `ServerEngine.load_adapter`."""
        await self.adapters.send(name, version, state, scaling)
        if name != DEFAULT:
            return
        for replica in self._replicas:
            replica.holds = version if replica.holds == self.version else None
        self.version = version

    def follow(self, version: int | None, adapter: RemoteAdapter | None) -> None:
        """Know that another client sends `version` (None: nothing yet), as `adapter` where it sends these.

        What was said here before stays known, for `KNOWN_LABELS` versions: a request may still run under it.
        """
        self._follows = True
        self.adapters.follow(adapter)
        if version is None:
            return
        labels = self._sent.labels if adapter is not None else self._sent.and_then(version)
        self._sent = _Sent(version, None, labels)
        self.version = version

    def know(self, version: int) -> None:
        """Know of weights that are sent beside those that were sent last, by another client too."""
        self._sent = replace(self._sent, labels=self._sent.and_then(version))

    async def bring(self, replica: Replica) -> None:
        """Have a replica that is not in the list yet take what was sent last, and prove it."""
        if self.line is not None:
            last = await self.line.bring(replica)
            if last:
                await self._prove(replica, last)
                replica.holds = self.version
        await self.ready(replica, first_turn=True)

    async def ready(self, replica: Replica, *, first_turn: bool, stays: int | None = None) -> None:
        """Make sure that a replica holds the weights that it is to have, as far as it tells.

        One that reports versions with its tokens is asked only when in doubt, others once an episode. Raises
        EngineError where it has other ones than the version at which an episode `stays`.
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
            raise EngineError(f"{replica.url} has lost the weights {stays}, at which an episode was to stay.")

    async def _make_ready(self, replica: Replica, first_turn: bool) -> None:
        """Send the weights that were sent last again where they are gone."""
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
                log.warning("%s lacks the weights of version %s; sending %d", replica.url, label, version)
                await self._update(replica, await asyncio.to_thread(read_weights, folder))
            await self.adapters.restore(replica)
            replica.holds = self._due(replica)

    def _due(self, replica: Replica) -> int:
        """The version that a replica is to have."""
        return self.version if replica.behind is None else replica.behind

    def before(self, adapter: RemoteAdapter | None, stays: int | None = None) -> int:
        """The version that a request begins under."""
        if adapter is not None:
            return adapter.version
        return self._sent.version if stays is None else stays

    def knows(self, sampled: SampledTokens, adapter: RemoteAdapter | None, stays: int | None = None) -> bool:
        """Whether all tokens are of versions that were sent; true where the server does not tell.

        Those of an episode that `stays` at a version are to be of that alone.
        """
        labels = self._sent.labels if adapter is None else (str(adapter.version),)
        if stays is not None:
            labels = (str(stays),)
        return not labels or all(span.version in labels for span in sampled.spans or ())

    async def close(self) -> None:
        """Have the servers forget adapters, and remove what is temporary."""
        await self.adapters.close()
        if not self._shelf.root:
            self._sent.folder = None
        self._shelf.close()
        if self.line is not None:
            self.line.close()

    async def _check_label(self, replica: Replica, stays: int | None) -> None:
        """Raise EngineError where a replica holds other weights than were sent by the client that sends."""
        labels = self._sent.labels if stays is None else {str(stays)}
        if labels:
            label = await self._dialect.version(replica)
            if label not in labels:
                raise EngineError(f"{replica.url} holds the weights {label}, which were not sent to it.")
        replica.holds = self.version

    async def _check_broadcast(self, replica: Replica) -> None:
        """Raise EngineError where a replica, after it was out of reach, has not what was broadcast last."""
        due = self._due(replica)
        if self.line is None or not self._sent.labels or replica.holds == due:
            return
        if await self._dialect.version(replica) != str(due):
            raise EngineError(
                f"{replica.url} has lost the weights of version {due}, which were broadcast.",
                "Resume the run: it sends them anew. Weights in a folder are sent again by themselves.",
            )
        replica.holds = due

    async def _update(self, replica: Replica, state: Mapping[str, torch.Tensor]) -> None:
        """Have one replica take the weights in the folder, and hold its digests against `state`."""
        await self._dialect.update(replica, str(self._sent.folder), self._sent.version)
        await self._prove(replica, state)
        replica.holds, replica.behind = self.version, None

    async def _prove(self, replica: Replica, state: Mapping[str, torch.Tensor]) -> None:
        """Hold the digests of a replica's tensors against `state`."""
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
        log.info("%s: %d tensors proved, %d say nothing", replica.url, proof.proved, proof.silent)

    def _say_unproved(self, replica: Replica) -> None:
        """Say once of each server that nothing but the probe shows which weights it holds."""
        if replica.url not in self._unproved:
            self._unproved.add(replica.url)
            log.warning("%s gives no digest of its weights: the probe alone proves them", replica.url)
