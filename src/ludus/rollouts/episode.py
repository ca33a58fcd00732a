"""One episode: a chat session with the policy, alternating with an environment.

`EngineChatSession` works on exact tokens: it appends sampled ids and rendered deltas, and never re-tokenizes text.
Raises `WorldError` or `EngineError` for infrastructure failures only, never because of model output. Session and
environment are always closed, also on cancellation; `start`, `step` and `close` run in one asyncio task.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol, TypeVar

from ludus.chat.render import Renderer
from ludus.config.sections.rollout import RolloutConfig
from ludus.engines.base import ContinuesActions, HasRoleAdapters, Request, adapter_of_agent, seed_for
from ludus.envs.base import Environment, World
from ludus.envs.tool_env import describe_error
from ludus.errors import EngineError, LudusError, WorldError
from ludus.plugins import plugin_line
from ludus.rewards.base import Reward, score
from ludus.rewards.process import TurnScorer
from ludus.sandbox.local.namespaces import PausableTimeout
from ludus.tools.base import Tool, call_timeout
from ludus.types import (
    POLICY,
    Action,
    Completion,
    Message,
    SamplingParams,
    Segment,
    StepResult,
    StopReason,
    Task,
    Timings,
    ToolOutcome,
    ToolStatus,
    Trajectory,
)

T = TypeVar("T")
EPISODE_TIMEOUT: ContextVar[PausableTimeout | None] = ContextVar("ludus-episode-timeout", default=None)
"""Timeout of the current episode; paused while the episode waits for the budget of a later step."""
_CHARS_PER_TOKEN = 8  # texts with more characters per token of the limit are tokenized in part first
_NOT_RENDERED = "The environment's messages cannot be rendered:"


def is_being_cancelled() -> bool:
    """Return whether the running task was cancelled from outside."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


@contextmanager
def world_errors(what: str) -> Iterator[None]:
    """Raise WorldError, with `what` and the original message, for an error of user code in the block."""
    try:
        yield
    except LudusError:
        raise
    except Exception as error:  # boundary: user code; the cause is chained
        where = plugin_line(error)
        raise WorldError(f"{what} {describe_error(error)}{f' ({where})' if where else ''}") from error


def fresh_environment(world: World, task: Task) -> Environment:
    """Create the world's environment for one episode. Raises WorldError with the world's error."""
    with world_errors(f"No environment for task {task.id}:"):
        return world.environment(task)


async def run_episode(
    task: Task, sample: int, environment: Environment, chat: ChatSession, limits: RolloutConfig
) -> Trajectory:
    """Run one episode to its end and score it."""
    trajectory = await run_unscored(task, sample, environment, chat, limits)
    return scored(environment.rewards, task, trajectory)


async def run_unscored(
    task: Task, sample: int, environment: Environment, chat: ChatSession, limits: RolloutConfig, given_turns: int = 0
) -> Trajectory:
    """Run one episode to its end without scoring, except for turn rewards.

    The first `given_turns` turns of the session have no action: their turn rewards and anchors are left out.
    """
    run = _EpisodeRun(task, environment, chat, limits)
    started, begin = time.time(), time.perf_counter()
    try:
        stop = await run.within_timeout()
    except BaseException as error:
        try:
            await run.close()
        except LudusError as second:
            error.add_note(f"Closing also failed: {second}")
        raise
    await run.close()
    segments, given = chat.segments, run.turn_rewards[given_turns:]
    num_actions = sum(s.kind == "action" for s in segments)
    model_s, tools_s = (sum(seconds) for seconds in zip(*run.turns, strict=True)) if run.turns else (0.0, 0.0)
    total_s = time.perf_counter() - begin - run.waited_s
    return Trajectory(
        task_id=task.id,
        sample=sample,
        segments=segments,
        messages=tuple(run.messages),
        stop_reason=stop,
        outcomes=tuple(run.outcomes),
        turn_rewards=tuple(r or 0.0 for r in given) if any(r is not None for r in given) else (),
        tags=dict(task.tags),
        anchors=tuple(run.anchors[given_turns:][:num_actions]),
        shared_reward=any(segment.parent == -1 for segment in segments),
        timings=Timings(total_s, model_s - run.waited_s, tools_s, begin=started, turns=tuple(run.turns[given_turns:])),
    )


