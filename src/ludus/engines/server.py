"""An engine behind HTTP: vLLM, SGLang or `ludus serve`, one replica or several.

Takes requests as token ids; gives token ids with log-probabilities and versions. Sends all requests of an
episode to one replica, whose cache then holds its history. Waits on each call for as long as the settings
say (`ServerSettings`) and then raises `EngineError` with the server's own words. Never trains on what the
wrong weights sampled: a replica that has been out of reach, or that answers under a version that was not
sent, gets the weights again, with their proof, before it samples more.

Weights go through a folder that the server sees, or over a line between processes (`Broadcaster`). After each
transfer the server's digests of its tensors, where it gives any, are held against what was sent; the caller
compares log-probabilities (`WeightSync`). LoRA adapters go alone, beside the server's own weights
(`SentAdapters`).
"""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
import shutil
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from ludus.engines.base import BASE, DEFAULT, EngineStats, Request, check_num_top
from ludus.engines.calls import Call, Calls
from ludus.engines.checksums import compare_digests
from ludus.engines.dialects import (
    Dialect,
    LogprobMode,
    Sampled,
    ServedAdapter,
    ServerFacts,
    SglangDialect,
    VllmDialect,
)
from ludus.engines.sending import Broadcaster, broadcaster_of
from ludus.engines.server_adapters import SentAdapters
from ludus.engines.shelf import WeightShelf, num_bytes, read_weights, save_weights
from ludus.engines.transport import Refused, Replica, ServerSettings
from ludus.errors import EngineError, SyncError, UserError
from ludus.types import Completion, SamplingParams

if TYPE_CHECKING:
    import torch

DIALECTS: Mapping[str, Dialect] = {"vllm": VllmDialect(), "sglang": SglangDialect()}

_MODE_PROBE = SamplingParams(temperature=2.0, max_new_tokens=16, seed=1)
_SAME_NATS = 1e-3
_EMBEDDINGS, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_UNKNOWN_NAME = (400, 404)

Answer = TypeVar("Answer")

log = logging.getLogger("ludus.server")


@dataclass
class _Sent:
    """The whole weights that were sent last, and where they lie."""

    version: int = 0
    folder: Path | None = None
    labels: set[str] = field(default_factory=set)


