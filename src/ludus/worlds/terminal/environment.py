"""One episode in a shell, graded by the files that it leaves.

At the end the files are copied out of the session, which is closed. They are checked on the host
(`ludus.worlds.terminal.checks`), or by programs run in a fresh sandbox over some of them; no part of the grader
is ever in the session. If the task has services, the sandbox reports the running processes before the session
closes (`ludus.worlds.terminal.services`). The report is an outcome that the model does not see.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from ludus.envs.tool_env import ToolEnv, ToolLimits
from ludus.errors import WorldError
from ludus.rewards.base import Reward, truth_of
from ludus.rewards.code.turns import turn_report
from ludus.rewards.code.unit_tests import Suite, read_report
from ludus.rewards.extract import last_output
from ludus.tools.base import Tool, ToolError
from ludus.tools.workspace import Workspace
from ludus.types import Action, Message, StepResult, Task, ToolOutcome, ToolStatus, Trajectory
from ludus.worlds.terminal.bench.task import BenchTask
from ludus.worlds.terminal.checks import ProcessId, SessionState
from ludus.worlds.terminal.services import start_services
from ludus.worlds.terminal.task import TerminalTask

ShellTask = TerminalTask | BenchTask
"""The subject of an episode: a task of this world, or a Terminal-Bench task."""
VERDICT: Final = "verdict"
"""Tool name in the outcome that holds the report."""
read_verdict = last_output(VERDICT)
SETTLE_S: Final = 0.5
"""Wait before the final look at processes, because signals and starts take effect late."""


def made_progress(task: Task, trajectory: Trajectory) -> float:
    """Return 1 if some check newly holds at the end and every check that held at the start still does, else 0."""
    passed, suite = read_report(read_verdict(trajectory)).passed, truth_of(task, Suite)
    return float(any(test in passed for test in suite.fail_to_pass) and passed.issuperset(suite.pass_to_pass))


class TerminalEnv(ToolEnv):
    """See the module. `task` holds the files, the services and the checks; without tools no session is opened.

    With `check_turns` there is also a report after each turn with calls.
    """

    def __init__(
        self,
        tools: Sequence[Tool],
        rewards: Sequence[Reward],
        limits: ToolLimits,
        workspace: Workspace,
        task: ShellTask,
        check_turns: bool = False,
    ) -> None:
        super().__init__(tools, rewards, limits, [workspace] if tools else [])
        self._workspace = workspace
        self._task = task
        self._check_turns = check_turns and bool(tools)
        self._started: Mapping[str, ProcessId] = {}
        self._final: SessionState | None = None
        self._turns = 0

    async def start(self, task: Task) -> list[Message]:
        """Open the session with the task's files and services. Raises WorldError if a service does not start."""
        messages = await super().start(task)
        if self.tools and self._task.start.executable:
            await self._workspace.restore(self._task.start)
        if self.tools and self._task.services:
            try:
                self._started = await start_services(self._workspace, self._task.services, self._task.after_start)
            except ToolError as error:
                raise WorldError(f"The task's services cannot be started: {error}") from error
        return messages

    async def step(self, action: Action) -> StepResult:
        """Run the calls, or grade the final files; if the session lost them or has too many, no check holds."""
        result = await super().step(action)
        self._turns += 1
        if not result.done and not (self._check_turns and action.calls):
            return result
        try:
            state = await self._state(settle=result.done)
        except ToolError:
            outcomes = (_verdict({}),) if result.done else ()
        else:
            if result.done:
                await self._workspace.close()
                self._final = state
            report = await self._grade(state)
            outcomes = (_verdict(report) if result.done else turn_report(self._turns - 1, _text(report)),)
        return replace(result, outcomes=(*result.outcomes, *outcomes))

    async def grade_again(self) -> ToolOutcome | None:
        """Return the verdict of grading the final files once more."""
        return None if self._final is None else _verdict(await self._grade(self._final))

    async def _state(self, settle: bool) -> SessionState:
        """Return files and processes. Raises ToolError if the session fails."""
        if not self.tools:
            return SessionState(self._task.start.files, self._task.start.executable)
        if self._task.services and settle:
            await asyncio.sleep(SETTLE_S)
        found = await self._workspace.snapshot()
        processes = await self._workspace.processes() if self._task.services else ()
        return SessionState(found.files, found.executable, self._started, processes)

    async def _grade(self, state: SessionState) -> Mapping[str, bool]:
        return await self._task.grade(state, self._workspace.sandbox)


def _verdict(report: Mapping[str, bool]) -> ToolOutcome:
    return ToolOutcome("", VERDICT, ToolStatus.OK, _text(report))


def _text(report: Mapping[str, bool]) -> str:
    return json.dumps(dict(report), sort_keys=True)
