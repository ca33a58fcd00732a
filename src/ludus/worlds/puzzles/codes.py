"""Wordle and Mastermind: guess a secret from the feedback on earlier guesses."""

from __future__ import annotations

import random
from abc import abstractmethod
from collections import Counter
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from itertools import product
from typing import ClassVar

from ludus.envs.simulator_world import Observation
from ludus.worlds.puzzles.base import Level, Puzzle, View


def letters(guess: str, secret: str) -> str:
    """Return Wordle's feedback: G in place, Y elsewhere in the secret, X not in it (or not once more)."""
    left = Counter(b for a, b in zip(guess, secret, strict=True) if a != b)
    marks = []
    for a, b in zip(guess, secret, strict=True):
        mark = "G" if a == b else "Y" if left[a] > 0 else "X"
        left[a] -= mark == "Y"
        marks.append(mark)
    return "".join(marks)


def pins(guess: str, secret: str) -> str:
    """Return Mastermind's feedback: the number of digits in place, and of those in the secret but elsewhere."""
    black = sum(a == b for a, b in zip(guess, secret, strict=True))
    return f"{black} {(Counter(guess) & Counter(secret)).total() - black}"


@cache
def words(length: int) -> tuple[str, ...]:
    """Return the words of a length in the data file."""
    text = (files("ludus.worlds.puzzles") / "data/words.txt").read_text("utf-8")
    return tuple(word for word in text.split() if len(word) == length)


class Secret(Puzzle):
    """Guess a secret; the observation is all guesses with their feedback. The expert guesses what is still possible."""

    num_guesses: ClassVar[int]

    @staticmethod
    @abstractmethod
    def mark(guess: str, secret: str) -> str:
        """Return the feedback on a guess."""

    def __init__(self, rng: random.Random, level: Level, view: View = "grid") -> None:
        super().__init__(rng, level, view)
        self.possible = self.secrets()
        self.secret = rng.choice(self.possible)
        self.guesses: list[tuple[str, str]] = []

    @abstractmethod
    def secrets(self) -> Sequence[str]:
        """Return all possible secrets of the level."""

    @abstractmethod
    def opening(self) -> str:
        """Return the first observation."""

    def instance(self) -> str:
        return self.secret

    def actions(self) -> Sequence[str]:
        return self.secrets()

    def shown(self) -> str:
        return "\n".join(f"{guess} {marks}" for guess, marks in self.guesses) or self.opening()

    def apply(self, action: str) -> float:
        marks = self.mark(action, self.secret)
        self.guesses.append((action, marks))
        self.possible = [one for one in self.possible if self.mark(action, one) == marks]
        self.success = float(action == self.secret)
        self.over = bool(self.success) or len(self.guesses) == self.num_guesses
        return self.success

    def expert_action(self) -> str:
        """Return the possible secret that leaves the fewest others on average, of the first 20."""

        def expected(guess: str) -> float:
            sizes = Counter(self.mark(guess, one) for one in self.possible)
            return sum(size * size for size in sizes.values()) / len(self.possible)

        if not self.guesses:
            return self.possible[0]
        return min(self.possible[:20], key=expected)


class Wordle(Secret):
    """Wordle with words of 3, 4 or 5 letters."""

    rules: ClassVar[str] = (
        "Guess a secret word in 6 guesses. G: right letter in place. Y: the letter is elsewhere in the word. "
        "X: it is not in the word. Reply with one word."
    )
    hint: ClassVar[str] = "Not in the list of words."
    num_guesses: ClassVar[int] = 6
    mark = staticmethod(letters)

    def secrets(self) -> Sequence[str]:
        return words(self.level + 2)

    def opening(self) -> str:
        return f"{self.level + 2} letters"


class Mastermind(Secret):
    """Mastermind with 3 digits of 1 to 4, 4 of 1 to 4, or 4 of 1 to 6."""

    rules: ClassVar[str] = (
        "Guess a secret code in 8 guesses. The first number counts digits in place, the second digits of the code that "
        "are elsewhere. Reply with one code."
    )
    num_guesses: ClassVar[int] = 8
    mark = staticmethod(pins)
    _sizes: ClassVar = {1: (3, 4), 2: (4, 4), 3: (4, 6)}

    def secrets(self) -> Sequence[str]:
        return codes(*self._sizes[self.level])

    def opening(self) -> str:
        num, digits = self._sizes[self.level]
        return f"{num} digits from 1 to {digits}"

    def step(self, action: str) -> Observation:
        seen = super().step(action)
        return seen if seen.valid else Observation(f"Not a code: {self.opening()}.", valid=False)


@cache
def codes(num: int, digits: int) -> tuple[str, ...]:
    """Return all codes of `num` digits from 1 to `digits`."""
    return tuple("".join(one) for one in product("123456"[:digits], repeat=num))
