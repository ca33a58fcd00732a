"""Packed prefixes: every token computed once, no cross-attention between rows, the gradient of padded rows."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from ludus.engines.base import common_prefix
from ludus.training.batches import chunked_lm_head, prefix_packing
from ludus.training.batches.chunked_lm_head import LmHead, logits_to_scores
from ludus.training.batches.prefix_packing import MIN_SHARED_TOKENS, pack_sequences
from ludus.training.batches.rows import Row, microbatches
from ludus.training.learner.logprobs import LogprobScorer

VOCAB = 53
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
CPU = torch.device("cpu")


def families():
    torch.manual_seed(0)
    window = {"sliding_window": 12, "head_dim": 8}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 8}
    experts["experts_implementation"] = "eager"  # the others know no float64
    return {
        "qwen3": Qwen3ForCausalLM(Qwen3Config(**SHAPE, head_dim=8, tie_word_embeddings=True)),
        "llama": LlamaForCausalLM(LlamaConfig(**SHAPE)),
        "mistral": MistralForCausalLM(MistralConfig(**SHAPE, **window)),
        "experts": Qwen3MoeForCausalLM(Qwen3MoeConfig(**SHAPE, **experts)),
        "gemma2": Gemma2ForCausalLM(Gemma2Config(**SHAPE, head_dim=8)),
    }


def in_double(model):
    """The model in float64 throughout.

    transformers computes norms and the softmax of routers in float32, whatever the weights are.
    """

    def norm(self, hidden):
        eps = self.variance_epsilon if hasattr(self, "variance_epsilon") else self.eps
        scaled = hidden * torch.rsqrt(hidden.square().mean(-1, keepdim=True) + eps)
        return scaled * (1 + self.weight if type(self).__name__.startswith("Gemma") else self.weight)

    def route(self, hidden):
        logits = torch.nn.functional.linear(hidden.reshape(-1, self.hidden_dim), self.weight)
        scores, chosen = logits.softmax(-1).topk(self.top_k, dim=-1)
        if self.norm_topk_prob:
            scores = scores / scores.sum(-1, keepdim=True)
        return logits, scores, chosen

    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = norm.__get__(module)
        if type(module).__name__ == "Qwen3MoeTopKRouter":
            module.forward = route.__get__(module)
    return model.double()


PLANTED = {"qwen3", "llama", "mistral", "experts"}


@st.composite
def families_of_sequences(draw):
    """Sequences that branch off each other at random places; some are equal, some empty."""
    made = [tuple(draw(st.lists(st.integers(0, 3), max_size=40)))]
    for _ in range(draw(st.integers(0, 7))):
        start = draw(st.sampled_from(made))
        cut = draw(st.integers(0, len(start)))
        made.append(start[:cut] + tuple(draw(st.lists(st.integers(0, 3), max_size=30))))
    return draw(st.permutations(made))


@given(families_of_sequences())
def test_packed_prefixes_contain_every_sequence(sequences):
    forest = pack_sequences(sequences, CPU)
    for sequence, places in zip(sequences, forest.places, strict=True):
        assert forest.tokens[0, places].tolist() == list(sequence)
        assert forest.positions[0, places].tolist() == list(range(len(sequence)))
    assert [node.start for node in forest.nodes] == [0, *(node.end for node in forest.nodes)][:-1]
    for node in forest.nodes:
        above = sum(forest.nodes[n].end - forest.nodes[n].start for n in node.above)
        assert int(forest.positions[0, node.start]) == above


@given(families_of_sequences())
def test_shared_prefixes_are_stored_once(sequences):
    forest = pack_sequences(sequences, CPU)
    order = sorted(range(len(sequences)), key=lambda i: sequences[i])
    for a, b in pairwise(order):
        left, right = sequences[a], sequences[b]
        same = next((i for i, (x, y) in enumerate(zip(left, right, strict=False)) if x != y), len(left))
        together = int((forest.places[a][:same] == forest.places[b][:same]).sum())
        assert together > same - MIN_SHARED_TOKENS


def branching_rows(seed=0):
    """Rows of two groups with long prompts in common, a branch inside an action, and one on its own."""
    draw = torch.Generator().manual_seed(seed)

    def tokens(n):
        return torch.randint(0, VOCAB, (n,), generator=draw).tolist()

    prompts, action = [tokens(20), tokens(31)], tokens(14)
    rows = [[*prompts[0], *action, *tokens(n)] for n in (5, 9, 0)]
    rows += [[*prompts[0], *tokens(12)], [*prompts[1], *tokens(7)], [*prompts[1], *tokens(25)], tokens(17)]
    width = max(map(len, rows))
    padded = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    asked = torch.zeros_like(padded, dtype=torch.bool)
    for i, row in enumerate(rows):
        asked[i, 3 if i % 2 else 22 : len(row)] = True
    return padded, asked


def gradients(model, scores, weights):
    model.zero_grad()
    ((scores.logprobs * weights).sum() + 0.3 * scores.entropy.sum()).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


MASKS = [*((name, 2**24) for name in sorted(PLANTED | {"gemma2"})), ("mistral", 200), ("qwen3", 200)]


@pytest.mark.parametrize(("name", "max_mask"), MASKS)
def test_packed_prefixes_match_padded_rows_in_scores_and_gradients(name, max_mask, monkeypatch):
    monkeypatch.setattr(prefix_packing, "MAX_MASK", max_mask)
    model = in_double(families()[name]).train()
    scorer = LogprobScorer(model, temperature=0.8)
    assert scorer.shares_prefixes == (name in PLANTED)
    assert model.training
    tokens, asked = branching_rows()
    weights = torch.randn(tokens.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    planted = scorer.score(tokens, asked, "gradient")
    found = gradients(model, planted, weights)
    full = (model(input_ids=tokens).logits / 0.8).log_softmax(-1)
    picked = full[:, :-1].gather(2, tokens[:, 1:, None])[..., 0]
    spread = -(full[:, :-1].exp() * full[:, :-1]).sum(-1)
    at = asked[:, 1:]
    torch.testing.assert_close(planted.logprobs[:, 1:][at], picked[at], atol=1e-10, rtol=0)
    torch.testing.assert_close(planted.entropy[:, 1:][at], spread[at], atol=1e-10, rtol=0)
    model.zero_grad()
    ((picked * weights[:, 1:])[at].sum() + 0.3 * spread[at].sum()).backward()
    for parameter_name, parameter in model.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(found[parameter_name], parameter.grad, atol=1e-10, rtol=0)


def test_sequences_with_packed_prefixes_do_not_attend_to_each_other():
    scorer = LogprobScorer(families()["qwen3"])
    tokens, asked = branching_rows()
    alone = [scorer.score(tokens[i : i + 1], asked[i : i + 1]).logprobs for i in range(len(tokens))]
    together = scorer.score(tokens, asked).logprobs
    torch.testing.assert_close(torch.cat(alone), together, atol=1e-5, rtol=0)
    tokens[0, 36:38] = 1
    changed = scorer.score(tokens, asked).logprobs
    assert not torch.equal(changed[0], together[0])
    torch.testing.assert_close(changed[1:], together[1:], atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    "forest", [pack_sequences([range(40)], CPU), pack_sequences([range(40), [*range(24), 9]], CPU)]
)
def test_attention_in_bfloat16_has_its_values_and_more_exact_gradients(forest, monkeypatch):
    draw = torch.Generator().manual_seed(0)
    made = [torch.randn(1, heads, forest.num_tokens, 16, generator=draw) for heads in (6, 2, 2)]
    upstream = torch.randn(1, forest.num_tokens, 6, 16, generator=draw).bfloat16()

    def attend(dtype, most):
        monkeypatch.setattr(prefix_packing, "MAX_WIDE", most)
        inputs = [x.bfloat16().to(dtype).requires_grad_() for x in made]
        out, _ = prefix_packing.forest_attention(torch.nn.Module(), *inputs, None, forest=replace(forest, masks={}))
        return out, torch.autograd.grad(out, inputs, upstream.to(dtype))

    _, exact = attend(torch.float64, 0)
    out, grads = attend(torch.bfloat16, 2**20)
    values, narrow = attend(torch.bfloat16, 0)
    assert torch.equal(out, values)
    for grad, other, true in zip(grads, narrow, exact, strict=True):
        error = (grad - true).norm()
        assert error < 0.99 * (other - true).norm()
        assert error < 0.02 * true.norm()


def test_attention_in_bfloat16_supports_values_of_another_width():
    forest = pack_sequences([range(40), [*range(24), 9]], CPU)
    query, key, value = (
        torch.ones(1, 2, forest.num_tokens, width).bfloat16().requires_grad_() for width in (16, 16, 8)
    )
    out, _ = prefix_packing.forest_attention(torch.nn.Module(), query, key, value, None, forest=forest)
    out.sum().backward()
    assert out.shape == (1, forest.num_tokens, 2, 8)
    torch.testing.assert_close(value.grad.sum(), torch.tensor(out.numel()).bfloat16(), rtol=0.02, atol=0)


def test_attention_without_packed_prefixes_is_unchanged():
    model = families()["llama"].double()
    tokens, _ = branching_rows()
    before = model(input_ids=tokens).logits
    LogprobScorer(model)
    assert torch.equal(model(input_ids=tokens).logits, before)
    mask = torch.ones_like(tokens)
    mask[:, :4] = 0
    other = LlamaForCausalLM(model.config)
    other.load_state_dict(model.state_dict())
    other.double().set_attn_implementation("sdpa")
    theirs = other(input_ids=tokens, attention_mask=mask).logits[:, 4:]
    assert torch.equal(model(input_ids=tokens, attention_mask=mask).logits[:, 4:], theirs)


@pytest.mark.parametrize("entropy", ["none", "value", "gradient"])
@pytest.mark.parametrize(("rows", "near"), [(1, 100), (3, 22), (100, 33), (100, 500), (None, 100)])
def test_chunked_output_layer_matches_unchunked_values_and_gradients(rows, near, entropy, monkeypatch):
    monkeypatch.setattr(chunked_lm_head, "_NEAR_LOGITS", near)
    draw = torch.Generator().manual_seed(0)
    hidden, weight, bias = (
        torch.randn(*shape, generator=draw, dtype=torch.float64, requires_grad=True)
        for shape in ((8, 6), (11, 6), (11,))
    )
    targets = torch.randint(0, 11, (8,), generator=draw)
    with torch.no_grad():
        bias[4] = -torch.inf  # a token that cannot be
    targets[targets == 4] = 5
    head = LmHead(weight, bias, 0.7)

    def total(scores):
        parts = (scores.logprobs * torch.arange(8)).sum()
        return parts if entropy != "gradient" else parts + (scores.entropy * torch.arange(8).flip(0)).sum()

    chunked = head.score(hidden, targets, entropy, rows=rows)
    whole = logits_to_scores(head.logits(hidden), targets, entropy)
    if entropy == "value":
        whole = whole._replace(entropy=whole.entropy.detach())
    torch.testing.assert_close(chunked.logprobs, whole.logprobs, atol=1e-12, rtol=0)
    if entropy == "none":
        assert chunked.entropy is whole.entropy is None
    else:
        torch.testing.assert_close(chunked.entropy, whole.entropy, atol=1e-12, rtol=0)
        assert chunked.entropy.requires_grad == whole.entropy.requires_grad == (entropy == "gradient")
    parameters = (hidden, weight, bias)
    expected = torch.autograd.grad(total(whole), parameters)
    for got, wanted in zip(torch.autograd.grad(total(chunked), parameters), expected, strict=True):
        torch.testing.assert_close(got, wanted, atol=1e-12, rtol=0)


@pytest.mark.parametrize("rows", [2, None])
def test_output_layer_passes_gradcheck(rows):
    draw = torch.Generator().manual_seed(0)
    inputs = [torch.randn(*s, generator=draw, dtype=torch.float64) for s in ((5, 3), (7, 3), (7,))]
    inputs = [tensor.requires_grad_() for tensor in inputs]
    targets = torch.randint(0, 7, (5,), generator=draw)

    def both(hidden, weight, bias):
        scores = LmHead(weight, bias, 1.3).score(hidden, targets, "value", rows=rows)
        return scores.logprobs if rows is None else scores.logprobs[:3]

    assert torch.autograd.gradcheck(both, inputs)


def test_output_layer_entropy_passes_gradcheck():
    draw = torch.Generator().manual_seed(0)
    inputs = [torch.randn(*s, generator=draw, dtype=torch.float64) for s in ((5, 3), (7, 3), (7,))]
    inputs = [tensor.requires_grad_() for tensor in inputs]
    targets = torch.randint(0, 7, (5,), generator=draw)

    def both(hidden, weight, bias):
        scores = LmHead(weight, bias, 1.3).score(hidden, targets, "gradient", rows=2)
        return scores.logprobs, scores.entropy

    assert torch.autograd.gradcheck(both, inputs)


def test_entropy_ignores_tokens_with_minus_infinite_logits():
    logits = torch.tensor([[0.0, 0.0, -torch.inf]], dtype=torch.float64, requires_grad=True)
    scores = logits_to_scores(logits, torch.tensor([1]), "gradient")
    torch.testing.assert_close(scores.entropy, torch.full((1,), 2.0, dtype=torch.float64).log())
    scores.entropy.sum().backward()
    assert logits.grad.isfinite().all()


def row(tokens):
    num = len(tokens)
    return Row(tuple(tokens), (True,) * num, (True,) * num, (0.0,) * num, (1.0,) * num)


def test_rows_with_shared_prefixes_are_batched_together_and_counted_once():
    prompts = [list(range(30)), list(range(40, 70))]
    rows = [row([*prompts[i % 2], *([i] * 10)]) for i in range(16)]
    parts = microbatches(rows, 120, CPU, torch.float32)
    assert sorted(i for part in parts for i in part.index) == list(range(16))
    assert len(parts) == 2
    assert [{i % 2 for i in part.index} for part in parts] == [{0}, {1}]
    assert len(microbatches(rows, 120, CPU, torch.float32, shared=False)) == 6
    for part in microbatches(rows, 45, CPU, torch.float32):
        forest = pack_sequences([rows[i].tokens for i in part.index], CPU)
        assert forest.num_tokens <= 45


def test_microbatches_have_about_equal_size():
    rows = [row([i] * 10) for i in range(12)]
    sizes = [len(part.index) for part in microbatches(rows, 100, CPU, torch.float32)]
    assert sizes == [6, 6]


@given(families_of_sequences())
def test_common_prefix_equals_a_reference_loop(sequences):
    for left, right in zip(sequences, sequences[1:] + sequences[:1], strict=True):
        pairs = zip(left, right, strict=False)
        expected = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(left), len(right)))
        assert common_prefix(left, right) == common_prefix(list(left), right) == expected
