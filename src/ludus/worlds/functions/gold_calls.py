"""The truth of a task, and the comparison of episodes with it.

Calls that fit no offered function are ignored if the truth has calls, and failures if no call is right.
Values are compared by type: texts without case and extra blanks, numbers by value, lists in order; a text
never equals a number.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Final, Literal

from ludus.rewards.base import truth_of
from ludus.rewards.code.turns import Progress, made_calls
from ludus.rewards.code.unit_tests import Suite, share_passed, suite_passes
from ludus.rewards.exact_match import ExpectedAnswers, matches
from ludus.rewards.extract import last_output
from ludus.rewards.paper_rewards import ExpectedCall, ExpectedCalls
from ludus.types import JSON, StopReason, Task, ToolStatus, Trajectory
from ludus.worlds.functions.catalogue import Plan, Scene
from ludus.worlds.functions.replies import Ask, asks_for, refuses, speaks

VERDICT: Final = "verdict"
"""The tool name of the outcome that lists which turns of a task of several turns agree with the gold calls."""
_all_turns = suite_passes(last_output(VERDICT))
_some_turns = share_passed(last_output(VERDICT))
_INVALID = (ToolStatus.MALFORMED, ToolStatus.UNKNOWN_TOOL, ToolStatus.BAD_ARGUMENTS)
_ABSOLUTE_TOLERANCE = 1e-9
Right = Literal["call", "any_call", "ask", "answer", "decline"]
"""The right response: the gold calls, any call, or without a call a question, an answer, or a refusal."""


@dataclass(frozen=True, slots=True)
class GoldCall:
    """A required call.

    `accepted` are the right values of each argument, `optional` the arguments that may be omitted.
    `after` are the indices of earlier gold calls whose results it takes.
    """

    name: str
    accepted: Mapping[str, tuple[JSON, ...]]
    optional: frozenset[str] = frozenset()
    after: tuple[int, ...] = ()

    def with_values(self, place: int) -> ExpectedCall:
        """Return the call with the right value at index `place` of each argument, without optional ones."""
        required = {name: values for name, values in self.accepted.items() if name not in self.optional}
        return ExpectedCall(self.name, {name: values[place] for name, values in required.items()})

    @property
    def expected(self) -> ExpectedCall:
        """The call with the first values."""
        return self.with_values(0)

    def fits(self, made: ExpectedCall) -> bool:
        """Return whether a call equals this one."""
        if made.name != self.name or not made.arguments.keys() <= self.accepted.keys():
            return False
        missing = self.accepted.keys() - made.arguments.keys()
        return missing <= self.optional and all(
            any(equal(value, accepted) for accepted in self.accepted[name]) for name, value in made.arguments.items()
        )


@dataclass(frozen=True, slots=True)
class Truth(ExpectedCalls):
    """The truth: the gold calls, or another right response; `ludus.rewards.paper_rewards` reads `calls`.

    `plan` are the steps of a generated request.
    """

    right: Right
    gold: tuple[GoldCall, ...]
    scene: Scene
    ask: Ask | None = None
    answer: ExpectedAnswers | None = None
    plan: Plan = ()

    def accepts_text(self, answer: str) -> bool:
        """Return whether an answer without calls is right: it asks, answers, or refuses.

        If only descriptions of functions are available, any text is right unless it claims a call.
        """
        if self.ask is not None:
            return asks_for(answer, self.ask)
        if self.answer is not None:
            return matches(answer, self.answer)
        return refuses(answer) if self.scene.functions else speaks(answer)


def equal(given: JSON, wanted: JSON) -> bool:
    """Return whether two values count as equal."""
    if isinstance(given, bool) or isinstance(wanted, bool):
        return given is wanted
    if isinstance(given, int | float) and isinstance(wanted, int | float):
        try:
            return abs(given - wanted) < _ABSOLUTE_TOLERANCE
        except OverflowError:  # an integer beyond the range of floats
            return False
    if isinstance(given, str) and isinstance(wanted, str):
        return " ".join(given.casefold().split()) == " ".join(wanted.casefold().split())
    if isinstance(given, list) and isinstance(wanted, list):
        return len(given) == len(wanted) and all(map(equal, given, wanted))
    if isinstance(given, dict) and isinstance(wanted, dict):
        return given.keys() == wanted.keys() and all(equal(given[key], wanted[key]) for key in given)
    return given is None and wanted is None


def executed_calls(trajectory: Trajectory) -> list[ExpectedCall]:
    """Return the calls of an episode that fit an offered function, in order."""
    ran = {outcome.call_id for outcome in trajectory.outcomes if outcome.status not in _INVALID}
    return [
        ExpectedCall(call["function"]["name"], json.loads(call["function"]["arguments"]))
        for message in trajectory.messages
        for call in message.get("tool_calls", [])
        if call["id"] in ran
    ]


def calls_agree(gold: Sequence[GoldCall], made: Sequence[ExpectedCall], matched: frozenset[int] = frozenset()) -> bool:
    """Return whether the calls are the gold calls, each once and after those whose results it takes.

    `matched` are the indices of the gold calls that were made before.
    """
    if len(matched) + len(made) != len(gold):
        return False
    return not made or any(calls_agree(gold, made[1:], matched | {i}) for i in _matches_of(made[0], gold, matched))


def _matches_of(call: ExpectedCall, gold: Sequence[GoldCall], made: Set[int]) -> Iterator[int]:
    """Yield the indices of the gold calls that equal a call, except those in `made` and those that take results
    of calls not in `made`."""
    return (i for i, wanted in enumerate(gold) if i not in made and made >= set(wanted.after) and wanted.fits(call))


def solved(task: Task, trajectory: Trajectory) -> float:
    """Return 1 if the episode has the right response and ended with an answer; else 0."""
    if isinstance(task.truth, Suite):
        return _all_turns(task, trajectory)
    truth = truth_of(task, Truth)
    if trajectory.stop_reason is not StopReason.ANSWERED or not trajectory.answer.strip():
        return 0.0
    if truth.right == "call":
        return float(calls_agree(truth.gold, executed_calls(trajectory)))
    if truth.right == "any_call":
        return float(bool(executed_calls(trajectory)))
    return float(not trajectory.outcomes and truth.accepts_text(trajectory.answer))


def part_made(task: Task, trajectory: Trajectory) -> float:
    """Return 1 if at least one gold call was made, or one turn agrees with its gold calls; else 0."""
    if isinstance(task.truth, Suite):
        return float(_some_turns(task, trajectory) > 0)
    made = executed_calls(trajectory)
    return float(any(wanted.fits(call) for wanted in truth_of(task, Truth).gold for call in made))


def gold_calls_made(task: Task, trajectory: Trajectory) -> Progress:
    """Verify turns: a milestone is a gold call, made after those whose results it takes."""
    gold = truth_of(task, Truth).gold
    reached: list[set[str]] = [set() for _ in range(trajectory.num_turns)]
    made: set[int] = set()
    for call in made_calls(task, trajectory):
        number = next(_matches_of(ExpectedCall(call.name, call.arguments), gold, made), None)
        if number is not None and call.outcome.status is ToolStatus.OK:
            made.add(number)
            reached[call.turn].add(str(number))
    return Progress(reached, len(gold))
