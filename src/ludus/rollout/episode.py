"""Run one episode: the model acts and the environment responds until a stop reason.

Returns a scored `Trajectory`, or one to be scored elsewhere, whatever the model and its tools do. Each
environment call times out after `environment_timeout_s` (unless it blocks the event loop or ignores
cancellation); waiting for a sandbox session does not count. Raises `WorldError` or `EngineError` for
infrastructure failures only, never because of model output. Always closes session and environment, also on
cancellation; `start`, `step` and `close` run in one asyncio task.
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

from ludus.envs.base import Environment, World
from ludus.envs.toolbox import describe_error
from ludus.errors import EngineError, LudusError, WorldError
from ludus.rewards.base import Reward, score
from ludus.rewards.code.turns import TurnVerifier, turn_shares
from ludus.rollout.chat_session import ChatSession
from ludus.sandbox.local.pausable_timeout import PausableClock, use_clock, use_episode_clock
from ludus.types import Action, Message, StepResult, StopReason, Task, Timings, ToolOutcome, ToolStatus, Trajectory

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class EpisodeLimits:
    """Limits of one episode: turns, consecutive tool errors, and seconds (None: no wall-clock limit)."""

    max_turns: int = 6
    max_tool_errors: int = 3
    timeout_s: float | None = None
    environment_timeout_s: float = 120.0


@dataclass
class _Record:
    """Data gathered during an episode."""

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
    """Return whether the running task was cancelled from outside."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def fresh_environment(world: World, task: Task) -> Environment:
    """Create the world's environment for one episode. Raises WorldError with the world's error."""
    try:
        return world.environment(task)
    except LudusError:
        raise
    except Exception as error:  # boundary: user code; the cause is chained
        raise WorldError(f"No environment for task {task.id}: {describe_error(error)}") from error


async def run_episode(
    task: Task, sample: int, environment: Environment, conversation: ChatSession, limits: EpisodeLimits
) -> Trajectory:
    """Run one episode to its end and score it."""
    trajectory = await play_episode(task, sample, environment, conversation, limits)
    return scored(environment.rewards, task, trajectory)


async def play_episode(
    task: Task, sample: int, environment: Environment, conversation: ChatSession, limits: EpisodeLimits
) -> Trajectory:
    """Run one episode to its end without scoring, except for turn rewards."""
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
    task: Task, environment: Environment, conversation: ChatSession, limits: EpisodeLimits, record: _Record
) -> StopReason:
    try:
        async with asyncio.timeout(limits.timeout_s) as deadline:
            limit_s = math.inf if limits.timeout_s is None else limits.timeout_s
            clock = PausableClock(limit_s, lambda left_s: _move(deadline, left_s))
            try:
                with use_episode_clock(clock):
                    return await _play(task, environment, conversation, limits, record)
            finally:
                record.waited_s = clock.paused_s
    except TimeoutError:
        if not deadline.expired():
            raise
        return StopReason.TIMEOUT


async def _play(
    task: Task, environment: Environment, conversation: ChatSession, limits: EpisodeLimits, record: _Record
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
    """Return the stop reason of the environment's response, or None."""
    if result.reward is not None and not math.isfinite(result.reward):
        raise WorldError(f"The environment's step returned the reward {result.reward}.")
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
    """Return a hash of the environment's state, or of its last messages if it has no state key."""
    if environment.implements("state_key"):

        async def read() -> str:
            return environment.state_key()

        state = await _world("state_key", read, str, limits)
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


async def _timed_step(environment: Environment, action: Action, limits: EpisodeLimits, record: _Record) -> StepResult:
    begin = time.perf_counter()
    result = await _world("step", lambda: environment.step(action), StepResult, limits)
    record.tools_s += time.perf_counter() - begin
    return result


async def _world(what: str, call: Callable[[], Awaitable[T]], expected: type[T], limits: EpisodeLimits) -> T:
    """Call the environment; its errors become WorldError with the original message."""
    try:
        async with asyncio.timeout(limits.environment_timeout_s) as deadline:
            with use_clock(PausableClock(limits.environment_timeout_s, lambda left_s: _move(deadline, left_s))):
                result = await call()
    except LudusError:
        raise
    except BaseException as error:  # boundary: user code; the cause is chained
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
    """Reschedule a deadline in seconds from now (None: no deadline), unless it has expired."""
    if not deadline.expired():
        when = None if left_s is None or left_s == math.inf else asyncio.get_running_loop().time() + left_s
        deadline.reschedule(when)


def _observed(conversation: ChatSession, result: StepResult) -> StopReason | None:
    return _shown(lambda: conversation.observe(result.messages))


def _shown(show: Callable[[], StopReason | None]) -> StopReason | None:
    """Show environment messages to the policy; raise WorldError if they cannot be rendered."""
    try:
        return show()
    except LudusError:
        raise
    except Exception as error:  # boundary: user messages in a user template
        raise WorldError(f"The environment's messages cannot be rendered: {describe_error(error)}") from error


async def _close(environment: Environment, conversation: ChatSession, limits: EpisodeLimits) -> None:
    try:
        conversation.close()
    finally:
        await _world("close", environment.close, object, limits)


def _turn_rewards(given: Sequence[float | None]) -> tuple[float, ...]:
    """Return one reward per step, 0 where missing; empty if there are none."""
    return tuple(r or 0.0 for r in given) if any(r is not None for r in given) else ()


def scored(rewards: Sequence[Reward], task: Task, trajectory: Trajectory) -> Trajectory:
    """Return the trajectory with its rewards. Raises WorldError with the reward's error."""
    try:
        return score(rewards, task, trajectory)
    except LudusError:
        raise
    except Exception as error:  # boundary: user code; a failed reward never counts as 0
        raise WorldError(f"A reward of task {task.id} raised {describe_error(error)}") from error


def shares_of_turns(verifier: TurnVerifier, task: Task, trajectory: Trajectory) -> tuple[float, ...]:
    """Return a turn verifier's result (`turn_shares`); empty for a branching trajectory.

    Raises WorldError with its error.
    """
    if len(trajectory.rows) > 1:
        return ()
    try:
        return turn_shares(verifier(task, trajectory))
    except LudusError:
        raise
    except Exception as error:  # boundary: user code; a failed verifier never counts as 0
        raise WorldError(f"The turn verifier of task {task.id} raised {describe_error(error)}") from error
