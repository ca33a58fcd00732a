"""Environments of gymnasium: observations and actions as text, grids of minigrid with their mission.

The episode succeeds if its return reaches a threshold. Toy text environments without chance have an expert (value
iteration on their transition table), and so have the levels of BabyAI (the bot of minigrid).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import ModuleType
from typing import Literal, Protocol, runtime_checkable

from pydantic import Field

from ludus.envs.settings import read_settings
from ludus.envs.simulator_world import Observation, SimulatorWorld
from ludus.envs.tool_env import ToolLimits
from ludus.errors import ConfigError
from ludus.types import Task
from ludus.worlds.adapters import minigrid, spaces
from ludus.worlds.adapters.base import BoundedSimulator, ExpertSettings, cannot_start, load_package, make_tasks

ACTION_NAMES: Mapping[str, Sequence[str]] = {
    "FrozenLake-v1": ("left", "down", "right", "up"),
    "CliffWalking-v1": ("up", "right", "down", "left"),
    "Taxi-v4": ("south", "north", "east", "west", "pickup", "dropoff"),
    "Blackjack-v1": ("stick", "hit"),
    "CartPole-v1": ("left", "right"),
}
"""Names of the actions of common environments, in order."""
_COLORS = ("black", "red", "green", "yellow", "blue", "magenta", "cyan", "white")
_DISCOUNT = 0.99
_GRID_STEPS = 10_000
"""Limit of a grid, whose own limit depends on its mission."""


class GymnasiumSettings(ExpertSettings):
    """Settings of the world `gymnasium` (`env.settings`)."""

    id: str = "FrozenLake-v1"
    """Name of the environment. One of minigrid (MiniGrid-..., BabyAI-...) needs the package minigrid."""
    observation: Literal["auto", "ansi", "space"] = "auto"
    """Text of an observation: the environment's rendering as text, its values, or `auto`: the first if there is one."""
    action_names: tuple[str, ...] = ()
    """Names of the actions of a discrete space, in order; by default those of the environment, if it has names."""
    success_return: float | None = None
    """Smallest return of a success; by default the environment's `reward_threshold`, or else any positive return."""
    max_steps: int = Field(0, ge=0)
    """Maximum number of actions in an episode; 0 means the environment's `max_episode_steps`, or else 100
    (a grid of minigrid has its own limit)."""
    blocks: bool = False
    """Run each episode in its own thread, for an environment whose steps take more than a millisecond."""


@runtime_checkable
class HasActionNames(Protocol):
    """An environment that names its actions."""

    def get_action_meanings(self) -> list[str]: ...


@runtime_checkable
class HasTransitions(Protocol):
    """An environment with a transition table: state, action, then (probability, next state, reward, done)."""

    P: Mapping[int, Mapping[int, Sequence[tuple[float, int, float, bool]]]]
    s: int


class GymnasiumSpec(Protocol):
    """Interface of the specification of an environment."""

    reward_threshold: float | None
    max_episode_steps: int | None


class GymnasiumEnv(Protocol):
    """Interface of an environment of gymnasium."""

    action_space: spaces.Space
    observation_space: spaces.Space
    metadata: Mapping[str, object]
    spec: GymnasiumSpec
    unwrapped: object

    def reset(self, *, seed: int) -> tuple[object, object]: ...
    def step(self, action: object) -> tuple[object, float, bool, bool, object]: ...
    def render(self) -> object: ...
    def close(self) -> None: ...


@dataclass(frozen=True)
class GymnasiumGame:
    """How an environment is made, shown and graded. `threshold` is None if any positive return is a success."""

    package: ModuleType
    settings: GymnasiumSettings
    ansi: bool
    grid: bool
    names: Sequence[str]
    threshold: float | None
    max_steps: int

    def make(self) -> GymnasiumEnv:
        """Return a new environment."""
        mode = {"render_mode": "ansi"} if self.ansi else {}
        return made(self.package, self.settings, mode)

    def text(self, env: GymnasiumEnv, seen: object) -> str:
        """Return an observation as text."""
        if self.grid:
            return minigrid.grid_text(env.unwrapped)
        return colors_as_text(str(env.render())) if self.ansi else spaces.render(env.observation_space, seen)

    def success(self, total: float, *, over: bool) -> float:
        """Return 1 for a return that is a success; a threshold that is not positive counts only at the end."""
        if self.threshold is None:
            return float(total > 0)
        return float(total >= self.threshold and (over or self.threshold > 0))

    @cached_property
    def policy(self) -> Mapping[int, int]:
        """The best action by state of a toy text environment without chance; empty for any other environment."""
        whole = self.make()
        whole.reset(seed=0)
        env = whole.unwrapped
        whole.close()
        if not isinstance(env, HasTransitions) or any(len(e) > 1 for row in env.P.values() for e in row.values()):
            return {}
        values = dict.fromkeys(env.P, 0.0)

        def worth(state: int, action: int) -> float:
            _, following, reward, done = env.P[state][action][0]
            return reward + (0.0 if done else _DISCOUNT * values[following])

        while True:
            new = {state: max(worth(state, action) for action in row) for state, row in env.P.items()}
            if new == values:
                return {state: max(row, key=lambda action: worth(state, action)) for state, row in env.P.items()}
            values = new


