"""Mixtures of experts: engine and learner agree, the learner's invariances hold, routing is replayed."""

from __future__ import annotations

import copy
import random
from dataclasses import replace

import pytest
import torch
from transformers import MixtralConfig, MixtralForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from ludus.engines.embedded.engine import EngineSettings, LocalEngine
from ludus.errors import UserError
from ludus.training.learner.learner import CachedLogprobs, LearnerSettings
from ludus.training.learner.logprobs import LogprobScorer
from ludus.training.learner.moe_routing_replay import RoutingReplay
from tests.engines.test_engine_local import play, prompts
from tests.training.batches.test_forest import in_double
from tests.training.learner.test_learner import VOCAB, gradients, largest_difference, learner, random_rows, tiny_model

SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "initializer_range": 0.3,
    "experts_implementation": "eager",
}


def mixture(dtype=torch.float64, vocab=VOCAB, seed=0, **changes):
    torch.manual_seed(seed)
    shape = SHAPE | {"num_experts": 8, "moe_intermediate_size": 24, "head_dim": 8, "norm_topk_prob": True}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(vocab_size=vocab, **(shape | changes))).to(dtype).eval()


def mixtral():
    torch.manual_seed(0)
    return MixtralForCausalLM(MixtralConfig(vocab_size=VOCAB, num_local_experts=8, **SHAPE)).double().eval()


KINDS = {
    "normalised": mixture,
    "plain": lambda: mixture(norm_topk_prob=False),
    "padded": lambda: mixture(attn_implementation="eager"),
    "mixtral": mixtral,
}


def rows_with_prefixes(num=9):
    """Rows of which some share a prompt."""
    draw = random.Random(5)
    starts = [tuple(draw.randrange(VOCAB) for _ in range(n)) for n in (12, 17)]
    found = []
    for i, row in enumerate(random_rows(num)):
        start = starts[i % 2]
        no, zero = (False,) * len(start), (0.0,) * len(start)
        found.append(
            replace(
                row,
                tokens=start + row.tokens,
                trains=no + row.trains,
                sampled=no + row.sampled,
                behavior=zero + row.behavior,
                advantages=zero + row.advantages,
            )
        )
    return found


def replaying(model, settings=None, *, recompute=False):
    one = learner(model, settings=settings)
    one.scorer = LogprobScorer(model, recompute=recompute, routing=RoutingReplay.of(model))
    return one


def known_of(one, rows):
    with one.scorer.routing.recording():
        found, experts = one._score_all(rows, one.scorer.score)
    return CachedLogprobs([scores.logprobs for scores in found], experts=experts)


def shaken(model, size=0.3):
    draw = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += size * torch.randn(parameter.shape, generator=draw) * parameter.std()
    return model


def watched(model):
    """The experts that each layer computes with, pass by pass."""
    taken = {}
    for name, module in model.named_modules():
        if name.endswith(".experts"):
            module.register_forward_pre_hook(lambda _m, given, n=name: taken.setdefault(n, []).append(given[1].clone()))
    return taken


def test_engine_and_learner_logprobs_agree_for_mixture_of_experts():
    model = mixture(torch.float32, vocab=300)
    engine = LocalEngine(model, settings=EngineSettings(pass_tokens=64))
    scorer, worst = LogprobScorer(model), 0.0
    for history, answer in play(engine, prompts(6), turns=2, max_new_tokens=8, temperature=1.0):
        tokens = torch.tensor([history + answer.tokens])
        asked = torch.zeros_like(tokens, dtype=torch.bool)
        asked[:, len(history) :] = True
        found = scorer.score(tokens, asked).logprobs[0, len(history) :].detach()
        worst = max(worst, float((found - torch.tensor(answer.logprobs)).abs().max()))
    assert scorer.shares_prefixes
    assert worst < 1e-4


def test_mixture_of_experts_gradient_does_not_depend_on_the_partition():
    model, rows = in_double(mixture()), rows_with_prefixes()
    learner(model, settings=LearnerSettings(microbatch_tokens=10**6)).gradient(rows)
    expected = gradients(model)
    for tokens in (1, 60, 150):
        order = random.Random(tokens).sample(range(len(rows)), len(rows))
        settings = LearnerSettings(microbatch_tokens=tokens)
        learner(model, settings=settings).gradient([rows[i] for i in order])
        assert largest_difference(expected, gradients(model)) < 1e-10


