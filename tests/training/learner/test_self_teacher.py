"""SDPO and SDFT: the divergence in chunks, the gradient against whole logits, and the moving average."""

from __future__ import annotations

import copy
import math
from dataclasses import replace

import pytest
import torch

from ludus.algorithms import losses
from ludus.algorithms.algorithm import PartOptions
from ludus.algorithms.kl import jensen_shannon
from ludus.algorithms.spec.resolve import PRESETS
from ludus.training.batches.chunked_lm_head import DivergenceTarget, HiddenStates, LmHead, divergence
from ludus.training.learner.ema_teacher import EmaTeacher
from ludus.training.learner.learner import LearnerSettings
from ludus.training.learner.logprobs import model_precision
from tests.training.learner.test_full_kl import table, whole_logits
from tests.training.learner.test_learner import gradients, largest_difference, learner, random_rows, tiny_model


def events(logits, ref_logits, top_k):
    """The formula by loops: tokens of rank above `top_k` of the first distribution are one event."""
    p, q = torch.softmax(logits, -1), torch.softmax(ref_logits, -1)
    order = p.detach().argsort(descending=True).tolist()
    kept = order[:top_k] if top_k else order
    first, second = ([x[i] for i in kept] for x in (p, q))
    if len(kept) < len(p):
        first, second = ([*own, sum(x[i] for i in order[top_k:])] for own, x in ((first, p), (second, q)))
    total = torch.zeros((), dtype=torch.float64)
    for a, b in zip(first, second, strict=True):
        total = total + (a * torch.log(2 * a / (a + b)) + b * torch.log(2 * b / (a + b))) / 2
    return total


@pytest.mark.parametrize("top_k", [0, 1, 3, 10, 100])
def test_chunked_jensen_shannon_equals_the_formula_with_its_gradient(top_k):
    hidden, weight, bias = table(5, 4, seed=0), table(11, 4, seed=1), table(11, seed=2)
    other, theirs, upstream = table(5, 6, seed=3), table(11, 6, seed=4), table(5, seed=5)
    leaves = [x.requires_grad_() for x in (hidden, weight, bias)]
    logits, ref_logits = (hidden @ weight.t() + bias) / 0.7, other @ theirs.t()
    plain = torch.stack([events(a, b, top_k) for a, b in zip(logits, ref_logits, strict=True)])
    expected = torch.autograd.grad((upstream * plain).sum(), leaves)
    against = DivergenceTarget(HiddenStates(other, LmHead(theirs)), "jensen_shannon", top_k)
    for rows in (2, None):
        found = divergence(HiddenStates(hidden, LmHead(weight, bias, 0.7)), against, rows=rows)
        torch.testing.assert_close(found, plain, atol=1e-12, rtol=0)
        for ours, wanted in zip(torch.autograd.grad((upstream * found).sum(), leaves), expected, strict=True):
            torch.testing.assert_close(ours, wanted, atol=1e-12, rtol=0)


def test_jensen_shannon_is_at_most_log_2_and_tolerates_masked_tokens():
    first, second = torch.tensor([[0.0, -torch.inf, -torch.inf]]), torch.tensor([[-torch.inf, 0.0, 0.0]])
    assert float(jensen_shannon(logits=first, ref_logits=second)) == pytest.approx(math.log(2))
    assert float(jensen_shannon(logits=first, ref_logits=first)) == 0.0


def shown_rows(num=6):
    """Rows with prompts of other lengths for the teacher; it is shown nothing for the last one."""
    rows = []
    for i, row in enumerate(random_rows(num)):
        start = row.trains.index(True)
        prompt = tuple((3 * i + j) % 61 for j in range(1 + 4 * (i % 3)))
        rows.append(replace(row, teacher_tokens=(*prompt, *row.tokens[start:])))
    return [*rows[:-1], replace(rows[-1], teacher_tokens=())]


def expected_loss(model, teacher, rows, weight, top_k):
    """SDPO on policy: all ratios are 1, so that the policy loss is `-A ratio` with its gradient."""
    tokens = sum(sum(row.trains[1:]) for row in rows)
    total = torch.zeros((), dtype=torch.float64)
    for row in rows:
        own = whole_logits(model, row)
        at = [i for i, trains in enumerate(row.trains) if trains and i]
        chosen = torch.tensor([row.tokens[i] for i in at])
        logprobs = torch.log_softmax(own, -1).gather(1, chosen[:, None])[:, 0]
        advantages = torch.tensor([row.advantages[i] for i in at], dtype=torch.float64)
        total = total - (1 - weight) * (advantages * (logprobs - logprobs.detach()).exp()).sum()
        if row.teacher_tokens:
            shift = len(row.teacher_tokens) - len(row.tokens)
            with torch.no_grad():
                seen = teacher(input_ids=torch.tensor([row.teacher_tokens])).logits[0, [i + shift - 1 for i in at]]
            total = total + weight * sum(events(a, b, top_k) for a, b in zip(own, seen, strict=True))
    return total / tokens


