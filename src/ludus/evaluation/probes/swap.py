"""Where a gain sits: one model writes the tool calls, the other the answer after reading their results.

The caller plays an episode until it answers; its answering turn is discarded, and the reader writes that turn instead.
If the reader calls a tool there, the episode ends without an answer. With equal models the episode is unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from statistics import fmean

from ludus.engines.base import Engine
from ludus.evaluation.probes.episodes import MakeScheduler, ProbePlan, needs_tokens, play, success_rates, with_sessions
from ludus.evaluation.probes.report import Cell, ProbeReport, Scores, difference, mean_over_tasks
from ludus.rollouts.episode import ChatSession, EngineChatSession
from ludus.rollouts.scheduler import RolloutRequest
from ludus.types import Action, StopReason


@dataclass
class ReaderSession(EngineChatSession):
    """Session whose answering turn is written by `reader`, from the same history with the same seed."""

    reader: Engine | None = None

    async def act(self) -> Action | StopReason:
        """Return the caller's action if it calls tools, else the reader's answer."""
        caller, reader = self.engine, self.reader
        action = await super().act()
        if reader is None or isinstance(action, StopReason) or action.calls or action.errors:
            return action
        discarded = self._segments.pop()
        del self._tokens[-len(discarded.tokens) :]
        self._turn -= 1
        self.engine = reader
        try:
            answer = await super().act()
        finally:
            reader.release(self.episode)
            self.engine = caller
        calls = not isinstance(answer, StopReason) and (answer.calls or answer.errors)
        return StopReason.MAX_TURNS if calls else answer


def read_by(session: ChatSession, reader: Engine) -> ReaderSession:
    """Return the session with another reader. Raises UserError for a session without tokens."""
    own = needs_tokens(session)
    return ReaderSession(own.engine, own.renderer, own.params, own.max_tokens, own.episode, own.seed, reader=reader)


async def measure_swap(
    makers: Mapping[str, MakeScheduler], engines: Mapping[str, Engine], plan: ProbePlan
) -> ProbeReport:
    """Return success in the four cells of the models "A" and "B", and the effects of each role, paired by task.

    The effect of a role is the mean over the other role's models. Raises UserError for fewer than 2 tasks.
    """
    rates: dict[str, Scores] = {}
    without_calls = 0
    for caller, reader in product("AB", "AB"):
        scheduler = makers[caller](plan.sampling)

        def swapped(_: RolloutRequest, session: ChatSession, reader: str = reader) -> ChatSession:
            return read_by(session, engines[reader])

        episodes = await play(with_sessions(scheduler, swapped), plan.requests(plan.samples))
        rates[caller + reader] = success_rates(scheduler, episodes)
        without_calls += sum(not one.outcomes for one in episodes)
    rows: list[dict[str, Cell]] = []
    for cell, found in rates.items():
        gap = None if cell == "AA" else difference(found, rates["AA"], plan.seed)
        rows.append({"calls, answer": ", ".join(cell), "success": mean_over_tasks(found, plan.seed), "to A, A": gap})
    for name, after, before in (("calls by B", "BA BB", "AA AB"), ("answers by B", "AB BB", "AA BA")):
        b, a = (_mean_of([rates[cell] for cell in cells.split()]) for cells in (after, before))
        rows.append({"calls, answer": name, "success": None, "to A, A": difference(b, a, plan.seed)})
    total = 4 * len(plan.tasks) * plan.samples
    notes = ["The last two rows are the effect of a role, averaged over the models in the other one."]
    if without_calls:
        notes.append(f"{without_calls} of {total} episodes called no tool; there the reader writes the whole answer.")
    return ProbeReport("swap", "Tool calls and answers by two models", rows, notes)


def _mean_of(found: Sequence[Scores]) -> Scores:
    return {task: fmean(one[task] for one in found) for task in found[0]}
