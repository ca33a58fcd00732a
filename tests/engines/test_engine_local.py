"""The embedded engine on tiny random models of nine families, against plain Hugging Face forward passes."""

import asyncio
import copy
import dataclasses
import random
import resource
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PhiConfig,
    PhiForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from ludus.engines.base import Request, check_params
from ludus.engines.embedded.engine import EngineSettings, LocalEngine
from ludus.engines.embedded.kv_cache import LayerShape, PagePool
from ludus.engines.embedded.model_runner import RaggedForward
from ludus.engines.embedded.sampler import StopStrings
from ludus.engines.models import fingerprint
from ludus.engines.models.fingerprint import fingerprint_module
from ludus.errors import EngineError, RequestRejected, SyncError, UserError
from ludus.types import SamplingParams
from waiting import until

VOCAB = 300
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
}


def qwen3():
    return Qwen3ForCausalLM(Qwen3Config(**SHAPE, num_key_value_heads=2, head_dim=8, tie_word_embeddings=True))


def llama():
    return LlamaForCausalLM(LlamaConfig(**SHAPE, num_key_value_heads=4))


def neox():
    return GPTNeoXForCausalLM(GPTNeoXConfig(**SHAPE))


def gemma3():
    """Layers of sliding-window and of full attention, with a window shorter than the histories below."""
    kinds = ["sliding_attention", "full_attention"]
    return Gemma3ForCausalLM(
        Gemma3TextConfig(**SHAPE, num_key_value_heads=1, head_dim=8, layer_types=kinds, sliding_window=12)
    )


def mistral():
    """All layers with a window of 12 tokens."""
    return MistralForCausalLM(MistralConfig(**SHAPE, num_key_value_heads=2, sliding_window=12))


def qwen2():
    """Query, key and value with biases, and grouped heads."""
    model = Qwen2ForCausalLM(Qwen2Config(**SHAPE, num_key_value_heads=2))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("_proj.bias"):
                parameter.normal_(std=0.5)
    return model


def phi():
    """Attention and MLP side by side, biases, and positions in half of each head."""
    return PhiForCausalLM(PhiConfig(**SHAPE, num_key_value_heads=2, partial_rotary_factor=0.5))


def phi3():
    """One matrix for query, key and value; positions in three quarters of each head."""
    small = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    return Phi3ForCausalLM(Phi3Config(**SHAPE, **small, num_key_value_heads=2))


def gemma2():
    """Logits of attention and of the output are capped; every second layer has a window of 12 tokens."""
    return Gemma2ForCausalLM(
        Gemma2Config(
            **SHAPE,
            num_key_value_heads=2,
            head_dim=8,
            query_pre_attn_scalar=8,
            sliding_window=12,
            attn_logit_softcapping=2.0,
            final_logit_softcapping=5.0,
            attn_implementation="eager",
        )
    )


FAMILIES = (qwen3, llama, neox, gemma3, mistral, qwen2, phi, phi3, gemma2)


def build(family=qwen3, seed=0):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return family().eval()


