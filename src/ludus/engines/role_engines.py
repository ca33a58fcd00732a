"""An engine for each of several models, for agents whose roles have separate models (`model.roles`)."""

from __future__ import annotations

import asyncio
import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import TYPE_CHECKING

from ludus.engines.base import ROLE_ADAPTER, ContinuesActions, Engine, EngineStats, Request, Sleepable
from ludus.engines.embedded.engine import LocalEngine
from ludus.types import Completion

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class RoleEngines:
    """An `Engine` that forwards each request to the engine of `Request.adapter`; `shared` has all other requests.

    Weights, version, digest and scores are those of `shared`: each model's own weights are published to its engine.
    """

    shared: Engine
    by_policy: Mapping[str, LocalEngine]
    """The engines of the roles with a separate model, by `Segment.policy`."""

    @property
    def engines(self) -> Sequence[Engine]:
        return [self.shared, *self.by_policy.values()]

    @property
    def roles(self) -> Collection[str]:
        return {name.removeprefix(ROLE_ADAPTER) for name in self.by_policy}

    @property
    def context_tokens(self) -> int:
        return min(one.context_tokens for one in self.engines)

    @property
    def version(self) -> int:
        return self.shared.version

    @property
    def batch_invariant(self) -> bool:
        return all(one.batch_invariant for one in self.engines)

    @property
    def continues_actions(self) -> bool:
        return all(isinstance(one, ContinuesActions) and one.continues_actions for one in self.engines)

    async def generate(self, request: Request) -> Completion:
        (completion,) = await self.generate_batch([request])
        return completion

    async def generate_batch(self, requests: Sequence[Request]) -> list[Completion]:
        """Sample one action per request; those of one engine are one batch in the given order."""
        places: dict[str, list[int]] = {}
        for place, request in enumerate(requests):
            policy = request.adapter or ""
            places.setdefault(policy if policy in self.by_policy else "", []).append(place)

        async def sample(policy: str, own: Sequence[int]) -> list[Completion]:
            if not policy:
                return await self.shared.generate_batch([requests[place] for place in own])
            return await self.by_policy[policy].generate_batch([replace(requests[i], adapter=None) for i in own])

        batches = await asyncio.gather(*(sample(policy, own) for policy, own in places.items()))
        order = [place for own in places.values() for place in own]
        found = dict(zip(order, [one for batch in batches for one in batch], strict=True))
        return [found[place] for place in range(len(requests))]

    def release(self, episode: str) -> None:
        for one in self.engines:
            one.release(episode)

    async def load_weights(self, version: int, state: Mapping[str, torch.Tensor]) -> None:
        """Load weights of the shared model; the other engines keep theirs under the new version."""
        await self.shared.load_weights(version, state)
        for one in self.by_policy.values():
            await one.relabel(version)

    async def fingerprint(self) -> str | None:
        return await self.shared.fingerprint()

    async def score(self, token_ids: Sequence[int], *, adapter: str | None = None) -> list[float]:
        own = self.by_policy.get(adapter or "")
        return await (self.shared.score(token_ids, adapter=adapter) if own is None else own.score(token_ids))

    def stats(self, *, reset: bool = False) -> EngineStats:
        """Return the sums of the counters of all engines."""
        return reduce(operator.add, [one.stats(reset=reset) for one in self.engines])

    async def sleep(self) -> None:
        for one in self.engines:
            if isinstance(one, Sleepable):
                await one.sleep()

    async def close(self) -> None:
        for one in self.engines:
            await one.close()
