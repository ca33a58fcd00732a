"""Episodes of agents that own the loop: functions of this process, a program per rollout, or clients over HTTP.

Programs and clients receive the task's messages and the address of the policy, and end with an answer, a reward, or an
error. Without a reported reward, the rewards of the environment score the rollout, with the answer as its last message.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from queue import SimpleQueue
from tempfile import TemporaryDirectory
from typing import Final, Protocol
from urllib.parse import urlsplit

from ludus.config.environment import child_environment
from ludus.config.sections.rollout import AgentConfig, RolloutConfig
from ludus.envs.base import Environment, PolicySession, WrappedEnvironment
from ludus.envs.tool_env import describe_error
from ludus.errors import EngineError, WorldError
from ludus.plugins import plugin_line
from ludus.rollouts.agent_session import AgentSession
from ludus.rollouts.episode import ChatSession, is_being_cancelled, world_errors
from ludus.sandbox.local.namespaces import PausableTimeout
from ludus.tools.notes import Notes
from ludus.types import Message, Segment, StopReason, Task, Timings, Trajectory
from ludus.untrusted.worker import close_pipes, kill_group

log = logging.getLogger(__name__)

_STOP_S: Final = 10.0
"""Time for an agent to end after it was cancelled."""
_STDERR_END: Final = 1000  # characters of the start and the end of a program's standard error in a message


class AgentError(RuntimeError):
    """Raised if an agent reports a failure, or its program exits with an error."""


@dataclass(frozen=True)
class AgentResult:
    """Result of an agent. `error` is empty unless it failed; a reported `reward` replaces the environment's."""

    answer: str | None = None
    reward: float | None = None
    error: str = ""


@dataclass
class TaskOffer:
    """A task for a remote agent, with the address of its session. Clients take it on another thread."""

    task: Task
    messages: Sequence[Message]
    address: tuple[str, str]
    is_open: bool = True
    """Whether the rollout still waits for an agent."""
    _loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    _taken: asyncio.Event = field(default_factory=asyncio.Event)
    _seen: asyncio.Event = field(default_factory=asyncio.Event)
    _result: AgentResult | None = None
    _held: int = 0

    def take(self) -> bool:
        """Return whether the client that calls this gets the task."""
        taken, self.is_open = self.is_open, False
        try:
            self._loop.call_soon_threadsafe(self._taken.set)
        except RuntimeError:  # the loop of an earlier run is closed
            return False
        return taken

    def hold(self, num: int) -> None:
        """Count requests that wait for a reply; the lease does not run meanwhile."""
        self._held += num
        self.touch()

    def touch(self) -> None:
        """Renew the lease."""
        with suppress(RuntimeError):  # the run has ended
            self._loop.call_soon_threadsafe(self._seen.set)

    def finish(self, answer: str | None, reward: float | None, error: str) -> None:
        """Set the result."""
        self._result = AgentResult(answer, reward, error)
        self.touch()

    async def finished(self, lease_s: float) -> AgentResult:
        """Return the result. Raises WorldError if the agent makes no request for longer than the lease."""
        try:
            await self._taken.wait()
            while self._result is None:
                self._seen.clear()
                async with asyncio.timeout(None if self._held else lease_s):
                    await self._seen.wait()
        except TimeoutError:
            raise WorldError(f"The agent of task {self.task.id} made no request for {lease_s:g} s.") from None
        finally:
            self.is_open = False
        return self._result

    def body(self, origin: str = "") -> dict[str, object]:
        """Return the offer as JSON values."""
        task = {"id": self.task.id, "messages": list(self.messages), "tags": dict(self.task.tags)}
        base_url = f"{origin}{urlsplit(self.address[0]).path}" if origin else self.address[0]
        return {"task": task, "base_url": base_url, "api_key": self.address[1]}


class ExternalAgent(WrappedEnvironment):
    """An episode that an external agent runs, with the prompt and the rewards of the world's environment."""

    def __init__(self, inner: Environment, settings: AgentConfig, offers: SimpleQueue[TaskOffer]) -> None:
        super().__init__(inner)
        self._settings, self._offers = settings, offers
        self._reported = 0.0

    async def drive(self, task: Task, policy: PolicySession) -> None:
        """Run the agent to its end. Raises AgentError if it fails, WorldError if it does not start or is silent."""
        messages = await self.inner.start(task)
        if self._settings.command:
            result = await run_program(self._settings, task, messages, policy.address)
        else:
            offer = TaskOffer(task, messages, policy.address)
            policy.client = offer
            self._offers.put(offer)
            result = await offer.finished(self._settings.lease_s)
        if result.error:
            raise AgentError(result.error)
        policy.answer = result.answer
        value = policy.reward if result.reward is None else result.reward
        if value is not None:
            self._reported = value
            own = (replace(part, function=self._report) if part.outcome else part for part in self.inner.rewards)
            self.rewards = tuple(own)

    def _report(self, task: Task, trajectory: Trajectory) -> float:
        """Return the reported reward. A method, so that it is read in this process."""
        return self._reported


