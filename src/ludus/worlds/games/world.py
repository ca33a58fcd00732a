"""Two-player games by turns. Both players are the policy, or one of them is an opponent.

Each turn of a player that is the policy is a dialogue: a message describes the position, the reply is the move. The
players are separate agents of the episode, each with its own reward, so that self-play trains both seats with a
baseline for each: the average of the seat in its group, or in the run (`algorithm.preset = "rae"`, arXiv:2506.24119).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, product
from typing import Literal, Protocol

from pydantic import Field

from ludus.envs.base import Environment, PolicySession, World
from ludus.envs.settings import WorldSettings, read_settings
from ludus.envs.tool_env import ToolLimits
from ludus.envs.tool_world import Dialogue, assistant, split_of
from ludus.rewards.base import Reward
from ludus.types import Action, Message, StepResult, Task, Trajectory
from ludus.worlds.games.kuhn import Kuhn
from ludus.worlds.games.tictactoe import TicTacToe

Opponent = Literal["self", "past", "random", "expert"]
"""The other player: the policy, a past version of it, random moves, or perfect play (an equilibrium)."""


_NUM_TRAIN = 80
"""Minimum number of training tasks of an opponent and a seat; openings are repeated if there are fewer."""


class Game(Protocol):
    """The rules of a game. A position is a text; a player is an index."""

    players: tuple[str, str]
    rules: str

    def openings(self) -> Sequence[str]: ...
    def to_move(self, position: str) -> int: ...
    def legal(self, position: str) -> Sequence[str]: ...
    def payoffs(self, position: str) -> tuple[float, float] | None: ...
    def seen_by(self, position: str, player: int) -> str: ...
    def expert_move(self, position: str, rng: random.Random) -> str: ...


GAMES: Mapping[str, Callable[[], Game]] = {"tictactoe": TicTacToe, "kuhn": Kuhn}


class GamesSettings(WorldSettings):
    """Settings of the games world (`env.settings`)."""

    game: Literal["tictactoe", "kuhn"] = "tictactoe"
    opponents: tuple[Opponent, ...] = Field(("self",), min_length=1)
    """Opponents of the training games."""
    num_games: int = Field(200, ge=1)
    """Number of games against each opponent in `validation` and `test`."""
    seed: int = 0


def payoff(task: Task, trajectory: Trajectory) -> float:
    """Return the reward of the task's seat; 0 if the game was not finished."""
    return trajectory.agent_rewards.get(task.tags["seat"], 0.0)


def drawn(task: Task, trajectory: Trajectory) -> float:
    """Return 1 for the payoff of a draw, else 0."""
    return float(payoff(task, trajectory) == 0.5)


def lost(task: Task, trajectory: Trajectory) -> float:
    """Return 1 for a payoff below that of a draw, else 0."""
    return float(payoff(task, trajectory) < 0.5)


REWARDS = (Reward("payoff", payoff, outcome=True), Reward("drawn", drawn, weight=0.0), Reward("lost", lost, weight=0.0))


class GameEnv(Environment):
    """One game. A reply that is not a legal move loses the game, and the other player gets the reward of a draw.

    An opponent that is a past version makes a random move instead.
    """

    rewards: Sequence[Reward] = REWARDS

    def __init__(self, game: Game) -> None:
        self._game = game

    async def start(self, task: Task) -> list[Message]:
        return list(task.prompt)

    async def step(self, action: Action) -> StepResult:
        return StepResult(done=True)

    async def drive(self, task: Task, policy: PolicySession) -> None:
        """Play to the end; set the reward of each player that is the policy."""
        game, position, opponent = self._game, str(task.truth), task.tags["opponent"]
        rng = random.Random(f"{task.id}/{policy.seed}")
        agents = range(2) if opponent == "self" else (game.players.index(task.tags["seat"]),)
        while (payoffs := game.payoffs(position)) is None:
            player = game.to_move(position)
            session = policy if player in agents else policy.opponent if opponent == "past" else None
            if session is not None:
                dialogue = [*task.prompt, asked(game, position)]
                move = await reply_of(session, dialogue, game.players[player], is_past=player not in agents)
            else:
                move = game.expert_move(position, rng) if opponent == "expert" else rng.choice(game.legal(position))
            if move not in game.legal(position):
                if player in agents:
                    payoffs = (0.0, 0.5) if player == 0 else (0.5, 0.0)
                    break
                move = rng.choice(game.legal(position))
            position += move[0]
        policy.agent_rewards |= {game.players[player]: payoffs[player] for player in agents}


