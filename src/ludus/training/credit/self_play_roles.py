"""Roles in self-play: which part the policy plays in a task.

A task says by its tag `role` which part the policy plays in it ("policy" where there is none), and by its tag
`proposal` which proposed task it is an attempt at (its own id where there is none).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ludus.algorithms.spec.algorithm import ROLE_ADVANTAGES, Algorithm
from ludus.envs.base import World
from ludus.errors import ConfigError
from ludus.types import Task

ROLE, PROPOSAL, PROPOSER = "role", "proposal", "proposer"
PLAIN_ROLE = "policy"


def role_of(task: Task) -> str:
    """The role that a task has the policy play."""
    return task.tags.get(ROLE, PLAIN_ROLE)


def role_tables(tasks: Sequence[Task]) -> tuple[Tensor, Tensor]:
    """Whether each task has the policy propose, `[N]` bool, and the number of the proposal, `[N]`."""
    proposer = torch.tensor([role_of(task) == PROPOSER for task in tasks], dtype=torch.bool)
    numbers: dict[str, int] = {}
    names = [task.tags.get(PROPOSAL, task.id) for task in tasks]
    return proposer, torch.tensor([numbers.setdefault(name, len(numbers)) for name in names])


def check_roles(algorithm: Algorithm, world: World) -> None:
    """Raise ConfigError for an algorithm of proposers and solvers in a world whose tasks name neither."""
    if algorithm.advantage not in ROLE_ADVANTAGES or algorithm.advantage == "rae":
        return
    if not any(ROLE in task.tags for task in world.tasks("train")):
        raise ConfigError(
            f"The advantage {algorithm.advantage} compares proposers and solvers, and no task of the world "
            f"{world.name!r} has the tag {ROLE!r}.",
            "Give tasks the tags role (proposer or solver) and proposal, or choose grpo.",
        )
