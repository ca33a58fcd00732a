"""One programming episode: tool calls until the program is handed in, then the tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final, Literal

from ludus.envs.tool_env import ToolEnv, ToolLimits
from ludus.rewards.base import Reward, truth_of
from ludus.rewards.code.turns import turn_report
from ludus.rewards.code.unit_tests import read_report, share_passed, suite_passes, thrift
from ludus.rewards.exact_match import well_formed
from ludus.rewards.extract import NotJson, last_output, read_json
from ludus.rewards.shaping import only_if
from ludus.tools.base import Tool
from ludus.types import Action, StepResult, Task, ToolOutcome, ToolStatus, Trajectory
from ludus.worlds.code.grader import CodeGrader, CodeTruth
from ludus.worlds.code.tools import RUN_TESTS, program_of

REPORT: Final = "report"
"""Tool name in the outcome that holds the report."""
_read = last_output(REPORT)


def loads(task: Task, trajectory: Trajectory) -> float:
    """Return 1 if the program compiled and defined the function, else 0.

    If any program would (the task is to print, or the start is given), a test with a nonempty output must pass too.
    """
    text = _read(trajectory)
    try:
        report = read_json(text)
    except NotJson:
        return 0.0
    truth = truth_of(task, CodeTruth)
    loaded = isinstance(report, dict) and report.get("loads") is True
    if truth.style != "stdin" and not truth.stub:
        return float(loaded)
    silent = {case.name for case in truth.cases if truth.style == "stdin" and not str(case.due).strip()}
    return float(loaded and bool(read_report(text).passed - silent))


def code_rewards(outcome: Literal["all", "share"], weights: Mapping[str, float]) -> tuple[Reward, ...]:
    """Return the outcome and the parts with a weight; a share counts only if the program loads.

    The outcome is 1 if all tests pass, or the share that passes; then the share of hidden tests is left out.
    """
    share = {"hidden_share": only_if(share_passed(_read, "hidden"), loads)} if outcome == "all" else {}
    parts = {**share, "loads": loads, "well_formed": only_if(well_formed, loads), "thrift": thrift(_read)}
    passes = suite_passes(_read) if outcome == "all" else only_if(share_passed(_read), loads)
    rewards = [Reward(name, part, weight=weights[name]) for name, part in parts.items() if weights[name]]
    return (Reward("tests", passes, outcome=True), *rewards)


class CodeEnv(ToolEnv):
    """One episode. At its end all tests run on the answer; their report is an outcome that the model does not see.

    With `check_turns` there is also a report for each program that the model passed to `run_tests`.
    """

    def __init__(
        self,
        tools: Sequence[Tool],
        rewards: Sequence[Reward],
        grader: CodeGrader,
        truth: CodeTruth,
        limits: ToolLimits | None = None,
        check_turns: bool = False,
    ) -> None:
        super().__init__(tools, rewards, limits)
        self._grader, self._truth, self._check_turns = grader, truth, check_turns
        self._measured = any(part.name == "thrift" for part in rewards)
        self._program: str | None = None
        self._turns = 0

    async def step(self, action: Action) -> StepResult:
        """Run the calls, or grade the answer."""
        result = await super().step(action)
        self._turns += 1
        if result.done:
            self._program = program_of(_answer(action))
            reports = [await self._graded(self._program)]
        else:
            reports = await self._turn_reports(action, result) if self._check_turns else []
        return replace(result, outcomes=(*result.outcomes, *reports))

    async def grade_again(self) -> ToolOutcome | None:
        """Return the report of another run of all tests on the answer."""
        return None if self._program is None else await self._graded(self._program)

    async def _turn_reports(self, action: Action, result: StepResult) -> list[ToolOutcome]:
        """Return reports of all tests on the programs that this turn tested, each program once."""
        succeeded = {one.call_id for one in result.outcomes if one.status is ToolStatus.OK}
        calls = [call for call in action.calls if call.name == RUN_TESTS and call.id in succeeded]
        programs = dict.fromkeys(program_of(str(call.arguments["code"])) for call in calls)
        gradings = [await self._grader.grade(program, self._truth, self._truth.cases) for program in programs]
        return [turn_report(self._turns - 1, grading.report(measured=False)) for grading in gradings]

    async def _graded(self, program: str) -> ToolOutcome:
        grading = await self._grader.grade(program, self._truth, self._truth.cases)
        return ToolOutcome("", REPORT, ToolStatus.OK, grading.report(self._measured))


def _answer(action: Action) -> str:
    """Return the `answer` argument of the call that ended the episode, or the text of the message."""
    handed = [call.arguments.get("answer") for call in action.calls]
    return next((text for text in reversed(handed) if isinstance(text, str)), action.message["content"])
