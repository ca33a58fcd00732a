"""Monte Carlo tree search over the turns of a task (AgentQ, arXiv:2408.07199).

The first episode is the ordinary one. Each simulation descends from the root by UCB1, expands the first node without
proposals, and continues one unvisited action to the end of an episode, in a fresh environment to which the recorded
actions are replayed. The requests of a tree run one after another, so that it depends on the seed only; trees of
several tasks run concurrently. An error of the environment ends its action, not the search.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ludus.chat.render import decode_exactly
from ludus.config.sections.tree_search import TreeSearchConfig
from ludus.engines.base import seed_for
from ludus.envs.base import World
from ludus.errors import ConfigError, WorldError
from ludus.rewards.base import Reward, success
from ludus.rollouts.episode import EngineChatSession, RestoreError
from ludus.rollouts.scheduler import ChatSessionFactory, RolloutRequest
from ludus.rollouts.search.critic import SelfCritique, token_session
from ludus.rollouts.search.tree import Candidate, SearchNode, back_up, insert_episode
from ludus.rollouts.trees import RunPath, TrajectoryBranch, graft_branches
from ludus.types import Segment, Trajectory

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
