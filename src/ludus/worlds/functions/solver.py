"""Reference solutions of tasks, with optional flaws in known proportions, and right alternatives to them.

The flaws are systematic, since noise averages out in training: half of a request is done, a missing value is
invented, or a function is called although none fits. A first call in the wrong terms is corrected.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from ludus.rewards.base import truth_of
from ludus.rewards.paper_rewards import ExpectedCall
from ludus.tools.base import ArgumentError
from ludus.types import (
    JSON,
    FunctionCall,
    Message,
    MessageToolCall,
    StopReason,
    Task,
    ToolOutcome,
    ToolStatus,
    Trajectory,
)
from ludus.worlds.functions.bfcl_api import ApiTruth, turn_messages
from ludus.worlds.functions.gold_calls import GoldCall, Truth
from ludus.worlds.functions.tool_distractors import ListedTool, Scene

DONE = "Done."
NO_TOOL = "No tool fits."


@dataclass(frozen=True, slots=True)
class CallFlaws:
    """Probabilities of flaws."""

    habit: float = 0.0
    """Stop after the first of several calls; otherwise call although no call is right."""
    mended: float = 0.0
    """First call without an argument or by the names of the catalogue, then rightly. The wrong call is not
    trained on."""


@dataclass
class Attempt:
    """A scripted episode on a new state."""

    task: Task
    messages: list[Message] = field(default_factory=list)
    outcomes: list[ToolOutcome] = field(default_factory=list)
    _num_turns: int = 0

    def __post_init__(self) -> None:
        self._tools = {tool.name: tool for tool in truth_of(self.task, Truth).scene.tools()}

    def call(self, *calls: ExpectedCall, train: bool = True) -> None:
        """Add one turn of calls and their responses."""
        ids = [f"call_{self._num_turns}_{i}" for i in range(len(calls))]
        self._num_turns += 1
        made = Message(role="assistant", content="", tool_calls=list(map(tool_call, ids, calls)))
        self.messages.append(made if train else Message({**made, "train": False}))
        for id_, call in zip(ids, calls, strict=True):
            status, text = self._answer(call)
            self.messages.append(Message(role="tool", content=text, tool_call_id=id_, name=call.name))
            self.outcomes.append(ToolOutcome(id_, call.name, status, text))

    def say(self, text: str) -> None:
        """Add the last message."""
        self.messages.append(Message(role="assistant", content=text))

    def trajectory(self) -> Trajectory:
        """Return the episode for rewards, without tokens."""
        messages = (*self.task.prompt, *self.messages)
        return Trajectory(self.task.id, 0, (), messages, StopReason.ANSWERED, tuple(self.outcomes))

    def _answer(self, call: ExpectedCall) -> tuple[ToolStatus, str]:
        tool = self._tools.get(call.name)
        if tool is None:
            return ToolStatus.UNKNOWN_TOOL, f"Error: there is no tool {call.name!r}."
        try:
            checked = tool.check(call.arguments)
        except ArgumentError as error:
            return ToolStatus.BAD_ARGUMENTS, f"Error: {error}."
        try:
            return ToolStatus.OK, tool.answer(checked)
        except (LookupError, ValueError) as error:
            return ToolStatus.RAISED, f"Error: {type(error).__name__}: {error}"


def tool_call(id_: str, call: ExpectedCall) -> MessageToolCall:
    """Return a call as part of a message."""
    function = FunctionCall(name=call.name, arguments=json.dumps(dict(call.arguments), ensure_ascii=False))
    return MessageToolCall(id=id_, type="function", function=function)


def play(task: Task, flaws: CallFlaws, rng: random.Random) -> Attempt:
    """Return an attempt at the task."""
    truth, attempt = truth_of(task, Truth), Attempt(task)
    slips = rng.random() < flaws.habit
    if truth.right == "call":
        turns = turns_of(truth.gold)
        wrong = _unmended(truth, turns[0][0]) if rng.random() < flaws.mended else None
        if wrong is not None:
            attempt.call(wrong, train=False)
        if slips and len(truth.gold) > 1:
            turns = [turns[0][:1]]
        for calls in turns:
            attempt.call(*(call.expected for call in calls))
        attempt.say(DONE)
    elif truth.right == "any_call":
        attempt.call(_some_call(truth.scene))
        attempt.say(DONE)
    elif slips and truth.answer is None and isinstance(truth.scene, Scene):
        attempt.call(_made_up(truth, truth.scene, rng))
        attempt.say(DONE)
    else:
        attempt.say(_right_words(truth)[0])
    return attempt


def gold_messages(truth: ApiTruth) -> list[Message]:
    """Return the gold calls of several turns as an episode, without the responses, which are unknown here."""
    messages: list[Message] = []
    for place, calls in enumerate(truth.gold):
        if place:
            messages += turn_messages(truth.turns[place], truth.added.get(place, ()))
        for number, call in enumerate(calls):
            id_ = f"call_{place}_{number}"
            messages.append(Message(role="assistant", content="", tool_calls=[tool_call(id_, call)]))
            messages.append(Message(role="tool", content="[no output]", tool_call_id=id_, name=call.name))
        messages.append(Message(role="assistant", content=DONE))
    return messages


def turns_of(gold: Sequence[GoldCall]) -> list[list[GoldCall]]:
    """Return the gold calls in turns, each call as early as the results that it takes allow."""
    depth: list[int] = []
    for call in gold:
        depth.append(1 + max((depth[place] for place in call.after), default=-1))
    return [[gold[i] for i, d in enumerate(depth) if d == turn] for turn in range(max(depth) + 1)]


def alternative_solutions(task: Task) -> Iterator[Sequence[Message]]:
    """Yield other right episodes: calls with reordered or other arguments, one by one, or other words."""
    truth = truth_of(task, Truth)
    if truth.right not in ("call", "any_call"):
        for text in _right_words(truth)[1:]:
            attempt = Attempt(task)
            attempt.say(text)
            yield attempt.messages
    elif truth.right == "call":
        turns = turns_of(truth.gold)
        seen = [_called(task, [[gold.expected for gold in turn] for turn in turns])]
        alone = [[gold] for turn in turns for gold in reversed(turn)]
        for way in (
            _called(task, [[_spelled_out(gold) for gold in turn] for turn in turns]),
            _called(task, [[_other_values(gold) for gold in turn] for turn in alone]),
        ):
            if way not in seen:
                seen.append(way)
                yield way


def _called(task: Task, turns: Sequence[Sequence[ExpectedCall]]) -> Sequence[Message]:
    attempt = Attempt(task)
    for calls in turns:
        attempt.call(*calls)
    attempt.say(DONE)
    return attempt.messages


def _spelled_out(gold: GoldCall) -> ExpectedCall:
    """Return the call with all arguments, optional ones included, in reverse order."""
    return ExpectedCall(gold.name, {name: gold.accepted[name][0] for name in reversed([*gold.accepted])})


def _other_values(gold: GoldCall) -> ExpectedCall:
    """Return the call with the last right value of each required argument."""
    return ExpectedCall(gold.name, {name: own[-1] for name, own in gold.accepted.items() if name not in gold.optional})


def _right_words(truth: Truth) -> Sequence[str]:
    """Return right answers if no call is right: first that of the oracle."""
    if truth.answer is not None:
        return truth.answer.accepted
    if truth.ask is None:
        return NO_TOOL, "None of these functions can do that.", "Sorry, I cannot do this with the tools I have."
    name = truth.ask.name.replace("_", " ")
    return (
        f"What is the {name}?",
        f"Happy to. Could you tell me the {name}?",
        f"I need one more thing. Which {name} shall I use?",
    )


def _unmended(truth: Truth, gold: GoldCall) -> ExpectedCall | None:
    """Return the call with the catalogue's names if they were changed, else without its last argument."""
    call = gold.expected
    if not isinstance(truth.scene, Scene):
        return None
    plain = {one.name: one.param.name for one in truth.scene.offer(gold.name).params}
    if any(name != plain[name] for name in call.arguments):
        return ExpectedCall(call.name, {plain[name]: value for name, value in call.arguments.items()})
    return ExpectedCall(call.name, dict(list(call.arguments.items())[:-1])) if call.arguments else None


