"""GRESO in the loop: which tasks a step plays, and what their groups said (arXiv:2506.02177).

A task whose last groups had equal rewards is skipped with the probability of `GresoState`; the next one of
the order takes its place. So a step is as large as without it, and the order moves on faster.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from ludus.algorithms.greso import GresoSettings, Visit
from ludus.algorithms.spec.algorithm import Algorithm
from ludus.tasks.order import TaskSequence
from ludus.training.collection.algorithm_state import AlgorithmState
from ludus.training.credit.advantages import TrainingSample, varied_groups
from ludus.types import Task

SETTINGS = GresoSettings()


@dataclass(frozen=True, slots=True)
class GresoChoice:
    """The tasks to play, how many were skipped for them, and the memory with its new place in the order."""

    tasks: tuple[Task, ...]
    skipped: int
    memory: AlgorithmState


@dataclass(frozen=True, slots=True)
class GresoDraw:
    """What the draws of a step depend on."""

    seed: int
    step: int


def choose(
    order: TaskSequence, num: int, memory: AlgorithmState, taken: Collection[str], draw: GresoDraw
) -> GresoChoice:
    """The next `num` tasks that are not skipped, none of them in `taken`; looks at one lap at most, or until
    it has met one that is not in `taken`, which are not all.

    Where all are skipped the first of them are played: a step without a task teaches nothing.
    """
    seen, found, skipped = set(taken), list[Task](), list[Task]()
    position = memory.position
    end = position + len(order.tasks)
    while len(found) < num and position < end:
        (task,) = order.take(position, 1)
        position += 1
        if position == end and not (found or skipped) and task.id in seen:
            end += len(order.tasks)  # two laps may share what they have of this one
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
    """The memory after the groups of a step. `success` is the reward part that says what was solved.

    A group whose members the advantage cannot tell apart is easy where all solved the task. Partial groups
    say nothing.
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
    """How many tasks a step skipped, and the probabilities that the next one begins with."""
    return {
        "greso/skipped": float(skipped),
        "greso/p_easy": memory.greso.p_easy,
        "greso/p_hard": memory.greso.p_hard,
    }
