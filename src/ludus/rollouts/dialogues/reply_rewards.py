"""Rewards of single replies, which an agent reports and turn-level advantages add to the reward of the rollout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import isfinite

from ludus.types import Message

Place = tuple[int, int]
"""A row of a rollout, and the number of its segments up to a reply."""


@dataclass(eq=False)
class RewardedReplies:
    """The replies of a rollout, which an agent may reward."""

    rewards_by_place: dict[Place, float] = field(init=False, default_factory=dict)
    _places: dict[str, Sequence[Place]] = field(init=False, default_factory=dict)
    _messages: list[tuple[Message, Place]] = field(init=False, default_factory=list)

    def add_response(self, name: str, places: Sequence[Place]) -> None:
        """Record the choices of a response, whose id ends with `name`."""
        self._places[name] = places

    def add_message(self, message: Message, place: Place) -> None:
        """Record a message, which the agent passes to `reward_reply` as it is."""
        self._messages.append((message, place))

    def reward_reply(self, reply: Message | str, reward: float, index: int | None = None) -> None:
        """Set the reward of a message of `chat`, or of a response by its id: its choice `index`, if it has several.

        The last call for a reply counts. Raises LookupError if the rollout has no such reply, and ValueError.
        """
        if isinstance(reply, str):
            places = self._places.get(reply.replace("_", "-").rpartition("-")[2])
        else:
            places = next(([place] for message, place in self._messages if message is reply), None)
        if places is None:
            raise LookupError(f"The rollout has no reply {str(reply)[:80]!r}.")
        if index is None and len(places) > 1:
            raise ValueError(f"The reply has {len(places)} choices; set index.")
        if not 0 <= (index or 0) < len(places):
            raise LookupError(f"The reply {str(reply)[:80]!r} has no choice {index}.")
        if not isfinite(reward):
            raise ValueError(f"The reward {reward} is not a finite number.")
        self.rewards_by_place[places[index or 0]] = float(reward)
