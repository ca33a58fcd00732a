"""The engine protocol: the interface between rollouts and sampling backends."""

from __future__ import annotations

import hashlib
import operator
import re
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, field, replace
from typing import TYPE_CHECKING, Protocol, TypeVar, runtime_checkable

from ludus.errors import RequestRejected
from ludus.types import PARAM_BOUNDS, Completion, SamplingParams, role_of_agent

if TYPE_CHECKING:
    import torch

Key = TypeVar("Key", bound=Hashable)

BASE = ""
"""Adapter name for the base model without an adapter."""
DEFAULT = "default"
"""Name of the model's own adapter, which `load_weights` replaces."""
ROLE_ADAPTER = "role_"
"""Beginning of the name of a role's own adapter (`model.lora.roles`)."""


def adapter_of_agent(agent: str, roles: Collection[str]) -> str:
    """Return the adapter of an agent whose role, without its kind (`solver:code`), is in `roles`, otherwise ""."""
    role = role_of_agent(agent).partition(":")[0]
    return f"{ROLE_ADAPTER}{role}" if role in roles else ""


TOKEN_WATCHERS: dict[str, Callable[[Sequence[int]], None]] = {}
"""Callables for new tokens by episode, which an engine of this process may call while it samples an action."""


@dataclass(frozen=True, slots=True)
class Request:
    """One action to sample.

    `token_ids` is the whole history; the engine looks up its cached prefix. `episode` identifies the
    episode's cache until `release`. After `timeout_s` the completion ends with `finish_reason` "abort" and
    the tokens so far. `adapter` names a loaded adapter; None is the engine's default, `BASE` the model
    without one. The last `begun` tokens of `token_ids` are the beginning of the action, sampled by an earlier
    request; `params.max_new_tokens` does not count them.
    """

    episode: str
    token_ids: tuple[int, ...]
    params: SamplingParams
    timeout_s: float | None = None
    adapter: str | None = None
    begun: int = 0


def copies(request: Request, n: int) -> list[Request]:
    """Return `n` copies of a request: the first unchanged, the others with distinct seeds and episodes."""
    seeds = [replace(request.params, seed=seed_for(request.params.seed, i)) for i in range(1, n)]
    others = [replace(request, episode=f"{request.episode}/{i}", params=params) for i, params in enumerate(seeds, 1)]
    return [request, *others]


def check_params(params: SamplingParams) -> None:
    """Raise RequestRejected if a parameter is outside `PARAM_BOUNDS`."""
    for name, value in params.numbers.items():
        bound = PARAM_BOUNDS[name]
        if not bound.contains(value):
            raise RequestRejected(f"{name} is {value:.10g}; {bound.words}.")


def check_fits(request: Request, limit: int) -> None:
    """Raise RequestRejected if a prompt is empty or does not fit the context, or a parameter is out of range."""
    length = len(request.token_ids)
    if not 0 < length < limit:
        raise RequestRejected(
            f"Episode {request.episode} has a prompt of {length} tokens, but the engine accepts 1 to {limit - 1} "
            f"(its context is {limit}).",
            "Shorten the history or increase the engine's context.",
        )
    check_params(request.params)


def first_line(error: object) -> str:
    """Return an error's first line without error number and trailing punctuation, or else its type."""
    lines = re.sub(r"\[Errno -?\d+\] ", "", str(error)).strip().splitlines()
    return lines[0].rstrip(" .:;") if lines else type(error).__name__


