"""GRESO: skip tasks that are likely to have zero reward variance (arXiv:2506.02177).

A task whose last groups had equal rewards is skipped with the probability of `GresoState`, and the next task
of the order replaces it. The step size stays the same.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from ludus.algorithms.filters import GresoSettings, Visit
from ludus.algorithms.spec.algorithm import Algorithm
from ludus.tasks.order import TaskSequence
from ludus.training.collection.algorithm_state import AlgorithmState
from ludus.training.credit.advantages import TrainingSample, varied_groups
from ludus.types import Task

SETTINGS = GresoSettings()


@dataclass(frozen=True, slots=True)
class GresoChoice:
    """Tasks to sample, number of skipped tasks, and the state with its new place in the order."""

    tasks: tuple[Task, ...]
    skipped: int
    memory: AlgorithmState


@dataclass(frozen=True, slots=True)
class GresoDraw:
    """Inputs that determine the random draws of a step."""

    seed: int
    step: int


def choose(
    order: TaskSequence, num: int, memory: AlgorithmState, taken: Collection[str], draw: GresoDraw
) -> GresoChoice:
    """Return the next `num` tasks that are neither skipped nor in `taken`.

    Scans at most one epoch, or until it finds a task outside `taken`, which does not cover all tasks. If all
    are skipped, the first ones are returned, so that no step is empty.
    """
    seen, found, skipped = set(taken), list[Task](), list[Task]()
    position = memory.position
    end = position + len(order.tasks)
    while len(found) < num and position < end:
        (task,) = order.take(position, 1)
        position += 1
        if position == end and not (found or skipped) and task.id in seen:
            end += len(order.tasks)  # the same task can occur in two epochs
        if task.id in seen:
            continue
        seen.add(task.id)
        skips = memory.greso.skips(task.id, SETTINGS, seed=draw.seed, step=draw.step)
        (skipped if skips else found).append(task)
    if not found:
        found, skipped = skipped[:num], skipped[num:]
    return GresoChoice(tuple(found), len(skipped), replace(memory, position=position))


def after_visits(
    memory: AlgorithmState, credits: Sequence[TrainingSample], success: str, algorithm: Algorithm
) -> AlgorithmState:
    """Return the state updated with the groups of a step. `success` names the outcome reward part.

    A zero-variance group is easy if all members solved the task. Partial groups are ignored.
    """
    compared = [credit for credit in credits if credit.advantages is not None]
    if not compared:
        return memory
    varied = varied_groups(compared, algorithm)
    visits: dict[str, Visit] = {}
    for credit in compared:
        task = credit.episode.task.id
        solved = credit.episode.trajectory.rewards.get(success, 0.0) >= 1
        before = visits.get(task, Visit(task, not varied[credit.group], easy=True))
        visits[task] = replace(before, easy=before.easy and solved)
    return replace(memory, greso=memory.greso.update(list(visits.values()), SETTINGS))


def greso_metrics(memory: AlgorithmState, skipped: int) -> dict[str, float]:
    """Return the number of skipped tasks and the current skip probabilities."""
    return {"greso/skipped": float(skipped), "greso/p_easy": memory.greso.p_easy, "greso/p_hard": memory.greso.p_hard}
