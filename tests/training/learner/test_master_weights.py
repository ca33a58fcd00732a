"""bfloat16 weights with float32 master weights: small updates accumulate, and a run resumes bit for bit."""

from __future__ import annotations

import pytest
import torch

from ludus.errors import LearnerError
from ludus.rollouts.ledger import Ledger
from ludus.training.learner.optimizer import Optimizer, OptimizerSettings
from ludus.training.run.checkpoint import TrainerState, load_trainer, load_weights, save_checkpoint
from tests.engines.test_engine_local import byte_tokenizer
from tests.training.learner.test_learner import learner, random_rows, tiny_model

TINY = OptimizerSettings(learning_rate=1e-5, total_steps=400, max_grad_norm=1e9)


def pushed(steps, *, master_weights, dtype=torch.bfloat16):
    """A weight of 1 after steps that each take away 1e-5, and its optimizer."""
    layer = torch.nn.Linear(2, 2, bias=False, dtype=dtype)
    torch.nn.init.ones_(layer.weight)
    optimizer = Optimizer(layer, TINY, master_weights=master_weights)
    for _ in range(steps):
        layer.weight.grad = torch.ones_like(layer.weight)
        optimizer.step()
    return layer.weight.detach(), optimizer


def test_updates_too_small_for_bfloat16_accumulate_in_master_weights():
    pure, _ = pushed(390, master_weights=False)
    assert pure.tolist() == [[1.0, 1.0], [1.0, 1.0]]
    exact, _ = pushed(390, master_weights=False, dtype=torch.float32)
    weight, optimizer = pushed(390, master_weights=True)
    assert torch.equal(optimizer.state_dict()["master/weight"], exact)
    assert torch.equal(weight, exact.bfloat16())
    assert float(weight[0, 0]) == 0.99609375
    assert optimizer.state_dict()["exp_avg/weight"].dtype == torch.float32


def test_master_weights_are_initialised_at_the_first_step():
    layer = torch.nn.Linear(2, 2, bias=False, dtype=torch.bfloat16)
    optimizer = Optimizer(layer, TINY)
    torch.nn.init.constant_(layer.weight, 3.0)
    assert optimizer.state_dict() == {}
    layer.weight.grad = torch.ones_like(layer.weight)
    optimizer.step()
    assert float(optimizer.state_dict()["master/weight"][0, 0]) == pytest.approx(3 - 1e-5, abs=1e-6)


def test_non_finite_gradient_leaves_weights_and_master_weights_unchanged():
    layer = torch.nn.Linear(2, 2, bias=False, dtype=torch.bfloat16)
    before = layer.weight.detach().clone()
    optimizer = Optimizer(layer, TINY)
    layer.weight.grad = torch.full_like(layer.weight, torch.inf)
    with pytest.raises(LearnerError):
        optimizer.step()
    layer.weight.grad = torch.zeros_like(layer.weight)
    optimizer.step()
    assert torch.equal(layer.weight.detach(), before)


def test_resumed_bfloat16_training_is_bitwise_identical(tmp_path):
    rows = random_rows(5)
    straight = learner(tiny_model(torch.bfloat16))
    for step in range(4):
        straight.train(rows, seed=step)
    first = learner(tiny_model(torch.bfloat16))
    for step in range(2):
        first.train(rows, seed=step)
    state = TrainerState(2, first.optimizer.num_steps, Ledger().state())
    folder = save_checkpoint(tmp_path, first.scorer.model, byte_tokenizer(), first.optimizer, state)
    model = tiny_model(torch.bfloat16, seed=5)
    second = learner(model)
    load_weights(folder, model)
    load_trainer(folder, second.optimizer)
    for step in range(2, 4):
        second.train(rows, seed=step)
    for name, tensor in straight.optimizer.state_dict().items():
        assert torch.equal(tensor, second.optimizer.state_dict()[name]), name
    expected = dict(straight.scorer.model.named_parameters())
    for name, parameter in model.named_parameters():
        assert parameter.dtype == torch.bfloat16
        assert torch.equal(parameter, expected[name]), name
    with pytest.raises(LearnerError, match=r"model\.master_weights"):
        load_trainer(folder, Optimizer(model, TINY, master_weights=False))
