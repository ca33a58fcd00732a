"""Expert trajectories: demonstrations of the tasks that are being trained on, which join their groups.

They come from a file of dialogues that name their task, or from a world that can show a given task. Their
actions are replayed in a fresh environment: the expert's tokens are those that the renderer writes for its
messages, observations, tool outcomes, turn rewards and rewards are the environment's, and observations of
the dialogue are ignored. An expert whose episode earns no outcome is refused.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from ludus.algorithms.spec.algorithm import EXPERT_LOSSES, Algorithm
from ludus.chat.render import Renderer
from ludus.config.schema import Config
from ludus.config.sections.algorithm import DemonstrationsConfig
from ludus.engines.models.loading import num_positions
from ludus.envs.base import ShowsTasks, World
from ludus.errors import ConfigError, UserError
from ludus.rewards.base import Reward
from ludus.rollout.build import rollout_for, scheduler
from ludus.rollout.ledger import Ledger, RolloutKey
from ludus.rollout.scheduler import Episode, RolloutRequest
from ludus.tools.base import Tool
from ludus.training.credit.advantages import EXPERT
from ludus.training.datasets.files import read_dialogues
from ludus.training.run.session import TrainingSession
from ludus.types import Action, Message, Segment, StopReason, Task, ToolStatus, Trajectory

log = logging.getLogger("ludus.experts")

_TOO_LONG = (StopReason.PROMPT_TOO_LONG, StopReason.MAX_TOKENS)


@dataclass
class DemonstrationSession:
    """The assistant messages of a dialogue as the actions of an episode.

    The environment receives what the renderer parses from the rendered tokens, as it does from sampled ones.
    If the episode goes on after the last message, `act` returns MAX_TURNS.
    """

    renderer: Renderer
    said: Sequence[Message]
    max_tokens: int
    _history: list[Message] = field(default_factory=list, init=False)
    _tools: Sequence[Tool] = field(default=(), init=False)
    _segments: list[Segment] = field(default_factory=list, init=False)
    _turn: int = field(default=0, init=False)

    @property
    def segments(self) -> tuple[Segment, ...]:
        """Prompt, actions and observations so far, without log-probabilities and versions."""
        return tuple(self._segments)

    def open(self, messages: Sequence[Message], tools: Sequence[Tool]) -> StopReason | None:
        """Render the prompt."""
        self._tools = tools
        self._history += messages
        fits = self._append(Segment("prompt", self.renderer.prompt(messages, tools), agent=EXPERT))
        return None if fits else StopReason.PROMPT_TOO_LONG

    async def act(self) -> Action | StopReason:
        """Render the next message and parse its tokens."""
        if self._turn == len(self.said):
            return StopReason.MAX_TURNS
        turn, message = self._turn, self.said[self._turn]
        tokens = self.renderer.action(self._history, message, self._tools)
        if not self._append(Segment("action", tokens, turn, agent=EXPERT)):
            return StopReason.MAX_TOKENS
        self._turn += 1
        action = self.renderer.parse(tokens, turn, "stop")
        self._history.append(action.message)
        return action

    def observe(self, messages: Sequence[Message]) -> StopReason | None:
        """Render the environment's messages."""
        self._history += messages
        tokens = self.renderer.observation(messages)
        fits = self._append(Segment("observation", tokens, self._turn - 1, agent=EXPERT))
        return None if fits else StopReason.MAX_TOKENS

    def close(self) -> None:
        """Do nothing."""

    def _append(self, segment: Segment) -> bool:
        """Append the segment if it fits into the token budget."""
        fits = sum(len(one.tokens) for one in (*self._segments, segment)) <= self.max_tokens
        if fits:
            self._segments.append(segment)
        return fits


