"""Chat session: the model's side of an episode.

`EngineChatSession` works on exact tokens: it appends sampled ids and rendered deltas, and never re-tokenizes
text.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from ludus.chat.render import Renderer
from ludus.engines.base import ContinuesActions, Engine, Request, seed_for
from ludus.errors import EngineError, WorldError
from ludus.tools.base import Tool
from ludus.types import Action, Completion, Message, SamplingParams, Segment, StopReason

NOTHING = Completion((), (), (), "abort")
"""Part of an action that has not started."""


class ChatSession(Protocol):
    """Dialogue of one episode with a policy: `open`, then `act` and `observe` in turns, then `close`."""

    @property
    def segments(self) -> tuple[Segment, ...]:
        """The token segments so far; empty if the policy exposes no tokens."""
        ...

    def open(self, messages: Sequence[Message], tools: Sequence[Tool]) -> StopReason | None:
        """Set the prompt. Returns a stop reason if it does not fit."""
        ...

    async def act(self) -> Action | StopReason:
        """Sample a turn. Returns a stop reason if there was no room to finish it."""
        ...

    def observe(self, messages: Sequence[Message]) -> StopReason | None:
        """Append the environment's messages. Returns a stop reason if they do not fit."""
        ...

    def close(self) -> None:
        """Release the episode's resources."""
        ...


@dataclass(frozen=True, slots=True)
class Grant:
    """Token budget and deadline (`time.monotonic`) of an episode; None is no limit."""

    tokens: int | None = None
    until: float | None = None

    @property
    def left_s(self) -> float | None:
        """Return the seconds left, at least 0."""
        return None if self.until is None else max(0.0, self.until - time.monotonic())

    @property
    def is_over(self) -> bool:
        """Return whether the deadline has passed."""
        return self.left_s == 0.0


class Allowance(Protocol):
    """Share of a step's budget that an episode may use."""

    async def granted(self) -> Grant:
        """Return the grant, waiting until it is not empty."""
        ...

    def spend(self, tokens: int) -> None:
        """Record sampled tokens."""
        ...


class RestoreError(WorldError):
    """Raised if a world does not reproduce the recorded observations."""

    part = "cannot_restore"