class ServerEngine:
    """An `Engine` whose tokens come from servers.

    `urls` are the replicas' addresses. Asks each for its model at once, and raises `EngineError` where one
    does not answer, `UserError` for an address that is none or replicas that serve different things. With a
    `lora_scaling` (alpha over rank) `load_weights` takes the factors of an adapter, and sends that alone.
    """

    def __init__(
        self,
        urls: Sequence[str],
        dialect: str = "vllm",
        settings: ServerSettings | None = None,
        *,
        lora_scaling: float | None = None,
    ) -> None:
        settings = settings or ServerSettings()
        self._dialect = DIALECTS[dialect]
        self._replicas = [
            Replica(url.strip().rstrip("/"), settings, restore=self._restore) for url in urls if url.strip()
        ]
        self._facts = _agreed([self._dialect.describe(replica.url) for replica in self._replicas])
        self._lora_scaling = lora_scaling
        self._version = 0
        self._sent = _Sent()
        self._routes: dict[str, Replica] = {}
        self._name = secrets.token_hex(6)
        self._calls = Calls(self._dialect, self._name)
        self._shelf = WeightShelf(settings.weights_folder)
        self._adapters = SentAdapters(self._dialect, self._replicas, self._shelf, self._name)
        self._broadcaster = broadcaster_of(self._replicas, settings)
        self._mode: LogprobMode | None = self._facts.logprobs

    @property
    def context_tokens(self) -> int:
        """The server's."""
        return self._facts.context_tokens

    @property
    def version(self) -> int:
        """That of the weights that were sent last; 0 before that."""
        return self._version

    @property
    def batch_invariant(self) -> bool:
        """What the server says of itself; vLLM and SGLang say nothing."""
        return self._facts.batch_invariant

    async def generate(self, request: Request) -> Completion:
        """Sample one action on the episode's replica."""
        _check_fits(request, self.context_tokens)
        replica = self._route(request.episode)
        with self._calls.under_way(replica, request) as call:
            await self._check_logprobs(replica, request.params)
            with self._adapters.using(request.adapter) as adapter:
                return await self._generate(call, request, adapter)

    async def generate_batch(self, requests: Sequence[Request]) -> list[Completion]:
        """Sample one action for each request, all at once."""
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self.generate(request)) for request in requests]
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from errors.exceptions[0].__cause__
        return [task.result() for task in tasks]

    def abort(self, episode: str) -> None:
        """End the episode's requests with what they have, `finish_reason` "abort"."""
        self._calls.abort(episode)

    async def pause(self) -> None:
        """Have all replicas compute nothing more until `resume`; requests wait where they are."""
        await asyncio.gather(*(self._dialect.pause(replica) for replica in self._replicas))

    async def resume(self) -> None:
        """Go on."""
        await asyncio.gather(*(self._dialect.resume(replica) for replica in self._replicas))

    def release(self, episode: str) -> None:
        """Forget the episode's replica; what it cached goes when it needs the room."""
        self._routes.pop(episode, None)

    async def load_weights(self, version: int, state: Mapping[str, torch.Tensor]) -> None:
        """Write the weights, or the adapter alone, and have every replica take them.

        Raises `SyncError` where a replica's digests are not those of what was sent, `EngineError` where one
        cannot be reached or refuses, `StorageError` where the folder cannot be written.
        """
        if self._lora_scaling is not None:
            await self.load_adapter(DEFAULT, version, state, self._lora_scaling)
            return
        if self._broadcaster is not None:
            await self._broadcast(self._broadcaster, version, state)
            return
        state = _with_head(state)
        folder = self._shelf.folder(f"{self._name}-{version}", num_bytes(state))
        await asyncio.to_thread(save_weights, folder, state)
        before = self._sent.folder
        self._sent = _Sent(version, folder, self._sent.labels | {str(version)})
        self._version = version
        await asyncio.gather(*(self._update_locked(replica, state) for replica in self._replicas))
        if before is not None and before != folder:
            await asyncio.to_thread(shutil.rmtree, before, ignore_errors=True)

    async def _broadcast(self, line: Broadcaster, version: int, state: Mapping[str, torch.Tensor]) -> None:
        """Send the weights over a line; no file is left to send them from again."""
        await line.send(version, state)
        self._sent = _Sent(version, None, self._sent.labels | {str(version)})
        self._version = version
        for replica in self._replicas:
            await self._prove(replica, state)
            replica.holds = version

    async def load_adapter(
        self, name: str, version: int, state: Mapping[str, torch.Tensor], scaling: float
    ) -> None:
        """Send LoRA factors by PEFT's names as the adapter `name`, beside others; tokens carry its `version`.

        `scaling` is alpha over rank. What runs under an older version of it goes on with that to its end.
        Raises as `load_weights` does, with the older version left in use.
        """
        await self._adapters.send(name, version, state, scaling)
        if name != DEFAULT:
            return
        for replica in self._replicas:
            replica.holds = version if replica.holds == self._version else None
        self._version = version

    async def unload_adapter(self, name: str) -> None:
        """Have the servers forget an adapter, once nothing runs under it."""
        self._adapters.unload(name)

    async def fingerprint(self) -> str | None:
        """`fingerprint_module` of the weights in use, with the adapter that requests have by default.

        None where a server does not tell. Raises `SyncError` where the replicas differ.
        """
        with self._adapters.using(None) as adapter:
            name = adapter.name if adapter else BASE
            found = {await self._dialect.fingerprint(replica, name) for replica in self._replicas}
        if len(found) > 1:
            raise SyncError(f"The replicas hold different weights: {sorted(map(str, found))}.")
        return found.pop()

    async def score(self, token_ids: Sequence[int], *, adapter: str | None = None) -> list[float]:
        """Log-probability of each token at temperature 1; 0 for the first. The replicas must agree."""
        if not 0 < len(token_ids) < self.context_tokens:
            raise EngineError(
                f"A sequence of {len(token_ids)} tokens cannot be scored: "
                f"the server takes 1 to {self.context_tokens - 1}."
            )
        with self._adapters.using(adapter) as served:
            rows = [
                await self._under(replica, served, partial(self._score, replica, token_ids))
                for replica in self._replicas
            ]
        for replica, row in zip(self._replicas, rows, strict=True):
            gap = max(abs(a - b) for a, b in zip(row, rows[0], strict=True))
            if gap > _SAME_NATS:
                raise EngineError(f"{replica.url} and {self._replicas[0].url} disagree by {gap:.3g} nats.")
        return rows[0]

    def stats(self, *, reset: bool = False) -> EngineStats:
        """Nothing: a server keeps its numbers to itself, at its `/metrics`."""
        return EngineStats()

    async def close(self) -> None:
        """Close the connections; the servers go on."""
        self._calls.close()
        await self._adapters.close()
        for replica in self._replicas:
            await replica.close()
        if not self._shelf.root:
            self._sent.folder = None
        self._shelf.close()
        if self._broadcaster is not None:
            self._broadcaster.close()

    async def _generate(self, call: Call, request: Request, adapter: ServedAdapter | None) -> Completion:
        """Sample from the weights that were sent; once more where the server had others."""
        replica = call.replica
        for _ in range(2):
            await self._ready(replica, first_turn=request.episode not in self._routes)
            if call.aborted:
                return Completion((), (), (), "abort")
            self._routes[request.episode] = replica
            before = self._sent.version if adapter is None else adapter.version
            sampled = await self._under(replica, adapter, partial(self._sample, call, request))
            if self._known(sampled, adapter):
                return _completion(sampled, before)
            replica.holds = None
            log.warning("%s sampled from weights that were not sent to it", replica.url)
        raise EngineError(
            f"{replica.url} samples from weights {_labels(sampled)}, and was sent {before}.",
            "Has it been restarted, or does someone else update it?",
        )

    async def _sample(self, call: Call, request: Request, adapter: str) -> Sampled:
        call.name = self._calls.new_name()
        return await self._dialect.generate(call.replica, self._facts, call.name, request, adapter)

    async def _score(self, replica: Replica, token_ids: Sequence[int], adapter: str) -> list[float]:
        return await self._dialect.score(replica, self._facts, token_ids, adapter)

    async def _under(
        self, replica: Replica, adapter: ServedAdapter | None, call: Callable[[str], Awaitable[Answer]]
    ) -> Answer:
        """Call with a served adapter's name; where the server has lost it, send it again and once more."""
        if adapter is None:
            return await call(BASE)
        try:
            return await call(adapter.name)
        except Refused as error:
            if error.status not in _UNKNOWN_NAME or adapter.name in await self._dialect.adapters(replica):
                raise
        replica.holds = None
        await self._ready(replica, first_turn=False)
        return await call(adapter.name)

    def _route(self, episode: str) -> Replica:
        """The episode's replica: the one that it had, else the least busy of those in reach."""
        known = self._routes.get(episode)
        if known is not None and not known.is_down:
            return known
        return min(self._replicas, key=lambda replica: (replica.is_down, replica.load))

    async def _ready(self, replica: Replica, *, first_turn: bool) -> None:
        """Make sure that a replica holds the weights that were sent last, as far as it tells.

        One that reports versions with its tokens is asked only when in doubt, others once an episode.
        """
        folder = self._sent.folder
        if folder is None and not self._adapters:
            await self._check_broadcast(replica)
            return
        in_doubt, tells = replica.holds != self._version, self._facts.logprobs == "exact" or folder is None
        if not in_doubt and (tells or not first_turn):
            return
        async with replica.lock:
            if replica.holds == self._version and in_doubt:
                return
            version = self._sent.version
            if folder is not None and await self._dialect.version(replica) != str(version):
                log.warning("%s has lost the weights of version %d; sending them again", replica.url, version)
                await self._update(replica, await asyncio.to_thread(read_weights, folder))
            await self._adapters.restore(replica)
            replica.holds = self._version

    async def _check_broadcast(self, replica: Replica) -> None:
        """Raise EngineError where a replica, after it was out of reach, has not what was broadcast last."""
        if self._broadcaster is None or not self._sent.labels or replica.holds == self._version:
            return
        if await self._dialect.version(replica) != str(self._sent.version):
            raise EngineError(
                f"{replica.url} has lost the weights of version {self._sent.version}, which were broadcast.",
                "Resume the run: it sends them anew. Weights in a folder are sent again by themselves.",
            )
        replica.holds = self._version

    async def _restore(self, replica: Replica) -> None:
        await self._ready(replica, first_turn=False)

    async def _update_locked(self, replica: Replica, state: Mapping[str, torch.Tensor]) -> None:
        async with replica.lock:
            await self._update(replica, state)

    async def _update(self, replica: Replica, state: Mapping[str, torch.Tensor]) -> None:
        """Have one replica take the weights in the folder, and hold its digests against `state`."""
        version = self._sent.version
        await self._dialect.update(replica, str(self._sent.folder), version)
        await self._prove(replica, state)
        replica.holds = self._version

    async def _prove(self, replica: Replica, state: Mapping[str, torch.Tensor]) -> None:
        """Hold the digests of a replica's tensors against `state`."""
        version, digests = self._sent.version, await self._dialect.digests(replica)
        if digests is not None:
            proof = await asyncio.to_thread(compare_digests, digests, state)
            if proof.wrong:
                raise SyncError(
                    f"{replica.url} does not hold the weights of version {version} that it was sent: "
                    f"{len(proof.wrong)} tensors differ, {', '.join(proof.wrong[:3])} among them.",
                    "The rollouts would come from another policy; nothing was trained on them.",
                )
            log.info("%s: %d tensors proved, %d say nothing", replica.url, proof.proved, proof.silent)

    def _known(self, sampled: Sampled, adapter: ServedAdapter | None) -> bool:
        """Whether all tokens are of versions that were sent; true where the server does not tell."""
        labels = self._sent.labels if adapter is None else {str(adapter.version)}
        return not labels or all(span.version in labels for span in sampled.spans or ())

    async def _check_logprobs(self, replica: Replica, params: SamplingParams) -> None:
        """Refuse sampling whose log-probabilities the server would report of another distribution."""
        plain = params.temperature == 1 and not params.cuts
        if params.temperature == 0 or self._mode == "exact" or plain:
            return
        if self._mode is None:
            name = self._calls.new_name()
            self._mode = await _find_mode(self._dialect, replica, self._facts, name)
        _check_mode(replica.url, self._mode, params)


