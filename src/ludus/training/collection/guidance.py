"""Guidance: attempts with a hint at tasks that a whole group failed (Agent-RLVR, arXiv:2506.11425).

The solved ones join the group without the hint: their row has the prompt of the other members. The log-probabilities
of the engine remain those with the hint, so that a correction weighs each token by the probability without it.
`TeacherPrompts` shows solutions to the self-teacher instead.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from ludus.algorithms.algorithm import Algorithm, Need
from ludus.chat.hints import describe_dialogue, split_at_action, with_text
from ludus.config.schema import Config
from ludus.config.sections.section import changed
from ludus.config.sections.training import GuidanceConfig
from ludus.engines.models.loading import num_positions
from ludus.envs.base import World
from ludus.errors import ConfigError, reject_combination
from ludus.rewards.base import success
from ludus.rollouts.episode import fresh_environment
from ludus.rollouts.ledger import Ledger
from ludus.rollouts.scheduler import Episode, RolloutRequest, Scheduler
from ludus.tools.base import Tool
from ludus.training.collection.demonstrations import Demonstrations
from ludus.training.credit.advantages import TrainingSample
from ludus.training.credit.roles import GUIDED
from ludus.training.run.session import TrainingSession
from ludus.types import Task, Trajectory, grouped


@dataclass
class Guidance:
    """Sample attempts with hints. They are in no ledger, and an infrastructure failure loses only the attempt."""

    world: World
    settings: GuidanceConfig
    _counts: dict[int, Counter[str]] = field(default_factory=dict, init=False)

    @classmethod
    def of(cls, session: TrainingSession) -> Guidance | None:
        """Return the guidance of a run, or None without it."""
        settings = session.config.training.guidance
        return cls(session.world, settings) if settings.samples else None

    def requests(self, step: int, groups: Sequence[Sequence[Episode]]) -> list[RolloutRequest]:
        """Return the requests for the groups without a success; worlds without a hint for the task are counted."""
        counts = self._counts.setdefault(step, Counter())
        requests = []
        for group in groups:
            first = group[0]
            ended = any(one.trajectory.failure or success(self.world.rewards, one.trajectory) for one in group)
            if ended or not first.trajectory.segments:
                continue
            hint = self.world.hint(first.task, first.trajectory, self.settings.actions)
            counts["failed"] += 1
            counts["hints"] += hint is not None
            for i in range(self.settings.samples if hint else 0):
                key = replace(first.key, sample=len(group) + i, attempt=0)
                requests.append(RolloutRequest(key, first.task, hint=hint or ""))
        return requests

    async def run(self, requests: Sequence[RolloutRequest], scheduler: Scheduler) -> list[Episode]:
        """Run the requests with the settings of a scheduler."""
        lenient = scheduler.rollout.model_copy(update={"max_failure_rate": 1.0})
        return await replace(scheduler, rollout=lenient, ledger=Ledger()).run(requests) if requests else []

    def join(self, step: int, groups: Sequence[Sequence[Episode]], episodes: Sequence[Episode]) -> list[list[Episode]]:
        """Append the solved attempts, without the hint, to the groups of their tasks."""
        counts, joined = self._counts[step], []
        for group in groups:
            played = [one for one in episodes if one.task.id == group[0].task.id]
            solved = [one for one in played if _is_solved_path(self.world, one.trajectory)]
            kept = [replace(one, trajectory=without_hint(one.trajectory, group[0].trajectory)) for one in solved]
            counts["attempts"] += len(played)
            counts["solved"] += len(solved)
            joined.append([*group, *kept])
        return joined

    def metrics(self, step: int) -> dict[str, float]:
        """Return the metrics of a step's guidance, and forget them."""
        counts = self._counts.pop(step, Counter())
        return {
            "guidance/failed_groups": float(counts["failed"]),
            "guidance/hints": float(counts["hints"]),
            "guidance/attempts": float(counts["attempts"]),
            "guidance/success": counts["solved"] / max(counts["attempts"], 1),
        }


def _is_solved_path(world: World, one: Trajectory) -> bool:
    return success(world.rewards, one) and one.failure is None and len(one.rows) == 1


