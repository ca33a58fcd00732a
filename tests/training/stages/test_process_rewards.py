"""Labels of turns, InversePRM, and step pairs ranked by a process model."""

from __future__ import annotations

import asyncio
import json
import math
from collections import defaultdict
from dataclasses import replace

import pytest
import torch

from ludus.cli.ui.tables import evaluation_tables
from ludus.config import load_config
from ludus.config.schema import EvaluationConfig
from ludus.config.sections.rewards import RewardModelConfig
from ludus.config.sections.stages import PreferenceConfig
from ludus.envs.tool_env import ToolLimits
from ludus.errors import UserError
from ludus.evaluation.evaluate import Evaluation, EvaluationPlan, evaluation_data, successes_of_best
from ludus.evaluation.stats import wilson
from ludus.evaluation.tables import format_rate
from ludus.rollouts.ledger import RolloutOutcome
from ludus.rollouts.rollout_files import RolloutRecord
from ludus.training.preference.ranking import RankedPairs, check_ranking, sample_actions
from ludus.training.reward_model.data import inverse_examples
from ludus.training.run.session import open_session
from ludus.training.value_models.base import HeadModel
from ludus.training.value_models.labels import TurnLabels
from ludus.training.value_models.reward_model import (
    RewardEnsemble,
    RewardExample,
    RewardModel,
    ScoredSequence,
    attempt_scores,
    losses,
)
from ludus.types import Failure, Segment, StopReason, Trajectory
from ludus.worlds.guess.world import make_guess_world
from tests.training.learner.test_learner import tiny_model
from tests.training.stages.test_reward_model import QUICK, REWARDS, by_hand, rollout
from tiny_run import cold_start, ludus, make_recipe, refused, with_unlike_rewards


def attempts(*rows: tuple[int, int, bool]) -> list[tuple[Trajectory, float]]:
    """Rollouts of two turns: the last token of the first action, the second action, success."""
    return [(rollout(first, second, right)[1].trajectory, float(right)) for first, second, right in rows]


ROWS = ((4, 5, True), (4, 6, False), (4, 5, True), (7, 5, False))


def test_agent_prm_labels_are_pooled_over_equal_histories():
    gamma, q = 0.95, defaultdict(list)
    for first, second, right in ROWS:
        score = 1.0 if right else -1.0
        q[(first,)].append(gamma * score)
        q[first, second].append(score)
    oracle = [
        tuple((1 + sum(q[key]) / len(q[key])) / 2 for key in ((first,), (first, second))) for first, second, _ in ROWS
    ]
    played = attempts(*ROWS)
    pooled = TurnLabels("agent_prm", gamma).pool(played)
    found = [pooled.targets(one) for one, _ in played]
    assert found == [pytest.approx(each, abs=1e-12) for each in oracle]
    assert found[0] == pytest.approx((0.5 + 0.95 / 6, 1.0))


def test_counterfactual_labels_are_the_gains_of_the_turns():
    """Values: prompt 1/2, after [3, 4] 2/3, after [3, 7] 0; after the last action the own outcome."""
    played = attempts(*ROWS)
    pooled = TurnLabels("counterfactual").pool(played)
    gains = [[2 * target - 1 for target in pooled.targets(one)] for one, _ in played]
    assert gains[0] == pytest.approx([2 / 3 - 1 / 2, 1 - 2 / 3])
    assert gains[1] == pytest.approx([2 / 3 - 1 / 2, 0 - 2 / 3])
    assert gains[3] == pytest.approx([-1 / 2, 0.0])
    for gain, (_, outcome) in zip(gains, played, strict=True):  # the gains of an attempt add up
        assert sum(gain) == pytest.approx(outcome - 1 / 2)


def test_inverse_loss_is_that_of_the_difference_of_values():
    states = HeadModel(tiny_model(), "reward model", "")
    with torch.no_grad():
        states.head.weight.normal_(generator=torch.Generator().manual_seed(1))
    model = RewardModel(states, "process", inverse_discount=0.9)
    shown = RewardExample("", 1, (ScoredSequence((1, 6, 7, 8, 9), (1, 2, 4), (1.0, 1.0, 1.0)),))
    tried = RewardExample("", 1, (ScoredSequence((2, 6, 3), (1, 2), (0.0, 0.0)),))
    wanted = []
    for example, target in ((shown, 1.0), (tried, 0.0)):
        values = by_hand(model, example.sequences[0])
        for value, later in zip(values, [*values[1:], 0.0], strict=True):
            p = 1 / (1 + math.exp(-(value - 0.9 * later)))
            wanted.append(-math.log(p if target else 1 - p))
    assert losses(model, [shown, tried]).tolist() == pytest.approx(wanted, rel=1e-4)
    plain = losses(RewardModel(states, "process"), [shown, tried]).tolist()
    assert plain != pytest.approx(wanted, rel=1e-2)


