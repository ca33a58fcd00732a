"""Episodes of the code world: tool calls until the program is submitted, then the tests; tools and rewards."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Final, Literal

from ludus.envs.messages import assistant, tool_turn
from ludus.envs.tool_env import ToolEnv, ToolLimits
from ludus.rewards.base import Reward, truth_of
from ludus.rewards.code.turns import turn_report
from ludus.rewards.code.unit_tests import read_report, share_passed, suite_passes, thrift
from ludus.rewards.exact_match import well_formed
from ludus.rewards.extract import NotJson, last_output, read_json
from ludus.rewards.shaping import only_if
from ludus.tools.base import Tool, Traits, tool
from ludus.tools.workspace import python_tool
from ludus.types import Action, Message, StepResult, Task, ToolOutcome, ToolStatus, Trajectory
from ludus.worlds.code.grader import CodeGrader, CodeTruth, CodeVerdict, Grading, shorten

REPORT: Final = "report"
"""Tool name of the outcome with the report."""
_read = last_output(REPORT)
RUN_TESTS: Final = "run_tests"
_FENCE = "```"
_LANGUAGE = re.compile(r"[ \t]*(\w*)")
_PYTHON = ("", "python", "py", "python3")
_WAIT_S = 50.0
_cut = partial(shorten, longest=300)


def program_of(answer: str) -> str:
    """Return the program in an answer: the last fenced block of Python, or the whole text without a fence."""
    blocks = [text for language, text in _blocks(answer) if language.lower() in _PYTHON]
    if blocks:
        return blocks[-1]
    return "" if _FENCE in answer else answer


def _blocks(text: str) -> Iterator[tuple[str, str]]:
    """Yield language and text of the fenced blocks, in linear time; the last block may be unclosed."""
    begin = text.find(_FENCE)
    while begin >= 0 and (line := text.find("\n", begin)) >= 0:
        language = _LANGUAGE.match(text, begin + len(_FENCE))
        end = text.find(_FENCE, line)
        yield language[1] if language else "", text[line + 1 : end if end >= 0 else len(text)]
        begin = text.find(_FENCE, end + len(_FENCE)) if end >= 0 else -1


def run_tests_tool(grader: CodeGrader, truth: CodeTruth) -> Tool:
    """Return the tool `run_tests(code)`, which runs the visible tests."""
    cases = truth.visible

    async def run_tests(code: str) -> str:
        """Run a whole program against the tests that the task shows. The hidden tests are not among them.

        Args:
            code: the program.
        """
        if not cases:
            return "The task shows no tests: try its examples with python."
        return grading_text(await grader.grade(program_of(code), truth, cases), truth)

    seconds = grader.limits.wall_s * (len(cases) + 3) + _WAIT_S
    return tool(timeout_s=seconds, traits=Traits(idempotent=True))(run_tests)


def code_tools(grader: CodeGrader, truth: CodeTruth) -> tuple[Tool, ...]:
    """Return `python`, `run_tests` and `submit`, which are stateless."""
    limits = replace(grader.limits, output_bytes=64 * 1024)
    return python_tool(grader.sandbox, limits), run_tests_tool(grader, truth), submit_tool()


def submit_tool() -> Tool:
    """Return the tool `submit(answer)`, which ends the episode."""

    async def submit(answer: str) -> str:
        """Hand in the whole program. This ends the task.

        Args:
            answer: the program.
        """
        return answer

    return tool(traits=Traits(latency="instant", ends=True))(submit)


def grading_text(grading: Grading, truth: CodeTruth) -> str:
    """Return a grading as the model sees it."""
    if grading.broken:
        return f"The program does not run: {grading.broken}"
    passed = sum(one.passed for one in grading.verdicts)
    lines = [f"{passed} of {len(grading.verdicts)} shown tests pass."]
    return "\n".join([*lines, *(_line(one, truth) for one in grading.verdicts)])


def solution(truth: CodeTruth, with_tools: bool) -> list[Message]:
    """Return a test of the reference (if there are tools; output computed, not run), and the reference as an answer."""
    answer = program_message(truth.reference)
    if not (truth.visible and with_tools):
        return [answer]
    passed = Grading([CodeVerdict(case, True) for case in truth.visible])
    return [*tool_turn(0, RUN_TESTS, {"code": truth.reference}, grading_text(passed, truth)), answer]


def program_message(program: str) -> Message:
    """Return a program as an answer."""
    return assistant(f"```python\n{program}```")


def _line(verdict: CodeVerdict, truth: CodeTruth) -> str:
    case = verdict.case
    if truth.style == "function" and isinstance(case.given, tuple):
        given = f"{truth.entry}({_cut(', '.join(map(repr, case.given)))})"
    else:
        given = f"input {_cut(repr(case.given))}" if truth.style == "stdin" else _cut(str(case.given))
    if verdict.passed:
        return f"passed: {given}"
    due = "" if truth.style == "checks" else f", expected {_cut(repr(case.due))}"
    return f"FAILED: {given}: {verdict.failure}{due}"


def loads(task: Task, trajectory: Trajectory) -> float:
    """Return 1 if the program compiled and defined the function, else 0.

    If every program does (for printing tasks and given starts), a test with a nonempty output must pass too.
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
    """Return the outcome and the rewards with a weight; a share counts only if the program loads.

    The outcome is 1 if all tests pass, or the share that passes; the share of hidden tests is then omitted.
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
        """Run all tests on the answer again and return the report."""
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
    answers = [call.arguments.get("answer") for call in action.calls]
    return next((text for text in reversed(answers) if isinstance(text, str)), action.message["content"])