async def run_program(
    settings: AgentConfig, task: Task, messages: Sequence[Message], address: tuple[str, str]
) -> AgentResult:
    """Run the program of a rollout; its standard output is the answer.

    Raises AgentError if it exits with an error or after `timeout_s`, and WorldError if it does not start. At the end
    all of its processes are killed, and its folder of temporary files (`TMPDIR`) is removed.
    """
    data = json.dumps({"id": task.id, "messages": list(messages), "tags": dict(task.tags)})
    with TemporaryDirectory(prefix="ludus-agent-", ignore_cleanup_errors=True) as folder:
        return await _run_program(settings, data, agent_environment(address) | {"TMPDIR": folder})


async def _run_program(settings: AgentConfig, data: str, environment: Mapping[str, str]) -> AgentResult:
    try:
        process = await asyncio.create_subprocess_exec(
            *settings.command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=environment,
            start_new_session=True,
        )
    except OSError as error:
        raise WorldError(f"The agent {settings.command[0]!r} does not start: {error.strerror or error}.") from error
    exchange = asyncio.create_task(process.communicate(data.encode()))
    try:
        async with asyncio.timeout(settings.timeout_s):
            while process.returncode is None:  # `wait` waits for all who hold the pipes, too
                await asyncio.sleep(0.05)
            kill_group(process.pid)  # others that hold its standard output
            out, err = await exchange
    except TimeoutError:
        raise AgentError(f"The agent took longer than {settings.timeout_s:g} s.") from None
    finally:
        kill_group(process.pid)
        exchange.cancel()
        with suppress(TimeoutError):  # closing the pipes before the end is known makes asyncio warn
            async with asyncio.timeout(_STOP_S):
                while process.returncode is None:
                    await asyncio.sleep(0.01)
        close_pipes(process)
    if process.returncode:
        said = err.decode(errors="replace").strip()
        if len(said) > 2 * _STDERR_END:  # the message is at the start (Node) or at the end (Python)
            said = f"{said[:_STDERR_END]} ... {said[-_STDERR_END:]}"
        raise AgentError(f"The agent exited with {process.returncode}: {said}")
    text = out.decode(errors="replace").strip()
    return AgentResult(text or None)


def agent_environment(address: tuple[str, str]) -> dict[str, str]:
    """Return the environment variables of an agent's program, with the address where SDKs look for it."""
    base_url, api_key = address
    names = {"OPENAI_BASE_URL": base_url, "OPENAI_API_BASE": base_url, "OPENAI_API_KEY": api_key}
    names |= {"ANTHROPIC_BASE_URL": base_url.removesuffix("/v1"), "ANTHROPIC_API_KEY": api_key}
    return child_environment(names)


class AgentServer(Protocol):
    """A server of sessions for agents that are given a base URL. Clients that request tasks get the `offers`."""

    @property
    def offers(self) -> SimpleQueue[TaskOffer]: ...

    async def add(self, session: AgentSession) -> tuple[str, str]:
        """Accept requests for a session; return its base URL and API key."""

    def remove(self, session: AgentSession) -> None:
        """Refuse requests for a session."""


class Opponents(Protocol):
    """A past version of the policy."""

    @property
    def version(self) -> int: ...

    def chat(self, make_chat: Callable[[], ChatSession]) -> ChatSession:
        """Return a dialogue with the opponent, for the policy's."""


OPPONENT_VERSION: Final = "opponent_version"
"""Tag of a trajectory: the version of the opponent."""


@dataclass(frozen=True)
class AgentRunner:
    """Run episodes of agents. `server` is needed if they use a base URL; `serial` and `notes` as in `AgentSession`."""

    server: AgentServer | None = None
    serial: bool = False
    opponents: Opponents | None = None
    notes: Notes | None = None

    async def run(
        self,
        task: Task,
        sample: int,
        environment: Environment,
        make_chat: Callable[[], ChatSession],
        limits: RolloutConfig,
    ) -> Trajectory:
        """Run one episode to its end without scoring. Raises WorldError and EngineError."""
        async with self._session(make_chat, limits) as session:
            stop = await _drive(task, environment, session)
            if session.error is not None:
                raise session.error
            trajectory = trajectory_of(task, sample, session, stop)
        if self.opponents is None or session.opponent is None or not session.opponent.messages:
            return trajectory
        return replace(trajectory, tags={**task.tags, OPPONENT_VERSION: str(self.opponents.version)})

    @asynccontextmanager
    async def _session(
        self, make_chat: Callable[[], ChatSession], limits: RolloutConfig
    ) -> AsyncIterator[AgentSession]:
        past = self.opponents
        opponent = None if past is None else AgentSession(lambda: past.chat(make_chat), limits)
        session = AgentSession(make_chat, limits, self.serial, opponent=opponent, notes=self.notes or Notes())
        if self.server is not None:
            session.address = await self.server.add(session)
        try:
            yield session
        finally:
            session.close()
            if opponent is not None:
                opponent.close()
            if self.server is not None:
                self.server.remove(session)


