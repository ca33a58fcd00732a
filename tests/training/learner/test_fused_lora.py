"""Fused LoRA layers compute PEFT's formula, also where they fall back to it."""

from __future__ import annotations

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model

from engines.test_engine_batching import build
from ludus.engines.models.lora import use_adapter
from ludus.training.learner.fused_lora import FusedLora, fuse_lora

IDS = torch.arange(22).view(2, 11) % 50


def adapted(dtype, **settings):
    settings = {"r": 4, "lora_alpha": 6, "target_modules": ["q_proj", "v_proj", "down_proj"]} | settings
    plain = build(attention_bias=True)
    model = get_peft_model(plain, LoraConfig(**settings))
    model.add_adapter("other", LoraConfig(**settings))
    for number, (name, parameter) in enumerate(model.named_parameters()):
        if "lora_" in name or name.endswith("bias"):
            parameter.data.normal_(0, 0.2, generator=torch.Generator().manual_seed(number))
            parameter.requires_grad_("lora_" in name)
    model.to(dtype)
    for name, parameter in model.named_parameters():
        if "lora_" in name and dtype == torch.bfloat16:
            parameter.data = parameter.data.float()  # as in PEFT, which keeps factors of a 16-bit model in 32 bits
    fused = copy.deepcopy(model)
    assert fuse_lora(fused) == 6
    assert fuse_lora(fused) == 0
    return model, fused


def gradients(model):
    logprobs = model(IDS).logits.double().log_softmax(-1)
    logprobs[..., 3].sum().backward()
    return logprobs.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def test_values_and_gradients_are_those_of_peft():
    (expected, theirs), (ours, fused) = (gradients(model) for model in adapted(torch.float64))
    assert torch.allclose(ours, expected, atol=1e-12)
    assert theirs.keys() == fused.keys()
    assert len(theirs) == 12
    for name, gradient in theirs.items():
        assert torch.allclose(fused[name], gradient, atol=1e-11), name


def test_bfloat16_is_as_exact_as_peft():
    exact, _ = (gradients(model) for model in adapted(torch.float64))
    errors = [
        torch.cat([(grads[name] - exact[1][name]).flatten() for name in exact[1]]).norm()
        for _, grads in map(gradients, adapted(torch.bfloat16))
    ]
    assert errors[1] < 1.3 * errors[0]
    _, fused = adapted(torch.bfloat16)
    assert all(g.dtype == torch.float32 for g in gradients(fused)[1].values())


def fallback_none(model):
    with model.disable_adapter():
        return model(IDS).logits


def fallback_two(model):
    with use_adapter(model, "default", "other"):
        return model(IDS).logits


def fallback_merged(model):
    model.merge_adapter()
    return model(IDS).logits


def fallback_names(model):
    return model.eval()(IDS, adapter_names=["other", "__base__"]).logits


@pytest.mark.parametrize("run", [fallback_none, fallback_two, fallback_merged, fallback_names])
def test_other_uses_of_adapters_are_peft_s(run):
    expected, ours = (run(model) for model in adapted(torch.float64))
    assert torch.allclose(ours, expected, atol=1e-12)


def test_one_of_several_adapters_is_fused():
    plain, fused = adapted(torch.float64)
    with use_adapter(plain, "other"), use_adapter(fused, "other"):
        expected, ours = (gradients(model) for model in (plain, fused))
    assert torch.allclose(ours[0], expected[0], atol=1e-12)
    assert ours[1].keys() == expected[1].keys()
    assert all("other" in name for name in ours[1])


def test_layers_with_dropout_are_left_to_peft():
    torch.manual_seed(0)
    plain, fused = adapted(torch.float64, lora_dropout=0.5)
    layer = next(module for module in fused.modules() if isinstance(module, FusedLora))
    assert layer.training
    results = []
    for model in (plain, fused):
        torch.manual_seed(1)
        results.append(model(IDS).logits)
    assert torch.allclose(*results, atol=1e-12)
