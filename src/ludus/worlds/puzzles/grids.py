"""Games on a grid: FrozenLake (the rules of gymnasium), Sokoban (the sizes of RAGEN, arXiv:2504.20073), and mazes."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import ClassVar, Final

from ludus.types import grouped
from ludus.worlds.puzzles.base import Level, Puzzle, View, shortest

Cell = tuple[int, int]

MOVES: Final = {"left": (0, -1), "down": (1, 0), "right": (0, 1), "up": (-1, 0)}
_NAMES: Final = {"P": "player", "O": "hole", "G": "goal", "#": "wall", "X": "box", "T": "target"}
_MAX_TRIES: Final = 1000
_MIN_PATH: Final = 4
"""Minimum number of moves that solve a room of Sokoban."""


def moved(cell: Cell, action: str) -> Cell:
    """Return the neighbour of a cell."""
    return cell[0] + MOVES[action][0], cell[1] + MOVES[action][1]


def _cell(text: str) -> Cell:
    row, column = text.split(",")
    return int(row), int(column)


def drawn(size: int, cells: dict[Cell, str], view: View) -> str:
    """Return a square as rows of characters, or as sentences with the cells of each kind as row,column."""
    if view == "grid":
        return "\n".join("".join(cells.get((i, j), "_") for j in range(size)) for i in range(size))
    kinds = grouped(sorted(cells), lambda cell: cells[cell])
    return f"{size} rows. " + " ".join(
        f"{_NAMES[kind]}: {' '.join(f'{i},{j}' for i, j in kinds[kind])}." for kind in _NAMES if kind in kinds
    )


class FrozenLake(Puzzle):
    """Cross a lake without falling into a hole. With probability `slip` a move goes to one of its sides."""

    rules: ClassVar[str] = "Walk from P to G without falling into a hole O. Reply with left, down, right or up."
    slip: float = 0.0

    def __init__(self, rng: random.Random, level: Level, view: View = "grid") -> None:
        super().__init__(rng, level, view)
        self.size, self.at = level + 3, (0, 0)
        cells = [(i, j) for i in range(self.size) for j in range(self.size)]
        self.goal = cells[-1]
        while True:
            self.holes = {cell for cell in cells[1:-1] if rng.random() < 0.25}
            if self._path() is not None:
                break

    def set_goal(self, goal: str) -> None:
        """Move G to another cell."""
        self.goal = _cell(goal)

    def _path(self) -> Sequence[str] | None:
        def moves(cell: Cell) -> Iterator[tuple[str, Cell]]:
            for action in MOVES:
                following = self._clipped(moved(cell, action))
                if following not in self.holes:
                    yield action, following

        return shortest(self.at, moves, lambda cell: cell == self.goal)

    def _clipped(self, cell: Cell) -> Cell:
        return min(max(cell[0], 0), self.size - 1), min(max(cell[1], 0), self.size - 1)

    def actions(self) -> Sequence[str]:
        return tuple(MOVES)

    def shown(self) -> str:
        return drawn(self.size, {**dict.fromkeys(self.holes, "O"), self.goal: "G", self.at: "P"}, self.view)

    def apply(self, action: str) -> float:
        names = tuple(MOVES)
        if self.rng.random() < self.slip:
            action = names[(names.index(action) + self.rng.choice((-1, 1))) % len(names)]
        self.at = self._clipped(moved(self.at, action))
        if self.at not in self.holes:
            self.achieved = "" if self.at == (0, 0) else f"{self.at[0]},{self.at[1]}"
        self.over = self.at == self.goal or self.at in self.holes
        self.success = float(self.at == self.goal)
        return self.success

    def expert_action(self) -> str | None:
        path = self._path()
        return path[0] if path else None


class Sokoban(Puzzle):
    """Push all boxes onto targets. Rooms are made by pulling boxes away from the targets, so all can be solved."""

    rules: ClassVar[str] = (
        "Push every box X onto a target T. P is you, # a wall, * a box on a target, + you on a target. "
        "Reply with left, down, right or up."
    )
    _sizes: ClassVar = {1: (5, 1), 2: (6, 1), 3: (6, 2)}

    def __init__(self, rng: random.Random, level: Level, view: View = "grid") -> None:
        super().__init__(rng, level, view)
        self.size, num_boxes = self._sizes[level]
        inner = [(i, j) for i in range(1, self.size - 1) for j in range(1, self.size - 1)]
        for _ in range(_MAX_TRIES):
            self.walls = {(i, j) for i in range(self.size) for j in range(self.size)} - set(inner)
            self.walls |= set(rng.sample(inner, len(inner) // 5))
            free = [cell for cell in inner if cell not in self.walls]
            self.targets = frozenset(rng.sample(free, num_boxes))
            self.at, self.boxes = rng.choice([cell for cell in free if cell not in self.targets]), self.targets
            for _ in range(30 * num_boxes):
                self._pull(rng.choice(tuple(MOVES)))
            path = None if self.boxes & self.targets else self._path()
            if path is not None and len(path) >= _MIN_PATH:
                return
        raise RuntimeError("no room was found")

    def _pull(self, action: str) -> None:
        """Walk, and pull the box behind."""
        following, behind = moved(self.at, action), (2 * self.at[0], 2 * self.at[1])
        behind = behind[0] - following[0], behind[1] - following[1]
        if following in self.walls or following in self.boxes:
            return
        if behind in self.boxes:
            self.boxes = self.boxes - {behind} | {self.at}
        self.at = following

    def _push(self, at: Cell, boxes: frozenset[Cell], action: str) -> tuple[Cell, frozenset[Cell]]:
        following = moved(at, action)
        if following in self.walls:
            return at, boxes
        if following in boxes:
            beyond = moved(following, action)
            if beyond in self.walls or beyond in boxes:
                return at, boxes
            boxes = boxes - {following} | {beyond}
        return following, boxes

    def _path(self) -> Sequence[str] | None:
        State = tuple[Cell, frozenset[Cell]]

        def moves(state: State) -> Iterator[tuple[str, State]]:
            for action in MOVES:
                yield action, self._push(*state, action)

        return shortest((self.at, self.boxes), moves, lambda state: state[1] == self.targets)

    def actions(self) -> Sequence[str]:
        return tuple(MOVES)

    def shown(self) -> str:
        cells = {**dict.fromkeys(self.walls, "#"), **dict.fromkeys(self.targets, "T"), **dict.fromkeys(self.boxes, "X")}
        cells[self.at] = "P"
        if self.view == "grid":
            cells |= dict.fromkeys(self.boxes & self.targets, "*") | ({self.at: "+"} if self.at in self.targets else {})
            return drawn(self.size, cells, self.view)
        targets = " ".join(f"{i},{j}" for i, j in sorted(self.targets))
        return (
            drawn(self.size, {at: kind for at, kind in cells.items() if kind != "T"}, "text") + f" target: {targets}."
        )

    def apply(self, action: str) -> float:
        before = len(self.boxes & self.targets)
        self.at, self.boxes = self._push(self.at, self.boxes, action)
        placed = len(self.boxes & self.targets)
        self.over = placed == len(self.targets)
        self.success = float(self.over)
        return (placed - before) / len(self.targets)

    def expert_action(self) -> str | None:
        path = self._path()
        return path[0] if path else None


class Maze(Puzzle):
    """Find the exit of a maze of which only the passages from the present cell are shown.

    The exploration checkpoints are the cells. The expert walks to the nearest cell that it has not seen.
    """

    rules: ClassVar[str] = "Find the exit of the maze. Reply with one of the directions that are open."

    def __init__(self, rng: random.Random, level: Level, view: View = "grid") -> None:
        super().__init__(rng, level, view)
        self.size, self.at = level + 2, (0, 0)
        self.doors: set[frozenset[Cell]] = set()
        stack, seen = [self.at], {self.at}
        while stack:
            options = [one for one in self._neighbours(stack[-1]) if one[1] not in seen]
            if options:
                following = rng.choice(options)[1]
                self.doors.add(frozenset((stack[-1], following)))
                seen.add(following)
                stack.append(following)
            else:
                stack.pop()
        self.exit = rng.choice(sorted(cell for cell in seen if sum(cell) >= self.size - 1))
        self.checkpoints = str(self.size**2)
        self._seen = {self.at}

    def set_goal(self, goal: str) -> None:
        """Move the exit to another cell."""
        self.exit = _cell(goal)

    def _neighbours(self, cell: Cell) -> Iterator[tuple[str, Cell]]:
        for action in MOVES:
            i, j = moved(cell, action)
            if 0 <= i < self.size and 0 <= j < self.size:
                yield action, (i, j)

    def instance(self) -> str:
        return f"{sorted(map(sorted, self.doors))} {self.exit}"

    def _open(self, cell: Cell) -> Iterator[tuple[str, Cell]]:
        for action, other in self._neighbours(cell):
            if frozenset((cell, other)) in self.doors:
                yield action, other

    def actions(self) -> Sequence[str]:
        return [action for action, _ in self._open(self.at)]

    def shown(self) -> str:
        place = f"{self.at[0]},{self.at[1]}"
        if self.view == "text":
            return f"You are in row {self.at[0]}, column {self.at[1]}. Open: {', '.join(self.actions())}."
        return f"{place} {' '.join(self.actions())}"

    def apply(self, action: str) -> float:
        self.at = moved(self.at, action)
        self._seen.add(self.at)
        self.reached |= {f"{i},{j}" for i, j in self._seen}
        self.achieved = "" if self.at == (0, 0) else f"{self.at[0]},{self.at[1]}"
        self.over = self.at == self.exit
        self.success = float(self.over)
        return self.success

    def expert_action(self) -> str | None:
        path = shortest(
            self.at, lambda cell: self._open(cell) if cell in self._seen else (), lambda cell: cell not in self._seen
        )
        return path[0] if path else None
