"""2048, Blackjack (the rules of gymnasium), the Tower of Hanoi, and a two-armed bandit."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from itertools import permutations
from typing import ClassVar, Final

from ludus.worlds.puzzles.base import Level, Puzzle, View, shortest

Rows = tuple[tuple[int, ...], ...]
_SIZE: Final = 4


def merged(row: Sequence[int]) -> tuple[tuple[int, ...], int]:
    """Return a row of 2048 after a move to the left, and the sum of the merged tiles."""
    left, found, score = [tile for tile in row if tile], list[int](), 0
    while left:
        tile = left.pop(0)
        if left and left[0] == tile:
            tile *= 2
            score += tile
            left.pop(0)
        found.append(tile)
    return (*found, *[0] * (len(row) - len(found))), score


def turned(rows: Rows, action: str) -> tuple[Rows, int]:
    """Return the board of 2048 after a move without a new tile, and the sum of the merged tiles."""
    lines: list[Sequence[int]] = list(rows) if action in ("left", "right") else list(zip(*rows, strict=True))
    step = -1 if action in ("right", "down") else 1
    results = [merged(line[::step]) for line in lines]
    after = [line[::step] for line, _ in results]
    board = after if action in ("left", "right") else list(zip(*after, strict=True))
    return tuple(tuple(line) for line in board), sum(score for _, score in results)


class Game2048(Puzzle):
    """2048 with a smaller goal: the tile 16, 32 or 64."""

    rules: ClassVar[str] = (
        "Slide the tiles of 2048 until one of them is the goal. Equal tiles merge. Reply with left, down, right or up."
    )
    stochastic: ClassVar[bool] = True
    _moves: ClassVar = ("left", "down", "right", "up")

    def __init__(self, rng: random.Random, level: Level, view: View = "grid") -> None:
        super().__init__(rng, level, view)
        self.goal = 1 << (3 + level)
        self.rows: Rows = ((0,) * _SIZE,) * _SIZE
        for _ in range(2):
            self._add()

    def _add(self) -> None:
        i, j = self.rng.choice([(i, j) for i in range(_SIZE) for j in range(_SIZE) if not self.rows[i][j]])
        board = [list(row) for row in self.rows]
        board[i][j] = 4 if self.rng.random() < 0.1 else 2
        self.rows = tuple(map(tuple, board))

    def actions(self) -> Sequence[str]:
        return [action for action in self._moves if turned(self.rows, action)[0] != self.rows]

    def shown(self) -> str:
        return f"goal {self.goal}\n" + "\n".join(" ".join(str(tile or ".") for tile in row) for row in self.rows)

    def apply(self, action: str) -> float:
        self.rows, score = turned(self.rows, action)
        self._add()
        self.success = float(max(map(max, self.rows)) >= self.goal)
        self.over = bool(self.success) or not self.actions()
        return score / self.goal

    def expert_action(self) -> str | None:
        """Return the move with the best sum of merges and free cells, two moves ahead; ties keep a corner."""

        def value(rows: Rows, depth: int) -> float:
            outcomes = [turned(rows, action) for action in self._moves]
            gains = [score + 0.5 * sum(row.count(0) for row in after) for after, score in outcomes if after != rows]
            if depth == 0 or not gains:
                return max(gains, default=-10.0)
            return max(
                score + 0.5 * sum(row.count(0) for row in after) + value(after, depth - 1)
                for after, score in outcomes
                if after != rows
            )

        options = self.actions()
        return max(options, key=lambda action: self._outcome(action, value)) if options else None

    def _outcome(self, action: str, value: Callable[[Rows, int], float]) -> float:
        after, score = turned(self.rows, action)
        return score + value(after, 1)


class Blackjack(Puzzle):
    """Blackjack against a dealer who draws below 17. Cards are drawn with replacement; a draw is no success.

    The expert plays the basic strategy, which loses many deals; these have no solution.
    """

    rules: ClassVar[str] = "Blackjack: come closer to 21 than the dealer without exceeding it. Reply with hit or stand."
    stochastic: ClassVar[bool] = True

    def __init__(self, rng: random.Random, level: Level, view: View = "grid") -> None:
        super().__init__(rng, level, view)
        self.dealer, self.cards = [self._draw()], [self._draw(), self._draw()]

    def _draw(self) -> int:
        return min(self.rng.randint(1, 13), 10)

    @staticmethod
    def total(cards: Sequence[int]) -> tuple[int, bool]:
        """Return the sum of a hand, and whether an ace counts 11."""
        usable = 1 in cards and sum(cards) + 10 <= 21
        return sum(cards) + 10 * usable, usable

    def actions(self) -> Sequence[str]:
        return ("hit", "stand")

    def shown(self) -> str:
        total, usable = self.total(self.cards)
        soft = ", soft" if usable else ""
        return f"You: {' '.join(map(str, self.cards))} (sum {total}{soft}). Dealer: {self.dealer[0]}."

    def apply(self, action: str) -> float:
        if action == "hit":
            self.cards.append(self._draw())
            self.over = self.total(self.cards)[0] > 21
            return -1.0 if self.over else 0.0
        while self.total(self.dealer)[0] < 17:
            self.dealer.append(self._draw())
        own, other = self.total(self.cards)[0], self.total(self.dealer)[0]
        self.over = True
        self.success = float(other > 21 or own > other)
        return 1.0 if self.success else float(own == other) - 1.0

    def expert_action(self) -> str:
        total, usable = self.total(self.cards)
        if usable:
            return "hit" if total < 18 or (total == 18 and self.dealer[0] in (1, 9, 10)) else "stand"
        enough = 12 if self.dealer[0] in (4, 5, 6) else 13 if self.dealer[0] in (2, 3) else 17
        return "hit" if total < enough else "stand"


class Hanoi(Puzzle):
    """The Tower of Hanoi from a random position: 2, 3 or 4 discs to the peg C."""

    rules: ClassVar[str] = (
        "Move all discs to the peg C. A disc may lie on larger ones only. Reply with two pegs, such as A C."
    )
    _names: ClassVar = "ABC"

    def __init__(self, rng: random.Random, level: Level, view: View = "grid") -> None:
        super().__init__(rng, level, view)
        self.pegs = tuple(rng.choice(self._names) for _ in range(level + 1))
        if set(self.pegs) == {"C"}:
            self.pegs = ("A",) * (level + 1)

    @staticmethod
    def _moves(pegs: tuple[str, ...]) -> Iterator[tuple[str, tuple[str, ...]]]:
        for source, target in permutations("ABC", 2):
            if source in pegs and (target not in pegs or pegs.index(source) < pegs.index(target)):
                disc = pegs.index(source)
                yield f"{source} {target}", (*pegs[:disc], target, *pegs[disc + 1 :])

    def actions(self) -> Sequence[str]:
        return [action for action, _ in self._moves(self.pegs)]

    def shown(self) -> str:
        discs = {name: [i + 1 for i in range(len(self.pegs)) if self.pegs[i] == name] for name in self._names}
        return "\n".join(f"{name}: {' '.join(map(str, reversed(discs[name])))}".rstrip() for name in self._names)

    def apply(self, action: str) -> float:
        self.pegs = dict(self._moves(self.pegs))[action]
        self.over = set(self.pegs) == {"C"}
        self.success = float(self.over)
        return self.success

    def expert_action(self) -> str | None:
        path = shortest(self.pegs, self._moves, lambda pegs: set(pegs) == {"C"})
        return path[0] if path else None


class Bandit(Puzzle):
    """Two arms with different chances; after at most 8 pulls the player names the better one."""

    rules: ClassVar[str] = (
        "Two machines A and B pay with different chances. You have 8 pulls; then name the better one. "
        "Reply with pull A, pull B, best A or best B."
    )
    stochastic: ClassVar[bool] = True
    _num_pulls: ClassVar = 8

    def __init__(self, rng: random.Random, level: Level, view: View = "grid") -> None:
        super().__init__(rng, level, view)
        low = rng.uniform(0.1, 0.3)
        chances = [low, low + {1: 0.6, 2: 0.5, 3: 0.4}[level]]
        rng.shuffle(chances)
        self.chances, self.paid = dict(zip("AB", chances, strict=True)), {"A": list[int](), "B": list[int]()}

    def _left(self) -> int:
        return self._num_pulls - sum(map(len, self.paid.values()))

    def actions(self) -> Sequence[str]:
        pulls = ("pull A", "pull B") if self._left() else ()
        return (*pulls, "best A", "best B")

    def shown(self) -> str:
        return " ".join(f"{arm}: {sum(paid)} of {len(paid)}." for arm, paid in self.paid.items())

    def apply(self, action: str) -> float:
        verb, arm = action.split()
        if verb == "pull":
            self.paid[arm].append(int(self.rng.random() < self.chances[arm]))
            return 0.0
        self.over = True
        self.success = float(self.chances[arm] == max(self.chances.values()))
        return self.success

    def expert_action(self) -> str:
        a, b = self.paid["A"], self.paid["B"]
        if self._left():
            return "pull A" if len(a) <= len(b) else "pull B"
        return "best A" if sum(a) >= sum(b) else "best B"
