"""Self-play roles of tasks.

The task tag `role` is the policy's role (default "policy"); the tag `proposal` is the proposed task that it
attempts (default: its own id).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

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
