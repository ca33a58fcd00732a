"""One episode: the model acts, the environment answers, until a stop reason.

Takes a task, a fresh environment and a conversation. Gives a scored `Trajectory`, or one to be scored
elsewhere, whatever the model and its tools do. Waits for the policy and for the environment, the latter at
most `environment_timeout_s` a call (as long as it does not block the event loop or refuse to be cancelled);
waiting for a place of a sandbox does not count.
Raises `WorldError` or `EngineError` for the infrastructure only, never because of what the model wrote.
Always closes conversation and environment, also when cancelled; `start`, `step` and `close` run in one
asyncio task.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from ludus.envs.base import Environment, HasStateKey, World
from ludus.envs.toolbox import describe_error
from ludus.errors import EngineError, LudusError, WorldError
from ludus.rewards.base import Reward, score
from ludus.rewards.code.turns import TurnVerifier, turn_shares
from ludus.rollout.chat_session import ChatSession
from ludus.sandbox.local.pausable_timeout import PausableClock, episode_clock, under
from ludus.types import (
    Action,
    Message,
    StepResult,
    StopReason,
    Task,
    Timings,
    ToolOutcome,
    ToolStatus,
    Trajectory,
)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class EpisodeLimits:
    """Bounds of one episode: turns, tool errors in a row, and seconds (None: no wall-clock limit)."""

    max_turns: int = 6
    max_tool_errors: int = 3
    timeout_s: float | None = None
    environment_timeout_s: float = 120.0


@dataclass
class _Record:
    """What an episode has gathered so far."""

    messages: list[Message] = field(default_factory=list)
    outcomes: list[ToolOutcome] = field(default_factory=list)
    turn_rewards: list[float | None] = field(default_factory=list)
    anchors: list[str] = field(default_factory=list)
    shown: Sequence[Message] = ()
    error_streak: int = 0
    model_s: float = 0.0
    tools_s: float = 0.0
    waited_s: float = 0.0


def is_being_cancelled() -> bool:
    """Whether someone asked for the running task to be cancelled, whatever its own code raises."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def fresh_environment(world: World, task: Task) -> Environment:
    """The world's environment for one episode. Raises WorldError with the words of what the world raises."""
    try:
        return world.environment(task)
    except LudusError:
        raise
    except Exception as error:  # boundary: foreign code; the cause travels in the failure
        raise WorldError(f"No environment for task {task.id}: {describe_error(error)}") from error


async def run_episode(
    task: Task, sample: int, environment: Environment, conversation: ChatSession, limits: EpisodeLimits
) -> Trajectory:
    """Play one episode to its end and score it."""
    trajectory = await play_episode(task, sample, environment, conversation, limits)
    return scored(environment.rewards, task, trajectory)


async def play_episode(
    task: Task, sample: int, environment: Environment, conversation: ChatSession, limits: EpisodeLimits
) -> Trajectory:
    """Play one episode to its end; it has no rewards but those of its turns."""
    record = _Record()
    begin = time.perf_counter()
    try:
        stop = await _play_in_time(task, environment, conversation, limits, record)
    except BaseException as error:
        try:
            await _close(environment, conversation, limits)
        except LudusError as second:
            error.add_note(f"Closing failed as well: {second}")
        raise
    await _close(environment, conversation, limits)
    segments = conversation.segments
    return Trajectory(
        task_id=task.id,
        sample=sample,
        segments=segments,
        messages=tuple(record.messages),
        stop_reason=stop,
        outcomes=tuple(record.outcomes),
        turn_rewards=_turn_rewards(record.turn_rewards),
        tags=dict(task.tags),
        anchors=tuple(record.anchors[: sum(s.kind == "action" for s in segments)]),
        timings=Timings(
            time.perf_counter() - begin - record.waited_s, record.model_s - record.waited_s, record.tools_s
        ),
    )


async def _play_in_time(
    task: Task,
    environment: Environment,
    conversation: ChatSession,
    limits: EpisodeLimits,
    record: _Record,
) -> StopReason:
    try:
        async with asyncio.timeout(limits.timeout_s) as deadline:
            limit_s = math.inf if limits.timeout_s is None else limits.timeout_s
            clock = PausableClock(limit_s, lambda left_s: _move(deadline, left_s))
            try:
                with episode_clock(clock):
                    return await _play(task, environment, conversation, limits, record)
            finally:
                record.waited_s = clock.stood_s
    except TimeoutError:
        if not deadline.expired():
            raise
        return StopReason.TIMEOUT


async def _play(
    task: Task,
    environment: Environment,
    conversation: ChatSession,
    limits: EpisodeLimits,
    record: _Record,
) -> StopReason:
    record.messages += await _world("start", lambda: environment.start(task), list, limits)
    record.shown = tuple(record.messages)
    stop = _shown(lambda: conversation.open(record.messages, environment.tools))
    turn = 0
    while stop is None:
        record.anchors.append(await _anchor(environment, record, limits))
        action = await _timed_act(conversation, record)
        if isinstance(action, StopReason):
            return action
        record.messages.append(action.message)
        if action.finish_reason == "length":
            return StopReason.TRUNCATED
        if _is_empty(action):
            return StopReason.EMPTY_ANSWER
        result = await _timed_step(environment, action, limits, record)
        turn += 1
        stop = _stop_after(result, turn, limits, record) or _observed(conversation, result)
    return stop


