"""Full-distribution KL in chunks: against a naive implementation, as a setting, and in distillation."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ludus.algorithms.kl import FULL_KLS
from ludus.algorithms.spec.resolve import PRESETS, resolve
from ludus.config.sections.algorithm import AlgorithmConfig
from ludus.errors import LearnerError
from ludus.training.batches.chunked_lm_head import DivergenceTarget, HiddenStates, LmHead, divergence
from ludus.training.learner.learner import LearnerSettings
from ludus.training.learner.logprobs import LogprobScorer
from tests.training.learner.test_learner import gradients, learner, random_rows, tiny_model

WIDE = torch.float64


def table(*shape, seed):
    return torch.randn(*shape, dtype=WIDE, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("which", FULL_KLS)
@pytest.mark.parametrize("rows", [1, 3, 100, None])
def test_chunked_kl_equals_unchunked_value_and_gradient(which, rows):
    hidden, weight, bias = table(7, 4, seed=0), table(11, 4, seed=1), table(11, seed=2)
    other, theirs = table(7, 5, seed=3), table(11, 5, seed=4)
    upstream = table(7, seed=5)
    leaves = [x.requires_grad_() for x in (hidden, weight, bias)]
    logits = (hidden @ weight.t() + bias) / 0.7
    plain = FULL_KLS[which](logits=logits, ref_logits=other @ theirs.t() / 1.3)
    expected = torch.autograd.grad((upstream * plain).sum(), leaves)
    against = DivergenceTarget(HiddenStates(other, LmHead(theirs, None, 1.3)), which)
    found = divergence(HiddenStates(hidden, LmHead(weight, bias, 0.7)), against, rows=rows)
    torch.testing.assert_close(found, plain, atol=1e-12, rtol=0)
    for ours, wanted in zip(torch.autograd.grad((upstream * found).sum(), leaves), expected, strict=True):
        torch.testing.assert_close(ours, wanted, atol=1e-12, rtol=0)


def test_chunked_kl_never_materialises_all_logits():
    """The largest tensor of forward and backward is a chunk of logits, or the weight."""
    hidden, weight = table(64, 4, seed=0).requires_grad_(), table(500, 4, seed=1).requires_grad_()
    against = DivergenceTarget(HiddenStates(table(64, 4, seed=2), LmHead(table(500, 4, seed=3))), "full_reverse")
    largest = 0

    class LargestTensor(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            made = func(*args, **(kwargs or {}))
            for one in made if isinstance(made, (tuple, list)) else [made]:
                if isinstance(one, torch.Tensor):
                    largest = max(largest, one.numel())
            return made

    with LargestTensor():
        divergence(HiddenStates(hidden, LmHead(weight)), against, rows=4).sum().backward()
    assert largest == 4 * 500


def whole_logits(model, row):
    """Of the action tokens of one row, by the model itself."""
    at = [i - 1 for i, trains in enumerate(row.trains) if trains and i]
    return model(input_ids=torch.tensor([row.tokens])).logits[0, at]


def expected_term(model, other, rows, which, coefficient):
    tokens = sum(sum(row.trains[1:]) for row in rows)
    total = torch.zeros((), dtype=WIDE)
    for row in rows:
        with torch.no_grad():
            theirs = whole_logits(other, row)
        total = total + FULL_KLS[which](logits=whole_logits(model, row), ref_logits=theirs).sum()
    return coefficient * total / tokens


@pytest.mark.parametrize("which", FULL_KLS)
def test_full_kl_in_the_loss_is_exact(which):
    model, other, rows = tiny_model(), tiny_model(seed=1), random_rows()
    term = expected_term(model, other, rows, which, 0.5)
    wanted = torch.autograd.grad(term, list(model.parameters()))
    with_term = resolve(AlgorithmConfig(kl=which, kl_coef=0.5))
    found = []
    for algorithm in (with_term, PRESETS["grpo"]):
        one = learner(model, algorithm, LearnerSettings(microbatch_tokens=60), {"reference": LogprobScorer(other)})
        statistics, _ = one.gradient(rows)
        found.append((statistics, list(gradients(model).values())))
    (ours, ours_slopes), (plain, plain_slopes) = found
    assert ours.loss - plain.loss == pytest.approx(term.item(), abs=1e-7)  # norms compute in float32
    assert 0.5 * ours.kl_sum / ours.clip.tokens == pytest.approx(term.item(), abs=1e-7)
    for a, b, own in zip(ours_slopes, plain_slopes, wanted, strict=True):
        torch.testing.assert_close(a - b, own, atol=1e-7, rtol=0)


def test_full_kl_in_the_reward_equals_the_plain_computation():
    model, other, rows = tiny_model(), tiny_model(seed=1), random_rows(4)
    algorithm = resolve(AlgorithmConfig(kl="full_reverse", kl_coef=0.5, kl_placement="reward"))
    one = learner(model, algorithm, scorers={"reference": LogprobScorer(other)})
    penalties = one.penalties(rows, one.score(rows))
    for row, found in zip(rows, penalties, strict=True):
        at = [i for i, trains in enumerate(row.trains) if trains and i]
        plain = FULL_KLS["full_reverse"](logits=whole_logits(model, row), ref_logits=whole_logits(other, row))
        torch.testing.assert_close(found[at], plain.detach(), atol=1e-7, rtol=0)
        assert float(found.sum()) == pytest.approx(float(found[at].sum()))
    with pytest.raises(LearnerError, match="no reference"):
        learner(model, algorithm).penalties(rows, [])


def test_full_distillation_is_exact_and_reduces_the_kl():
    model, teacher, rows = tiny_model(), tiny_model(seed=1), random_rows()
    algorithm = resolve(AlgorithmConfig(preset="distill", loss="distill_full"))
    one = learner(model, algorithm, scorers={"teacher": LogprobScorer(teacher)})
    statistics, _ = one.gradient(rows)
    term = expected_term(model, teacher, rows, "full_reverse", 1.0)
    assert statistics.loss == pytest.approx(term.item(), abs=1e-7)
    wanted = torch.autograd.grad(term, list(model.parameters()))
    for ours, own in zip(gradients(model).values(), wanted, strict=True):
        torch.testing.assert_close(ours, own, atol=1e-7, rtol=0)
    reports = [one.train(rows, seed=i)["distill/reverse_kl"] for i in range(5)]
    assert reports[0] == pytest.approx(term.item(), abs=1e-7)
    assert reports[-1] < reports[0]


def test_full_kl_with_unavailable_hidden_states_raises():
    model, other = tiny_model(), tiny_model(seed=1)
    other.set_attn_implementation("eager")
    algorithm = replace(PRESETS["grpo"], kl="full_forward", kl_coef=0.1)
    with pytest.raises(LearnerError, match="are unavailable"):
        learner(model, algorithm, scorers={"reference": LogprobScorer(other)}).gradient(random_rows(2))
