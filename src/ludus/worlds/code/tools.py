"""The tools of an episode: test a program against the visible tests, and hand it in."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from typing import Final

from ludus.tools.base import Tool, Traits, tool
from ludus.worlds.code.grader import CodeGrader, CodeTruth, CodeVerdict, Grading, shorten

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
