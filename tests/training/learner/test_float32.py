"""Exactness in float32: a shared prefix and another partition change results by less than 1e-5."""

from __future__ import annotations

import random

import pytest
import torch

from ludus.algorithms.spec.resolve import PRESETS
from ludus.engines.models.loading import load_model
from ludus.training.learner.learner import CachedLogprobs, LearnerSettings
from ludus.training.learner.logprobs import LogprobScorer
from served import COLD_START
from tests.training.batches.test_forest import PLANTED, branching_rows, families, gradients
from tests.training.learner.test_learner import learner, tiny_model
from tests.training.learner.test_routing import mixture, rows_with_prefixes

CLOSE = 1e-5


@pytest.mark.parametrize("name", sorted(PLANTED))
def test_gradient_with_packed_prefixes_equals_that_of_separate_rows(name):
    """Of a sum over tokens, in parts of each parameter's largest element."""
    model = families()[name]
    scorer = LogprobScorer(model, temperature=0.8)
    assert scorer.shares_prefixes
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    tokens, asked = branching_rows()
    weights = torch.randn(tokens.shape, generator=torch.Generator().manual_seed(1))
    found = gradients(model, scorer.score(tokens, asked, "gradient"), weights)
    model.zero_grad()
    for i in asked.any(1).nonzero().flatten().tolist():
        row = scorer.score(tokens[i : i + 1], asked[i : i + 1], "gradient")
        ((row.logprobs * weights[i]).sum() + 0.3 * row.entropy.sum()).backward()
    for name_of, parameter in model.named_parameters():
        if parameter.grad is not None:
            bound = CLOSE * float(parameter.grad.abs().max())
            torch.testing.assert_close(found[name_of], parameter.grad, atol=bound, rtol=0)


def sharp(model):
    """Weights as large as after training: log-probabilities down to -10."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.normal_(std=0.3, generator=torch.Generator().manual_seed(parameter.shape[0]))
    return model


MODELS = {
    "dense": lambda: sharp(tiny_model(torch.float32)),
    "experts": lambda: mixture(torch.float32),
    "trained": lambda: load_model(str(COLD_START), "float32", "cpu"),
}


@pytest.mark.parametrize("kind", MODELS)
def test_unchanged_policy_has_ratio_one_in_any_partition(kind):
    rows = rows_with_prefixes()
    one = learner(MODELS[kind](), PRESETS["grpo"], LearnerSettings(microbatch_tokens=10**6))
    whole = one.score(rows)
    assert min(float(scores.min()) for scores in whole) < -8
    longest = max(len(row.tokens) for row in rows)
    for size in (1, 2, 3):
        one.budget.tokens = size * longest
        order = random.Random(size).sample(range(len(rows)), len(rows))
        parts = one.score([rows[i] for i in order])
        for scores, i in zip(parts, order, strict=True):
            assert float(((scores - whole[i]).exp() - 1).abs().max()) < CLOSE
        statistics, _ = one.gradient(rows, CachedLogprobs(whole))
        assert statistics.clip.ratio_max < 1 + CLOSE
        assert abs(statistics.clip.ratio_mean - 1) < CLOSE
        assert statistics.clip.fraction == 0