@pytest.mark.parametrize(("weight", "top_k", "budget"), [(1.0, 5, 4096), (0.3, 5, 16), (0.3, 0, 4096)])
def test_sdpo_gradient_is_exact_for_any_split(weight, top_k, budget):
    model, teacher = tiny_model(), tiny_model(seed=1)
    options = PartOptions(loss={"weight": weight, "top_k": float(top_k)})
    algorithm = replace(PRESETS["sdpo"], options=options)
    shadow = EmaTeacher(teacher, 1.0, 0.05)
    one = learner(model, algorithm, LearnerSettings(microbatch_tokens=budget), {"teacher": shadow})
    rows = shown_rows()
    with model_precision(model):
        expected_loss(model, teacher, rows, weight, top_k).backward()
    wanted = gradients(model)
    one.gradient(rows)
    assert largest_difference(wanted, gradients(model)) < 1e-10
    one.gradient([replace(row, teacher_tokens=row.teacher_tokens and row.tokens) for row in rows])
    assert largest_difference(wanted, gradients(model)) > 1e-6


def test_the_importance_ratio_of_the_divergence_is_capped_and_has_no_gradient():
    logprobs = torch.tensor([[0.0, -0.5, -3.0]], dtype=torch.float64, requires_grad=True)
    old = torch.tensor([[-5.0, -0.4, -1.0]], dtype=torch.float64)
    divergences = torch.tensor([[0.3, 0.2, 0.1]], dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([[True, True, True]])
    found = losses.sdft(teacher_kl=divergences, logprobs=logprobs, old_logprobs=old, mask=mask)
    expected = [0.3 * 2, 0.2 * math.exp(-0.1), 0.1 * math.exp(-2)]
    assert found[0].tolist() == pytest.approx(expected, abs=1e-12)
    assert torch.autograd.grad(found.sum(), [logprobs, divergences], allow_unused=True)[0] is None


def test_training_reports_the_divergence_and_moves_the_average():
    model = tiny_model()
    before = copy.deepcopy(model)
    teacher = EmaTeacher(model, 1.0, 0.05)
    one = learner(model, PRESETS["sdft"], LearnerSettings(epochs=2), {"teacher": teacher})
    metrics = one.train(shown_rows(), seed=1)
    assert metrics["sdpo/divergence"] > 0
    assert metrics["sdpo/taught"] == 5 / 6
    assert "distill/reverse_kl" not in metrics
    expected, weights = dict(before.named_parameters()), dict(model.named_parameters())
    state = teacher.state()
    # two updates; the weights after the first one are only known to the teacher
    assert all(not torch.equal(state[name], expected[name]) for name in state)
    assert all(not torch.equal(state[name], weights[name]) for name in state)
    kept = {name: value.clone() for name, value in state.items()}
    teacher.update(model)
    for name, value in teacher.state().items():
        torch.testing.assert_close(value, 0.95 * kept[name] + 0.05 * weights[name].detach(), atol=1e-14, rtol=0)
    teacher.load_state(kept)
    assert all(torch.equal(value, kept[name]) for name, value in teacher.state().items())
    assert all(torch.equal(p, kept[name]) for name, p in teacher.scorer.model.named_parameters())


def test_average_of_half_precision_weights_is_kept_in_float32():
    model = tiny_model(torch.bfloat16)
    teacher = EmaTeacher(model, 1.0, 0.05)
    name, weight = next(iter(model.named_parameters()))
    begin = weight.detach().float().clone()
    with torch.no_grad():
        weight += 0.01 * weight.abs().max()
    for _ in range(20):
        teacher.update(model)
    wanted = begin + (1 - 0.95**20) * (weight.detach().float() - begin)
    torch.testing.assert_close(teacher.state()[name], wanted, atol=1e-6, rtol=1e-4)


def test_at_rate_1_the_teacher_is_the_policy_without_a_copy():
    model = tiny_model()
    teacher = EmaTeacher(model, 1.0, 1.0)
    assert teacher.scorer.model is model
    assert teacher.state() == {}


def test_rows_without_anything_to_show_need_no_teacher_pass():
    model = tiny_model()
    one = learner(model, PRESETS["sdft"], scorers={"teacher": EmaTeacher(model, 1.0, 0.05)})
    metrics = one.train([replace(row, teacher_tokens=()) for row in shown_rows()], seed=1)
    assert (metrics["sdpo/divergence"], metrics["sdpo/taught"], metrics["optim/grad_norm"]) == (0.0, 0.0, 0.0)
