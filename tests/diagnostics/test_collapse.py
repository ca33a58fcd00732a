"""Template collapse: the metrics by hand, a planted policy that ignores its prompt, and an unchanged training."""

from __future__ import annotations

import math

import numpy as np
import pytest

from ludus.algorithms.spec.resolve import PRESETS
from ludus.diagnostics.alarms import find_alarms
from ludus.rollouts.ledger import RolloutKey
from ludus.rollouts.scheduler import Episode
from ludus.training.credit.advantages import assign_credit, training_rows
from ludus.training.rl.sample_metrics import CollapseScoring, collapse_metrics
from ludus.types import Segment, StopReason, Task, Trajectory
from tests.training.learner.test_learner import learner, tiny_model


def test_collapse_metrics_of_two_reasonings_equal_hand_computed_values():
    """Probabilities 0.8 under the own prompt and 0.2 under the other, of one token each."""
    found = collapse_metrics(np.log([[0.8, 0.2], [0.2, 0.8]]), [0, 1], [1, 1], {})
    assert found["collapse/mutual_information"] == pytest.approx(math.log(0.8) - math.log(0.5))
    assert found["collapse/conditional_entropy"] == pytest.approx(-math.log(0.8))
    assert found["collapse/marginal_entropy"] == pytest.approx(math.log(2))
    assert (found["collapse/retrieval_1"], found["collapse/retrieval_2"], found["collapse/chance"]) == (1, 1, 0.5)
    assert found["collapse/z_score"] == pytest.approx(math.log(1.6) / 1e-3)


def test_collapse_metrics_handle_unequal_lengths_ties_and_moving_average():
    """The first reasoning has two tokens and is equally likely under prompts 0 and 2; the second is of prompt 1."""
    sums = np.log([[0.09, 0.01, 0.09], [0.5, 0.1, 0.3]])
    found = collapse_metrics(sums, [0, 1], [2, 1], {"collapse/marginal_std": 1.0})
    marginals = math.log(0.7 / 3), math.log(0.3)
    assert found["collapse/marginal_entropy"] == pytest.approx(-sum(marginals) / 2)
    matched = math.log(0.3), math.log(0.1)
    assert found["collapse/mutual_information"] == pytest.approx((sum(matched) - sum(marginals)) / 2)
    sum_marginals = math.log(0.19 / 3) + math.log(0.3)
    assert found["collapse/mutual_information_sum"] == pytest.approx((math.log(0.09 * 0.1) - sum_marginals) / 2)
    assert (found["collapse/retrieval_1"], found["collapse/retrieval_2"]) == (0.25, 0.5)
    assert found["collapse/marginal_std"] == pytest.approx(0.9 + 0.1 * (marginals[1] - marginals[0]) / 2)


def test_mismatched_score_shapes_raise_value_error():
    with pytest.raises(ValueError, match="do not fit"):
        collapse_metrics(np.zeros((2, 3)), [0], [1, 1], {})


def test_prompt_independent_policy_at_equal_entropy_raises_template_collapse_alarm():
    """16 texts of 10 tokens, equally likely: other ones for each of 8 prompts, then the same for all."""
    own = [prompt for prompt in range(8) for _ in range(8)]
    dependent = np.full((64, 8), -200.0)
    dependent[range(64), own] = -math.log(16)
    ignorant = np.full((64, 8), -math.log(16))
    rows = [collapse_metrics(scores, own, [10] * 64, {}) for scores in [dependent] * 10 + [ignorant] * 3]
    assert [row["collapse/conditional_entropy"] for row in rows] == pytest.approx([math.log(16) / 10] * 13)
    assert rows[0]["collapse/mutual_information_sum"] == pytest.approx(math.log(8))
    assert rows[-1]["collapse/mutual_information_sum"] == pytest.approx(0.0, abs=1e-12)
    assert find_alarms(rows[:-1]) == []
    assert [alarm.name for alarm in find_alarms(rows)] == ["template_collapse"]


OPEN, CLOSE = 59, 60


def episodes(prompt: int) -> list[Episode]:
    """Two attempts at a task with a first turn that thinks, an observation and a second turn."""
    found = []
    for sample in range(2):
        thought = (OPEN, 20 + prompt, 30 + sample, CLOSE, 7)
        segments = (
            Segment("prompt", (prompt, 1)),
            Segment("action", thought, 0, logprobs=(-1.0,) * 5, versions=(0,) * 5),
            Segment("observation", (2,), 0),
            Segment("action", (3, 4), 1, logprobs=(-1.0,) * 2, versions=(0,) * 2),
        )
        one = Trajectory(f"t{prompt}", sample, segments, (), StopReason.ANSWERED, reward=float(sample))
        found.append(Episode(RolloutKey(1, prompt, sample, 0), Task(f"t{prompt}", (), None), one))
    return found


def test_collapse_measurement_scores_all_prompts_and_does_not_change_training():
    samples = assign_credit([episodes(prompt) for prompt in (10, 11, 12, 10)], PRESETS["grpo"])
    weights = []
    for every in (0, 2):
        one = learner(tiny_model())
        scoring = CollapseScoring(every, 64, 100, OPEN, CLOSE)
        assert scoring.measure(1, samples, one) == {}
        found = scoring.measure(2, samples, one)
        one.train(training_rows(samples, mask_observations=True), seed=1)
        weights.append(np.concatenate([p.detach().numpy().ravel() for p in one.scorer.model.parameters()]))
    assert (weights[0] == weights[1]).all()
    assert (found["collapse/samples"], found["collapse/chance"]) == (8, 1 / 3)
    assert [one.tokens for one in scoring._choose(samples)[:3]] == [(30, 30), (31, 30), (32, 30)]
    assert scoring.last == found
    resumed = CollapseScoring(2)
    resumed.restore([found, {"loss": 1.0}])
    assert resumed.last == found


def test_samples_are_chosen_evenly_and_a_single_prompt_is_not_measured():
    samples = assign_credit([episodes(prompt) for prompt in (10, 11, 12)], PRESETS["grpo"])
    scoring = CollapseScoring(1, 3, 100)
    assert [one.prompt for one in scoring._choose(samples)] == [(10, 1), (11, 1), (12, 1)]
    assert scoring.measure(1, samples[:2], learner(tiny_model())) == {}
