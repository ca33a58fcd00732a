"""Features of requests: truncated sampling, guided decoding, adapters, deadlines, and refused requests."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace

import pytest
import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from transformers import Qwen3Config, Qwen3ForCausalLM

from ludus.chat.parse_json import hermes_guide
from ludus.engines.base import BASE, Request, copies
from ludus.engines.embedded.engine import EngineSettings, LocalEngine
from ludus.engines.embedded.sampler import GuideCompiler, SamplingRules, sample
from ludus.engines.models.loading import load_model, load_tokenizer
from ludus.errors import EngineBusy, EngineError, RequestRejected, SyncError
from ludus.training.run.preflight import model_path
from ludus.types import Guide, SamplingParams
from small_runs import config
from waiting import until

VOCAB = 300
SMALL = EngineSettings(context_tokens=256, max_batch=32, kv_cache_tokens=4096, pass_tokens=64)
CPU = torch.device("cpu")


def build(seed=0):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Qwen3ForCausalLM(
            Qwen3Config(
                vocab_size=VOCAB,
                hidden_size=32,
                intermediate_size=48,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=2,
                head_dim=8,
                initializer_range=0.3,
            )
        ).eval()


def adapted(model, seed, rank=4, alpha=8):
    """A PEFT model around a copy, with random factors."""
    import copy

    made = get_peft_model(
        copy.deepcopy(model), LoraConfig(r=rank, lora_alpha=alpha, target_modules=["q_proj", "down_proj"])
    ).eval()
    source = torch.Generator().manual_seed(seed)
    for name, parameter in made.named_parameters():
        if "lora_" in name:
            parameter.data = torch.randn(parameter.shape, generator=source) * 0.2
    return made


def with_engine(model, work, tokenizer=None, settings=SMALL):
    async def run():
        engine = LocalEngine(model, tokenizer, settings)
        try:
            return await work(engine)
        finally:
            await engine.close()

    return asyncio.run(run())


@torch.no_grad()
def reference_logprobs(model, tokens, temperature=1.0):
    """Of a plain forward pass: of each token given those before it, from the second on; and all rows."""
    logprobs = (model(torch.tensor([list(tokens)])).logits[0] / temperature).double().log_softmax(-1)
    return logprobs[:-1].gather(1, torch.tensor(list(tokens)[1:])[:, None])[:, 0], logprobs


def cut_by_hand(probs, top_k=0, top_p=1.0, min_p=0.0):
    """Token by token, as the definitions say."""
    kept = sorted(range(len(probs)), key=lambda i: (-probs[i], i))
    kept = kept[: top_k or len(kept)]
    total, nucleus, reached = sum(probs[i] for i in kept), [], 0.0
    for i in kept:
        if reached >= top_p:
            break
        nucleus.append(i)
        reached += probs[i] / total
    kept = [i for i in nucleus if probs[i] >= min_p * probs[nucleus[0]]]
    share = sum(probs[i] for i in kept)
    return {i: probs[i] / share for i in kept}


@pytest.mark.parametrize(
    "cuts", [{"min_p": 0.3}, {"top_k": 7}, {"top_p": 0.6}, {"top_k": 20, "top_p": 0.9, "min_p": 0.1}]
)
def test_logprobs_and_cut_logprobs_match_their_distributions(cuts):
    logits = torch.randn(1, 40, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    probs = (logits[0] / 0.8).softmax(-1)
    expected = cut_by_hand(probs.tolist(), **cuts)
    seen = set()
    for seed in range(300):
        params = SamplingParams(temperature=0.8, seed=seed, **cuts)
        drawn = sample(logits, SamplingRules.of([params], 40, CPU), 0)
        token = int(drawn.tokens[0])
        seen.add(token)
        assert float(drawn.logprobs[0].exp()) == pytest.approx(float(probs[token]), rel=1e-12)
        assert float(drawn.cut_logprobs[0].exp()) == pytest.approx(expected[token], rel=1e-12)
    assert seen <= set(expected)
    assert len(seen) > 0.6 * len(expected)


def test_row_without_cuts_is_bitwise_unchanged_beside_rows_with_cuts():
    logits = torch.randn(2, 40, generator=torch.Generator().manual_seed(4))
    plain, cut = SamplingParams(seed=1), SamplingParams(seed=2, top_k=3, min_p=0.1)
    for step in range(50):
        both = sample(logits, SamplingRules.of([plain, cut], 40, CPU), step)
        alone = sample(logits[:1], SamplingRules.of([plain], 40, CPU), step)
        assert both.tokens[0] == alone.tokens[0]
        assert both.cut_logprobs[0] == both.logprobs[0] == alone.logprobs[0]


def test_cut_logprobs_are_returned_only_for_requests_with_cuts():
    model = build()
    base = Request("a", (5, 6, 7), SamplingParams(seed=3, max_new_tokens=20))
    cut = replace(base, episode="b", params=replace(base.params, min_p=0.2))
    plain, less = with_engine(model, lambda e: e.generate_batch([base, cut]))
    assert plain.cut_logprobs == ()
    expected, _ = reference_logprobs(model, [5, 6, 7, *less.tokens])
    assert less.logprobs == pytest.approx(expected[2:].tolist(), abs=1e-4)
    assert all(a >= b for a, b in zip(less.cut_logprobs, less.logprobs, strict=True))
    assert less.cut_logprobs != less.logprobs


def test_copies_sample_differently_and_the_first_equals_the_request():
    request = Request("a", (5, 6, 7), SamplingParams(seed=3, max_new_tokens=20))
    asked = copies(request, 4)
    assert asked[0] == request
    answers = with_engine(build(), lambda e: e.generate_batch(asked))
    assert len({answer.tokens for answer in answers}) == 4
    assert answers[0] == with_engine(build(), lambda e: e.generate(request))


@pytest.fixture(scope="module")
def speaker(tmp_path_factory):
    """The small model of the recipe, which knows text, with its tokenizer."""
    path = model_path(config(tmp_path_factory.mktemp("x")))
    return load_model(path), load_tokenizer(path)


def say(speaker, guide, **params):
    model, tokenizer = speaker
    stop = tokenizer.convert_tokens_to_ids("<|im_end|>")
    ids = tuple(tokenizer.encode("Where is it?", add_special_tokens=False))
    request = Request("g", ids, SamplingParams(guide=guide, stop_token_ids=(stop,), **params))
    answer = with_engine(model, lambda e: e.generate(request), tokenizer)
    return answer, tokenizer.decode([t for t in answer.tokens if t != stop])


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_json_schema_guide_is_enforced_at_any_temperature(speaker, temperature):
    schema = {
        "type": "object",
        "properties": {"n": {"type": "integer", "minimum": 1, "maximum": 9}, "ok": {"type": "boolean"}},
        "required": ["n", "ok"],
        "additionalProperties": False,
    }
    guide = Guide("json_schema", json.dumps(schema))
    for seed in range(2):
        answer, text = say(speaker, guide, temperature=temperature, seed=seed, max_new_tokens=100)
        if answer.finish_reason == "stop":
            value = json.loads(text)
            assert set(value) == {"n", "ok"}
            assert 1 <= value["n"] <= 9
        assert len(answer.cut_logprobs) == len(answer.tokens)
    assert answer.finish_reason == "stop" or temperature > 0


def test_regex_guide_is_enforced_and_its_end_stops_the_action(speaker):
    answer, text = say(speaker, Guide("regex", "[0-9]{4}-[0-9]{2}"), seed=1, max_new_tokens=40)
    assert answer.finish_reason == "stop"
    assert len(text) == 7
    assert text[:4].isdigit()
    assert text[4] == "-"


def test_guided_action_returns_logprobs_of_the_guided_distribution(speaker):
    answer, _ = say(speaker, Guide("regex", "(yes|no)"), seed=1, max_new_tokens=10)
    assert sum(answer.cut_logprobs) > sum(answer.logprobs)
    assert sum(answer.cut_logprobs) <= 0


def test_invalid_guide_raises_engine_error(speaker):
    with pytest.raises(EngineError, match="json schema of the guide is invalid"):
        say(speaker, Guide("json_schema", '{"type": "nothing"}'))


def test_guide_compiler_cache_is_limited_to_128_entries(speaker):
    compiler = GuideCompiler(speaker[1])
    for number in range(200):
        compiler.start(Guide("regex", f"a{number}"), (1,))
    assert compiler._matcher.cache_info().currsize == 128
    compiler.start(Guide("regex", "a199"), (1,))
    assert compiler._matcher.cache_info().hits == 1


def test_tool_call_guide_accepts_only_declared_tools_and_valid_arguments(speaker):
    tokenizer = speaker[1]
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    function = {"name": "lookup", "description": "d", "parameters": parameters}
    schemas, added = [{"type": "function", "function": function}], tokenizer.get_added_vocab()
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")

    def taken(text, **options):
        state = GuideCompiler(tokenizer).start(hermes_guide(schemas, added, **options), (end,))
        for token in tokenizer.encode(text, add_special_tokens=False):
            if not state.allowed(len(tokenizer))[token]:
                return False
            state.advance(token)
        return bool(state.allowed(len(tokenizer))[end])

    call = '<tool_call>\n{"name": "lookup", "arguments": {"city": "Rome"}}\n</tool_call>'
    assert taken("no call at all")
    assert taken(f"First this.\n{call}")
    assert taken(f"{call}\n{call}")
    assert not taken(call.replace("lookup", "search"))
    assert not taken(call.replace('"Rome"', "7"))
    assert not taken(call.replace("city", "town"))
    assert not taken(call.replace("</tool_call>", ""))
    assert taken(f"First this.\n{call}", single=True)
    assert taken("no call at all", single=True)
    assert not taken(f"{call}\n{call}", single=True)

    for single in (False, True):
        options = {"required": True, "single": single}
        assert taken(call, **options)
        assert taken(f"<think>\nFirst this.\n</think>\n\n{call}\n", **options)
        assert taken(f"{call}\n{call}", **options) is not single
        assert not taken("no call at all", **options)
        assert not taken(f"First this.\n{call}", **options)
        assert not taken(f"{call}\nDone.", **options)


def test_concurrent_adapters_return_the_same_as_each_alone():
    base = build()
    one, two = adapted(base, 1), adapted(base, 2, rank=2)
    prompt = (5, 6, 7, 8, 9) * 5

    async def work(engine):
        for name, made in (("one", one), ("two", two)):
            config = made.peft_config["default"]
            await engine.load_adapter(name, 7, get_peft_model_state_dict(made), config.lora_alpha / config.r)
        params = SamplingParams(temperature=0, max_new_tokens=12)
        asked = [Request(str(i), prompt, params, adapter=a) for i, a in enumerate(("one", "two", BASE, None))]
        together = await engine.generate_batch(asked)
        scored = [await engine.score(prompt, adapter=r.adapter) for r in asked]
        apart = []
        for request in asked:
            engine.release(request.episode)
            apart.append(await engine.generate(replace(request, episode="again" + request.episode)))
        return together, scored, apart

    together, scored, apart = with_engine(base, work)
    for made, answer, scores in zip((one, two, base, base), together, scored, strict=True):
        expected, rows = reference_logprobs(made, [*prompt, *answer.tokens])
        assert answer.logprobs == pytest.approx(expected[len(prompt) - 1 :].tolist(), abs=1e-4)
        assert scores[1:] == pytest.approx(expected[: len(prompt) - 1].tolist(), abs=1e-4)
        best = rows[len(prompt) - 1 : -1].argmax(-1).tolist()
        assert list(answer.tokens) == best
    assert [a.tokens for a in together] == [a.tokens for a in apart]
    assert [a.logprobs for a in together] == [a.logprobs for a in apart]
    assert together[0].versions[0] == 7
    assert together[2].versions[0] == 0
    assert together[2].tokens == together[3].tokens != together[0].tokens


def test_base_adapter_scores_match_the_model_without_adapters():
    base = build()
    made = adapted(base, 1)
    prompt = tuple(range(40))

    async def work(engine):
        return await engine.score(prompt), await engine.score(prompt, adapter=BASE)

    on, off = with_engine(made, work)
    assert on[1:] == pytest.approx(reference_logprobs(made, prompt)[0].tolist(), abs=1e-4)
    assert off[1:] == pytest.approx(reference_logprobs(base, prompt)[0].tolist(), abs=1e-4)
    assert max(abs(a - b) for a, b in zip(on, off, strict=True)) > 0.1


def test_closing_the_engine_leaves_a_shared_model_unchanged():
    made = adapted(build(), 1)
    expected = reference_logprobs(made, range(40))[0]

    async def run():
        engine = LocalEngine(made, settings=SMALL, copy=False)
        await engine.score(tuple(range(40)), adapter=BASE)
        await engine.close()

    asyncio.run(run())
    assert torch.equal(reference_logprobs(made, range(40))[0], expected)


def test_reloading_an_adapter_changes_its_output_but_not_the_base_model():
    base = build()
    first, second = (get_peft_model_state_dict(adapted(base, seed)) for seed in (1, 2))
    prompt = tuple(range(30))

    async def work(engine):
        await engine.load_adapter("a", 1, first, 2.0)
        old = await engine.generate(Request("x", prompt, SamplingParams(max_new_tokens=4), adapter="a"))
        plain = await engine.score(prompt, adapter=BASE)
        await engine.load_adapter("a", 2, second, 2.0)
        new = await engine.generate(Request("y", prompt, SamplingParams(max_new_tokens=4), adapter="a"))
        return old, new, plain, await engine.score(prompt, adapter=BASE)

    old, new, before, after = with_engine(base, work)
    assert set(old.versions) == {1}
    assert set(new.versions) == {2}
    expected, _ = reference_logprobs(adapted(base, 2), [*prompt, *new.tokens])
    assert new.logprobs == pytest.approx(expected[29:].tolist(), abs=1e-4)
    assert before == after


def test_unloaded_adapters_leave_no_cache_pages_or_versions():
    base = build()
    state = get_peft_model_state_dict(adapted(base, 1))

    async def work(engine):
        for version in range(8):
            await engine.load_adapter(f"v{version}", version, state, 2.0)
            request = Request("x", tuple(range(40)), SamplingParams(max_new_tokens=3), adapter=f"v{version}")
            assert set((await engine.generate(request)).versions) == {version}
            await engine.unload_adapter(f"v{version}")
        tree, core = engine._scheduler.tree, engine._scheduler
        return len(tree._roots), core.adapter_versions, len(tree._free) == tree.num_pages

    assert with_engine(base, work) == (0, {}, True)


def test_missing_or_mismatched_adapters_are_rejected():
    base = build()
    state = get_peft_model_state_dict(adapted(base, 1))

    async def work(engine):
        with pytest.raises(EngineError, match="Adapter 'a' is not loaded; loaded: none"):
            await engine.generate(Request("x", (1, 2), SamplingParams(), adapter="a"))
        odd = {name: tensor[:, :3] if "lora_A" in name else tensor for name, tensor in state.items()}
        with pytest.raises(SyncError, match="whose weight is"):
            await engine.load_adapter("a", 1, odd, 2.0)
        with pytest.raises(SyncError, match="no supported linear layer"):
            await engine.load_adapter("a", 1, {"model.nowhere.lora_A.weight": torch.zeros(2, 2)}, 2.0)
        await engine.load_adapter("a", 1, state, 2.0)
        await engine.unload_adapter("a")
        with pytest.raises(EngineError, match="is not loaded"):
            await engine.score((1, 2), adapter="a")

    with_engine(base, work)


def test_timeout_aborts_with_partial_tokens_even_while_engine_is_paused():
    async def work(engine):
        params = SamplingParams(max_new_tokens=200)
        running = asyncio.create_task(engine.generate(Request("r", (1, 2, 3), params, timeout_s=2.0)))
        await until(lambda: engine.stats().decode_tokens >= 2)
        await engine.pause()
        waiting = asyncio.create_task(engine.generate(Request("w", (4, 5), params, timeout_s=0.05)))
        cut = await asyncio.wait_for(asyncio.gather(running, waiting), 20)
        await engine.resume()
        again = await engine.generate(Request("r", (1, 2, 3, *cut[0].tokens), replace(params, max_new_tokens=3)))
        return *cut, again

    running, waiting, again = with_engine(build(), work)
    assert running.finish_reason == waiting.finish_reason == "abort"
    assert 2 <= len(running.tokens) < 200
    assert waiting.tokens == ()
    assert len(again.tokens) == 3


def test_requests_above_the_limit_are_rejected_until_others_finish():
    async def work(engine):
        asked = [Request(str(i), (1, 2, 3), SamplingParams(max_new_tokens=3)) for i in range(3)]
        with pytest.raises(RequestRejected, match="3 requests in one batch; the engine accepts 2"):
            await engine.generate_batch(asked)
        both = asyncio.gather(*map(engine.generate, asked[:2]))
        await asyncio.sleep(0)
        with pytest.raises(EngineBusy, match="accepts 2 at most"):
            await engine.generate(asked[2])
        await both
        return await engine.generate(asked[2])

    answer = with_engine(build(), work, settings=replace(SMALL, max_requests=2))
    assert len(answer.tokens) == 3
