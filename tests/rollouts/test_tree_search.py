"""Tree search over turns: UCB1, back-up, self-critique, budgets, failures, and pairs of nodes."""

from __future__ import annotations

import asyncio
import math
import random
from dataclasses import replace
from itertools import pairwise

import pytest

from ludus.config import load_config
from ludus.config.sections.tree_search import DecodingSearchConfig, StepSearchConfig, TreeSearchConfig
from ludus.errors import ConfigError, WorldError
from ludus.evaluation.evaluate import EvaluationPlan
from ludus.evaluation.search import likelihood, majority, measure_search
from ludus.rollouts.ledger import RolloutOutcome
from ludus.rollouts.rollout_files import RolloutRecord, read_rollouts, write_rollouts
from ludus.rollouts.tree_search import (
    SearchBudget,
    SearchNode,
    SearchResult,
    TreeSearch,
    action_value,
    back_up,
    insert_episode,
    outcome_selector,
    parse_ranking,
    rank_scores,
    ucb1,
)
from ludus.training.preference.pairs import pairs_of_tree, search_metrics
from ludus.types import Message, Segment, StopReason, Trajectory
from small_worlds import RecordingWorld, call, make_requests, make_scheduler, scripted, tokenizer

ACTIONS = (call("echo", text="a"), call("echo", text="b"), "Paris", "Rome")
TWELVE = SearchBudget(12)


def test_ucb1_and_values_equal_their_formulas():
    assert ucb1(0.5, 3, 4, 2.0) == pytest.approx(0.5 + 2.0 * math.sqrt(math.log(4) / 4))
    assert ucb1(0.25, 0, 4, 1.0) == pytest.approx(0.25 + math.sqrt(math.log(4)))
    assert ucb1(0.25, 0, 0, 1.0) == ucb1(0.25, 0, 1, 1.0) == 0.25
    assert action_value(0.8, 0.4, 0.75) == pytest.approx(0.7)
    assert action_value(None, 0.4, 0.75) == 0.4


def test_ranks_are_averaged_over_rankings():
    assert rank_scores([[2, 0], [0, 2, 1]], 3) == pytest.approx([(0.5 + 1) / 2, 0.0, (1 + 0.5) / 2])
    assert rank_scores([[1]], 3) == pytest.approx([0.25, 1.0, 0.25])  # the others share the ranks 2 and 3
    assert rank_scores([[0, 1], [1, 0]], 2) == [0.5, 0.5]  # always the first place: no information
    assert rank_scores([], 3) == [0.5] * 3


def test_rankings_are_the_numbers_of_the_last_line_that_has_any():
    assert parse_ranking("Of the 3:\n2, 1 and 2, then 3.\nDone", 3) == [1, 0, 2]
    assert parse_ranking("4 0 12 2", 3) == [1]
    assert parse_ranking("none", 3) == []


def action(token: int) -> Segment:
    return Segment("action", (token,), logprobs=(-0.5 * token,), versions=(0,))


def chain(*tokens: int) -> list[Segment]:
    """An episode of these actions, each with an observation before it."""
    return [one for token in tokens for one in (Segment("observation", (100,)), action(token))]


def small_tree() -> SearchNode:
    """The root has the actions 1 (two episodes, values 1 and 0) and 2 (0.25); the state after 1 has 3 and 4."""
    root = SearchNode(tuple(chain(1)[:1]), unsampled=0)
    paths = [insert_episode(root, chain(*tokens), i) for i, tokens in enumerate(((1, 3), (1, 4, 5), (2,)))]
    back_up(paths, (1.0, 0.0, 0.25))
    back_up(paths, (1.0, 0.0, 0.25))  # sets, does not add
    return root


