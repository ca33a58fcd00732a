"""Notes that persist over the episodes of a training task, or of a run (`rollout.notes.scope`).

An episode of step `s` starts with the notes of its task that were written in steps before `s`: the members of a group
start equal, whatever their order in time. After a step, the notes of the members are merged in the order of `sample`;
a later text replaces an earlier one of the same title, and the oldest notes above the limit are dropped. With the
scope `run` all tasks share one set of notes, under the empty task.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ludus.rollouts.rollout_files import truncate_lines
from ludus.rollouts.scheduler import Episode
from ludus.tools.notes import merged

NOTES_FILE = "notes.jsonl"
"""File of the run folder: the notes of a task after each step that changed them, with `step`, `task` and `notes`."""


@dataclass
class TaskNotes:
    """The notes by task, or `shared` by all, in a file to which each step appends."""

    path: Path
    max_notes: int
    shared: bool = False
    _texts: dict[str, dict[str, str]] = field(init=False, default_factory=dict)

    @classmethod
    def load(cls, path: Path, max_notes: int, done: int, *, shared: bool = False) -> TaskNotes:
        """Return the notes after step `done`; those of later steps are removed from the file."""
        found = cls(path, max_notes, shared)
        truncate_lines(path, done)
        if path.is_file():
            for line in path.read_text("utf-8").splitlines():
                one = json.loads(line)
                found._texts[one["task"]] = one["notes"]
        return found

    def of(self, task_id: str) -> Mapping[str, str]:
        """Return the notes that an episode of a task starts with."""
        return self._texts.get(self._key(task_id), {})

    def _key(self, task_id: str) -> str:
        return "" if self.shared else task_id

    def add(self, step: int, episodes: Iterable[Episode]) -> None:
        """Merge the notes that the episodes of a step wrote, and append the tasks with changes to the file."""
        changed: dict[str, dict[str, str]] = {}
        for episode in episodes:
            if episode.trajectory.notes and not episode.greedy:
                task = self._key(episode.task.id)
                changed[task] = merged(changed.get(task, self.of(task)), episode.trajectory.notes)
        lines = []
        for task, texts in changed.items():
            kept = dict([*texts.items()][-self.max_notes :])
            self._texts[task] = kept
            lines.append(json.dumps({"step": step, "task": task, "notes": kept}) + "\n")
        if lines:
            with self.path.open("a", encoding="utf-8") as file:
                file.writelines(lines)
                file.flush()
                os.fsync(file.fileno())
