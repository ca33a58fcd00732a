"""An engine behind HTTP: one or more replicas of vLLM, SGLang or `ludus serve`.

All requests of an episode go to one replica, whose cache holds its history. Tokens sampled under wrong weights are
never used: after an outage, or with an unknown version, a replica receives the weights again and is verified first, by
digests of its tensors if it reports any; the caller compares log-probabilities (`WeightSync`).
"""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from ludus.engines.base import BASE, DEFAULT, EngineStats, Request, WeightCheck, check_fits
from ludus.engines.remote import api_adapters
from ludus.engines.remote.api_adapters import ApiAdapter, LogprobMode, RemoteAdapter, SampledTokens, ServerFacts
from ludus.engines.remote.http_client import HttpStatusError, RemoteEngineSettings, Replica
from ludus.engines.remote.metrics import ServerStats
from ludus.engines.remote.rolling_update import EpisodePin, Placement, RollingUpdates
from ludus.engines.remote.weight_publisher import WeightPublisher
from ludus.errors import EngineError, RequestRejected, SyncError, UserError
from ludus.images import IMAGE_IDS
from ludus.types import Completion, SamplingParams

if TYPE_CHECKING:
    import torch

_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.05, 1.0


@dataclass
class Router:
    """The replicas of one client (modified in place), removed ones, and the replica of each episode."""

    replicas: list[Replica]
    removed: list[Replica] = field(default_factory=list)
    _by_episode: dict[str, Replica] = field(default_factory=dict)
    pins: dict[str, EpisodePin] = field(default_factory=dict)

    def pin(self, episode: str, pin: EpisodePin) -> None:
        """Pin an episode to a replica and version until released or pinned again."""
        self.pins[episode] = pin
        self._by_episode.pop(episode, None)

    def of(self, episode: str) -> Replica:
        """Return the episode's replica: its previous or the least loaded one. Raises EngineError if there is none."""
        pin = self.pins.get(episode)
        if pin is not None:
            pinned = next((one for one in self.replicas if one.url == pin.url), None)
            if pinned is None:
                raise EngineError(f"{pin.url} was removed; its episodes are pinned to version {pin.version}.")
            return pinned
        previous = self._by_episode.get(episode)
        if previous is not None and not previous.is_down:
            return previous
        if not self.replicas:
            raise EngineError("No inference server is left: all were removed.")
        return min(self.replicas, key=lambda replica: (replica.is_down, replica.load))

    def is_new(self, episode: str) -> bool:
        return episode not in self._by_episode

    def assign(self, episode: str, replica: Replica) -> None:
        """Route the episode's next request to the same replica, unless it was removed."""
        if not replica.removed:
            self._by_episode[episode] = replica

    def release(self, episode: str) -> None:
        self._by_episode.pop(episode, None)
        self.pins.pop(episode, None)

    def remove(self, url: str) -> None:
        """Remove a replica: requests waiting to reconnect fail, and episodes move to others."""
        for replica in [one for one in self.replicas if one.url == url]:
            replica.remove()
            self.replicas.remove(replica)
            self.removed.append(replica)
            self._by_episode = {e: r for e, r in self._by_episode.items() if r is not replica}


@dataclass(eq=False)
class InflightRequest:
    """A running request of an episode. `name` is its id at the server, "" before sending."""

    api: ApiAdapter
    replica: Replica
    episode: str
    name: str = ""
    _aborting: asyncio.Task[None] | None = None

    @property
    def aborted(self) -> bool:
        return self._aborting is not None

    def abort(self) -> None:
        """End the request with the tokens so far."""
        if self._aborting is None:
            self._aborting = asyncio.get_running_loop().create_task(self._send_aborts())

    def end(self) -> None:
        if self._aborting is not None:
            self._aborting.cancel()

    async def _send_aborts(self) -> None:
        """Repeat the abort with growing delays: a server ignores it for a request that it has not received yet."""
        wait_s = _FIRST_WAIT_S
        while True:
            if self.name:
                try:
                    await self.api.abort(self.replica, self.name)
                except EngineError as error:
                    log.warning("failed to abort a request: %s", error.message)
                    return
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, _LONGEST_WAIT_S)


APIS: Mapping[str, type[ApiAdapter]] = {"vllm": api_adapters.VllmApi, "sglang": api_adapters.SglangApi}

_MODE_PROBE = SamplingParams(temperature=2.0, max_new_tokens=16, seed=1)
_SAME_NATS = 1e-3
_UNKNOWN_NAME = (400, 404)

Answer = TypeVar("Answer")

log = logging.getLogger(__name__)


