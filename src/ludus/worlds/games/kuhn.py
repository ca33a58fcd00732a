"""Kuhn poker: two players, three cards, one bet (Kuhn 1950), with the exact exploitability of a strategy.

Both players ante 1 and get one of the cards 1 to 3. A player may check or bet 1; facing a bet, fold (`check`) or call
(`bet`). The higher card wins the pot.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from itertools import permutations

DEALS = tuple(f"{a}{b}" for a, b in permutations("123", 2))
_NAMES = {"b": "bet", "c": "check"}
_BET_OF_NASH = {
    "1": 0.0, "2": 0.0, "3": 0.0, "1cb": 0.0, "2cb": 1 / 3, "3cb": 1.0,
    "1c": 1 / 3, "2c": 0.0, "3c": 1.0, "1b": 0.0, "2b": 1 / 3, "3b": 1.0,
}  # fmt: skip
"""Probability of a bet by information set (own card and moves so far), in the equilibrium without first bets."""


class Kuhn:
    """The rules. A position is the two cards and the moves so far, `c` or `b` each."""

    players = ("first", "second")
    rules = "Kuhn poker: bet or check. After a bet, check folds."

    def openings(self) -> Sequence[str]:
        """Return the deals."""
        return DEALS

    def to_move(self, position: str) -> int:
        """Return the index of the player to move."""
        return len(position) % 2

    def legal(self, position: str) -> Sequence[str]:
        """Return the moves."""
        return [*_NAMES.values()]

    def payoffs(self, position: str) -> tuple[float, float] | None:
        """Return the rewards of both players at the end, (net chips + 2) / 4 each; None before."""
        won = chips(position)
        return None if won is None else ((won + 2) / 4, (2 - won) / 4)

    def seen_by(self, position: str, player: int) -> str:
        """Return the observation of a player: the card and the moves."""
        moves = " ".join(_NAMES[move] for move in position[2:])
        return f"card {position[player]}, {moves or 'no moves'}"

    def expert_move(self, position: str, rng: random.Random) -> str:
        """Return a move of an equilibrium."""
        return "bet" if rng.random() < _BET_OF_NASH[information_set(position)] else "check"


def chips(position: str) -> int | None:
    """Return the chips that the first player wins at the end of a game; None before."""
    cards, moves = position[:2], position[2:]
    higher = 1 if cards[0] > cards[1] else -1
    ends = {"cc": higher, "bb": 2 * higher, "cbb": 2 * higher, "bc": 1, "cbc": -1}
    return ends.get(moves)


def information_set(position: str) -> str:
    """Return the information set of the player to move: the card and the moves."""
    return position[len(position) % 2] + position[2:]


INFORMATION_SETS = tuple(_BET_OF_NASH)


def exploitability(bet: Mapping[str, float]) -> float:
    """Return the mean over both seats of what a best response wins in excess of the game's value, in chips per game.

    `bet` maps each of `INFORMATION_SETS` to the probability of a bet. 0 in an equilibrium; 11/24 if all bets have
    probability 1/2 (Lanctot et al. 2009, with half of NashConv).
    """
    return (_best_response(bet, 0) + _best_response(bet, 1)) / 2


def _best_response(bet: Mapping[str, float], seat: int) -> float:
    """Return the chips per game that a best response in a seat wins against the strategy."""

    def value(moves: str, card: str, weights: Mapping[str, float]) -> float:
        """Return the value of a state for the responder, summed over the opponent's cards with their weights."""
        positions = {other: (card + other if seat == 0 else other + card) + moves for other in weights}
        won = {other: chips(position) for other, position in positions.items()}
        if (moves and None not in won.values()) or not weights:
            sign = 1 if seat == 0 else -1
            return sum(sign * (won[other] or 0) * weight for other, weight in weights.items())
        if len(moves) % 2 == seat:
            return max(value(moves + move, card, weights) for move in _NAMES)
        total = 0.0
        for move in _NAMES:
            share = {other: bet[other + moves] if move == "b" else 1 - bet[other + moves] for other in weights}
            total += value(moves + move, card, {other: weights[other] * share[other] for other in weights})
        return total

    return sum(value("", card, {other: 1 / 6 for other in "123" if other != card}) for card in "123")