def trajectory_of(task: Task, sample: int, session: AgentSession, stop: StopReason) -> Trajectory:
    """Return the rollout that a session has recorded, without rewards other than those of turns and agents."""
    started, begin = session.started
    total_s, model_s = time.perf_counter() - begin, sum(session.seconds)
    waited_s = session.timeout.paused_s if session.timeout is not None else 0.0
    segments = session.segments()
    return Trajectory(
        task_id=task.id,
        sample=sample,
        segments=segments,
        messages=tuple(_with_answer(session.messages or task.prompt, session.answer)),
        stop_reason=stop,
        turn_rewards=session.turn_rewards(),
        tags=dict(task.tags),
        shared_reward=True,
        agent_rewards=_rewards_of_agents(task, segments, session.agent_rewards, stop),
        timings=Timings(total_s - waited_s, model_s - waited_s, max(0.0, total_s - model_s), begin=started),
    )


def _rewards_of_agents(
    task: Task, segments: Sequence[Segment], rewards: Mapping[str, float], stop: StopReason
) -> dict[str, float]:
    """Return the rewards of the agents with a turn, 0 if a rollout that was cut short has none of an agent.

    Raises WorldError if another rollout has rewards, but not for all agents.
    """
    agents = {segment.agent for segment in segments} if rewards else set()
    if stop is not StopReason.ANSWERED:
        return {name: rewards.get(name, 0.0) for name in sorted(agents)}
    if missing := sorted(agents - rewards.keys()):
        raise WorldError(f"Task {task.id} has rewards of {', '.join(sorted(rewards))}, but not of {missing[0]}.")
    return {name: value for name, value in rewards.items() if name in agents}


def _with_answer(messages: Sequence[Message], answer: str | None) -> Sequence[Message]:
    """Return the messages, followed by the agent's answer unless it is the policy's last message."""
    if answer is None or messages[-1]["content"].strip() == answer.strip():
        return messages
    return [*messages, Message(role="assistant", content=answer)]


async def _run_agent(task: Task, environment: Environment, session: AgentSession) -> None:
    """Run the agent and close the environment, in one task. Raises RuntimeError if the agent ends its own task."""
    try:
        await environment.drive(task, session)
    except asyncio.CancelledError as error:
        if is_being_cancelled():
            raise
        raise RuntimeError("The agent cancelled itself.") from error
    except SystemExit as error:
        raise RuntimeError(f"The agent called sys.exit({error.code!r}).") from error
    finally:
        with world_errors("The environment's close raised"):
            await environment.close()


async def _drive(task: Task, environment: Environment, session: AgentSession) -> StopReason:
    """Run the agent until it returns, fails, or the rollout ends at a limit."""
    try:
        async with asyncio.timeout(session.limits.episode_timeout_s) as deadline:
            session.timeout = PausableTimeout(deadline)
            agent = asyncio.create_task(_run_agent(task, environment, session))
            ended = asyncio.create_task(session.ended.wait())
            try:
                await asyncio.wait({agent, ended}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for one in (agent, ended):
                    one.cancel()
                await asyncio.wait({agent, ended}, timeout=_STOP_S)
    except TimeoutError:
        if not deadline.expired():
            raise
        return StopReason.TIMEOUT
    if session.stop is not None:
        return session.stop
    return _result_of(agent, task, session)


def _result_of(agent: asyncio.Task[None], task: Task, session: AgentSession) -> StopReason:
    """Return the stop reason of an agent that has ended. Raises WorldError if it failed before the first reply."""
    error = agent.exception()
    if error is None and session.num_turns:
        return StopReason.ANSWERED
    if error is None:
        if session.refused:
            raise WorldError(
                f"The agent ended task {task.id} without a reply. A request was refused: {session.refused}"
            )
        raise WorldError(
            f"The agent ended task {task.id} without a request to the policy.", "Disable caches of replies in its SDK."
        )
    if isinstance(error, WorldError | EngineError):
        raise error
    where = plugin_line(error) if isinstance(error, Exception) else ""
    text = f"The agent raised {describe_error(error)}{f' ({where})' if where else ''}"
    if not session.num_turns:
        raise WorldError(text) from error
    log.warning("Task %s: %s", task.id, text)
    return StopReason.AGENT_FAILED
