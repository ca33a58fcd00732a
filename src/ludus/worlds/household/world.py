"""The household world: ALFWorld's six families of tasks in rooms generated from a data file.

The agent searches a room for an object, changes its state with a device if the goal requires it, and brings it to a
receptacle or a lamp. The mistakes in demonstrations are systematic: they skip the device, or put the object into a
receptacle of another kind.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice, zip_longest
from typing import Final, Literal

from pydantic import Field

from ludus.envs.settings import WorldSettings, read_settings
from ludus.envs.simulator_world import SimulatorWorld, play_expert
from ludus.envs.tool_env import ToolLimits
from ludus.envs.tool_world import Dialogue
from ludus.types import Message, Task, grouped
from ludus.worlds.household.layouts import (
    FAMILIES,
    Family,
    HouseholdGoal,
    Layout,
    goals_of,
    is_held_out,
    kind_of,
    make_layouts,
    place_objects,
    room_data,
)
from ludus.worlds.household.simulator import Household

SPLITS: Final = {"train": 0.6, "validation": 0.1, "test": 0.15, "composition": 0.15}
"""Fractions of the layouts."""
SYSTEM: Final = (
    "Reply with one action: go to, open, close, take from, put in/on, clean with, heat with, cool with, use, examine, "
    "look or inventory."
)
Room = Literal["kitchen", "bedroom", "bathroom", "living room"]


class HouseholdSettings(WorldSettings):
    """Settings of the household world (`env.settings`)."""

    rooms: tuple[Room, ...] = Field(
        ("kitchen", "bedroom", "kitchen", "bathroom", "kitchen", "living room"), min_length=1
    )
    """Rooms of the layouts in turn, except of those of `composition`, which are studios."""
    families: tuple[Family, ...] = Field(FAMILIES, min_length=1)
    """Families of the goals: `place`, `light`, `clean`, `heat`, `cool`, `two`."""
    num_layouts: int = Field(500, ge=20, le=1000)
    """Layouts of all splits together. Splits share no layout."""
    tasks_per_layout: int = Field(12, ge=1)
    """Tasks in each layout, with other goals and places of objects; fewer if it has fewer goals."""
    num_objects: int = Field(12, ge=3, le=40)
    """Least number of objects in a room, unless it has fewer."""
    admissible: bool = False
    """Whether each observation lists the valid actions, except those to other receptacles."""
    checkpoints: Literal["progress", "visits"] = "progress"
    """What the reward part `coverage` counts: steps towards the goal, or receptacles that were visited."""
    forget: float = Field(0.4, ge=0, le=1)
    """Fraction of the demonstrations of `clean`, `heat` and `cool` that skip the device."""
    misplace: float = Field(0.2, ge=0, le=1)
    """Fraction of the demonstrations that put the object into a receptacle of another kind, the first of the room."""
    seed: int = 0


@dataclass(frozen=True)
class HouseholdWorld(SimulatorWorld):
    """Tasks in generated rooms."""

    settings: HouseholdSettings = field(default_factory=HouseholdSettings)
    layouts: Mapping[str, Layout] = field(default_factory=dict)

    def demonstrations(self, seed: int) -> Iterator[Dialogue]:
        """Yield the expert's episodes on training tasks; with a mistake they end with the last action."""
        rng, settings = random.Random(f"household/{self.settings.seed}/show/{seed}"), self.settings
        while True:
            task = rng.choice(self.task_lists["train"])
            forgets, misplaces = rng.random() < settings.forget, rng.random() < settings.misplace
            goal = wrong_goal(simulate(self.layouts, self.settings, task), forgets, misplaces)
            if (shown := self._attempt(task, goal)) is not None:
                yield shown

    def cheats(self, task: Task) -> Mapping[str, Sequence[Message]]:
        """Return episodes that claim success or say nothing, and those with the mistakes of demonstrations."""
        cheats = dict(super().cheats(task))
        for name, forgets in (("forgets", True), ("misplaces", False)):
            goal = wrong_goal(simulate(self.layouts, self.settings, task), forgets, not forgets)
            if goal != goal_of(task) and (shown := self._attempt(task, goal)) is not None:
                cheats[name] = shown.messages[len(task.prompt) :]
        return cheats

    def _attempt(self, task: Task, goal: HouseholdGoal) -> Dialogue | None:
        return play_expert(task, simulate(self.layouts, self.settings, task, goal))


