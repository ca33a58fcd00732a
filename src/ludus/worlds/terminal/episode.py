"""One episode in a shell, and the judgement of what it leaves.

At the end the files are taken out of the session, which is then over. They are judged on the host
(`ludus.worlds.terminal.checks`), or by programs that run afresh over a few of them; nothing that judges is
ever in the session. Where services belong to the task, the sandbox tells before that what runs
(`ludus.worlds.terminal.services`). The report is an outcome that the model does not see.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from ludus.envs.tool_env import ToolEnv
from ludus.errors import WorldError
from ludus.rewards.base import Reward, truth_of
from ludus.rewards.code.turns import turn_report
from ludus.rewards.code.unit_tests import Suite, read_report
from ludus.rewards.extract import last_output
from ludus.sandbox.base import Sandbox, Snapshot
from ludus.tools.base import Tool, ToolError
from ludus.tools.workspace import Workspace
from ludus.types import Action, Message, StepResult, Task, ToolOutcome, ToolStatus, Trajectory
from ludus.worlds.terminal.bench.load import BenchTask
from ludus.worlds.terminal.job import TerminalJob
from ludus.worlds.terminal.services import NOTHING_RUNS, Identity, Running, begin

Assignment = TerminalJob | BenchTask
"""What an episode is about: a task of this world, or a foreign one."""
VERDICT: Final = "verdict"
"""The tool's name in the outcome that holds the report."""
read_verdict = last_output(VERDICT)


def mended(task: Task, trajectory: Trajectory) -> float:
    """1 if something holds at the end that did not at the start, and all that did still does, else 0."""
    passed, suite = read_report(read_verdict(trajectory)).passed, truth_of(task, Suite)
    return float(any(test in passed for test in suite.fail_to_pass) and passed.issuperset(suite.pass_to_pass))


MOMENT_S: Final = 0.5
"""What processes have after the last call to come to their end, or to begin: signals take effect later."""


class TerminalEpisode:
    """See the module. `job` has the files, the services, and what is asked of them.

    With `check_turns` a report after each turn with calls is left as an outcome that the model does not see.
    """

    def __init__(
        self, plain: ToolEnv, workspace: Workspace | None, job: Assignment, sandbox: Sandbox, check_turns: bool = False
    ) -> None:
        self._plain = plain
        self._workspace = workspace
        self._job = job
        self._sandbox = sandbox
        self._began: Mapping[str, Identity] = {}
        self._left: tuple[Snapshot, Running] | None = None
        self._check_turns = check_turns
        self._turns = 0

    @property
    def tools(self) -> Sequence[Tool]:
        """Those of the episode."""
        return self._plain.tools

    @property
    def rewards(self) -> Sequence[Reward]:
        """Those of the world."""
        return self._plain.rewards

    async def start(self, task: Task) -> list[Message]:
        """Open the session with the task's files and services. Raises WorldError where one does not start."""
        opening = await self._plain.start(task)
        if self._workspace is not None and self._job.start.executable:
            await self._workspace.restore(self._job.start)
        if self._workspace is not None and self._job.services:
            try:
                self._began = await begin(self._workspace, self._job.services, self._job.afterwards)
            except ToolError as error:
                raise WorldError(f"The task's services cannot be started: {error}") from error
        return opening

    async def step(self, action: Action) -> StepResult:
        """Run the calls; at the end judge the files."""
        result = await self._plain.step(action)
        self._turns += 1
        if not result.done:
            return replace(result, outcomes=(*result.outcomes, *await self._report_of_turn(action)))
        return replace(result, outcomes=(*result.outcomes, _verdict(await self._report())))

    async def grade_again(self) -> ToolOutcome | None:
        """What another judgement of the files that were left says."""
        return None if self._left is None else _verdict(await self._judged(*self._left))

    async def close(self) -> None:
        """End the session."""
        await self._plain.close()

    async def _report_of_turn(self, action: Action) -> list[ToolOutcome]:
        """What holds after this turn; nothing where that is not asked, or the session does not tell."""
        if not self._check_turns or self._workspace is None or not action.calls:
            return []
        try:
            now = await self._take(self._workspace)
        except ToolError:
            return []
        return [turn_report(self._turns - 1, _text(await self._judged(*now)))]

    async def _report(self) -> Mapping[str, bool]:
        """What holds. A session whose files cannot be had, lost or too full, leaves nothing that holds."""
        if self._workspace is None:
            self._left = self._job.start, NOTHING_RUNS
            return await self._judged(*self._left)
        try:
            if self._job.services:
                await asyncio.sleep(MOMENT_S)
            left = await self._take(self._workspace)
        except ToolError:
            return {}
        await self._workspace.close()
        self._left = left
        return await self._judged(*left)

    async def _take(self, workspace: Workspace) -> tuple[Snapshot, Running]:
        """The files and what runs. Raises ToolError where the session does not tell."""
        files = await workspace.snapshot()
        now = await workspace.processes() if self._job.services else ()
        return files, Running(self._began, now)

    async def _judged(self, files: Snapshot, running: Running) -> Mapping[str, bool]:
        return await self._job.judge(files, self._sandbox, running)


def _verdict(report: Mapping[str, bool]) -> ToolOutcome:
    return ToolOutcome("", VERDICT, ToolStatus.OK, _text(report))


def _text(report: Mapping[str, bool]) -> str:
    return json.dumps(dict(report), sort_keys=True)
