"""Self-play roles of tasks.

The task tag `role` is the policy's role (default "policy"); the tag `proposal` is the proposed task that it
attempts (default: its own id).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ludus.algorithms.parts import Need
from ludus.algorithms.spec.algorithm import Algorithm
from ludus.envs.base import World
from ludus.errors import ConfigError
from ludus.types import Task

ROLE, PROPOSAL, PROPOSER = "role", "proposal", "proposer"
PLAIN_ROLE = "policy"


def role_of(task: Task) -> str:
    """Return the policy's role in a task."""
    return task.tags.get(ROLE, PLAIN_ROLE)


def role_tables(tasks: Sequence[Task]) -> tuple[Tensor, Tensor]:
    """Return whether the policy proposes in each task, `[N]` bool, and the proposal's number, `[N]`."""
    proposer = torch.tensor([role_of(task) == PROPOSER for task in tasks], dtype=torch.bool)
    numbers: dict[str, int] = {}
    names = [task.tags.get(PROPOSAL, task.id) for task in tasks]
    return proposer, torch.tensor([numbers.setdefault(name, len(numbers)) for name in names])


def check_roles(algorithm: Algorithm, world: World) -> None:
    """Raise ConfigError if the algorithm needs proposers and solvers and no task has roles."""
    if not algorithm.advantage_spec.has(Need.PROPOSALS):
        return
    if not any(ROLE in task.tags for task in world.tasks("train")):
        raise ConfigError(
            f"The advantage {algorithm.advantage} compares proposers and solvers, but no task of the world "
            f"{world.name!r} has the tag {ROLE!r}.",
            "Give tasks the tags role (proposer or solver) and proposal, or use grpo.",
        )
