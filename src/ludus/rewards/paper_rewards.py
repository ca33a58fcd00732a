"""Reward functions and weights of published systems. Each function names its source.

Each preset is a list of reward parts that can replace those of a world; `ludus.rewards.registry` names them.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ludus.rewards.base import Reward, truth_of
from ludus.rewards.exact_match import exact_match, strict_match, well_formed
from ludus.rewards.json_match import same_json
from ludus.types import JSON, StopReason, Task, ToolStatus, Trajectory


@dataclass(frozen=True, slots=True)
class ExpectedCall:
    """A call that solves the task or a part of it."""

    name: str
    arguments: Mapping[str, JSON]


@dataclass(frozen=True, slots=True)
class ExpectedCalls:
    """Truth of a task that requires certain calls, in any order.

    If it is empty, no call is correct; a subclass can compare the answer with an expected text in `accepts_text`.
    """

    calls: tuple[ExpectedCall, ...]

    def accepts_text(self, answer: str) -> bool:
        """Return whether an answer without calls is right if none is expected; by default, if it is not empty."""
        return bool(answer.strip())


@dataclass(frozen=True, slots=True)
class CallMatch:
    """Agreement of calls with the expected ones: ToolRL's three sums, and their maxima.

    `names` in [0, 1]; `argument_names` in [0, num_calls]; `argument_values` in [0, num_arguments].
    """

    names: float
    argument_names: float
    argument_values: float
    num_calls: int
    num_arguments: int

    @property
    def share(self) -> float:
        """The sum of the three, as a share of `1 + num_calls + num_arguments`."""
        total = self.names + self.argument_names + self.argument_values
        return total / (1 + self.num_calls + self.num_arguments)


def match_calls(expected: Sequence[ExpectedCall], made: Sequence[ExpectedCall]) -> CallMatch:
    """Compare calls as ToolRL does (arXiv:2504.13958, section 3.3).

    `names`: intersection over union of the names of both as multisets. For each expected call, the best of the
    calls made with its name (each is matched once, greedily in the order of expected calls, as in the authors' code):
    intersection over union of the argument names, and the number of arguments with the right value.
    """
    names = _overlap([call.name for call in expected], [call.name for call in made])
    unmatched = list(made)
    argument_names = argument_values = 0.0
    for call in expected:
        scored = [(_arguments(call, other), place) for place, other in enumerate(unmatched) if other.name == call.name]
        if not scored:
            continue
        (shared, right), place = max(scored, key=lambda found: (sum(found[0]), -found[1]))
        argument_names += shared
        argument_values += right
        del unmatched[place]
    num_arguments = sum(len(call.arguments) for call in expected)
    return CallMatch(names, argument_names, argument_values, len(expected), num_arguments)


def calls_made(trajectory: Trajectory) -> list[ExpectedCall]:
    """Return the calls of the model's messages in order, without those whose arguments are not a JSON object."""
    found = []
    for message in trajectory.messages:
        if message["role"] != "assistant":
            continue
        for call in message.get("tool_calls", []):
            try:
                arguments = json.loads(call["function"]["arguments"])
            except ValueError:
                continue
            if isinstance(arguments, dict):
                found.append(ExpectedCall(call["function"]["name"], arguments))
    return found


def format_kept(task: Task, trajectory: Trajectory) -> float:
    """Return 1 if the episode ended with an answer and every intended call could be parsed, else 0.

    ToolRL's format reward (arXiv:2504.13958, section 3.3: 1 if all fields are present in the right order, else
    0), for the rendering of the run.
    """
    malformed = any(outcome.status is ToolStatus.MALFORMED for outcome in trajectory.call_outcomes)
    return float(trajectory.stop_reason is StopReason.ANSWERED and not malformed)


def tool_correctness(task: Task, trajectory: Trajectory) -> float:
    """Return `2 R / S - 1` in [-1, 1]: with weight 3 ToolRL's `6 R / S - 3` (arXiv:2504.13958, section 3.3).

    `R` and `S` are the sum of `match_calls` and its maximum. If no call is expected, the value is 1 only for an
    answer without any intended call that the task accepts as right, and otherwise -1: the comparison alone would
    be maximal for any text without calls.
    """
    truth = truth_of(task, ExpectedCalls)
    if not truth.calls:
        without_calls = trajectory.stop_reason is StopReason.ANSWERED and not trajectory.call_outcomes
        right = without_calls and not calls_made(trajectory) and truth.accepts_text(trajectory.answer)
        return 1.0 if right else -1.0
    return 2 * _match(task, trajectory).share - 1


def valid_calls(task: Task, trajectory: Trajectory) -> float:
    """Return the share of the calls that name an existing tool with valid arguments; 0 without a call."""
    bad = (ToolStatus.MALFORMED, ToolStatus.UNKNOWN_TOOL, ToolStatus.BAD_ARGUMENTS)
    statuses = [outcome.status for outcome in trajectory.call_outcomes]
    return sum(status not in bad for status in statuses) / len(statuses) if statuses else 0.0


def right_names(task: Task, trajectory: Trajectory) -> float:
    """Return `names` of `match_calls`, in [0, 1]."""
    return _match(task, trajectory).names


def right_argument_names(task: Task, trajectory: Trajectory) -> float:
    """Return `argument_names` of `match_calls` per expected call, in [0, 1]; 0 if none is expected."""
    found = _match(task, trajectory)
    return found.argument_names / found.num_calls if found.num_calls else 0.0


def right_argument_values(task: Task, trajectory: Trajectory) -> float:
    """Return `argument_values` of `match_calls` per expected argument, in [0, 1]; 0 if none is expected."""
    found = _match(task, trajectory)
    return found.argument_values / found.num_arguments if found.num_arguments else 0.0


def wrong_and_ill_formed(task: Task, trajectory: Trajectory) -> float:
    """Return 1 for a wrong answer in an episode that is not well formed: Search-R1's `final_format_score`.

    0 for an episode that ended without an answer.
    """
    is_wrong = strict_match(task, trajectory) < 1 and bool(trajectory.answer)
    return float(is_wrong and well_formed(task, trajectory) < 1)


def accuracy(task: Task, trajectory: Trajectory) -> float:
    """Return 1 for a right answer and -1 for any other: ReTool's only reward (arXiv:2504.11536)."""
    return 2 * exact_match(task, trajectory) - 1


def calls_of_the_wrong(task: Task, trajectory: Trajectory) -> float:
    """Return the number of calls / 4, at most 1, if the answer is wrong, else 0: the bonus in verl's ReTool recipe.

    There a wrong answer earns `min(-0.6, -1 + 0.1 calls)`: this part with weight 0.4.
    """
    return min(1.0, len(trajectory.call_outcomes) / 4) if exact_match(task, trajectory) < 1 else 0.0


def toolrl() -> tuple[Reward, ...]:
    """Return ToolRL's parts: format in {0, 1} and correctness in [-3, 3], sum in [-3, 4] (arXiv:2504.13958).

    The separate aspects of the calls are reported with weight 0: correctness contains them.
    """
    return (
        Reward("tool_correctness", tool_correctness, weight=3.0, outcome=True, low=-1.0),
        Reward("format", format_kept, weight=1.0),
        Reward("valid_calls", valid_calls, weight=0.0),
        Reward("right_names", right_names, weight=0.0),
        Reward("right_argument_names", right_argument_names, weight=0.0),
        Reward("right_argument_values", right_argument_values, weight=0.0),
    )


def search_r1() -> tuple[Reward, ...]:
    """Return Search-R1's parts with the format reward (arXiv:2505.15117; `qa_em_format.py` of its code).

    Right and well formed 1, right alone 0.8, well formed alone 0.2, a wrong answer that is neither 0.1, no
    answer 0: `structure_format_score` 0.2, `final_format_score` 0.1 and `retrieval_score` 0 of its scripts.
    """
    return (
        Reward("exact_match", strict_match, weight=0.8, outcome=True),
        Reward("well_formed", well_formed, weight=0.2),
        Reward("wrong_and_ill_formed", wrong_and_ill_formed, weight=0.1),
    )


def retool() -> tuple[Reward, ...]:
    """Return ReTool's parts: accuracy in {-1, 1} (arXiv:2504.11536), and verl's bonus for calls of a wrong answer."""
    return (
        Reward("accuracy", accuracy, weight=1.0, outcome=True, low=-1.0),
        Reward("calls_of_the_wrong", calls_of_the_wrong, weight=0.4),
    )


def _match(task: Task, trajectory: Trajectory) -> CallMatch:
    return match_calls(truth_of(task, ExpectedCalls).calls, calls_made(trajectory))


def _overlap(first: Sequence[str], second: Sequence[str]) -> float:
    """Return the intersection over union of two multisets; 1 if both are empty."""
    one, other = Counter(first), Counter(second)
    union = (one | other).total()
    return (one & other).total() / union if union else 1.0


def _arguments(expected: ExpectedCall, made: ExpectedCall) -> tuple[float, float]:
    """Return the overlap of the argument names, and the number of arguments with the right value."""
    shared = expected.arguments.keys() & made.arguments.keys()
    right = sum(same_json(made.arguments[name], expected.arguments[name]) for name in shared)
    return _overlap([*expected.arguments], [*made.arguments]), float(right)
