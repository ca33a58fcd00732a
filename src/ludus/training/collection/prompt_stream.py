"""Source of streamed groups, which follows the task order, and the checkpoint of the stream.

A resumed run loses only running episodes; they are sampled again under the same keys with newer
weights. Finished groups that do not count towards a batch are stored for the next step's ledger.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Final

from ludus.envs.base import TaskSequence
from ludus.errors import StorageError
from ludus.rollouts.group_queue import StartedEpisode, StreamedGroup
from ludus.rollouts.ledger import RolloutOutcome
from ludus.rollouts.rollout_files import RolloutRecord, parse_rollout, rollout_line
from ludus.rollouts.scheduler import Episode, FailureBudget, RolloutRequest
from ludus.training.collection.rollout_collector import RolloutCollector
from ludus.training.credit.advantages import varies
from ludus.types import StopReason, Task, Trajectory

STREAM_FILE: Final = "stream.jsonl"
"""File name in a checkpoint's trainer folder."""
WAITING_FILE: Final = "waiting.jsonl"
"""File name of episodes waiting for the next step's budget (`rollout.partial`)."""

RequestsOf = Callable[[int, Task, int | None], Sequence[RolloutRequest]]
"""Return the requests of a group from its number, task and number of sampled members (None: the configured one)."""


@dataclass(frozen=True, slots=True)
class StreamState:
    """Pending groups, the number of the next one, and finished greedy episodes that are no longer needed."""

    next_number: int = 0
    groups: tuple[StreamedGroup, ...] = ()
    unwanted: tuple[Episode, ...] = ()

    @property
    def num_ended(self) -> int:
        every = [*self.unwanted, *(episode for group in self.groups for episode in group.episodes)]
        return sum(episode.trajectory.failure is None for episode in every)

    def to_text(self) -> str:
        """Serialize to JSON lines: the next number, then each group before its episodes."""
        lines = [json.dumps({"next_number": self.next_number})]
        for group in self.groups:
            task = group.requests[0].task.id
            # failed episodes are sampled again if the group continues
            ended = [i for i in sorted(group.done) if not (group.counts and group.done[i].trajectory.failure)]
            head = {"group": group.number, "task": task, "version": group.version, "ended": ended}
            members, step = sum(not request.greedy for request in group.requests), group.requests[0].key.step
            head |= {"counts": group.counts, "members": members, "step": step, "begun": sorted(group.begun)}
            lines.append(json.dumps(head))
            lines += [episode_line(group.done[index]) for index in ended]
            lines += [episode_line(_so_far(group.begun[i], group.requests[0].task)) for i in sorted(group.begun)]
        return "\n".join(lines) + "\n"

    @classmethod
    def from_text(cls, text: str, tasks: Mapping[str, Task], requests: RequestsOf) -> StreamState:
        """Restore from `to_text`. Raises StorageError if the text is invalid or a task is unknown."""
        with reading("episodes"):
            lines = iter([json.loads(line) for line in text.splitlines()])
            next_number, groups, unwanted = int(next(lines)["next_number"]), [], []
            for head in lines:
                own = requests(head["group"], task := tasks[head["task"]], members := head["members"])
                own = [replace(request, key=replace(request.key, step=head["step"])) for request in own]
                done = {index: read_episode(next(lines), task, index >= members) for index in head["ended"]}
                gone = [done.pop(index) for index in head["ended"] if index >= len(own)]
                unwanted += [one for one in gone if one.trajectory.failure is None]
                waiting = {index: read_episode(next(lines), task, False) for index in head["begun"]}
                begun = {index: StartedEpisode(one.key, one.trajectory.segments) for index, one in waiting.items()}
                groups.append(StreamedGroup(head["group"], own, head["version"], done, head["counts"], begun))
        return cls(next_number, tuple(groups), tuple(unwanted))


@contextmanager
def reading(what: str) -> Iterator[None]:
    """Convert the errors of parsing a checkpoint's `what` into a StorageError."""
    try:
        yield
    except (ValueError, TypeError, KeyError, IndexError, StopIteration) as error:
        raise StorageError(
            f"The checkpoint's {what} cannot be read: {error!r}.",
            "Remove this checkpoint and resume from the one before.",
        ) from error


def waiting_texts(groups: Sequence[StreamedGroup]) -> dict[str, str]:
    """Return the checkpoint files of waiting groups; empty if there are none."""
    return {WAITING_FILE: StreamState(0, tuple(groups)).to_text()} if groups else {}