def without_hint(guided: Trajectory, plain: Trajectory) -> Trajectory:
    """Return the guided attempt with the prompt of another attempt at its task."""
    segments = [replace(segment, agent=GUIDED) for segment in (plain.segments[0], *guided.segments[1:])]
    messages = (*split_at_action(plain.messages)[0], *split_at_action(guided.messages)[1])
    return replace(guided, segments=tuple(segments), messages=messages)


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
        groups = grouped(samples, lambda one: one.group)
        return [replace(one, teacher_prompt=self._prompt(one, groups[one.group])) for one in samples]

    def _prompt(self, sample: TrainingSample, group: Sequence[TrainingSample]) -> tuple[int, ...]:
        trajectory, task = sample.episode.trajectory, sample.episode.task
        if sample.advantages is None or len(trajectory.rows) != 1 or not trajectory.num_action_tokens:
            return ()
        text = self._text(sample, group)
        messages, renderer = split_at_action(trajectory.messages)[0], self.session.renderer
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
        parts = [] if solved is None else [f"{SUCCESS}\n{describe_dialogue(split_at_action(solved.messages)[1])}"]
        if self.session.config.teacher.feedback and not success(world.rewards, trajectory):
            feedback = world.hint(sample.episode.task, trajectory, 0)
            parts += [f"{FEEDBACK}\n{feedback}"] if feedback else []
        return "\n\n".join([*parts, REQUEST]) if parts else ""

    def _tools_of(self, task: Task) -> Sequence[Tool]:
        if task.id not in self._tools:
            self._tools[task.id] = fresh_environment(self.session.world, task).tools
        return self._tools[task.id]


def make_teacher_prompts(
    session: TrainingSession, algorithm: Algorithm, demonstrations: Demonstrations | None
) -> TeacherPrompts | None:
    """Return the prompts if the loss has a self-teacher."""
    if not algorithm.loss_spec.has(Need.SELF_TEACHER):
        return None
    shown = algorithm.loss_spec.has(Need.SHOWN_DEMONSTRATION)
    return TeacherPrompts(session, demonstrations if shown else None)


def check_guidance(config: Config, world: World) -> None:
    """Raise ConfigError for guidance of a world without hints, of episodes of several dialogues, or unused."""
    settings, rollout = config.training.guidance, config.rollout
    if not settings.samples:
        for key, value in changed(settings).items():
            text = f"training.guidance.{key} = {value} would have no effect: training.guidance.samples is 0."
            raise ConfigError(text, f"Set training.guidance.samples, such as 4, or unset training.guidance.{key}.")
        return
    cases = {
        "training.mode = 'async'": config.training.streams,
        "rollout.partial": rollout.partial.is_set,
        "rollout.branch": rollout.branch.branches > 0,
        "rollout.context": rollout.context.max_tokens > 0,
        "rollout.subagents": rollout.subagents.max_depth > 0,
        "rollout.agent": rollout.agent.is_set or world.runs_agents,
        "training.learner.old_logprobs = 'engine'": config.training.learner.old_logprobs == "engine",
    }
    reject_combination("training.guidance.samples does not apply with {}.", cases)
    if settings.actions and not (world.implements("hint") or world.implements("expert")):
        text = f"The world {world.name!r} has no hints: it has neither an expert nor the method hint."
        raise ConfigError(
            text, "Set training.guidance.actions = 0 for feedback alone, or training.guidance.samples = 0."
        )


def check_self_teacher(config: Config, algorithm: Algorithm) -> None:
    """Raise ConfigError for unused settings of the self-teacher, and for rows that it cannot be shown anything for."""
    loss, used = algorithm.loss_spec, {"ema_rate", "feedback"}
    if not loss.has(Need.SELF_TEACHER):
        used = set()
    elif loss.has(Need.SHOWN_DEMONSTRATION):
        used = {"ema_rate"}
    for key, value in changed(config.teacher).items():
        if key not in (*used, "path"):
            text = f"teacher.{key} = {value} would have no effect: the loss {algorithm.loss} does not use it."
            raise ConfigError(text, "Unset it, or set algorithm.preset = 'sdpo'.")
    if not used:
        return
    lora = config.model.lora
    cases = {
        "training.transitions": config.training.transitions,
        "staleness.replay": config.staleness.replay.share > 0,
        "training.learner.shard": config.training.learner.shard,
        "model.lora.roles": lora is not None and bool(lora.roles),
        "training.learner.replay_routing": config.training.learner.replay_routing,
    }
    reject_combination(f"The loss {algorithm.loss} cannot be combined with {{}}.", cases)