@dataclass
class _EpisodeRun:
    """An episode so far. `turns` are the seconds of the model and of the environment."""

    task: Task
    environment: Environment
    chat: ChatSession
    limits: RolloutConfig
    messages: list[Message] = field(default_factory=list)
    outcomes: list[ToolOutcome] = field(default_factory=list)
    turn_rewards: list[float | None] = field(default_factory=list)
    anchors: list[str] = field(default_factory=list)
    turns: list[tuple[float, float]] = field(default_factory=list)
    shown: Sequence[Message] = ()
    error_streak: int = 0
    waited_s: float = 0.0

    async def within_timeout(self) -> StopReason:
        try:
            async with asyncio.timeout(self.limits.episode_timeout_s) as deadline:
                timeout = PausableTimeout(deadline)
                token = EPISODE_TIMEOUT.set(timeout)
                try:
                    return await self._play()
                finally:
                    EPISODE_TIMEOUT.reset(token)
                    self.waited_s = timeout.paused_s
        except TimeoutError:
            if not deadline.expired():
                raise
            return StopReason.TIMEOUT

    async def close(self) -> None:
        try:
            self.chat.close()
        finally:
            await self._call("close", self.environment.close, object)

    async def _play(self) -> StopReason:
        self.messages += await self._call("start", partial(self.environment.start, self.task), list)
        self.shown = tuple(self.messages)
        with world_errors(_NOT_RENDERED):
            stop = self.chat.open(self.messages, () if self.limits.hide_tools else self.environment.tools)
        while stop is None:
            self.anchors.append(await self._state_hash())
            begin = time.perf_counter()
            try:
                action = await self.chat.act()
            except asyncio.CancelledError as error:
                if is_being_cancelled():
                    raise
                raise EngineError("The policy's turn was cancelled from inside the engine.") from error
            finally:
                model_s = time.perf_counter() - begin
                self.turns.append((model_s, 0.0))
            if isinstance(action, StopReason):
                return action
            self.messages.append(action.message)
            if action.finish_reason == "length":
                return StopReason.TRUNCATED
            if self.limits.hide_tools and (action.calls or action.errors):
                return StopReason.TOOL_ERRORS
            if not (action.calls or action.errors or action.message["content"].strip()):
                return StopReason.EMPTY_ANSWER
            begin = time.perf_counter()
            result = await self._call("step", partial(self.environment.step, action), StepResult)
            self.turns[-1] = (model_s, time.perf_counter() - begin)
            stop = self._stop_after(result)
            if stop is None:
                with world_errors(_NOT_RENDERED):
                    stop = self.chat.observe(result.messages)
        return stop

    def _stop_after(self, result: StepResult) -> StopReason | None:
        if result.reward is not None and not math.isfinite(result.reward):
            raise WorldError(f"The environment's step returned the reward {result.reward}.")
        self.messages += result.messages
        self.shown = result.messages or self.shown
        self.outcomes += result.outcomes
        self.turn_rewards.append(result.reward)
        for outcome in (one for one in result.outcomes if one.call_id):
            self.error_streak = 0 if outcome.status is ToolStatus.OK else self.error_streak + 1
        if result.done:
            return StopReason.ANSWERED
        if self.error_streak >= self.limits.max_tool_errors:
            return StopReason.TOOL_ERRORS
        return StopReason.MAX_TURNS if len(self.turns) >= self.limits.max_turns else None

    async def _state_hash(self) -> str:
        if self.environment.implements("state_key"):

            async def read() -> str:
                return self.environment.state_key()

            state = await self._call("state_key", read, str)
        else:
            shown = [[m["role"], m.get("name", ""), m.get("content", ""), *m.get("images", ())] for m in self.shown]
            state = json.dumps(shown, default=str)
        return hashlib.blake2b(state.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()

    async def _call(self, what: str, call: Callable[[], Awaitable[T]], expected: type[T]) -> T:
        """Call the environment; its errors become WorldError with the original message.

        `environment_timeout_s` excludes waits for a sandbox session. A call that blocks the event loop or ignores
        cancellation is not stopped.
        """
        timeout_s = self.limits.environment_timeout_s
        try:
            async with call_timeout(timeout_s) as deadline:
                result = await call()
        except LudusError:
            raise
        except BaseException as error:  # boundary: user code; the cause is chained
            is_stopped = isinstance(error, asyncio.CancelledError) and is_being_cancelled()
            if is_stopped or isinstance(error, KeyboardInterrupt | GeneratorExit):
                raise
            if isinstance(error, TimeoutError) and deadline.expired():
                text = f"The environment's {what} took longer than {timeout_s:g} s."
                raise WorldError(text, "See rollout.environment_timeout_s.") from error
            raise WorldError(f"The environment's {what} raised {describe_error(error)}") from error
        if not isinstance(result, expected):
            raise WorldError(f"The environment's {what} returned {type(result).__name__}, not {expected.__name__}.")
        return result


def scored(rewards: Sequence[Reward], task: Task, trajectory: Trajectory) -> Trajectory:
    """Return the trajectory with its rewards. Raises WorldError if a reward raises; errors never count as 0."""
    with world_errors(f"A reward of task {task.id} raised"):
        return score(rewards, task, trajectory)


def score_turns(scorer: TurnScorer, task: Task, trajectory: Trajectory) -> tuple[float, ...]:
    """Return the scores of the turns; empty for a tree. Raises WorldError if the scorer raises."""
    if len(trajectory.rows) > 1:
        return ()
    with world_errors(f"The turn verifier of task {task.id} raised"):
        return tuple(scorer(task, trajectory))


NOTHING = Completion((), (), (), "abort")  # empty part, at the start of an action


class ChatSession(Protocol):
    """Dialogue of one episode with a policy: `open`, then `act` and `observe` in turns, then `close`."""

    @property
    def segments(self) -> tuple[Segment, ...]:
        """The token segments so far; empty if the policy exposes no tokens."""

    def open(self, messages: Sequence[Message], tools: Sequence[Tool]) -> StopReason | None:
        """Set the prompt. Returns a stop reason if it does not fit."""

    async def act(self) -> Action | StopReason:
        """Sample a turn. Returns a stop reason if the token budget is exhausted."""

    def observe(self, messages: Sequence[Message]) -> StopReason | None:
        """Append the environment's messages. Returns a stop reason if they do not fit."""

    def close(self) -> None:
        """Release the episode's resources."""


@dataclass(frozen=True, slots=True)
class Grant:
    """Token budget and deadline (`time.monotonic`) of an episode; None: unlimited."""

    tokens: int | None = None
    until: float | None = None

    @property
    def left_s(self) -> float | None:
        """The seconds until the deadline, at least 0."""
        return None if self.until is None else max(0.0, self.until - time.monotonic())

    @property
    def is_over(self) -> bool:
        return self.left_s == 0.0


class ActionEngine(Protocol):
    """The part of `Engine` that an episode uses."""

    @property
    def context_tokens(self) -> int: ...

    async def generate(self, request: Request) -> Completion: ...

    def release(self, episode: str) -> None: ...


class Allowance(Protocol):
    """Share of a step's budget that an episode may use."""

    async def granted(self) -> Grant:
        """Wait until the grant is not empty and return it."""

    def spend(self, tokens: int) -> None:
        """Record sampled tokens."""


class RestoreError(WorldError):
    """Raised if a world does not reproduce the recorded observations."""

    part = "cannot_restore"


@dataclass
class EngineChatSession:
    """Token-level dialogue with an engine.

    `max_tokens` and the engine's context bound the whole trajectory. `seed` and the turn determine the randomness of an
    action. The actions in `recorded` are replayed as the first turns; an action without a `finish_reason` is a partial
    turn. Raises RestoreError if the world's responses differ. With an `allowance` an action may be sampled in several
    parts, each under the current weights; if the engine cannot continue a partial action with stop strings or a guide,
    the episode pauses only between actions. `act` raises `EngineError` if the engine fails, aborts an action, or
    returns tokens without a finite log-probability and a version.
    """

    engine: ActionEngine
    renderer: Renderer
    params: SamplingParams
    max_tokens: int
    episode: str
    seed: int
    guided: bool = False
    recorded: tuple[Segment, ...] = ()
    allowance: Allowance | None = None
    agent: str = POLICY
    records_cut: bool = False
    """Record the log-probabilities after `top_k`, `top_p` and `min_p`, those of the distribution sampled from."""
    _lead: tuple[int, ...] = field(init=False, default=())
    """Tokens of the current turn that precede its action."""
    _partial: Completion = field(init=False, default=NOTHING)
    _segments: list[Segment] = field(init=False, default_factory=list)
    _tokens: list[int] = field(init=False, default_factory=list)
    _turn: int = field(init=False, default=0)
    _tools: Sequence[Tool] = field(init=False, default=())

    @property
    def segments(self) -> tuple[Segment, ...]:
        return tuple(self._segments)

    @property
    def current_segments(self) -> tuple[Segment, ...]:
        """The segments including a partial action, in the form of `recorded`."""
        part = self._partial
        if not part.tokens:
            return self.segments
        begun = Segment("action", part.tokens, self._turn, logprobs=part.logprobs, versions=part.versions)
        return (*self.segments, begun)

    @property
    def policy(self) -> str:
        """The adapter of the agent's role; empty if it has none."""
        roles = self.engine.roles if isinstance(self.engine, HasRoleAdapters) else ()
        return adapter_of_agent(self.agent, roles)

    @property
    def _budget(self) -> int:
        return min(self.max_tokens, self.engine.context_tokens)

    def open(self, messages: Sequence[Message], tools: Sequence[Tool]) -> StopReason | None:
        self._tools = tools
        if self.cannot_fit([*map(_text_of, messages), *(str(tool.schema) for tool in tools)]):
            return StopReason.PROMPT_TOO_LONG
        stop = self.extend(self.renderer.prompt(messages, tools))
        if self.guided and stop is None:
            self.params = replace(self.params, guide=self.renderer.guide(tools))
        return stop

    async def act(self) -> Action | StopReason:
        room = self._budget - len(self._tokens)
        if room <= 0:
            return StopReason.MAX_TOKENS
        completion = self._recorded_action() or await self._sample(self.action_params(room, self._turn))
        _check_completion(completion, self.episode)
        turn, self._turn = self._turn, self._turn + 1
        segment = Segment("action", completion.tokens, turn, logprobs=completion.logprobs, versions=completion.versions)
        self._append(replace(segment, finish_reason=completion.finish_reason))
        if completion.finish_reason == "length" and room < self.params.max_new_tokens:
            return StopReason.MAX_TOKENS
        return self.renderer.parse((*self._lead, *completion.tokens), turn, completion.finish_reason, self._tools)

    def action_params(self, room: int, turn: int) -> SamplingParams:
        """Return the sampling parameters of the action of a turn, of at most `room` tokens."""
        return replace(
            self.params,
            max_new_tokens=min(self.params.max_new_tokens, room),
            stop=(*self.params.stop, *self.renderer.stop),
            stop_token_ids=self.renderer.stop_token_ids,
            seed=seed_for(self.seed, turn),
        )

    def observe(self, messages: Sequence[Message], added: str = "") -> StopReason | None:
        """Append messages, and before them `added`: text that a client wrote behind the last reply."""
        if self.cannot_fit([added, *map(_text_of, messages)]):
            return StopReason.MAX_TOKENS
        tokens = tuple(self.renderer.tokenizer.encode(added, add_special_tokens=False))
        return self.extend((*tokens, *self.renderer.observation(messages, (*self._tokens[-1:], *tokens)[-1])))

    def cannot_fit(self, texts: Sequence[str]) -> bool:
        """Return whether the beginning of long texts has too many tokens. The whole could take minutes to tokenize."""
        text, length = "".join(texts), _CHARS_PER_TOKEN * self._budget
        if len(text) <= length:
            return sum(map(bool, texts)) > self._budget
        return len(self.renderer.tokenizer.encode(text[:length], add_special_tokens=False)) > self._budget

    def extend(self, tokens: tuple[int, ...]) -> StopReason | None:
        """Append a prompt or an observation. Returns a stop reason if the tokens do not fit."""
        is_prompt = not self._segments
        if len(self._tokens) + len(tokens) >= self._budget:
            return StopReason.PROMPT_TOO_LONG if is_prompt else StopReason.MAX_TOKENS
        if tokens:
            self._append(Segment("prompt" if is_prompt else "observation", tokens, max(0, self._turn - 1)))
        return None

    def fork(self, episode: str, seed: int, num_segments: int | None = None) -> EngineChatSession:
        """Return another dialogue that begins with the complete turns so far, or those of the first segments."""
        other = replace(self, episode=episode, seed=seed)
        other._tools, other._segments = self._tools, self._segments[:num_segments]
        other._tokens = [token for segment in other._segments for token in segment.tokens]
        other._turn = sum(segment.kind == "action" for segment in other._segments)
        return other

    def close(self) -> None:
        self.engine.release(self.episode)

    async def _sample(self, params: SamplingParams) -> Completion:
        """Sample an action or its remainder, in parts if the allowance is limited."""
        continues = isinstance(self.engine, ContinuesActions) and self.engine.continues_actions
        parts = continues or (not params.stop and params.guide is None)
        while True:
            grant = Grant() if self.allowance is None else await self.allowance.granted()
            begun, left = len(self._partial.tokens), params.max_new_tokens - len(self._partial.tokens)
            num_tokens = left if not parts or grant.tokens is None else min(left, grant.tokens)
            # an engine that treats parts as new actions needs a seed per part
            seed = params.seed if continues or not begun else seed_for(params.seed, begun)
            request = Request(
                self.episode,
                (*self._tokens, *self._partial.tokens),
                replace(params, max_new_tokens=num_tokens, seed=seed),
                timeout_s=grant.left_s if parts else None,
                adapter=self.policy or None,
                begun=begun,
            )
            more = await self.engine.generate(request)
            if self.allowance is not None:
                self.allowance.spend(len(more.tokens))
            if more.finish_reason == "abort" and not (parts and grant.is_over):
                _check_completion(more, self.episode)
            logprobs = (self.records_cut and more.cut_logprobs) or more.logprobs
            joined = (self._partial.tokens + more.tokens, self._partial.logprobs + logprobs)
            part = Completion(*joined, self._partial.versions + more.versions, more.finish_reason)
            self._partial = part
            ended = more.finish_reason == "length" and (num_tokens == left or len(more.tokens) < num_tokens)
            if more.finish_reason == "stop" or ended:
                self._partial = NOTHING
                return part

    def _recorded_action(self) -> Completion | None:
        """Return the complete recorded action of this turn; a partial one becomes its start. Raises RestoreError."""
        indices = [index for index, segment in enumerate(self.recorded) if segment.kind == "action"]
        if self._turn > len(indices) or not indices:
            return None
        index = indices[self._turn] if self._turn < len(indices) else len(self.recorded)
        history = [token for segment in self.recorded[:index] for token in segment.tokens]
        whole = index < len(self.recorded) or self.recorded[-1].kind != "action"
        if history != (self._tokens if whole else self._tokens[: len(history)]):
            raise RestoreError(
                f"The world is not deterministic: turn {self._turn} of episode {self.episode} differs on replay.",
                "Restoring an episode requires a deterministic world.",
            )
        if index == len(self.recorded):
            return None
        action = self.recorded[index]
        made = Completion(action.tokens, action.logprobs, action.versions, action.finish_reason or "stop")
        if self.allowance is None or action.finish_reason is not None:
            return made
        self._partial = made
        return None

    def _append(self, segment: Segment) -> None:
        self._segments.append(replace(segment, policy=self.policy))
        self._tokens.extend(segment.tokens)


def _text_of(message: Message) -> str:
    """Return the text of a message that every renderer writes."""
    return message["content"] + "".join(call["function"]["arguments"] for call in message.get("tool_calls", []))


def _check_completion(completion: Completion, episode: str) -> None:
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
