"""Conformance checks of all engines, embedded or behind HTTP: requests and properties of their completions.

Each check takes an engine and, as reference, the Hugging Face model that it serves. A check that changes
weights restores them. `CHECKS` lists all checks.
"""

from __future__ import annotations

import asyncio
import copy
import json
import random
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import httpx
import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ludus.engines.base import Request, copies
from ludus.errors import EngineError
from ludus.training.rl.weight_sync import WeightSync
from ludus.types import Guide, SamplingParams

LOGPROB_TOLERANCE = 2e-4
TIE = 1e-3
"""Logits closer than this may be in either order, because matrix products round differently."""
LONG = 300
_SAMPLED = r"^(?:ludus_decode|vllm:generation|sglang:generation)_tokens_total(?:{.*})? (\S+)$"


def count_sampled(url: str) -> float:
    """Return the number of tokens that a server has sampled since its start, from its `/metrics`."""
    told = httpx.get(f"{url}/metrics", trust_env=False, timeout=60).raise_for_status().text
    counts = re.findall(_SAMPLED, told, re.MULTILINE)
    assert counts, told[:1000]
    return sum(map(float, counts))


@dataclass
class Case:
    """An engine under test, its model, and whether it reports the version of each token.

    `num_sampled` returns the number of tokens that it has sampled.
    """

    engine: object
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    num_sampled: Callable[[], float]
    tells_versions: bool = True
    has_seeds: bool = True

    def prompt(self, number: int = 0, length: int = 24) -> tuple[int, ...]:
        source = random.Random(number)
        return tuple(source.randrange(3, 2000) for _ in range(length))

    def question(self) -> tuple[int, ...]:
        text = "<|im_start|>user\nIn which country is Paris?<|im_end|>\n<|im_start|>assistant\n"
        return tuple(self.tokenizer.encode(text, add_special_tokens=False))

    async def ask(self, prompt, episode="e", **params):
        return await self.engine.generate(Request(episode, tuple(prompt), SamplingParams(**params)))

    async def under_way(self, work, num_tokens):
        """Start `work` as a task; return it after `num_tokens` more tokens have been sampled."""
        goal = self.num_sampled() + num_tokens
        task = asyncio.create_task(work)
        async with asyncio.timeout(300):  # the first request to a server may warm it up
            while await asyncio.to_thread(self.num_sampled) < goal:
                await asyncio.sleep(0.005)
        return task

    @torch.no_grad()
    def logits(self, tokens) -> torch.Tensor:
        return self.model(torch.tensor([list(tokens)])).logits[0].double()

    def logprobs(self, prompt, action, temperature=1.0) -> torch.Tensor:
        logits = self.logits([*prompt, *action])[len(prompt) - 1 : -1] / temperature
        return logits.log_softmax(-1).gather(1, torch.tensor(action)[:, None])[:, 0]

    def gap(self, prompt, completion, temperature=1.0) -> float:
        """Return the largest difference between recorded and reference log-probabilities."""
        assert len(completion.tokens) == len(completion.logprobs) == len(completion.versions) > 0
        own = self.logprobs(prompt, completion.tokens, temperature)
        return float((torch.tensor(completion.logprobs).double() - own).abs().max())

    def is_greedy(self, prompt, action) -> bool:
        """Return whether each token has the largest logit, up to ties."""
        logits = self.logits([*prompt, *action])[len(prompt) - 1 : -1]
        chosen = logits.gather(1, torch.tensor(action)[:, None])[:, 0]
        return bool((logits.max(-1).values - chosen < TIE).all())


async def ask_or_be_refused(case, prompt, **params):
    """Return the completion, or None if the server refuses because its log-probabilities would be of another
    distribution."""
    try:
        return await case.ask(prompt, **params)
    except EngineError as error:
        if "log-probabilities" not in error.message:
            raise
        return None


async def greedy_tokens_are_those_of_a_plain_forward(case):
    for number in range(3):
        prompt = case.prompt(number)
        done = await case.ask(prompt, max_new_tokens=12, temperature=0.0)
        assert case.is_greedy(prompt, done.tokens)
        assert (len(done.tokens), done.finish_reason) == (12, "length")


