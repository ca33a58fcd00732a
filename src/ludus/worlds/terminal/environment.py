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
from ludus.sandbox.base import Snapshot
from ludus.tools.base import Tool, ToolError
from ludus.tools.workspace import Workspace
from ludus.types import Action, Message, StepResult, Task, ToolOutcome, ToolStatus, Trajectory
from ludus.worlds.terminal.bench.load import BenchTask
from ludus.worlds.terminal.checks import NOTHING_RUNS, Identity, Running
from ludus.worlds.terminal.job import TerminalJob
from ludus.worlds.terminal.services import start_services

Assignment = TerminalJob | BenchTask
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
    """See the module. `job` holds the files, the services and the checks; without tools no session is opened.

    With `check_turns` there is also a report after each turn with calls.
    """

    def __init__(
        self,
        tools: Sequence[Tool],
        rewards: Sequence[Reward],
        limits: ToolLimits,
        workspace: Workspace,
        job: Assignment,
        check_turns: bool = False,
    ) -> None:
        super().__init__(tools, rewards, limits, [workspace] if tools else [])
        self._workspace = workspace
        self._job = job
        self._check_turns = check_turns and bool(tools)
        self._identities: Mapping[str, Identity] = {}
        self._final: tuple[Snapshot, Running] | None = None
        self._turns = 0

    async def start(self, task: Task) -> list[Message]:
        """Open the session with the task's files and services. Raises WorldError if a service does not start."""
        messages = await super().start(task)
        if self.tools and self._job.start.executable:
            await self._workspace.restore(self._job.start)
        if self.tools and self._job.services:
            try:
                self._identities = await start_services(self._workspace, self._job.services, self._job.afterwards)
            except ToolError as error:
                raise WorldError(f"The task's services cannot be started: {error}") from error
        return messages

    async def step(self, action: Action) -> StepResult:
        """Run the calls, or grade the final files."""
        result = await super().step(action)
        self._turns += 1
        reports = [_verdict(await self._final_report())] if result.done else await self._turn_report(action)
        return replace(result, outcomes=(*result.outcomes, *reports))

    async def grade_again(self) -> ToolOutcome | None:
        """Return the verdict of grading the final files once more."""
        return None if self._final is None else _verdict(await self._graded(*self._final))

    async def _turn_report(self, action: Action) -> list[ToolOutcome]:
        """Return the report after a turn; nothing if not requested or the session fails."""
        if not self._check_turns or not action.calls:
            return []
        try:
            now = await self._state()
        except ToolError:
            return []
        return [turn_report(self._turns - 1, _text(await self._graded(*now)))]

    async def _final_report(self) -> Mapping[str, bool]:
        """Grade the final state; if the session lost its files or has too many, no check holds."""
        if not self.tools:
            self._final = self._job.start, NOTHING_RUNS
            return await self._graded(*self._final)
        try:
            if self._job.services:
                await asyncio.sleep(SETTLE_S)
            final = await self._state()
        except ToolError:
            return {}
        await self._workspace.close()
        self._final = final
        return await self._graded(*final)

    async def _state(self) -> tuple[Snapshot, Running]:
        """Return files and processes. Raises ToolError if the session fails."""
        files = await self._workspace.snapshot()
        now = await self._workspace.processes() if self._job.services else ()
        return files, Running(self._identities, now)

    async def _graded(self, files: Snapshot, running: Running) -> Mapping[str, bool]:
        return await self._job.grade(files, self._workspace.sandbox, running)


def _verdict(report: Mapping[str, bool]) -> ToolOutcome:
    return ToolOutcome("", VERDICT, ToolStatus.OK, _text(report))


def _text(report: Mapping[str, bool]) -> str:
    return json.dumps(dict(report), sort_keys=True)
