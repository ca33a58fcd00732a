"""The tree of a search: nodes, candidate actions, UCB1 and back-up, without models and environments.

Follows AgentQ (arXiv:2408.07199). Every sampled episode is a path of the tree, so that the visits of a node are the
sum of the visits of its actions.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from ludus.types import Segment


def ucb1(value: float, visits: int, node_visits: int, exploration: float) -> float:
    """Return `value + exploration * sqrt(ln(node_visits) / (1 + visits))`; without visits of the node, the value."""
    return value + exploration * math.sqrt(math.log(max(1, node_visits)) / (1 + visits))


def action_value(mean: float | None, critic: float, alpha: float) -> float:
    """Return `alpha * mean + (1 - alpha) * critic`; the critic's score for an action without visits (mean None)."""
    return critic if mean is None else alpha * mean + (1 - alpha) * critic


def rank_scores(rankings: Sequence[Sequence[int]], num: int) -> list[float]:
    """Return a score in [0, 1] for each of `num` candidates: 1 for the first rank, 0 for the last.

    A ranking lists candidates from the best to the worst; missing ones share the mean of the remaining ranks. Scores
    are averaged over the rankings, and 0.5 without any.
    """
    if not rankings or num < 2:
        return [0.5] * num
    totals = [0.0] * num
    for ranking in rankings:
        rest = (len(ranking) + num - 1) / 2
        for candidate in range(num):
            rank = ranking.index(candidate) if candidate in ranking else rest
            totals[candidate] += 1 - rank / (num - 1)
    return [total / len(rankings) for total in totals]


@dataclass(eq=False)
class Candidate:
    """An action of a node. `node` is the state after it, None before its first visit and at the end of an episode."""

    action: Segment
    critic: float = 0.5
    visits: int = 0
    total: float = 0.0
    node: SearchNode | None = None
    failed: bool = False
    """Whether the environment failed, or did not repeat its observations, after this action."""

    @property
    def mean(self) -> float | None:
        """Mean value of the episodes through it; None without visits."""
        return self.total / self.visits if self.visits else None

    @property
    def is_closed(self) -> bool:
        """Whether no further episode can be sampled below it."""
        return self.failed or (self.visits > 0 and (self.node is None or self.node.is_closed))


@dataclass(eq=False)
class SearchNode:
    """State before an action: the segments of its history, and the number of the episode that reached it first.

    `unsampled` is the number of proposals that are still to be sampled; None before the node is expanded.
    """

    history: tuple[Segment, ...]
    episode: int = 0
    candidates: list[Candidate] = field(default_factory=list)
    unsampled: int | None = None

    @property
    def is_closed(self) -> bool:
        """Whether all of its proposals are sampled and closed."""
        return self.unsampled == 0 and all(one.is_closed for one in self.candidates)

    @property
    def visits(self) -> int:
        """Number of episodes through it."""
        return sum(one.visits for one in self.candidates)

    def candidate(self, action: Segment) -> Candidate:
        """Return the candidate with the tokens of an action, which is added if missing."""
        for one in self.candidates:
            if one.action.tokens == action.tokens:
                return one
        self.candidates.append(Candidate(action))
        return self.candidates[-1]

    def select(self, exploration: float, alpha: float) -> Candidate | None:
        """Return the open candidate with the highest UCB1, the first of equal ones.

        None if an unsampled proposal, with the critic's score 0.5, has a higher UCB1.
        """
        total = self.visits
        scores = {
            one: ucb1(action_value(one.mean, one.critic, alpha), one.visits, total, exploration)
            for one in self.candidates
            if not one.is_closed
        }
        best = max(scores, key=lambda one: scores[one], default=None)
        if self.unsampled and (best is None or ucb1(0.5, 0, total, exploration) > scores[best]):
            return None
        return best

    def walk(self) -> Iterator[SearchNode]:
        """Yield this node and all nodes below it, depth first."""
        yield self
        for one in self.candidates:
            if one.node is not None:
                yield from one.node.walk()


def insert_episode(root: SearchNode, segments: Sequence[Segment], episode: int) -> list[Candidate]:
    """Add an episode (a chain that begins with the root's history) to the tree; return its actions."""
    actions = [i for i, segment in enumerate(segments) if segment.kind == "action"]
    node: SearchNode | None = root
    path: list[Candidate] = []
    for i, following in zip(actions, [*actions[1:], None], strict=True):
        assert node is not None
        path.append(node.candidate(segments[i]))
        if following is not None and path[-1].node is None:
            path[-1].node = SearchNode(tuple(segments[:following]), episode)
        node = path[-1].node
    return path


def back_up(paths: Sequence[Sequence[Candidate]], values: Sequence[float]) -> None:
    """Set visits and totals of all candidates from the paths of the episodes and their values."""
    for path in paths:
        for one in path:
            one.visits, one.total = 0, 0.0
    for path, value in zip(paths, values, strict=True):
        for one in path:
            one.visits += 1
            one.total += value