def seed_for(*parts: object) -> int:
    """Return a 63-bit seed, a hash of the parts."""
    text = "/".join(map(str, parts))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counters of an engine, in tokens and wall-clock seconds.

    Context tokens are either computed (`prefill_tokens`) or read from the cache (`cached_tokens`);
    `decode_tokens` were sampled, `draft_hits` of them from the logits of `draft_tokens` (speculative decoding).
    `model_s` is the time in forward passes, `sample_s` in sampling, `schedule_s` the rest of the steps.
    `batch_tokens` sums the tokens of all passes, `recomputed_tokens` those recomputed after a weight update;
    `queue_steps` and `running_steps` sum the waiting and running requests over the steps. For a server that does
    not report steps, a step is one poll of its queue, `wall_s` is the time between polls, and the other times are 0.
    """

    steps: int = 0
    prefill_tokens: int = 0
    cached_tokens: int = 0
    decode_tokens: int = 0
    recomputed_tokens: int = 0
    batch_tokens: int = 0
    draft_tokens: int = 0
    draft_hits: int = 0
    evicted_pages: int = 0
    model_s: float = 0.0
    sample_s: float = 0.0
    schedule_s: float = 0.0
    queue_steps: int = 0
    running_steps: int = 0
    wall_s: float = 0.0

    @property
    def hit_rate(self) -> float:
        """Fraction of context tokens read from the cache."""
        num_context = self.cached_tokens + self.prefill_tokens
        return self.cached_tokens / num_context if num_context else 0.0

    def __sub__(self, earlier: EngineStats) -> EngineStats:
        return EngineStats(*map(operator.sub, astuple(self), astuple(earlier)))

    def __add__(self, other: EngineStats) -> EngineStats:
        return EngineStats(*map(operator.add, astuple(self), astuple(other)))

    def metrics(self) -> dict[str, float]:
        """Return rates per second of engine time (of wall-clock time for a server, which omits time metrics), means
        over steps, and fractions; {} without a step."""
        if not self.steps:
            return {}
        busy_s = self.model_s + self.sample_s + self.schedule_s
        metrics = {
            "engine/decode_tokens_per_s": self.decode_tokens / (busy_s or self.wall_s),
            "engine/prefill_tokens_per_s": self.prefill_tokens / (busy_s or self.wall_s),
            "engine/requests_running": self.running_steps / self.steps,
            "engine/requests_waiting": self.queue_steps / self.steps,
            "engine/cache_hit_rate": self.hit_rate,
            "engine/evicted_pages": float(self.evicted_pages),
        }
        if self.draft_tokens:
            metrics["engine/draft_acceptance"] = self.draft_hits / self.draft_tokens
        if busy_s:
            metrics |= {"engine/busy_s": busy_s, "engine/schedule_share": self.schedule_s / busy_s}
        return metrics

    def line(self) -> str:
        """Return the metrics as one line for a progress bar, or "" without a step."""
        metrics = self.metrics()
        if not metrics:
            return ""
        evicted = f", {self.evicted_pages:,} pages evicted" if self.evicted_pages else ""
        return (
            f"{metrics['engine/decode_tokens_per_s']:,.0f} decode and "
            f"{metrics['engine/prefill_tokens_per_s']:,.0f} prefill tokens/s  "
            f"{metrics['engine/requests_running']:.0f} running, "
            f"{metrics['engine/requests_waiting']:.0f} waiting  "
            f"cache {self.hit_rate:.0%}{evicted}"
        )


def combined(now: Mapping[Key, EngineStats], before: Mapping[Key, EngineStats]) -> EngineStats:
    """Return the engines' counters since `before`: tokens and steps summed, seconds averaged."""
    total = sum((stats - before.get(number, EngineStats()) for number, stats in now.items()), EngineStats())
    times = {name: value / max(1, len(now)) for name, value in asdict(total).items() if name.endswith("_s")}
    return replace(total, **times)


@runtime_checkable
class RemoteStats(Protocol):
    """A remote engine; `stats` returns the counters of the last `measure`."""

    async def measure(self) -> None:
        """Fetch the counters."""


async def drain_stats(engine: Engine) -> EngineStats:
    """Fetch an engine's counters since the last call and reset them."""
    if isinstance(engine, RemoteStats):
        await engine.measure()
    return engine.stats(reset=True)


@runtime_checkable
class Sleepable(Protocol):
    """An engine that shares its device with a learner and can free its cache memory."""

    async def sleep(self) -> None:
        """Clear the cache and free its memory until the next request."""


@runtime_checkable
class Throttleable(Protocol):
    """An engine in the learner's process that can yield cores and memory to it."""

    def throttle(self, factor: float) -> None:
        """Sleep after each pass for `factor` times its duration: fewer passes with larger batches."""


@runtime_checkable
class ContinuesActions(Protocol):
    """An engine that supports `Request.begun`, with the same random numbers, stop strings and guide."""

    @property
    def continues_actions(self) -> bool:
        """Whether resuming is supported."""


