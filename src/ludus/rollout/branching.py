"""Branching episodes: sample alternative continuations of an episode as one trajectory tree.

The trunk equals the episode without branches. Each branch shares the segments before its fork, with their
log-probabilities and versions, and continues with its own seeds in a fresh environment to which the recorded
actions were replayed. Paths run one after the other, so that the tree is deterministic. Raises WorldError if
the world is not deterministic, and errors of the episode.
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
"""Run the path of a number (0: trunk) from these segments to its end."""


async def play_tree(settings: BranchConfig, play: PlayPath) -> Trajectory:
    """Run a trunk, then branches at its chosen turns, then branches of branches.

    Stops at `settings.max_leaves` leaves or when no chosen turn is left.
    """
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
    """Run the path `number`, which forks from `chain`, the path `of`, before its segment `fork`."""
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
    """Return the action segments before which a path is forked.

    Candidates are the actions after a branch's first one, or all of a trunk; by entropy, the highest come
    first.
    """
    segments = graft.chain.segments
    actions = [i for i, segment in enumerate(segments) if segment.kind == "action"]
    own = [(turn, i) for turn, i in enumerate(actions) if i > graft.shared or graft.shared == 0]
    if settings.turns:
        return [i for turn, i in own if turn in settings.turns]
    by_entropy = sorted(own, key=lambda one: (-mean_surprisal(segments[one[1]].logprobs), one[0]))
    return [i for _, i in by_entropy[: settings.entropy_turns]]


def mean_surprisal(logprobs: Sequence[float]) -> float:
    """Return the mean of `-logprob`, an entropy estimate of an action's tokens."""
    return -math.fsum(logprobs) / len(logprobs) if logprobs else 0.0