@pytest.mark.parametrize("kind", KINDS)
def test_routing_replay_with_unchanged_weights_has_ratio_one(kind):
    model, rows = KINDS[kind](), rows_with_prefixes()
    one = replaying(model)
    assert one.scorer.shares_prefixes == (kind != "padded")
    known = known_of(one, rows)
    one.gradient(rows, replace(known, experts=None))
    expected = gradients(model)
    statistics, _ = one.gradient(rows, known)
    assert (statistics.clip.ratio_max, statistics.clip.ratio_mean) == (1.0, 1.0)
    assert largest_difference(expected, gradients(model)) < 1e-10


@pytest.mark.parametrize(
    "kind", ["normalised", "mixtral", *(pytest.param(name, marks=pytest.mark.slow) for name in ("plain", "padded"))]
)
def test_recorded_experts_are_replayed_after_an_update(kind):
    model, rows = KINDS[kind](), rows_with_prefixes()
    one, taken = replaying(model), watched(model)
    known = known_of(one, rows)
    recorded = {name: passes.pop() for name, passes in taken.items()}
    shaken(model)
    ratios = []
    for experts in (known.experts, None):
        for tokens in (10**6, 60):
            one.budget.tokens = tokens
            taken.clear()
            statistics, _ = one.gradient(rows, replace(known, experts=experts))
            ratios.append(statistics.clip.ratio_mean)
            if tokens == 10**6:
                same = [torch.equal(taken[name][0], first) for name, first in recorded.items()]
                assert same == [experts is not None] * 2
    assert ratios[0] == pytest.approx(ratios[1], abs=1e-5)
    assert ratios[0] != pytest.approx(ratios[2], abs=1e-3)


@pytest.mark.parametrize("recompute", [False, True])
def test_several_updates_reuse_the_experts_of_the_first_pass(recompute):
    rows, kept = rows_with_prefixes(), []
    for replays in (True, False):
        model = mixture()
        one = replaying(model, LearnerSettings(epochs=3), recompute=recompute)
        one.optimizer.settings = one.optimizer.settings.model_copy(update={"learning_rate": 0.05})
        one.scorer.routing = one.scorer.routing if replays else None
        taken = watched(model)
        one.train(rows, seed=0)
        passes = [tensor for found in taken.values() for tensor in found]
        assert len(passes) == 2 * (1 + 3 * (2 if recompute else 1))
        kept.append(all(torch.equal(found[0], later) for found in taken.values() for later in found))
        assert not any(module._forward_hooks for module in model.modules())
    assert kept == [True, False]


def test_routing_replay_does_not_affect_a_reference_sharing_the_routers():
    """An adapter's reference is the same model: it takes its own experts."""
    model, rows = mixture(), rows_with_prefixes()
    one = replaying(model)
    known = known_of(one, rows)
    shaken(model)
    one.scorers = {"reference": LogprobScorer(model)}
    free, _ = one.gradient(rows, replace(known, experts=None))
    assert free.kl_sum == 0.0
    replayed, _ = one.gradient(rows, known)
    assert replayed.kl_sum / replayed.clip.tokens > 1e-3


def test_model_without_routers_is_rejected_and_copies_drop_hooks():
    with pytest.raises(UserError, match="replay_routing"):
        RoutingReplay.of(tiny_model())
    model = mixture()
    routing = RoutingReplay.of(model)
    with routing.recording():
        assert any(module._forward_hooks for module in model.modules())
    assert not any(module._forward_hooks for module in copy.deepcopy(model).modules())


@pytest.mark.slow
def test_rows_without_trained_tokens_do_not_affect_routing_replay():
    rows = rows_with_prefixes(4)
    mute = [replace(row, trains=(False,) * len(row.tokens)) for row in rows_with_prefixes(7)[4:]]
    for tokens in (1, 10**6):
        results = []
        for batch in (rows, [*mute, *rows]):
            model = mixture()
            replaying(model, LearnerSettings(epochs=2, microbatch_tokens=tokens)).train(batch, seed=0)
            results.append({name: p.detach() for name, p in model.named_parameters()})
        assert largest_difference(*results) < 1e-5