class ServerEngine:
    """An `Engine` that samples from inference servers at `urls`, one per replica.

    With a `lora_scaling` (alpha over rank), `load_weights` sends only an adapter's factors. Raises `EngineError` if a
    server does not respond, `UserError` for an invalid address or replicas that serve different models.
    """

    def __init__(
        self,
        urls: Sequence[str],
        api: str = "vllm",
        settings: RemoteEngineSettings | None = None,
        *,
        lora_scaling: float | None = None,
    ) -> None:
        settings = settings or RemoteEngineSettings()
        self._api, self._settings = APIS[api](), settings
        self._replicas = [self._replica(url.strip().rstrip("/")) for url in urls if url.strip()]
        facts = _check_same_model([self._api.describe(replica.url) for replica in self._replicas])
        self._api.facts = facts
        self._lora_scaling = lora_scaling
        self._router = Router(self._replicas)
        self._name = secrets.token_hex(6)
        self._inflight: set[InflightRequest] = set()
        self._num_names = 0
        self._weights = WeightPublisher(
            self._api, self._replicas, settings, self._name, reports_versions=facts.logprobs == "exact"
        )
        self._mode: LogprobMode | None = facts.logprobs
        self._stats = ServerStats(lambda: self.urls)
        self._rolling: RollingUpdates | None = None

    @property
    def context_tokens(self) -> int:
        return self._api.facts.context_tokens

    @property
    def version(self) -> int:
        return self._weights.version

    @property
    def batch_invariant(self) -> bool:
        """Whether the server reports batch invariance; vLLM and SGLang do not."""
        return self._api.facts.batch_invariant

    async def generate(self, request: Request) -> Completion:
        check_fits(request, self.context_tokens)
        if max(request.token_ids) >= IMAGE_IDS:
            raise RequestRejected(
                "Servers sample from tokens, and images are not sent.",
                "Unset engine.url: the embedded engine shows them.",
            )
        if self._rolling is not None:  # pin a new episode, or move it to another replica between two turns
            episode = request.episode
            if self._router.pins.get(episode) is None:
                self._router.pin(episode, await self._rolling.place(episode))
            elif self._settings.moves_episodes and (pin := self._rolling.move(episode)) is not None:
                self._router.pin(episode, pin)
        replica = self._router.of(request.episode)
        with self._tracked(replica, request) as call:
            await self._check_logprobs(replica, request.params)
            with self._weights.adapters.using(request.adapter, request.episode) as adapter:
                return await self._generate(call, request, adapter)

    async def generate_batch(self, requests: Sequence[Request]) -> list[Completion]:
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self.generate(request)) for request in requests]
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from errors.exceptions[0].__cause__
        return [task.result() for task in tasks]

    def abort(self, episode: str) -> None:
        """Abort the episode's requests; they return the tokens so far."""
        for call in self._inflight:
            if call.episode == episode:
                call.abort()

    async def pause(self) -> None:
        """Pause computation on all replicas until `resume`; requests stay queued."""
        await asyncio.gather(*(self._api.pause(replica) for replica in self._replicas))

    async def resume(self) -> None:
        await asyncio.gather(*(self._api.resume(replica) for replica in self._replicas))

    def release(self, episode: str) -> None:
        """Remove the episode's routing; the server evicts its cache when needed."""
        self._router.release(episode)
        self._weights.adapters.release(episode)
        if self._rolling is not None:
            self._rolling.release(episode)

    async def load_weights(self, version: int, state: Mapping[str, torch.Tensor]) -> None:
        """Send the weights, or the adapter, to every replica. Raises SyncError, EngineError, StorageError."""
        if self._lora_scaling is not None:
            await self.load_adapter(DEFAULT, version, state, self._lora_scaling)
            return
        if self._rolling is None:
            await self._weights.send(version, state)
            return
        async with self._rolling.pause_transfers():
            await self._weights.send(version, state)
            self._rolling.placement.latest = version

    @property
    def can_roll(self) -> bool:
        return len(self._replicas) > 1 and self._lora_scaling is None

    async def roll(self, max_lag: int, is_alive: Callable[[str], Awaitable[bool]] | None = None) -> RollingUpdates:
        """Start rolling updates: pin each episode to a replica and a version; see `Placement` for `max_lag`."""

        async def push(replica: Replica, check: WeightCheck) -> None:
            await self._weights.push_staged(replica)
            theirs = await self._api.fingerprint(replica, BASE)
            check.check(theirs, await self._api.score(replica, check.probe, BASE))

        placement = Placement(self._replicas, self.version, max_lag)
        self._rolling = RollingUpdates(placement, self._weights.stage, push, is_alive)
        return self._rolling

    def pin(self, episode: str, pin: EpisodePin) -> None:
        """Pin an episode to the replica chosen by the client that sends the weights."""
        if pin.url not in self.urls:  # a replica that has just joined
            self._replicas.append(self._replica(pin.url))
        self._weights.add_version(pin.version)
        self._router.pin(episode, pin)

    async def load_adapter(self, name: str, version: int, state: Mapping[str, torch.Tensor], scaling: float) -> None:
        """Send LoRA factors, named as in PEFT, as `name`; `scaling` is alpha over rank. Raises as `load_weights`."""
        await self._weights.send_adapter(name, version, state, scaling)

    async def unload_adapter(self, name: str) -> None:
        """Unload an adapter from the servers once no request uses it."""
        self._weights.adapters.unload(name)

    async def join(self, url: str) -> None:
        """Add a replica, after sending and verifying the last weights. Raises EngineError, SyncError or UserError."""
        replica = self._replica(url)
        _check_same_model([self._api.facts, await asyncio.to_thread(self._api.describe, url)])
        await self._weights.sync_replica(replica)
        self._replicas.append(replica)
        self._start_due_updates()

    def leave(self, url: str) -> None:
        """Remove a replica; its episodes move to others."""
        self._router.remove(url)
        if self._weights.broadcaster is not None:
            self._weights.broadcaster.regroup()
        self._start_due_updates()

    def _start_due_updates(self) -> None:
        if self._rolling is not None:
            self._rolling.start_due_updates()

    def follow(self, urls: Sequence[str], version: int | None, adapter: RemoteAdapter | None) -> None:
        """Sample from these replicas under weights sent by another client, last `version`; reject all others."""
        for url in set(self.urls) - set(urls):
            self._router.remove(url)
        self._replicas += [self._replica(url) for url in urls if url not in self.urls]
        self._weights.follow(version, adapter)

    @property
    def urls(self) -> Sequence[str]:
        return [replica.url for replica in self._replicas]

    @property
    def adapter(self) -> RemoteAdapter | None:
        """The default adapter of requests, if one was sent."""
        return self._weights.adapters.default

    async def fingerprint(self) -> str | None:
        """Return `fingerprint_module` of the current weights, or None if unsupported. SyncError if replicas differ."""
        with self._weights.adapters.using(None) as adapter:
            name = adapter.name if adapter else BASE
            answers = await _call_all(self._replicas, lambda replica: self._api.fingerprint(replica, name))
        fingerprints = set(answers.values())
        if len(fingerprints) > 1:
            raise SyncError(f"The replicas hold different weights: {sorted(map(str, fingerprints))}.")
        return fingerprints.pop()

    async def score(self, token_ids: Sequence[int], *, adapter: str | None = None) -> list[float]:
        """Return the log-probability of each token at temperature 1, the same on all replicas; 0 for the first."""
        if not 0 < len(token_ids) < self.context_tokens:
            raise EngineError(
                f"A sequence of {len(token_ids)} tokens cannot be scored: "
                f"the server accepts 1 to {self.context_tokens - 1}."
            )
        with self._weights.adapters.using(adapter) as served:
            rows = await _call_all(
                self._replicas, lambda r: self._with_adapter(r, served, partial(self._api.score, r, token_ids))
            )
        first, expected = next(iter(rows.items()))
        for replica, row in rows.items():
            gap = max(abs(a - b) for a, b in zip(row, expected, strict=True))
            if gap > _SAME_NATS:
                raise EngineError(f"{replica.url} and {first.url} differ by {gap:.3g} nats in log-probability.")
        return expected

    async def measure(self) -> None:
        await self._stats.measure()

    def stats(self, *, reset: bool = False) -> EngineStats:
        """Return the sum over all servers as of the last reading; zeros before `measure`."""
        return self._stats.stats(reset=reset)

    async def close(self) -> None:
        await self._stats.close()
        for call in self._inflight:
            call.end()
        if self._rolling is not None:
            self._rolling.close()
        await self._weights.close()
        for replica in (*self._replicas, *self._router.removed):
            await replica.close()

    @contextmanager
    def _tracked(self, replica: Replica, request: Request) -> Iterator[InflightRequest]:
        """Register a request during the block; abort it after its `timeout_s`."""
        call = InflightRequest(self._api, replica, request.episode)
        self._inflight.add(call)
        timer: asyncio.TimerHandle | None = None
        if request.timeout_s is not None:
            timer = asyncio.get_running_loop().call_later(request.timeout_s, call.abort)
        try:
            yield call
        finally:
            if timer is not None:
                timer.cancel()
            self._inflight.discard(call)
            call.end()

    def _new_name(self) -> str:
        self._num_names += 1
        return f"{self._name}-{self._num_names}"

    async def _generate(self, call: InflightRequest, request: Request, adapter: RemoteAdapter | None) -> Completion:
        """Sample from the weights that were sent; retry once if the server had others."""
        replica, pin = call.replica, self._router.pins.get(request.episode)
        pinned = None if pin is None else pin.version

        async def sample(name: str) -> SampledTokens:
            call.name = self._new_name()
            return await self._api.generate(replica, call.name, request, name)

        for _ in range(2):
            first = self._router.is_new(request.episode)
            await self._weights.ensure_weights(replica, first_turn=first, pinned=pinned)
            if call.aborted:
                return Completion((), (), (), "abort")
            self._router.assign(request.episode, replica)
            before = self._weights.starting_version(adapter, pinned)
            sampled = await self._with_adapter(replica, adapter, sample)
            if self._weights.accepts(sampled, adapter, pinned):
                return _completion(sampled, before)
            replica.weight_version = None
            log.warning("%s sampled from unknown weights", replica.url)
        labels = ", ".join(span.version for span in sampled.spans or ())  # of the second attempt
        raise EngineError(
            f"{replica.url} samples from weights {labels}, but was sent {before}.",
            "Check whether it was restarted or another client updates it.",
        )

    async def _with_adapter(
        self, replica: Replica, adapter: RemoteAdapter | None, call: Callable[[str], Awaitable[Answer]]
    ) -> Answer:
        """Call with a loaded adapter's name; if the server lost the adapter, reload it and retry once."""
        if adapter is None:
            return await call(BASE)
        try:
            return await call(adapter.name)
        except HttpStatusError as error:
            if error.status not in _UNKNOWN_NAME or adapter.name in await self._api.adapters(replica):
                raise
        replica.weight_version = None
        await self._weights.ensure_weights(replica, first_turn=False)
        return await call(adapter.name)

    def _replica(self, url: str) -> Replica:
        return Replica(url, self._settings, lambda replica: self._weights.ensure_weights(replica, first_turn=False))

    async def _check_logprobs(self, replica: Replica, params: SamplingParams) -> None:
        """Reject parameters under which the server would report log-probabilities of another distribution."""
        plain = params.temperature == 1 and not params.cuts
        if self._mode == "exact" or plain:
            return
        if params.guide is not None:
            raise EngineError(
                f"{replica.url} reports log-probabilities of the guided distribution, not of the model's.",
                "Sample without a guide, or from `ludus serve`, which reports both.",
            )
        if params.temperature == 0:
            return
        if self._mode is None:  # at a high temperature, only raw log-probabilities match scoring
            probe = Request("", (0,), _MODE_PROBE)
            sampled = await self._api.generate(replica, self._new_name(), probe, BASE)
            scores = await self._api.score(replica, probe.token_ids + sampled.tokens, BASE)
            gaps = [abs(a - b) for a, b in zip(scores[1:], sampled.logprobs, strict=True)]
            self._mode = "raw" if max(gaps, default=math.inf) < _SAME_NATS else "processed"
        _check_mode(replica.url, self._mode, params)


