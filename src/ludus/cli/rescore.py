"""Rewards replayed: the world's rewards run again on rollouts that were saved."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from rich.table import Table

from ludus.envs.base import World
from ludus.envs.toolbox import describe_error
from ludus.errors import LudusError, WorldError
from ludus.rewards.base import score
from ludus.rollout.store import RolloutRecord
from ludus.types import Task, Trajectory


@dataclass(frozen=True, slots=True)
class Rescored:
    """A stored rollout, and its trajectory with rewards made anew."""

    record: RolloutRecord
    now: Trajectory

    @property
    def changed(self) -> bool:
        """Whether any number differs."""
        before = self.record.trajectory
        return dict(before.rewards) != dict(self.now.rewards) or before.reward != self.now.reward


@dataclass(frozen=True)
class Replay:
    """All that were scored again; `num_failed` have no rewards, `unknown` are of tasks the world lacks."""

    rescored: Sequence[Rescored]
    num_failed: int
    unknown: Sequence[str]


def rescore(world: World, records: Iterable[RolloutRecord]) -> Replay:
    """Score stored rollouts again. What the clock measured is 0 in them.

    Raises WorldError where a reward raises.
    """
    chosen = list(records)
    finished = [record for record in chosen if record.trajectory.failure is None]
    tasks = find_tasks(world, {record.group for record in finished})
    known = [record for record in finished if record.group in tasks]
    rescored = [Rescored(record, _scored(world, tasks[record.group], record.trajectory)) for record in known]
    unknown = sorted({record.group for record in finished} - tasks.keys())
    return Replay(rescored, len(chosen) - len(finished), unknown)


def find_tasks(world: World, ids: set[str]) -> dict[str, Task]:
    """Tasks by id, from as few splits as hold them all."""
    found: dict[str, Task] = {}
    for split in world.splits:
        if ids <= found.keys():
            break
        found |= {task.id: task for task in world.tasks(split) if task.id in ids}
    return found


def _scored(world: World, task: Task, trajectory: Trajectory) -> Trajectory:
    try:
        return score(world.rewards, task, replace(trajectory, rewards={}, reward=0.0))
    except LudusError:
        raise
    except Exception as error:  # boundary: foreign code; the cause travels in the message
        raise WorldError(f"A reward of task {task.id} raised {describe_error(error)}") from error


def replay_words(replay: Replay) -> list[str]:
    """The result in sentences."""
    changed = sum(one.changed for one in replay.rescored)
    total = len(replay.rescored)
    words = [
        f"{total} rollouts scored again: "
        + (f"{changed} have other rewards now." if changed else "all rewards are as they were, bit for bit.")
    ]
    if replay.num_failed:
        words.append(f"{replay.num_failed} more failed in the infrastructure and have no rewards.")
    if replay.unknown:
        words.append(
            f"{len(replay.unknown)} tasks are not in the world any more, for example {replay.unknown[0]}."
        )
    return words


def replay_table(replay: Replay) -> Table:
    """The mean of the reward and of each part, before and now, and how many rollouts changed in it."""
    table = Table(title="Rewards as saved and as scored now")
    for column in ("part", "mean as saved", "mean now", "rollouts changed"):
        table.add_column(column)
    names = dict.fromkeys(
        name for one in replay.rescored for name in (*one.record.trajectory.rewards, *one.now.rewards)
    )
    parts = {name: [_pair(one, name) for one in replay.rescored] for name in names}
    parts["reward"] = [(one.record.trajectory.reward, one.now.reward) for one in replay.rescored]
    for name, pairs in parts.items():
        before, now = (sum(column) / len(pairs) for column in zip(*pairs, strict=True))
        table.add_row(name, f"{before:.4f}", f"{now:.4f}", str(sum(a != b for a, b in pairs)))
    return table


def _pair(one: Rescored, name: str) -> tuple[float, float]:
    return one.record.trajectory.rewards.get(name, 0.0), one.now.rewards.get(name, 0.0)


def changed_table(replay: Replay, num: int) -> Table:
    """The first rollouts whose rewards changed."""
    table = Table(title="Rollouts with other rewards, the first of them")
    for column in ("step", "task", "sample", "answer", "reward as saved", "reward now"):
        table.add_column(column)
    for one in [one for one in replay.rescored if one.changed][:num]:
        record = one.record
        row = (str(record.step), record.group, str(record.trajectory.sample), one.now.answer)
        table.add_row(*row, f"{record.trajectory.reward:g}", f"{one.now.reward:g}")
    return table