@runtime_checkable
class HasRoleAdapters(Protocol):
    """An engine whose model may have an adapter for each of several roles."""

    @property
    def roles(self) -> Collection[str]:
        """The roles with their own adapter."""


@dataclass(frozen=True, slots=True)
class WeightCheck:
    """Verification of the weights of `version` within `deadline_s`: `check` receives the engine's weight digest, if
    supported, and its log-probabilities of `probe`, and raises SyncError on a mismatch."""

    version: int
    probe: tuple[int, ...]
    check: Callable[[str | None, Sequence[float]], None]
    deadline_s: float


class RollingUpdate(Protocol):
    """A set of engines updated one at a time."""

    async def push_weights(self, check: WeightCheck, state: Mapping[str, torch.Tensor]) -> None:
        """Store weights for each engine to load and verify once its episodes have ended; copies the tensors."""

    async def wait_for_version(self, beyond: int) -> int:
        """Wait until episodes start on versions above `beyond`; return the minimum. Raises a transfer's error."""

    async def wait_until_current(self) -> None:
        """Wait until new episodes use the newest version. Raises as `wait_for_version`."""


@runtime_checkable
class SupportsRollingUpdate(Protocol):
    """A set of engines that may each serve a different version."""

    @property
    def can_roll(self) -> bool:
        """Whether there are several engines that all support rolling updates."""

    async def roll(self, max_lag: int) -> RollingUpdate:
        """Pin each episode to an engine and version and update engines one at a time; for `max_lag` see `Placement`."""


class Engine(Protocol):
    """Sampler of a language model. Raises EngineError."""

    @property
    def context_tokens(self) -> int:
        """Maximum number of tokens of prompt plus completion."""

    @property
    def version(self) -> int:
        """Version of the current weights: that of the last `load_weights`, 0 before."""

    @property
    def batch_invariant(self) -> bool:
        """Whether a request's tokens and log-probabilities are bit-identical in any batch."""

    async def generate(self, request: Request) -> Completion:
        """Sample one action."""

    async def generate_batch(self, requests: Sequence[Request]) -> list[Completion]:
        """Sample one action per request, as one batch in the given order."""

    def release(self, episode: str) -> None:
        """Free the cache of an episode that has ended."""

    async def load_weights(self, version: int, state: Mapping[str, torch.Tensor]) -> None:
        """Load new weights; all later tokens carry `version`."""

    async def fingerprint(self) -> str | None:
        """Return `fingerprint_module` of the current weights, or None if unsupported."""

    async def score(self, token_ids: Sequence[int], *, adapter: str | None = None) -> list[float]:
        """Return the log-probability of each token given the previous ones, at temperature 1; 0 for the first."""

    def stats(self, *, reset: bool = False) -> EngineStats:
        """Return the counters since the start or the last reset."""

    async def close(self) -> None:
        """Free all resources. The engine cannot be used afterwards."""


@dataclass
class AdapterVersions:
    """Map each episode to its adapter's name in the engine. Unless `keeps` is set, all use `current`."""

    current: str
    keeps: bool = False
    _episodes: dict[str, str] = field(default_factory=dict, init=False)

    def of(self, episode: str) -> str:
        """Return the adapter that an episode samples with."""
        if not self.keeps or not episode:
            return self.current
        return self._episodes.setdefault(episode, self.current)

    def renew(self, name: str) -> str | None:
        """Use adapter `name` for new episodes. Return the previous adapter if no episode needs it, else None."""
        old, self.current = self.current, name
        return self._if_unused(old)

    def release(self, episode: str) -> str | None:
        """End an episode. Return its adapter if that is outdated and unused, else None."""
        outdated = self._episodes.pop(episode, None)
        return None if outdated is None else self._if_unused(outdated)

    def _if_unused(self, name: str) -> str | None:
        """Return `name` if it can be unloaded, else None. The model's own adapter stays: it holds the LoRA scale."""
        needed = name in (self.current, DEFAULT) or name in self._episodes.values()
        return None if needed else name


def common_prefix(left: Sequence[object], right: Sequence[object]) -> int:
    """Return the length of the common prefix of two sequences."""
    length = min(len(left), len(right))
    if left[:length] == right[:length]:
        return length
    return next((i for i in range(length) if left[i] != right[i]), length)
