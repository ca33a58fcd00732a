"""The model's side of an episode: what it was shown, what it said.

`EngineConversation` keeps the exact tokens. It appends ids that the engine sampled and deltas that the
renderer made, and never turns its own text back into ids.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from ludus.chat.render import Renderer
from ludus.engines.base import Engine, Request, seed_for
from ludus.errors import EngineError, WorldError
from ludus.tools.base import Tool
from ludus.types import Action, Completion, Message, SamplingParams, Segment, StopReason


class Conversation(Protocol):
    """One episode's dialogue with a policy. `open` once, then `act` and `observe` in turns, then `close`."""

    @property
    def segments(self) -> tuple[Segment, ...]:
        """The token segments so far; empty where the policy shows no tokens."""
        ...

    def open(self, messages: Sequence[Message], tools: Sequence[Tool]) -> StopReason | None:
        """Show the prompt. A stop reason means that it does not fit."""
        ...

    async def act(self) -> Action | StopReason:
        """Let the policy take a turn. A stop reason means that there was no room to finish one."""
        ...

    def observe(self, messages: Sequence[Message]) -> StopReason | None:
        """Show what the environment said. A stop reason means that it does not fit."""
        ...

    def close(self) -> None:
        """Give back what was kept for this episode."""
        ...


@dataclass
class EngineConversation:
    """A dialogue with an engine, token by token.

    `max_tokens` bounds the whole trajectory; the engine's context bounds it as well. `seed` and the turn
    fix the randomness of each action. The actions of `told`, segments of an earlier episode of the same task,
    stand for the first turns; WorldError where the world does not answer them as it did then. `act` raises
    `EngineError` where the engine fails, gives up half-way, or gives tokens without a finite log-probability
    and a version for each.
    """

    engine: Engine
    renderer: Renderer
    params: SamplingParams
    max_tokens: int
    episode: str
    seed: int
    guided: bool = False
    told: tuple[Segment, ...] = ()
    _segments: list[Segment] = field(init=False, default_factory=list)
    _tokens: list[int] = field(init=False, default_factory=list)
    _turn: int = field(init=False, default=0)

    @property
    def segments(self) -> tuple[Segment, ...]:
        """Prompt, actions and observations so far."""
        return tuple(self._segments)

    @property
    def _budget(self) -> int:
        return min(self.max_tokens, self.engine.context_tokens)

    def open(self, messages: Sequence[Message], tools: Sequence[Tool]) -> StopReason | None:
        """Render the prompt, and keep it if at least one token can follow."""
        tokens = self.renderer.prompt(messages, tools)
        if len(tokens) >= self._budget:
            return StopReason.PROMPT_TOO_LONG
        self._append(Segment("prompt", tokens))
        if self.guided:
            self.params = replace(self.params, guide=self.renderer.guide(tools))
        return None

    async def act(self) -> Action | StopReason:
        """Sample one action and read it."""
        room = self._budget - len(self._tokens)
        if room <= 0:
            return StopReason.MAX_TOKENS
        params = replace(
            self.params,
            max_new_tokens=min(self.params.max_new_tokens, room),
            stop=self.renderer.stop,
            stop_token_ids=self.renderer.stop_token_ids,
            seed=seed_for(self.seed, self._turn),
        )
        completion = self._told_action()
        if completion is None:
            completion = await self.engine.generate(Request(self.episode, tuple(self._tokens), params))
        _check(completion, self.episode)
        turn, self._turn = self._turn, self._turn + 1
        self._append(
            Segment(
                "action",
                completion.tokens,
                turn,
                logprobs=completion.logprobs,
                versions=completion.versions,
                finish_reason=completion.finish_reason,
            )
        )
        if completion.finish_reason == "length" and room < self.params.max_new_tokens:
            return StopReason.MAX_TOKENS
        return self.renderer.parse(completion.tokens, turn, completion.finish_reason)

    def observe(self, messages: Sequence[Message]) -> StopReason | None:
        """Append the observation's tokens if at least one token can follow them."""
        tokens = self.renderer.observation(messages)
        if len(self._tokens) + len(tokens) >= self._budget:
            return StopReason.MAX_TOKENS
        self._append(Segment("observation", tokens, self._turn - 1))
        return None

    def close(self) -> None:
        """Let the engine forget the episode."""
        self.engine.release(self.episode)

    def _told_action(self) -> Completion | None:
        """The action that was recorded for this turn, where there is one."""
        places = [place for place, segment in enumerate(self.told) if segment.kind == "action"]
        if self._turn >= len(places):
            return None
        place = places[self._turn]
        if [token for segment in self.told[:place] for token in segment.tokens] != self._tokens:
            raise WorldError(
                f"The world does not repeat: turn {self._turn} of episode {self.episode} has another history "
                "than it had when it was recorded.",
                "Only a world that answers equal actions equally can be entered at a later turn.",
            )
        action = self.told[place]
        return Completion(action.tokens, action.logprobs, action.versions, action.finish_reason or "stop")

    def _append(self, segment: Segment) -> None:
        self._segments.append(segment)
        self._tokens.extend(segment.tokens)


def _check(completion: Completion, episode: str) -> None:
    if completion.finish_reason == "abort":
        raise EngineError(f"The engine gave up in the middle of an action of episode {episode}.")
    num = len(completion.tokens)
    if (len(completion.logprobs), len(completion.versions)) != (num, num):
        raise EngineError(
            f"The engine gave {num} tokens, {len(completion.logprobs)} log-probabilities and "
            f"{len(completion.versions)} versions for an action of episode {episode}."
        )
    if not all(map(math.isfinite, completion.logprobs)):
        raise EngineError(f"A log-probability of an action of episode {episode} is not a finite number.")
