"""`Puzzle`, the base of the games for one player, and breadth-first search for their experts."""

from __future__ import annotations

import random
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import ClassVar, Literal, TypeVar

from ludus.envs.simulator_world import Observation, Simulator

State = TypeVar("State", bound=Hashable)
Level = Literal[1, 2, 3]
View = Literal["grid", "text"]
"""Observation of the games on a grid: a picture of characters, or sentences with coordinates."""


class Puzzle(Simulator):
    """A game for one player. A subclass sets `rules` and defines `actions`, `shown`, `apply` and `expert_action`.

    `level` sets the size. All randomness is that of `rng`, which no observation shows.
    """

    rules: ClassVar[str]
    hint: ClassVar[str] = ""
    """Reply to an invalid action; by default the valid ones."""
    stochastic: ClassVar[bool] = False
    """Whether equal initial states may go on differently, so that tasks are told apart by their seeds."""
    checkpoints: str = "0"
    """Number of exploration checkpoints."""
    over: bool = False
    achieved: str = ""
    """Goal, other than its own, that the game so far has reached, for `set_goal`; empty without one."""

    def __init__(self, rng: random.Random, level: Level, view: View = "grid") -> None:
        self.rng, self.level, self.view = rng, level, view

    @abstractmethod
    def shown(self) -> str:
        """Return the observation of the present state."""

    @abstractmethod
    def apply(self, action: str) -> float:
        """Apply a valid action, and return its reward; sets `success`, and `over` at the end of the game."""

    def set_goal(self, goal: str) -> None:
        """Replace the goal before the start; games without `achieved` have no other goals."""
        raise NotImplementedError

    def instance(self) -> str:
        """Return a text that identifies the whole initial state, so that no two splits share a game."""
        return self.shown()

    def reset(self) -> str:
        return self.shown()

    def step(self, action: str) -> Observation:
        if action not in self.actions():
            return Observation(self.hint or f"Not possible. Actions: {', '.join(self.actions())}", valid=False)
        reward = self.apply(action)
        return Observation(self.shown(), reward, self.over)

    def state_key(self) -> str:
        return self.shown()


def shortest(
    start: State, moves: Callable[[State], Iterable[tuple[str, State]]], is_goal: Callable[[State], bool]
) -> Sequence[str] | None:
    """Return the actions of a shortest path to a goal; None if there is none."""
    before: dict[State, tuple[str, State] | None] = {start: None}
    queue = deque([start])
    while queue:
        state = queue.popleft()
        if is_goal(state):
            path: list[str] = []
            while (step := before[state]) is not None:
                path.append(step[0])
                state = step[1]
            return path[::-1]
        for action, following in moves(state):
            if following not in before:
                before[following] = action, state
                queue.append(following)
    return None
