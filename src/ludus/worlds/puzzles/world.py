"""The puzzles world: nine games for one player."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Final, Literal, get_args

from pydantic import Field

from ludus.envs.settings import WorldSettings, read_settings
from ludus.envs.simulator_world import SimulatorWorld, make_task
from ludus.envs.tool_env import ToolLimits
from ludus.types import Task
from ludus.worlds.puzzles.base import Level, Puzzle, View
from ludus.worlds.puzzles.codes import Mastermind, Wordle
from ludus.worlds.puzzles.grids import FrozenLake, Maze, Sokoban
from ludus.worlds.puzzles.numbers import Bandit, Blackjack, Game2048, Hanoi

Game = Literal["frozenlake", "sokoban", "maze", "2048", "blackjack", "hanoi", "bandit", "wordle", "mastermind"]
"""Games for one player."""
PUZZLES: Final[Mapping[Game, type[Puzzle]]] = {
    "frozenlake": FrozenLake,
    "sokoban": Sokoban,
    "maze": Maze,
    "2048": Game2048,
    "blackjack": Blackjack,
    "hanoi": Hanoi,
    "bandit": Bandit,
    "wordle": Wordle,
    "mastermind": Mastermind,
}
GOALS: Final = ("frozenlake", "maze")
"""Games whose goal is a cell, which can be replaced by one that an attempt reached."""
_SHARES: Final = {"train": 0.7, "validation": 0.1, "test": 0.2}
_LEVELS: Final[Sequence[Level]] = get_args(Level)
_TRIES_PER_TASK: Final = 4


class PuzzlesSettings(WorldSettings):
    """Settings of the puzzles world (`env.settings`)."""

    game: Game | Literal["all"] = "all"
    levels: tuple[Level, ...] = Field((1, 2), min_length=1)
    """Sizes of the games in all splits but `composition`, which has level 3."""
    view: View = "grid"
    """Observations of the games on a grid: characters, or sentences with coordinates."""
    slip: float = Field(0.0, ge=0, le=1)
    """Probability that a move in FrozenLake goes to one of its sides; gymnasium's slippery lake has 2/3."""
    num_tasks: int = Field(1000, ge=10)
    """Number of tasks of each game and level; fewer if it has no more initial states."""
    flaw: float = Field(0.2, ge=0, le=1)
    """Fraction of random actions in demonstrations; they are in the loss."""
    seed: int = 0


def make_puzzle(task: Task, settings: PuzzlesSettings) -> Puzzle:
    """Return the game of a task in its initial state."""
    game = next(name for name in PUZZLES if name == task.tags["game"])
    level = next(one for one in _LEVELS if str(one) == task.tags["level"])
    puzzle = _new(game, level, task.seed, settings)
    if goal := task.tags.get("goal"):
        puzzle.set_goal(goal)
    return puzzle


@dataclass(frozen=True)
class Relabel:
    """The task with the goal that the actions of an attempt reached (FrozenLake, mazes), in the training split."""

    settings: PuzzlesSettings
    held_out: Sequence[Task]

    def __call__(self, task: Task, actions: Sequence[str]) -> Task | None:
        """Return the task; None for other games, if no other cell was reached, and if it equals a held-out game."""
        puzzle = make_puzzle(task, self.settings)
        for action in actions:
            if not puzzle.over:
                puzzle.step(action)
        goal = puzzle.achieved
        if not goal or puzzle.success:
            return None
        tags = {**task.tags, "goal": goal}
        other = make_puzzle(replace(task, tags=tags), self.settings)
        if other.instance() in self._instances:
            return None
        return make_task(other, f"{task.id}@{goal}", other.rules, tags, task.seed)

    @cached_property
    def _instances(self) -> frozenset[str]:
        """The initial states of the held-out games."""
        return frozenset(make_puzzle(task, self.settings).instance() for task in self.held_out)


def make_puzzles_world(settings: Mapping[str, object], limits: ToolLimits) -> SimulatorWorld:
    """Build the world (the registered factory); games take turns in every split. Raises ConfigError."""
    chosen = read_settings(PuzzlesSettings, settings)
    games = list(PUZZLES) if chosen.game == "all" else [chosen.game]
    lists: dict[str, list[Task]] = {split: [] for split in (*_SHARES, "composition")}
    for game in games:
        for level in sorted({*chosen.levels, 3}):
            for split, tasks in _tasks(game, level, chosen).items():
                lists[split] += tasks
    rng = random.Random(f"puzzles:{chosen.seed}")
    for tasks in lists.values():
        rng.shuffle(tasks)
    make = partial(make_puzzle, settings=chosen)
    held_out = [task for split, tasks in lists.items() if split != "train" for task in tasks]
    relabel = Relabel(chosen, [task for task in held_out if task.tags["game"] in GOALS])
    vary = partial(vary_puzzle, make, held_out)
    return SimulatorWorld("puzzles", lists, make, flaw=chosen.flaw, vary=vary, relabel=relabel)


def vary_puzzle(
    make: Callable[[Task], Puzzle], held_out: Sequence[Task], task: Task, rng: random.Random
) -> Task | None:
    """Return the same game and level with another seed; None if its initial state is that of a held-out task."""
    puzzle = make(seeded := replace(task, seed=rng.randrange(2**31)))
    same = (one for one in held_out if all(one.tags[name] == task.tags[name] for name in ("game", "level")))
    if not puzzle.stochastic and puzzle.instance() in {make(one).instance() for one in same}:
        return None
    tags = {**task.tags, "checkpoints": puzzle.checkpoints}
    return make_task(puzzle, task.id, puzzle.rules, tags, seeded.seed)


def _new(game: Game, level: Level, seed: int, settings: PuzzlesSettings) -> Puzzle:
    puzzle = PUZZLES[game](random.Random(f"{game}:{level}:{seed}"), level, settings.view)
    if isinstance(puzzle, FrozenLake):
        puzzle.slip = settings.slip
    return puzzle


def _tasks(game: Game, level: Level, settings: PuzzlesSettings) -> dict[str, list[Task]]:
    """Return the tasks of one game and level by split; no two have the same initial state."""
    rng, seen = random.Random(f"tasks:{game}:{level}:{settings.seed}"), set[str]()
    found: dict[str, list[Task]] = {split: [] for split in (*_SHARES, "composition")}
    for _ in range(_TRIES_PER_TASK * settings.num_tasks):
        if len(seen) == settings.num_tasks:
            break
        seed = rng.randrange(2**31)
        puzzle = _new(game, level, seed, settings)
        key = str(seed) if puzzle.stochastic else puzzle.instance()
        if key in seen:
            continue
        seen.add(key)
        drawn = rng.choices(list(_SHARES), list(_SHARES.values()))[0]
        splits = [drawn] if level in settings.levels else []
        if level == max(_LEVELS) and drawn == "test":
            splits.append("composition")
        for split in splits:
            tags = {
                "split": split,
                "family": game,
                "game": game,
                "level": str(level),
                "checkpoints": puzzle.checkpoints,
            }
            name = f"{game}-{level}-{split}-{len(found[split])}"
            found[split].append(make_task(puzzle, name, puzzle.rules, tags, seed))
    return found