async def log_probabilities_are_those_of_a_plain_forward(case):
    prompts = [case.prompt(n, length) for n, length in enumerate((1, 17, 120, 16, 33))]
    requests = [
        Request(f"e{n}", prompt, SamplingParams(max_new_tokens=10 + n, seed=n)) for n, prompt in enumerate(prompts)
    ]
    answers = await case.engine.generate_batch(requests)
    for prompt, answer, request in zip(prompts, answers, requests, strict=True):
        assert len(answer.tokens) == request.params.max_new_tokens
        assert case.gap(prompt, answer) < LOGPROB_TOLERANCE


async def tempered_log_probabilities_are_right_or_refused(case):
    for params in (
        {"temperature": 0.6},
        {"top_p": 0.8},
        {"top_k": 20},
        {"min_p": 0.05},
        {"temperature": 1.5, "top_k": 50},
    ):
        done = await ask_or_be_refused(case, case.prompt(), max_new_tokens=10, seed=5, **params)
        assert done is None or case.gap(case.prompt(), done, params.get("temperature", 1.0)) < LOGPROB_TOLERANCE


async def alternatives_are_the_likeliest_of_a_plain_forward(case):
    for temperature in (0.0, 1.0):
        prompt = case.prompt(9)
        done = await case.ask(prompt, max_new_tokens=10, temperature=temperature, seed=2, top_logprobs=5)
        expected = case.logits([*prompt, *done.tokens])[len(prompt) - 1 : -1].log_softmax(-1)
        assert len(done.top_logprobs) == 10
        for row, found, token, own in zip(expected, done.top_logprobs, done.tokens, done.logprobs, strict=True):
            values = torch.tensor([logprob for _, logprob in found]).double()
            assert float((values - row.topk(5).values).abs().max()) < LOGPROB_TOLERANCE
            assert float((values - row[[other for other, _ in found]]).abs().max()) < LOGPROB_TOLERANCE
            assert dict(found).get(token, own) == own
    with pytest.raises(EngineError, match="top_logprobs is 21"):
        await case.ask(prompt, max_new_tokens=1, top_logprobs=21)


