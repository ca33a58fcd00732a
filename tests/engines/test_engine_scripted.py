"""The scripted engine follows the engine protocol and fails on demand."""

import asyncio

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from ludus.engines.base import Engine, Request
from ludus.engines.models.fingerprint import fingerprint_module
from ludus.errors import EngineError, UserError
from ludus.types import Completion, SamplingParams
from scripted_engine import Faults, ScriptedEngine

END = 256


def byte_tokenizer():
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({character: index for index, character in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def request(episode="a", length=3, max_new_tokens=64):
    return Request(episode, (1,) * length, SamplingParams(max_new_tokens=max_new_tokens))


def say(engine, *requests):
    return asyncio.run(engine.generate_batch(requests))


def test_scripted_engine_returns_the_lines_of_each_episode_in_order():
    tokenizer = byte_tokenizer()
    engine: Engine = ScriptedEngine({"a": ["one", "two"], "b": ["drei"]}, tokenizer, END, version=4)
    answers = say(engine, request("a"), request("b"), request("a"))
    assert [tokenizer.decode(answer.tokens[:-1]) for answer in answers] == ["one", "drei", "two"]
    assert all(answer.tokens[-1] == END and answer.finish_reason == "stop" for answer in answers)
    assert answers[1].logprobs == (-1.0,) * 5
    assert answers[1].versions == (4,) * 5
    with pytest.raises(UserError, match="no line for turn 1 of episode b"):
        say(engine, request("b"))


def test_script_function_receives_request_and_turn_and_may_return_a_completion():
    exact = Completion((5, 6), (-0.5, -2.0), (9, 9), "abort")
    engine = ScriptedEngine(
        lambda asked, turn: exact if turn else f"{asked.episode}{len(asked.token_ids)}", byte_tokenizer(), END
    )
    first, second = say(engine, request("x", 7), request("x", 8))
    assert byte_tokenizer().decode(first.tokens[:-1]) == "x7"
    assert second is exact
    assert [r.episode for r in engine.requests] == ["x", "x"]


def test_token_limits_truncate_text_and_omit_the_end_token():
    engine = ScriptedEngine(lambda *_: "abcdef", byte_tokenizer(), END, context_tokens=8)
    by_limit, by_context, whole = say(engine, request(max_new_tokens=4), request(length=6), request(length=1))
    assert (len(by_limit.tokens), by_limit.finish_reason) == (4, "length")
    assert (len(by_context.tokens), by_context.finish_reason) == (2, "length")
    assert (len(whole.tokens), whole.finish_reason) == (7, "stop")
    with pytest.raises(EngineError, match="prompt of 8 tokens"):
        say(engine, request(length=8))


def test_scripted_engine_fails_and_hangs_at_the_configured_calls():
    engine = ScriptedEngine({"a": ["one", "two"]}, byte_tokenizer(), END, faults=Faults(fail_at=(0,), hang_at=(2,)))

    async def run():
        with pytest.raises(EngineError, match="call 0"):
            await engine.generate(request())
        first = await engine.generate(request())
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(engine.generate(request()), 0.02)
        return first, await engine.generate(request())

    texts = [byte_tokenizer().decode(answer.tokens[:-1]) for answer in asyncio.run(run())]
    assert texts == ["one", "two"]  # a call that failed used up no line


def test_loaded_weights_set_version_and_fingerprint():
    engine = ScriptedEngine(lambda *_: "x", byte_tokenizer(), END)
    module = torch.nn.Linear(3, 2)

    async def run():
        await engine.load_weights(5, dict(module.named_parameters()))
        digest = await engine.fingerprint()
        await engine.close()
        return digest

    assert asyncio.run(run()) == fingerprint_module(module)
    assert engine.version == 5
    assert engine.loaded == [5]
    assert say(engine, request())[0].versions == (5, 5)
    assert engine.closed


def test_release_is_recorded_and_restarts_the_script():
    engine = ScriptedEngine({"a": ["one"]}, byte_tokenizer(), END)
    first = say(engine, request())
    engine.release("a")
    assert say(engine, request()) == first
    assert engine.released == ["a"]
    assert asyncio.run(engine.score((4, 5, 6))) == [0.0, -1.0, -1.0]
