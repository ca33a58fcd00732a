"""Trajectory trees: transform the paths of a tree, and sample branching episodes.

A branching episode samples alternative continuations as one tree. The trunk equals the episode without
branches. Each branch shares the segments before its fork, with their log-probabilities and versions, and
continues with its own seeds in a fresh environment to which the recorded actions were replayed. Paths run
sequentially, so that the tree is deterministic.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from ludus.config.sections.rollout import BranchConfig
from ludus.engines.base import common_prefix
from ludus.errors import WorldError
from ludus.rollouts.episode import RestoreError
from ludus.types import Leaf, Segment, Timings, Trajectory


def with_chains(tree: Trajectory, chains: Sequence[Trajectory]) -> Trajectory:
    """Return the tree with the leaf and turn data of `chains`, one per path; the tokens are unchanged.

    Rewards of the tree are means over its leaves; those of a turn are means over the paths through it.
    """
    names = dict.fromkeys(name for chain in chains for name in chain.rewards)
    first = chains[0]
    return replace(
        tree,
        messages=first.messages,
        stop_reason=first.stop_reason,
        outcomes=first.outcomes,
        rewards={name: _mean([chain.rewards.get(name, 0.0) for chain in chains]) for name in names},
        reward=_mean([chain.reward for chain in chains]),
        turn_rewards=_mean_over_turns(tree, [chain.turn_rewards for chain in chains]),
        turn_progress=_mean_over_turns(tree, [chain.turn_progress for chain in chains]),
        leaf_rewards=tuple(chain.reward for chain in chains),
        leaves=tuple(Leaf(c.messages, c.stop_reason, c.outcomes, c.rewards) for c in chains),
    )


def merge_paths(trajectory: Trajectory, paths: Sequence[Trajectory]) -> Trajectory:
    """Return the trajectory with changed paths (`attempts`); a failed one is unchanged."""
    if trajectory.failure is not None:
        return trajectory
    return with_chains(trajectory, paths) if trajectory.leaves else paths[0]


async def map_paths(trajectory: Trajectory, change: Callable[[Trajectory], Awaitable[Trajectory]]) -> Trajectory:
    """Apply `change` to each of the trajectory's `attempts`."""
    if not trajectory.leaves:
        return await change(trajectory)
    chains = [await change(replace(chain, timings=Timings())) for chain in trajectory.attempts()]
    timings = _sum_timings([trajectory.timings, *(chain.timings for chain in chains)])
    return replace(with_chains(trajectory, chains), timings=timings)


@dataclass(frozen=True, slots=True)
class TrajectoryBranch:
    """Chain that forks from chain number `of` after its first `shared` segments."""

    chain: Trajectory
    of: int = 0
    shared: int = 0


def join_rows(rows: Sequence[tuple[Sequence[Segment], int, int]]) -> tuple[list[Segment], list[list[int]]]:
    """Return rows as one forest, and the indices of each row's segments.

    A row is its segments, the number of the earlier row from which it forks, and the number of segments that it shares
    with that row, 0 if it has a separate prompt.
    """
    segments: list[Segment] = []
    indices: list[list[int]] = []
    for own, of, shared in rows:
        row = indices[of][:shared] if indices else []
        for segment in own[len(row) :]:
            parent = row[-1] if row else -1 if segments else None
            segments.append(replace(segment, parent=parent))
            row.append(len(segments) - 1)
        indices.append(row)
    return segments, indices


@dataclass(frozen=True, slots=True)
class RowStart:
    """Start of a row: its first `shared` tokens equal those of row `of`, from which it forks after `recorded` tokens.

    `recorded` is 0 if no segment is common. `before` and `after` are the next tokens of row `of` and of this row, and
    `segments` are those of no earlier row.
    """

    segments: tuple[int, ...]
    of: int = 0
    shared: int = 0
    recorded: int = 0
    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()


def has_rows(trajectory: Trajectory) -> bool:
    """Return whether a rollout has several rows without separate dialogues, as those of agents."""
    return len(trajectory.rows) > 1 and not trajectory.leaves


def row_starts(trajectory: Trajectory, num_shown: int = 24) -> list[RowStart]:
    """Return how each row begins, compared with the earlier row of the most equal tokens; `num_shown` per side."""
    parts = [[trajectory.segments[i].tokens for i in row] for row in trajectory.rows]
    tokens = [tuple(token for tokens in part for token in tokens) for part in parts]
    found: list[RowStart] = []
    seen: set[int] = set()
    for number, row in enumerate(trajectory.rows):
        own = tuple(i for i in row if i not in seen)
        seen.update(row)
        shared = [common_prefix(tokens[number], earlier) for earlier in tokens[:number]]
        length = max(shared, default=0)
        of = shared.index(length) if shared else 0
        recorded = sum(map(len, parts[number][: common_prefix(row, trajectory.rows[of])])) if shared else 0
        sides = (tokens[one][length : length + num_shown] if length else () for one in (of, number))
        found.append(RowStart(own, of, length, recorded, *sides))
    return found


