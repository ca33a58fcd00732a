"""Grids of the package minigrid as text: the mission, the view of the agent and what it carries."""

from __future__ import annotations

import importlib
from typing import Protocol, cast

import numpy as np

ACTIONS = ("left", "right", "forward", "pickup", "drop", "toggle", "done")
LEGEND = "You are ^ and face up. # is a wall, . free, ? unseen; a digit is an object of the list."
_SIGNS = {"unseen": "?", "empty": ".", "wall": "#", "floor": "."}
_DOORS = ("open", "closed", "locked")


class GridObject(Protocol):
    """Interface of an object in a grid."""

    color: str
    type: str


class GridEnv(Protocol):
    """Interface of an environment of minigrid."""

    mission: str
    carrying: GridObject | None

    def gen_obs(self) -> dict[str, object]: ...


def is_grid(env: object) -> bool:
    """Return whether an environment, without wrappers, is one of minigrid."""
    return isinstance(env, importlib.import_module("minigrid.minigrid_env").MiniGridEnv)


def has_bot(env: object) -> bool:
    """Return whether the expert of minigrid plays it: the levels of BabyAI."""
    level = importlib.import_module("minigrid.envs.babyai.core.roomgrid_level").RoomGridLevel
    return isinstance(env, level)


class GridBot(Protocol):
    """Interface of the expert of BabyAI."""

    def replan(self, action_taken: object) -> int | None: ...


def make_bot(env: object) -> GridBot | None:
    """Return the expert of a level; None for any other grid."""
    if not has_bot(env):
        return None
    bot: GridBot = importlib.import_module("minigrid.utils.baby_ai_bot").BabyAIBot(env)
    return bot


def grid_text(env: object) -> str:
    """Return the mission and the view as text, from the agent (^, facing up); objects are numbered."""
    constants = importlib.import_module("minigrid.core.constants")
    grid = cast(GridEnv, env)
    view = np.asarray(grid.gen_obs()["image"])
    width, height = view.shape[:2]
    lines: list[str] = []
    things: list[str] = []
    for row in range(height):
        signs = []
        for column in range(width):
            kind, color, state = (int(one) for one in view[column, row])
            name = constants.IDX_TO_OBJECT[kind]
            sign = _SIGNS.get(name, "")
            if (column, row) == (width // 2, height - 1):
                sign = "^"
            elif not sign:
                door = f"{_DOORS[state]} " if name == "door" else ""
                things.append(f"{len(things) + 1}: {door}{constants.IDX_TO_COLOR[color]} {name}")
                sign = str(len(things) % 10)
            signs.append(sign)
        lines.append("".join(signs))
    carried = f"You carry a {grid.carrying.color} {grid.carrying.type}." if grid.carrying else "You carry nothing."
    return "\n".join((f"Mission: {grid.mission}", carried, *lines, *things))