def simulate(
    layouts: Mapping[str, Layout], settings: HouseholdSettings, task: Task, goal: HouseholdGoal | None = None
) -> Household:
    """Return a new episode of a task, with another goal if there is one."""
    layout, given = layouts[task.tags["layout"]], goal_of(task)
    contents = place_objects(layout, given, settings.num_objects, f"household/{settings.seed}/{task.id}")
    visits = settings.checkpoints == "visits"
    return Household(layout, goal or given, contents, admissible=settings.admissible, visits=visits)


def wrong_goal(simulator: Household, forgets: bool, misplaces: bool) -> HouseholdGoal:
    """Return the goal in a receptacle of the first other kind in the room, or else without the state of the object."""
    goal = simulator.goal
    kinds = (kind_of(place) for place in simulator.layout.receptacles)
    other = next((kind for kind in kinds if kind != goal.target and not simulator.holds(kind, goal.kind)), "")
    if misplaces and other:
        return HouseholdGoal("two" if goal.count > 1 else "place", goal.kind, other)
    return replace(goal, family="place") if forgets and goal.adjective else goal


def goal_of(task: Task) -> HouseholdGoal:
    """Return the goal in the tags of a task."""
    family = next(one for one in FAMILIES if one == task.tags["family"])
    return HouseholdGoal(family, task.tags["object"], task.tags["target"])


def split_layouts(settings: HouseholdSettings) -> dict[str, list[Layout]]:
    """Return the layouts of each split."""
    name = f"household/{settings.seed}"
    seen = make_layouts(settings.rooms, name)
    new = make_layouts([room for room, data in room_data().rooms.items() if data.held_out], f"{name}/composition")
    sizes = ((split, round(share * settings.num_layouts)) for split, share in SPLITS.items())
    return {split: list(islice(new if split == "composition" else seen, size)) for split, size in sizes}


def tasks_of(layout: Layout, split: str, settings: HouseholdSettings) -> Iterator[Task]:
    """Yield the tasks in a layout, of its families in turn."""
    rng, new = random.Random(f"household/{settings.seed}/tasks/{layout.name}"), split == "composition"
    allowed = (one for one in goals_of(layout, settings.families) if is_held_out(one.kind, one.target) is new)
    by_family = grouped(allowed, lambda goal: goal.family)
    for goals in by_family.values():
        rng.shuffle(goals)
    families = rng.sample(list(by_family), len(by_family))
    turns = (goal for goals in zip_longest(*(by_family[one] for one in families)) for goal in goals if goal)
    for goal in islice(turns, settings.tasks_per_layout):
        first = Household(layout, goal, {}, admissible=settings.admissible).reset()
        num = len(layout.receptacles if settings.checkpoints == "visits" else goal.checkpoints)
        tags = {"split": split, "family": goal.family, "room": layout.room, "layout": layout.name}
        tags |= {"object": goal.kind, "target": goal.target, "checkpoints": str(num)}
        prompt = (Message(role="system", content=SYSTEM), Message(role="user", content=first))
        yield Task(f"{layout.name}/{goal.family}/{goal.kind}/{goal.target}", prompt, None, tags)


def make_household_world(settings: Mapping[str, object], limits: ToolLimits) -> HouseholdWorld:
    """Build the world (the registered factory). Raises ConfigError for invalid settings."""
    chosen = read_settings(HouseholdSettings, settings)
    layouts = split_layouts(chosen)
    lists = {
        split: [one for room in group for one in tasks_of(room, split, chosen)] for split, group in layouts.items()
    }
    for split, tasks in lists.items():
        random.Random(f"household/{chosen.seed}/{split}").shuffle(tasks)
    by_name = {layout.name: layout for group in layouts.values() for layout in group}
    return HouseholdWorld(
        "household",
        lists,
        partial(simulate, by_name, chosen),
        emits_turn_rewards=False,
        settings=chosen,
        layouts=by_name,
    )