def _made_up(truth: Truth, scene: Scene, rng: random.Random) -> ExpectedCall:
    """Return a call, with invented values, of the function with a missing argument or the first one."""
    offer = scene.offer(truth.ask.function) if truth.ask is not None else scene.offers[0]
    values = {param.name: param.of.draw(rng, "train") for param in offer.function.required}
    return ExpectedCall(offer.function.name, offer.encode(values))


def _some_call(scene: Scene | ListedTool) -> ExpectedCall:
    """Return a call of the first function, with values of the right types for its required parameters."""
    function = scene.tools()[0].schema["function"]
    values = _value({**function["parameters"], "type": "object"})
    return ExpectedCall(function["name"], values if isinstance(values, dict) else {})


def _value(schema: JSON) -> JSON:
    """Return a value that fits a schema."""
    given = schema if isinstance(schema, dict) else {}
    choices, properties, required = given.get("enum"), given.get("properties"), given.get("required")
    if isinstance(choices, list) and choices:
        return choices[0]
    if given.get("type") == "object":
        inner = properties if isinstance(properties, dict) else {}
        return {str(name): _value(inner.get(str(name))) for name in (required if isinstance(required, list) else ())}
    kinds: dict[str, JSON] = {"integer": 1, "number": 1.0, "boolean": True, "array": []}
    return kinds.get(str(given.get("type")), "something")
