"""The generic engine: results, caches and copies, on a tiny hybrid of linear and full attention and other models."""

import asyncio
import logging

import pytest
import torch
from generators import model_families
from generators.model_families import FAMILIES, build

from ludus.engines.base import Request, copies
from ludus.engines.embedded.engine import EngineSettings, LocalEngine
from ludus.engines.embedded.generic_scheduler import GenericScheduler, fork, merge, select
from ludus.types import SamplingParams

SETTINGS = EngineSettings(context_tokens=200, max_batch=4, kv_cache_tokens=800, pass_tokens=16, threads=1)
PAGE_ROWS = model_families.rows_of_page(model_families.PAGE.read_text("utf-8"))
PROMPT = tuple(7 * i % 250 for i in range(30))


def play(engine, requests):
    return asyncio.run(engine.generate_batch(requests))


def ask(tokens, episode="e", seed=0, num=6):
    return Request(episode, tuple(tokens), SamplingParams(max_new_tokens=num, seed=seed))


@torch.no_grad()
def gap(model, prompt, done):
    """The largest difference of the recorded log-probabilities from those of a plain pass."""
    logits = model(input_ids=torch.tensor([[*prompt, *done.tokens]]), use_cache=False).logits[0, len(prompt) - 1 : -1]
    own = logits.log_softmax(-1).gather(1, torch.tensor(done.tokens)[:, None])[:, 0]
    return float((own - torch.tensor(done.logprobs)).abs().max())


@pytest.fixture(scope="module")
def hybrid():
    return build("qwen3_next")


@pytest.fixture
def engine(hybrid):
    engine = LocalEngine(hybrid, settings=SETTINGS)
    yield engine
    asyncio.run(engine.close())


def test_choosing_the_generic_scheduler_logs_one_warning(hybrid, caplog):
    with caplog.at_level(logging.WARNING, "ludus.engines.embedded.engine"):
        engine = LocalEngine(hybrid, settings=SETTINGS)
    (record,) = [one for one in caplog.records if one.name == "ludus.engines.embedded.engine"]
    assert "Qwen3NextForCausalLM: it has linear_attention layers" in record.getMessage()
    assert "which is slower: one cache per episode, batches of equal length" in record.getMessage()
    assert isinstance(engine._scheduler, GenericScheduler)
    assert not engine.batch_invariant


def test_second_turn_prefills_only_new_tokens(engine, hybrid):
    (first,) = play(engine, [ask(PROMPT)])
    engine.stats(reset=True)
    history = PROMPT + first.tokens + (9, 8, 7)
    (second,) = play(engine, [ask(history)])
    assert gap(hybrid, history, second) < 1e-4
    stats = engine.stats()
    assert (stats.cached_tokens, stats.prefill_tokens) == (len(PROMPT) + 5, 4)


def test_group_prefills_its_prompt_once_and_later_members_reuse_it(engine, hybrid):
    group = copies(ask(PROMPT, num=8), 4)
    for done in play(engine, group):
        assert gap(hybrid, PROMPT, done) < 1e-4
    stats = engine.stats(reset=True)
    assert (stats.cached_tokens, stats.prefill_tokens) == (3 * 29, 29 + 4)
    (late,) = play(engine, [ask(PROMPT, "late", seed=5)])
    assert (engine.stats().cached_tokens, gap(hybrid, PROMPT, late) < 1e-4) == (29, True)
    for episode in ("e", "e/1", "e/2", "e/3", "late"):
        engine.release(episode)
    play(engine, [ask(PROMPT[:1], "")])  # after the releases
    assert not [s for s in engine._scheduler._cache._states if s.episodes != {""}]


def test_states_are_evicted_and_recomputed(engine, hybrid):
    histories = {}
    for number in range(12):  # more tokens than the cache holds
        prompt = tuple((number + t * 11) % 250 for t in range(60))
        histories[f"e{number}"] = prompt + play(engine, [ask(prompt, f"e{number}", num=1)])[0].tokens
    assert engine.stats().evicted_pages > 0
    for episode, history in [*histories.items()][::6]:
        (done,) = play(engine, [ask(history, episode, num=2)])
        assert gap(hybrid, history, done) < 1e-4
    core = engine._scheduler
    assert sum(len(state.tokens) for state in core._cache._states) <= 800
    assert (core.running, core._batches, core._reserved, len(core._free_slots)) == ([], [], 0, 4)


@pytest.mark.parametrize("family", ["mamba", "rwkv", "openai-gpt"])
def test_logprobs_are_exact_for_every_kind_of_model_cache(family):
    model = build(family)
    engine = LocalEngine(model, settings=SETTINGS)
    prompts = [PROMPT[:n] for n in (1, 2, 17, 17, 30)]
    for _ in range(2):
        answers = play(engine, [ask(prompt, f"e{n}", seed=n) for n, prompt in enumerate(prompts)])
        for prompt, done in zip(prompts, answers, strict=True):
            assert gap(model, prompt, done) < 1e-4
        prompts = [p + done.tokens + (5, 6) for p, done in zip(prompts, answers, strict=True)]
    scores = asyncio.run(engine.score(PROMPT))
    with torch.no_grad():
        own = model(input_ids=torch.tensor([PROMPT]), use_cache=False).logits[0].log_softmax(-1)
    assert torch.allclose(
        torch.tensor(scores[1:]), own[:-1].gather(1, torch.tensor(PROMPT[1:])[:, None])[:, 0], atol=1e-4
    )


def test_states_are_merged_selected_and_copied_by_rows(hybrid):
    ids = torch.tensor([PROMPT[:9], PROMPT[9:18]])
    with torch.inference_mode():
        both = hybrid(input_ids=ids, use_cache=True)
        apart = [hybrid(input_ids=ids[i : i + 1], use_cache=True).past_key_values for i in range(2)]
        merged = merge(apart)
        kept = fork(merged)
        expected = hybrid(input_ids=ids[:, :1], past_key_values=both.past_key_values).logits
        assert torch.allclose(hybrid(input_ids=ids[:, :1], past_key_values=merged).logits, expected, atol=1e-5)
        second = select(kept, [1], 2)
        assert torch.allclose(hybrid(input_ids=ids[1:, :1], past_key_values=second).logits, expected[1:], atol=1e-5)
        assert kept.get_seq_length() == 9


@pytest.mark.parametrize("family", [pytest.param("qwen3", marks=pytest.mark.slow), "lfm2"])
def test_model_family_results_match_the_documented_table(family):
    report = model_families.examine(family)
    assert list(report.passed.values())[:4] == [True] * 4, report
    assert model_families.table(model_families.HEAD, [report.cells]).splitlines()[2] == PAGE_ROWS[family]


def test_documented_table_lists_every_model_family():
    assert list(PAGE_ROWS) == list(FAMILIES)
    assert len(FAMILIES) >= 20


@pytest.mark.pages
def test_documented_table_matches_the_generator_output():
    assert model_families.main(["--check"]) == 0
