"""Games of textarena for one or more players. An observation is what the game and the other players have said.

The package draws from Python's global generator, also in the middle of a game, so each call is seeded. A
game of one player is paid by its reward (0 to 1), of several players by (reward + 1) / 2. A second invalid move in
succession loses, by the rules of the package.
"""

from __future__ import annotations

import copy
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Literal, Protocol

from pydantic import Field

from ludus.envs.base import World
from ludus.envs.settings import read_settings
from ludus.envs.tool_env import ToolLimits
from ludus.errors import ConfigError
from ludus.types import Task
from ludus.worlds.adapters.base import AdapterSettings, cannot_start, load_package, seeded_globally
from ludus.worlds.adapters.matches import Match, match_world

MAX_PLAYERS = 15
_TRIES = 64
"""Number of moves that a random opponent tries before one may be invalid."""


class TextArenaSettings(AdapterSettings):
    """Settings of the world `textarena` (`env.settings`)."""

    id: str = "GuessTheNumber-v0"
    """Name of the game."""
    num_players: int | None = Field(None, ge=1, le=MAX_PLAYERS)
    """Number of players; by default the smallest possible one."""
    opponent: Literal["random", "self"] = "random"
    """Other players: random valid moves of the form of those in the observations, or the policy."""
    opponent_moves: tuple[str, ...] = ()
    """Moves that random opponents choose from, instead of those."""


class TextArenaState(Protocol):
    """Interface of the state of a game."""

    role_mapping: Mapping[int, str]
    rewards: Mapping[int, object] | None
    error_count: int
    num_players: int


class TextArenaGame(Protocol):
    """Interface of a game."""

    state: TextArenaState

    def reset(self, *, num_players: int, seed: int) -> None: ...
    def step(self, *, action: str) -> tuple[bool, object]: ...
    def get_observation(self) -> tuple[int, Sequence[tuple[int, object, object]]]: ...


@dataclass(frozen=True)
class TextArenaMaker:
    """How a game is made."""

    package: ModuleType
    settings: TextArenaSettings

    def make(self) -> TextArenaGame:
        """Return a game without the wrappers that repeat earlier observations; those of actions are kept."""
        env = self.package.make(self.settings.id, **self.settings.kwargs)
        kept = []
        while isinstance(env, self.package.Wrapper):
            if isinstance(env, self.package.ActionWrapper):
                kept.append(type(env))
            env = env.env
        for wrapper in reversed(kept):
            env = wrapper(env)
        game: TextArenaGame = env
        return game

    def num_players(self) -> int:
        """Return the smallest number of players with which the game starts. Raises ConfigError if there is none."""
        fixed = self.settings.num_players
        causes: list[Exception] = []
        for num in range(fixed or 1, (fixed or MAX_PLAYERS) + 1):
            try:
                with seeded_globally("probe"):
                    game = self.make()
                    game.reset(num_players=num, seed=0)
            except Exception as error:  # boundary: third-party games refuse in many ways
                causes.append(error)
            else:
                return game.state.num_players
        raise cannot_start(f"The game {self.settings.id}", causes[0]) from causes[0]


class TextArenaMatch(Match):
    """One game."""

    def __init__(self, maker: TextArenaMaker, num_players: int, seed: int) -> None:
        self._maker, self._seed, self.num_players = maker, seed, num_players
        self._game: TextArenaGame | None = None
        self._turn = 0
        self._unread: dict[int, list[str]] = {player: [] for player in range(num_players)}
        self._seen = ""

    @property
    def game(self) -> TextArenaGame:
        """The game, made at first use."""
        if self._game is None:
            self._game = self._maker.make()
        return self._game

    def start(self) -> None:
        with seeded_globally(f"{self._seed}/start"):
            self.game.reset(num_players=self.num_players, seed=self._seed)
            self._look()

    def news(self, player: int) -> str:
        unread = self._unread[player]
        text = "\n".join(unread)
        unread.clear()
        return text

    def move(self, text: str) -> bool:
        self._turn += 1
        with seeded_globally(f"{self._seed}/{self._turn}"):
            try:
                done, _ = self.game.step(action=text)
            except Exception:  # boundary: third-party games raise on moves that they cannot read
                self.forfeit()
                return False
            valid = self.game.state.error_count == 0
            self._look(is_over=done)
        return valid

    def opponent_move(self, rng: random.Random) -> str:
        own = self._maker.settings.opponent_moves
        choices = own or [one for one in re.findall(r"\[[^\[\]\n]{1,40}\]", self._seen) if one not in self._roles()]
        move = "[]"
        for _ in range(_TRIES if choices else 0):
            move = rng.choice(choices)
            if not own:
                move = re.sub(r"\d", lambda _: str(rng.randrange(10)), move)
            if self._accepts(move):
                break
        return move

    def _accepts(self, move: str) -> bool:
        with seeded_globally("try"):
            trial = copy.deepcopy(self.game)
            try:
                trial.step(action=move)
            except Exception:  # boundary: as in `move`
                return False
            return trial.state.error_count == 0

    def _roles(self) -> Sequence[str]:
        return ["[GAME]", *(f"[{role}]" for role in self.game.state.role_mapping.values())]

    def _look(self, *, is_over: bool = False) -> None:
        """Read what the player to move observes, and the payoffs if the game is over."""
        self.player, seen = self.game.get_observation()
        names = self.game.state.role_mapping
        lines = []
        for source, message, kind in seen:
            text = message if isinstance(message, str) else str(kind)  # some games swap the two
            other = isinstance(source, int) and source >= 0
            if not other or source != self.player:
                lines.append(f"[{names.get(source, f'Player {source}')}] {text}" if other else text)
        self._unread[self.player] += lines
        self._seen = "\n".join(lines)
        if not is_over:
            return
        rewards = self.game.state.rewards or {}
        low = 0.0 if self.num_players == 1 else -1.0
        given = [rewards.get(player) for player in range(self.num_players)]
        values = [float(value) if isinstance(value, int | float) else low for value in given]
        self.payoffs = [min(max((value - low) / (1.0 - low), 0.0), 1.0) for value in values]


def make_textarena_world(settings: Mapping[str, object], limits: ToolLimits) -> World:
    """Build the world (the registered factory). Raises ConfigError, and UserError if the package is missing."""
    chosen = read_settings(TextArenaSettings, settings)
    maker = TextArenaMaker(load_package("textarena", "textarena", "textarena"), chosen)
    num = maker.num_players()
    if num == 1 and chosen.opponent == "self":
        raise ConfigError(f"The game {chosen.id} has one player.", "Unset env.settings.opponent.")

    def make(task: Task) -> TextArenaMatch:
        return TextArenaMatch(maker, num, task.seed)

    system = f"You play the game {chosen.id.partition('-')[0]}. Reply with your move."
    return match_world("textarena", chosen, system, make, self_play=chosen.opponent == "self", blocks=num > 1)