@pytest.fixture(scope="module")
def source(tiny_run, tmp_path_factory):
    return with_unlike_rewards(tiny_run, tmp_path_factory.mktemp("source") / "run")


@pytest.fixture(scope="module")
def session(source, tmp_path_factory):
    recipe = make_recipe(tmp_path_factory.mktemp("session"))
    words = ["--model.path", str(cold_start(source)), "--preference.pairs", "steps", "--preference.model", "x"]
    return open_session(load_config(recipe, [*words, "--preference.actions", "3", "--rollout.temperature", "1.5"]))


def test_inverse_examples_are_demonstrations_against_as_many_attempts(session):
    guess = replace(session, world=make_guess_world({"sizes": [3]}, ToolLimits()))
    tasks = guess.world.tasks("train")[:2]
    tried = [(task, rollout(4 + i, 5, False)[1]) for task in tasks for i in range(3)]
    records = [("x", replace(one, trajectory=replace(one.trajectory, task_id=task.id))) for task, one in tried]
    found = asyncio.run(inverse_examples(guess, records))
    targets = [example.sequences[0].targets for example in found]
    assert [set(each) for each in targets] == [{1.0}, {0.0}] * 2
    for task, given in zip(tasks, targets[::2], strict=True):
        assert len(given) == sum(message["role"] == "assistant" for message in guess.world.expert(task).messages)
    with pytest.raises(UserError, match="none of the attempted tasks has one"):
        asyncio.run(inverse_examples(session, [("x", rollout(4, 5, False, session.world.tasks("train")[0].id)[1])]))


class Longest:
    """A model whose value of an action is its last token."""

    kind, states, inverse_discount = "process", None, None

    def predict(self, sequences, max_tokens):
        return [tuple(one.tokens[place] / 10 for place in one.positions) for one in sequences]


def attempt(sample: int, tokens: tuple[int, ...], task: str) -> RolloutRecord:
    action = Segment("action", tokens, 0, logprobs=(-1.0,) * len(tokens), versions=(0,) * len(tokens))
    one = Trajectory(task, sample, (Segment("prompt", (1, 2)), action), (), StopReason.ANSWERED, reward=0.5)
    return RolloutRecord(1, task, RolloutOutcome.TRAINED, "trained", one)


def test_a_model_ranks_the_actions_of_a_step(session):
    plain = replace(session, config=load_config("search", ["--preference.pairs", "steps", "--preference.model", "x"]))
    ranked = RankedPairs(plain, RewardEnsemble((Longest(),)))
    records = [attempt(0, (3, 5), "a"), attempt(1, (3, 9), "a"), attempt(2, (8,), "a"), attempt(0, (4,), "b")]
    (pair,) = ranked("f", records, 0.0, 99)
    assert (pair.chosen.tokens, pair.rejected.tokens) == ((1, 2, 3, 9), (1, 2, 3, 5))
    assert pair.chosen.trains == (False, False, True, True)
    assert pair.gap == pytest.approx(0.4)
    assert ranked("f", records, 0.5, 99) == []


def test_sampled_actions_join_those_that_were_taken(session):
    task = session.world.tasks("train")[0]
    history = session.renderer.prompt(task.prompt, session.world.environment(task).tools)
    (actions,) = sample_actions(session, [(task.id, history)], 3, 400)
    assert len(actions) == 3
    assert len(set(actions)) > 1
    assert sample_actions(session, [(task.id, history)], 3, 400) == [actions]
    assert sample_actions(session, [(task.id, history)], 2, len(history)) == [[]]
    taken = replace(
        attempt(0, (5,), task.id).trajectory, segments=(Segment("prompt", history), Segment("action", (5,)))
    )
    record = RolloutRecord(1, task.id, RolloutOutcome.TRAINED, "trained", taken)
    (pair,) = RankedPairs(session, RewardEnsemble((Longest(),)))("f", [record], 0.0, 400)
    values = {action: action[-1] for action in ((5,), *actions)}
    assert pair.chosen.tokens[len(history) :] == max(values, key=values.get)


