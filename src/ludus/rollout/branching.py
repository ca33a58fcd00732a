"""Episodes that branch: further ways on from turns of one that was played, as one trajectory.

Takes what plays an episode from given first segments on. Gives a tree: the trunk is the episode as it would
have been without branches, and each branch shares the segments before its fork, with the log-probabilities
and versions of their time, and goes on with seeds of its own in a fresh environment that was brought to that
state by the recorded actions. Waits for one path after the other, so that the tree depends on numbers alone.
Raises WorldError where the world does not answer equal actions equally, and what an episode raises.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Sequence

from ludus.config.sections.rollout import BranchConfig
from ludus.errors import WorldError
from ludus.rollout.chat_session import RestoreError
from ludus.rollout.trees import TrajectoryBranch, grafted
from ludus.types import Segment, Trajectory

PlayPath = Callable[[tuple[Segment, ...], int], Awaitable[Trajectory]]
"""Plays the path of a number (0: the trunk) from these segments on, to its end."""


async def play_tree(settings: BranchConfig, play: PlayPath) -> Trajectory:
    """Play a trunk, and from its chosen turns on the branches; then those of the branches, until the tree has
    `settings.max_leaves` leaves or no chosen turn is left."""
    grafts = [TrajectoryBranch(await play((), 0))]
    number = 0
    while number < len(grafts):
        one = grafts[number]
        for fork in _forks(settings, one):
            for _ in range(settings.branches):
                if len(grafts) >= settings.max_leaves:
                    return grafted(grafts)
                grafts.append(await _branch(play, one.chain, fork, number, len(grafts)))
        number += 1
    return grafted(grafts)


async def _branch(play: PlayPath, chain: Trajectory, fork: int, of: int, number: int) -> TrajectoryBranch:
    """The path of that number, which leaves `chain`, the path `of`, before its segment `fork`."""
    told = chain.segments[:fork]
    try:
        found = await play(told, number)
    except RestoreError as error:
        raise _no_repeat(chain, error.message) from error
    if len(found.segments) <= fork or any(
        (a.kind, a.tokens) != (b.kind, b.tokens) for a, b in zip(told, found.segments, strict=False)
    ):
        raise _no_repeat(chain, f"Played again, the first {fork} segments of {chain.name} are others.")
    return TrajectoryBranch(found, of, fork)


def _no_repeat(chain: Trajectory, why: str) -> WorldError:
    return WorldError(
        f"An episode of task {chain.task_id} cannot branch: {why}",
        "rollout.branch needs a world that answers equal actions equally.",
    )


def _forks(settings: BranchConfig, graft: TrajectoryBranch) -> list[int]:
    """The places of the actions that a path forks before: of those after its own first action, or of a trunk
    all. By entropy the highest come first."""
    segments = graft.chain.segments
    actions = [i for i, segment in enumerate(segments) if segment.kind == "action"]
    own = [(turn, i) for turn, i in enumerate(actions) if i > graft.shared or graft.shared == 0]
    if settings.turns:
        return [i for turn, i in own if turn in settings.turns]
    by_entropy = sorted(own, key=lambda one: (-mean_surprisal(segments[one[1]].logprobs), one[0]))
    return [i for _, i in by_entropy[: settings.entropy_turns]]


def mean_surprisal(logprobs: Sequence[float]) -> float:
    """The mean of `-logprob`, an estimate of the entropy that an action's tokens were sampled with."""
    return -math.fsum(logprobs) / len(logprobs) if logprobs else 0.0