def _stop_after(result: StepResult, turn: int, limits: EpisodeLimits, record: _Record) -> StopReason | None:
    """Whether the environment's answer ends the episode."""
    if result.reward is not None and not math.isfinite(result.reward):
        raise WorldError(f"The environment's step gave the reward {result.reward}.")
    record.messages += result.messages
    record.shown = result.messages or record.shown
    record.outcomes += result.outcomes
    record.turn_rewards.append(result.reward)
    for outcome in (one for one in result.outcomes if one.call_id):
        record.error_streak = 0 if outcome.status is ToolStatus.OK else record.error_streak + 1
    if result.done:
        return StopReason.ANSWERED
    if record.error_streak >= limits.max_tool_errors:
        return StopReason.TOOL_ERRORS
    return StopReason.MAX_TURNS if turn >= limits.max_turns else None


async def _anchor(environment: Environment, record: _Record, limits: EpisodeLimits) -> str:
    """A hash of the state that the environment is in; of what it showed last, where it names no state."""
    if isinstance(environment, HasStateKey):
        named = environment

        async def ask() -> str:
            return named.anchor()

        state = await _world("anchor", ask, str, limits)
    else:
        shown = [[m["role"], m.get("name", ""), m.get("content", "")] for m in record.shown]
        state = json.dumps(shown, default=str)
    return hashlib.blake2b(state.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


def _is_empty(action: Action) -> bool:
    return not (action.calls or action.errors or action.message["content"].strip())


async def _timed_act(conversation: ChatSession, record: _Record) -> Action | StopReason:
    begin = time.perf_counter()
    try:
        return await conversation.act()
    except asyncio.CancelledError as error:
        if is_being_cancelled():
            raise
        raise EngineError("The policy's turn was cancelled from inside the engine.") from error
    finally:
        record.model_s += time.perf_counter() - begin


async def _timed_step(
    environment: Environment, action: Action, limits: EpisodeLimits, record: _Record
) -> StepResult:
    begin = time.perf_counter()
    result = await _world("step", lambda: environment.step(action), StepResult, limits)
    record.tools_s += time.perf_counter() - begin
    return result


async def _world(what: str, call: Callable[[], Awaitable[T]], expected: type[T], limits: EpisodeLimits) -> T:
    """Call the environment; whatever it raises is a failure of the infrastructure, with its own words."""
    try:
        async with asyncio.timeout(limits.environment_timeout_s) as deadline:
            with under(PausableClock(limits.environment_timeout_s, lambda left_s: _move(deadline, left_s))):
                result = await call()
    except LudusError:
        raise
    except BaseException as error:  # boundary: foreign code; the cause travels in the failure
        if isinstance(error, KeyboardInterrupt | GeneratorExit):
            raise
        if isinstance(error, asyncio.CancelledError) and is_being_cancelled():
            raise
        if isinstance(error, TimeoutError) and deadline.expired():
            raise WorldError(
                f"The environment's {what} took longer than {limits.environment_timeout_s:g} s.",
                "See rollout.environment_timeout_s.",
            ) from error
        raise WorldError(f"The environment's {what} raised {describe_error(error)}") from error
    if not isinstance(result, expected):
        raise WorldError(f"The environment's {what} gave {type(result).__name__}, not {expected.__name__}.")
    return result


def _move(deadline: asyncio.Timeout, left_s: float | None) -> None:
    """Have a deadline come in so many seconds, or not at all; one that has come stays."""
    if not deadline.expired():
        when = None if left_s is None or left_s == math.inf else asyncio.get_running_loop().time() + left_s
        deadline.reschedule(when)


def _observed(conversation: ChatSession, result: StepResult) -> StopReason | None:
    return _shown(lambda: conversation.observe(result.messages))


def _shown(show: Callable[[], StopReason | None]) -> StopReason | None:
    """Show messages of the environment to the policy; ones that cannot be rendered are its failure."""
    try:
        return show()
    except LudusError:
        raise
    except Exception as error:  # boundary: foreign messages in a foreign template
        raise WorldError(f"The environment's messages cannot be rendered: {describe_error(error)}") from error


async def _close(environment: Environment, conversation: ChatSession, limits: EpisodeLimits) -> None:
    try:
        conversation.close()
    finally:
        await _world("close", environment.close, object, limits)


def _turn_rewards(given: Sequence[float | None]) -> tuple[float, ...]:
    """One reward per step, 0 where none was given; empty where none was given at all."""
    return tuple(r or 0.0 for r in given) if any(r is not None for r in given) else ()


def scored(rewards: Sequence[Reward], task: Task, trajectory: Trajectory) -> Trajectory:
    """The trajectory with its rewards. Raises WorldError with the words of what a reward raises."""
    try:
        return score(rewards, task, trajectory)
    except LudusError:
        raise
    except Exception as error:  # boundary: foreign code; a reward that fails is never taken for 0
        raise WorldError(f"A reward of task {task.id} raised {describe_error(error)}") from error


def shares_of_turns(verifier: TurnVerifier, task: Task, trajectory: Trajectory) -> tuple[float, ...]:
    """What a turn verifier finds (`turn_shares`); empty for a trajectory that branches.

    Raise WorldError with the words of what it raises.
    """
    if len(trajectory.rows) > 1:
        return ()
    try:
        return turn_shares(verifier(task, trajectory))
    except LudusError:
        raise
    except Exception as error:  # boundary: foreign code; a verifier that fails is never taken for 0
        raise WorldError(f"The turn verifier of task {task.id} raised {describe_error(error)}") from error
