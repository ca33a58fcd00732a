"""One episode in a shell, and the judgement of what it leaves.

At the end the files are taken out of the session, which is then over. They are judged on the host
(`ludus.envs.terminal.checks`), or by programs that run afresh over a few of them; nothing that judges is
ever in the session. The report is an outcome that the model does not see.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Final

from ludus.envs.tool_env import ToolEnv
from ludus.rewards.base import Reward, truth_of
from ludus.rewards.evidence import last_output
from ludus.rewards.suites import Suite, read_report
from ludus.sandbox.base import Snapshot
from ludus.tools.base import Tool, ToolError
from ludus.tools.workspace import Workspace
from ludus.types import Action, Message, StepResult, Task, ToolOutcome, ToolStatus, Trajectory

VERDICT: Final = "verdict"
"""The tool's name in the outcome that holds the report."""
read_verdict = last_output(VERDICT)


def mended(task: Task, trajectory: Trajectory) -> float:
    """1 if something holds at the end that did not at the start, else 0."""
    passed = read_report(read_verdict(trajectory)).passed
    return float(any(test in passed for test in truth_of(task, Suite).fail_to_pass))


Judge = Callable[[Snapshot], Awaitable[Mapping[str, bool]]]
"""What holds of the files at the end, by name. Raises WorldError where the sandbox breaks."""


class TerminalEpisode:
    """See the module. `start` has the files and which are executable, `judge` what they are asked for."""

    def __init__(self, plain: ToolEnv, workspace: Workspace | None, start: Snapshot, judge: Judge) -> None:
        self._plain = plain
        self._workspace = workspace
        self._start = start
        self._judge = judge
        self._left: Snapshot | None = None

    @property
    def tools(self) -> Sequence[Tool]:
        """Those of the episode."""
        return self._plain.tools

    @property
    def rewards(self) -> Sequence[Reward]:
        """Those of the world."""
        return self._plain.rewards

    async def start(self, task: Task) -> list[Message]:
        """Open the session with the task's files."""
        opening = await self._plain.start(task)
        if self._workspace is not None and self._start.executable:
            await self._workspace.restore(self._start)
        return opening

    async def step(self, action: Action) -> StepResult:
        """Run the calls; at the end judge the files."""
        result = await self._plain.step(action)
        if not result.done:
            return result
        return replace(result, outcomes=(*result.outcomes, _verdict(await self._report())))

    async def grade_again(self) -> ToolOutcome | None:
        """What another judgement of the files that were left says."""
        return None if self._left is None else _verdict(await self._judge(self._left))

    async def close(self) -> None:
        """End the session."""
        await self._plain.close()

    async def _report(self) -> Mapping[str, bool]:
        """What holds. A session whose files cannot be had, lost or too full, leaves nothing that holds."""
        if self._workspace is None:
            self._left = self._start
            return await self._judge(self._start)
        try:
            self._left = await self._workspace.snapshot()
        except ToolError:
            return {}
        await self._workspace.close()
        return await self._judge(self._left)


def _verdict(report: Mapping[str, bool]) -> ToolOutcome:
    return ToolOutcome("", VERDICT, ToolStatus.OK, json.dumps(dict(report), sort_keys=True))
