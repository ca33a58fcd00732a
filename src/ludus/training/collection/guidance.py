"""Guidance: attempts with a hint at tasks that a whole group failed (Agent-RLVR, arXiv:2506.11425).

The solved ones join the group without the hint: their row has the prompt of the other members. The log-probabilities
of the engine remain those with the hint, so that a correction weighs each token by the probability without it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from ludus.chat.hints import first_messages
from ludus.config.sections.guidance import GuidanceConfig
from ludus.envs.base import World
from ludus.rewards.base import success
from ludus.rollouts.ledger import Ledger
from ludus.rollouts.scheduler import Episode, RolloutRequest, Scheduler
from ludus.training.credit.roles import GUIDED
from ludus.training.run.session import TrainingSession
from ludus.types import Trajectory


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
    messages = (*first_messages(plain), *guided.messages[len(first_messages(guided)) :])
    return replace(guided, segments=tuple(segments), messages=messages)