def test_backup_of_a_small_tree_by_hand():
    root = small_tree()
    first, second = root.candidates
    assert (first.visits, first.mean, second.visits, second.mean) == (2, 0.5, 1, 0.25)
    assert (root.visits, first.node.visits) == (3, 2)
    assert [(one.action.tokens, one.mean) for one in first.node.candidates] == [((3,), 1.0), ((4,), 0.0)]
    assert [one.tokens for one in first.node.history] == [(100,), (1,), (100,)]
    assert first.node.candidates[1].node.episode == 1
    assert len(list(root.walk())) == 3
    assert second.is_closed  # the end of an episode, so that it is not selected whatever its bonus
    assert root.select(5.0, 1.0) is first
    fresh = root.candidate(action(6))
    fresh.critic = 0.25
    # 0.5 + c sqrt(ln 3 / 3) = 0.5 + 0.605 c against 0.25 + c sqrt(ln 3 / 1) = 0.25 + 1.048 c: equal at c = 0.564
    assert root.select(0.55, 1.0) is first
    assert root.select(0.58, 1.0) is fresh
    fresh.failed = True
    assert root.select(10.0, 1.0) is first
    root.unsampled = 1  # its value is 0.5: preferred from any bonus on
    assert root.select(0.0, 1.0) is first
    assert root.select(0.01, 1.0) is None


def test_pairs_are_visited_actions_whose_values_differ_by_more_than_the_threshold():
    root = small_tree()
    root.candidates[0].critic, root.candidates[1].critic = 0.0, 1.0
    root.candidate(action(6)).critic = 1.0  # not visited

    def pairs(**settings):
        given = StepSearchConfig(simulations=1, **settings)
        found = pairs_of_tree("s", root, given, 100)
        return [(one.chosen.tokens[-1], one.rejected.tokens[-1], round(one.gap, 6)) for one in found]

    assert pairs(alpha=1.0, threshold=0.2) == [(1, 2, 0.25), (3, 4, 1.0)]
    assert pairs(alpha=1.0, threshold=0.25) == [(3, 4, 1.0)]
    assert pairs(alpha=0.5, threshold=0.2) == [(2, 1, 0.375), (3, 4, 0.5)]  # 0.625 and 0.25; 0.75 and 0.25
    assert not list(pairs_of_tree("s", root, StepSearchConfig(simulations=1), 1))
    pair = list(pairs_of_tree("s", root, StepSearchConfig(simulations=1, alpha=1.0), 100))[1]
    assert pair.chosen.tokens == (100, 1, 100, 3)
    assert pair.chosen.trains == (False, False, False, True)
    assert (pair.chosen.reference, pair.rejected.reference) == ((-1.5,), (-2.0,))  # logged


def by_seed(request, turn):
    """A policy that chooses one of `ACTIONS`, and as a critic ranks the candidate Paris first."""
    if request.episode.endswith("~critic"):
        text = tokenizer().decode(request.token_ids)
        numbers = range(1, text.count("\n[") + 1)
        return " ".join(sorted(map(str, numbers), key=lambda n: f"[{n}] Paris" not in text))
    return random.Random(request.params.seed).choice(ACTIONS)


def search(script=by_seed, hooks=None, num=1, lockstep=False, budget=TWELVE, **settings):
    """The searches of tasks: the results by task, the tree of each, and the world."""
    world = RecordingWorld(hooks=hooks or {})
    scheduler = make_scheduler(scripted(script), world, lockstep=lockstep, retries=0, max_failure_rate=0.0)
    given = TreeSearchConfig(**{"alpha": 1.0, **settings})
    scheduler.search = TreeSearch(given, scheduler.make_chat, outcome_selector(world.rewards), lambda task: budget)
    episodes = asyncio.run(scheduler.run(make_requests(num)))
    assert not world.open
    return scheduler.search.results, [one.trajectory for one in episodes], world


def visited(result: SearchResult) -> list[tuple[int, int, float]]:
    return [(len(node.history), one.visits, one.total) for node in result.root.walk() for one in node.candidates]


def test_search_grows_one_tree_of_distinct_episodes(tmp_path):
    results, (tree,), _ = search()
    result = results["t000"]
    assert len(tree.rows) == len(result.attempts) == result.counts["simulations"] == 12
    assert tree.leaf_rewards == tuple(one.reward for one in result.attempts)
    assert {0.0, 1.0} == set(tree.leaf_rewards)
    assert len({one.token_ids for one in result.attempts}) == 12
    for node in result.root.walk():  # every episode is a path, so visits add up
        for one in node.candidates:
            below = one.node.visits if one.node else 0
            assert one.visits == below or (below == 0 and one.visits == 1)
    assert result.root.visits == 12
    proposed = {(id(node), one.action.tokens): one for node in result.root.walk() for one in node.candidates}
    used = sum(len(one.action.tokens) for one in proposed.values())
    assert used <= result.counts["tokens"]  # equal proposals are sampled, but count once in the tree
    assert list(result.spent_tokens) == sorted(result.spent_tokens)
    assert result.spent_tokens[-1] <= result.counts["tokens"]
    path = tmp_path / "step-000001.jsonl.gz"
    write_rollouts(path, [RolloutRecord(1, "t000", RolloutOutcome.DROPPED, "no pair", tree)])
    assert next(read_rollouts(path)).trajectory == replace(tree, timings=replace(tree.timings))


