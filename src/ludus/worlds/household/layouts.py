"""Rooms, goals and the places of objects, generated from `data/rooms.toml`."""

from __future__ import annotations

import random
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from itertools import cycle
from typing import Final, Literal

from ludus.envs.settings import WorldSettings

Family = Literal["place", "light", "clean", "heat", "cool", "two"]
FAMILIES: Final[tuple[Family, ...]] = ("place", "light", "clean", "heat", "cool", "two")
"""The six families of ALFWorld."""
ADJECTIVES: Final = {"clean": "clean", "heat": "hot", "cool": "cold"}
"""State of an object after a verb."""
HELD_OUT: Final = 0.2
"""Fraction of the pairs of an object and its goal that are in the split `composition` only."""


class RoomType(WorldSettings):
    """A type of room: fewest and most receptacles of each kind, and kinds of objects."""

    receptacles: dict[str, tuple[int, int]]
    objects: tuple[str, ...]
    held_out: bool = False


class ObjectType(WorldSettings):
    """A kind of object: its receptacles, likeliest first, and the verbs that change it."""

    receptacles: tuple[str, ...]
    verbs: tuple[Literal["clean", "heat", "cool"], ...] = ()


class RoomData(WorldSettings):
    """The content of `data/rooms.toml`."""

    openable: tuple[str, ...]
    lamps: tuple[str, ...]
    devices: dict[str, str]
    rooms: dict[str, RoomType]
    objects: dict[str, ObjectType]


@cache
def room_data() -> RoomData:
    """Return the content of the data file."""
    text = (resources.files("ludus.worlds.household") / "data/rooms.toml").read_text("utf-8")
    return RoomData.model_validate(tomllib.loads(text))


@dataclass(frozen=True, slots=True)
class Layout:
    """A room of a type with its receptacles, such as `desk 1`."""

    name: str
    room: str
    receptacles: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class HouseholdGoal:
    """A kind of object and the kind of receptacle that should hold it, or of lamp that should light it."""

    family: Family
    kind: str
    target: str

    @property
    def count(self) -> int:
        """Number of objects, all in the same receptacle."""
        return 2 if self.family == "two" else 1

    @property
    def adjective(self) -> str:
        """State that the object needs; empty for any."""
        return ADJECTIVES.get(self.family, "")

    @property
    def checkpoints(self) -> tuple[str, ...]:
        """The progress checkpoints of the goal."""
        last = {"place": ("put",), "light": ("light",), "two": ("put", "put both")}
        return "find", "take", *last.get(self.family, (self.family, "put"))

    @property
    def text(self) -> str:
        """The sentence in the prompt."""
        if self.family == "light":
            return f"Look at {with_article(self.kind)} in the light of {with_article(self.target)}."
        things = with_article(f"{self.adjective} {self.kind}".strip()) + f" and another {self.kind}" * (self.count - 1)
        return f"Put {things} in/on {with_article(self.target)}."


def kind_of(name: str) -> str:
    """Return the kind of an object or receptacle: `mug` for `mug 1`."""
    return name.rpartition(" ")[0]


def with_article(name: str) -> str:
    """Return a noun with its indefinite article."""
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


def listed(names: Sequence[str]) -> str:
    """Return nouns with articles as an enumeration."""
    *first, last = map(with_article, names)
    return f"{', '.join(first)} and {last}" if first else last


@cache
def is_held_out(kind: str, target: str) -> bool:
    """Return whether the pair of an object and its goal is in the split `composition` only."""
    return random.Random(f"household/pair/{kind}/{target}").random() < HELD_OUT


def make_layouts(rooms: Sequence[str], seed: str) -> Iterator[Layout]:
    """Yield layouts of the rooms in turn without end; no two have the same receptacles."""
    rng = random.Random(seed)
    seen: set[tuple[str, ...]] = {()}
    for number, room in enumerate(cycle(rooms)):
        names: tuple[str, ...] = ()
        while names in seen:
            counts = ((kind, rng.randint(*bounds)) for kind, bounds in room_data().rooms[room].receptacles.items())
            names = tuple(f"{kind} {n}" for kind, most in counts for n in range(1, most + 1))
        seen.add(names)
        yield Layout(f"{room} {number}", room, names)


def goals_of(layout: Layout, families: Sequence[Family]) -> Iterator[HouseholdGoal]:
    """Yield the goals that are possible in a layout."""
    data, kinds = room_data(), set(map(kind_of, layout.receptacles))
    objects = data.rooms[layout.room].objects
    lamps = [lamp for lamp in data.lamps if lamp in objects and kinds.intersection(data.objects[lamp].receptacles)]
    for kind in objects:
        places = [place for place in data.objects[kind].receptacles if place in kinds]
        if kind in data.lamps or not places:
            continue
        for family in families:
            device = data.devices.get(family)
            if family == "light":
                yield from (HouseholdGoal(family, kind, lamp) for lamp in lamps)
            elif device is None or (device in kinds and family in data.objects[kind].verbs):
                yield from (
                    HouseholdGoal(family, kind, place) for place in places if len(places) > 1 and place != device
                )


def place_objects(layout: Layout, goal: HouseholdGoal, num: int, seed: str) -> dict[str, list[str]]:
    """Return the objects in each receptacle: at least `num`, with those of the goal outside of its receptacles."""
    data, rng = room_data(), random.Random(seed)
    held: dict[str, list[str]] = {place: [] for place in layout.receptacles}
    lamps = [goal.target] if goal.family == "light" else []
    kinds = [goal.kind] * rng.randint(goal.count, 2) + lamps
    objects = data.rooms[layout.room].objects
    for kind in rng.sample(objects, len(objects)):
        if len(kinds) < num and kind not in (goal.kind, *lamps):
            kinds += [kind] * (1 if kind in data.lamps else rng.randint(1, 2))
    for place, kind in enumerate(kinds):
        likely = data.objects[kind].receptacles
        weights = {p: 1 / (1 + likely.index(kind_of(p))) for p in held if kind_of(p) in likely}
        if kind == goal.kind:
            weights = {p: weight for p, weight in weights.items() if kind_of(p) != goal.target}
        if weights:
            chosen = rng.choices(list(weights), list(weights.values()))[0]
            held[chosen].append(f"{kind} {kinds[: place + 1].count(kind)}")
    return held


def ranked(layout: Layout, kind: str) -> list[str]:
    """Return the receptacles of a layout in the order in which to search for a kind: the likeliest first."""
    likely = room_data().objects[kind].receptacles
    return sorted(layout.receptacles, key=lambda name: (*likely, kind_of(name)).index(kind_of(name)))
