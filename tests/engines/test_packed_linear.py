"""Packed weights and rounded adapters of a 16-bit engine on a CPU: equal bits, and never an old version."""

from __future__ import annotations

import asyncio
import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn.functional import linear

from ludus.engines.embedded.engine import EngineSettings, LocalEngine
from ludus.engines.embedded.model_runner import restore_linear
from ludus.engines.embedded.packed_linear import PackedLinear, pack_linear
from ludus.engines.models.fingerprint import fingerprint_module
from tests.engines.test_engine_features import adapted, build

SMALL = EngineSettings(context_tokens=64, max_batch=4, kv_cache_tokens=512)

HAS_BF16 = torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
needs_bf16 = pytest.mark.skipif(not HAS_BF16, reason="no bfloat16 in oneDNN")


@needs_bf16
@pytest.mark.parametrize(("width", "out", "bias"), [(576, 192, False), (64, 100, True), (96, 1000, False)])
def test_packed_products_have_the_bits_of_torch_for_any_number_of_rows(width, out, bias):
    with torch.random.fork_rng():
        torch.manual_seed(3)
        layer = nn.Linear(width, out, bias=bias).bfloat16().requires_grad_(False)
        rows = torch.randn(150, width).bfloat16()
    assert pack_linear(layer) == [layer]
    assert type(layer) is PackedLinear
    for num in (1, 16, 48, 112, 150):
        expected = linear(rows[:num], layer.weight, layer.bias)
        assert torch.equal(layer(rows[:num]), expected)
        assert torch.equal(layer(rows[None, :num])[0], expected)


@needs_bf16
def test_weights_are_packed_again_after_each_kind_of_change():
    model = nn.Sequential(nn.Linear(64, 48, bias=False), nn.ReLU(), nn.Linear(48, 32)).bfloat16().requires_grad_(False)
    rows, other = torch.randn(16, 64).bfloat16(), torch.randn(48, 64).bfloat16()
    changed = pack_linear(model)
    before, names = model(rows), list(model.state_dict())
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            model[0].weight.add_(1.0)
        assert not torch.equal(model[0](rows), before[:, :1])
        assert torch.equal(model[0](rows), linear(rows, model[0].weight))
    model[0].weight = nn.Parameter(other, requires_grad=False)
    assert torch.equal(model[0](rows), linear(rows, other))
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(twin(rows), model(rows))
    assert list(model.state_dict()) == names
    restore_linear(changed)
    assert [type(layer) for layer in model] == [nn.Linear, nn.ReLU, nn.Linear]
    assert "packed" not in model[0].__dict__


def test_layers_in_other_precisions_or_with_gradients_are_not_packed():
    assert pack_linear(nn.Linear(32, 32).requires_grad_(False)) == []
    assert pack_linear(nn.Linear(32, 32).bfloat16()) == []


def test_adapters_of_a_16_bit_engine_are_rounded_again_after_each_transfer():
    base = build().bfloat16()
    first, second = adapted(base, 1).float(), adapted(base, 2).float()
    for model in (first, second):  # base weights in 16 bits, factors in 32, as in training
        for name, parameter in model.named_parameters():
            if "lora_" not in name:
                parameter.data = parameter.data.bfloat16()
    prompt, factors = [1, 2, 3, 4, 5, 6], {n: p.detach() for n, p in second.named_parameters() if "lora_" in n}

    async def work():
        fresh, engine = LocalEngine(second, None, SMALL), LocalEngine(copy.deepcopy(first), None, SMALL)
        try:
            expected, old = await fresh.score(prompt), await engine.score(prompt)
            await engine.load_weights(1, factors)
            return expected, old, await engine.score(prompt), await engine.fingerprint()
        finally:
            await fresh.close()
            await engine.close()

    expected, old, new, digest = asyncio.run(work())
    assert new == expected != old
    assert digest == fingerprint_module(second)
