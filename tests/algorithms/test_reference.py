"""A policy that is scored in two states: with dropout, autocast or adapters on and off."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import Gemma2Config, Gemma2ForCausalLM, GPT2Config, GPT2LMHeadModel

from ludus.algorithms.spec.resolve import PRESETS
from ludus.training.learner.learner import LearnerSettings
from ludus.training.learner.logprobs import LogprobScorer
from ludus.training.learner.optimizer import OptimizerSettings
from ludus.training.rl.build import AdapterOff
from ludus.training.value_models.base import ValueModelSettings
from ludus.training.value_models.critic import Critic
from tests.training.batches.test_forest import SHAPE
from tests.training.learner.test_learner import VOCAB, gradients, largest_difference, learner, random_rows, tiny_model


def dropping_model(p=0.3):
    """A model with dropout everywhere, left in the mode of its supervised training."""
    torch.manual_seed(0)
    drops = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), p)
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=2, n_positions=64, **drops)
    ).train()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_dropout_does_not_move_the_ratio_of_an_unchanged_policy(dtype):
    """Trap 7: `old` is recomputed, in passes of its own, and the policy did not change."""
    rows, model = random_rows(), dropping_model().to(dtype)
    one = learner(model, settings=LearnerSettings(microbatch_tokens=10**6))
    known = one._start(rows, seed=0)
    assert known.proximal is None
    one.settings = LearnerSettings(microbatch_tokens=10**6, epochs=2)
    known = one._start(rows, seed=0)
    statistics, _ = one.gradient(rows, known)
    assert (statistics.clip.ratio_mean, statistics.clip.ratio_max) == (1.0, 1.0)
    again = gradients(model)
    model.train()
    one.gradient(rows, known)
    assert largest_difference(again, gradients(model)) == 0


def under_autocast():
    return torch.autocast("cpu", torch.bfloat16)


def padded_model():
    """A model whose rows are padded and not shared."""
    torch.manual_seed(0)
    return Gemma2ForCausalLM(Gemma2Config(**(SHAPE | {"vocab_size": VOCAB}), head_dim=8))


@pytest.mark.parametrize("shared", [True, False])
def test_autocast_around_one_pass_does_not_move_the_ratio_of_an_unchanged_policy(shared):
    """Trap 7: a caller that runs `old`, or the gradient, under autocast, and not the other."""
    rows = random_rows()
    model = tiny_model(torch.float32) if shared else padded_model()
    with under_autocast():
        assert model(torch.arange(8)[None]).logits.dtype == torch.bfloat16, "autocast changes this model"
    one = learner(model, settings=LearnerSettings(microbatch_tokens=10**6, epochs=2))
    assert one.scorer.shares_prefixes == shared
    known = one._start(rows, seed=0)
    one.gradient(rows, known)
    expected = gradients(model)
    with under_autocast():
        again = one._start(rows, seed=0)
        statistics, _ = one.gradient(rows, known)
    assert all(torch.equal(a, b) for a, b in zip(known.proximal, again.proximal, strict=True))
    assert (statistics.clip.ratio_mean, statistics.clip.ratio_max) == (1.0, 1.0)
    assert largest_difference(expected, gradients(model)) == 0


def test_critic_values_are_computed_without_dropout():
    rows = random_rows()
    one = Critic(dropping_model(), OptimizerSettings(learning_rate=1e-2, total_steps=10), ValueModelSettings())
    with torch.no_grad():
        one.head.weight.normal_()
    first, second = one.score(rows), one.score(rows)
    assert all(torch.equal(a, b) and a.any() for a, b in zip(first, second, strict=True))


def adapted_model(dtype=torch.float64):
    """A base, and the same with adapters that have learned something."""
    peft = pytest.importorskip("peft")
    base = tiny_model(dtype)
    adapted = peft.get_peft_model(copy.deepcopy(base), peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(generator=torch.Generator().manual_seed(1), std=0.5)
    return base, adapted.eval()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_adapter_reference_is_bit_identical_to_base_while_policy_differs(dtype):
    """Trap 8: the adapters are off in the reference alone, and on again after it."""
    base, adapted = adapted_model(dtype)
    rows = random_rows()
    expected = learner(base).score(rows)
    scorers = {"reference": AdapterOff(adapted, 1.0)}
    one = learner(adapted, PRESETS["grpo_paper"], scorers=scorers)
    before = one.score(rows)
    for _ in range(2):
        for found, wanted in zip(one.reference(rows), expected, strict=True):
            assert torch.equal(found, wanted)
        for found, wanted in zip(one.score(rows), before, strict=True):
            assert torch.equal(found, wanted)
    gaps = [float((a - b).abs().max()) for a, b in zip(before, expected, strict=True)]
    assert min(gaps) > 1e-3
    statistics, _ = one.gradient(rows)
    assert statistics.clip.ratio_max == 1.0
    assert statistics.kl_sum / statistics.clip.tokens > 1e-4


def test_reference_stays_equal_to_base_while_adapters_train():
    base, adapted = adapted_model()
    rows = random_rows()
    one = learner(adapted, PRESETS["grpo_paper"], scorers={"reference": AdapterOff(adapted, 1.0)})
    expected = learner(base).score(rows)
    copied = learner(copy.deepcopy(adapted), PRESETS["grpo_paper"], scorers={"reference": LogprobScorer(base)})
    for step in range(3):
        metrics, wanted = one.train(rows, seed=step), copied.train(rows, seed=step)
        assert metrics["policy/kl_reference"] == pytest.approx(wanted["policy/kl_reference"], abs=1e-12)
    assert all(torch.equal(a, b) for a, b in zip(one.reference(rows), expected, strict=True))