async def _call_all(replicas: Sequence[Replica], call: Callable[[Replica], Awaitable[Answer]]) -> dict[Replica, Answer]:
    """Return each replica's result without replicas removed meanwhile. Raises EngineError if none is left."""
    found: dict[Replica, Answer] = {}
    for replica in tuple(replicas):
        try:
            found[replica] = await call(replica)
        except EngineError:
            if not replica.removed:
                raise
    remaining = {replica: answer for replica, answer in found.items() if not replica.removed}
    if not remaining:
        raise EngineError("No inference server is left: all were removed.")
    return remaining


def _check_mode(url: str, mode: LogprobMode, params: SamplingParams) -> None:
    cut, tempered = params.cuts, params.temperature != 1
    if not (tempered if mode == "raw" else cut):
        return
    hint = "Sample at temperature 1, or without top_k, top_p and min_p."
    if cut != tempered:
        wanted = "without" if cut else "with"
        hint = f"Start vLLM {wanted} --logprobs-mode processed_logprobs, or {hint[0].lower()}{hint[1:]}"
    raise EngineError(
        f"{url} reports {mode} log-probabilities, which at temperature {params.temperature:g}, "
        f"top_p {params.top_p:g}, top_k {params.top_k} and min_p {params.min_p:g} are not those of the "
        "tempered distribution.",
        hint,
    )


def _check_same_model(facts: Sequence[ServerFacts]) -> ServerFacts:
    if not facts:
        raise UserError("No inference server address is set.", "Set engine.url.")
    if len(set(facts)) > 1:
        raise UserError(
            f"The replicas serve different models: {'; '.join(map(str, facts))}.",
            "Start them with the same model, name and settings.",
        )
    return facts[0]


def _completion(sampled: SampledTokens, before: int) -> Completion:
    """Build the completion; without versions from the server, use the version at sending."""
    versions = [before] * len(sampled.tokens)
    for span in sampled.spans or ():
        version = int(span.version) if span.version.isdecimal() else before
        versions[span.start : span.end] = [version] * (span.end - span.start)
    return Completion(
        sampled.tokens, sampled.logprobs, tuple(versions), sampled.finish_reason, top_logprobs=sampled.top_logprobs
    )
