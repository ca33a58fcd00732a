"""The learner in float64 and float32 on the packaged model: its gradient does not depend on the split."""

from __future__ import annotations

import pytest
import torch

from ludus.algorithms.spec.resolve import PRESETS
from ludus.engines.models.loading import load_model
from ludus.recipes import recipe_folder
from ludus.training.learner.learner import Learner, LearnerSettings
from ludus.training.learner.logprobs import Float64, LogprobScorer
from ludus.training.learner.optimizer import Optimizer, OptimizerSettings
from tests.training.learner.test_learner import gradients, largest_difference, random_rows

COLD_START = str(recipe_folder("search") / "cold_start")


def gradient_of(dtype, tokens):
    """The gradient of one batch on the packaged cold start, in microbatches of at most `tokens`."""
    model = load_model(COLD_START, dtype, "cpu")
    optimizer = Optimizer(model, OptimizerSettings(learning_rate=1e-3, total_steps=10))
    one = Learner(LogprobScorer(model), optimizer, PRESETS["grpo"], LearnerSettings(microbatch_tokens=tokens))
    one.gradient(random_rows(12))
    return gradients(model)


@pytest.mark.parametrize(("dtype", "bound"), [("float64", 1e-12), ("float32", 1e-5)])
def test_gradient_of_the_shipped_model_does_not_depend_on_microbatches(dtype, bound):
    """In one microbatch, and in many. The largest entry of the gradient is 0.43."""
    whole = gradient_of(dtype, 4096)
    for tokens in (40, 90):
        assert largest_difference(whole, gradient_of(dtype, tokens)) < bound


def test_float64_forward_creates_no_float32_tensors():
    """Every product of the model under the mode is float64, its norms and angles too."""
    model, seen = load_model(COLD_START, "float64", "cpu"), set()
    for module in model.modules():
        module.register_forward_hook(
            lambda _, given, found: seen.update(
                t.dtype
                for t in (*given, *(found if isinstance(found, tuple) else (found,)))
                if isinstance(t, torch.Tensor) and t.is_floating_point()
            )
        )
    with Float64():
        model(input_ids=torch.arange(20)[None])
        assert torch.ones(2, dtype=torch.float64).to(torch.float32).dtype == torch.float64
        assert torch.arange(3).float().dtype == torch.float64
    assert seen == {torch.float64}
    assert torch.ones(2).double().float().dtype == torch.float32