@dataclass
class Demonstrations:
    """The experts' trajectories by task. `given` are the dialogues of a file; None asks the world."""

    session: TrainingSession
    given: Mapping[str, Sequence[Sequence[Message]]] | None
    _made: dict[str, list[Trajectory]] = field(default_factory=dict, init=False)
    _refused: Counter[str] = field(default_factory=Counter, init=False)
    _counts: Counter[int] = field(default_factory=Counter, init=False)

    async def join(self, step: int, groups: Sequence[Sequence[Episode]]) -> list[list[Episode]]:
        """Append to each group its task's experts; a group without any is unchanged."""
        tasks = {group[0].task.id: group[0].task for group in groups}
        failed = await self._replay([task for task in tasks.values() if task.id not in self._made])
        self._counts[step] += sum(self._refused[group[0].task.id] for group in groups)
        joined = [[*group, *self._episodes(group)] for group in groups]
        for task_id in failed:  # the next step with the task tries again
            del self._made[task_id], self._refused[task_id]
        return joined

    def num_refused(self, step: int) -> int:
        """Return how many experts of a step's tasks were refused, and forget it."""
        return self._counts.pop(step, 0)

    def _episodes(self, group: Sequence[Episode]) -> list[Episode]:
        task, key = group[0].task, group[0].key
        return [
            Episode(RolloutKey(key.step, task.id, len(group) + i), task, replace(one, sample=len(group) + i))
            for i, one in enumerate(self._made[task.id])
        ]

    async def _replay(self, tasks: Sequence[Task]) -> set[str]:
        """Play the experts of the tasks and keep those that earn something.

        Return the tasks with an expert that the infrastructure failed.
        """
        dialogues = {
            RolloutKey(0, task.id, i): (task, said)
            for task in tasks
            for i, said in enumerate(self._dialogues(task)[: self.session.config.experts.per_group])
        }
        episodes = await self._play(dialogues)
        refused = {one.key: reason for one in episodes if (reason := self._refusal(one))}
        for task in tasks:
            own = [one for one in episodes if one.task.id == task.id]
            self._made[task.id] = [one.trajectory for one in own if one.key not in refused]
            self._refused[task.id] = len(own) - len(self._made[task.id])
        for key, reason in refused.items():
            log.warning("The expert %d of task %s is refused: %s", key.sample, key.task_id, reason)
        return {one.task.id for one in episodes if one.trajectory.failure is not None}

    async def _play(self, dialogues: Mapping[RolloutKey, tuple[Task, Sequence[Message]]]) -> list[Episode]:
        session, rollout = self.session, self.session.config.rollout
        positions = num_positions(session.model) or rollout.max_tokens

        def converse(job: RolloutRequest) -> DemonstrationSession:
            budget = min(positions, rollout_for(session.world, rollout, job.task).max_tokens)
            _, said = dialogues[replace(job.key, attempt=0)]
            return DemonstrationSession(session.renderer, said, budget)

        made = scheduler(session.world, converse, rollout, Ledger())
        limits = replace(made.limits, max_failure_rate=1.0)
        player = replace(made, limits=limits, scoring=session.scoring)
        episodes = await player.run([RolloutRequest(key, task) for key, (task, _) in dialogues.items()])
        return [replace(one, key=replace(one.key, attempt=0)) for one in episodes]

    def _refusal(self, episode: Episode) -> str:
        """Why an expert does not train; empty if it does."""
        played, config = episode.trajectory, self.session.config
        if played.failure is not None:
            return played.failure.error
        if played.stop_reason in _TOO_LONG:
            return f"it does not fit into rollout.max_tokens ({config.rollout.max_tokens})."
        if any(played.rewards.get(part.name, 0.0) > 0 for part in self._outcomes):
            return ""
        turns = f"{played.num_turns} turn{'s' * (played.num_turns != 1)}"
        ended = f"its episode earns no outcome and ended with {played.stop_reason} after {turns}"
        errors = [one for one in played.outcomes if one.status is not ToolStatus.OK]
        if not errors:
            return f"{ended}."
        return (
            f"{ended}; the call of {errors[0].tool!r} failed ({errors[0].status}): {errors[0].output[:200]}"
        )

    @property
    def _outcomes(self) -> list[Reward]:
        return [part for part in self.session.world.rewards if part.outcome and part.weight > 0]

    def _dialogues(self, task: Task) -> Sequence[Sequence[Message]]:
        """The assistant messages of each dialogue."""
        if self.given is not None:
            return self.given.get(task.id, ())
        world = self.session.world
        shown = world.expert(task) if isinstance(world, ShowsTasks) else None
        return () if shown is None else (_said(shown.messages, task.prompt),)


def check_experts(config: Config, algorithm: Algorithm, world: World) -> None:
    """Raise ConfigError for a loss that has no experts to learn from, and for experts that nothing reads."""
    path, reads = config.experts.path, algorithm.loss in EXPERT_LOSSES
    if path is not None and not reads:
        raise ConfigError(
            f"experts.path = {path} would have no effect: the loss {algorithm.loss} knows no experts.",
            "Leave it out, or set algorithm.preset = 'mixed_policy'.",
        )
    if config.experts.per_group != DemonstrationsConfig().per_group and not reads:
        raise ConfigError(
            f"experts.per_group = {config.experts.per_group} would have no effect: the loss {algorithm.loss} "
            "knows no experts.",
            "Leave it out, or set algorithm.preset = 'mixed_policy'.",
        )
    if reads and path is None and not isinstance(world, ShowsTasks):
        raise ConfigError(
            f"The loss {algorithm.loss} learns from experts, and the world {world.name!r} shows none.",
            "Set experts.path to a file of dialogues that name their task (docs/data.md).",
        )


def make_experts(session: TrainingSession, algorithm: Algorithm) -> Demonstrations | None:
    """The experts, where the algorithm has any. Raises UserError for a file that shows no training task."""
    path = session.config.experts.path
    if algorithm.loss not in EXPERT_LOSSES:
        return None
    if path is None:
        return Demonstrations(session, None)
    known = {task.id: task.prompt for task in session.world.tasks("train")}
    given: dict[str, list[Sequence[Message]]] = {}
    for dialogue in read_dialogues(Path(path)):
        if dialogue.task in known:
            given.setdefault(dialogue.task, []).append(_said(dialogue.messages, known[dialogue.task]))
    if not given:
        raise UserError(
            f"No dialogue of {path} names a task of the split train.",
            'Give each dialogue the id of its task: {"task": "...", "messages": [...]}.',
        )
    return Demonstrations(session, given)


def _said(messages: Sequence[Message], prompt: Sequence[Message]) -> Sequence[Message]:
    """The assistant messages behind the task's prompt; all of them if the dialogue has another prompt."""
    own = messages[len(prompt) :] if tuple(messages[: len(prompt)]) == tuple(prompt) else messages
    return [message for message in own if message["role"] == "assistant"]
