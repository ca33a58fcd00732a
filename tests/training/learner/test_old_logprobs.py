"""Ratios to the log-probabilities recorded by the engine."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ludus.algorithms.spec.resolve import resolve
from ludus.errors import ConfigError, SyncError
from ludus.training.learner.learner import OLD_FROM_ENGINE, CachedLogprobs, LearnerSettings
from ludus.training.rl.train_step import check_parity
from ludus.training.rl.validate import check_old_logprobs
from small_runs import config
from tests.training.learner.test_learner import gradients, largest_difference, learner, random_rows, tiny_model

ENGINE = LearnerSettings(old_logprobs="engine")


def recorded(rows, scores):
    """The rows as an engine with these log-probabilities would have recorded them."""
    return [replace(row, behavior=tuple(map(float, s))) for row, s in zip(rows, scores, strict=True)]


def test_gradient_uses_the_logprobs_recorded_by_the_engine(monkeypatch):
    model, rows = tiny_model(), random_rows()
    given = [torch.tensor(row.behavior, dtype=torch.float64) for row in rows]
    learner(model).gradient(rows, CachedLogprobs(given))
    expected = gradients(model)
    learner(model).gradient(rows)
    assert largest_difference(expected, gradients(model)) > 1e-3
    one = learner(model, settings=ENGINE)
    found = {}
    monkeypatch.setattr(one.optimizer, "step", lambda: found.update(gradients(model)) or 0.0)
    metrics = one.train(rows, seed=0)
    assert largest_difference(expected, found) < 1e-12
    assert metrics[OLD_FROM_ENGINE] == 1.0


def test_engine_logprobs_save_the_scoring_pass(monkeypatch):
    model, rows = tiny_model(), random_rows()
    passes = []
    for old in ("recomputed", "engine"):
        one = learner(model, settings=LearnerSettings(epochs=2, old_logprobs=old))
        score, calls = one.scorer.score, []
        monkeypatch.setattr(one.scorer, "score", lambda *a, c=calls, s=score: c.append(1) or s(*a))
        assert one.train(rows, seed=0)[OLD_FROM_ENGINE] == float(old == "engine")
        passes.append(len(calls))
    assert passes == [3, 2]


def test_engine_and_recomputed_logprobs_train_equally_if_equal():
    results = []
    for old in ("recomputed", "engine"):
        model = tiny_model()
        one = learner(model, settings=LearnerSettings(epochs=2, minibatches=2, old_logprobs=old))
        rows = random_rows()
        one.train(recorded(rows, one.score(rows)), seed=3)
        results.append(dict(model.named_parameters()))
    assert largest_difference(*results) < 1e-10


def test_parity_check_is_stricter_with_engine_logprobs():
    rows = random_rows()
    one = learner(tiny_model())
    near = [s + 0.01 * torch.tensor(r.sampled) for s, r in zip(one.score(rows), rows, strict=True)]
    rows = recorded(rows, near)
    check_parity(rows, one)
    one.settings = ENGINE
    with pytest.raises(SyncError, match=r"at most 0\.001.*recomputed"):
        check_parity(rows, one)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"algorithm__correction": "tis"}, "correction"),
        ({"algorithm__correction": "decoupled"}, "correction"),
        ({"rollout__top_p": "0.9"}, "sampling is truncated"),
        ({"rollout__guided_tools": "true"}, "sampling is truncated"),
        ({"training__mask_observations": "false"}, "observations"),
        ({"training__learner__replay_routing": "true"}, "records experts"),
    ],
)
def test_settings_incompatible_with_engine_logprobs_are_rejected(tmp_path, changes, reason):
    plain = config(tmp_path, training__learner__old_logprobs="engine")
    check_old_logprobs(plain, replace(resolve(plain.algorithm), correction="none"))
    settings = config(tmp_path, training__learner__old_logprobs="engine", **changes)
    with pytest.raises(ConfigError, match=reason):
        check_old_logprobs(settings, resolve(settings.algorithm))
