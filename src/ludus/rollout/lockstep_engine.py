"""Turns in lock-step: what is sampled together depends on the episodes alone, never on the clock.

Takes requests of the episodes that have joined. Waits until every joined episode either waits here or has
left. Gives the whole round to the engine as one batch, ordered by episode; what the engine raises reaches
every episode of the round. Never starts a round while one episode is with its tools: a slow tool holds
everyone, which is the price of bit-for-bit repetition.
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
"""What an episode asked, and where it waits."""


@dataclass
class LockstepEngine:
    """An engine whose batches are rounds of all episodes that have joined."""

    inner: Engine
    _joined: set[str] = field(init=False, default_factory=set)
    _waiting: dict[str, _Entry] = field(init=False, default_factory=dict)
    _rounds: set[asyncio.Task[None]] = field(init=False, default_factory=set)

    @property
    def context_tokens(self) -> int:
        """The inner engine's."""
        return self.inner.context_tokens

    @property
    def version(self) -> int:
        """The inner engine's."""
        return self.inner.version

    @property
    def batch_invariant(self) -> bool:
        """The inner engine's."""
        return self.inner.batch_invariant

    @property
    def continues_actions(self) -> bool:
        """The inner engine's."""
        return isinstance(self.inner, ContinuesActions) and self.inner.continues_actions

    async def measure(self) -> None:
        """Fetch the inner engine's counts."""
        if isinstance(self.inner, RemoteStats):
            await self.inner.measure()

    def stats(self, *, reset: bool = False) -> EngineStats:
        """The inner engine's."""
        return self.inner.stats(reset=reset)

    def swap(self, leaving: str | None, joining: str | None) -> None:
        """One episode leaves and another takes its place, at once: no round can start in between."""
        if leaving is not None:
            self._joined.discard(leaving)
        if joining is not None:
            self._joined.add(joining)
        self._start_round_if_complete()

    async def generate(self, request: Request) -> Completion:
        """Wait for the round, then for its result. Raises ValueError for an episode that has not joined."""
        if request.episode not in self._joined:
            raise ValueError(f"episode {request.episode} has not joined")
        future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self._waiting[request.episode] = (request, future)
        self._start_round_if_complete()
        return await future

    async def generate_batch(self, requests: Sequence[Request]) -> list[Completion]:
        """The inner engine's."""
        return await self.inner.generate_batch(requests)

    def release(self, episode: str) -> None:
        """The inner engine's."""
        self.inner.release(episode)

    async def load_weights(self, version: int, state: Mapping[str, torch.Tensor]) -> None:
        """The inner engine's."""
        await self.inner.load_weights(version, state)

    async def fingerprint(self) -> str | None:
        """The inner engine's."""
        return await self.inner.fingerprint()

    async def score(self, token_ids: Sequence[int], *, adapter: str | None = None) -> list[float]:
        """The inner engine's."""
        return await self.inner.score(token_ids, adapter=adapter)

    async def close(self) -> None:
        """End the rounds that run, then close the inner engine."""
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
        except Exception as error:  # boundary: the cause goes to every episode that waits
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
        """Give an error to those who still wait."""
        for _, future in entries:
            if not future.done():
                future.set_exception(error)
