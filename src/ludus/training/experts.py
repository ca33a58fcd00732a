"""Expert trajectories: demonstrations of the tasks that are being trained on, which join their groups.

They come from a file of dialogues that name their task, or from a world that can show a given task. The
prompt is the task's own and the tools are the environment's, so that an expert's tokens follow the same
tokens as the policy's. The world's rewards score them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from ludus.algorithms.algorithm import EXPERT_LOSSES, Algorithm
from ludus.chat.render import render_dialogue
from ludus.config.algorithm import ExpertsConfig
from ludus.config.schema import Config
from ludus.envs.base import ShowsTasks, World
from ludus.errors import ConfigError, UserError
from ludus.rollout.ledger import RolloutKey
from ludus.rollout.scheduler import Episode
from ludus.training.credit import EXPERT
from ludus.training.data import read_dialogues
from ludus.training.session import Session
from ludus.types import Message, StopReason, Task, Trajectory


@dataclass
class Experts:
    """What experts did, by task. `given` are the dialogues of a file; None asks the world."""

    session: Session
    given: Mapping[str, Sequence[Sequence[Message]]] | None
    _made: dict[str, list[Trajectory]] = field(default_factory=dict, init=False)

    async def join(self, groups: Sequence[Sequence[Episode]]) -> list[list[Episode]]:
        """Each group with its task's experts behind its own members; without any it is as it was."""
        return [[*group, *await self._episodes(group)] for group in groups]

    async def _episodes(self, group: Sequence[Episode]) -> list[Episode]:
        task, key = group[0].task, group[0].key
        if task.id not in self._made:
            self._made[task.id] = await self._trajectories(task)
        return [
            Episode(RolloutKey(key.step, task.id, len(group) + i), task, replace(one, sample=len(group) + i))
            for i, one in enumerate(self._made[task.id])
        ]

    async def _trajectories(self, task: Task) -> list[Trajectory]:
        """Those that fit into the token budget, at most `experts.per_group`."""
        config, world = self.session.config, self.session.world
        found = []
        for said in self._dialogues(task)[: config.experts.per_group]:
            messages = (*task.prompt, *said)
            tools = world.environment(task).tools
            segments = render_dialogue(self.session.renderer, messages, tools)
            if sum(len(segment.tokens) for segment in segments) <= config.rollout.max_tokens:
                foreign = tuple(replace(segment, agent=EXPERT) for segment in segments)
                one = Trajectory(task.id, 0, foreign, messages, StopReason.ANSWERED)
                found.append(await self.session.scoring.scored(world, None, task, one))
        return found

    def _dialogues(self, task: Task) -> Sequence[Sequence[Message]]:
        """What follows the prompt: from the first assistant message on."""
        if self.given is not None:
            return self.given.get(task.id, ())
        world = self.session.world
        shown = world.expert(task) if isinstance(world, ShowsTasks) else None
        return () if shown is None else (_said(shown.messages),)


def check_experts(config: Config, algorithm: Algorithm, world: World) -> None:
    """Raise ConfigError for a loss that has no experts to learn from, and for experts that nothing reads."""
    path, reads = config.experts.path, algorithm.loss in EXPERT_LOSSES
    if path is not None and not reads:
        raise ConfigError(
            f"experts.path = {path} would have no effect: the loss {algorithm.loss} knows no experts.",
            "Leave it out, or set algorithm.preset = 'mixed_policy'.",
        )
    if config.experts.per_group != ExpertsConfig().per_group and not reads:
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


def make_experts(session: Session, algorithm: Algorithm) -> Experts | None:
    """The experts, where the algorithm has any. Raises UserError for a file that shows no training task."""
    path = session.config.experts.path
    if algorithm.loss not in EXPERT_LOSSES:
        return None
    if path is None:
        return Experts(session, None)
    known = {task.id for task in session.world.tasks("train")}
    given: dict[str, list[Sequence[Message]]] = {}
    for dialogue in read_dialogues(Path(path)):
        if dialogue.task in known:
            given.setdefault(dialogue.task, []).append(_said(dialogue.messages))
    if not given:
        raise UserError(
            f"No dialogue of {path} names a task of the split train.",
            'Give each dialogue the id of its task: {"task": "...", "messages": [...]}.',
        )
    return Experts(session, given)


def _said(messages: Sequence[Message]) -> Sequence[Message]:
    first = next((i for i, message in enumerate(messages) if message["role"] == "assistant"), len(messages))
    return messages[first:]
