"""Tic-tac-toe: three in a row on nine squares, numbered 1 to 9."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache

LINES = ((0, 1, 2), (3, 4, 5), (6, 7, 8), (0, 3, 6), (1, 4, 7), (2, 5, 8), (0, 4, 8), (2, 4, 6))


class TicTacToe:
    """The rules. A position is the moves so far, as a text of digits."""

    players = ("x", "o")
    rules = "Tic-tac-toe: + is yours. Reply with a free square."

    def openings(self) -> Sequence[str]:
        """Return the empty board, and the boards after one and two moves."""
        ones = list("123456789")
        return ["", *ones, *(a + b for a in ones for b in ones if a != b)]

    def to_move(self, position: str) -> int:
        """Return the index of the player to move."""
        return len(position) % 2

    def legal(self, position: str) -> Sequence[str]:
        """Return the free squares."""
        return [square for square in "123456789" if square not in position]

    def payoffs(self, position: str) -> tuple[float, float] | None:
        """Return the rewards of both players at the end: 1 for a win, 0.5 for a draw, 0 for a loss; None before."""
        board = _board(position)
        for a, b, c in LINES:
            if board[a] != "." and board[a] == board[b] == board[c]:
                return (1.0, 0.0) if board[a] == "x" else (0.0, 1.0)
        return (0.5, 0.5) if len(position) == 9 else None

    def seen_by(self, position: str, player: int) -> str:
        """Return the observation of a player: the rows, columns and diagonals, with a dot for a free square."""
        board = _board(position).translate(str.maketrans("xo", "+-" if player == 0 else "-+"))
        lines = ["".join(board[square] for square in line) for line in LINES]
        return " | ".join(" ".join(lines[start:end]) for start, end in ((0, 3), (3, 6), (6, 8)))

    def expert_move(self, position: str, rng: random.Random) -> str:
        """Return a move of perfect play, at random among the best ones."""
        values = {square: -_value(position + square) for square in self.legal(position)}
        return rng.choice([square for square, value in values.items() if value == max(values.values())])


def _board(position: str) -> str:
    squares = ["."] * 9
    for number, square in enumerate(position):
        squares[int(square) - 1] = "xo"[number % 2]
    return "".join(squares)


@cache
def _value(position: str) -> int:
    """Return the value of a position for the player to move under perfect play: 1, 0 or -1."""
    game = TicTacToe()
    payoffs = game.payoffs(position)
    if payoffs is not None:
        return round(2 * payoffs[game.to_move(position)] - 1)
    return max(-_value(position + square) for square in game.legal(position))
