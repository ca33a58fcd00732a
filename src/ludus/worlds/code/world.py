"""The code world: tasks, episodes and demonstrations.

An episode has tool calls until the program is submitted, then the tests run.
"""

from __future__ import annotations

import ast
import json
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from itertools import chain, islice
from pathlib import Path
from typing import Any, ClassVar, Final, Literal

from pydantic import Field, TypeAdapter

from ludus.envs.base import SandboxWorld, shipped_report
from ludus.envs.settings import WorldSettings, read_settings
from ludus.envs.task_archive import SPLITS, packed_lines
from ludus.envs.tool_env import ToolEnv, ToolLimits
from ludus.envs.tool_world import Dialogue, assistant, split_of, tool_turn
from ludus.errors import ConfigError
from ludus.rewards.base import Reward, truth_of
from ludus.rewards.code.turns import TurnVerifier, suite_progress, turn_report
from ludus.rewards.code.unit_tests import read_report, share_passed, suite_passes, thrift
from ludus.rewards.exact_match import well_formed
from ludus.rewards.extract import NotJson, last_output, read_json
from ludus.rewards.shaping import only_if
from ludus.tools.base import Tool, Traits, tool
from ludus.tools.workspace import python_tool
from ludus.types import Action, Message, StepResult, Task, ToolOutcome, ToolStatus, Trajectory
from ludus.worlds.code.grader import LIMITS, CodeGrader, CodeTruth, CodeVerdict, Grading, TestCase, shorten
from ludus.worlds.code.records import Format, load_code_tasks

Style = Literal["function", "stdin"]
ENTRY = "solve"
NUM_SHOWN = 3
"""Number of tests shown in the prompt."""
NUM_TESTS = 15
"""Number of tests per problem in the data file."""
FAMILIES = (
    *("lists", "folds", "texts", "words", "numbers", "tables"),
    *("spans", "graphs", "grids", "parsing", "planning", "machines"),
)
SYSTEM = {
    "tools": (
        "Write the program that is asked for. Try code with python; run_tests runs a whole program against "
        "the tests that are shown. Hand in the whole program with submit, or as your answer."
    ),
    "none": "Write the program that is asked for. Answer with the whole program.",
}
REPORT: Final = "report"
"""Tool name of the outcome with the report."""
_read = last_output(REPORT)
RUN_TESTS: Final = "run_tests"
_FENCE = "```"
_LANGUAGE = re.compile(r"[ \t]*(\w*)")
_PYTHON = ("", "python", "py", "python3")
_WAIT_S = 50.0
_cut = partial(shorten, longest=300)


class CodeSettings(WorldSettings):
    """Settings of the code world (`env.settings`)."""

    tasks: int = Field(500, ge=20, le=2_000)
    """Number of tasks in all splits; fewer if the data has fewer of these levels and families."""
    levels: tuple[Literal[1, 2, 3, 4, 5], ...] = Field((1, 2, 3, 4, 5), min_length=1)
    """Difficulty levels: 1 is one or two easy steps, 5 two hard ones or several in sequence."""
    families: tuple[str, ...] = Field(FAMILIES, min_length=1)
    """Families of the hardest step of a task."""
    styles: tuple[Style, ...] = Field(("function", "stdin"), min_length=1)
    """A function to write, or a program that reads stdin and prints."""
    tests: int = Field(NUM_TESTS, ge=8, le=NUM_TESTS)
    """Number of tests per task, three of which are shown."""
    tools: bool = True
    """Whether to offer `python`, `run_tests` and `submit`."""
    outcome: Literal["all", "share"] = "all"
    """Outcome of a program: 1 if all tests pass and else 0, or the share that passes."""
    share_weight: float = Field(0.25, ge=0, lt=0.5)
    """Weight of the share of hidden tests that pass, if the outcome is all or nothing."""
    loads_weight: float = Field(0.05, ge=0, lt=0.5)
    """Weight of a program that compiles and defines the function."""
    well_formed_weight: float = Field(0.05, ge=0, lt=0.5)
    """Weight of an episode that ends with an answer, has no failed call and whose program loads."""
    thrift_weight: float = Field(0.0, ge=0, lt=0.5)
    """Weight of unused time and memory of a correct program; measured, so not bit-reproducible."""
    timeout_s: float = Field(5.0, gt=0, le=60)
    """CPU time limit of a run in seconds."""
    flaw_rate: float = Field(0.5, ge=0, le=1)
    """Fraction of demonstrations that omit a step and submit an untested program."""
    check_turns: bool = False
    """Run all tests, invisibly to the model, on each program passed to `run_tests`, for the turn verifier."""
    data: str | None = None
    """File of tasks (JSON lines, also .gz) that replaces the generated ones."""
    format: Format = "own"
    """Format of that file."""
    seed: int = 0
    """Seed of the demonstrations."""


