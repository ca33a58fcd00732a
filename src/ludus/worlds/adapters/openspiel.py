"""Games of open-spiel (import `pyspiel`) in turns, with chance drawn by the seed of the task.

The payoff of a seat is its return, scaled from the smallest to the largest utility of the game to 0 to 1.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Literal, Protocol

from pydantic import Field

from ludus.envs.base import World
from ludus.envs.settings import read_settings
from ludus.envs.tool_env import ToolLimits
from ludus.errors import ConfigError
from ludus.types import Task
from ludus.worlds.adapters.base import AdapterSettings, cannot_start, load_package
from ludus.worlds.adapters.matches import Match, match_world

_MAX_LISTED = 60
"""Largest number of moves that are listed."""


class OpenSpielSettings(AdapterSettings):
    """Settings of the world `openspiel` (`env.settings`)."""

    id: str = "tic_tac_toe"
    """Name of the game, with its parameters in brackets or in `kwargs`."""
    opponent: Literal["random", "self", "mcts"] = "random"
    """Other players: random moves, the policy, or the package's tree search, which sees hidden cards."""
    simulations: int = Field(100, ge=1)
    """Number of simulations of a move of `mcts`."""
    observation: Literal["auto", "observation", "information"] = "auto"
    """Text of a state: of the current observation, or of all information so far; `auto`: the first if there is one."""
    max_invalid: int = Field(2, ge=0)
    """Number of consecutive illegal moves that are answered with the legal ones; the next one loses the game."""


class OpenSpielState(Protocol):
    """Interface of a state of a game."""

    def is_terminal(self) -> bool: ...
    def is_chance_node(self) -> bool: ...
    def chance_outcomes(self) -> Sequence[tuple[int, float]]: ...
    def apply_action(self, action: int) -> None: ...
    def current_player(self) -> int: ...
    def legal_actions(self) -> Sequence[int]: ...
    def action_to_string(self, action: int) -> str: ...
    def returns(self) -> Sequence[float]: ...
    def observation_string(self, player: int) -> str: ...
    def information_state_string(self, player: int) -> str: ...


class OpenSpielGame(Protocol):
    """Interface of a game."""

    def new_initial_state(self) -> OpenSpielState: ...
    def num_players(self) -> int: ...
    def min_utility(self) -> float: ...
    def max_utility(self) -> float: ...


class OpenSpielBot(Protocol):
    """Interface of the package's tree search."""

    def step(self, state: OpenSpielState) -> int: ...


class OpenSpielMatch(Match):
    """One game. A move is the text of a legal action, or its number."""

    def __init__(self, package: ModuleType, game: OpenSpielGame, settings: OpenSpielSettings, seed: int) -> None:
        self._game, self._settings, self._package, self._seed = game, settings, package, seed
        self._state = game.new_initial_state()
        self._chance = random.Random(f"chance/{seed}")
        self._invalid, self._complaint = 0, ""
        self._bot: OpenSpielBot | None = None
        self.num_players = game.num_players()

    def start(self) -> None:
        self._settle()

    def news(self, player: int) -> str:
        state = self._state
        by_information = self._settings.observation == "information"
        text = state.information_state_string(player) if by_information else state.observation_string(player)
        complaint, self._complaint = self._complaint, ""
        moves = self.moves()
        listed = f"Your moves: {', '.join(moves)}" if 0 < len(moves) <= _MAX_LISTED else ""
        return "\n".join(filter(None, (complaint, f"You are player {player}.", text.strip(), listed)))

    def moves(self) -> Sequence[str]:
        state = self._state
        return () if state.is_terminal() else [state.action_to_string(action) for action in state.legal_actions()]

    def move(self, text: str) -> bool:
        action = self._action(text.strip())
        if action is not None:
            self._invalid = 0
            self._state.apply_action(action)
            self._settle()
            return True
        self._invalid += 1
        self._complaint = "That is not one of your moves."
        if self._invalid > self._settings.max_invalid:
            self.forfeit()
        return False

    def opponent_move(self, rng: random.Random) -> str:
        if self._settings.opponent == "mcts":
            return str(self._searcher().step(self._state))
        return str(rng.choice(self._state.legal_actions()))

    def _searcher(self) -> OpenSpielBot:
        if self._bot is None:
            package, seed = self._package, self._seed
            evaluator = package.RandomRolloutEvaluator(1, seed)
            self._bot = package.MCTSBot(self._game, evaluator, 2.0, self._settings.simulations, 100, True, seed, False)
        return self._bot

    def _action(self, text: str) -> int | None:
        numbers, texts = self._state.legal_actions(), list(self.moves())
        found = [number for number, own in zip(numbers, texts, strict=True) if text in (own, str(number))]
        folded = [n for n, own in zip(numbers, texts, strict=True) if text.casefold() == own.casefold()]
        return found[0] if found else folded[0] if len(folded) == 1 else None

    def _settle(self) -> None:
        """Draw the outcomes of chance until a player is to move, or the game is over."""
        state, game = self._state, self._game
        while state.is_chance_node():
            outcomes, weights = zip(*state.chance_outcomes(), strict=True)
            state.apply_action(self._chance.choices(outcomes, weights)[0])
        if not state.is_terminal():
            self.player = state.current_player()
            return
        low, high = game.min_utility(), game.max_utility()
        self.payoffs = [(value - low) / (high - low) if high > low else 0.0 for value in state.returns()]


def make_openspiel_world(settings: Mapping[str, object], limits: ToolLimits) -> World:
    """Build the world (the registered factory). Raises ConfigError, and UserError if the package is missing."""
    chosen = read_settings(OpenSpielSettings, settings)
    package = load_package("pyspiel", "open-spiel", "openspiel")
    try:
        game = package.load_game(chosen.id, chosen.kwargs) if chosen.kwargs else package.load_game(chosen.id)
        kind, probe = game.get_type(), game.new_initial_state()
        is_sequential = kind.dynamics == package.GameType.Dynamics.SEQUENTIAL
        if is_sequential and not probe.is_chance_node():
            probe.legal_actions()
    except Exception as error:  # boundary: constructors of third parties
        raise cannot_start(f"The game {chosen.id}", error) from error
    if not is_sequential:
        hint = f"Set env.settings.id to 'turn_based_simultaneous_game(game={chosen.id})'."
        raise ConfigError(f"The players of {chosen.id} do not take turns.", hint)
    if kind.chance_mode == package.GameType.ChanceMode.SAMPLED_STOCHASTIC:
        raise ConfigError(f"The chance of {chosen.id} does not depend on a seed.", "Choose another game.")
    texts = {"observation": kind.provides_observation_string, "information": kind.provides_information_state_string}
    text = next((name for name, has in texts.items() if has and chosen.observation in ("auto", name)), None)
    if text is None:
        raise ConfigError(f"The game {chosen.id} has no text for this setting.", "Change env.settings.observation.")
    own = chosen.model_copy(update={"observation": text})

    def make(task: Task) -> OpenSpielMatch:
        return OpenSpielMatch(package, game, own, task.seed)

    system = f"You play the game {kind.long_name}. Reply with one of your moves."
    self_play, blocks = chosen.opponent == "self", chosen.opponent == "mcts"
    return match_world("openspiel", own, system, make, self_play=self_play, blocks=blocks)
