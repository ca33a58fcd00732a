"""Prompts of the self-teacher: the prompt of an attempt, and a success of its group, feedback, or a demonstration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from ludus.algorithms.algorithm import Algorithm, Need
from ludus.chat.hints import describe_dialogue, first_messages, with_text
from ludus.engines.models.loading import num_positions
from ludus.rewards.base import success
from ludus.rollouts.episode import fresh_environment
from ludus.tools.base import Tool
from ludus.training.collection.demonstrations import Demonstrations
from ludus.training.credit.advantages import TrainingSample
from ludus.training.run.session import TrainingSession
from ludus.types import Task, Trajectory

SUCCESS = "A correct solution:"
FEEDBACK = "Feedback on an earlier attempt that failed:"
REQUEST = "Now solve the original task."


@dataclass
class TeacherPrompts:
    """Add the prompts of the self-teacher to samples (SDPO arXiv:2601.20802, SDFT arXiv:2601.19897).

    With `demonstrations` each attempt is shown that of its task. Otherwise it is shown the next successful attempt of
    its group, never itself, and with `teacher.feedback` a failed one also its feedback. An attempt has no such
    prompt if there is nothing to show, its row is not a single path, its prompt cannot be rendered again, or the longer
    row does not fit into the model's positions.
    """

    session: TrainingSession
    demonstrations: Demonstrations | None = None
    _tools: dict[str, Sequence[Tool]] = field(default_factory=dict, init=False)

    def add(self, samples: Sequence[TrainingSample]) -> list[TrainingSample]:
        """Return the samples with `teacher_prompt`."""
        groups: dict[int, list[TrainingSample]] = {}
        for sample in samples:
            groups.setdefault(sample.group, []).append(sample)
        return [replace(one, teacher_prompt=self._prompt(one, groups[one.group])) for one in samples]

    def _prompt(self, sample: TrainingSample, group: Sequence[TrainingSample]) -> tuple[int, ...]:
        trajectory, task = sample.episode.trajectory, sample.episode.task
        if sample.advantages is None or len(trajectory.rows) != 1 or not trajectory.num_action_tokens:
            return ()
        text = self._text(sample, group)
        messages, renderer = first_messages(trajectory), self.session.renderer
        if not text or renderer.prompt(messages, self._tools_of(task)) != trajectory.segments[0].tokens:
            return ()
        tokens = tuple(renderer.prompt(with_text(messages, text), self._tools_of(task)))
        length = len(tokens) + sum(len(segment.tokens) for segment in trajectory.segments[1:])
        return tokens if length <= (num_positions(self.session.model) or length) else ()

    def _text(self, sample: TrainingSample, group: Sequence[TrainingSample]) -> str:
        trajectory, world = sample.episode.trajectory, self.session.world
        if self.demonstrations is not None:
            shown = next(iter(self.demonstrations.dialogues(sample.episode.task)), None)
            return "" if shown is None else f"{SUCCESS}\n{describe_dialogue(shown)}\n\n{REQUEST}"
        place = next(i for i, one in enumerate(group) if one is sample)
        others = [one.episode.trajectory for one in (*group[place + 1 :], *group[:place]) if one.advantages is not None]
        solved = next((one for one in others if success(world.rewards, one)), None)
        parts = [] if solved is None else [f"{SUCCESS}\n{_describe_attempt(solved)}"]
        if self.session.config.teacher.feedback and not success(world.rewards, trajectory):
            feedback = world.hint(sample.episode.task, trajectory, 0)
            parts += [f"{FEEDBACK}\n{feedback}"] if feedback else []
        return "\n\n".join([*parts, REQUEST]) if parts else ""

    def _tools_of(self, task: Task) -> Sequence[Tool]:
        if task.id not in self._tools:
            self._tools[task.id] = fresh_environment(self.session.world, task).tools
        return self._tools[task.id]


def _describe_attempt(attempt: Trajectory) -> str:
    return describe_dialogue(attempt.messages[len(first_messages(attempt)) :])


def make_teacher_prompts(
    session: TrainingSession, algorithm: Algorithm, demonstrations: Demonstrations | None
) -> TeacherPrompts | None:
    """Return the prompts if the loss has a self-teacher."""
    if not algorithm.loss_spec.has(Need.SELF_TEACHER):
        return None
    shown = algorithm.loss_spec.has(Need.SHOWN_DEMONSTRATION)
    return TeacherPrompts(session, demonstrations if shown else None)
