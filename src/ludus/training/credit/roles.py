"""Roles of the policy: by tags of a task, or by the names of several agents of an episode."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ludus.rollouts.scheduler import Episode
from ludus.types import POLICY, WORLD_TAG, Task

ROLE, PROPOSAL, PROPOSER = "role", "proposal", "proposer"
SESSION = "session"
"""Role of the policy in a recorded session without a task."""


def role_of(task: Task) -> str:
    """Return the policy's role in a task."""
    return task.tags.get(ROLE, POLICY)


def is_proposer(role: str) -> bool:
    """Return whether a role is `proposer` or `proposer:KIND`."""
    return role.partition(":")[0] == PROPOSER


def role_tables(tasks: Sequence[Task]) -> tuple[Tensor, Tensor]:
    """Return whether the policy proposes in each task, `[N]` bool, and the proposal's number, `[N]`."""
    proposer = torch.tensor([is_proposer(role_of(task)) for task in tasks], dtype=torch.bool)
    numbers: dict[str, int] = {}
    names = [task.tags.get(PROPOSAL, task.id) for task in tasks]
    return proposer, torch.tensor([numbers.setdefault(name, len(numbers)) for name in names])


EXPERT = "expert"
"""Agent name of segments not sampled by the policy."""


GUIDED = "guided"
"""Agent name of segments that the policy sampled with a hint."""


def is_expert(episode: Episode) -> bool:
    """Return whether this is an expert's episode, or one that the policy sampled with a hint."""
    return any(segment.agent in (EXPERT, GUIDED) for segment in episode.trajectory.segments)


def is_demonstrated(episode: Episode) -> bool:
    """Return whether the policy did not sample this episode."""
    return any(segment.agent == EXPERT for segment in episode.trajectory.segments)


def with_agent_rewards(groups: Sequence[Sequence[Episode]]) -> list[list[Episode]]:
    """Return the groups with the reward of each agent also in rollouts of several agents that have only one reward.

    Those that ended at a limit have none by agent; all of their agents get the reward of the rollout.
    """
    worlds = {one.task.tags.get(WORLD_TAG) for group in groups for one in group if one.trajectory.agent_rewards}

    def complete(one: Episode) -> Episode:
        trajectory = one.trajectory
        if trajectory.agent_rewards or one.task.tags.get(WORLD_TAG) not in worlds or is_expert(one):
            return one
        rewards = {segment.agent: trajectory.reward for segment in trajectory.segments}
        return replace(one, trajectory=replace(trajectory, agent_rewards=rewards))

    return [[complete(one) for one in group] for group in groups]


def alone(groups: Sequence[int], tasks: Sequence[Task], *, by_proposal: bool) -> list[int]:
    """Return the attempts without another one of their group or, with `by_proposal`, of their role and proposal."""
    keys = [*groups]
    if by_proposal:
        proposer, proposals = role_tables(tasks)
        keys = torch.where(proposer, -1, proposals).tolist()
    counts = Counter(keys)
    return [i for i, key in enumerate(keys) if counts[key] == 1]
