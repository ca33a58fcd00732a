"""Turn verifiers: measure the progress of each turn of an episode towards the solution.

A verifier names the milestones of a task that each turn reached. `turn_shares` rewards a milestone in the
first turn that reached it only, so that repeating a successful call earns nothing. All turns of an episode
together earn at most 1.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from ludus.rewards.base import truth_of
from ludus.rewards.code.unit_tests import Suite, read_report
from ludus.types import JSON, Task, ToolOutcome, ToolStatus, Trajectory

TURN_REPORT: Final = "turn_report"
"""Tool name of the outcomes with which an environment reports test results after a turn (`turn_report`)."""
_CALL = re.compile(r"call_(\d+)_\d+")


@dataclass(frozen=True, slots=True)
class Progress:
    """The milestones reached by each turn of an episode, and the number of milestones of the task."""

    reached: Sequence[Collection[str]]
    total: int


TurnVerifier = Callable[[Task, Trajectory], Progress]
"""Return the progress of an episode. Reads the task with its truth, and the trajectory alone."""


def turn_shares(progress: Progress) -> tuple[float, ...]:
    """Return the share of the milestones that each turn was the first to reach.

    Raise ValueError if more milestones are reached than the task has.
    """
    seen: set[str] = set()
    found = []
    for reached in progress.reached:
        new = set(reached) - seen
        seen |= new
        found.append(len(new) / progress.total if new and progress.total else 0.0)
    if len(seen) > progress.total:
        raise ValueError(f"{len(seen)} milestones are reached, but the task has {progress.total}")
    return tuple(found)


def turn_of_call(call_id: str) -> int | None:
    """Return the turn of a call by its id; None for other ids."""
    numbered = _CALL.fullmatch(call_id)
    return None if numbered is None else int(numbered[1])


def outcomes_by_turn(trajectory: Trajectory) -> list[list[ToolOutcome]]:
    """Return the outcomes of the calls of each turn."""
    by_turn: list[list[ToolOutcome]] = [[] for _ in range(trajectory.num_turns)]
    for outcome in trajectory.outcomes:
        turn = turn_of_call(outcome.call_id)
        if turn is not None and turn < len(by_turn):
            by_turn[turn].append(outcome)
    return by_turn


@dataclass(frozen=True, slots=True)
class MadeCall:
    """A well-formed call of an episode, with its turn and outcome."""

    turn: int
    name: str
    arguments: dict[str, JSON]
    outcome: ToolOutcome


def made_calls(task: Task, trajectory: Trajectory) -> Iterator[MadeCall]:
    """Iterate over the calls of the policy's turns that have an outcome, in order, without those of the prompt."""
    outcomes = {one.call_id: one for one in trajectory.call_outcomes}
    for message in trajectory.messages[len(task.prompt) :]:
        for call in message.get("tool_calls", []):
            turn, outcome = turn_of_call(call["id"]), outcomes.get(call["id"])
            if outcome is None or turn is None or turn >= trajectory.num_turns:
                continue
            arguments = json.loads(call["function"]["arguments"])
            yield MadeCall(turn, call["function"]["name"], arguments, outcome)


def turn_report(turn: int, report: str) -> ToolOutcome:
    """Return the outcome, not shown to the model, that holds a report of tests (JSON object) after a turn."""
    return ToolOutcome("", TURN_REPORT, ToolStatus.OK, json.dumps({**json.loads(report), "turn": turn}, sort_keys=True))


def suite_progress(final: str) -> TurnVerifier:
    """Return the verifier that reads `turn_report`s, and the outcome `final` in the last turn.

    A milestone is a number of tests that pass at once, counted over `fail_to_pass`, and 0 if a test of
    `pass_to_pass` fails. Tests that pass alternately, each breaking another, are rewarded once.
    """

    def progress(task: Task, trajectory: Trajectory) -> Progress:
        suite = truth_of(task, Suite)
        reached: list[set[str]] = [set() for _ in range(trajectory.num_turns)]
        for outcome in trajectory.outcomes:  # the environment's, which have no call_id
            if outcome.call_id or outcome.status is not ToolStatus.OK or outcome.tool not in (TURN_REPORT, final):
                continue
            is_report = outcome.tool == TURN_REPORT
            turn = int(json.loads(outcome.output)["turn"]) if is_report else trajectory.num_turns - 1
            passed = read_report(outcome.output).passed
            if 0 <= turn < len(reached) and passed.issuperset(suite.pass_to_pass):
                count = len(passed.intersection(suite.fail_to_pass))
                reached[turn] |= {f"{number} pass" for number in range(1, count + 1)}
        return Progress(reached, len(set(suite.fail_to_pass)))

    return progress
