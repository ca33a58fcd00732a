"""Agents that are not functions of this process: a program per rollout, or a client that asks for tasks over HTTP.

They receive the task's messages and the address of the policy, and end with an answer, a reward, or an error. Without a
reported reward, the rewards of the environment score the rollout, with the answer as its last message.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from queue import SimpleQueue

from ludus.config.environment import child_environment
from ludus.config.sections.rollout import AgentConfig
from ludus.envs.base import Environment, PolicySession
from ludus.errors import WorldError
from ludus.rewards.base import Reward
from ludus.types import Action, Message, StepResult, Task

_STDERR_TAIL = 2000  # characters of a program's standard error in a message


class AgentError(RuntimeError):
    """Raised if an agent reports a failure, or its program exits with an error."""


@dataclass(frozen=True)
class AgentResult:
    """What an agent ends with. `error` is empty unless it failed; a reported `reward` replaces the environment's."""

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

    def take(self) -> bool:
        """Return whether the client that calls this gets the task."""
        taken, self.is_open = self.is_open, False
        self._loop.call_soon_threadsafe(self._taken.set)
        return taken

    def touch(self) -> None:
        """Renew the lease."""
        self._loop.call_soon_threadsafe(self._seen.set)

    def finish(self, answer: str | None, reward: float | None, error: str) -> None:
        """Set the result."""
        self._result = AgentResult(answer, reward, error)
        self.touch()

    async def finished(self, lease_s: float) -> AgentResult:
        """Return the result. Raises WorldError if the agent is silent for longer than the lease."""
        try:
            await self._taken.wait()
            while self._result is None:
                self._seen.clear()
                async with asyncio.timeout(lease_s):
                    await self._seen.wait()
        except TimeoutError:
            raise WorldError(f"The agent of task {self.task.id} was silent for {lease_s:g} s.") from None
        finally:
            self.is_open = False
        return self._result

    def body(self) -> dict[str, object]:
        """Return the offer as JSON values."""
        task = {"id": self.task.id, "messages": list(self.messages), "tags": dict(self.task.tags)}
        return {"task": task, "base_url": self.address[0], "api_key": self.address[1]}


class ExternalAgent(Environment):
    """An episode that an external agent runs, with the prompt and the rewards of the world's environment."""

    def __init__(self, inner: Environment, settings: AgentConfig, offers: SimpleQueue[TaskOffer]) -> None:
        self._inner, self._settings, self._offers = inner, settings, offers
        self.tools, self.rewards = inner.tools, inner.rewards

    async def start(self, task: Task) -> list[Message]:
        return await self._inner.start(task)

    async def step(self, action: Action) -> StepResult:
        return await self._inner.step(action)

    async def drive(self, task: Task, policy: PolicySession) -> None:
        """Run the agent to its end. Raises AgentError if it fails, WorldError if it does not start or is silent."""
        messages = await self._inner.start(task)
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
            self.rewards = tuple(_reported(part, value) if part.outcome else part for part in self._inner.rewards)

    async def close(self) -> None:
        await self._inner.close()


def _reported(part: Reward, value: float) -> Reward:
    return replace(part, function=lambda task, trajectory: value)


async def run_program(
    settings: AgentConfig, task: Task, messages: Sequence[Message], address: tuple[str, str]
) -> AgentResult:
    """Run the program of a rollout; its standard output is the answer.

    Raises AgentError if it exits with an error or after `timeout_s`, and WorldError if it does not start. All of its
    processes are killed at the end.
    """
    data = json.dumps({"id": task.id, "messages": list(messages), "tags": dict(task.tags)})
    try:
        process = await asyncio.create_subprocess_exec(
            *settings.command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=agent_environment(address),
            start_new_session=True,
        )
    except OSError as error:
        raise WorldError(f"The agent {settings.command[0]!r} does not start: {error.strerror or error}.") from error
    try:
        async with asyncio.timeout(settings.timeout_s):
            out, err = await process.communicate(data.encode())
    except TimeoutError:
        raise AgentError(f"The agent took longer than {settings.timeout_s:g} s.") from None
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    if process.returncode:
        tail = err.decode(errors="replace").strip()[-_STDERR_TAIL:]
        raise AgentError(f"The agent exited with {process.returncode}: {tail}")
    text = out.decode(errors="replace").strip()
    return AgentResult(text or None)


def agent_environment(address: tuple[str, str]) -> dict[str, str]:
    """Return the environment variables of an agent's program, with the address where SDKs look for it."""
    base_url, api_key = address
    names = {"OPENAI_BASE_URL": base_url, "OPENAI_API_BASE": base_url, "OPENAI_API_KEY": api_key}
    names |= {"ANTHROPIC_BASE_URL": base_url.removesuffix("/v1"), "ANTHROPIC_API_KEY": api_key}
    return child_environment(names)