async def reply_of(session: PolicySession, dialogue: list[Message], name: str, *, is_past: bool) -> str:
    """Return a player's move; empty if a limit has ended the dialogue of a past version."""
    try:
        reply = await session.chat(dialogue, agent=name)
    except RuntimeError:
        if not is_past:
            raise
        return ""
    return reply["content"].strip()


def rules_of(game: Game) -> Message:
    """Return the message that explains the game."""
    return Message(role="system", content=game.rules)


def asked(game: Game, position: str) -> Message:
    """Return the message that asks the player to move."""
    player = game.to_move(position)
    return Message(role="user", content=f"{game.players[player]}: {game.seen_by(position, player)}")


@dataclass(frozen=True)
class GamesWorld(World):
    """The games of one kind."""

    task_lists: Mapping[str, Sequence[Task]]
    settings: GamesSettings
    name: str = "games"
    splits: Sequence[str] = ("train", "validation", "test")
    rewards: Sequence[Reward] = REWARDS

    def tasks(self, split: str) -> Sequence[Task]:
        return split_of(self.task_lists, split, self.name)

    def environment(self, task: Task) -> GameEnv:
        return GameEnv(GAMES[self.settings.game]())

    @property
    def runs_agents(self) -> bool:
        return True

    @property
    def needs_opponents(self) -> bool:
        return "past" in self.settings.opponents

    @property
    def roles(self) -> Sequence[str]:
        return GAMES[self.settings.game]().players

    def demonstrations(self, seed: int) -> Iterator[Dialogue]:
        """Yield random legal moves in positions of random games, of all kinds."""
        rng = random.Random(f"{self.settings.seed}/{seed}/show")
        games = [make() for make in GAMES.values()]
        while True:
            game = rng.choice(games)
            position = rng.choice(game.openings())
            while game.payoffs(position) is None:
                move = rng.choice(game.legal(position))
                yield Dialogue((rules_of(game), asked(game, position), assistant(move)), ())
                position += move[0]


def make_games_world(settings: Mapping[str, object], limits: ToolLimits) -> GamesWorld:
    """Build the world (the registered factory). Raises ConfigError for invalid settings."""
    chosen = read_settings(GamesSettings, settings)
    game = GAMES[chosen.game]()
    lists: dict[str, list[Task]] = {"train": [], "validation": [], "test": []}
    copies = -(-_NUM_TRAIN // len(game.openings()))
    for opponent, opening, copy in product(chosen.opponents, game.openings(), range(copies)):
        for seat in game.players if opponent != "self" else game.players[:1]:
            lists["train"].append(_task(game, opening, opponent, seat, f"train-{opening}-{copy}"))
    for split in ("validation", "test"):
        for opponent in ("random", "expert"):
            starts = cycle([opening for opening in game.openings() if chosen.game == "kuhn" or not opening])
            for number, opening in zip(range(chosen.num_games), starts, strict=False):
                seat = game.players[number % 2 if chosen.game == "tictactoe" else number // 6 % 2]
                lists[split].append(_task(game, opening, opponent, seat, f"{split}-{number}"))
    return GamesWorld(lists, chosen)


def _task(game: Game, opening: str, opponent: Opponent, seat: str, name: str) -> Task:
    tags = {"opponent": opponent, "seat": seat}
    return Task(f"{name}-{opponent}-{seat}", (rules_of(game),), opening, tags)
