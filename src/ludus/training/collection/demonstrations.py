"""Expert trajectories (demonstrations) that join the groups of their tasks.

They come from a file of dialogues with task ids, or from a world that can solve its tasks. Their actions are
replayed in a fresh environment: tokens come from the renderer; observations, tool outcomes, turn rewards and
rewards from the environment, and observations in the dialogue are ignored. An expert whose episode has no
positive outcome is rejected.

Hindsight relabelling (`relabelled`) replays a failed attempt as a success at the task that it did solve
(arXiv:1707.01495), which the world names (`World.achieved`). An episode that does not succeed is left out.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from ludus.algorithms.algorithm import Algorithm, Need
from ludus.chat.hints import continuation
from ludus.chat.render import Renderer
from ludus.engines.models.loading import num_positions
from ludus.errors import UserError
from ludus.rewards.base import success
from ludus.rollouts.episode import world_errors
from ludus.rollouts.ledger import Ledger, RolloutKey
from ludus.rollouts.scheduler import Episode, RolloutRequest, rollout_for, scheduler
from ludus.tools.base import Tool
from ludus.training.credit.roles import EXPERT
from ludus.training.datasets.files import read_dialogues
from ludus.training.run.session import TrainingSession
from ludus.types import POLICY, Action, Message, Segment, StopReason, Task, ToolStatus, Trajectory

log = logging.getLogger(__name__)

_TOO_LONG = (StopReason.PROMPT_TOO_LONG, StopReason.MAX_TOKENS)


@dataclass
class DemonstrationSession:
    """Replay the assistant messages of a dialogue, or the tokens of sampled actions, as the actions of an episode.

    As for sampled tokens, the environment receives the messages parsed from the rendered tokens. If the
    episode continues after the last message, `act` returns MAX_TURNS.
    """

    renderer: Renderer
    messages: Sequence[Message | tuple[int, ...]]
    max_tokens: int
    agent: str = EXPERT
    _history: list[Message] = field(default_factory=list, init=False)
    _tools: Sequence[Tool] = field(default=(), init=False)
    _segments: list[Segment] = field(default_factory=list, init=False)
    _turn: int = field(default=0, init=False)

    @property
    def segments(self) -> tuple[Segment, ...]:
        return tuple(self._segments)

    def open(self, messages: Sequence[Message], tools: Sequence[Tool]) -> StopReason | None:
        self._tools = tools
        self._history += messages
        fits = self._append(Segment("prompt", self.renderer.prompt(messages, tools), agent=self.agent))
        return None if fits else StopReason.PROMPT_TOO_LONG

    async def act(self) -> Action | StopReason:
        if self._turn == len(self.messages):
            return StopReason.MAX_TURNS
        turn, message = self._turn, self.messages[self._turn]
        tokens = message if isinstance(message, tuple) else self.renderer.action(self._history, message, self._tools)
        if not self._append(Segment("action", tokens, turn, agent=self.agent)):
            return StopReason.MAX_TOKENS
        self._turn += 1
        action = self.renderer.parse(tokens, turn, "stop", self._tools)
        self._history.append(action.message)
        return action

    def observe(self, messages: Sequence[Message]) -> StopReason | None:
        self._history += messages
        tokens = self.renderer.observation(messages)
        fits = self._append(Segment("observation", tokens, self._turn - 1, agent=self.agent))
        return None if fits else StopReason.MAX_TOKENS

    def close(self) -> None:
        """Do nothing."""

    def _append(self, segment: Segment) -> bool:
        fits = sum(len(one.tokens) for one in (*self._segments, segment)) <= self.max_tokens
        if fits:
            self._segments.append(segment)
        return fits


async def replay_actions(
    session: TrainingSession,
    actions: Mapping[RolloutKey, tuple[Task, Sequence[Message | tuple[int, ...]]]],
    agent: str = EXPERT,
) -> list[Episode]:
    """Return the scored episodes of messages or action tokens in fresh environments; their segments name `agent`."""
    rollout = session.config.rollout
    positions = num_positions(session.model) or rollout.max_seq_len

    def make_chat(request: RolloutRequest) -> DemonstrationSession:
        budget = min(positions, rollout_for(session.world, rollout, request.task).max_seq_len)
        _, messages = actions[replace(request.key, attempt=0)]
        return DemonstrationSession(session.renderer, messages, budget, agent)

    lenient = rollout.model_copy(update={"max_failure_rate": 1.0})
    player = replace(scheduler(session.world, make_chat, lenient, Ledger()), scoring=session.scoring)
    episodes = await player.run([RolloutRequest(key, task) for key, (task, _) in actions.items()])
    return [replace(one, key=replace(one.key, attempt=0)) for one in episodes]


@dataclass
class Demonstrations:
    """Expert trajectories by task, from the dialogues `given` in a file (None: from the world's solver)."""

    session: TrainingSession
    given: Mapping[str, Sequence[Sequence[Message]]] | None
    _replays: dict[str, list[Trajectory]] = field(default_factory=dict, init=False)
    _num_rejected: Counter[str] = field(default_factory=Counter, init=False)
    _counts: Counter[int] = field(default_factory=Counter, init=False)

    async def join(self, step: int, groups: Sequence[Sequence[Episode]]) -> list[list[Episode]]:
        """Append experts to the group of their task."""
        tasks = {group[0].task.id: group[0].task for group in groups}
        failed = await self._replay([task for task in tasks.values() if task.id not in self._replays])
        self._counts[step] += sum(self._num_rejected[group[0].task.id] for group in groups)
        joined = [[*group, *self._episodes(group)] for group in groups]
        for task_id in failed:  # retried at the next step with this task
            del self._replays[task_id], self._num_rejected[task_id]
        return joined

    async def replay(self, tasks: Sequence[Task]) -> dict[str, list[Trajectory]]:
        """Return the experts of tasks by id, none for a task without one."""
        await self._replay(tasks)
        return {task.id: self._replays[task.id] for task in tasks}

    def num_refused(self, step: int) -> int:
        """Return the number of rejected experts of a step's tasks, and reset it."""
        return self._counts.pop(step, 0)

    def _episodes(self, group: Sequence[Episode]) -> list[Episode]:
        task, key = group[0].task, group[0].key
        return [
            Episode(RolloutKey(key.step, task.id, len(group) + i), task, replace(one, sample=len(group) + i))
            for i, one in enumerate(self._replays[task.id])
        ]

    async def _replay(self, tasks: Sequence[Task]) -> set[str]:
        """Replay and store the experts of the tasks; return the tasks whose expert failed because of infrastructure."""
        dialogues = {
            RolloutKey(0, task.id, i): (task, messages)
            for task in tasks
            for i, messages in enumerate(self.dialogues(task)[: self.session.config.experts.per_group])
        }
        episodes = await replay_actions(self.session, dialogues)
        refused = {episode.key: reason for episode in episodes if (reason := self._rejection_reason(episode))}
        for task in tasks:
            experts = [episode for episode in episodes if episode.task.id == task.id]
            self._replays[task.id] = [episode.trajectory for episode in experts if episode.key not in refused]
            self._num_rejected[task.id] = len(experts) - len(self._replays[task.id])
        for key, reason in refused.items():
            log.warning("Expert %d of task %s is rejected: %s", key.sample, key.task_id, reason)
        return {episode.task.id for episode in episodes if episode.trajectory.failure is not None}

    def _rejection_reason(self, episode: Episode) -> str:
        """Return why an expert is rejected, or an empty string."""
        played = episode.trajectory
        if played.failure is not None:
            return played.failure.error
        if played.stop_reason in _TOO_LONG:
            return f"it exceeds rollout.max_seq_len ({self.session.config.rollout.max_seq_len})."
        outcomes = [part.name for part in self.session.world.rewards if part.outcome and part.weight > 0]
        if any(played.rewards.get(name, 0.0) > 0 for name in outcomes):
            return ""
        turns = f"{played.num_turns} turn{'s' * (played.num_turns != 1)}"
        ended = f"its episode has no positive outcome and ended with {played.stop_reason} after {turns}"
        errors = [one for one in played.outcomes if one.status is not ToolStatus.OK]
        if not errors:
            return f"{ended}."
        return f"{ended}; the call of {errors[0].tool!r} failed ({errors[0].status}): {errors[0].output[:200]}"

    def dialogues(self, task: Task) -> Sequence[Sequence[Message]]:
        """Return the expert's messages at a task, one sequence per demonstration."""
        if self.given is not None:
            return self.given.get(task.id, ())
        shown = self.session.world.expert(task)
        return () if shown is None else (_assistant_messages(shown.messages, task.prompt),)


def uses_demonstrations(algorithm: Algorithm) -> bool:
    """Return whether the loss needs the expert: in the groups, or in the prompt of the self-teacher."""
    return algorithm.loss_spec.has(Need.DEMONSTRATIONS) or algorithm.loss_spec.has(Need.SHOWN_DEMONSTRATION)


def make_demonstrations(session: TrainingSession, algorithm: Algorithm) -> Demonstrations | None:
    """Build the demonstrations, if used. Raises UserError if a file has no training task."""
    return Demonstrations(session, given_dialogues(session)) if uses_demonstrations(algorithm) else None


def given_dialogues(session: TrainingSession) -> dict[str, list[Sequence[Message]]] | None:
    """Return the assistant messages in the file `experts.path` by task; None if it is unset."""
    path = session.config.experts.path
    if path is None:
        return None
    known = {task.id: task.prompt for task in session.world.tasks("train")}
    dialogues: dict[str, list[Sequence[Message]]] = {}
    for dialogue in read_dialogues(Path(path)):
        if dialogue.task in known:
            dialogues.setdefault(dialogue.task, []).append(_assistant_messages(dialogue.messages, known[dialogue.task]))
    if not dialogues:
        raise UserError(
            f"No dialogue of {path} has the id of a task in the train split.",
            'Give each dialogue the id of its task: {"task": "...", "messages": [...]}.',
        )
    return dialogues


def _assistant_messages(messages: Sequence[Message], prompt: Sequence[Message]) -> Sequence[Message]:
    return [message for message in continuation(messages, prompt) if message["role"] == "assistant"]


async def relabelled(session: TrainingSession, episodes: Sequence[Episode]) -> list[Episode]:
    """Return the relabelled failed attempts, each sequence of actions at a task once, in the order of `episodes`.

    Raises WorldError if `World.achieved` raises.
    """
    replays: dict[RolloutKey, tuple[Task, Sequence[Message | tuple[int, ...]]]] = {}
    seen: set[tuple[str, tuple[tuple[int, ...], ...]]] = set()
    for number, episode in enumerate(episodes):
        attempt = episode.trajectory
        if attempt.failure is not None or len(attempt.rows) != 1 or success(session.world.rewards, attempt):
            continue
        with world_errors(f"`achieved` of task {attempt.task_id} raised"):
            task = session.world.achieved(episode.task, attempt)
        actions = tuple(segment.tokens for segment in attempt.segments if segment.kind == "action")
        if task is None or not actions or (task.id, actions) in seen:
            continue
        seen.add((task.id, actions))
        replays[RolloutKey(episode.key.step, task.id, number)] = task, actions
    played = await replay_actions(session, replays, POLICY) if replays else []
    return [one for one in played if one.trajectory.failure is None and success(session.world.rewards, one.trajectory)]