def test_search_depends_on_the_seed_only():
    first, trees, _ = search(num=3)
    again, joint, _ = search(num=3, lockstep=True)
    assert trees == joint
    for task, result in first.items():
        assert visited(result) == visited(again[task])
        assert result.counts == again[task].counts
    assert visited(first["t000"]) != visited(first["t001"])


def test_budgets_bound_the_tree():
    few, _, _ = search(budget=SearchBudget(3))
    assert few["t000"].counts["simulations"] == 3
    nodes, _, _ = search(budget=SearchBudget(12), max_nodes=2)
    assert nodes["t000"].counts["nodes"] == 2
    whole, _, _ = search()
    limit = whole["t000"].counts["tokens"] // 2
    cut, _, _ = search(budget=SearchBudget(tokens=limit))
    spent = cut["t000"].spent_tokens
    assert spent[-2] < limit
    assert all(later > earlier for earlier, later in pairwise(spent))
    solved, _, _ = search(budget=SearchBudget(50, until_solved=True))
    assert [*solved["t000"].scores].index(1.0) == len(solved["t000"].scores) - 1


def test_a_finite_tree_is_searched_to_its_end():
    results, _, _ = search(lambda request, turn: random.Random(request.params.seed).choice(ACTIONS[2:]), proposals=40)
    result = results["t000"]
    assert result.root.is_closed
    assert sorted(result.scores) == [0.0, 1.0]  # Paris and Rome


def test_only_episodes_within_the_budget_are_selected():
    attempts = [Trajectory("t", i, (), (), StopReason.ANSWERED) for i in range(3)]
    result = SearchResult(SearchNode(()), attempts, (0.2, 0.6, 1.0), (10, 20, 30), {})
    assert [result.best(limit).sample for limit in (None, 30, 29, 15, 5)] == [2, 2, 1, 0, 0]


def test_an_error_of_the_environment_ends_its_action_only():
    async def fails(number):
        if number in (2, 3):
            raise OSError("the disk")

    results, (tree,), _ = search(hooks={"step": fails})
    result = results["t000"]
    assert result.counts["failures"] == 2
    assert len(result.attempts) == result.counts["simulations"] - 2
    assert sum(one.failed for node in result.root.walk() for one in node.candidates) == 2
    assert tree.failure is None


def test_a_world_that_does_not_repeat_is_counted_and_refused():
    async def start(number):
        return [Message(role="user", content=f"What is the capital of France? {'no' * (number > 2)}")]

    counted, (tree,), _ = search(hooks={"start": start})
    counts = counted["t000"].counts
    assert counts["replay_mismatches"] == counts["simulations"] - 3 > 0
    assert len(tree.rows) == 3

    async def always(number):
        return [Message(role="user", content=f"Question {number}")]

    with pytest.raises(WorldError, match="does not repeat its observations"):
        search(hooks={"start": always})


def test_the_model_ranks_the_actions_of_a_node_in_two_orders():
    results, _, _ = search(alpha=0.5, proposals=8)
    result = results["t000"]
    paris = tokenizer().encode("Paris", add_special_tokens=False)
    for node in (node for node in result.root.walk() if node.unsampled is not None and len(node.candidates) > 2):
        scores = {tuple(one.action.tokens[:-1]) == tuple(paris): one.critic for one in node.candidates}
        assert scores.get(True, 1.0) == 1.0
        others = [one.critic for one in node.candidates if tuple(one.action.tokens[:-1]) != tuple(paris)]
        assert len(set(others)) <= 2
    assert result.counts["rankings"] == 2 * sum(
        len(n.candidates) > 1 for n in result.root.walk() if n.unsampled is not None
    )
    assert result.counts["unparsed_rankings"] == 0
    assert result.root.visits > 0

    def silent(request, turn):
        return "no idea" if request.episode.endswith("~critic") else by_seed(request, turn)

    found = search(silent, alpha=0.5)[0]["t000"]
    assert found.counts["unparsed_rankings"] == found.counts["rankings"] > 0
    assert {one.critic for node in found.root.walk() for one in node.candidates} == {0.5}
    assert found.counts["tokens"] > search(silent, alpha=1.0)[0]["t000"].counts["tokens"]


