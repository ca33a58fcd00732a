"""The engine protocol: what a rollout needs of whatever samples tokens."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Protocol, TypeVar, runtime_checkable

from ludus.errors import RequestRefused
from ludus.types import PARAM_BOUNDS, Completion, SamplingParams

if TYPE_CHECKING:
    import torch

Key = TypeVar("Key", bound=Hashable)

BASE = ""
"""The adapter of a request that wants none."""
DEFAULT = "default"
"""The adapter that came with the model, or that `load_weights` sends."""


@dataclass(frozen=True, slots=True)
class Request:
    """One action to sample.

    `token_ids` is the whole history; the engine finds by itself what it has already computed. `episode`
    names the episode, so that its cache can be kept and later released. What is not done after `timeout_s`
    ends with what it has, `finish_reason` "abort". `adapter` names loaded adapters; None is what the engine
    uses by default, and `BASE` the model without any. The last `begun` tokens are the beginning of the
    action, from an earlier request: `params.max_new_tokens` counts those that follow.
    """

    episode: str
    token_ids: tuple[int, ...]
    params: SamplingParams
    timeout_s: float | None = None
    adapter: str | None = None
    begun: int = 0


def copies(request: Request, n: int) -> list[Request]:
    """`n` requests like this one: the first is it, the others have seeds and episodes of their own."""
    return [request] + [
        replace(
            request,
            episode=f"{request.episode}/{i}",
            params=replace(request.params, seed=seed_for(request.params.seed, i)),
        )
        for i in range(1, n)
    ]


def check_num_top(num: int) -> None:
    """Raise RequestRefused for a number of alternatives that no engine gives."""
    check_params(SamplingParams(top_logprobs=num))


def check_params(params: SamplingParams) -> None:
    """Raise RequestRefused for a number outside `PARAM_BOUNDS`."""
    for name, value in params.numbers.items():
        bound = PARAM_BOUNDS[name]
        if not bound.holds(value):
            raise RequestRefused(f"{name} is {value:.10g}; {bound.words}.")


def seed_for(*parts: object) -> int:
    """A 63-bit seed that depends on nothing but its parts."""
    text = "/".join(map(str, parts))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


@dataclass(frozen=True, slots=True)
class EngineStats:
    """What the engine did, in tokens and wall-clock seconds.

    `prefill_tokens` were computed as context, `cached_tokens` were found in the cache and not computed,
    `decode_tokens` were sampled. `model_s` is the time in forward passes, `sample_s` in drawing tokens, and
    `schedule_s` all else of the steps. `batch_tokens` sums the tokens of the passes, `recomputed_tokens`
    those computed again after new weights; `queue_steps` and `running_steps` sum over the steps how many
    requests waited and ran. Of a server that does not count its steps, a step is a look at its queue,
    `wall_s` the time between those looks, and its seconds of work are unknown: 0.
    """

    steps: int = 0
    prefill_tokens: int = 0
    cached_tokens: int = 0
    decode_tokens: int = 0
    recomputed_tokens: int = 0
    batch_tokens: int = 0
    evicted_pages: int = 0
    model_s: float = 0.0
    sample_s: float = 0.0
    schedule_s: float = 0.0
    queue_steps: int = 0
    running_steps: int = 0
    wall_s: float = 0.0

    @property
    def hit_rate(self) -> float:
        """Share of the context tokens that the cache served."""
        asked = self.cached_tokens + self.prefill_tokens
        return self.cached_tokens / asked if asked else 0.0

    def __sub__(self, earlier: EngineStats) -> EngineStats:
        """What was done since `earlier`."""
        before = asdict(earlier)
        return EngineStats(**{name: value - before[name] for name, value in asdict(self).items()})

    def __add__(self, other: EngineStats) -> EngineStats:
        """What was done here and there."""
        more = asdict(other)
        return EngineStats(**{name: value + more[name] for name, value in asdict(self).items()})

    def metrics(self) -> dict[str, float]:
        """Rates by time in the engine's steps, means over those steps, and shares. Empty without a step.

        Where the seconds of work are unknown, rates are by the clock, and what they alone tell is left out.
        """
        if not self.steps:
            return {}
        busy_s = self.model_s + self.sample_s + self.schedule_s
        found = {
            "engine/decode_tokens_per_s": self.decode_tokens / (busy_s or self.wall_s),
            "engine/prefill_tokens_per_s": self.prefill_tokens / (busy_s or self.wall_s),
            "engine/requests_running": self.running_steps / self.steps,
            "engine/requests_waiting": self.queue_steps / self.steps,
            "engine/cache_hit_rate": self.hit_rate,
            "engine/evicted_pages": float(self.evicted_pages),
        }
        if busy_s:
            found |= {"engine/busy_s": busy_s, "engine/schedule_share": self.schedule_s / busy_s}
        return found

    def line(self) -> str:
        """The same in one line, for a progress bar. Empty without a step: what samples may be elsewhere."""
        found = self.metrics()
        if not found:
            return ""
        evicted = f", {self.evicted_pages:,} pages evicted" if self.evicted_pages else ""
        return (
            f"{found['engine/decode_tokens_per_s']:,.0f} sampled and "
            f"{found['engine/prefill_tokens_per_s']:,.0f} read tokens/s  "
            f"{found['engine/requests_running']:.0f} at once, "
            f"{found['engine/requests_waiting']:.0f} waiting  "
            f"cache {self.hit_rate:.0%}{evicted}"
        )


def combined(now: Mapping[Key, EngineStats], before: Mapping[Key, EngineStats]) -> EngineStats:
    """What engines did since `before`: tokens and steps of all, seconds as the mean over them."""
    done = [stats - before.get(number, EngineStats()) for number, stats in now.items()]
    total = sum(done, EngineStats())
    count = max(1, len(done))
    return replace(
        total,
        model_s=total.model_s / count,
        sample_s=total.sample_s / count,
        schedule_s=total.schedule_s / count,
        wall_s=total.wall_s / count,
    )


@runtime_checkable
class RemoteStats(Protocol):
    """An engine elsewhere, whose `stats` are as of the last time that they were fetched."""

    async def measure(self) -> None:
        """Fetch them."""
        ...


async def counted(engine: Engine) -> EngineStats:
    """What an engine has done since the last call, up to now."""
    if isinstance(engine, RemoteStats):
        await engine.measure()
    return engine.stats(reset=True)


@runtime_checkable
class Sleepable(Protocol):
    """An engine that shares its device with a learner, and leaves it the memory of its cache."""

    async def give_up_cache(self) -> None:
        """Forget what is kept, and give its memory back until there is a request."""
        ...


@runtime_checkable
class Throttleable(Protocol):
    """An engine in the learner's process, that can leave it more of the cores and memory both use."""

    def rest(self, times: float) -> None:
        """Wait after each pass for `times` as long as it took: fewer passes, with more requests in each."""
        ...


