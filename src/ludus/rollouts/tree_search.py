"""Monte Carlo tree search over the turns of a task (AgentQ, arXiv:2408.07199).

The first episode is the ordinary one. Each simulation descends from the root by UCB1, expands the first node without
proposals, and continues one unvisited action to the end of an episode, in a fresh environment to which the recorded
actions are replayed. The requests of a tree run one after another, so that it depends on the seed only; trees of
several tasks run concurrently. An error of the environment ends its action, not the search. Every sampled episode is a
path of the tree, so that the visits of a node are the sum of the visits of its actions.
"""

from __future__ import annotations

import math
import re
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ludus.chat.render import decode_exactly
from ludus.config.sections.tree_search import TreeSearchConfig
from ludus.engines.base import seed_for
from ludus.envs.base import World
from ludus.errors import ConfigError, WorldError
from ludus.rewards.base import Reward, success
from ludus.rollouts.episode import ChatSession, EngineChatSession, RestoreError
from ludus.rollouts.scheduler import ChatSessionFactory, RolloutRequest
from ludus.rollouts.trees import RunPath, TrajectoryBranch, graft_branches
from ludus.types import Message, Segment, StopReason, Trajectory


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


QUESTION = """A dialogue with an assistant:

{context}

Candidates for {what}:

{candidates}

Rank the candidates from the best to the worst for solving the task. Answer only with their numbers, the best first, \
for example: 2 1"""


def parse_ranking(text: str, num: int) -> list[int]:
    """Return the candidates (from 0) in the order of the numbers from 1 to `num` in the last line that has any."""
    for line in reversed(text.splitlines()):
        numbers = [int(found) - 1 for found in re.findall(r"(?<!\d)\d{1,3}(?!\d)", line)]
        if ranking := list(dict.fromkeys(number for number in numbers if 0 <= number < num)):
            return ranking
    return []


def token_session(session: ChatSession) -> EngineChatSession:
    """Return a session with tokens, which a search needs."""
    assert isinstance(session, EngineChatSession)  # `check_search` rejects other ones
    return session


@dataclass
class SelfCritique:
    """Rankings by the model with sessions of `make_chat`, greedily, with at most `max_tokens` tokens each."""

    make_chat: Callable[[], ChatSession]
    max_tokens: int
    num_tokens: int = field(default=0, init=False)
    num_rankings: int = field(default=0, init=False)
    num_unparsed: int = field(default=0, init=False)

    async def scores(self, context: str, what: str, candidates: Sequence[str]) -> list[float]:
        """Return the `rank_scores` of candidates for `what` (such as "its next turn") after a dialogue."""
        if len(candidates) < 2:
            return [0.5] * len(candidates)
        order = list(range(len(candidates)))
        rankings = [
            [shown[place] for place in await self._rank(context, what, [candidates[i] for i in shown])]
            for shown in (order, order[::-1])
        ]
        self.num_rankings += len(rankings)
        self.num_unparsed += sum(not ranking for ranking in rankings)
        return rank_scores([ranking for ranking in rankings if ranking], len(candidates))

    async def _rank(self, context: str, what: str, candidates: Sequence[str]) -> list[int]:
        listed = "\n\n".join(f"[{number}] {text}" for number, text in enumerate(candidates, start=1))
        question = QUESTION.format(context=context, what=what, candidates=listed)
        session = token_session(self.make_chat())
        params = replace(session.params, temperature=0.0, max_new_tokens=self.max_tokens)
        session = replace(session, params=params, guided=False, episode=f"{session.episode}~critic")
        try:
            if session.open([Message(role="user", content=question)], ()) is not None:
                return []
            reply = await session.act()
            self.num_tokens += sum(len(one.tokens) for one in session.segments if one.kind == "action")
            return [] if isinstance(reply, StopReason) else parse_ranking(reply.message["content"], len(candidates))
        finally:
            session.close()


Selector = Callable[[RolloutRequest, Sequence[Trajectory]], Awaitable[Sequence[float]]]
"""Callable that scores the episodes of a task so far, each from 0 to 1; a search values and selects by it."""


def outcome_selector(rewards: Sequence[Reward]) -> Selector:
    """Return the selector by the verified outcome: 1 for a success, else 0."""

    async def score(request: RolloutRequest, attempts: Sequence[Trajectory]) -> list[float]:
        return [float(success(rewards, one)) for one in attempts]

    return score


