"""The research world: tasks, environment and demonstrations.

The mistakes in demonstrations are systematic, because random noise averages out in training: a flawed solver stops
after the first page, or ignores one of the conditions.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import count, islice
from typing import Annotated, Final, Literal

from pydantic import Field, model_validator

from ludus.envs.base import SandboxWorld
from ludus.envs.settings import WorldSettings, read_settings
from ludus.envs.task_archive import SPLITS, split_sizes
from ludus.envs.tool_env import ToolEnv, ToolLimits
from ludus.envs.tool_world import Dialogue, assistant, check_split, tool_turn
from ludus.errors import ConfigError
from ludus.rewards.base import Reward
from ludus.rewards.code.turns import Progress, TurnVerifier, outcomes_by_turn
from ludus.rewards.exact_match import exact_match
from ludus.rewards.rubric import Rubric
from ludus.rewards.shaping import only_if
from ludus.tools.base import Tool
from ludus.tools.workspace import python_tool
from ludus.types import JSON, Message, Task, Trajectory
from ludus.worlds.research.pages import FIND, OPEN, Web, contains, fill, opened_page
from ludus.worlds.research.questions import LEVELS, MAX_ROWS, Level, Question, Step, questions, shapes_of
from ludus.worlds.research.reports import ExpectedReport, ReportScope, Sources, judge, report_score, reports

COMPUTED: Final = 5
"""The level that needs the tool `python`."""
_PARTS = re.compile(r" \(part \d+ of (\d+)\)$")


class ResearchSettings(WorldSettings):
    """Settings of the research world (`env.settings`)."""

    tasks: Literal["questions", "report"] = "questions"
    """Questions with a short answer, or reports judged by a rubric."""
    levels: tuple[Level, ...] = Field((1, 2, 3, 4), min_length=1)
    """Levels of the questions: the number of pages that a solution needs, at most 4; level 5 needs pages and a
    program."""
    labels: Literal["titles", "numbers"] = "titles"
    """What names the places in a list and answers a question: titles, or numbers, which a small model learns to copy
    sooner. Numbers are possible on level 1, and in reports without pages of places, only."""
    num_tasks: int = Field(1000, ge=20)
    """Number of training tasks; fewer if there are not as many. The other splits have a share of it."""
    results: int = Field(3, ge=1, le=10)
    """Default number of results of a search."""
    part_chars: int = Field(240, ge=100)
    """Maximum length of a part of a page, of whole lines."""
    injected: float = Field(0.0, ge=0, le=1)
    """Fraction of the pages that contain an order to the reader."""
    require_opened: bool = False
    """Whether a right answer counts only if the pages that prove it were opened."""
    kinds: tuple[Literal["airport", "city"], ...] = Field(("airport", "city"), min_length=1)
    """Kinds of places of the reports."""
    sources: Sources = "places"
    """What reports are written from: the list of the country and the page of each place, which has the distance from
    the nearest one; the list alone; or a list of some places and their values in the request, without tools.
    `stop_early` applies to places only."""
    sizes: tuple[Annotated[int, Field(ge=2)], ...] = Field((3, 4, 5, 6), min_length=1)
    """Numbers of places of the reports."""
    max_rows: int = Field(MAX_ROWS, ge=3)
    """Maximum length of the list that a report selects its places from."""
    threshold: float = Field(0.8, gt=0, le=1)
    """Score of the rubric from which a report is a success."""
    stop_early: float = Field(0.3, ge=0, le=1)
    """Fraction of the demonstrations that answer after the first page."""
    ignore_condition: float = Field(0.3, ge=0, le=1)
    """Fraction of the demonstrations that answer with a near miss, or with a report on half of the places."""
    seed: int = 0
    """Seed of the tasks and of the demonstrations."""

    @model_validator(mode="after")
    def _selects_places(self) -> ResearchSettings:
        if self.tasks != "report" and (
            unused := sorted(self.model_fields_set & {"kinds", "sources", "sizes", "max_rows"})
        ):
            raise ValueError(f"{' and '.join(unused)} apply to reports, but tasks = {self.tasks!r}")
        if min(self.sizes) >= self.max_rows:
            raise ValueError(f"no list of at most max_rows = {self.max_rows} has more places than sizes = {self.sizes}")
        return self

    @model_validator(mode="after")
    def _numbers_are_answers(self) -> ResearchSettings:
        one_list = self.sources != "places" if self.tasks == "report" else self.levels == (1,)
        if self.labels == "numbers" and not one_list:
            raise ValueError("labels = 'numbers' needs questions with levels = [1], or reports without pages of places")
        return self


@dataclass
class Reader:
    """A solver with the tools, and the messages of its calls."""

    web: Web
    search: Tool
    messages: list[Message] = field(default_factory=list)
    pages: dict[str, str] = field(default_factory=dict)
    """What was read of each page, by title."""

    @property
    def seen(self) -> str:
        """All outputs so far."""
        return "\n".join(one["content"] for one in self.messages)

    def call(self, tool: str, output: str, arguments: Mapping[str, JSON]) -> str:
        """Append a call with its output."""
        self.messages.extend(tool_turn(len(self.messages) // 2, tool, arguments, output))
        return output

    def read(self, step: Step) -> None:
        """Search for a page that no link leads to, open it, and read until a line has the clues.

        Numbered rows are looked for before the page is opened.
        """
        title = step.title
        if title not in self.seen:
            self.call(self.search.name, str(self.search.function(title)), {"query": title})
        if self.web.numbered and self._find(step):
            return
        if title not in self.pages:
            self.pages[title] = self.call(OPEN, self.web.open(title), {"page": title})
        several = _PARTS.search(self.pages[title].split("\n")[0])
        is_read = _shows(self.pages[title], step) or (several is not None and self._find(step))
        for part in range(2, int(several[1]) + 1 if several else 0):
            if not is_read:
                self.pages[title] += "\n" + self.call(OPEN, self.web.open(title, part), {"page": title, "part": part})
                is_read = _shows(self.pages[title], step)

    def _find(self, step: Step) -> bool:
        """Find the clues on the page, one after the other; return whether a line with all of them was found."""
        return any(
            _shows(self.call(FIND, self.web.find(step.title, clue), {"page": step.title, "text": clue}), step)
            for clue in step.clues
        )


def _shows(text: str, step: Step) -> bool:
    """Return whether a line has all clues of a step, if it has any."""
    return bool(step.clues) and any(all(contains(line, clue) for clue in step.clues) for line in text.split("\n"))


def solve(
    truth: Question | ExpectedReport, reader: Reader, settings: ResearchSettings, rng: random.Random
) -> list[Message]:
    """Return the messages after a request, with the mistakes that the settings allow."""
    stops, ignores = rng.random() < settings.stop_early, rng.random() < settings.ignore_condition
    if isinstance(truth, ExpectedReport):
        for step in truth.steps[:1] if stops else truth.steps:
            reader.read(step)
        items = truth.items[: len(truth.items) // 2] if ignores else truth.items
        if stops:
            items = tuple(one._replace(distance=rng.randint(5, 400)) for one in items)
        return [*reader.messages, assistant(replace(truth, items=items).solution())]
    for step in truth.steps:
        reader.read(step)
        if stops and step is not truth.steps[-1]:
            return [*reader.messages, assistant(step.guess)]
        if ignores and step.title in reader.web.lists:
            shown = [one for one in truth.near_misses if contains(reader.seen, one)]
            return [*reader.messages, assistant(rng.choice(shown or truth.near_misses))]
    answer = truth.accepted[0]
    if truth.program:
        reader.call("python", answer, {"code": truth.program})
    return [*reader.messages, assistant(answer)]


def _solved(task: Task) -> Question | ExpectedReport:
    """Return the truth. Raises TypeError for a task of another world."""
    if not isinstance(task.truth, Question | ExpectedReport):
        raise TypeError(f"task {task.id}: the truth is a {type(task.truth).__name__}, not of this world")
    return task.truth


def opened(trajectory: Trajectory) -> frozenset[str]:
    """Return the titles of the pages that the episode opened."""
    return frozenset(filter(None, map(opened_page, trajectory.outcomes)))


def coverage(task: Task, trajectory: Trajectory) -> float:
    """Return the share of the pages of the solution that were opened."""
    pages = _solved(task).pages
    return len(pages & opened(trajectory)) / len(pages) if pages else 1.0


def proven(task: Task, trajectory: Trajectory) -> float:
    """Return 1 if all pages that prove the answer were opened, else 0."""
    return float(_solved(task).required <= opened(trajectory))


def rubric(task: Task, trajectory: Trajectory) -> float:
    """Return the score of the report, in [0, 1]."""
    truth = _solved(task)
    if not isinstance(truth, ExpectedReport):
        return 0.0
    return report_score(truth, judge(truth, trajectory.answer, opened(trajectory)))


def pages_by_turn(task: Task, trajectory: Trajectory) -> Progress:
    """Return the milestones: the pages of the solution that each turn opened."""
    pages = _solved(task).pages
    reached = [set(pages).intersection(map(opened_page, own)) for own in outcomes_by_turn(trajectory)]
    return Progress(reached, len(pages))


@dataclass(frozen=True)
class ResearchWorld(SandboxWorld):
    """Questions and reports on a web of linked pages."""

    settings: ResearchSettings = field(default_factory=ResearchSettings)
    limits: ToolLimits = field(default_factory=ToolLimits)
    name: str = "research"
    turn_verifier: TurnVerifier = pages_by_turn
    _tasks: dict[str, tuple[Task, ...]] = field(default_factory=dict, repr=False, compare=False)

    @property
    def splits(self) -> Sequence[str]:
        """The names of the splits; `composition` only with levels that have held-out shapes."""
        composed = self.settings.tasks == "questions" and shapes_of("composition", self.settings.levels)
        return SPLITS if composed else SPLITS[:3]

    @property
    def runs_programs(self) -> bool:
        """Whether the tools include `python`."""
        return self.settings.tasks == "questions" and COMPUTED in self.settings.levels

    @cached_property
    def web(self) -> Web:
        """The pages."""
        return Web(self.settings.part_chars, self.settings.injected, self.settings.labels == "numbers")

    @cached_property
    def tools(self) -> tuple[Tool, ...]:
        """The stateless tools of every episode."""
        if self.settings.sources == "shown":
            return ()
        found = self.web.tools(self.settings.results)
        return (*found, python_tool(self.sandbox)) if self.runs_programs else found

    @cached_property
    def rewards(self) -> tuple[Reward, ...]:
        """The outcome; coverage and the score of reports are reported only."""
        given = self.settings
        covered = Reward("coverage", coverage, weight=0.0)
        gates = (proven,) if given.require_opened else ()

        def accepted(task: Task, trajectory: Trajectory) -> float:
            return float(rubric(task, trajectory) >= given.threshold)

        if given.tasks == "report":
            outcome = Reward("accepted", only_if(accepted, *gates), outcome=True)
            return outcome, Reward("rubric", rubric, weight=0.0), covered
        return Reward("exact_match", only_if(exact_match, *gates), outcome=True), covered

    def tasks(self, split: str) -> Sequence[Task]:
        check_split(split, self.splits, self.name)
        if split not in self._tasks:
            num = split_sizes(self.settings.num_tasks, None)[split]
            made = islice(self._truths(split, num, str(self.settings.seed)), num)
            self._tasks[split] = tuple(self._task(truth, split, number) for number, truth in enumerate(made))
        return self._tasks[split]

    def environment(self, task: Task) -> ToolEnv:
        return ToolEnv(self.tools, self.rewards, self.limits)

    def demonstrations(self, seed: int) -> Iterator[Dialogue]:
        """Yield dialogues of the flawed solver on requests about the countries of the training split."""
        if not self.tasks("train"):
            raise ConfigError("No country has a list for such reports.", "Set env.settings.max_rows, kinds or sizes.")
        rng = random.Random(f"demonstrations:{self.settings.seed}:{seed}")
        for chunk in count():
            for truth in self._truths("train", 200, f"{self.settings.seed}/{seed}/{chunk}"):
                yield self._dialogue(truth, self.settings, rng)

    def expert(self, task: Task) -> Dialogue:
        return self._dialogue(_solved(task), self._flawless, random.Random(task.id))

    def cheats(self, task: Task) -> Mapping[str, Sequence[Message]]:
        """Return wrong answers that look right, and right ones without opened pages where these must not count."""
        truth = _solved(task)
        if isinstance(truth, Question):
            every = ", ".join([truth.accepted[0], *truth.near_misses])
            wrong = {"every candidate": every, "near miss": truth.near_misses[0], "other one": truth.near_misses[-1]}
            wrong |= {"unopened": truth.accepted[0]} if self.settings.require_opened else {}
            return {name: [assistant(text)] for name, text in wrong.items()}
        calls, text = self.expert(task).messages[len(task.prompt) : -1], truth.solution()
        numbers = ", ".join(re.findall(r"\d+ (?:km|m|people)\b", text))
        wrong = {
            "made-up facts": re.sub(r"\d+(?= (?:km|m|people)\b)", lambda found: str(int(found[0]) + 1), text),
            "everything": "\n".join([*(f"{one.title}: {numbers}." for one in truth.items), text]),
            "half": replace(truth, items=truth.items[: len(truth.items) // 2]).solution(),
        }
        told = {name: [*calls, assistant(text)] for name, text in wrong.items()}
        return told | ({"unopened": [assistant(text)]} if truth.pages else {})

    def rubric(self, task: Task) -> Rubric | None:
        truth = _solved(task)
        return truth.rubric if isinstance(truth, ExpectedReport) else None

    def rubric_checks(self, task: Task, trajectory: Trajectory) -> Mapping[str, bool]:
        truth = _solved(task)
        return judge(truth, trajectory.answer, opened(trajectory)) if isinstance(truth, ExpectedReport) else {}

    def reader(self) -> Reader:
        """Return a solver that has read nothing."""
        return Reader(self.web, self.web.tools(self.settings.results)[0])

    def texts(self) -> Iterator[str]:
        """Yield descriptions of the tools, then dialogues as text, to train a tokenizer on."""
        for dialogue in islice(self.demonstrations(seed=0), self.num_text_dialogues):
            for one in dialogue.tools:
                yield f"{one.name}({', '.join(one.arguments.model_fields)}) {one.description}"
            yield from dialogue.texts()

    @cached_property
    def _flawless(self) -> ResearchSettings:
        return self.settings.model_copy(update={"stop_early": 0.0, "ignore_condition": 0.0})

    def _truths(self, split: str, num: int, seed: str) -> Iterator[Question | ExpectedReport]:
        if self.settings.tasks == "report":
            given = self.settings
            scope = ReportScope(given.kinds, given.sizes, given.max_rows, given.sources, self.web.numbered)
            return reports(self.web.facts, split, num, seed, scope)
        found = questions(self.web.facts, split, shapes_of(split, self.settings.levels), num, seed)
        if not self.web.numbered:
            return found
        places = self.web.facts.places
        named = (one.renamed(lambda title: str(self.web.number(places[title]))) for one in found)
        return (one for one in named if not contains(one.text, one.accepted[0]))

    def _opening(self, truth: Question | ExpectedReport) -> tuple[Message, ...]:
        about = ["python" if self.runs_programs else "questions"]
        if isinstance(truth, ExpectedReport):
            about = ["shown" if truth.rows else "report", *(["numbered"] if self.web.numbered else [])]
        system = Message(role="system", content=" ".join(fill("system", one, {}) for one in about))
        return system, Message(role="user", content=truth.text)

    def _task(self, truth: Question | ExpectedReport, split: str, number: int) -> Task:
        tags = (
            {"split": split, "family": f"report on {len(truth.pages) - 1}"}
            if isinstance(truth, ExpectedReport)
            else {"split": split, "family": f"level {LEVELS[truth.shape]}", "shape": " ".join(truth.shape)}
        )
        return Task(f"{split}/{number}", self._opening(truth), truth, tags | {"checkpoints": str(len(truth.pages))})

    def _dialogue(self, truth: Question | ExpectedReport, settings: ResearchSettings, rng: random.Random) -> Dialogue:
        return Dialogue((*self._opening(truth), *solve(truth, self.reader(), settings, rng)), self.tools)


def make_research_world(settings: Mapping[str, object], limits: ToolLimits) -> ResearchWorld:
    """Build the world (the registered factory). Raises ConfigError for invalid settings."""
    return ResearchWorld(settings=read_settings(ResearchSettings, settings), limits=limits)
