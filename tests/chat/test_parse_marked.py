"""Parsers of calls between markers: tables of valid and malformed texts, and a round trip."""

import json

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from ludus.chat.parse import PARSERS

TYPED = {
    "type": "function",
    "function": {
        "name": "f",
        "description": "",
        "parameters": {"properties": {"q": {"type": "string"}, "k": {"type": "integer"}}},
    },
}
FUNCTION = "<tool_call>\n<function=f>\n{}</function>\n</tool_call>"
DEEPSEEK_CALL = "<｜tool▁call▁begin｜>{}<｜tool▁call▁end｜>"
KIMI_CALL = "<|tool_call_begin|>{}<|tool_call_argument_begin|>{}<|tool_call_end|>"
TWELVES = "".join(f"<arg_key>{key}</arg_key>\n<arg_value>12</arg_value>\n" for key in "qk")
HM = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
MARKED_CALLS = [
    ("qwen3_coder", "hm</think>\n\nSo.\n" + FUNCTION.format(""), "So.", [("f", {})], "hm"),
    (
        "qwen3_coder",
        FUNCTION.format("<parameter=q>\n  1\n\n</parameter>\n<parameter=k>\n3\n</parameter>\n"),
        "",
        [("f", {"q": "  1\n", "k": 3})],
        None,
    ),
    ("qwen3_coder", FUNCTION.format("<parameter=x>[1, null]</parameter>"), "", [("f", {"x": [1, None]})], None),
    ("qwen3_coder", FUNCTION.format("<parameter=q>a</think>b</parameter>"), "", [("f", {"q": "a</think>b"})], None),
    (
        "qwen3_coder",
        f"I may write <tool_call></think>{FUNCTION.format('')}",
        "",
        [("f", {})],
        "I may write <tool_call>",
    ),
    (
        "glm45",
        f"\n<think></think>\n<tool_call>f\n{TWELVES}</tool_call>\n<tool_call>g\n</tool_call>",
        "",
        [("f", {"q": "12", "k": 12}), ("g", {})],
        "",
    ),
    (
        "kimi_k2",
        "a<|tool_calls_section_begin|>"
        + KIMI_CALL.format("functions.f:3", '{"q": "é"}')
        + "<|tool_calls_section_end|>",
        "a",
        [("f", {"q": "é"})],
        None,
    ),
    (
        "deepseek_v3",
        "<｜tool▁calls▁begin｜>"
        + DEEPSEEK_CALL.format('function<｜tool▁sep｜>f\n```json\n{"k": 1}\n```')
        + DEEPSEEK_CALL.format("g<｜tool▁sep｜>{}")
        + "<｜tool▁calls▁end｜>",
        "",
        [("f", {"k": 1}), ("g", {})],
        None,
    ),
    (
        "gemma4",
        '<|channel>thought\nhm\n<channel|><|tool_call>call:f{k:1,q:<|"|>a,b:"<|"|>,o:{x:[<|"|>y<|"|>,true]}}<tool_call|>',
        "",
        [("f", {"k": 1, "q": 'a,b:"', "o": {"x": ["y", True]}})],
        "hm",
    ),
    (
        "harmony",
        f'{HM}<|start|>assistant to=functions.f<|channel|>commentary json<|message|>{{"k": 1}}',
        "I look.",
        [("f", {"k": 1})],
        "hm",
    ),
    ("harmony", "<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}<|call|>", "", [("f", {})], None),
    ("harmony", "<|channel|>final<|message|>Four.<|return|>", "Four.", [], None),
    ("harmony", "no channel", "no channel", [], None),
]


@pytest.mark.parametrize(("parser", "text", "content", "calls", "reasoning"), MARKED_CALLS)
def test_marked_formats_read_calls(parser, text, content, calls, reasoning):
    action = PARSERS[parser].parse(text, turn=3, schemas=[TYPED])
    assert (action.message["content"], action.message.get("reasoning_content")) == (content, reasoning)
    assert [(call.name, call.arguments) for call in action.calls] == calls
    assert action.errors == ()


def test_untyped_parameter_is_parsed_as_json_or_kept_as_text():
    text = FUNCTION.format("<parameter=q>\n12\n</parameter>\n<parameter=k>\ntwelve\n</parameter>\n")
    (call,) = PARSERS["qwen3_coder"].parse(text, turn=0).calls
    assert call.arguments == {"q": 12, "k": "twelve"}


def test_duplicate_sampled_call_id_is_replaced_by_generated_id():
    text = KIMI_CALL.format("functions.f:3", "{}") * 2
    assert [call.id for call in PARSERS["kimi_k2"].parse(text, turn=5).calls] == ["functions.f:3", "call_5_1"]


MARKED_ERRORS = [
    ("qwen3_coder", "<tool_call>\n<function=f>", "not closed"),
    ("qwen3_coder", '<tool_call>\n{"name": "f"}\n</tool_call>', "<function=NAME>"),
    ("qwen3_coder", FUNCTION.format("<parameter=q>a"), "<parameter=NAME>"),
    ("glm45", "<tool_call>\n</tool_call>", "no name"),
    ("glm45", "<tool_call>f\n<arg_key>q</arg_key></tool_call>", "<arg_value>"),
    ("kimi_k2", "<|tool_call_begin|>functions.f:0<|tool_call_end|>", "functions.NAME:INDEX"),
    ("kimi_k2", KIMI_CALL.format("functions.f:0", "{"), "ends too early"),
    ("deepseek_v3", DEEPSEEK_CALL.format("f"), "JSON object"),
    ("deepseek_v3", DEEPSEEK_CALL.format("f<｜tool▁sep｜>[1]"), "JSON object, not a list"),
    ("gemma4", "<|tool_call>f{}<tool_call|>", "call:NAME"),
    ("gemma4", '<|tool_call>call:f{q:<|"|>a}<tool_call|>', "ends too early"),
    ("harmony", "<|channel|>commentary to=functions.f<|message|>{'a': 1}", "Python, not JSON"),
]


@pytest.mark.parametrize(("parser", "text", "reason"), MARKED_ERRORS)
def test_marked_formats_report_reason_for_malformed_calls(parser, text, reason):
    action = PARSERS[parser].parse(text, turn=3)
    assert (action.message["content"], action.calls) == (text, ())
    (error,) = action.errors
    assert (error.id, error.text) == ("call_3_0", text)
    assert reason in error.reason


values = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)


@settings(max_examples=40, derandomize=True, database=None, deadline=None)
@given(st.text(st.sampled_from('ab<|>"{}[]:,\\ \n'), max_size=20), values)
def test_gemma_reads_back_any_string(text, value):
    assume('<|"|>' not in text)
    written = f'[<|"|>{text}<|"|>,{json.dumps(value)}]'
    (call,) = PARSERS["gemma4"].parse(f"<|tool_call>call:f{{a:{written}}}<tool_call|>", turn=0).calls
    assert call.arguments == {"a": [text, value]}