def check_searchable(world: World, setting: str) -> None:
    """Raise ConfigError, naming `setting`, if the episodes of a world cannot be continued from a recorded action."""
    if world.runs_agents:
        text = f"{setting} cannot search in the world {world.name!r}: its agents run the episodes."
        raise ConfigError(text, f"Unset {setting}, or choose another world.")


@dataclass(frozen=True)
class SearchBudget:
    """Limits of a tree: simulations and sampled tokens (None: unlimited), and whether the first score of 1 ends it."""

    simulations: int | None = None
    tokens: int | None = None
    until_solved: bool = False


@dataclass(frozen=True)
class SearchResult:
    """The tree of a task, its episodes with their scores, and the tokens sampled up to the end of each.

    `counts` has the `tokens`, `simulations` and expanded `nodes`, the `failures` and `replay_mismatches` of the
    environment, and the `rankings` by the model, of which `unparsed_rankings` had no number.
    """

    root: SearchNode
    attempts: Sequence[Trajectory]
    scores: Sequence[float]
    spent_tokens: Sequence[int]
    counts: Mapping[str, int]

    def best(self, max_tokens: int | None = None) -> Trajectory:
        """Return the first episode with the highest score among those that ended within `max_tokens`."""
        within = [max_tokens is None or spent <= max_tokens for spent in self.spent_tokens]
        eligible = [i for i, fits in enumerate(within) if fits] or [0]
        return self.attempts[max(eligible, key=lambda i: self.scores[i])]


@dataclass(frozen=True)
class TreeSearch:
    """The search of a scheduler (`Scheduler.search`): an episode becomes the tree of its task.

    `make_chat` is the scheduler's. `budget_of` returns the limits of a task. `results` are by task.
    """

    settings: TreeSearchConfig
    make_chat: ChatSessionFactory
    selector: Selector
    budget_of: Callable[[str], SearchBudget]
    results: dict[str, SearchResult] = field(default_factory=dict)

    async def __call__(self, request: RolloutRequest, run_path: RunPath) -> Trajectory:
        """Return the tree as a trajectory. Raises WorldError if no recorded action could be replayed."""
        tree = _TaskTree(self, request, run_path)
        self.results[request.task.id] = await tree.search()
        return graft_branches(tree.grafts)


