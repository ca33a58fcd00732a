"""Shared parts of the probes: episodes, also continued from recorded ones, and reports with intervals over tasks."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean

from ludus.errors import UserError
from ludus.evaluation import stats
from ludus.evaluation.stats import Interval
from ludus.evaluation.tables import ReportTable, format_rate
from ludus.rewards.base import success
from ludus.rewards.exact_match import normalise
from ludus.rewards.extract import short_answers
from ludus.rollouts.episode import ChatSession, EngineChatSession, Grant, RestoreError
from ludus.rollouts.ledger import RolloutKey
from ludus.rollouts.openai_client import ChatCompletion, OpenAIChatSession, WireMessage
from ludus.rollouts.scheduler import RolloutRequest, SamplingPlan, Scheduler
from ludus.types import JSON, Action, Segment, StopReason, Task, Trajectory, grouped

MakeScheduler = Callable[[SamplingPlan], Scheduler]
"""Callable that returns the scheduler of a model for one round of episodes."""


@dataclass(frozen=True, slots=True)
class ProbePlan:
    """Tasks of a probe, attempts per task, temperature and seed."""

    tasks: Sequence[Task]
    samples: int
    temperature: float
    seed: int

    @property
    def sampling(self) -> SamplingPlan:
        """The sampling of a round; equal rounds have equal random numbers."""
        return SamplingPlan("probe", self.temperature, self.seed)

    def requests(self, samples: int = 1, first: int = 0) -> list[RolloutRequest]:
        numbers = range(first, first + samples)
        return [RolloutRequest(RolloutKey(0, task.id, number), task) for task in self.tasks for number in numbers]


def check_samples(samples: int, kind: str) -> None:
    """Raise UserError for fewer than 2 attempts."""
    if samples < 2:
        raise UserError(f"`ludus probe {kind}` needs at least 2 samples, not {samples}.", "Increase --samples.")


async def roll_out(scheduler: Scheduler, requests: Sequence[RolloutRequest]) -> list[Trajectory]:
    """Return the trajectories of requests in order. Raises UserError if a world does not repeat its observations."""
    try:
        found = [episode.trajectory for episode in await scheduler.run(requests)]
    except RestoreError as error:
        raise nondeterminism_error(scheduler, error.message) from error
    for one in found:
        if one.failure is not None and one.failure.part == RestoreError.part:
            raise nondeterminism_error(scheduler, one.failure.error)
    return found


def nondeterminism_error(scheduler: Scheduler, why: str) -> UserError:
    """Return the error for a world that differs on replay."""
    text = f"Episodes of the world {scheduler.world.name!r} cannot be continued from their middle: {why}"
    return UserError(text, "This probe needs a world that repeats its observations.")


def succeeded(scheduler: Scheduler, trajectory: Trajectory) -> float:
    """Return 1 if the trajectory solved its task, else 0."""
    return float(trajectory.failure is None and success(scheduler.world.rewards, trajectory))


def success_rates(scheduler: Scheduler, episodes: Sequence[Trajectory]) -> dict[str, float]:
    """Return the share of successful episodes by task."""
    by_task = grouped(episodes, lambda one: one.task_id)
    return {task: fmean(succeeded(scheduler, one) for one in own) for task, own in by_task.items()}


def answer_key(trajectory: Trajectory) -> str:
    """Return the final answer for comparisons: extracted if it is introduced, normalised; empty without an answer."""
    return normalise([trajectory.answer, *short_answers(trajectory.answer)][-1])


def with_sessions(scheduler: Scheduler, change: Callable[[RolloutRequest, ChatSession], ChatSession]) -> Scheduler:
    """Return a scheduler whose chat sessions are changed."""
    make_chat = scheduler.make_chat
    return replace(scheduler, make_chat=lambda request: change(request, make_chat(request)))


class Unlimited:
    """An allowance without bounds, with which a session continues a partial action."""

    async def granted(self) -> Grant:
        return Grant()

    def spend(self, tokens: int) -> None: ...


def needs_tokens(session: ChatSession) -> EngineChatSession:
    """Return the session of an engine. Raises UserError for a session without tokens."""
    if not isinstance(session, EngineChatSession):
        raise UserError("This probe needs the tokens of the model, which an endpoint does not return.", "Use --run.")
    return session


def continued(session: ChatSession, recorded: Sequence[Segment]) -> EngineChatSession:
    """Return a session that replays segments, the last maybe a partial action. UserError for one without tokens."""
    return replace(needs_tokens(session), recorded=tuple(recorded), allowance=Unlimited())


@dataclass(frozen=True, slots=True)
class EndpointTurn:
    """A turn of an endpoint's dialogue: the messages sent, and the response."""

    history: tuple[WireMessage, ...]
    answer: ChatCompletion


@dataclass
class RecordingSession(OpenAIChatSession):
    """Endpoint session that stores its turns and replays `num_replayed` of `recorded`; RestoreError if they differ."""

    recorded: tuple[EndpointTurn, ...] = ()
    num_replayed: int = 0
    turns: list[EndpointTurn] = field(default_factory=list)

    async def act(self) -> Action | StopReason:
        """Return the next recorded action, or request one."""
        number = len(self.turns)
        if number < len(self.recorded) and self.recorded[number].history != tuple(self._messages):
            raise RestoreError(f"The messages before turn {number + 1} differ on replay.")
        if number >= self.num_replayed:
            return await super().act()
        answer = self.recorded[number].answer
        self._append_answer(answer)
        return answer.action

    def _append_answer(self, answer: ChatCompletion) -> None:
        self.turns.append(EndpointTurn(tuple(self._messages), answer))
        super()._append_answer(answer)