async def narrow_sampling_is_greedy(case):
    prompt = case.prompt(4)
    for params in ({"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}):
        done = await ask_or_be_refused(case, prompt, max_new_tokens=8, **params)
        assert done is None or case.is_greedy(prompt, done.tokens)


async def a_prompt_that_no_text_gives_is_taken_as_it_is(case):
    """The server must echo the token ids of the prompt; `ServerEngine` raises if they differ or are missing."""
    text = "In which country is Paris?"
    prompt = tuple(case.tokenizer.encode(c, add_special_tokens=False)[0] for c in text)
    assert len(case.tokenizer.encode(text, add_special_tokens=False)) < len(prompt)
    done = await case.ask(prompt, max_new_tokens=10, seed=1)
    assert case.gap(prompt, done) < LOGPROB_TOLERANCE


async def copies_of_a_request_differ_and_the_first_is_the_request(case):
    request = Request("c", case.prompt(3), SamplingParams(max_new_tokens=12, seed=9))
    answers = await case.engine.generate_batch(copies(request, 4))
    assert len({answer.tokens for answer in answers}) == 4
    assert max(case.gap(request.token_ids, answer) for answer in answers) < LOGPROB_TOLERANCE
    assert (await case.engine.generate(request)).tokens == answers[0].tokens


async def a_guide_is_kept_or_refused(case):
    end = case.tokenizer.eos_token_id
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    guides = (
        (Guide("regex", "(yes|no)"), lambda text: text in ("yes", "no")),
        (
            Guide("json_schema", json.dumps(schema | {"additionalProperties": False})),
            lambda text: json.loads(text) in ({"ok": True}, {"ok": False}),
        ),
    )
    for guide, keeps in guides:
        for seed in (1, 2):
            asked = {"max_new_tokens": 40, "seed": seed, "stop_token_ids": (end,), "guide": guide}
            done = await ask_or_be_refused(case, case.question(), **asked)
            if done is not None:
                assert done.finish_reason == "stop"
                assert keeps(case.tokenizer.decode([token for token in done.tokens if token != end]))
                assert case.gap(case.question(), done) < LOGPROB_TOLERANCE


async def a_deadline_ends_a_request_with_what_it_has(case):
    prompt = case.prompt(1)
    room = case.engine.context_tokens - len(prompt)
    params = SamplingParams(max_new_tokens=room, temperature=0.0)
    begin = time.monotonic()
    part = await case.engine.generate(Request("late", prompt, params, timeout_s=0.1))
    assert time.monotonic() - begin < 20
    assert (part.finish_reason, len(part.tokens) < room) == ("abort", True)
    assert len(part.logprobs) == len(part.versions) == len(part.tokens)
    more = await case.ask(prompt + part.tokens, episode="late", max_new_tokens=5, temperature=0.0)
    assert case.is_greedy(prompt, part.tokens + more.tokens)
    roomy = replace(params, max_new_tokens=3)
    assert len((await case.engine.generate(Request("r", prompt, roomy, timeout_s=300.0))).tokens) == 3


async def a_history_that_grows_keeps_its_log_probabilities(case):
    source, history = random.Random(3), case.prompt(7, 30)
    for turn in range(3):
        done = await case.ask(history, episode="grows", max_new_tokens=9, seed=turn)
        assert case.gap(history, done) < LOGPROB_TOLERANCE
        history += done.tokens + tuple(source.randrange(3, 2000) for _ in range(11))
    case.engine.release("grows")


async def a_stop_token_ends_the_action_and_belongs_to_it(case):
    prompt = case.prompt(1)
    free = (await case.ask(prompt, max_new_tokens=20, temperature=0.0)).tokens
    stop = free[7]
    done = await case.ask(prompt, max_new_tokens=20, temperature=0.0, stop_token_ids=(stop, 1))
    assert done.tokens == free[: free.index(stop) + 1]
    assert done.finish_reason == "stop"
    assert len(done.logprobs) == len(done.tokens)


async def a_stop_string_ends_the_action_after_the_token_that_completes_it(case):
    prompt = case.prompt(2)
    free = (await case.ask(prompt, max_new_tokens=30, temperature=0.0)).tokens
    text = case.tokenizer.decode(free, skip_special_tokens=False)
    stop = text[len(text) // 2 :][:3]
    done = await case.ask(prompt, max_new_tokens=30, temperature=0.0, stop=("never there", stop))
    end = next(n for n in range(1, 31) if stop in case.tokenizer.decode(free[:n], skip_special_tokens=False))
    assert done.tokens == free[:end]
    assert done.finish_reason == "stop"


async def the_end_of_the_text_ends_nothing_by_itself(case):
    free = await case.ask(case.question(), max_new_tokens=40, temperature=0.0)
    assert (len(free.tokens), free.finish_reason) == (40, "length")
    end = case.tokenizer.eos_token_id
    assert end in free.tokens
    stopped = await case.ask(case.question(), max_new_tokens=40, temperature=0.0, stop_token_ids=(end,))
    assert stopped.tokens == free.tokens[: free.tokens.index(end) + 1]


async def seeds_repeat_and_differ(case):
    prompt = case.prompt(5)
    asked = [SamplingParams(max_new_tokens=12, seed=seed) for seed in (2**62 + 11, 2**62 + 11, 3, 4)]
    first, again, *others = await case.engine.generate_batch([Request("s", prompt, p) for p in asked])
    assert first.tokens == again.tokens
    assert len({first.tokens, *(other.tokens for other in others)}) == 3
    alone = await case.ask(prompt, max_new_tokens=12, seed=3)
    assert alone.tokens == others[0].tokens


async def the_context_bounds_prompt_and_completion(case):
    limit = case.engine.context_tokens
    done = await case.ask(case.prompt(0, limit - 3), max_new_tokens=50)
    assert (len(done.tokens), done.finish_reason) == (3, "length")
    for length in (limit, limit + 5):
        with pytest.raises(EngineError, match=f"prompt of {length} tokens"):
            await case.ask(case.prompt(0, length), max_new_tokens=1)
    with pytest.raises(EngineError, match="vocabulary"):
        await case.ask((5, 10**6), max_new_tokens=1)


async def scores_are_those_of_a_plain_forward(case):
    tokens = case.prompt(6, 100)
    scores = await case.engine.score(tokens)
    own = case.logprobs(tokens[:1], tokens[1:])
    assert scores[0] == 0.0
    assert float((torch.tensor(scores[1:]).double() - own).abs().max()) < LOGPROB_TOLERANCE


async def tokens_carry_the_version(case):
    done = await case.ask(case.prompt(), max_new_tokens=4)
    assert set(done.versions) == {case.engine.version}


async def new_weights_are_proved_and_used(case):
    changed, before = copy.deepcopy(case.model), case.engine.version
    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(1)
        for parameter in changed.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    prompt = case.prompt(8)
    await case.ask(prompt, episode="kept", max_new_tokens=8)
    await WeightSync(changed, case.engine, case.prompt(9, 64)).publish(before + 5)
    assert case.engine.version == before + 5
    other = replace(case, model=changed)
    done = await case.ask(prompt, episode="kept", max_new_tokens=8)
    assert other.gap(prompt, done) < LOGPROB_TOLERANCE < 0.05 < case.gap(prompt, done)
    assert set(done.versions) == {before + 5}
    await WeightSync(case.model, case.engine, case.prompt(9, 64)).publish(before + 6)
    back = await case.ask(prompt, episode="kept", max_new_tokens=8)
    assert case.gap(prompt, back) < LOGPROB_TOLERANCE


async def new_weights_drop_no_request(case):
    old, new = case.engine.version + 1, case.engine.version + 2
    await case.engine.load_weights(old, dict(case.model.named_parameters()))
    asked = [Request(f"f{n}", case.prompt(n), SamplingParams(max_new_tokens=LONG, seed=n)) for n in range(2)]
    running = await case.under_way(case.engine.generate_batch(asked), 20)
    await case.engine.load_weights(new, dict(case.model.named_parameters()))
    answers = await running
    assert [len(answer.tokens) for answer in answers] == [LONG] * 2
    for answer in answers:
        assert sorted(answer.versions) == list(answer.versions)
        assert set(answer.versions) == ({old, new} if case.tells_versions else {old})
        assert len(answer.logprobs) == LONG


async def a_cancelled_request_leaves_the_engine_as_it_was(case):
    running = await case.under_way(case.ask(case.prompt(), episode="gone", max_new_tokens=LONG), 1)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    done = await case.ask(case.prompt(3), max_new_tokens=6, temperature=0.0)
    assert case.is_greedy(case.prompt(3), done.tokens)


async def an_aborted_request_gives_what_it_has_and_can_go_on(case):
    prompt = case.prompt(1)
    room = case.engine.context_tokens - len(prompt)
    whole = case.ask(prompt, episode="long", max_new_tokens=room, temperature=0.0)
    running = await case.under_way(whole, 5)
    case.engine.abort("long")
    part = await asyncio.wait_for(running, 20)
    assert part.finish_reason == "abort"
    assert 5 <= len(part.tokens) < room
    assert len(part.logprobs) == len(part.versions) == len(part.tokens)
    assert case.is_greedy(prompt, part.tokens)
    more = await case.ask(prompt + part.tokens, episode="long", max_new_tokens=5, temperature=0.0)
    assert case.is_greedy(prompt + part.tokens, more.tokens)


async def an_abort_that_comes_at_once_is_not_lost(case):
    for wait_s in (0.0, 0.001, 0.01):
        running = asyncio.create_task(case.ask(case.prompt(1), episode="short", max_new_tokens=700))
        await asyncio.sleep(wait_s)
        case.engine.abort("short")
        part = await asyncio.wait_for(running, 20)
        assert (part.finish_reason, len(part.tokens) < 700) == ("abort", True)


async def a_paused_engine_waits(case):
    await case.engine.pause()
    running = asyncio.create_task(case.ask(case.prompt(), max_new_tokens=3))
    await asyncio.sleep(0.3)
    assert not running.done()
    await case.engine.resume()
    assert len((await asyncio.wait_for(running, 20)).tokens) == 3


CHECKS = (
    greedy_tokens_are_those_of_a_plain_forward,
    log_probabilities_are_those_of_a_plain_forward,
    tempered_log_probabilities_are_right_or_refused,
    alternatives_are_the_likeliest_of_a_plain_forward,
    narrow_sampling_is_greedy,
    a_prompt_that_no_text_gives_is_taken_as_it_is,
    copies_of_a_request_differ_and_the_first_is_the_request,
    a_guide_is_kept_or_refused,
    a_history_that_grows_keeps_its_log_probabilities,
    a_stop_token_ends_the_action_and_belongs_to_it,
    a_stop_string_ends_the_action_after_the_token_that_completes_it,
    the_end_of_the_text_ends_nothing_by_itself,
    seeds_repeat_and_differ,
    the_context_bounds_prompt_and_completion,
    scores_are_those_of_a_plain_forward,
    tokens_carry_the_version,
    new_weights_are_proved_and_used,
    new_weights_drop_no_request,
    a_cancelled_request_leaves_the_engine_as_it_was,
    an_aborted_request_gives_what_it_has_and_can_go_on,
    an_abort_that_comes_at_once_is_not_lost,
    a_deadline_ends_a_request_with_what_it_has,
    a_paused_engine_waits,
)