def byte_tokenizer():
    """One token per byte; no merges."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({character: index for index, character in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def sentencepiece_tokenizer():
    """Words and blanks as SentencePiece has them: decoding leaves out the first blank."""
    pieces = ["▁", "▁a", "a", "b", "▁b", ":", "x", "▁▁"]
    tokenizer = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def prompts(count, seed=0, low=5, high=40):
    source = random.Random(seed)
    return [tuple(source.randrange(VOCAB) for _ in range(source.randint(low, high))) for _ in range(count)]


def ask(histories, turn=0, **params):
    return [
        Request(f"e{row}", history, SamplingParams(seed=100 * row + turn, **params))
        for row, history in enumerate(histories)
    ]


def play(engine, histories, turns, **params):
    """Several turns with observations of unlike length: per turn the histories and the completions."""
    source = random.Random(9)

    async def run():
        played, current = [], list(histories)
        for turn in range(turns):
            answers = await engine.generate_batch(ask(current, turn, **params))
            played += list(zip(current, answers, strict=True))
            current = [
                history + answer.tokens + tuple(source.randrange(VOCAB) for _ in range(source.randint(1, 9)))
                for history, answer in zip(current, answers, strict=True)
            ]
        return played

    return asyncio.run(run())


def batch(engine, requests):
    return asyncio.run(engine.generate_batch(requests))


def fresh_logprobs(model, history, action, temperature=1.0):
    with torch.no_grad():
        logits = model(torch.tensor([history + action])).logits[0, len(history) - 1 : -1]
    logprobs = (logits.double() / temperature).log_softmax(-1)
    return logprobs.gather(1, torch.tensor(action)[:, None])[:, 0]


def hf_greedy(model, history, count):
    output = model.generate(
        torch.tensor([history]),
        attention_mask=torch.ones(1, len(history), dtype=torch.int64),
        max_new_tokens=count,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return tuple(output[0, len(history) :].tolist())


@pytest.mark.parametrize("family", FAMILIES)
def test_recorded_log_probabilities_match_a_fresh_forward_over_ragged_turns(family):
    model = build(family)
    engine = LocalEngine(model, settings=EngineSettings(pass_tokens=64))
    played = play(engine, prompts(5), turns=3, max_new_tokens=8, temperature=0.8, stop_token_ids=tuple(range(60)))
    assert len({len(answer.tokens) for _, answer in played}) > 2
    assert engine.stats().cached_tokens > 0
    worst = 0.0
    for history, answer in played:
        expected = fresh_logprobs(model, history, answer.tokens, 0.8)
        worst = max(worst, float((torch.tensor(answer.logprobs, dtype=torch.float64) - expected).abs().max()))
    assert worst < 1e-4


ROPE = {
    "linear": {"factor": 2.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 64},
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64},
    "dynamic": {"factor": 2.0},
    "longrope": {
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "short_factor": [1.0] * 4,
        "long_factor": [2.0] * 4,
    },
}


def with_rope(kind):
    rope = {"rope_type": kind, "rope_theta": 10_000.0} | ROPE[kind]
    return LlamaForCausalLM(LlamaConfig(**SHAPE, num_key_value_heads=2, rope_parameters=rope))


@pytest.mark.parametrize("kind", ["linear", "yarn", "llama3"])
def test_greedy_tokens_with_rope_variants_match_hugging_face(kind):
    model = build(lambda: with_rope(kind))
    engine = LocalEngine(model)
    for history, answer in play(engine, prompts(3, low=60, high=90), turns=2, max_new_tokens=6, temperature=0):
        assert answer.tokens == hf_greedy(model, history, 6)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_length_dependent_rope_is_rejected_beyond_its_original_context(kind):
    model = build(lambda: with_rope(kind))
    limit = 256 if kind == "dynamic" else 64
    with pytest.raises(UserError, match=rf"beyond {limit}, its positions depend .* \({kind} rope\)"):
        LocalEngine(model, settings=EngineSettings(context_tokens=limit + 1))
    engine = LocalEngine(model, settings=EngineSettings(context_tokens=limit))
    (history,) = prompts(1, low=40, high=50)
    (answer,) = batch(engine, ask([history], max_new_tokens=6, temperature=0))
    assert answer.tokens == hf_greedy(model, history, 6)


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=pytest.mark.slow if i % 3 else []) for i, name in enumerate(FAMILIES)]
)
def test_batched_greedy_tokens_match_unbatched_hugging_face(family):
    model = build(family)
    engine = LocalEngine(model)
    for history, answer in play(engine, prompts(3), turns=2, max_new_tokens=8, temperature=0):
        assert answer.tokens == hf_greedy(model, history, 8)


def test_second_turn_prefills_only_new_tokens():
    model = build()
    engine = LocalEngine(model)
    histories = prompts(6, low=20)
    played = play(engine, histories, turns=2, max_new_tokens=7, temperature=0)
    stats = engine.stats()
    first, second = played[:6], played[6:]
    # The last token of each action was never fed back, so it is computed with the observation.
    kept = sum(len(history) + len(answer.tokens) - 1 for history, answer in first)
    assert stats.cached_tokens == kept
    assert stats.prefill_tokens == sum(map(len, histories)) + sum(len(h) for h, _ in second) - kept
    assert stats.decode_tokens == sum(len(answer.tokens) for _, answer in played)
    assert stats.steps < stats.decode_tokens
    for history, answer in second:
        (alone,) = batch(LocalEngine(model), ask([history], max_new_tokens=7, temperature=0))
        assert alone.tokens == answer.tokens
    assert engine.stats(reset=True).decode_tokens == stats.decode_tokens
    assert engine.stats().prefill_tokens == 0


def test_rewritten_history_reuses_only_the_common_prefix():
    model = build()
    engine = LocalEngine(model)
    history = prompts(1, low=40)[0]
    batch(engine, ask([history], max_new_tokens=5, temperature=0))
    changed = (*history[:25], (history[25] + 1) % VOCAB, *history[26:33])
    for asked, reused in ((changed, 25), (changed, 32), (history, 39)):
        engine.stats(reset=True)
        (answer,) = batch(engine, ask([asked], max_new_tokens=5, temperature=0))
        assert engine.stats().cached_tokens == reused
        assert answer.tokens == hf_greedy(model, asked, 5)
        expected = fresh_logprobs(model, asked, answer.tokens)
        assert (torch.tensor(answer.logprobs, dtype=torch.float64) - expected).abs().max() < 1e-4


def test_group_prompts_and_the_system_prompt_are_prefilled_once():
    model = build()
    engine = LocalEngine(model)
    system, tails = prompts(1, low=30, high=30)[0], prompts(3, seed=4, low=5, high=9)
    histories = [system + tail for tail in tails for _ in range(4)]
    answers = batch(engine, ask(histories, max_new_tokens=6))
    # Each member computes the last token of its prompt, whose logits it draws from.
    own = 3 * len(tails)
    assert engine.stats().prefill_tokens == len(system) + sum(map(len, tails)) + own
    assert engine.stats().cached_tokens == sum(map(len, histories)) - engine.stats().prefill_tokens
    for history, answer in zip(histories, answers, strict=True):
        expected = fresh_logprobs(model, history, answer.tokens)
        assert (torch.tensor(answer.logprobs, dtype=torch.float64) - expected).abs().max() < 1e-4
    assert len({answer.tokens for answer in answers}) > 6


def test_prompt_that_is_a_prefix_of_another_is_sampled_correctly():
    model = build()
    long = prompts(1, low=40)[0]
    histories = [long, long[:25], long[:26], (long[0],)]
    answers = batch(LocalEngine(model), ask(histories, max_new_tokens=6, temperature=0))
    assert [answer.tokens for answer in answers] == [hf_greedy(model, h, 6) for h in histories]


def test_an_evicted_episode_is_recomputed_with_the_same_tokens():
    model = build()
    roomy = LocalEngine(model)
    tight = LocalEngine(model, settings=EngineSettings(kv_cache_tokens=256, context_tokens=128))
    games = [play(e, prompts(6), turns=3, max_new_tokens=6, temperature=0) for e in (roomy, tight)]
    assert games[0] == games[1]
    assert roomy.stats().cached_tokens > tight.stats().cached_tokens
    assert tight.stats().evicted_pages > 0


def test_release_drops_the_cached_tokens_of_the_episode():
    engine = LocalEngine(build())
    history = prompts(1, low=30)[0]
    requests = ask([history], max_new_tokens=3)
    batch(engine, requests)
    engine.release("e0")
    batch(engine, requests)
    assert engine.stats().cached_tokens == 0
    batch(engine, requests)
    assert engine.stats().cached_tokens == len(history) - 1


def test_other_rows_do_not_change_greedy_or_sampled_tokens():
    model = build()
    histories = prompts(12)
    for temperature in (0.0, 1.0):
        requests = ask(histories, max_new_tokens=8, temperature=temperature)
        together = batch(LocalEngine(model), requests)
        split = batch(LocalEngine(model, settings=EngineSettings(max_batch=5)), requests)
        single = LocalEngine(model)
        alone = [batch(single, [request])[0] for request in requests]
        assert [a.tokens for a in together] == [a.tokens for a in split] == [a.tokens for a in alone]


def test_repeated_calls_on_new_engines_return_identical_bits():
    model = build()
    games = [
        play(LocalEngine(model), prompts(8), turns=3, max_new_tokens=9, top_k=50, stop_token_ids=tuple(range(30)))
        for _ in range(2)
    ]
    assert games[0] == games[1]


def test_a_batch_returns_the_same_bits_after_other_batches():
    engine = LocalEngine(build())
    requests = ask(prompts(8), max_new_tokens=20)
    first = batch(engine, requests)
    play(engine, prompts(20, seed=5), turns=2, max_new_tokens=30)
    for row in range(20):
        engine.release(f"e{row}")
    assert batch(engine, requests) == first


def test_stop_token_ends_the_action_and_is_included_in_it():
    engine = LocalEngine(build())
    (history,) = prompts(1)
    (free,) = batch(engine, ask([history], max_new_tokens=12))
    stop = free.tokens[5]
    (stopped,) = batch(engine, ask([history], max_new_tokens=12, stop_token_ids=(stop, VOCAB - 1)))
    assert stopped.tokens == free.tokens[: free.tokens.index(stop) + 1]
    assert (stopped.finish_reason, free.finish_reason) == ("stop", "length")
    assert len(stopped.logprobs) == len(stopped.versions) == len(stopped.tokens)


def test_stop_string_ends_the_action_after_its_completing_token():
    tokenizer = byte_tokenizer()
    engine = LocalEngine(build(), tokenizer)
    requests = ask(prompts(6), max_new_tokens=40)
    answers = batch(engine, requests)
    row, stop = next(
        (row, text)
        for row, answer in enumerate(answers)
        for start in range(3, 37)
        if (text := tokenizer.decode(answer.tokens[start : start + 2])).isascii() and len(text) == 2
    )
    tokens = answers[row].tokens
    params = dataclasses.replace(requests[row].params, stop=("never there", stop))
    (stopped,) = batch(engine, [dataclasses.replace(requests[row], params=params)])
    end = next(n for n in range(1, 41) if stop in tokenizer.decode(tokens[:n]))
    assert stopped.tokens == tokens[:end]
    assert stopped.finish_reason == "stop"


@pytest.mark.parametrize("stop", ["</a>", "b", "ö", "x ö</"])
def test_stop_string_is_detected_at_the_token_that_completes_it(stop):
    tokenizer = byte_tokenizer()
    tokens = tokenizer.encode("<a>x ö</a> b", add_special_tokens=False)
    watch = StopStrings(tokenizer, ("never", stop))
    found = [n for n in range(1, len(tokens) + 1) if watch.completed(tokens[:n])]
    assert found[0] == next(n for n in range(1, 99) if stop in tokenizer.decode(tokens[:n]))


@pytest.mark.parametrize(
    ("pieces", "stop"),
    [
        (["a", "▁", "b"], "a "),
        (["▁a", ":", "▁", "x"], ": "),
        (["a", "▁b", "x"], "a "),
        (["a", ":", "▁▁", "x"], ":  "),
        (["x"] * 9 + ["▁", "b"], " "),
        (["x"] * 9 + ["▁b", "b"], " b"),
    ],
)
def test_stop_string_ending_in_a_space_is_detected_with_sentencepiece(pieces, stop):
    tokenizer = sentencepiece_tokenizer()
    tokens = tokenizer.convert_tokens_to_ids(pieces)
    assert tokenizer.decode(tokenizer.convert_tokens_to_ids(["▁"])) == ""
    watch = StopStrings(tokenizer, (stop,))
    found = [n for n in range(1, len(tokens) + 1) if watch.completed(tokens[:n])]
    assert found[0] == next(n for n in range(1, 99) if stop in tokenizer.decode(tokens[:n]))


def test_stop_string_cache_is_limited_to_64_entries():
    engine = LocalEngine(build(), byte_tokenizer())
    for number in range(100):
        batch(engine, ask([(1, 2, 3)], max_new_tokens=1, stop=(f"x{number}",)))
    assert engine._scheduler._stop_strings.cache_info().currsize == 64


def test_context_limit_bounds_prompt_and_completion_length():
    engine = LocalEngine(build(), settings=EngineSettings(context_tokens=32))
    short, long = (1,) * 10, (2,) * 29
    answers = batch(engine, ask([short, long], max_new_tokens=50))
    assert [len(answer.tokens) for answer in answers] == [22, 3]
    assert {answer.finish_reason for answer in answers} == {"length"}
    with pytest.raises(EngineError, match="prompt of 32 tokens"):
        batch(engine, ask([(1,) * 32], max_new_tokens=1))
    with pytest.raises(EngineError, match="prompt of 33 tokens"):
        asyncio.run(engine.generate(ask([(1,) * 33], max_new_tokens=1)[0]))


@pytest.mark.slow
def test_completions_beyond_the_initial_buffers_match_hugging_face():
    model = build()
    histories = prompts(3, high=10)
    answers = batch(LocalEngine(model), ask(histories, max_new_tokens=135, temperature=0))
    assert [answer.tokens for answer in answers] == [hf_greedy(model, h, 135) for h in histories]


@pytest.mark.parametrize(
    ("tokens", "params", "message"),
    [
        ((), {}, "prompt of 0 tokens"),
        ((1, VOCAB), {}, "outside the model's vocabulary"),
        ((1, -1), {}, "outside the model's vocabulary"),
        ((1,), {"max_new_tokens": 0}, "max_new_tokens"),
        ((1,), {"stop": ("x",)}, "tokenizer"),
    ],
)
def test_invalid_requests_raise_engine_error(tokens, params, message):
    with pytest.raises(EngineError, match=message):
        batch(LocalEngine(build()), ask([tokens], **params))


def test_new_weights_change_output_version_and_fingerprint_and_clear_caches():
    old, new = build(seed=0), build(seed=1)
    engine = LocalEngine(old)
    histories = prompts(3, low=20)

    async def run():
        before = await engine.generate_batch(ask(histories, max_new_tokens=6, temperature=0))
        assert await engine.fingerprint() == fingerprint_module(old)
        await engine.load_weights(7, dict(new.named_parameters()))
        engine.stats(reset=True)
        after = await engine.generate_batch(ask(histories, max_new_tokens=6, temperature=0))
        assert await engine.fingerprint() == fingerprint_module(new) != fingerprint_module(old)
        return before, after

    before, after = asyncio.run(run())
    assert engine.version == 7
    assert engine.stats().cached_tokens == 0
    assert {version for answer in before for version in answer.versions} == {0}
    assert {version for answer in after for version in answer.versions} == {7}
    assert [a.tokens for a in before] != [a.tokens for a in after]
    assert [a.tokens for a in after] == [hf_greedy(new, h, 6) for h in histories]


def test_engine_copies_the_model_weights():
    model = build()
    engine = LocalEngine(model)
    before = asyncio.run(engine.fingerprint())
    with torch.no_grad():
        next(model.parameters()).add_(1.0)
    assert asyncio.run(engine.fingerprint()) == before
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_load_weights_accepts_partial_states_and_rejects_unknown_tensors():
    model = build()
    engine = LocalEngine(model)
    name = "model.norm.weight"
    start = asyncio.run(engine.fingerprint())
    good = {name: torch.full((32,), 2.0)}
    for state, message in (
        ({**good, "model.nrom.weight": torch.ones(32)}, "model.nrom.weight"),
        ({**good, "lm_head.weight": torch.ones(VOCAB, 31)}, "shape"),
        ({}, "no tensors"),
    ):
        with pytest.raises(SyncError, match=message):
            asyncio.run(engine.load_weights(3, state))
        assert asyncio.run(engine.fingerprint()) == start
        assert engine.version == 0
    asyncio.run(engine.load_weights(3, good))
    expected = copy.deepcopy(model)
    expected.load_state_dict(good, strict=False)
    assert asyncio.run(engine.fingerprint()) == fingerprint_module(expected)


def test_load_weights_accepts_a_state_of_adapter_tensors_alone():
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False)
    with torch.random.fork_rng():
        torch.manual_seed(5)
        learner, other = (peft.get_peft_model(build(), lora) for _ in range(2))
    engine = LocalEngine(learner)
    adapters = {name: p.detach() for name, p in other.named_parameters() if p.requires_grad}
    assert 0 < len(adapters) < len(dict(other.named_parameters()))
    asyncio.run(engine.load_weights(1, adapters))
    assert asyncio.run(engine.fingerprint()) == fingerprint_module(other) != fingerprint_module(learner)
    for history, answer in play(engine, prompts(3), turns=2, max_new_tokens=5):
        expected = fresh_logprobs(other.eval(), history, answer.tokens)
        assert (torch.tensor(answer.logprobs, dtype=torch.float64) - expected).abs().max() < 1e-4


def test_fingerprint_detects_a_one_bit_change_and_a_dtype_change():
    model = build()
    start = fingerprint_module(model)
    changed = copy.deepcopy(model)
    with torch.no_grad():
        changed.model.norm.weight[3] = torch.nextafter(changed.model.norm.weight[3], torch.tensor(9.0))
    assert fingerprint_module(changed) != start
    assert fingerprint_module(copy.deepcopy(model).bfloat16()) != start
    assert fingerprint_module(copy.deepcopy(model)) == start


def test_fingerprint_rereads_frozen_parameters_only_after_they_change(monkeypatch):
    model, read = build().requires_grad_(False), []
    raw = fingerprint._raw_bytes
    monkeypatch.setattr(fingerprint, "_raw_bytes", lambda tensor: read.append(tensor) or raw(tensor))
    start, num = fingerprint_module(model), len(dict(model.named_parameters()))
    assert fingerprint_module(model) == start
    assert len(read) == num
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            model.model.norm.weight[3] += 1.0
        assert fingerprint_module(model) != start
    assert len(read) == num + 2
    model.model.norm.weight = torch.nn.Parameter(model.model.norm.weight.clone(), requires_grad=False)
    fingerprint_module(model)
    assert len(read) == num + 3
    fingerprint_module(model.requires_grad_(True))
    assert len(read) == 2 * num + 3


def test_fingerprint_of_tensors_hashed_in_chunks_detects_a_change_in_each_chunk(monkeypatch):
    model = build()
    whole = fingerprint_module(model)
    monkeypatch.setattr(fingerprint, "_CHUNK_BYTES", 1024)
    digests = {fingerprint_module(model)}
    weight = model.model.embed_tokens.weight.detach().view(-1)
    for at in range(0, weight.numel(), 256):  # 1,024 bytes
        weight[at] += 1.0
        digests.add(fingerprint_module(model))
    assert len(digests) == 1 + -(-weight.numel() // 256)
    assert whole not in digests
    assert fingerprint_module(copy.deepcopy(model)) == fingerprint_module(model)


def test_nan_weights_raise_error_and_later_valid_weights_work():
    model = build()
    engine = LocalEngine(model)
    requests = ask(prompts(4), max_new_tokens=5, temperature=0)
    good = batch(engine, requests)
    weights = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
    asyncio.run(engine.load_weights(1, {name: tensor * torch.nan for name, tensor in weights.items()}))
    with pytest.raises(EngineError, match="not finite"):
        batch(engine, ask(prompts(4, low=60, high=60), max_new_tokens=5))
    asyncio.run(engine.load_weights(2, weights))
    assert [a.tokens for a in batch(engine, requests)] == [a.tokens for a in good]


def test_score_is_the_log_probability_of_each_token():
    model = build()
    engine = LocalEngine(model)
    (tokens,) = prompts(1, low=12)
    scores = asyncio.run(engine.score(tokens))
    expected = fresh_logprobs(model, tokens[:1], tokens[1:])
    assert scores[0] == 0.0
    assert scores[1:] == pytest.approx(expected.tolist(), abs=1e-5)
    with pytest.raises(EngineError, match="cannot be scored"):
        asyncio.run(engine.score(()))


def test_concurrent_generate_calls_each_return_their_own_tokens():
    model = build()
    engine = LocalEngine(model, settings=EngineSettings(max_batch=8))
    requests = ask(prompts(20), max_new_tokens=6, temperature=0)

    async def run():
        return await asyncio.gather(*(engine.generate(request) for request in requests))

    answers = asyncio.run(run())
    assert [a.tokens for a in answers] == [hf_greedy(model, r.token_ids, 6) for r in requests]
    assert [a.tokens for a in asyncio.run(run())] == [a.tokens for a in answers]


@pytest.mark.parametrize("under_way", [False, True])
def test_a_cancelled_request_does_not_disturb_the_others(under_way):
    engine = LocalEngine(build(), settings=EngineSettings(draft_tokens=0))
    requests = ask(prompts(4), max_new_tokens=30, temperature=0)
    expected = batch(engine, requests)
    engine.stats(reset=True)

    async def run():
        if not under_way:
            await engine.pause()
        tasks = [asyncio.create_task(engine.generate(request)) for request in requests]
        await asyncio.sleep(0)
        await until(lambda: not under_way or engine.stats().decode_tokens > 0)
        tasks[1].cancel()
        await engine.resume()
        return await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 10)

    answers = asyncio.run(run())
    assert isinstance(answers[1], asyncio.CancelledError)
    assert engine.stats().decode_tokens < 4 * 30
    for row in (0, 2, 3):
        assert answers[row].tokens == expected[row].tokens


@pytest.mark.parametrize("kind", [RuntimeError, IndexError])
def test_failed_compute_reaches_every_waiting_request(kind, monkeypatch):
    engine = LocalEngine(build())

    def fail(*arguments):
        raise kind("out of memory")

    monkeypatch.setattr(engine._forward, "logits", fail)

    async def run():
        requests = ask(prompts(3), max_new_tokens=2)
        waiting = asyncio.gather(*(engine.generate(r) for r in requests), return_exceptions=True)
        return await asyncio.wait_for(waiting, 10)

    errors = asyncio.run(run())
    assert [type(error) for error in errors] == [EngineError] * 3
    assert "out of memory" in str(errors[0])
    monkeypatch.undo()
    assert len(batch(engine, ask(prompts(3), max_new_tokens=2))) == 3


ODD_NUMBERS = [
    ("temperature", 1e-320),
    ("temperature", float("nan")),
    ("temperature", float("inf")),
    ("temperature", -1.0),
    ("top_k", 10**30),
    ("top_k", 2**63),
    ("top_k", -1),
    ("top_p", 0.0),
    ("min_p", float("nan")),
    ("max_new_tokens", 10**30),
    ("top_logprobs", 2**63),
]


@pytest.mark.parametrize(("name", "value"), ODD_NUMBERS)
def test_out_of_range_sampling_parameters_raise_request_rejected(name, value):
    with pytest.raises(RequestRejected, match=f"{name} is .*; it must be "):
        check_params(SamplingParams(**{name: value}))


def test_failing_request_leaves_other_requests_of_the_batch_bitwise_unchanged(monkeypatch):
    """Past the door: in the sampling, in the forward pass, and in what looks for the end of an action."""
    engine = LocalEngine(build(), byte_tokenizer(), EngineSettings(max_batch=8))
    good = ask(prompts(3), max_new_tokens=12, top_k=20)
    expected = batch(engine, good)
    monkeypatch.setattr("ludus.engines.base.check_params", lambda params: None)
    bad = [
        Request("bad", (1, 2, 3), SamplingParams(temperature=1e-320, max_new_tokens=5)),
        Request("bad", (1, 2, 3), SamplingParams(temperature=0.5, top_p=float("nan"), seed=-(10**30))),
        Request("bad", (299, 298), SamplingParams(max_new_tokens=5)),
        Request("bad", (1, 2, 4), SamplingParams(max_new_tokens=5, stop=("x",))),
    ]
    forward = engine._forward.logits

    def logits(chunks, *rest):
        if any(chunk.ids == (299, 298) for chunk in chunks):
            raise IndexError("out of range")
        return forward(chunks, *rest)

    def completed(self, tokens):
        raise ValueError("no text")

    monkeypatch.setattr(engine._forward, "logits", logits)
    monkeypatch.setattr(StopStrings, "completed", completed)

    async def run(odd):
        tasks = [asyncio.create_task(engine.generate(request)) for request in (*good, odd)]
        return await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 20)

    for odd, words in zip(bad, ("not finite", None, "out of range", "no text"), strict=True):
        *answers, broken = asyncio.run(run(odd))
        assert answers == expected
        assert words is None or (isinstance(broken, EngineError) and words in str(broken))
    monkeypatch.undo()
    assert batch(engine, good) == expected


def test_closed_engine_raises_engine_error():
    engine = LocalEngine(build())
    asyncio.run(engine.close())
    engine.release("e0")
    with pytest.raises(EngineError, match="closed"):
        batch(engine, ask(prompts(1)))


def test_models_with_differing_cached_and_plain_passes_are_rejected():
    wrong = build(llama)
    wrong.forward = lambda input_ids, position_ids=None, **rest: LlamaForCausalLM.forward(
        wrong, input_ids=input_ids, **rest
    )  # a model that makes its own positions
    with pytest.raises(UserError, match="differ by"):
        RaggedForward(wrong, 64, 256, 1)
    assert wrong.config._attn_implementation == "sdpa"
    wrong.forward = lambda input_ids, **rest: LlamaForCausalLM.forward(
        wrong, input_ids=torch.randint_like(input_ids, VOCAB), use_cache=False
    )
    with pytest.raises(UserError, match=r"cannot run LlamaForCausalLM: cached and plain passes differ by"):
        LocalEngine(wrong, copy=False)


def test_float64_and_bfloat16_logprobs_match_a_fresh_forward():
    for dtype, limit in ((torch.float64, 1e-9), (torch.bfloat16, 0.3)):
        model = build().to(dtype)
        for history, answer in play(LocalEngine(model), prompts(4), turns=2, max_new_tokens=5):
            expected = fresh_logprobs(model, history, answer.tokens)
            assert (torch.tensor(answer.logprobs, dtype=torch.float64) - expected).abs().max() < limit


@pytest.mark.skipif(not Path("/proc/self/statm").is_file(), reason="the system does not tell memory this way")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_large_page_pool_allocates_no_memory_before_use(dtype):
    def resident() -> float:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**20

    before = resident()
    pool = PagePool([LayerShape(4, 64, 64)] * 2, 65_536 // 2, dtype, torch.device("cpu"))
    whole = sum(tensor.nbytes for tensor in (*pool.keys, *pool.values)) / 2**20
    assert whole >= 512
    assert resident() - before < whole / 20
    assert all(tensor.data_ptr() % 64 == 0 for tensor in (*pool.keys, *pool.values))
    pool.keys[1][5] = 2.0
    assert float(pool.keys[1][5:7].float().mean()) == 1.0
