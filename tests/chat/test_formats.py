"""Formats other than ChatML: ends of turns, positions of results, call ids, and thinking opened by the prompt."""

import pytest

from chat_conformance import ProbeDialogue, check_conformance, probe_dialogues
from chat_families import GEMMA4, GEMMA4_SPECIAL, GLM, GLM_SPECIAL, GPT_OSS, GPT_OSS_SPECIAL, KIMI, QWEN3, byte_level
from ludus.chat.render import TemplateRenderer
from ludus.tools.base import tool
from ludus.types import Message


@tool
def search(query: str, k: int = 2) -> str:
    """Search."""
    return f"{query}: nothing"


CALL = {"id": "call_0_0", "type": "function", "function": {"name": "search", "arguments": '{"query": "Paris"}'}}


def user(text):
    return Message(role="user", content=text)


def tool_says(text, call_id="call_0_0"):
    return Message(role="tool", content=text, tool_call_id=call_id, name="search")


def says(text="", **more):
    return Message(role="assistant", content=text, **more)


GLM_RENDERER = TemplateRenderer(byte_level(GLM, GLM_SPECIAL))
GEMMA4_RENDERER = TemplateRenderer(byte_level(GEMMA4, GEMMA4_SPECIAL))
GPT_OSS_RENDERER = TemplateRenderer(byte_level(GPT_OSS, GPT_OSS_SPECIAL))


def shown(renderer, tokens):
    return renderer.tokenizer.decode(list(tokens))


@pytest.mark.parametrize(
    ("renderer", "ends", "after_call", "after_answer"),
    [
        (
            GLM_RENDERER,
            ["<|user|>", "<|observation|>"],
            "\n<tool_response>\nr\n</tool_response><|assistant|>",
            "\nu<|assistant|>",
        ),
        (
            GEMMA4_RENDERER,
            ["<turn|>", "<|tool_response>"],
            'response:search{value:<|"|>r<|"|>}<tool_response|>',
            "\n<|turn>user\nu<turn|>\n<|turn>model\n",
        ),
        (
            GPT_OSS_RENDERER,
            ["<|return|>", "<|call|>"],
            "<|start|>functions.search to=assistant<|channel|>commentary<|message|>r<|end|><|start|>assistant",
            "<|start|>user<|message|>u<|end|><|start|>assistant",
        ),
    ],
    ids=["glm", "gemma 4", "gpt-oss"],
)
def test_observations_follow_the_token_that_ends_the_turn(renderer, ends, after_call, after_answer):
    assert [shown(renderer, [end]) for end in renderer.stop_token_ids] == ends
    answer_end, call_end = renderer.stop_token_ids
    assert shown(renderer, renderer.observation([tool_says("r")], call_end)) == after_call
    assert shown(renderer, renderer.observation([user("u")], answer_end)) == after_answer
    assert shown(renderer, renderer.observation([tool_says("r")], answer_end)) == ends[1] + after_call
    assert shown(renderer, renderer.observation([user("u")], call_end)) == ends[0] + after_answer
    call_only = says(tool_calls=[CALL])
    for message, end in ((says("Hi."), answer_end), (call_only, call_end)):
        action = renderer.action([user("q")], message, [search])
        assert action[-1] == end
        read = renderer.parse(action, 0, "stop", [search])
        assert (read.message["content"], [call.name for call in read.calls]) == (
            message["content"],
            ["search"] if message is call_only else [],
        )
        assert read.errors == ()


@pytest.mark.parametrize("renderer", [GLM_RENDERER, GEMMA4_RENDERER])
def test_formats_with_several_ends_conform(renderer):
    probes = []
    for probe in probe_dialogues():
        messages = [message.copy() for message in probe.messages]
        for message in messages:
            message.pop("reasoning_content", None)
        probes.append(ProbeDialogue(probe.name, tuple(messages), probe.tools))
    assert check_conformance(renderer, probes).failures == ()


def test_gpt_oss_thinks_in_a_channel():
    action = GPT_OSS_RENDERER.action([user("q")], says("Hi.", reasoning_content="Polite."), ())
    assert shown(GPT_OSS_RENDERER, action).startswith("<|channel|>analysis<|message|>Polite.<|end|>")
    read = GPT_OSS_RENDERER.parse(action, 0, "stop").message
    assert (read["content"], read["reasoning_content"]) == ("Hi.", "Polite.")


def test_kimi_ids_have_the_name_of_the_tool():
    renderer = TemplateRenderer(byte_level(KIMI, ("<|im_middle|>",)))
    call_only = says(tool_calls=[CALL])
    assert "<|tool_call_begin|>functions.search:0<" in shown(
        renderer, renderer.action([user("q")], call_only, [search])
    )
    for call_id in ("call_4_0", "functions.search:0"):
        assert "## Return of functions.search:0\nr" in shown(renderer, renderer.observation([tool_says("r", call_id)]))


def test_unclosed_thinking_opened_by_prompt_is_parsed_as_reasoning():
    template = QWEN3.replace(
        "'<|im_start|>assistant\\n' }}{%- endif %}\n", "'<|im_start|>assistant\\n<think>\\n' }}{%- endif %}"
    )
    renderer = TemplateRenderer(byte_level(template))
    assert shown(renderer, renderer.prompt([user("q")], ())).endswith("<think>\n")
    read = renderer.parse(renderer.tokenizer.encode("Let me think about"), 0, "length").message
    assert (read["content"], read["reasoning_content"]) == ("", "Let me think about")
    called = renderer.parse(renderer.tokenizer.encode('I look.\n<tool_call>{"name": "search"}</tool_call>'), 0, "stop")
    assert (called.message["reasoning_content"], called.calls[0].name) == ("I look.", "search")