def _so_far(begun: StartedEpisode, task: Task) -> Episode:
    """Return a waiting episode as an unfinished attempt."""
    return Episode(begun.key, task, Trajectory(task.id, begun.key.sample, begun.segments, (), StopReason.TRUNCATED))


def episode_line(episode: Episode) -> str:
    """Serialize an episode to a line of JSON, without its greedy flag."""
    key, one = episode.key, episode.trajectory
    return rollout_line(
        RolloutRecord(key.step, key.task_id, RolloutOutcome.DROPPED, "on its way", one, attempt=key.attempt)
    )


def read_episode(data: object, task: Task, greedy: bool) -> Episode:
    """Read the output of `episode_line`. Raises ValueError, TypeError or KeyError if it is invalid."""
    record = parse_rollout(data)
    return Episode(record.key, task, record.trajectory, greedy)


@dataclass
class PromptStream:
    """Stream of groups: group `n` uses task `n` of the order; each step has `per_step` groups.

    With GRESO or a curriculum it is the next chosen task that is not recent; `before` are the recent ones of a
    resumed run. `spare` extra members are sampled per group. `begin_step` starts the failure budget of a step.
    """

    collector: RolloutCollector
    order: TaskSequence
    per_step: int
    spare: int = 0
    before: Sequence[str] = ()
    budget: FailureBudget = field(init=False)
    _recent: deque[str] = field(init=False)
    _uncounted: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        curriculum = self.collector.curriculum
        num_tasks = len(self.order.tasks) if curriculum is None else curriculum.min_tasks
        num_recent = min(2 * self.per_step, num_tasks // 2)
        self._recent = deque(self.before, max(num_recent, self.per_step - 1))  # no task occurs twice in a step

    def requests(self, number: int) -> Sequence[RolloutRequest]:
        if self.collector.chooses_tasks:
            step = self._step(number)
            (task,) = self.collector.choose_tasks(step, self.order, 1, set(self._recent))
        else:
            (task,) = self.order.take(number, 1)
        self._recent.append(task.id)
        return self.jobs_of(number, task)

    def jobs_of(self, number: int, task: Task, members: int | None = None) -> list[RolloutRequest]:
        """Return the rollout requests of a group; `members` overrides its size."""
        spare = self.spare if members is None else members - self.collector.num_attempts
        return self.collector.requests(self._step(number), task, spare)

    def free(self, number: int, groups: Sequence[StreamedGroup]) -> int:
        """Return the first number from `number` on whose rollout keys do not collide with these, of other settings."""
        chooses, first = self.collector.chooses_tasks, [group.requests[0].key for group in groups]
        numbered = [(key, group.number) for key, group in zip(first, groups, strict=True)]
        same_steps = all(key.step == self._step(n) for key, n in numbered)
        if same_steps and (chooses or all(key.task_id == self.order.take(n, 1)[0].id for key, n in numbered)):
            return number
        return max(number, *(key.step * self.per_step for key in first))

    def counts(self, group: Sequence[Episode]) -> bool:
        """Return whether a group counts: no failed member, and no zero variance while resampling rounds are left."""
        algorithm = self.collector.algorithm
        if any(episode.trajectory.failure is not None for episode in group):
            return False
        replaces = self._uncounted < algorithm.max_resample_rounds * self.per_step
        if not (algorithm.filter_zero_variance and replaces) or self._varies(group):
            return True
        self._uncounted += 1
        return False

    def _varies(self, group: Sequence[Episode]) -> bool:
        """Return whether the members' advantages differ, or may differ after rewards are combined."""
        collector = self.collector
        if varies(group, collector.algorithm):
            return True
        members = [member.trajectory for member in group if not member.greedy]
        return collector.reward_mixer is not None and collector.reward_mixer.can_differ(members)

    def begin_step(self) -> None:
        self._uncounted = 0
        self.collector.skipped = 0
        self.budget = FailureBudget(self.per_step * self.collector.group_size)

    async def run_one(self, request: RolloutRequest) -> Episode:
        budget = self.budget
        budget.begun += 1
        return await self.collector.add_extra_parts(await self.collector.scheduler.run_one(request, budget), budget)

    def _step(self, number: int) -> int:
        """Return the step that trains a group if none is dropped; it seeds the group's randomness."""
        return number // self.per_step + 1
