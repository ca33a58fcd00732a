"""Hindsight relabelling: a failed attempt as a success at the task that it did solve (arXiv:1707.01495).

The world names that task (`World.achieved`). The sampled actions are repeated in its environment, which gives the
prompt and the observations of the new task, and ends at its goal. An episode that does not succeed is left out.
"""

from __future__ import annotations

from collections.abc import Sequence

from ludus.rewards.base import success
from ludus.rollouts.episode import world_errors
from ludus.rollouts.ledger import RolloutKey
from ludus.rollouts.scheduler import Episode
from ludus.training.collection.demonstrations import replay_actions
from ludus.training.run.session import TrainingSession
from ludus.types import POLICY, Message, Task


async def relabelled(session: TrainingSession, episodes: Sequence[Episode]) -> list[Episode]:
    """Return the relabelled failed attempts, each sequence of actions at a task once, in the order of `episodes`.

    Raises WorldError if `World.achieved` raises.
    """
    replays: dict[RolloutKey, tuple[Task, Sequence[Message | tuple[int, ...]]]] = {}
    seen: set[tuple[str, tuple[tuple[int, ...], ...]]] = set()
    for number, episode in enumerate(episodes):
        attempt = episode.trajectory
        if attempt.failure is not None or len(attempt.rows) != 1 or success(session.world.rewards, attempt):
            continue
        with world_errors(f"`achieved` of task {attempt.task_id} raised"):
            task = session.world.achieved(episode.task, attempt)
        actions = tuple(segment.tokens for segment in attempt.segments if segment.kind == "action")
        if task is None or not actions or (task.id, actions) in seen:
            continue
        seen.add((task.id, actions))
        replays[RolloutKey(episode.key.step, task.id, number)] = task, actions
    played = await replay_actions(session, replays, POLICY) if replays else []
    return [one for one in played if one.trajectory.failure is None and success(session.world.rewards, one.trajectory)]
