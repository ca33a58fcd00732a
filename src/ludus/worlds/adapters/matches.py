"""Games of several players in other packages: one seat against opponents, or all seats by self-play.

Against an opponent of the package (random moves, a search) an episode is a simulator of the policy's seat. With
`opponent = "self"` each player is an agent of the episode with its dialogue and its reward, as in the world
`games`; its held-out tasks are played against random moves.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ludus.envs.base import Environment, PolicySession, World
from ludus.envs.simulator_world import Observation, SimulatorWorld, action_of
from ludus.envs.tool_world import split_of
from ludus.rewards.base import Reward
from ludus.types import Action, Message, StepResult, Task, Trajectory
from ludus.worlds.adapters.base import AdapterSettings, BoundedSimulator, make_tasks

MAX_OTHER_MOVES = 200
"""Number of moves of others in succession after which the one to move forfeits, for games that never return."""


class Match(ABC):
    """One game, from `start` until `payoffs` are set."""

    player = 0
    """The player to move."""
    num_players = 1
    payoffs: Sequence[float] | None = None
    """Payoffs of all players at the end, from 0 (lost) over 0.5 (draw) to 1 (won)."""

    @abstractmethod
    def start(self) -> None:
        """Begin the game."""

    @abstractmethod
    def news(self, player: int) -> str:
        """Return what a player has observed since it was last asked."""

    @abstractmethod
    def move(self, text: str) -> bool:
        """Apply a move of the player to move; return whether it was valid. An invalid one may be answered in `news`."""

    @abstractmethod
    def opponent_move(self, rng: random.Random) -> str:
        """Return a move of an opponent that is to move."""

    def moves(self) -> Sequence[str]:
        """Return the valid moves; empty if they cannot be listed."""
        return ()

    def forfeit(self) -> None:
        """End the game: the player to move has lost, for all others it is a draw."""
        self.payoffs = [0.0 if player == self.player else 0.5 for player in range(self.num_players)]


class SeatSimulator(BoundedSimulator):
    """A match from the view of one seat."""

    def __init__(self, match: Match, seat: int, seed: int, max_steps: int) -> None:
        super().__init__(max_steps)
        self._match, self._seat, self._rng = match, seat, random.Random(f"opponents/{seed}")

    def reset(self) -> str:
        self._match.start()
        self._play_others()
        return self._match.news(self._seat)

    def act(self, action: str) -> Observation:
        match = self._match
        if match.payoffs is not None:
            return Observation("The game is over.", done=True)
        valid = match.move(action)
        self._play_others()
        if match.payoffs is None:
            return Observation(match.news(self._seat), valid=valid)
        self.success = float(match.payoffs[self._seat])
        return Observation(match.news(self._seat), self.success, done=True, valid=valid)

    def actions(self) -> Sequence[str]:
        """Return the valid moves, if the game lists them."""
        return self._match.moves()

    def _play_others(self) -> None:
        match = self._match
        for _ in range(MAX_OTHER_MOVES):
            if match.payoffs is not None or match.player == self._seat:
                return
            match.move(match.opponent_move(self._rng))
        match.forfeit()


class SelfPlayEnv(Environment):
    """A match whose seats `seats` are agents of the policy; the others are opponents."""

    def __init__(self, match: Match, seats: Sequence[int], max_steps: int, rewards: Sequence[Reward]) -> None:
        self.rewards, self._match, self._seats, self._max_steps = rewards, match, seats, max_steps

    async def start(self, task: Task) -> list[Message]:
        return list(task.prompt)

    async def step(self, action: Action) -> StepResult:
        return StepResult(done=True)

    async def drive(self, task: Task, policy: PolicySession) -> None:
        """Play to the end, or for `max_steps` moves of each player; set the reward of each agent."""
        match, rng = self._match, random.Random(f"opponents/{task.seed}")
        match.start()
        dialogues: dict[int, list[Message]] = {seat: list(task.prompt) for seat in self._seats}
        for _ in range(self._max_steps * match.num_players):
            if match.payoffs is not None:
                break
            player = match.player
            if player not in dialogues:
                match.move(match.opponent_move(rng))
                continue
            dialogue = dialogues[player]
            dialogue.append(Message(role="user", content=match.news(player)))
            reply = await policy.chat(dialogue, agent=seat_name(player))
            dialogue.append(reply)
            match.move(action_of(reply["content"]))
        payoffs = match.payoffs or [0.0] * match.num_players
        policy.agent_rewards |= {seat_name(seat): float(payoffs[seat]) for seat in self._seats}


def seat_name(seat: int) -> str:
    """Return the name of the agent of a seat."""
    return f"player{seat}"


def payoff(task: Task, trajectory: Trajectory) -> float:
    """Return the payoff of the task's seat; 0 if the game was not finished."""
    return trajectory.agent_rewards.get(seat_name(int(task.tags["seat"])), 0.0)


@dataclass(frozen=True)
class SelfPlayWorld(World):
    """Matches in which the policy plays all seats in training, and one seat in the other splits."""

    name: str
    task_lists: Mapping[str, Sequence[Task]]
    make: Callable[[Task], Match]
    num_players: int
    max_steps: int
    rewards: Sequence[Reward] = (Reward("payoff", payoff, outcome=True),)

    @property
    def splits(self) -> Sequence[str]:
        return tuple(self.task_lists)

    def tasks(self, split: str) -> Sequence[Task]:
        return split_of(self.task_lists, split, self.name)

    def environment(self, task: Task) -> SelfPlayEnv:
        seats = range(self.num_players) if task.tags["split"] == "train" else (int(task.tags["seat"]),)
        return SelfPlayEnv(self.make(task), seats, self.max_steps, self.rewards)

    @property
    def runs_agents(self) -> bool:
        return True

    @property
    def roles(self) -> Sequence[str]:
        return tuple(map(seat_name, range(self.num_players)))


def match_world(
    name: str, settings: AdapterSettings, system: str, make: Callable[[Task], Match], *, self_play: bool, blocks: bool
) -> World:
    """Return the world of a game; the seats of its tasks take turns, except in training by self-play."""
    num = make(Task("", (), None)).num_players

    def tags(index: int) -> Mapping[str, str]:
        return {"seat": str(index % num)}

    lists = make_tasks(settings, system, tags)
    if self_play and num > 1:
        return SelfPlayWorld(name, lists, make, num, settings.max_steps)

    def simulator(task: Task) -> SeatSimulator:
        return SeatSimulator(make(task), int(task.tags["seat"]), task.seed, settings.max_steps)

    return SimulatorWorld(name, lists, simulator, blocks=blocks, has_expert=False)
