"""Whoever knows the truth plays a task: right, or with flaws in known proportions.

The flaws are habits, as noise averages out in training: half of a request is done, what is missing is made
up, and something is called where nothing fits. A first call in the wrong terms is mended.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

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
from ludus.worlds.functions.gold_calls import GoldCall, Truth, truth_of
from ludus.worlds.functions.replies import Ask
from ludus.worlds.functions.tool_distractors import ListedTool, Scene

DONE = "Done."
NO_TOOL = "No tool fits."


@dataclass(frozen=True, slots=True)
class CallFlaws:
    """How often the oracle goes wrong, as probabilities."""

    habit: float = 0.0
    """A request of several calls: stop after the first. Otherwise: call although no call is right."""
    mended: float = 0.0
    """Call first with a parameter that is missing or has the catalogue's name, and then rightly. The wrong
    call does not train."""


@dataclass
class Attempt:
    """An episode by hand, on a fresh state."""

    task: Task
    messages: list[Message] = field(default_factory=list)
    outcomes: list[ToolOutcome] = field(default_factory=list)
    _num_turns: int = 0

    def __post_init__(self) -> None:
        self._tools = {tool.name: tool for tool in truth_of(self.task).scene.tools()}

    def call(self, *calls: ExpectedCall, train: bool = True) -> None:
        """One turn of calls, and what the tools say to them."""
        ids = [f"call_{self._num_turns}_{i}" for i in range(len(calls))]
        self._num_turns += 1
        made = [_as_call(id_, call) for id_, call in zip(ids, calls, strict=True)]
        said = Message(role="assistant", content="", tool_calls=made)
        self.messages.append(said if train else Message({**said, "train": False}))
        for id_, call in zip(ids, calls, strict=True):
            status, text = self._answer(call)
            self.messages.append(Message(role="tool", content=text, tool_call_id=id_, name=call.name))
            self.outcomes.append(ToolOutcome(id_, call.name, status, text))

    def say(self, text: str) -> None:
        """The last message."""
        self.messages.append(Message(role="assistant", content=text))

    def trajectory(self) -> Trajectory:
        """The episode as rewards read it, without tokens."""
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


def play(task: Task, flaws: CallFlaws, rng: random.Random) -> Attempt:
    """An attempt at the task."""
    truth, attempt = truth_of(task), Attempt(task)
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
        attempt.call(some_call(truth.scene))
        attempt.say(DONE)
    elif slips and truth.answer is None and isinstance(truth.scene, Scene):
        attempt.call(_made_up(truth.scene, truth.ask, rng))
        attempt.say(DONE)
    else:
        attempt.say(right_words(truth))
    return attempt


def some_call(scene: Scene | ListedTool) -> ExpectedCall:
    """A call of the first function on offer, with values of the right types for what it requires."""
    function = scene.tools()[0].schema["function"]
    parameters = function["parameters"]
    properties, required = parameters["properties"], parameters["required"]
    return ExpectedCall(function["name"], {name: _value(properties.get(name, {})) for name in required})


def _value(schema: JSON) -> JSON:
    """A value that fits a schema."""
    given = schema if isinstance(schema, dict) else {}
    choices, properties, required = given.get("enum"), given.get("properties"), given.get("required")
    if isinstance(choices, list) and choices:
        return choices[0]
    if given.get("type") == "object":
        inner = properties if isinstance(properties, dict) else {}
        return {str(name): _value(inner.get(str(name))) for name in (required if isinstance(required, list) else ())}
    kinds: dict[str, JSON] = {"integer": 1, "number": 1.0, "boolean": True, "array": []}
    return kinds.get(str(given.get("type")), "something")


def right_words(truth: Truth) -> str:
    """What is right to say where no call is."""
    if truth.answer is not None:
        return truth.answer.accepted[0]
    if truth.ask is not None:
        return f"What is the {truth.ask.name.replace('_', ' ')}?"
    return NO_TOOL


def turns_of(gold: Sequence[GoldCall]) -> list[list[GoldCall]]:
    """The gold calls in turns: each as soon as the results that it takes are there."""
    depth: list[int] = []
    for call in gold:
        depth.append(1 + max((depth[place] for place in call.after), default=-1))
    return [[gold[i] for i, d in enumerate(depth) if d == turn] for turn in range(max(depth) + 1)]


def _unmended(truth: Truth, gold: GoldCall) -> ExpectedCall | None:
    """The call with the catalogue's names where they were changed, else without an argument."""
    call = gold.expected
    if not isinstance(truth.scene, Scene):
        return None
    offer = truth.scene.offer(gold.name)
    plain = {one.name: one.param.name for one in offer.params}
    if any(name != plain[name] for name in call.arguments):
        return ExpectedCall(call.name, {plain[name]: value for name, value in call.arguments.items()})
    left = list(call.arguments.items())[:-1]
    return ExpectedCall(call.name, dict(left)) if call.arguments else None


def _made_up(scene: Scene, ask: Ask | None, rng: random.Random) -> ExpectedCall:
    """A made-up call of the function that something is missing for, or of the first on offer."""
    name = ask.function if ask is not None else scene.offers[0].function.name
    offer = scene.offer(name)
    values = {param.name: param.of.draw(rng, "train") for param in offer.function.required}
    return ExpectedCall(name, offer.encode(values))


def _as_call(id_: str, call: ExpectedCall) -> MessageToolCall:
    arguments: dict[str, JSON] = dict(call.arguments)
    function = FunctionCall(name=call.name, arguments=json.dumps(arguments, ensure_ascii=False))
    return MessageToolCall(id=id_, type="function", function=function)
