"""Shared parts of the adapters: settings, tasks by seed, optional packages, bounded episodes, global random numbers.

An adapter makes a world from an environment of another package. A task is a seed; the seeds of the splits are disjoint,
and the prompt has only the system message: the first observation follows when the episode starts.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import random
import re
import threading
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType

import numpy as np
from pydantic import Field

from ludus.envs.settings import WorldSettings
from ludus.envs.simulator_world import Observation, Simulator
from ludus.errors import ConfigError, UserError
from ludus.types import Message, Task

SPLITS = ("train", "validation", "test")
MAX_ACTION = 10_000
"""Maximum number of characters of an action."""
_SEED_STRIDE = 10_000_019
_SEEDS = 2**31
_GENERATORS = threading.RLock()


class AdapterSettings(WorldSettings):
    """Settings common to the adapters (`env.settings`)."""

    kwargs: dict[str, object] = Field(default_factory=dict)
    """Arguments of the environment."""
    num_tasks: int = Field(1000, ge=1)
    """Number of training tasks."""
    num_held_out: int = Field(200, ge=1)
    """Number of tasks of `validation` and of `test`."""
    max_steps: int = Field(100, ge=1)
    """Maximum number of actions in an episode, invalid ones included."""
    instructions: str = ""
    """Text added to the system message, for example the meaning of the observation."""
    seed: int = Field(0, ge=0)


class ExpertSettings(AdapterSettings):
    """Settings of an adapter with demonstrations of an expert."""

    flaw: float = Field(0.2, ge=0, le=1)
    """Fraction of the actions in demonstrations that are random."""


def load_package(module: str, package: str, extra: str) -> ModuleType:
    """Import a module of an optional package, without its changes to logging. Raises UserError if it is missing."""
    hint = f"Install it: pip install 'ludus[{extra}]'."
    if importlib.util.find_spec(module.partition(".")[0]) is None:
        raise UserError(f"This world needs the package {package}.", hint)
    handlers, level = logging.root.handlers[:], logging.root.level
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UserError(f"This world needs the package {package}: {error}.", hint) from error
    finally:
        logging.root.handlers[:] = handlers
        logging.root.setLevel(level)


def cannot_start(what: str, error: Exception) -> ConfigError:
    """Return the error of an environment that its package cannot make."""
    text = re.sub(r"\x1b\[[\d;]*m", "", str(error))
    cause = next((line.strip() for line in text.splitlines() if line.strip(" *")), "")
    return ConfigError(
        f"{what} cannot be started: {type(error).__name__}: {cause[:200]}",
        "Check env.settings.id and env.settings.kwargs. Environments that download data, call a paid model or need a "
        "newer Python are not supported.",
    )


def make_tasks(
    settings: AdapterSettings, system: str, tags: Callable[[int], Mapping[str, str]] = lambda index: {}
) -> dict[str, list[Task]]:
    """Return the tasks by split; `tags` maps the index of a task in its split to its tags."""
    text = f"{system}\n{settings.instructions}".strip()
    lists: dict[str, list[Task]] = {}
    for place, split in enumerate(SPLITS):
        num = settings.num_tasks if split == "train" else settings.num_held_out
        lists[split] = [
            Task(
                f"{split}:{index}",
                (Message(role="system", content=text),),
                None,
                {"split": split, **tags(index)},
                seed=(_SEED_STRIDE * settings.seed + len(SPLITS) * index + place) % _SEEDS,
            )
            for index in range(num)
        ]
    return lists


@contextmanager
def seeded_globally(seed: str) -> Iterator[None]:
    """Seed the generators of the modules `random` and `numpy.random` inside the block, and restore them after it.

    Some packages draw from these generators in the middle of an episode. With one seed per turn, an episode depends
    neither on other episodes nor on the rest of the program. One thread at a time is in such a block.
    """
    with _GENERATORS:
        state, numpy_state = random.getstate(), np.random.get_state()
        try:
            random.seed(seed)
            np.random.seed(random.getrandbits(32))
            yield
        finally:
            random.setstate(state)
            np.random.set_state(numpy_state)


class BoundedSimulator(Simulator):
    """A simulator whose episode ends after `max_steps` actions. A subclass defines `reset` and `act`."""

    def __init__(self, max_steps: int) -> None:
        self.num_steps, self._max_steps = 0, max_steps

    @abstractmethod
    def act(self, action: str) -> Observation:
        """Apply an action, which is valid Unicode and has at most `MAX_ACTION` characters."""

    def step(self, action: str) -> Observation:
        """Apply an action; one that is too long is invalid."""
        self.num_steps += 1
        if len(action) > MAX_ACTION:
            seen = Observation(f"An action has at most {MAX_ACTION} characters.", valid=False)
        else:
            seen = self.act(action.encode("utf-8", "replace").decode())
        return seen._replace(done=True) if self.num_steps >= self._max_steps else seen