def test_metrics_are_sums_and_rates():
    results, _, _ = search(num=2)
    found = search_metrics(results.values())
    assert found["search/simulations"] == 24
    assert found["search/success"] == pytest.approx(sum(sum(one.scores) for one in results.values()) / 24)
    assert found["search/solved_tasks"] == 1.0


def test_selectors_score_by_answer_and_likelihood():
    def attempt(answer, *logprobs):
        segment = Segment("action", (1,) * len(logprobs), logprobs=logprobs, versions=(0,) * len(logprobs))
        said = (Message(role="assistant", content=answer),)
        return Trajectory("t", 0, (segment,), said, StopReason.ANSWERED if answer else StopReason.MAX_TURNS)

    attempts = [attempt("Rome", -1.0), attempt("Paris", -1.0, -3.0), attempt("paris", -0.5), attempt("", -0.1)]
    (request,) = make_requests(1)
    assert asyncio.run(majority(request, attempts)) == [0.25, 0.5, 0.5, 0.0]
    assert asyncio.run(likelihood(request, attempts)) == pytest.approx([math.exp(-x) for x in (1, 2, 0.5, 0.1)])


@pytest.mark.parametrize("selector", ["outcome", "critique"])
def test_search_at_evaluation_is_compared_at_equal_tokens(selector):
    settings = DecodingSearchConfig(
        method="mcts" if selector == "outcome" else "best_of_n",
        selector=selector,
        **({"alpha": 1.0} if selector == "outcome" else {}),
    )
    world, num = RecordingWorld(), 3

    def make():
        return make_scheduler(scripted(by_seed), world)

    plan = EvaluationPlan("train", 8, num, 1.0, 0)
    episodes = asyncio.run(make().run(make_requests(8, samples=num)))
    report, selected = asyncio.run(measure_search(make, plan, episodes, settings))
    rows = {str(row["method"]).split(" by")[0]: row for row in report.rows}
    single, any_of, last = rows["one attempt (pass@1)"], rows["any of 3 (pass@3)"], report.rows[-1]
    right = [one.trajectory.rewards["right"] for one in episodes]
    assert single["success"].value == pytest.approx(sum(right) / len(right))
    assert float(any_of["tokens per task"]) == pytest.approx(3 * float(single["tokens per task"]), abs=0.2)
    assert last["success"].value == pytest.approx(sum(one.trajectory.rewards["right"] for one in selected) / 8)
    assert len(selected) == 8
    assert last["success"].value >= single["success"].value
    if selector == "critique":  # the ranking itself costs tokens
        assert float(last["tokens per task"]) > float(any_of["tokens per task"])
    assert not world.open


IDLE = {
    "preference.search.proposals has no effect": ("--preference.search.proposals", "5"),
    "unset preference.samples": ("--preference.search.simulations", "5", "--preference.samples", "4"),
    "unset preference.run": ("--preference.search.simulations", "5", "--preference.run", "x"),
    "rollout.temperature 1": ("--preference.search.simulations", "5", "--rollout.temperature", "0.7"),
    "rewrites the dialogue": ("--preference.search.simulations", "5", "--rollout.context.max_tokens", "99"),
    "proposals has no effect with the method best_of_n": (
        *("--evaluation.search.method", "best_of_n", "--evaluation.samples", "4"),
        *("--evaluation.search.proposals", "5"),
    ),
    "selector has no effect": ("--evaluation.search.selector", "outcome"),
    "use the method best_of_n": (
        *("--evaluation.search.method", "mcts", "--evaluation.samples", "4"),
        *("--evaluation.search.selector", "critique"),
    ),
    "evaluation.samples of at least 2": ("--evaluation.search.method", "mcts"),
}


@pytest.mark.parametrize(("said", "words"), IDLE.items(), ids=IDLE)
def test_unread_settings_of_a_search_are_rejected(said, words):
    with pytest.raises(ConfigError, match=said):
        load_config(None, words)
