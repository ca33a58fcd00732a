"""Right episodes that are not the oracle's, by which the verifier is checked."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

from ludus.rewards.paper_rewards import ExpectedCall
from ludus.types import Message, Task
from ludus.worlds.functions.gold_calls import GoldCall, Truth, truth_of
from ludus.worlds.functions.replies import Ask
from ludus.worlds.functions.solver import DONE, Attempt, turns_of


def other_ways(task: Task) -> Iterator[Sequence[Message]]:
    """The messages of such episodes: calls written and ordered otherwise, or other words."""
    truth = truth_of(task)
    if truth.right == "call":
        yield from _called_otherwise(task, turns_of(truth.gold))
    elif truth.right != "any_call":
        for text in _texts(truth):
            attempt = Attempt(task)
            attempt.say(text)
            yield attempt.messages


def _called_otherwise(task: Task, turns: Sequence[Sequence[GoldCall]]) -> Iterator[Sequence[Message]]:
    """Right calls, but for those that are word for word the oracle's."""
    seen = [_called(task, [[gold.expected for gold in turn] for turn in turns])]
    alone = [[gold] for turn in turns for gold in reversed(turn)]
    for way in (
        _called(task, [[_spelled_out(gold) for gold in turn] for turn in turns]),
        _called(task, [[_other_values(gold) for gold in turn] for turn in alone]),
    ):
        if all(json.dumps(way) != json.dumps(other) for other in seen):
            seen.append(way)
            yield way


def _called(task: Task, turns: Sequence[Sequence[ExpectedCall]]) -> Sequence[Message]:
    attempt = Attempt(task)
    for calls in turns:
        attempt.call(*calls)
    attempt.say(DONE)
    return attempt.messages


def _spelled_out(gold: GoldCall) -> ExpectedCall:
    """The call with all arguments, those that may be left out too, in the reverse order."""
    return ExpectedCall(gold.name, {name: gold.accepted[name][0] for name in reversed([*gold.accepted])})


def _other_values(gold: GoldCall) -> ExpectedCall:
    """The call with the last of the values that each argument may have."""
    required = [name for name in gold.accepted if name not in gold.optional]
    return ExpectedCall(gold.name, {name: gold.accepted[name][-1] for name in required})


def _texts(truth: Truth) -> list[str]:
    """What else is right to say where no call is."""
    if truth.ask is not None:
        return _questions(truth.ask)
    if truth.answer is not None:
        return [*truth.answer.accepted[1:]]
    return ["None of these functions can do that.", "Sorry, I cannot do this with the tools I have."]


def _questions(ask: Ask) -> list[str]:
    """The question for what is missing, in other words."""
    name = ask.name.replace("_", " ")
    return [f"Happy to. Could you tell me the {name}?", f"I need one more thing. Which {name} shall I use?"]
