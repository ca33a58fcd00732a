"""An engine that replays scripted completions, for tests."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ludus.engines.base import EngineStats, Request
from ludus.errors import EngineError, UserError
from ludus.types import Completion

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

Script = Callable[[Request, int], str | Completion] | Mapping[str, Sequence[str]]
"""Completions: a function of the request and the turn (from 0) of its episode, or the texts of each episode by
turn."""

_LOGPROB = -1.0


@dataclass(frozen=True, slots=True)
class Faults:
    """Indices of calls (from 0, over all requests) that raise `EngineError` or never return."""

    fail_at: Collection[int] = ()
    hang_at: Collection[int] = ()


class ScriptedEngine:
    """An `Engine` with predetermined completions.

    A text becomes its tokens plus `end_token`, each with log-probability -1 and no alternative; a
    `Completion` is returned unchanged. Text beyond `max_new_tokens` or the context is cut with finish reason
    `length`. Raises `UserError` if the script has no text for a turn, since that is not an infrastructure
    failure.

    `requests`, `released` and `loaded` (versions) record the calls in order.
    """

    def __init__(
        self,
        script: Script,
        tokenizer: PreTrainedTokenizerBase,
        end_token: int,
        *,
        context_tokens: int = 4096,
        faults: Faults = Faults(),
        version: int = 0,
    ) -> None:
        self._script = script
        self._tokenizer = tokenizer
        self._end_token = end_token
        self._context_tokens = context_tokens
        self._faults = faults
        self._version = version
        self._turns: Counter[str] = Counter()
        self._digest = "initial"
        self.requests: list[Request] = []
        self.released: list[str] = []
        self.loaded: list[int] = []
        self.closed = False

    @property
    def context_tokens(self) -> int:
        return self._context_tokens

    @property
    def version(self) -> int:
        return self._version

    @property
    def batch_invariant(self) -> bool:
        """False, to exercise lockstep rollouts."""
        return False

    @property
    def continues_actions(self) -> bool:
        """True: a text resumes where the interrupted request ended."""
        return True

    async def generate(self, request: Request) -> Completion:
        """Return the next completion of the request's episode."""
        call = len(self.requests)
        self.requests.append(request)
        room = self._context_tokens - len(request.token_ids)
        if not request.token_ids or room <= 0:
            raise EngineError(
                f"Episode {request.episode} has a prompt of {len(request.token_ids)} tokens, "
                f"but the engine takes 1 to {self._context_tokens - 1}."
            )
        await asyncio.sleep(0)
        if call in self._faults.hang_at:
            await asyncio.Event().wait()
        if call in self._faults.fail_at:
            raise EngineError(f"Scripted failure of call {call}.")
        turn = self._turns[request.episode] - bool(request.begun)
        line = self._line(request, turn)
        self._turns[request.episode] = turn + 1
        return line if isinstance(line, Completion) else self._completion(line, request, room)

    async def generate_batch(self, requests: Sequence[Request]) -> list[Completion]:
        """Return the next completions in request order; the first failure fails the batch."""
        return [await self.generate(request) for request in requests]

    def release(self, episode: str) -> None:
        """Record the release and restart the episode's script."""
        self.released.append(episode)
        self._turns.pop(episode, None)

    async def load_weights(self, version: int, state: Mapping[str, torch.Tensor]) -> None:
        """Set the version and take the fingerprint of `state`."""
        from ludus.engines.models.fingerprint import fingerprint_tensors

        self._digest = fingerprint_tensors(state)
        self._version = version
        self.loaded.append(version)

    async def fingerprint(self) -> str:
        """Return the fingerprint of the last loaded weights."""
        return self._digest

    async def score(self, token_ids: Sequence[int], *, adapter: str | None = None) -> list[float]:
        """Return 0 for the first token and -1 for all others."""
        return [0.0, *[_LOGPROB] * (len(token_ids) - 1)] if token_ids else []

    def stats(self, *, reset: bool = False) -> EngineStats:
        """Return zeros: a script computes nothing."""
        return EngineStats()

    async def close(self) -> None:
        self.closed = True

    def _line(self, request: Request, turn: int) -> str | Completion:
        if callable(self._script):
            return self._script(request, turn)
        lines = self._script.get(request.episode, ())
        if turn >= len(lines):
            raise UserError(f"The script has no line for turn {turn} of episode {request.episode}.")
        return lines[turn]

    def _completion(self, text: str, request: Request, room: int) -> Completion:
        whole = (*self._tokenizer.encode(text, add_special_tokens=False), self._end_token)
        tokens = whole[request.begun :]
        kept = tokens[: min(request.params.max_new_tokens, room)]
        return Completion(
            tokens=kept,
            logprobs=(_LOGPROB,) * len(kept),
            versions=(self._version,) * len(kept),
            finish_reason="stop" if len(kept) == len(tokens) else "length",
            top_logprobs=tuple(((t, _LOGPROB),) for t in kept) if request.params.top_logprobs else (),
        )