@dataclass
class EngineChatSession:
    """Token-level dialogue with an engine.

    `max_tokens` and the engine's context bound the whole trajectory. `seed` and the turn determine the
    randomness of an action. The recorded actions in `recorded` are replayed as the first turns; one without a
    `finish_reason` is a partial turn. Raises RestoreError if the world's responses differ. With an
    `allowance` an action may be sampled in several parts, each under the current weights; if the engine
    cannot continue a partial action with stop strings or a guide, the episode only pauses between actions.
    `act` raises `EngineError` if the engine fails, stops half-way, or returns tokens without a finite
    log-probability and a version.
    """

    engine: Engine
    renderer: Renderer
    params: SamplingParams
    max_tokens: int
    episode: str
    seed: int
    guided: bool = False
    recorded: tuple[Segment, ...] = ()
    allowance: Allowance | None = None
    _part: Completion = field(init=False, default=NOTHING)
    _segments: list[Segment] = field(init=False, default_factory=list)
    _tokens: list[int] = field(init=False, default_factory=list)
    _turn: int = field(init=False, default=0)

    @property
    def segments(self) -> tuple[Segment, ...]:
        """Prompt, actions and observations so far."""
        return tuple(self._segments)

    @property
    def so_far(self) -> tuple[Segment, ...]:
        """The segments including a partial action, as taken by `recorded`."""
        part = self._part
        if not part.tokens:
            return self.segments
        begun = Segment("action", part.tokens, self._turn, logprobs=part.logprobs, versions=part.versions)
        return (*self.segments, begun)

    @property
    def _budget(self) -> int:
        return min(self.max_tokens, self.engine.context_tokens)

    def open(self, messages: Sequence[Message], tools: Sequence[Tool]) -> StopReason | None:
        """Render the prompt; it fits if at least one token can follow."""
        tokens = self.renderer.prompt(messages, tools)
        if len(tokens) >= self._budget:
            return StopReason.PROMPT_TOO_LONG
        self._append(Segment("prompt", tokens))
        if self.guided:
            self.params = replace(self.params, guide=self.renderer.guide(tools))
        return None

    async def act(self) -> Action | StopReason:
        """Sample one action and parse it."""
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
        completion = self._recorded_action()
        if completion is None:
            completion = await self._sample(params)
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
        """Release the episode in the engine."""
        self.engine.release(self.episode)

    async def _sample(self, params: SamplingParams) -> Completion:
        """Sample an action, or its rest, in parts as the allowance permits."""
        parts = self._in_parts(params)
        while True:
            grant = Grant() if self.allowance is None else await self.allowance.granted()
            begun, left = len(self._part.tokens), params.max_new_tokens - len(self._part.tokens)
            most = left if not parts or grant.tokens is None else min(left, grant.tokens)
            request = Request(
                self.episode,
                (*self._tokens, *self._part.tokens),
                replace(params, max_new_tokens=most, seed=self._seed(params, begun)),
                timeout_s=grant.left_s if parts else None,
                begun=begun,
            )
            more = await self.engine.generate(request)
            if self.allowance is not None:
                self.allowance.spend(len(more.tokens))
            if more.finish_reason == "abort" and not (parts and grant.is_over):
                _check(more, self.episode)
            self._part = part = _join_parts(self._part, more)
            ended = more.finish_reason == "length" and (most == left or len(more.tokens) < most)
            if more.finish_reason == "stop" or ended:
                self._part = NOTHING
                return part

    def _in_parts(self, params: SamplingParams) -> bool:
        """Return whether an action may be interrupted."""
        if isinstance(self.engine, ContinuesActions) and self.engine.continues_actions:
            return True
        return not params.stop and params.guide is None

    def _seed(self, params: SamplingParams, begun: int) -> int:
        """Return the seed of a part; it differs per part if the engine treats parts as new actions."""
        goes_on = isinstance(self.engine, ContinuesActions) and self.engine.continues_actions
        return params.seed if goes_on or not begun else seed_for(params.seed, begun)

    def _recorded_action(self) -> Completion | None:
        """Return the complete recorded action of this turn, or None.

        A partial one becomes the start of the turn. Raises RestoreError.
        """
        places = [place for place, segment in enumerate(self.recorded) if segment.kind == "action"]
        if self._turn > len(places) or not places:
            return None
        place = places[self._turn] if self._turn < len(places) else len(self.recorded)
        history = [token for segment in self.recorded[:place] for token in segment.tokens]
        whole = place < len(self.recorded) or self.recorded[-1].kind != "action"
        if history != (self._tokens if whole else self._tokens[: len(history)]):
            raise RestoreError(
                f"The world is not deterministic: turn {self._turn} of episode {self.episode} differs from its record.",
                "Restoring an episode needs a world that responds equally to equal actions.",
            )
        if place == len(self.recorded):
            return None
        action = self.recorded[place]
        made = Completion(action.tokens, action.logprobs, action.versions, action.finish_reason or "stop")
        if self.allowance is None or action.finish_reason is not None:
            return made
        self._part = made
        return None

    def _append(self, segment: Segment) -> None:
        self._segments.append(segment)
        self._tokens.extend(segment.tokens)


def _join_parts(part: Completion, more: Completion) -> Completion:
    """Join two parts of an action."""
    return Completion(
        part.tokens + more.tokens, part.logprobs + more.logprobs, part.versions + more.versions, more.finish_reason
    )


def _check(completion: Completion, episode: str) -> None:
    if completion.finish_reason == "abort":
        raise EngineError(f"The engine aborted an action of episode {episode}.")
    num = len(completion.tokens)
    if (len(completion.logprobs), len(completion.versions)) != (num, num):
        raise EngineError(
            f"The engine returned {num} tokens, {len(completion.logprobs)} log-probabilities and "
            f"{len(completion.versions)} versions for an action of episode {episode}."
        )
    if not all(map(math.isfinite, completion.logprobs)):
        raise EngineError(f"A log-probability of an action of episode {episode} is not a finite number.")
