"""Step pairs from tree search (AgentQ, arXiv:2408.07199): two actions of one node whose values differ.

Both sides are the shared history and the action, of which only the action is trained. Their reference is the logged
log-probabilities of the policy that sampled the tree.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import combinations

from ludus.config.sections.tree_search import StepSearchConfig
from ludus.rollouts.scheduler import Scheduler
from ludus.rollouts.search.mcts import SearchBudget, SearchResult, TreeSearch, outcome_selector
from ludus.rollouts.search.tree import Candidate, SearchNode, action_value
from ludus.training.preference.pairs import PairSide, PreferencePair

SEARCH_FILE = "search.json"
"""File of a run with the metrics of its search."""


def tree_search(scheduler: Scheduler, settings: StepSearchConfig) -> TreeSearch:
    """Return the search of a scheduler by the outcome, within the budget of the settings."""
    budget = SearchBudget(settings.simulations, settings.max_tokens or None)
    return TreeSearch(settings, scheduler.make_chat, outcome_selector(scheduler.world.rewards), lambda task: budget)


def pairs_of_tree(
    source: str, root: SearchNode, settings: StepSearchConfig, max_tokens: int
) -> Iterator[PreferencePair]:
    """Yield the pairs of visited actions of a node whose values differ by more than the threshold.

    The gap of a pair is this difference. Pairs with a side of more than `max_tokens` tokens are skipped.
    """
    for node in root.walk():
        history = tuple(token for segment in node.history for token in segment.tokens)
        visited = [one for one in node.candidates if one.visits and one.action.tokens]
        for pair in combinations(visited, 2):
            values = [action_value(one.mean, one.critic, settings.alpha) for one in pair]
            better, worse = pair if values[0] > values[1] else reversed(pair)
            gap = abs(values[0] - values[1])
            chosen, rejected = _side(history, better), _side(history, worse)
            if gap > settings.threshold and max(len(chosen.tokens), len(rejected.tokens)) <= max_tokens:
                yield PreferencePair(f"{source}/step of {len(history)} tokens", gap, chosen, rejected)


def _side(history: tuple[int, ...], one: Candidate) -> PairSide:
    action = one.action
    mask = (False,) * len(history) + (True,) * len(action.tokens)
    return PairSide(history + action.tokens, mask, action.logprobs)


def search_metrics(results: Iterable[SearchResult]) -> dict[str, float]:
    """Return the metrics of the searches of a stage: sums of the counts, success of episodes and of their best."""
    found = list(results)
    metrics = {f"search/{name}": 0.0 for result in found[:1] for name in result.counts}
    for result in found:
        for name, count in result.counts.items():
            metrics[f"search/{name}"] += count
    num = sum(len(result.scores) for result in found)
    metrics["search/success"] = sum(sum(result.scores) for result in found) / max(1, num)
    metrics["search/solved_tasks"] = sum(max(result.scores) for result in found) / max(1, len(found))
    return metrics