async def _find_mode(dialect: Dialect, replica: Replica, facts: ServerFacts, name: str) -> LogprobMode:
    """Sample hot: raw log-probabilities are then those of scoring, processed ones are not."""
    request = Request("", (0,), _MODE_PROBE)
    sampled = await dialect.generate(replica, facts, name, request, BASE)
    scores = await dialect.score(replica, facts, request.token_ids + sampled.tokens, BASE)
    gaps = [abs(a - b) for a, b in zip(scores[1:], sampled.logprobs, strict=True)]
    return "raw" if max(gaps, default=math.inf) < _SAME_NATS else "processed"


def _check_mode(url: str, mode: LogprobMode, params: SamplingParams) -> None:
    cut, tempered = params.cuts, params.temperature != 1
    if not ((tempered and mode == "raw") or (cut and mode == "processed")):
        return
    hint = "Sample at temperature 1, or cut nothing from the distribution."
    if cut != tempered:
        wanted = "without" if cut else "with"
        hint = f"Start vLLM {wanted} --logprobs-mode processed_logprobs, or {hint[0].lower()}{hint[1:]}"
    raise EngineError(
        f"{url} reports {mode} log-probabilities, which at temperature {params.temperature:g}, "
        f"top_p {params.top_p:g}, top_k {params.top_k} and min_p {params.min_p:g} are not those of the "
        "tempered distribution.",
        hint,
    )