def graft_branches(grafts: Sequence[TrajectoryBranch]) -> Trajectory:
    """Merge chains into one trajectory: the first is the trunk, and each other one forks from an earlier one."""
    chains = [graft.chain for graft in grafts]
    if len(chains) == 1:
        return chains[0]
    segments, rows = join_rows([(graft.chain.segments, graft.of, graft.shared) for graft in grafts])
    anchors: dict[int, str] = {}
    for row, chain in zip(rows, chains, strict=True):
        actions = [i for i in row if segments[i].kind == "action"]
        for i, anchor in zip(actions, chain.anchors, strict=False):
            anchors.setdefault(i, anchor)
    tree = replace(
        chains[0],
        segments=tuple(segments),
        anchors=tuple(anchors[i] for i in sorted(anchors)),
        timings=_sum_timings([chain.timings for chain in chains]),
    )
    return with_chains(tree, chains)


def _mean_over_turns(tree: Trajectory, chains: Sequence[tuple[float, ...]]) -> tuple[float, ...]:
    """Return one value per action of the tree, 0 if missing; empty if no chain has values."""
    if not any(chains):
        return ()
    found: list[list[float]] = [[] for segment in tree.segments if segment.kind == "action"]
    for actions, chain in zip(tree.row_actions, chains, strict=True):
        missing = (0.0,) * (len(actions) - len(chain))
        for number, value in zip(actions, (*chain, *missing), strict=False):
            found[number].append(value)
    return tuple(_mean(values) for values in found)


def _mean(values: Sequence[float]) -> float:
    """Return the mean; equal values are returned exactly."""
    return values[0] if len(set(values)) == 1 else math.fsum(values) / len(values)


def _sum_timings(timings: Iterable[Timings]) -> Timings:
    all_timings = list(timings)
    seconds = ((one.total_s, one.model_s, one.tools_s, one.scoring_s, one.grading_s) for one in all_timings)
    total_s, model_s, tools_s, scoring_s, grading_s = (sum(parts) for parts in zip(*seconds, strict=True))
    return Timings(total_s, model_s, tools_s, scoring_s, grading_s, min(one.begin for one in all_timings))


RunPath = Callable[[tuple[Segment, ...], int], Awaitable[Trajectory]]
"""Callable that runs the path with a number (0: trunk) from recorded segments to its end."""


async def run_tree(settings: BranchConfig, run_path: RunPath) -> Trajectory:
    """Run a trunk, then branches at its selected turns, then branches of branches, to `settings.max_leaves` leaves.

    Raises WorldError if the world is not deterministic, and errors of the episode.
    """
    grafts = [TrajectoryBranch(await run_path((), 0))]
    for number, one in enumerate(grafts):  # which grows
        for fork in _forks(settings, one):
            for _ in range(settings.branches):
                if len(grafts) >= settings.max_leaves:
                    return graft_branches(grafts)
                grafts.append(await _branch(run_path, one.chain, fork, number, len(grafts)))
    return graft_branches(grafts)


async def _branch(run_path: RunPath, chain: Trajectory, fork: int, of: int, number: int) -> TrajectoryBranch:
    """Run path `number`, a fork of `chain` (path `of`) before its segment `fork`."""
    recorded = chain.segments[:fork]
    try:
        found = await run_path(recorded, number)
    except RestoreError as error:
        raise _nondeterminism_error(chain, error.message) from error
    if len(found.segments) <= fork or any(
        (a.kind, a.tokens) != (b.kind, b.tokens) for a, b in zip(recorded, found.segments, strict=False)
    ):
        raise _nondeterminism_error(chain, f"The first {fork} segments of {chain.name} differ on replay.")
    return TrajectoryBranch(found, of, fork)


def _nondeterminism_error(chain: Trajectory, why: str) -> WorldError:
    text = f"An episode of task {chain.task_id} cannot branch: {why}"
    return WorldError(text, "rollout.branch requires a deterministic world.")


def _forks(settings: BranchConfig, graft: TrajectoryBranch) -> list[int]:
    """Return the forking segments: actions (of a branch after its first), selected or by descending entropy."""
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