@dataclass(frozen=True)
class CodeProblem:
    """A programming task in one style.

    `values` are pairs of arguments and result, `texts` pairs of stdin and stdout; the first `NUM_SHOWN` are in `text`.
    `flawed` are incorrect programs that omit a step.
    """

    id: str
    split: str
    level: int
    family: str
    steps: tuple[str, ...]
    shape: str
    style: Style
    text: str
    reference: str
    flawed: tuple[str, ...]
    values: tuple[tuple[tuple[object, ...], object], ...]
    texts: tuple[tuple[str, str], ...]

    def truth(self, num_tests: int) -> CodeTruth:
        """Return the ground truth with `num_tests` tests: the first `NUM_SHOWN` are shown, the others hidden."""
        pairs: Sequence[tuple[object, object]] = self.texts if self.style == "stdin" else self.values
        shown = [TestCase(f"shown {number}", *pair) for number, pair in enumerate(pairs[:NUM_SHOWN], 1)]
        hidden = [TestCase(f"hidden {number}", *pair) for number, pair in enumerate(pairs[NUM_SHOWN:num_tests], 1)]
        cases = (*shown, *hidden)
        return CodeTruth(
            fail_to_pass=tuple(case.name for case in cases),
            hidden=frozenset(case.name for case in hidden),
            seconds=LIMITS.cpu_s,
            memory_bytes=float(LIMITS.memory_bytes),
            style=self.style,
            entry=ENTRY,
            cases=cases,
            reference=self.reference,
            shape=self.shape,
        )


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
    head = f"{sum(one.passed for one in grading.verdicts)} of {len(grading.verdicts)} shown tests pass."
    return "\n".join([head, *(_line(one, truth) for one in grading.verdicts)])


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


class CodeEnv(ToolEnv):
    """One episode. At its end all tests run on the answer; their report is an outcome that the model does not see.

    With `check_turns` there is also a report for each program that the model passed to `run_tests`.
    """

    def __init__(self, world: CodeWorld, truth: CodeTruth) -> None:
        super().__init__(world.tools(truth), world.rewards, world.limits)
        self._grader, self._truth, self._check_turns = world.grader, truth, world.settings.check_turns
        self._measured = any(part.name == "thrift" for part in world.rewards)
        self._program: str | None = None
        self._turns = 0

    async def step(self, action: Action) -> StepResult:
        result = await super().step(action)
        self._turns += 1
        if result.done:  # the call that ended the episode has an argument `answer`
            answers = [call.arguments.get("answer") for call in action.calls]
            texts = (text for text in reversed(answers) if isinstance(text, str))
            self._program = program_of(next(texts, action.message["content"]))
            reports = [await self._graded(self._program)]
        else:
            reports = await self._turn_reports(action, result) if self._check_turns else []
        return replace(result, outcomes=(*result.outcomes, *reports))

    async def grade_again(self) -> ToolOutcome | None:
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


