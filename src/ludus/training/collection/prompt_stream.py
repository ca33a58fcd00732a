"""Source of streamed groups: follows the task order."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from ludus.rollout.scheduler import Episode, RolloutRequest
from ludus.rollout.streaming.group_queue import StreamedGroup
from ludus.tasks.order import TaskSequence
from ludus.training.collection.rollout_collector import RolloutCollector
from ludus.training.credit.advantages import varies
from ludus.types import Task


@dataclass
class PromptStream:
    """Group `n` uses the task at place `n` of the order, `per_step` of them for each step.

    With GRESO it is the next task that is neither skipped nor recent; `before` are the recent ones of a
    resumed run. `spare` extra members are sampled per group.
    """

    sampler: RolloutCollector
    order: TaskSequence
    per_step: int
    spare: int = 0
    before: Sequence[str] = ()
    _recent: deque[str] = field(init=False)
    _uncounted: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        wanted = min(2 * self.per_step, len(self.order.tasks) // 2)
        self._recent = deque(self.before, max(wanted, self.per_step - 1))  # no task occurs twice in a step

    def jobs(self, number: int) -> Sequence[RolloutRequest]:
        """Return the rollout requests of a new group."""
        if self.sampler.algorithm.greso:
            step = self._step(number)
            (task,) = self.sampler.choose(step, self.order, 1, set(self._recent))
        else:
            (task,) = self.order.take(number, 1)
        self._recent.append(task.id)
        return self.jobs_of(number, task)

    def jobs_of(self, number: int, task: Task, members: int | None = None) -> list[RolloutRequest]:
        """Return the rollout requests of a group; `members` overrides its size."""
        spare = self.spare if members is None else members - self.sampler.algorithm.group_size
        return self.sampler.jobs(self._step(number), task, spare)

    def free(self, number: int, groups: Sequence[StreamedGroup]) -> int:
        """Return the first number at or after `number` whose rollout keys do not collide with these groups.

        They can collide if an earlier run had a different group count per step or task order.
        """
        first = [group.jobs[0] for group in groups]
        if all(self._would_play(job, group.number) for job, group in zip(first, groups, strict=True)):
            return number
        return max(number, *(job.key.step * self.per_step for job in first))

    def _would_play(self, job: RolloutRequest, number: int) -> bool:
        """Return whether a group of that number would have this request; under GRESO any group may."""
        same = self.sampler.algorithm.greso or self.order.take(number, 1)[0].id == job.key.task_id
        return same and job.key.step == self._step(number)

    def counts(self, group: Sequence[Episode]) -> bool:
        """Return whether a group counts towards a batch: no member may have failed permanently.

        If zero-variance groups are resampled (`max_resample_rounds`), they do not count either while rounds
        are left.
        """
        algorithm = self.sampler.algorithm
        if any(episode.trajectory.failure is not None for episode in group):
            return False
        replaces = self._uncounted < algorithm.max_resample_rounds * self.per_step
        if not (algorithm.filter_zero_variance and replaces) or self._varies(group):
            return True
        self._uncounted += 1
        return False

    def _varies(self, group: Sequence[Episode]) -> bool:
        """Return whether the members' advantages differ, or may differ once rewards are combined."""
        sampler = self.sampler
        if varies(group, sampler.algorithm):
            return True
        members = [one.trajectory for one in group if not one.greedy]
        return sampler.combiner is not None and sampler.combiner.tells_apart(members)

    def begin_step(self) -> None:
        """Reset the resampling rounds for the next batch."""
        self._uncounted = 0
        self.sampler.skipped = 0

    def _step(self, number: int) -> int:
        """Return the step that would train a group if none were dropped; it seeds the group's randomness."""
        return number // self.per_step + 1