@runtime_checkable
class ContinuesActions(Protocol):
    """An engine that honours `Request.begun`: randomness, stop strings and guide go on as if the action had
    never been interrupted."""

    @property
    def continues_actions(self) -> bool:
        """Whether it does."""
        ...


@dataclass(frozen=True, slots=True)
class WeightCheck:
    """How an engine proves that it has taken the weights of a version, `deadline_s` after they are sent.

    `check` takes its digest (None where it tells none) and its scores of `probe`, and raises SyncError.
    """

    version: int
    probe: tuple[int, ...]
    check: Callable[[str | None, Sequence[float]], None]
    deadline_s: float


class RollingUpdate(Protocol):
    """Several engines that take weights one by one."""

    async def offer(self, check: WeightCheck, state: Mapping[str, torch.Tensor]) -> None:
        """Keep weights, that each engine takes and proves when its episodes have ended.

        They may change once this has returned.
        """
        ...

    async def served(self, beyond: int) -> int:
        """The oldest version on which an episode may begin, once that is more than `beyond`.

        Raises what engines met that should have taken weights.
        """
        ...

    async def catch_up(self) -> None:
        """Wait until episodes begin on the newest version. Raises as `served`."""
        ...


@runtime_checkable
class SupportsRollingUpdate(Protocol):
    """Several engines, of which each may hold a version of its own."""

    @property
    def can_roll(self) -> bool:
        """Whether there are several, and they can."""
        ...

    async def roll(self, lag: int) -> RollingUpdate:
        """From now on an episode stays on an engine and a version, and weights are offered, not sent.

        See `rolling.Placement` for `lag`. The engines have all been sent the same weights.
        """
        ...


class Engine(Protocol):
    """Samples from a language model.

    Raises `EngineError` where inference fails. `context_tokens` bounds prompt plus completion.
    """

    @property
    def context_tokens(self) -> int: ...

    @property
    def version(self) -> int: ...

    @property
    def batch_invariant(self) -> bool:
        """Whether a request's tokens and log-probabilities are the same bits whatever else is computed."""
        ...

    async def generate(self, request: Request) -> Completion:
        """Sample one action."""
        ...

    async def generate_batch(self, requests: Sequence[Request]) -> list[Completion]:
        """Sample one action for each request, as one batch in the given order."""
        ...

    def release(self, episode: str) -> None:
        """Forget what was kept for an episode that has ended."""
        ...

    async def load_weights(self, version: int, state: Mapping[str, torch.Tensor]) -> None:
        """Take new weights; all later tokens carry `version`."""
        ...

    async def fingerprint(self) -> str | None:
        """`fingerprint_module` of the weights in use; None where the engine cannot tell."""
        ...

    async def score(self, token_ids: Sequence[int], *, adapter: str | None = None) -> list[float]:
        """Log-probability of each token given those before it, at temperature 1; 0 for the first."""
        ...

    def stats(self, *, reset: bool = False) -> EngineStats:
        """Counts since the start or the last reset."""
        ...

    async def close(self) -> None: ...