@dataclass(frozen=True)
class CodeWorld(SandboxWorld):
    """Programming tasks with visible and hidden tests."""

    num_text_dialogues: ClassVar[int] = 600

    settings: CodeSettings = field(default_factory=CodeSettings)
    limits: ToolLimits = field(default_factory=ToolLimits)
    name: str = "code"

    @property
    def splits(self) -> Sequence[str]:
        """The names of the splits; `composition` only with generated tasks."""
        return tuple(self._task_lists)

    @cached_property
    def rewards(self) -> tuple[Reward, ...]:
        """The outcome and the rewards with a weight; a share of the tests counts only if the program loads."""
        given, all_pass = self.settings, self.settings.outcome == "all"
        passes = suite_passes(_read) if all_pass else only_if(share_passed(_read), loads)
        parts = (
            ("hidden_share", only_if(share_passed(_read, "hidden"), loads), given.share_weight if all_pass else 0.0),
            ("loads", loads, given.loads_weight),
            ("well_formed", only_if(well_formed, loads), given.well_formed_weight),
            ("thrift", thrift(_read), given.thrift_weight),
        )
        return (Reward("tests", passes, outcome=True), *(Reward(*part) for part in parts if part[-1]))

    @property
    def turn_verifier(self) -> TurnVerifier | None:
        return suite_progress(REPORT) if self.settings.check_turns and self.settings.tools else None

    @cached_property
    def grader(self) -> CodeGrader:
        """The grader, in the given or the default sandbox."""
        limits = replace(LIMITS, cpu_s=self.settings.timeout_s, wall_s=self.settings.timeout_s + 1)
        return CodeGrader(self.sandbox, limits)

    @cached_property
    def problems(self) -> Mapping[str, Sequence[CodeProblem]]:
        """The generated problems of each split, with their truth; they must not reach an environment."""
        return _problems(self.settings)

    @cached_property
    def _task_lists(self) -> Mapping[str, Sequence[Task]]:
        system = SYSTEM["tools" if self.settings.tools else "none"]
        if self.settings.data is not None:
            return load_code_tasks(Path(self.settings.data), self.settings.format, system)
        found: dict[str, list[Task]] = {split: [] for split in SPLITS}
        for one in chain.from_iterable(self.problems.values()):
            tags = {"split": one.split, "family": one.family, "level": str(one.level)}
            tags |= {"style": one.style, "steps": str(len(one.steps))}
            prompt = (Message(role="system", content=system), Message(role="user", content=one.text))
            found[one.split].append(Task(one.id, prompt, one.truth(self.settings.tests), tags))
        return found

    @cached_property
    def _by_id(self) -> Mapping[str, CodeProblem]:
        return {one.id: one for found in self.problems.values() for one in found}

    def tasks(self, split: str) -> Sequence[Task]:
        return split_of(self._task_lists, split, self.name)

    def environment(self, task: Task) -> CodeEnv:
        return CodeEnv(self, truth_of(task, CodeTruth))

    def tools(self, truth: CodeTruth) -> tuple[Tool, ...]:
        """Return `python`, `run_tests` and `submit`, which are stateless; none without tools."""
        limits = replace(self.grader.limits, output_bytes=64 * 1024)
        tools = (python_tool(self.grader.sandbox, limits), run_tests_tool(self.grader, truth), submit_tool())
        return tools if self.settings.tools else ()

    def demonstrations(self, seed: int) -> Iterator[Dialogue]:
        """Yield solutions of training tasks without end; some are flawed, unless the tasks are from a file."""
        rng = random.Random(f"demonstrations/{self.settings.seed}/{seed}")
        tasks = [task for task in self.tasks("train") if truth_of(task, CodeTruth).reference]
        while tasks:
            task = rng.choice(tasks)
            if self.settings.data is None and rng.random() < self.settings.flaw_rate:
                problem = self._by_id[task.id]
                flawed = rng.choice(problem.flawed) if len(problem.steps) > 1 else problem.flawed[0]
                yield Dialogue((*task.prompt, program_message(flawed)), self.tools(truth_of(task, CodeTruth)))
            else:
                yield self._solution(task)

    def expert(self, task: Task) -> Dialogue | None:
        return self._solution(task) if truth_of(task, CodeTruth).reference else None

    def _solution(self, task: Task) -> Dialogue:
        truth = truth_of(task, CodeTruth)
        messages = [program_message(truth.reference)]
        if truth.visible and self.settings.tools:  # first a test, whose output is computed, not run
            passed = Grading([CodeVerdict(case, True) for case in truth.visible])
            tested = tool_turn(0, RUN_TESTS, {"code": truth.reference}, grading_text(passed, truth))
            messages = [*tested, *messages]
        return Dialogue((*task.prompt, *messages), self.tools(truth))

    def difficulty_report(self) -> str:
        """Return the number of distinct tasks and the success rates of trivial policies; empty for tasks of a file."""
        if self.settings.data is not None:
            return ""
        return shipped_report(self, self.problems == _problems(CodeSettings()))

    def paraphrases(self, task: Task) -> Sequence[str]:
        """Return the solution as plain text, and reformatted in a longer answer."""
        reference = truth_of(task, CodeTruth).reference
        if not reference:
            return ()
        other = ast.unparse(ast.parse(reference))
        return (reference, f"First an idea:\n```python\nx = 1\n```\nAnd here it is.\n```py\n# done\n{other}\n```\n")


@cache
def _problems(settings: CodeSettings) -> Mapping[str, tuple[CodeProblem, ...]]:
    """Return the first problems of the chosen levels and families by split. Raises ConfigError if none is for training.

    A problem keeps its style in the data file if that is chosen, otherwise it gets the first chosen style.
    """
    adapter, styles = TypeAdapter(CodeProblem), settings.styles
    found: dict[str, list[CodeProblem]] = {split: [] for split in SPLITS}
    chosen = (row for row in _rows() if row["level"] in settings.levels and row["family"] in settings.families)
    for row in islice(chosen, settings.tasks):
        style = row["style"] if row["style"] in styles else styles[0]
        found[row["split"]].append(adapter.validate_python(row | row["styles"][style] | {"style": style}))
    if not found["train"]:
        raise ConfigError(
            "The levels and families have no problems for training.", "Add levels or families, or more tasks."
        )
    return {split: tuple(chosen) for split, chosen in found.items()}


@cache
def _rows() -> list[dict[str, Any]]:
    return [json.loads(line) for line in packed_lines("code", "problems")]


def make_code_world(settings: Mapping[str, object], limits: ToolLimits) -> CodeWorld:
    """Return the world with these settings. Raises ConfigError for invalid ones."""
    chosen = read_settings(CodeSettings, settings)
    if unknown := [family for family in chosen.families if family not in FAMILIES]:
        known = ", ".join(FAMILIES)
        raise ConfigError(f"Unknown family {unknown[0]!r} in env.settings.families.", f"Families: {known}.")
    if chosen.data is None and chosen.format != "own":
        raise ConfigError("env.settings.format is set without env.settings.data.", "Name the file of tasks.")
    world = CodeWorld(chosen, limits)
    if chosen.data is not None:
        world.tasks("train")
    return world
