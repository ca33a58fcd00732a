"""The stream of episodes in a checkpoint: the groups on their way, with all episodes of them that have ended.

So a resumed run loses the episodes that were being played, and none that had ended well. Their tasks are
played again under their numbers, by newer weights than before. Groups that ended without counting are kept
whole, for the account of the next step.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from ludus.errors import StorageError
from ludus.rollout.ledger import RolloutOutcome
from ludus.rollout.rollout_files import RolloutRecord, parse_rollout, rollout_line
from ludus.rollout.scheduler import Episode, RolloutRequest
from ludus.rollout.streaming.group_queue import StartedEpisode, StreamedGroup
from ludus.types import StopReason, Task, Trajectory

STREAM_FILE: Final = "stream.jsonl"
"""Its name in a checkpoint's folder of the trainer."""
WAITING_FILE: Final = "waiting.jsonl"
"""The same, of a run in step whose episodes wait for the next step's budget (`rollout.partial`)."""

JobsOf = Callable[[int, Task, int | None], Sequence[RolloutRequest]]
"""The jobs of a group by its number, its task and its members without a greedy one (None: as many as now)."""


@dataclass(frozen=True, slots=True)
class StreamState:
    """The groups on their way, and the number of the next one.

    `unwanted` are greedy episodes that had ended well, where the baseline is another one now.
    """

    next_number: int = 0
    groups: tuple[StreamedGroup, ...] = ()
    unwanted: tuple[Episode, ...] = ()

    @property
    def num_ended(self) -> int:
        """Episodes that have ended well."""
        every = [*self.unwanted, *(episode for group in self.groups for episode in group.episodes)]
        return sum(episode.trajectory.failure is None for episode in every)

    def to_text(self) -> str:
        """JSON lines: the next number, then each group before its episodes."""
        lines = [json.dumps({"next_number": self.next_number})]
        for group in self.groups:
            task = group.jobs[0].task.id
            ended = [i for i in sorted(group.done) if _stays(group, i)]
            head = {"group": group.number, "task": task, "version": group.version, "ended": ended}
            members, step = sum(not job.greedy for job in group.jobs), group.jobs[0].key.step
            head |= {"counts": group.counts, "members": members, "step": step, "begun": sorted(group.begun)}
            lines.append(json.dumps(head))
            lines += [episode_line(group.done[place]) for place in ended]
            lines += [_begun_line(group.begun[place], task) for place in sorted(group.begun)]
        return "\n".join(lines) + "\n"

    @classmethod
    def from_text(cls, text: str, tasks: Mapping[str, Task], jobs: JobsOf) -> StreamState:
        """What `to_text` wrote. A group keeps the members and the step that it began with, whatever a new one
        has.

        Raises StorageError where it is no such text, or speaks of a task that there is not.
        """
        try:
            lines = iter([json.loads(line) for line in text.splitlines()])
            next_number, groups, unwanted = int(next(lines)["next_number"]), [], []
            for head in lines:
                own = jobs(head["group"], task := tasks[head["task"]], members := head.get("members"))
                if "step" in head:
                    own = [replace(job, key=replace(job.key, step=head["step"])) for job in own]
                done = {}
                for place in head["ended"]:
                    greedy = own[place].greedy if members is None else place >= members
                    done[place] = read_episode(next(lines), task, greedy)
                gone = [done.pop(place) for place in head["ended"] if place >= len(own)]
                unwanted += [one for one in gone if one.trajectory.failure is None]
                counts = head.get("counts", True)
                begun = {place: _read_begun(next(lines)) for place in head.get("begun", ())}
                groups.append(StreamedGroup(head["group"], own, head["version"], done, counts, begun))
        except (ValueError, TypeError, KeyError, IndexError, StopIteration) as error:
            raise StorageError(
                f"The checkpoint's episodes cannot be read: {error!r}.",
                "Remove this checkpoint and resume from the one before.",
            ) from error
        return cls(next_number, tuple(groups), tuple(unwanted))


def waiting_texts(groups: Sequence[StreamedGroup]) -> dict[str, str]:
    """What a checkpoint keeps of groups that wait; nothing where none does."""
    return {WAITING_FILE: StreamState(0, tuple(groups)).to_text()} if groups else {}


def _stays(group: StreamedGroup, place: int) -> bool:
    """Whether an episode that has ended is kept; one that failed is played again, if its group goes on."""
    return not group.counts or group.done[place].trajectory.failure is None


def _begun_line(begun: StartedEpisode, task_id: str) -> str:
    """An episode that waits as a line of JSON: an attempt that has no ending yet."""
    key = begun.key
    so_far = Trajectory(task_id, key.sample, begun.segments, (), StopReason.TRUNCATED)
    return rollout_line(
        RolloutRecord(key.step, task_id, RolloutOutcome.DROPPED, "waits", so_far, None, key.attempt)
    )


def _read_begun(data: object) -> StartedEpisode:
    """What `_begun_line` wrote, as JSON. Raises as `read_episode`."""
    record = parse_rollout(data)
    return StartedEpisode(record.key, record.trajectory.segments)


def episode_line(episode: Episode) -> str:
    """An episode as a line of JSON; whether it is greedy is for the reader to know."""
    key, one = episode.key, episode.trajectory
    return rollout_line(
        RolloutRecord(key.step, key.task_id, RolloutOutcome.DROPPED, "on its way", one, attempt=key.attempt)
    )


def read_episode(data: object, task: Task, greedy: bool) -> Episode:
    """What `episode_line` wrote, as JSON. Raises ValueError, TypeError or KeyError for anything else."""
    record = parse_rollout(data)
    return Episode(record.key, task, record.trajectory, greedy)