def _check_fits(request: Request, limit: int) -> None:
    length = len(request.token_ids)
    if not 0 < length < limit:
        raise EngineError(
            f"Episode {request.episode} has a prompt of {length} tokens, but the server takes "
            f"1 to {limit - 1} (its context is {limit}).",
            "Shorten the history or give the server a larger context.",
        )
    if request.params.max_new_tokens < 1:
        raise EngineError(f"Episode {request.episode} asks for max_new_tokens below 1.")
    check_num_top(request.params.top_logprobs)


def _agreed(facts: Sequence[ServerFacts]) -> ServerFacts:
    if not facts:
        raise UserError("No address of an inference server is given.", "Set engine.url.")
    if len(set(facts)) > 1:
        raise UserError(
            f"The replicas serve different things: {'; '.join(map(str, facts))}.",
            "Start them with the same model, name and settings.",
        )
    return facts[0]


def _with_head(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The weights with the output head of a model that ties it to its embeddings, for a server that does not.

    A server that ties them as well passes over it.
    """
    tied = state.get(_EMBEDDINGS)
    return dict(state) if tied is None or _HEAD in state else {**state, _HEAD: tied}


def _completion(sampled: Sampled, before: int) -> Completion:
    """Where the server does not tell versions, that of the moment when the request was sent."""
    versions = [before] * len(sampled.tokens)
    for span in sampled.spans or ():
        version = int(span.version) if span.version.isdecimal() else before
        versions[span.start : span.end] = [version] * (span.end - span.start)
    return Completion(
        sampled.tokens,
        sampled.logprobs,
        tuple(versions),
        sampled.finish_reason,
        top_logprobs=sampled.top_logprobs,
    )


def _labels(sampled: Sampled) -> str:
    return ", ".join(span.version for span in sampled.spans or ())