@dataclass
class _TaskTree:
    """Search of one task."""

    plan: TreeSearch
    request: RolloutRequest
    run_path: RunPath
    root: SearchNode = field(default_factory=lambda: SearchNode(()))
    grafts: list[TrajectoryBranch] = field(default_factory=list)
    paths: list[list[Candidate]] = field(default_factory=list)
    scores: Sequence[float] = ()
    spent: list[int] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    proposals: int = 0
    session: EngineChatSession = field(init=False)
    critic: SelfCritique = field(init=False)

    def __post_init__(self) -> None:
        make_chat = self.plan.make_chat
        self.counts = dict.fromkeys(("simulations", "sampled", "nodes", "failures", "replay_mismatches"), 0)
        self.session = token_session(make_chat(self.request))
        self.critic = SelfCritique(lambda: make_chat(self.request), self.plan.settings.critic_tokens)

    @property
    def tokens(self) -> int:
        """All tokens sampled so far."""
        return self.counts["sampled"] + self.critic.num_tokens

    async def search(self) -> SearchResult:
        self.counts["simulations"] = 1
        await self._add(await self.run_path((), 0), 0, 0)
        first = self.grafts[0].chain.segments
        actions = [i for i, segment in enumerate(first) if segment.kind == "action"]
        if actions:
            while not self._is_over():
                await self._simulate()
        if self.counts["replay_mismatches"] and len(self.grafts) == 1:
            text = f"Task {self.request.task.id} cannot be searched: its world does not repeat its observations."
            raise WorldError(text, "Tree search needs a deterministic world; remove the setting of the search.")
        counts = {name: value for name, value in self.counts.items() if name != "sampled"}
        ranked = {"rankings": self.critic.num_rankings, "unparsed_rankings": self.critic.num_unparsed}
        chains = [graft.chain for graft in self.grafts]
        return SearchResult(self.root, chains, self.scores, self.spent, {"tokens": self.tokens, **counts, **ranked})

    def _is_over(self) -> bool:
        budget = self.plan.budget_of(self.request.task.id)
        return (
            self.root.is_closed
            or (budget.simulations is not None and self.counts["simulations"] >= budget.simulations)
            or (budget.tokens is not None and self.tokens >= budget.tokens)
            or (budget.until_solved and max(self.scores) >= 1)
        )

    async def _simulate(self) -> None:
        """Descend to an unvisited action and continue it; only a node without one is closed instead.

        Proposals that are not ranked are sampled one at a time, when UCB1 selects them.
        """
        settings = self.plan.settings
        node = self.root
        while not node.is_closed:
            chosen = await self._expand(node) if node.unsampled is None else None
            if chosen is None and not node.is_closed:
                chosen = node.select(settings.exploration, settings.alpha)
                if chosen is None:
                    chosen = await self._propose(node)
            if chosen is not None and chosen.node is None:
                await self._continue(node, chosen)
                return
            node = node if chosen is None or chosen.node is None else chosen.node

    async def _expand(self, node: SearchNode) -> Candidate | None:
        """Sample one proposal, or all and rank them; return the best unvisited one.

        An action of an earlier episode is one of the proposals.
        """
        settings, node.unsampled = self.plan.settings, 0
        if self.counts["nodes"] >= settings.max_nodes:
            return None
        self.counts["nodes"] += 1
        node.unsampled = settings.proposals - len(node.candidates)
        ranked = settings.alpha < 1
        while node.unsampled:
            if await self._propose(node) is not None and not ranked:
                break
        if ranked:
            history = [token for segment in node.history for token in segment.tokens]
            tokenizer = self.session.renderer.tokenizer
            context, *actions = (
                decode_exactly(tokenizer, tokens, skip_special=True).strip()
                for tokens in (history, *(one.action.tokens for one in node.candidates))
            )
            scores = await self.critic.scores(context, "its next turn", actions)
            for one, score in zip(node.candidates, scores, strict=True):
                one.critic = score
        return max((one for one in node.candidates if not one.visits), key=lambda one: one.critic, default=None)

    async def _propose(self, node: SearchNode) -> Candidate | None:
        """Sample a proposal; return its candidate unless an equal one was visited, or the history has no room."""
        assert node.unsampled
        node.unsampled -= 1
        self.proposals += 1
        sampler = replace(self.session, seed=seed_for(self.session.seed, "proposal", self.proposals))
        found = None
        try:
            if sampler.extend(tuple(token for segment in node.history for token in segment.tokens)) is None:
                await sampler.act()
        finally:
            sampler.close()
        turn = sum(segment.kind == "action" for segment in node.history)
        for action in (one for one in sampler.segments if one.kind == "action"):
            self.counts["sampled"] += len(action.tokens)
            found = node.candidate(replace(action, turn=turn))
        return None if found is None or found.visits or found.failed else found

    async def _continue(self, node: SearchNode, chosen: Candidate) -> None:
        """Run an episode from an action of a node to its end."""
        number, recorded = self.counts["simulations"], (*node.history, chosen.action)
        self.counts["simulations"] += 1
        try:
            found = await self.run_path(recorded, number)
        except RestoreError:
            chosen.failed, found = True, None
            self.counts["replay_mismatches"] += 1
        except WorldError:
            chosen.failed, found = True, None
            self.counts["failures"] += 1
        if found is not None and not _begins_with(found.segments, recorded):
            chosen.failed, found = True, None
            self.counts["replay_mismatches"] += 1
        if found is not None:
            await self._add(found, node.episode, len(node.history))

    async def _add(self, chain: Trajectory, of: int, shared: int) -> None:
        """Add an episode, a fork of episode `of` after `shared` segments, and back up the scores of all episodes."""
        new = chain.segments[shared + bool(shared) :]  # the first action was counted as a proposal
        self.counts["sampled"] += sum(len(segment.tokens) for segment in new if segment.kind == "action")
        self.spent.append(self.tokens)
        if not self.grafts:
            first = next((i for i, one in enumerate(chain.segments) if one.kind == "action"), 0)
            self.root.history = chain.segments[:first]
        self.paths.append(insert_episode(self.root, chain.segments, len(self.grafts)))
        self.grafts.append(TrajectoryBranch(chain, of, shared))
        self.scores = await self.plan.selector(self.request, [graft.chain for graft in self.grafts])
        back_up(self.paths, self.scores)


def _begins_with(segments: Sequence[Segment], recorded: Sequence[Segment]) -> bool:
    """Return whether an episode repeats the kinds and tokens of its recorded segments."""
    same = ((a.kind, a.tokens) == (b.kind, b.tokens) for a, b in zip(recorded, segments, strict=False))
    return len(segments) >= len(recorded) and all(same)
