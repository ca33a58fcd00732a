"""One episode in a room: actions of the agent, observations, progress, and an expert that knows what was seen."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from ludus.envs.simulator_world import Observation, Simulator
from ludus.worlds.household.layouts import ADJECTIVES, HouseholdGoal, Layout, kind_of, listed, ranked, room_data

NOTHING = "Nothing happens."
_PUT = re.compile(r"^put (.+) (?:in|on) ")


class Household(Simulator):
    """An agent in a room, which is at one receptacle and holds at most one object.

    `contents` are the objects in each receptacle at the start. With `admissible` each observation lists the valid
    actions; with `visits` the checkpoints are the receptacles that were visited instead of progress on the goal.
    """

    def __init__(
        self,
        layout: Layout,
        goal: HouseholdGoal,
        contents: Mapping[str, Sequence[str]],
        *,
        admissible: bool = False,
        visits: bool = False,
    ) -> None:
        self.layout, self.goal = layout, goal
        self._contents = {place: list(things) for place, things in contents.items()}
        self._admissible, self._visits = admissible, visits
        self._at = self._held = ""
        self._open: set[str] = set()
        self._seen: set[str] = set()
        self._states: dict[str, frozenset[str]] = {}

    def reset(self) -> str:
        return f"{self._look()} {self.goal.text}{self._choices()}"

    def step(self, action: str) -> Observation:
        """Apply an action; one that is not valid in this state has no effect."""
        move = self._moves().get(_PUT.sub(r"put \1 in/on ", " ".join(action.lower().split())))
        text = NOTHING if move is None else self._apply(*move)
        if move is not None:
            self._record()
        return Observation(text + self._choices(), done=self.success == 1.0, valid=move is not None)

    def actions(self) -> Sequence[str]:
        return tuple(self._moves())

    def state_key(self) -> str:
        """Return the position, what is held, open and known, and the places and states of objects."""
        places = {place: things for place, things in self._contents.items() if things}
        states = {thing: sorted(state) for thing, state in sorted(self._states.items()) if state}
        return f"{self._at}|{self._held}|{sorted(self._open)}|{sorted(self._seen)}|{places}|{states}"

    def expert_action(self) -> str:
        """Return the next action of an agent that knows the contents of the receptacles it has seen.

        It searches the likeliest receptacles first, takes the object, changes its state if necessary, and brings it
        to the first receptacle of the goal's kind, or to the lamp.
        """
        goal, held = self.goal, self._held
        if not held:
            place = self._search(goal.kind)
            thing = self._visible_at(place, goal.kind)
            return self._reach(place) or f"take {thing} from {place}"
        if kind_of(held) != goal.kind:
            return self._reach(self._at) or f"put {held} in/on {self._at}"
        if goal.family == "light":
            place = self._search(goal.target)
            return self._reach(place) or f"use {self._visible_at(place, goal.target)}"
        if goal.adjective and goal.adjective not in self._states.get(held, ()):
            device = self._first(room_data().devices[goal.family])
            return f"go to {device}" if self._at != device else f"{goal.family} {held} with {device}"
        target = self._first(goal.target)
        return self._reach(target) or f"put {held} in/on {target}"

    def holds(self, place_kind: str, kind: str) -> bool:
        """Return whether a receptacle of a kind holds an object of a kind."""
        return any(kind_of(p) == place_kind and self._visible_at(p, kind) for p in self.layout.receptacles)

    def _first(self, kind: str) -> str:
        return next(place for place in self.layout.receptacles if kind_of(place) == kind)

    def _search(self, kind: str) -> str:
        """Return a receptacle where an object of the kind was seen, else the likeliest of those not seen."""
        done = self._first(self.goal.target) if self.goal.count > 1 else ""
        places = [place for place in ranked(self.layout, kind) if place != done]
        known = (place for place in places if place in self._seen and self._visible_at(place, kind))
        return next(known, "") or next(place for place in places if place not in self._seen)

    def _visible_at(self, place: str, kind: str) -> str:
        return next((thing for thing in self._contents[place] if kind_of(thing) == kind), "")

    def _reach(self, place: str) -> str:
        """Return an action that brings the agent to an open receptacle; empty if it is there."""
        if self._at != place:
            return f"go to {place}"
        return f"open {place}" if self._closed(place) else ""

    def _closed(self, place: str) -> bool:
        return kind_of(place) in room_data().openable and place not in self._open

    def _moves(self) -> dict[str, tuple[str, str]]:
        """Return the valid actions, each with its verb and object."""
        at, held, data = self._at, self._held, room_data()
        moves = {f"go to {place}": ("go to", place) for place in self.layout.receptacles if place != at}
        if at and kind_of(at) in data.openable:
            verb = "open" if self._closed(at) else "close"
            moves[f"{verb} {at}"] = (verb, at)
        near = [] if not at or self._closed(at) else self._contents[at]
        for thing in near:
            if kind_of(thing) in data.lamps:
                moves[f"use {thing}"] = ("use", thing)
            elif not held:
                moves[f"take {thing} from {at}"] = ("take", thing)
        if held and not self._closed(at):
            moves[f"put {held} in/on {at}"] = ("put", held)
        for verb in data.objects[kind_of(held)].verbs if held else ():
            if data.devices[verb] == kind_of(at):
                moves[f"{verb} {held} with {at}"] = (verb, held)
        moves |= {f"examine {name}": ("examine", name) for name in (at, held, *near) if name}
        return {**moves, "look": ("look", ""), "inventory": ("inventory", "")}

    def _apply(self, verb: str, name: str) -> str:
        at = self._at
        match verb:
            case "go to":
                self._at = name
                return self._look()
            case "open":
                self._open.add(at)
                return f"You open {at}. {self._see()}"
            case "close":
                self._open.discard(at)
                return f"You close {at}."
            case "take":
                self._contents[at].remove(name)
                self._held = name
                return f"You take {name} from {at}."
            case "put":
                self._contents[at].append(name)
                self._held = ""
                return f"You put {name} in/on {at}."
            case "inventory":
                return f"You hold {listed([self._held])}." if self._held else "You hold nothing."
            case "look":
                return self._look()
            case "examine":
                return self._see() if name == at else self._examine(name)
        return self._change(verb, name)

    def _change(self, verb: str, name: str) -> str:
        """Switch a lamp, or change the state of the object in the hand."""
        state = self._states.get(name, frozenset())
        if verb == "use":
            self._states[name] = state ^ {"on"}
            return f"You switch {name} {'off' if state else 'on'}."
        replaced = set() if verb == "clean" else {"hot", "cold"}
        self._states[name] = state - replaced | {ADJECTIVES[verb]}
        return f"You {verb} {name} with {self._at}."

    def _look(self) -> str:
        if not self._at:
            return f"You are in a {self.layout.room}. You see {listed(self.layout.receptacles)}."
        return f"You are at {self._at}. {self._see()}"

    def _see(self) -> str:
        """Return what is in the receptacle at which the agent is."""
        if self._closed(self._at):
            return "It is closed."
        self._seen.add(self._at)
        things = self._contents[self._at]
        return f"You see {listed(things)}." if things else "You see nothing."

    def _examine(self, thing: str) -> str:
        state = sorted(self._states.get(thing, ()))
        return f"{thing} is {' and '.join(state)}." if state else f"There is nothing special about {thing}."

    def _choices(self) -> str:
        """Return the admissible actions, except those to the other receptacles; empty if they are not shown."""
        names = [name for name in self._moves() if not name.startswith("go to ")] if self._admissible else []
        return f"\nActions: go to, {', '.join(names)}" if names else ""

    def _record(self) -> None:
        self.success = float(self._is_solved())
        found = {self._at} - {""} if self._visits else set(self._progress())
        if not found <= self.reached:
            self.reached |= found

    def _progress(self) -> Iterator[str]:
        """Yield the checkpoints that hold in this state."""
        goal = self.goal
        if self._at in self._seen and self._visible_at(self._at, goal.kind):
            yield "find"
        if kind_of(self._held) == goal.kind:
            yield "take"
            if goal.adjective and goal.adjective in self._states.get(self._held, ()):
                yield goal.family
        if goal.family == "two" and kind_of(self._at) == goal.target and self._visible_at(self._at, goal.kind):
            yield "put"
        if self.success:
            yield goal.checkpoints[-1]

    def _is_solved(self) -> bool:
        goal, at = self.goal, self._at
        if goal.family == "light":
            lit = (kind_of(thing) == goal.target and self._states.get(thing) for thing in self._contents.get(at, ()))
            return kind_of(self._held) == goal.kind and any(lit)
        if kind_of(at) != goal.target:
            return False
        fit = (kind_of(t) == goal.kind and goal.adjective in ("", *self._states.get(t, ())) for t in self._contents[at])
        return sum(fit) >= goal.count
