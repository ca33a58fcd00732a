import copy

import pytest
import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

from engines.test_engine_batching import build
from ludus.engines.models.fingerprint import fingerprint_module
from ludus.engines.models.loading import FusedRMSNorm, fuse_norms


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 0.2)])
def test_fused_model_has_the_logits_gradients_and_digest_of_the_plain_one(dtype, tolerance):
    plain = build().to(dtype)
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5, generator=torch.Generator().manual_seed(len(name)))
    fused = copy.deepcopy(plain)
    assert fuse_norms(fused) == 9  # four a layer and the last
    assert fuse_norms(fused) == 0
    ids = torch.arange(24)[None] % 50
    outputs = [model(ids).logits.double().log_softmax(-1) for model in (plain, fused)]
    assert torch.allclose(*outputs, atol=tolerance)
    for output in outputs:
        output[..., 3].sum().backward()
    for ours, theirs in zip(fused.parameters(), plain.parameters(), strict=True):
        assert (ours.grad - theirs.grad).norm() <= tolerance * max(1.0, float(theirs.grad.norm()))
    assert fingerprint_module(fused) == fingerprint_module(plain)


def test_norms_that_round_to_float32_stay_in_a_float64_model():
    assert fuse_norms(build().double()) == 0


def test_norm_with_another_formula_is_not_replaced():
    config = Gemma3TextConfig(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
    )
    model = Gemma3ForCausalLM(config)
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.variance_epsilon = module.eps
            torch.nn.init.normal_(module.weight)
    assert fuse_norms(model) == 0
    assert not any(isinstance(module, FusedRMSNorm) for module in model.modules())