@pytest.mark.slow
def test_the_policy_is_trained_on_pairs_of_a_process_model(source, tmp_path):
    recipe, model = make_recipe(tmp_path), ("--model", str(cold_start(source)))
    words = ("--reward_model.kind", "process", "--reward_model.steps", "2", "--reward_model.discount", "0.95")
    given = ("reward-model", recipe, "--run", source, *model, *QUICK, *words, "--run.dir", tmp_path / "prm")
    said = ludus(*given, "--reward_model.labels", "agent_prm")
    assert said.code == 0, said
    rank = ("--preference.pairs", "steps", "--preference.model", tmp_path / "prm", "--preference.actions", "2")
    tiny = ("--preference.beta", "0.03", "--preference.steps", "1", "--run.dir", tmp_path / "dpo")
    said = ludus("preference", recipe, "--run", source, *model, *rank, *tiny)
    assert said.code == 0, said
    alone = ("--reward_model.kind", "pointwise", "--reward_model.steps", "1", "--run.dir", tmp_path / "orm")
    assert ludus("reward-model", recipe, "--run", source, *model, *QUICK, *alone).code == 0
    other = (*rank[:3], tmp_path / "orm", *rank[4:], "--run.dir", tmp_path / "no")
    assert "it scores whole attempts" in refused("preference", recipe, "--run", source, *model, *other)


def test_best_of_n_is_the_success_of_the_selected_attempts():
    plan = EvaluationPlan("test", 9, 3, 1.0, 0)
    found = Evaluation(plan, ("a", "b"), (1, 2), ("", ""), {}, 0)
    rows = [
        ("a", 0.1, True),
        ("a", 0.7, False),
        ("a", 0.7, True),
        ("b", 0.2, False),
        ("b", 0.9, True),
        ("b", 0.3, True),
    ]
    tried = [rollout(4, 5, right, task)[1].trajectory for task, _, right in rows]
    chosen = successes_of_best(found, tried, [score for _, score, _ in rows], REWARDS)
    assert chosen == (0, 1)
    found = replace(found, best_of=chosen)
    assert found.best_of_rate == (0.5, wilson(1, 2))
    assert evaluation_data(found)["best_of"]["success"] == 0.5
    (table,) = (table for table in evaluation_tables([found], ()) if "pass@k" in str(table.title))
    assert [row[2:4] for row in table.rows][-1] == ["best of 3 by reward model", format_rate(*found.best_of_rate)]


def test_the_score_of_an_attempt_is_its_value_after_the_last_action():
    tried = [rollout(4, last, True)[1].trajectory for last in (5, 8)]
    failed = replace(tried[0], failure=Failure("engine", "gone", 1))
    assert attempt_scores(RewardEnsemble((Longest(),)), [tried[0], failed, tried[1]], 99) == [0.5, -math.inf, 0.8]


@pytest.mark.slow
def test_an_evaluation_selects_by_a_reward_model(source, tmp_path):
    recipe, model = make_recipe(tmp_path), ("--model", str(cold_start(source)))
    words = ("--reward_model.kind", "process", "--reward_model.steps", "1", "--run.dir", tmp_path / "prm")
    assert ludus("reward-model", recipe, "--run", source, *model, *QUICK, *words).code == 0
    given = ("--evaluation.samples", "3", "--evaluation.tasks", "4", "--evaluation.temperatures", "[1.0]")
    select = ("--evaluation.select_by", tmp_path / "prm", "--out", tmp_path / "eval")
    said = ludus("eval", recipe, *model, *given, *select)
    assert said.code == 0, said
    assert "best of 3 by reward" in said.out
    (file,) = (tmp_path / "eval" / "evaluations").glob("*.json")
    assert json.loads(file.read_text())["best_of"]["n"] == 3
    endpoint = ("--endpoint", "http://127.0.0.1:1/v1", "--model", "x")
    assert "an endpoint does not return" in refused("eval", recipe, *endpoint, *given, *select)


def test_settings_without_effect_are_refused():
    with pytest.raises(ValueError, match="samples to at least 2"):
        EvaluationConfig(select_by="x")
    for words, why in (
        ({"kind": "pointwise", "labels": "agent_prm"}, "labels is for the kind process"),
        ({"kind": "process", "labels": "counterfactual"}, "needs reward_model.rollouts"),
        ({"kind": "process", "labels": "counterfactual", "rollouts": 2, "discount": 0.9}, "discount is for the labels"),
        ({"kind": "process", "labels": "inverse", "rollouts": 2}, "rollouts is for the labels"),
    ):
        with pytest.raises(ValueError, match=why):
            RewardModelConfig(**words)
    with pytest.raises(ValueError, match="pairs = "):
        PreferenceConfig(model="x")
    with pytest.raises(ValueError, match="no effect without"):
        PreferenceConfig(pairs="steps", actions=2)
    check_ranking(())
    assert REWARDS
