"""Checkpoint of streamed episodes: pending groups and their finished episodes.

A resumed run loses only episodes that were running; they are sampled again under the same keys by newer
weights. Groups that ended without counting towards a batch are kept for the next step's ledger.
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
"""File name in a checkpoint's trainer folder."""
WAITING_FILE: Final = "waiting.jsonl"
"""File name of episodes waiting for the next step's budget (`rollout.partial`)."""

JobsOf = Callable[[int, Task, int | None], Sequence[RolloutRequest]]
"""Return a group's requests by number, task and member count without the greedy one (None: default)."""


@dataclass(frozen=True, slots=True)
class StreamState:
    """Pending groups and the number of the next one.

    `unwanted` are finished greedy episodes that a changed baseline no longer needs.
    """

    next_number: int = 0
    groups: tuple[StreamedGroup, ...] = ()
    unwanted: tuple[Episode, ...] = ()

    @property
    def num_ended(self) -> int:
        """The number of successfully finished episodes."""
        every = [*self.unwanted, *(episode for group in self.groups for episode in group.episodes)]
        return sum(episode.trajectory.failure is None for episode in every)

    def to_text(self) -> str:
        """Serialize to JSON lines: the next number, then each group before its episodes."""
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
        """Restore from `to_text`. A group keeps the size and step that it started with.

        Raises StorageError if the text is invalid or a task is unknown.
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
    """Return the checkpoint files of waiting groups; empty if there are none."""
    return {WAITING_FILE: StreamState(0, tuple(groups)).to_text()} if groups else {}


def _stays(group: StreamedGroup, place: int) -> bool:
    """Return whether a finished episode is kept; failed ones are retried if the group continues."""
    return not group.counts or group.done[place].trajectory.failure is None


def _begun_line(begun: StartedEpisode, task_id: str) -> str:
    """Serialize a waiting episode (an unfinished attempt) to a line of JSON."""
    key = begun.key
    so_far = Trajectory(task_id, key.sample, begun.segments, (), StopReason.TRUNCATED)
    return rollout_line(RolloutRecord(key.step, task_id, RolloutOutcome.DROPPED, "waits", so_far, None, key.attempt))


def _read_begun(data: object) -> StartedEpisode:
    """Read the output of `_begun_line`. Raises as `read_episode`."""
    record = parse_rollout(data)
    return StartedEpisode(record.key, record.trajectory.segments)


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
