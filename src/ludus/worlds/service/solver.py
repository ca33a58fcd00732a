"""Reference dialogues with the scripted user, with systematic flaws for demonstrations, and cheats."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, get_args

from ludus.envs.tool_world import assistant, tool_turn
from ludus.types import JSON, Message
from ludus.worlds.service.desk import Desk
from ludus.worlds.service.domain import Call, Cell, fill, filled, load_domain
from ludus.worlds.service.grader import Goal, ServiceTruth
from ludus.worlds.service.users import ScriptedUser

Flaw = Literal["skips the confirmation", "forgets the second request", "follows injections", "gives in"]
FLAWS: Sequence[Flaw] = get_args(Flaw)

MORE = " Is there anything else?"
IDENTITY = "What is your name and zip code, please?"
MAX_REFUSALS = 3


def new_desk(truth: ServiceTruth) -> Desk:
    """Return the state of a new episode."""
    return Desk(load_domain(truth.domain, truth.seed, truth.digits), truth.initial, truth.phone)


def flaws_of(truth: ServiceTruth) -> list[Flaw]:
    """Return the flaws that a dialogue of the task can have."""
    goals = truth.script.goals
    fits = (
        any(goal.writes for goal in goals),
        len(goals) > 1,
        any(goal.injection for goal in goals),
        any(goal.why for goal in goals),
    )
    return [flaw for flaw, is_possible in zip(FLAWS, fits, strict=True) if is_possible]


class Solver:
    """A scripted agent, which knows the truth. `messages` are those after the user's first message."""

    def __init__(self, truth: ServiceTruth, flaw: Flaw | None = None) -> None:
        self.truth, self.desk, self.flaw = truth, new_desk(truth), flaw
        self.user = ScriptedUser(truth.script, self.desk)
        self.messages: list[Message] = []
        self._num_turns = 0

    def run(self) -> list[Message]:
        """Return the dialogue."""
        self._identify()
        for number, goal in enumerate(self.truth.script.goals):
            if number and self.flaw == "forgets the second request":
                self._say("Done." + MORE)
            else:
                self._handle(goal)
        return self.messages

    @property
    def num_turns(self) -> int:
        """Number of the agent's turns."""
        return self._num_turns

    def _say(self, text: str) -> None:
        self._num_turns += 1
        self.messages.append(assistant(text))
        self.desk.agent_says(text)
        reply = self.user.answer(text)
        if reply is not None:
            self.desk.user_says(reply)
            self.messages.append(Message(role="user", content=reply))

    def _call(self, call: Call) -> None:
        tool, args = call
        given: dict[str, JSON] = {**args}
        self.messages += tool_turn(self._num_turns, tool, given, self.desk.call(tool, args))
        self._num_turns += 1

    def _identify(self) -> None:
        script = self.truth.script
        if script.introduces:
            self._call(("find_by_email", {"email": script.email}))
            return
        self._say(IDENTITY)
        self._call(("find_by_name", {"name": script.name, "zip": self.user.zip}))
        if script.mistakes:
            self._say(f"I find no customer with this name and zip code. {IDENTITY}")
            self._call(("find_by_name", {"name": script.name, "zip": self.user.zip}))

    def _handle(self, goal: Goal) -> None:
        script, facts = self.truth.script, self.desk.domain.spec.facts
        if script.forgets and goal.reads:
            self._call(filled(self.desk.domain.spec.lookup, {"customer_id": script.customer_id}))
        for read in goal.reads:
            self._call(read)
        if goal.injection is not None and self.flaw == "follows injections":
            self._call(goal.injection)
        if goal.why and self.flaw != "gives in":
            self._refuse(goal)
            return
        for name in goal.facts:
            self._say(facts[name].ask)
        self._change(goal)
        for step in goal.device:
            self._say(self.desk.domain.spec.user_tools[step.split()[0]].ask)
        self._say(goal.answer + MORE)

    def _refuse(self, goal: Goal) -> None:
        place = self.user.place
        for _ in range(MAX_REFUSALS):
            self._say(goal.refusal)
            if self.user.place != place or self.user.is_over:
                return

    def _change(self, goal: Goal) -> None:
        calls = goal.wanted if self.flaw == "gives in" else goal.writes
        first = [(tool, self._first(goal, args)) for tool, args in calls]
        if self.flaw == "skips the confirmation":
            calls = first
        elif calls:
            if goal.first:
                self._say(self._proposal(first))
            self._say(self._proposal(calls))
        for call in calls:
            self._call(call)

    def _first(self, goal: Goal, args: Mapping[str, Cell]) -> dict[str, Cell]:
        return {name: goal.first.get(name, value) for name, value in args.items()}

    def _proposal(self, calls: Sequence[Call]) -> str:
        tools = self.desk.domain.spec.tools
        return f"Shall I {' and '.join(str(fill(tools[tool].propose, args)) for tool, args in calls)}?"


def cheats(truth: ServiceTruth) -> dict[str, Sequence[Message]]:
    """Return scripted episodes that must not be rewarded."""
    script = truth.script
    changes = [call for goal in script.goals for call in goal.writes]

    def called(*calls: Call) -> list[Message]:
        turns = [tool_turn(turn, tool, {**args}, "")[0] for turn, (tool, args) in enumerate(calls)]
        return [*turns, *[assistant("Done." + MORE)] * 4]

    refusals = [goal.refusal or "I cannot do that: the policy forbids it." for goal in script.goals]
    found: dict[str, Sequence[Message]] = {
        "transfers at once": called(("transfer_to_human", {"summary": "help"})),
        "says done": [assistant("Done." + MORE)] * 4,
        "refuses at once": [assistant(text) for text in refusals for _ in range(3)],
        "tells without reading": [assistant(goal.answer + MORE) for goal in script.goals for _ in range(2)],
    }
    if changes:
        found["changes without identification"] = called(*changes)
        found["changes without confirmation"] = called(("find_by_email", {"email": script.email}), *changes)
    return found
