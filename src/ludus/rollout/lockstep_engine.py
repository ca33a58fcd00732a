"""Lockstep engine: batches depend on the episodes alone, never on timing.

Collects requests until every joined episode is waiting or has left, then sends the round as one batch,
ordered by episode; errors of the engine reach every episode of the round. A slow tool delays all episodes,
which is the cost of reproducibility.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ludus.engines.base import ContinuesActions, Engine, EngineStats, RemoteStats, Request
from ludus.errors import EngineError
from ludus.types import Completion

if TYPE_CHECKING:
    import torch

_Entry = tuple[Request, "asyncio.Future[Completion]"]
"""Request of an episode and the future that it waits on."""


@dataclass
class LockstepEngine:
    """Engine whose batches are rounds of all joined episodes."""

    inner: Engine
    _joined: set[str] = field(init=False, default_factory=set)
    _waiting: dict[str, _Entry] = field(init=False, default_factory=dict)
    _rounds: set[asyncio.Task[None]] = field(init=False, default_factory=set)

    @property
    def context_tokens(self) -> int:
        """The context length of the inner engine."""
        return self.inner.context_tokens

    @property
    def version(self) -> int:
        """The version of the inner engine."""
        return self.inner.version

    @property
    def batch_invariant(self) -> bool:
        """Whether the inner engine is batch-invariant."""
        return self.inner.batch_invariant

    @property
    def continues_actions(self) -> bool:
        """Whether the inner engine can continue actions."""
        return isinstance(self.inner, ContinuesActions) and self.inner.continues_actions

    async def measure(self) -> None:
        """Refresh the inner engine's statistics."""
        if isinstance(self.inner, RemoteStats):
            await self.inner.measure()

    def stats(self, *, reset: bool = False) -> EngineStats:
        """Return the inner engine's statistics."""
        return self.inner.stats(reset=reset)

    def swap(self, leaving: str | None, joining: str | None) -> None:
        """Replace an episode by another atomically, so that no round starts in between."""
        if leaving is not None:
            self._joined.discard(leaving)
        if joining is not None:
            self._joined.add(joining)
        self._start_round_if_complete()

    async def generate(self, request: Request) -> Completion:
        """Wait for the round and return the result. Raises ValueError for an episode that has not joined."""
        if request.episode not in self._joined:
            raise ValueError(f"episode {request.episode} has not joined")
        future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self._waiting[request.episode] = (request, future)
        self._start_round_if_complete()
        return await future

    async def generate_batch(self, requests: Sequence[Request]) -> list[Completion]:
        """Call the inner engine."""
        return await self.inner.generate_batch(requests)

    def release(self, episode: str) -> None:
        """Call the inner engine."""
        self.inner.release(episode)

    async def load_weights(self, version: int, state: Mapping[str, torch.Tensor]) -> None:
        """Call the inner engine."""
        await self.inner.load_weights(version, state)

    async def fingerprint(self) -> str | None:
        """Return the inner engine's fingerprint."""
        return await self.inner.fingerprint()

    async def score(self, token_ids: Sequence[int], *, adapter: str | None = None) -> list[float]:
        """Call the inner engine."""
        return await self.inner.score(token_ids, adapter=adapter)

    async def close(self) -> None:
        """Cancel the running rounds and close the inner engine."""
        rounds = tuple(self._rounds)
        for task in rounds:
            task.cancel()
        await asyncio.gather(*rounds, return_exceptions=True)
        await self.inner.close()

    def _start_round_if_complete(self) -> None:
        self._waiting = {e: w for e, w in self._waiting.items() if e in self._joined and not w[1].done()}
        if not self._waiting or set(self._waiting) != self._joined:
            return
        entries = [self._waiting[episode] for episode in sorted(self._waiting)]
        self._waiting = {}
        task = asyncio.get_running_loop().create_task(self._round(entries))
        self._rounds.add(task)
        task.add_done_callback(lambda ended: self._end(ended, entries))

    async def _round(self, entries: list[_Entry]) -> None:
        try:
            completions = await self.inner.generate_batch([request for request, _ in entries])
            if len(completions) != len(entries):
                raise EngineError(f"The engine answered {len(completions)} of {len(entries)} requests.")
        except Exception as error:  # boundary: raised in every waiting episode
            self._fail(entries, error)
            return
        for (_, future), completion in zip(entries, completions, strict=True):
            if not future.done():
                future.set_result(completion)

    def _end(self, ended: asyncio.Task[None], entries: list[_Entry]) -> None:
        self._rounds.discard(ended)
        self._fail(entries, EngineError("The round was cancelled before the engine answered."))

    @staticmethod
    def _fail(entries: list[_Entry], error: Exception) -> None:
        """Raise an error in the episodes that still wait."""
        for _, future in entries:
            if not future.done():
                future.set_exception(error)