def recording(session: ChatSession, turns: Sequence[EndpointTurn] = (), replayed: int = 0) -> ChatSession:
    """Return an endpoint's session as a `RecordingSession`; any other session unchanged."""
    if not isinstance(session, OpenAIChatSession):
        return session
    settings = (session.endpoint, session.params, session.seed, session.max_tokens, session.parser)
    return RecordingSession(*settings, recorded=tuple(turns[: replayed + 1]), num_replayed=replayed)


Scores = Mapping[str, float]
"""A number by task id."""


@dataclass(frozen=True, slots=True)
class MeanEstimate:
    """A mean with its 95 % interval. `signed`: a difference; `percent`: a share, not a number of nats or tokens."""

    value: float
    interval: Interval
    signed: bool = False
    percent: bool = True

    def __str__(self) -> str:
        form = f"{'+' if self.signed else ''}{'.1%' if self.percent else '.3f'}"
        return format_rate(self.value, self.interval, form)

    def to_json(self) -> JSON:
        return {"value": self.value, "low": self.interval.low, "high": self.interval.high, "text": str(self)}


Cell = str | int | float | MeanEstimate | None


@dataclass(frozen=True)
class ProbeReport:
    """Rows with equal keys, sentences about them, and sampled texts.

    A text has a name and spans, each with a note; a span without a note is not marked.
    """

    kind: str
    title: str
    rows: Sequence[Mapping[str, Cell]]
    notes: Sequence[str] = ()
    failed: bool = False
    texts: Sequence[tuple[str, Sequence[tuple[str, str]]]] = ()

    def to_json(self) -> dict[str, JSON]:
        rows: list[JSON] = [
            {name: cell.to_json() if isinstance(cell, MeanEstimate) else cell for name, cell in row.items()}
            for row in self.rows
        ]
        texts: list[JSON] = [{"name": name, "spans": [list(span) for span in spans]} for name, spans in self.texts]
        return {"kind": self.kind, "title": self.title, "rows": rows, "notes": list(self.notes), "texts": texts}

    @property
    def table(self) -> ReportTable:
        """The report as text."""
        rows = [["" if cell is None else str(cell) for cell in row.values()] for row in self.rows]
        return ReportTable(self.title, list(self.rows[0]), rows, "\n\n".join(self.notes))


def stored_reports(folder: Path) -> dict[str, ReportTable]:
    """Return the reports that `ludus probe --run` has stored in a folder, as text by name."""
    found = {}
    for path in sorted(folder.glob("*.json")):
        data = json.loads(path.read_text("utf-8"))
        rows = [[_text(cell) for cell in row.values()] for row in data["rows"]]
        columns = list(data["rows"][0]) if rows else []
        found[path.stem] = ReportTable(data["title"], columns, rows, "\n\n".join(data["notes"]))
    return found


def _text(cell: JSON) -> str:
    return str(cell["text"]) if isinstance(cell, dict) else "" if cell is None else str(cell)


def mean_over_tasks(scores: Scores, *, percent: bool = True, seed: int = 0) -> MeanEstimate:
    """Return the mean over tasks. Raises UserError for fewer than 2.

    0/1 scores have Wilson's interval, other shares `stats.clustered_interval`, nats and tokens a bootstrap interval.
    """
    values = list(scores.values())
    check_tasks_suffice(values)
    if percent and all(value in (0, 1) for value in values):
        return MeanEstimate(sum(values) / len(values), stats.wilson(round(sum(values)), len(values)))
    if percent:
        return MeanEstimate(math.fsum(values) / len(values), stats.clustered_interval(values))
    found = stats.bootstrap_mean(values, seed=seed)
    return MeanEstimate(found.mean, found.interval, percent=False)


def difference(after: Scores, before: Scores, *, percent: bool = True) -> MeanEstimate:
    """Return the paired `after - before`; nats have Student's interval. Raises UserError for fewer than 2 tasks."""
    check_tasks_suffice(list(after))
    if not percent:
        gaps = stats.t_interval([after[task] - before[task] for task in before])
        return MeanEstimate(gaps.mean, gaps.interval, signed=True, percent=False)
    found = stats.paired_difference(after, before)
    return MeanEstimate(found.difference, found.interval, signed=True, percent=percent)


def compared(after: Scores, before: Scores | None, name: str = "difference") -> dict[str, Cell]:
    """Return the cells of a success, and of its paired difference to another one."""
    return {"success": mean_over_tasks(after), name: None if before is None else difference(after, before)}


def check_tasks_suffice(tasks: Sequence[object]) -> None:
    """Raise UserError for fewer than 2 tasks, which have no interval."""
    if len(tasks) < 2:
        raise UserError(f"The probe has {len(tasks)} usable tasks, too few for an interval.", "Increase --tasks.")
