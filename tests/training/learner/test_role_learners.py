"""A learner for each of several models: each takes the steps that it would take alone."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch

from ludus.algorithms.spec.resolve import PRESETS
from ludus.algorithms.token_statistics import SUM_PI_SQUARED
from ludus.training.batches.rows import row_of_trajectory
from ludus.training.learner.learner import LearnerSettings, set_temperature
from ludus.training.learner.logprobs import LogprobScorer
from ludus.training.learner.role_learners import RoleLearners, read_counted, rows_of_policy
from tests.training.learner.test_learner import learner, tiny_model
from tests.training.learner.test_role_adapters import episode, of_policy, rows_of

POLICIES = ("", "role_x", "role_o")
ALGORITHM = replace(PRESETS["grpo"], kl_coef=0.1, entropy_coef=0.01)


def alone(seed, algorithm=ALGORITHM, settings=None):
    """A learner whose reference is the model before training."""
    return learner(tiny_model(seed=seed), algorithm, settings, {"reference": LogprobScorer(tiny_model(seed=seed))})


def together(algorithm=ALGORITHM, settings=None, frozen=()):
    shared, x, o = (alone(seed, algorithm, settings) for seed in range(3))
    parts = (shared.scorer, shared.optimizer, shared.algorithm, shared.settings, shared.scorers, shared.ranks)
    return RoleLearners(*parts, {"role_x": x, "role_o": o}, frozen)


def models(one):
    return [one.scorer.model, *(other.scorer.model for other in one.by_policy.values())]


def weights(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("settings", [LearnerSettings(), LearnerSettings(epochs=2, minibatches=2)])
def test_each_model_is_trained_as_alone_with_the_others_frozen(settings):
    rows, both = rows_of(), together(settings=settings)
    metrics = both.train(rows, seed=3)
    for seed, (policy, trained) in enumerate(zip(POLICIES, models(both), strict=True)):
        single = alone(seed, settings=settings)
        own = single.train([of_policy(row, policy) for row in rows], seed=3)
        for name, weight in weights(single.scorer.model).items():
            assert torch.equal(weight, weights(trained)[name]), (policy, name)
            assert not torch.equal(weight, weights(tiny_model(seed=seed))[name]), name
        prefix = f"{policy}/" if policy else ""
        assert {name: metrics[f"{prefix}{name}"] for name in own} == own
    assert metrics["optim/grad_norm"] != metrics["role_x/optim/grad_norm"]


def test_gradients_are_those_of_a_run_in_which_only_the_role_acts():
    """The dialogues of agents are separate, so that those of the others do not matter, up to rounding."""
    both = together()
    rows = rows_of()
    for seed, (policy, agent) in enumerate(zip(POLICIES, ("judge", "x", "o"), strict=True)):
        single = alone(seed)
        lonely = []
        for number, row in enumerate(rows):
            whole = episode(number)
            segments = tuple(s for s in whole.segments if s.agent == agent)
            places = [trained and p == policy for trained, p in zip(row.trains, row.policies, strict=True)]
            advantages = [a for a, mine in zip(row.advantages, places, strict=True) if mine]
            kept = replace(whole, segments=(replace(segments[0], parent=None), *segments[1:]))
            lonely.append(replace(row_of_trajectory(kept, advantages), policies=()))
        single.gradient(lonely)
        learning = both if not policy else both.by_policy[policy]
        super(RoleLearners, both).gradient(rows_of_policy(rows, "")[1]) if not policy else learning.gradient(
            rows_of_policy(rows, policy)[1]
        )
        for (name, p), (_, q) in zip(
            learning.scorer.model.named_parameters(), single.scorer.model.named_parameters(), strict=True
        ):
            torch.testing.assert_close(p.grad, q.grad, atol=1e-13, rtol=1e-10, msg=f"{policy} {name}")


def test_frozen_models_stay_and_the_others_train_as_before():
    rows, both, one = rows_of(), together(), together(frozen=("role_o",))
    both.train(rows, 0)
    metrics = one.train(rows, 0)
    for place, (left, right) in enumerate(zip(models(both), models(one), strict=True)):
        expected = weights(left) if place < 2 else weights(tiny_model(seed=2))
        assert all(torch.equal(weight, expected[name]) for name, weight in weights(right).items())
    assert not [name for name in metrics if name.startswith("role_o/")]


def test_scores_of_each_token_are_those_of_its_model():
    rows, both = [*rows_of(), replace(rows_of(1)[0], trains=(False,) * len(rows_of(1)[0].tokens))], together()
    for name in ("", "reference", SUM_PI_SQUARED):
        found = both.score_with(name, rows, "value" if not name else "none")
        for seed, policy in enumerate(POLICIES):
            expected = alone(seed).score_with(name, [of_policy(row, policy) for row in rows], "value")
            for row, one, other in zip(rows, found, expected, strict=True):
                own = torch.tensor([p == policy and t for p, t in zip(row.policies, row.trains, strict=True)])
                torch.testing.assert_close(one.logprobs[own], other.logprobs[own], atol=1e-12, rtol=0)
                if not name:
                    torch.testing.assert_close(one.entropy[own], other.entropy[own], atol=1e-12, rtol=0)
        assert not found[-1].logprobs.any()


def test_a_model_without_tokens_is_unchanged_and_resumes_with_its_own_number_of_steps():
    first, second, one = rows_of(agents=("x",)), rows_of(), together()
    metrics = one.train(first, 0)
    assert "optim/grad_norm" not in metrics
    one.train(second, 1)
    parts = one.checkpoint_parts()
    again = together()
    for policy, other in again.by_policy.items():
        other.scorer.model.load_state_dict(one.by_policy[policy].scorer.model.state_dict())
        other.optimizer.load_state_dict(*read_counted(parts[policy]))
    assert [one.optimizer.num_steps, *(o.optimizer.num_steps for o in again.by_policy.values())] == [1, 2, 1]
    again.scorer.model.load_state_dict(copy.deepcopy(one.scorer.model.state_dict()))
    again.optimizer.load_state_dict(one.optimizer.state_dict(), 1)
    for each in (one, again):
        each.algorithm = replace(ALGORITHM, kl_coef=0.2)
        each.train(second, 2)
    for left, right in zip(models(one), models(again), strict=True):
        assert all(torch.equal(weight, weights(right)[name]) for name, weight in weights(left).items())


def test_settings_of_a_step_reach_all_models():
    one = together()
    set_temperature(one, 0.7)
    one.optimizer.learning_rate_factor = 0.5
    metrics = one.train(rows_of(), 0)
    scorers = [s for each in (one, *one.by_policy.values()) for s in (each.scorer, *each.scorers.values())]
    assert [scorer.temperature for scorer in scorers] == [0.7] * 6
    assert metrics["role_x/optim/learning_rate"] == metrics["optim/learning_rate"] == 5e-4