class GymnasiumSimulator(BoundedSimulator):
    """One episode of an environment."""

    def __init__(self, game: GymnasiumGame, seed: int) -> None:
        super().__init__(game.max_steps)
        self._game, self._seed, self._total = game, seed, 0.0
        self._env: GymnasiumEnv | None = None
        self._bot: minigrid.GridBot | None = None
        self._last: object = None
        self._advice = (-1, "")

    @property
    def env(self) -> GymnasiumEnv:
        """The environment, made at first use."""
        if self._env is None:
            self._env = self._game.make()
        return self._env

    def reset(self) -> str:
        seen, _ = self.env.reset(seed=self._seed)
        return self._game.text(self.env, seen)

    def act(self, action: str) -> Observation:
        space, names = self.env.action_space, self._game.names
        try:
            value = spaces.parse(space, action, names)
        except ValueError as error:
            return Observation(f"Not an action ({error}). An action is {spaces.describe(space, names)}.", valid=False)
        self._last = value
        seen, reward, terminated, truncated, _ = self.env.step(value)
        self._total += float(reward)
        over = bool(terminated or truncated)
        self.success = self._game.success(self._total, over=over)
        return Observation(self._game.text(self.env, seen), float(reward), over)

    def actions(self) -> Sequence[str]:
        """Return the names or numbers of a discrete space."""
        if self._game.names:
            return self._game.names
        return [str(number) for number in spaces.whole_numbers(self.env.action_space)]

    def expert_action(self) -> str | None:
        """Return the best action of a toy text environment, or that of BabyAI's bot."""
        if self._advice[0] != self.num_steps:
            value = self._expert_value()
            self._advice = (self.num_steps, "" if value is None else self.actions()[value])
        return self._advice[1] or None

    def _expert_value(self) -> int | None:
        env = self.env.unwrapped
        if isinstance(env, HasTransitions):
            return self._game.policy.get(int(env.s))
        if not self._game.grid:
            return None
        self._bot = self._bot or minigrid.make_bot(env)
        try:
            return None if self._bot is None else self._bot.replan(self._last)
        except Exception:  # boundary: the bot raises if a random action has made the mission impossible
            return None

    def close(self) -> None:
        if self._env is not None:
            self._env.close()


def colors_as_text(text: str) -> str:
    """Replace the terminal's colors: a red S becomes red(S)."""
    found = re.sub(
        r"\x1b\[[\d;]*?[34](\d)[\d;]*m(.*?)\x1b\[0m", lambda m: f"{_COLORS[int(m[1]) % 8]}({m[2]})", text, flags=re.S
    )
    return re.sub(r"\x1b\[[\d;]*m", "", found).strip("\n")


def made(package: ModuleType, settings: GymnasiumSettings, mode: Mapping[str, str]) -> GymnasiumEnv:
    """Return an environment. Raises ConfigError if the package cannot make it."""
    try:
        env: GymnasiumEnv = package.make(settings.id, disable_env_checker=True, **mode, **settings.kwargs)
    except Exception as error:  # boundary: constructors of third parties
        raise cannot_start(f"The environment {settings.id}", error) from error
    return env


def _game(package: ModuleType, settings: GymnasiumSettings, env: GymnasiumEnv, *, grid: bool) -> GymnasiumGame:
    own, modes = env.unwrapped, env.metadata.get("render_modes", ())
    can_render = isinstance(modes, Sequence) and "ansi" in modes and not grid
    if settings.observation == "ansi" and not can_render:
        raise ConfigError(f"{settings.id} has no text rendering.", "Set env.settings.observation to 'space'.")
    meanings = own.get_action_meanings() if isinstance(own, HasActionNames) else ACTION_NAMES.get(settings.id, ())
    names = settings.action_names or (minigrid.ACTIONS if grid else tuple(meanings))
    num = len(spaces.whole_numbers(env.action_space))
    if names and len(names) != num:
        raise ConfigError(f"env.settings.action_names has {len(names)} names for {num} actions.", "Name each action.")
    threshold = settings.success_return if settings.success_return is not None else env.spec.reward_threshold
    max_steps = settings.max_steps or env.spec.max_episode_steps or (_GRID_STEPS if grid else 100)
    return GymnasiumGame(
        package, settings, can_render and settings.observation != "space", grid, names, threshold, max_steps
    )


def make_gymnasium_world(settings: Mapping[str, object], limits: ToolLimits) -> SimulatorWorld:
    """Build the world (the registered factory). Raises ConfigError, and UserError if a package is missing."""
    chosen = read_settings(GymnasiumSettings, settings)
    package = load_package("gymnasium", "gymnasium", "gymnasium")
    has_grid = chosen.id.startswith(("MiniGrid-", "BabyAI-"))
    if has_grid:
        load_package("minigrid", "minigrid", "minigrid")
    env = made(package, chosen, {})
    game = _game(package, chosen, env, grid=has_grid and minigrid.is_grid(env.unwrapped))
    simulator = GymnasiumSimulator(game, 0)
    try:
        simulator.reset()
        action = spaces.describe(env.action_space, game.names)
    except ValueError as error:
        raise ConfigError(f"{chosen.id} cannot be shown as text: {error}.", "Choose another env.settings.id.") from None
    finally:
        simulator.close()
    marks = minigrid.LEGEND if game.grid else "A colored sign x is shown as color(x)." if game.ansi else ""
    system = f"You act in the environment {chosen.id}. An action is {action}. Reply with one action. {marks}".strip()
    has_expert = minigrid.has_bot(env.unwrapped) if game.grid else bool(game.policy)

    def make(task: Task) -> GymnasiumSimulator:
        return GymnasiumSimulator(game, task.seed)

    return SimulatorWorld(
        "gymnasium", make_tasks(chosen, system), make, blocks=chosen.blocks, flaw=chosen.flaw, has_expert=has_expert
    )
