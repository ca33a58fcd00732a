"""oneDNN matrix products equal those of torch for any number of rows, with bounded memory."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.functional import linear as plain

from ludus.engines.embedded import model_runner

pytestmark = pytest.mark.skipif(
    not hasattr(torch.ops.mkldnn, "_linear_pointwise"), reason="torch was built without oneDNN"
)


@pytest.fixture(autouse=True)
def anywhere(monkeypatch):
    """As on a machine where it is used."""
    monkeypatch.setattr(model_runner, "is_faster", lambda: True)


def gradients(multiply, inputs):
    inputs = [x.clone().requires_grad_() for x in inputs]
    out = multiply(*inputs)
    out.backward(torch.sin(torch.arange(out.numel(), dtype=out.dtype)).view(out.shape))
    return [out.detach(), *(x.grad for x in inputs)]


@pytest.mark.parametrize("shape", [(1,), (15,), (16,), (37,), (256,), (300,), (2, 3, 200), (0,)])
@pytest.mark.parametrize("with_bias", [False, True])
def test_linear_output_and_gradients_match_torch(shape, with_bias):
    torch.manual_seed(0)
    inputs = [torch.randn(*shape, 48), torch.randn(40, 48), *([torch.randn(40)] if with_bias else [])]
    exact = gradients(plain, [x.double() for x in inputs])
    found = gradients(model_runner.linear, inputs)
    assert found[0].shape == exact[0].shape
    for own, theirs in zip(found, exact, strict=True):
        torch.testing.assert_close(own.double(), theirs, rtol=1e-5, atol=2e-4)


def test_linear_gradients_are_correct_when_one_input_requires_grad():
    rows, weight = torch.randn(64, 8), torch.randn(5, 8, requires_grad=True)
    model_runner.linear(rows, weight).sum().backward()
    torch.testing.assert_close(weight.grad, rows.sum(0).expand(5, 8))
    rows, weight = torch.randn(64, 8, requires_grad=True), torch.randn(5, 8)
    model_runner.linear(rows, weight).sum().backward()
    torch.testing.assert_close(rows.grad, weight.sum(0).expand(64, 8))
    assert not model_runner.linear(rows.detach(), weight).requires_grad


def test_products_without_gradient_take_transposed_matrices():
    left, right = torch.randn(300, 24), torch.randn(24, 72)
    torch.testing.assert_close(model_runner.product(left, right), left @ right, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(
        model_runner.product(left, right.t().contiguous().t()), left @ right, rtol=1e-4, atol=1e-4
    )
    other = torch.randn(300, 56)
    torch.testing.assert_close(model_runner.outer_sum(left, other), left.t() @ other, rtol=1e-4, atol=1e-4)


def test_row_is_bitwise_equal_in_any_batch():
    rows, weight = torch.randn(600, 96), torch.randn(80, 96)
    whole = model_runner.linear(rows, weight)
    for start, count in ((0, 16), (7, 17), (100, 48), (3, 256), (250, 300), (599 - 33, 33)):
        part = model_runner.linear(rows[start : start + count], weight)
        assert torch.equal(part, whole[start : start + count])


def test_linear_falls_back_to_torch_for_float64_or_disabled_onednn():
    rows, weight = torch.randn(64, 32), torch.randn(24, 32)
    assert not torch.equal(model_runner.linear(rows, weight), torch.zeros(64, 24))
    with torch.backends.mkldnn.flags(enabled=False):
        assert torch.equal(model_runner.linear(rows, weight), plain(rows, weight))
    assert torch.equal(model_runner.linear(rows.double(), weight.double()), plain(rows.double(), weight.double()))
    assert model_runner.uses_onednn(weight)
    assert not model_runner.uses_onednn(weight.double())
    assert not model_runner.uses_onednn(weight.bfloat16())


def test_use_onednn_replaces_linear_layers_and_restore_reverts_them():
    model = nn.Sequential(nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 8, bias=False))
    rows, names = torch.randn(40, 32), list(model.state_dict())
    before = model(rows)
    changed = model_runner.use_onednn(model)
    assert model_runner.use_onednn(model) == []
    assert [type(m) for m in model] == [model_runner.OneDnnLinear, nn.ReLU, model_runner.OneDnnLinear]
    assert list(model.state_dict()) == names
    torch.testing.assert_close(model(rows), before, rtol=1e-5, atol=1e-5)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        model[0].weight.zero_()
    torch.testing.assert_close(twin(rows), before, rtol=1e-5, atol=1e-5)
    model_runner.restore_linear(changed)
    assert [type(m) for m in model] == [nn.Linear, nn.ReLU, nn.Linear]


def resident_mib():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096 / 2**20


@pytest.mark.scale
def test_memory_does_not_grow_with_the_numbers_of_rows_that_were_seen():
    weight, rows = torch.randn(768, 256), torch.randn(2000, 256)
    for count in range(16, 272, 16):
        model_runner.linear(rows[:count], weight)
    before = resident_mib()
    for count in range(300, 1000):
        model_runner.linear(rows[:count], weight)
    assert resident_mib() - before < 60  # a product for each number takes hundreds
