"""Reference solutions of tasks, with optional flaws in known proportions, and right alternatives to them.

The flaws are systematic, since noise averages out in training: a request is half completed, a missing value is
invented, or a function is called although none fits. A first call with a wrong signature is corrected.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ludus.envs.messages import assistant, tool_call
from ludus.envs.tool_env import describe_error
from ludus.rewards.base import truth_of
from ludus.rewards.paper_rewards import ExpectedCall
from ludus.tools.base import ArgumentError
from ludus.types import JSON, Message, Task, ToolOutcome, ToolStatus
from ludus.worlds.functions.grader import GoldCall, Truth

DONE = "Done."
NO_TOOL = "No tool fits."


@dataclass(frozen=True, slots=True)
class CallFlaws:
    """Probabilities of flaws."""

    flaw_rate: float = 0.0
    """Stop after the first of several calls; otherwise call although no call is right."""
    correction_rate: float = 0.0
    """First call without an argument or by the names of the catalogue, then rightly. The wrong call is not
    trained on."""


@dataclass
class Attempt:
    """A scripted episode on a new state."""

    task: Task
    messages: list[Message] = field(default_factory=list)
    outcomes: list[ToolOutcome] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._tools = {tool.name: tool for tool in truth_of(self.task, Truth).scene.tools()}

    def call(self, *calls: ExpectedCall, train: bool = True) -> None:
        """Add one turn of calls and their responses."""
        turn = sum(message["role"] == "assistant" for message in self.messages)
        made = [tool_call(f"call_{turn}_{i}", call.name, call.arguments) for i, call in enumerate(calls)]
        message = Message(role="assistant", content="", tool_calls=made)
        self.messages.append(message if train else Message({**message, "train": False}))
        for one, call in zip(made, calls, strict=True):
            status, text = self._execute(call)
            self.messages.append(Message(role="tool", content=text, tool_call_id=one["id"], name=call.name))
            self.outcomes.append(ToolOutcome(one["id"], call.name, status, text))

    def answer(self, text: str) -> None:
        """Add the last message."""
        self.messages.append(assistant(text))

    def _execute(self, call: ExpectedCall) -> tuple[ToolStatus, str]:
        tool = self._tools[call.name]
        try:
            checked = tool.check(call.arguments)
        except ArgumentError as error:
            return ToolStatus.BAD_ARGUMENTS, f"Error: {error}."
        try:
            return ToolStatus.OK, tool.answer(checked)
        except (LookupError, ValueError) as error:
            return ToolStatus.RAISED, f"Error: {describe_error(error)}"


def play(task: Task, flaws: CallFlaws, rng: random.Random) -> Attempt:
    """Return an attempt at the task."""
    truth, attempt, text = truth_of(task, Truth), Attempt(task), DONE
    is_flawed = rng.random() < flaws.flaw_rate
    if truth.right == "call":
        turns = turns_of(truth.gold)
        wrong = _flawed_call(truth, turns[0][0]) if rng.random() < flaws.correction_rate else None
        if wrong is not None:
            attempt.call(wrong, train=False)
        if is_flawed and len(truth.gold) > 1:
            turns = [turns[0][:1]]
        for calls in turns:
            attempt.call(*(call.expected for call in calls))
    elif truth.right == "any_call":
        function = truth.scene.tools()[0].schema["function"]
        attempt.call(ExpectedCall(function["name"], _required_values(function["parameters"])))
    elif is_flawed and truth.answer is None and truth.scene.functions:
        chosen = truth.scene.functions[0] if truth.ask is None else truth.scene.function(truth.ask.function)
        attempt.call(ExpectedCall(chosen.name, chosen.drawn(rng)))
    else:
        text = _right_answers(truth)[0]
    attempt.answer(text)
    return attempt


def turns_of(gold: Sequence[GoldCall]) -> list[list[GoldCall]]:
    """Group the gold calls in turns, each call in the first turn after the results that it needs."""
    depth: list[int] = []
    for call in gold:
        depth.append(1 + max((depth[place] for place in call.after), default=-1))
    return [[gold[i] for i, d in enumerate(depth) if d == turn] for turn in range(max(depth) + 1)]


def alternative_solutions(task: Task) -> Iterator[Sequence[Message]]:
    """Yield other right episodes: all arguments in reverse order, other values one by one, or other words."""
    truth = truth_of(task, Truth)
    if truth.right == "call":
        turns = turns_of(truth.gold)
        episodes = [
            _episode(task, [[gold.expected for gold in turn] for turn in turns]),
            _episode(task, [[_with_all_arguments(gold) for gold in turn] for turn in turns]),
            _episode(task, [[gold.with_values(-1)] for turn in turns for gold in reversed(turn)]),
        ]
        yield from (one for i, one in enumerate(episodes) if i and one not in episodes[:i])
    elif truth.right != "any_call":
        yield from ([assistant(text)] for text in _right_answers(truth)[1:])


def _episode(task: Task, turns: Sequence[Sequence[ExpectedCall]]) -> Sequence[Message]:
    attempt = Attempt(task)
    for calls in turns:
        attempt.call(*calls)
    attempt.answer(DONE)
    return attempt.messages


def _with_all_arguments(gold: GoldCall) -> ExpectedCall:
    """Return the call with all arguments, optional ones included, in reverse order."""
    return ExpectedCall(gold.name, {name: gold.accepted[name][0] for name in reversed([*gold.accepted])})


def _right_answers(truth: Truth) -> Sequence[str]:
    """Return right answers if no call is right, the solver's first."""
    if truth.answer is not None:
        return truth.answer.accepted
    if truth.ask is None:
        return NO_TOOL, "None of these functions can do that.", "Sorry, I cannot do this with the tools I have."
    name = truth.ask.param.name.replace("_", " ")
    more = f"I need one more thing. Which {name} shall I use?"
    return f"What is the {name}?", f"Happy to. Could you tell me the {name}?", more


def _flawed_call(truth: Truth, gold: GoldCall) -> ExpectedCall | None:
    """Return a call with the catalogue's names if the signature was changed, else without its last argument."""
    call = gold.expected
    if not truth.scene.functions:
        return None
    plain = {param.offered: param.name for param in truth.scene.function(gold.name).params}
    if any(name != plain[name] for name in call.arguments):
        return ExpectedCall(call.name, {plain[name]: value for name, value in call.arguments.items()})
    return ExpectedCall(call.name, dict(list(call.arguments.items())[:-1])) if call.arguments else None


def _required_values(schema: Mapping[str, JSON]) -> dict[str, JSON]:
    properties, required = schema.get("properties"), schema.get("required")
    inner = properties if isinstance(properties, dict) else {}
    return {str(name): _value(inner.get(str(name))) for name in (required if isinstance(required, list) else ())}


def _value(schema: JSON) -> JSON:
    given = schema if isinstance(schema, dict) else {}
    choices = given.get("enum")
    if isinstance(choices, list) and choices:
        return choices[0]
    if given.get("type") == "object":
        return _required_values(given)
    examples: dict[str, JSON] = {"integer": 1, "number": 1.0, "boolean": True, "array": []}
    return examples.get(str(given.get("type")), "something")
