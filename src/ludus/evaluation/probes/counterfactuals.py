"""The measured value of each turn: success of attempts resampled from the state before it.

The value before turn t is the success rate of N attempts that repeat the turns before t and sample the rest with the
current policy (Monte Carlo estimate, as in VinePPO, arXiv:2410.01679). A turn gains the difference between the values
after and before it; the value after the last turn is the episode's own outcome.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ludus.errors import UserError
from ludus.evaluation.probes import common
from ludus.evaluation.probes.common import Cell, MakeScheduler, MeanEstimate, ProbePlan, ProbeReport, RecordingSession
from ludus.evaluation.stats import Interval, rates_difference, wilson
from ludus.rollouts.episode import ChatSession
from ludus.rollouts.scheduler import RolloutRequest
from ludus.types import Trajectory


async def measure_counterfactuals(make: MakeScheduler, plan: ProbePlan, turn: int | None = None) -> ProbeReport:
    """Return the values and gains of the turns, the means over tasks first, then each episode's.

    `turn` (from 1) restricts the turns; None means all. Raises UserError for fewer than 2 samples and if the world
    does not repeat its observations or states.
    """
    common.check_samples(plan.samples, "counterfactuals")
    scheduler, sessions = make(plan.sampling), dict[str, ChatSession]()

    def keep(request: RolloutRequest, session: ChatSession) -> ChatSession:
        sessions[request.task.id] = common.recording(session)
        return sessions[request.task.id]

    episodes = await common.roll_out(common.with_sessions(scheduler, keep), plan.requests())
    chosen = [one for one in episodes if one.failure is None]
    common.check_tasks_suffice(chosen)
    num_turns = {}
    for one in chosen:
        session = sessions[one.task_id]
        num_turns[one.task_id] = len(session.turns) if isinstance(session, RecordingSession) else one.num_turns
    indices = range(max(num_turns.values())) if turn is None else (turn - 1, turn)
    wins: dict[str, dict[int, int]] = {task: {} for task in num_turns}
    for index in indices:
        at = {one.task_id: one for one in chosen if index < num_turns[one.task_id]}
        for task, count in (await _resample(make, plan, at, sessions, index)).items():
            wins[task][index] = count
    if not any(indices[0] in counts for counts in wins.values()):
        raise UserError(f"No episode has a turn {turn}.", "Choose an earlier --turn.")
    outcomes = {one.task_id: {num_turns[one.task_id]: common.succeeded(scheduler, one)} for one in chosen}
    note = f"{plan.samples} attempts from each state. Mean rows cover the episodes that reached the turn."
    rows = [row for row in _rows(wins, outcomes, plan.samples) if turn in (None, row["turn"])]
    return ProbeReport("counterfactuals", "Value before each turn, and its gain", rows, (note,))


async def _resample(
    make: MakeScheduler, plan: ProbePlan, at: Mapping[str, Trajectory], sessions: Mapping[str, ChatSession], turn: int
) -> dict[str, int]:
    """Return the successes of the attempts from the state before a turn, by task."""

    def fork(request: RolloutRequest, session: ChatSession) -> ChatSession:
        original = sessions[request.task.id]
        if isinstance(original, RecordingSession):
            return common.recording(session, original.turns, turn)
        segments = at[request.task.id].segments
        actions = [place for place, segment in enumerate(segments) if segment.kind == "action"]
        return common.continued(session, segments[: actions[turn]])

    scheduler = common.with_sessions(make(plan.sampling), fork)
    tasks = [task for task in plan.tasks if task.id in at]
    requests = replace(plan, tasks=tasks).requests(plan.samples, first=1 + turn * plan.samples)
    counts = dict.fromkeys(at, 0)
    for again in await common.roll_out(scheduler, requests):
        original = at[again.task_id]  # an endpoint's trajectory has no state hashes
        if again.failure is None and original.anchors[: turn + 1] != again.anchors[: turn + 1]:
            why = f"The state before turn {turn + 1} of {original.name} differs on replay."
            raise common.nondeterminism_error(scheduler, why)
        counts[again.task_id] += int(common.succeeded(scheduler, again))
    return counts


def _rows(
    wins: Mapping[str, Mapping[int, int]], outcomes: Mapping[str, Mapping[int, float]], samples: int
) -> list[dict[str, Cell]]:
    """Return the rows of successes by task and turn; `outcomes` has the success of each episode after its last turn."""
    shares = {task: {turn: num / samples for turn, num in own.items()} for task, own in wins.items()}
    values = {task: {**own, **outcomes[task]} for task, own in shares.items()}
    rows: list[dict[str, Cell]] = []
    for turn in sorted({turn for own in wins.values() for turn in own}):
        known = [task for task, own in wins.items() if turn in own and turn + 1 in values[task]]
        if len(known) < 2:
            continue
        before, after = ({task: values[task][place] for task in known} for place in (turn, turn + 1))
        cells = {"value": common.mean_over_tasks(before), "gain": common.difference(after, before)}
        rows.append({"episode": f"mean of {len(known)}", "turn": turn + 1, **cells})
    for task, own in wins.items():
        for turn, num in own.items():
            value = MeanEstimate(num / samples, wilson(num, samples))
            later = wilson(own[turn + 1], samples) if turn + 1 in own else None
            gain = _gain(value, values[task].get(turn + 1), later)
            rows.append({"episode": task, "turn": turn + 1, "value": value, "gain": gain})
    return rows


def _gain(value: MeanEstimate, after: float | None, later: Interval | None) -> MeanEstimate | None:
    """Return the gain of a turn; the outcome after the last one counts as known, without an interval `later`."""
    if after is None:
        return None
    if later is not None:
        return MeanEstimate(*rates_difference((value.value, value.interval), (after, later)), signed=True)
    interval = Interval(after - value.interval.high, after - value.interval.low)
    return MeanEstimate(after - value.value, interval, signed=True)
