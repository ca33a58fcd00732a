"""Tool-call parsers: tables of valid and malformed texts, a round trip, and mutated outputs."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chat_families import GEMMA4, GPT_OSS, KIMI, QWEN3
from ludus.chat.parse import PARSERS, detect
from ludus.chat.parse_json import MAX_DEPTH, MalformedCall, decode_prefix

STABLE = settings(derandomize=True, database=None, deadline=None)


def block(inner):
    return f"<tool_call>\n{inner}\n</tool_call>"


F, G, X = (block(json.dumps({"name": name})) for name in "fgx")
NOPE = block("nope")


def with_argument(value):
    return '{"name": "f", "arguments": {"a": ' + value + "}}"


def nested(levels):
    return "[" * levels + "]" * levels


def check(parser, text, content, calls, errors, reasoning=None):
    """Compare an action with the expected (name, arguments) of calls and (text, part of reason) of errors."""
    action = PARSERS[parser].parse(text, turn=3)
    assert action.message["content"] == content
    assert action.message.get("reasoning_content") == reasoning
    assert [(c.name, c.arguments) for c in action.calls] == calls
    assert [e.text for e in action.errors] == [text for text, _ in errors]
    for error, (_, part) in zip(action.errors, errors, strict=True):
        assert part in error.reason
    check_invariants(action, turn=3)


def check_invariants(action, turn):
    ids = [item.id for item in (*action.calls, *action.errors)]
    assert sorted(ids) == sorted(f"call_{turn}_{i}" for i in range(len(ids)))
    assert action.message["role"] == "assistant"
    listed = action.message.get("tool_calls", [])
    assert [c["id"] for c in listed] == [c.id for c in action.calls]
    for call, entry in zip(action.calls, listed, strict=True):
        assert entry["type"] == "function"
        assert entry["function"]["name"] == call.name != ""
        assert json.loads(entry["function"]["arguments"], parse_constant=pytest.fail) == call.arguments
        assert entry["function"]["arguments"].encode()
    assert all(error.text and error.reason for error in action.errors)


HERMES_CALLS = [
    ("", "", []),
    (" \n\t", "", []),
    ("The answer is 4.\n", "The answer is 4.", []),
    (block('{"name": "f", "arguments": {"a": 1}}'), "", [("f", {"a": 1})]),
    (f"Look.\n{F}\n{G}", "Look.", [("f", {}), ("g", {})]),
    (f"a {F} b {G} c", "a\nb\nc", [("f", {}), ("g", {})]),
    ('<tool_call>{"name": "f", "arguments": {"a": [1, 2.5]}}', "", [("f", {"a": [1, 2.5]})]),
    ('<tool_call>\n{"name": "f"}\n', "", [("f", {})]),
    ("<tool_call>" + with_argument('"</tool_call>"'), "", [("f", {"a": "</tool_call>"})]),
    ('<tool_call>\n```json\n{"name": "f"}\n```', "", [("f", {})]),
    (block('```json\n{"name": "f", "arguments": {}}\n```'), "", [("f", {})]),
    (block('```{"name": "f"}```'), "", [("f", {})]),
    (block('{"name": "f", "parameters": {"a": null}}'), "", [("f", {"a": None})]),
    (block('{"name": "f", "arguments": {"a": 1}, "parameters": {"a": 2}}'), "", [("f", {"a": 1})]),
    (block('{"name": "f", "arguments": "{\\"a\\": true}"}'), "", [("f", {"a": True})]),
    (block('{"name": "f", "name": "g", "arguments": {"a": 1, "a": 2}}'), "", [("g", {"a": 2})]),
    (block('{"name": "f", "arguments": {"q": "naïve 東京 \\ud83d\\ude00"}}'), "", [("f", {"q": "naïve 東京 😀"})]),
    (
        block('{"name": "f", "arguments": {"a": "</tool_call><tool_call>"}}'),
        "",
        [("f", {"a": "</tool_call><tool_call>"})],
    ),
    (block('{"name": "f", "arguments": {"a": "<think></think>"}}'), "", [("f", {"a": "<think></think>"})]),
    (block('{"name": "f", "arguments": {"a": "b</think>c"}}'), "", [("f", {"a": "b</think>c"})]),
    ('{"name": "Bob", "age": 3}', '{"name": "Bob", "age": 3}', []),
]


@pytest.mark.parametrize(("text", "content", "calls"), HERMES_CALLS)
def test_hermes_reads_calls(text, content, calls):
    check("hermes", text, content, calls, errors=[])


HERMES_MALFORMED = [
    ("", "ends too early"),
    ('{"name": "f", "arguments": {"a": 1}', "ends too early"),
    ('{"name": "f" "arguments": {}}', "expecting ',' delimiter"),
    ('{"name" "f"}', "expecting ':' delimiter"),
    ("call f please", "'call f please': expecting value"),
    ('{"name": "f"}}', "ends before '}'"),
    ('{"name": "f"} {"name": "g"}', "one JSON object"),
    ('["f", {}]', "not a list"),
    ('"f"', "not a string"),
    ("null", "not null"),
    ('{"arguments": {}}', 'no "name"'),
    ('{"name": 3}', "not a number"),
    ('{"name": true}', "not a boolean"),
    ('{"name": " "}', "is empty"),
    ('{"name": "f", "arguments": [1]}', "JSON object, not a list"),
    ('{"name": "f", "arguments": null}', "JSON object, not null"),
    ('{"name": "f", "arguments": "[1]"}', "JSON object, not a list"),
    ('{"name": "f", "arguments": "x"}', "string that holds no JSON object"),
    ("{'name': 'f'}", "Python, not JSON"),
    ('{"name": "f", "arguments": {"a": None}}', "null, true and false"),
    ('{"name": "f", "arguments": {"a": True}}', "Python, not JSON"),
    ('{"name": "f", "arguments": {"a": 1,}}', "comma after the last item"),
    ('{"name": "f", "arguments": {"a": [1, ]}}', "comma after the last item"),
    ('{"name": "f", "arguments": {"a": NaN}}', "NaN is not JSON"),
    ('{"name": "f", "arguments": {"a": -Infinity}}', "-Infinity is not JSON"),
    ('{"name": "f", "arguments": {"a": 1e999}}', "too large"),
    (with_argument("1" * 5000), "too many digits"),
    ('{"name": "f", "arguments": {"a": "x\ny"}}', "raw line break"),
    ('{"name": "f", "arguments": {"a": "x}}', "is not closed"),
    ('{"name": "f", "arguments": {"a": "\\d"}}', "Write it twice"),
    ('{"name": "f", "arguments": {"a": "\\ud800"}}', "surrogate"),
    ('{"name": "\\udfff"}', "surrogate"),
    (with_argument(nested(100_000)), "nests too deeply"),
    (with_argument(nested(MAX_DEPTH + 2)), f"deeper than {MAX_DEPTH}"),
    ('```json\n{"name": "f",}\n```', "comma after the last item"),
]


@pytest.mark.parametrize(("inner", "reason"), HERMES_MALFORMED)
def test_hermes_reports_error_for_malformed_block(inner, reason):
    text = block(inner)
    check("hermes", text, text, calls=[], errors=[(text, reason)])


NESTED = '<tool_call>{"name": "f"<tool_call>{"name": "g"}</tool_call></tool_call>'
UNTAGGED = '{"name": "f", "arguments": {}}'
HERMES_TAGS = [
    ('<tool_call>{"name": "f"', '<tool_call>{"name": "f"', [], [('<tool_call>{"name": "f"', "not closed")]),
    (
        '<tool_call>{"name": "f"} done',
        '<tool_call>{"name": "f"} done',
        [],
        [('<tool_call>{"name": "f"} done', "not closed")],
    ),
    (f"a {NESTED} b", f"a\n{NESTED}\nb", [], [(NESTED, "before the one before it ends")]),
    (
        f'<tool_call>{{"name": "f"}}\n{G}',
        f'<tool_call>{{"name": "f"}}\n{G}',
        [],
        [(f'<tool_call>{{"name": "f"}}\n{G}', "before the one before it ends")],
    ),
    ("so </tool_call> b", "so </tool_call>\nb", [], [("so </tool_call>", "without <tool_call>")]),
    (
        f"</tool_call>{F}</tool_call>",
        "</tool_call>\n</tool_call>",
        [("f", {})],
        [("</tool_call>", "without <tool_call>"), ("</tool_call>", "without <tool_call>")],
    ),
    (f"{F}{NOPE}", NOPE, [("f", {})], [(NOPE, "expecting value")]),
    (UNTAGGED, UNTAGGED, [], [(UNTAGGED, "has no tags")]),
]


@pytest.mark.parametrize(("text", "content", "calls", "errors"), HERMES_TAGS)
def test_hermes_reports_errors_for_malformed_tags(text, content, calls, errors):
    check("hermes", text, content, calls, errors)


def test_ids_follow_the_order_of_calls_and_errors_in_the_text():
    text = NOPE + block('{"name": "f"}') + block("[]") + block('{"name": "g"}')
    action = PARSERS["hermes"].parse(text, turn=7)
    assert [e.id for e in action.errors] == ["call_7_0", "call_7_2"]
    assert [c.id for c in action.calls] == ["call_7_1", "call_7_3"]


def test_arguments_keep_unicode_in_the_message():
    action = PARSERS["hermes"].parse(block('{"name": "f", "arguments": {"q": "東\\u4eac"}}'), turn=0)
    assert action.message["tool_calls"][0]["function"]["arguments"] == '{"q": "東京"}'


def test_nesting_up_to_the_limit_is_accepted_and_does_not_depend_on_the_stack():
    text = block(with_argument(nested(MAX_DEPTH)))
    assert len(PARSERS["hermes"].parse(text, turn=0).calls) == 1


THINKING = [
    ("hermes", f"<think>\nhm\n</think>\n\n{F}", "hm", "", [("f", {})]),
    ("hermes", f"hm {X}</think>do {F}", f"hm {X}", "do", [("f", {})]),
    (
        "hermes",
        "hm</think>" + block('{"name": "f", "arguments": {"a": "</think>"}}'),
        "hm",
        "",
        [("f", {"a": "</think>"})],
    ),
    ("hermes", f"<think>hm {F}", f"hm {F}", "", []),
    ("hermes", "<think>a</think>\n<think>b</think>c", "a\nb", "c", []),
    ("hermes", "<think>\n\n</think>\n\nfour", "", "four", []),
    ("hermes", "<think>a</think>It ends in </think>, see", "a", "It ends in </think>, see", []),
    ("hermes", "Write <think>x</think> so.", None, "Write <think>x</think> so.", []),
    ("hermes", "</think>four", "", "four", []),
    ("llama3", '<think>{"name": "g"}</think>{"name": "f"}', '{"name": "g"}', "", [("f", {})]),
    ("llama3", '{"name": "f", "parameters": {"a": "b</think>"}}', None, "", [("f", {"a": "b</think>"})]),
    ("llama3", '{"name": "g"}</think>{"name": "f"}', '{"name": "g"}', "", [("f", {})]),
    ("pythonic", "[g()]</think>\n[f()]", "[g()]", "", [("f", {})]),
    ("pythonic", '[f(a="b</think>")]', None, "", [("f", {"a": "b</think>"})]),
    ("pythonic", "<think>[f()]", "[f()]", "", []),
]


@pytest.mark.parametrize(("parser", "text", "reasoning", "content", "calls"), THINKING)
def test_thinking_is_parsed_as_reasoning_and_its_calls_are_ignored(parser, text, reasoning, content, calls):
    check(parser, text, content, calls, errors=[], reasoning=reasoning)


LLAMA3 = [
    ("", "", [], []),
    ("Four.", "Four.", [], []),
    ('{"name": "f", "parameters": {"a": "é"}}', "", [("f", {"a": "é"})], []),
    ('<|python_tag|>{"name": "f", "arguments": {}}', "", [("f", {})], []),
    ('Hm.<|python_tag|>{"name": "f"}', "Hm.", [("f", {})], []),
    ('{"name": "f"}; {"name": "g", "parameters": {"a": ";"}};', "", [("f", {}), ("g", {"a": ";"})], []),
    ('{"type": "function", "name": "f", "parameters": {}}', "", [("f", {})], []),
    ('```json\n{"name": "f", "parameters": {}}\n```', "", [("f", {})], []),
    ('{"name": "f", "parameters": {"a": "<|python_tag|>"}}', "", [("f", {"a": "<|python_tag|>"})], []),
    ('{"answer": 4}', '{"answer": 4}', [], []),
    ('{"name": "Bob", "age": 3}', '{"name": "Bob", "age": 3}', [], []),
    ('[{"name": "Bob"}]', '[{"name": "Bob"}]', [], []),
    ('{"name": "f"}{"name": "g"}', '{"name": "g"}', [("f", {})], [('{"name": "g"}', "Separate calls with ;")]),
    (
        '{"name": "f"}; {"name": 1}; {"name": "g"}',
        '{"name": 1}',
        [("f", {}), ("g", {})],
        [('{"name": 1}', "not a number")],
    ),
    ('{"name": "f"}; {"x": 1}', '{"x": 1}', [("f", {})], [('{"x": 1}', '"parameters"')]),
    ("<|python_tag|>print(1)", "print(1)", [], [("print(1)", "expecting value")]),
    ('<|python_tag|>{"x": 1}', '{"x": 1}', [], [('{"x": 1}', 'no "name"')]),
]


@pytest.mark.parametrize(("text", "content", "calls", "errors"), LLAMA3)
def test_llama3_parses_content_and_tool_calls(text, content, calls, errors):
    check("llama3", text, content, calls, errors)


LLAMA3_REFUSED = [
    ('{"name": "f", "parameters": {"a": 1}', "ends too early"),
    ("{'name': 'f'}", "Python, not JSON"),
    ('{"parameters": {}}', 'no "name"'),
    ('[{"name": "f", "parameters": {}}]', "not a list"),
    ('So: {"name": "f", "parameters": {}}', "alone"),
    ("<|python_tag|>", "Nothing follows"),
]


@pytest.mark.parametrize(("text", "reason"), LLAMA3_REFUSED)
def test_llama3_reports_malformed_text_as_one_error(text, reason):
    check("llama3", text, text, calls=[], errors=[(text, reason)])


PYTHONIC = [
    ("", "", [], []),
    ("Four.", "Four.", [], []),
    ('[f(a=1, b="x"), g()]', "", [("f", {"a": 1, "b": "x"}), ("g", {})], []),
    (
        "[f(a=-1.5, b=[True, None], c={'k': 'é'}, d=(1, 2),)]",
        "",
        [("f", {"a": -1.5, "b": [True, None], "c": {"k": "é"}, "d": [1, 2]})],
        [],
    ),
    ("<|python_start|>[math.add(a=1)]<|python_end|>", "", [("math.add", {"a": 1})], []),
    ("```python\n[f(\n  a=1,\n)]\n```", "", [("f", {"a": 1})], []),
    ('[f(a="\\d")]', "", [("f", {"a": "\\d"})], []),
    ("[1, 2]", "[1, 2]", [], []),
    ("[]", "[]", [], []),
    ("[f(1)]", "f(1)", [], [("f(1)", "no name")]),
    ("[f(a=1, a=2)]", "f(a=1, a=2)", [], [("f(a=1, a=2)", "given twice")]),
    ("[f(**{'a': 1})]", "f(**{'a': 1})", [], [("f(**{'a': 1})", "**")]),
    ("[f(*[1])]", "f(*[1])", [], [("f(*[1])", "no name")]),
    ("[f(a=x), g(é=1)]", "f(a=x)", [("g", {"é": 1})], [("f(a=x)", "not a literal")]),
    ("[f(a=true)]", "f(a=true)", [], [("f(a=true)", "Write True")]),
    (
        "[f(a=__import__('os').getcwd())]",
        "f(a=__import__('os').getcwd())",
        [],
        [("f(a=__import__('os').getcwd())", "not a literal")],
    ),
    ("[f(a=1 + 1)]", "f(a=1 + 1)", [], [("f(a=1 + 1)", "not a literal")]),
    ("[f(a=-True)]", "f(a=-True)", [], [("f(a=-True)", "not a literal")]),
    ("[f(a=b'x')]", "f(a=b'x')", [], [("f(a=b'x')", "not a literal")]),
    ("[f(a={1: 2})]", "f(a={1: 2})", [], [("f(a={1: 2})", "keys of a dict")]),
    ("[f(a={**{}})]", "f(a={**{}})", [], [("f(a={**{}})", "keys of a dict")]),
    ("[f(a=1e999)]", "f(a=1e999)", [], [("f(a=1e999)", "not finite")]),
    ("[f(a='\\ud800')]", "f(a='\\ud800')", [], [("f(a='\\ud800')", "surrogate")]),
    ("[f(a=1), 3]", "3", [("f", {"a": 1})], [("3", "not a call")]),
    ("[f()()]", "f()()", [], [("f()()", "name of a tool")]),
]


@pytest.mark.parametrize(("text", "content", "calls", "errors"), PYTHONIC)
def test_pythonic_parses_content_and_tool_calls(text, content, calls, errors):
    check("pythonic", text, content, calls, errors)


PYTHONIC_REFUSED = [
    ("[f(a=1) for a in b]", "not a list of calls"),
    ("[f(a=1)] ok", "not a Python list"),
    ("[f(a=1]", "not a Python list"),
    ("f(a=1)", "outside a list"),
    ("<|python_tag|>", "not a Python list"),
]


@pytest.mark.parametrize(("text", "reason"), PYTHONIC_REFUSED)
def test_pythonic_reports_malformed_text_as_one_error(text, reason):
    check("pythonic", text, text, calls=[], errors=[(text, reason)])


DEEP = [
    nested(150),
    nested(3_000),
    "-" * 50_000 + "1",
    "not " * 20_000 + "1",
    "1+" * 20_000 + "1",
    "lambda:" * 5_000 + "1",
    "0x" + "f" * 5_000,
    "1" * 5_000,
    "\0",
]


def test_pythonic_reads_a_long_dotted_name_and_refuses_a_long_chain_of_calls():
    name = "f" + ".a" * 900
    check("pythonic", f"[{name}(x=1)]", "", calls=[(name, {"x": 1})], errors=[])
    text = "[f" + "()" * 400 + "(x=1)]"
    check("pythonic", text, text[1:-1], calls=[], errors=[(text[1:-1], "name of a tool")])


@pytest.mark.parametrize("value", DEEP, ids=range(len(DEEP)))
def test_pythonic_reports_error_for_values_python_cannot_parse(value):
    action = PARSERS["pythonic"].parse(f"[f(a={value})]", turn=0)
    assert not action.calls
    assert len(action.errors) == 1
    check_invariants(action, turn=0)


ADVICE = "My action is not correct"
SEARCH_R1 = [
    ("", "", None, [], []),
    ("<think>hm</think>\n<search> who? </search>", "", "hm", [("search", {"query": "who?"})], []),
    ("<think>hm</think><answer>\nBeijing 東\n</answer>", "Beijing 東", "hm", [], []),
    ("hm <search>x</search></think><answer>b</answer>", "b", "hm <search>x</search>", [], []),
    ("<search>a</search><answer>b</answer>", "<answer>b</answer>", None, [("search", {"query": "a"})], []),
    ("<answer>b</answer><search>a</search>", "b", None, [], []),
    ("<search>a</search><search>b</search>", "<search>b</search>", None, [("search", {"query": "a"})], []),
    ("<search>a <answer>b</answer>", "b", None, [], []),
    ("so <search>a\nb</search>\n", "so", None, [("search", {"query": "a\nb"})], []),
    ("<answer></answer>", "", None, [], []),
    ("<think>hm</think>", "", "hm", [], [("<think>hm</think>", ADVICE)]),
    (
        "<think>hm <search>a</search>",
        "",
        "hm <search>a</search>",
        [],
        [("<think>hm <search>a</search>", "<think> is not closed")],
    ),
]


@pytest.mark.parametrize(("text", "content", "reasoning", "calls", "errors"), SEARCH_R1)
def test_search_r1_parses_reasoning_searches_and_answers(text, content, reasoning, calls, errors):
    check("search_r1", text, content, calls, errors, reasoning)


SEARCH_R1_REFUSED = [
    ("Beijing", "between <search> and </search>"),
    ("Beijing", "between <answer> and </answer>"),
    ("<search>a", "<search> is not closed"),
    ("<answer>a</search>", "<answer> is not closed"),
    ("a</search>", ADVICE),
    ("<search> </search>", "query is empty"),
]


@pytest.mark.parametrize(("text", "reason"), SEARCH_R1_REFUSED)
def test_search_r1_reports_malformed_text_as_one_error(text, reason):
    check("search_r1", text, text, calls=[], errors=[(text, reason)])


TO_RUN = "between <code> and </code>"
RETOOL = [
    ("", "", None, [], []),
    ("Let me see. <code>print(1)</code>", "Let me see.", None, [("python", {"code": "print(1)"})], []),
    ("<code>\n```python\nprint(1)\n```\n</code>", "", None, [("python", {"code": "print(1)"})], []),
    ("<code>```py\nif 1:\n    x = 2```</code>", "", None, [("python", {"code": "if 1:\n    x = 2"})], []),
    ("<code>\n\n  a = 1\n  b = 2\n\n</code>", "", None, [("python", {"code": "  a = 1\n  b = 2"})], []),
    ("<code>  print(1) </code>", "", None, [("python", {"code": "print(1)"})], []),
    ("<code>print('<answer>2</answer>')</code>", "", None, [("python", {"code": "print('<answer>2</answer>')"})], []),
    ("<code>a</code><answer>1</answer>", "<answer>1</answer>", None, [("python", {"code": "a"})], []),
    ("So <answer>\\boxed{東}</answer> <code>a</code>", "\\boxed{東}", None, [], []),
    ("<think>hm</think><code>a</code>", "", "hm", [("python", {"code": "a"})], []),
    ("<think><code>a</code></think><answer>b</answer>", "b", "<code>a</code>", [], []),
    ("<interpreter>1</interpreter><answer>1</answer>", "1", None, [], []),
    ("<code>if a <answer> b</code>", "", None, [("python", {"code": "if a <answer> b"})], []),
]


@pytest.mark.parametrize(("text", "content", "reasoning", "calls", "errors"), RETOOL)
def test_retool_parses_reasoning_code_calls_and_answers(text, content, reasoning, calls, errors):
    check("retool", text, content, calls, errors, reasoning)


RETOOL_REFUSED = [
    ("42", TO_RUN),
    ("42", "between <answer> and </answer>"),
    ("<code>print(1)", "<code> is not closed"),
    ("<code>print(1)</answer>", "<code> is not closed"),
    ("print(1)</code>", TO_RUN),
    ("```python\nprint(1)\n```", TO_RUN),
    ("<search>a</search>", TO_RUN),
    ("<interpreter>1</interpreter>", TO_RUN),
    ("<code>\n \n</code>", "program is empty"),
    ("<code>```python\n```</code>", "program is empty"),
    ("<CODE>1</CODE>", TO_RUN),
]


@pytest.mark.parametrize(("text", "reason"), RETOOL_REFUSED)
def test_retool_reports_malformed_text_as_one_error(text, reason):
    check("retool", text, text, calls=[], errors=[(text, reason)])


TEMPLATES = [
    ('{{ \'<tool_call>\\n{"name": "\' + tool_call.name }} "parameters":', "hermes"),
    ('Respond in the format {"name": function name, "parameters": dictionary of argument name}', "llama3"),
    ("{{- '{\"name\": \"' + tool_call.name + '\", ' }}{{- '\"parameters\": ' }}", "llama3"),
    ("{%- if builtin_tools %}{{- '<|python_tag|>' + tool_call.name + '.call(' }}", "llama3"),
    ('Use the format [func_name1(params_name1=params_value1), func_name2(params)] "parameters": ', "pythonic"),
    ("{{- '[' -}}{{- tool_call.name + '(' -}}", "pythonic"),
    ("{% for message in messages %}{{ message['content'] }}{% endfor %}", "hermes"),
    ("", "hermes"),
    ("'<tool_call>\\n<function=' + call.name + '>\\n' '<parameter=' + name + '>'", "qwen3_coder"),
    ("'<tool_call>' + tc.name <arg_key>{{ k }}</arg_key>", "glm45"),
    (KIMI, "kimi_k2"),
    ("'<｜tool▁call▁begin｜>' + tool['type'] + '<｜tool▁sep｜>' + '<tool_call>'", "deepseek_v3"),
    (GEMMA4, "gemma4"),
    (GPT_OSS, "harmony"),
    (QWEN3, "hermes"),
]


@pytest.mark.parametrize(("template", "name"), TEMPLATES)
def test_detect_reads_the_parser_off_the_template(template, name):
    assert detect(template) == name


def test_parser_registry_keys_match_parser_names():
    assert {name: parser.name for name, parser in PARSERS.items()} == {
        name: name
        for name in (
            *("hermes", "llama3", "pythonic", "search_r1", "retool"),
            *("qwen3_coder", "glm45", "kimi_k2", "deepseek_v3", "gemma4", "harmony"),
        )
    }


text_values = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
tag_values = st.sampled_from(["<tool_call>", "</tool_call>", "</think>", "<|python_tag|>", "```", ";", "\\", "\0"])
leaves = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | text_values
    | tag_values
)
json_values = st.recursive(
    leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text_values, inner, max_size=3), max_leaves=8
)
names = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8).filter(str.strip)
calls_made = st.lists(st.tuples(names, st.dictionaries(text_values, json_values, max_size=3)), min_size=1, max_size=3)


def as_hermes(calls, ascii_only):
    rendered = (json.dumps({"name": n, "arguments": a}, ensure_ascii=ascii_only) for n, a in calls)
    return "\n".join(block(call) for call in rendered)


def test_hermes_reads_arguments_with_a_tag_and_an_end_of_thinking():
    arguments = {"a": ["<tool_call>"], "b": "</think>"}
    check("hermes", as_hermes([("f", arguments)], False), "", calls=[("f", arguments)], errors=[])


@settings(STABLE, max_examples=70)
@given(calls_made, st.booleans())
def test_hermes_parse_round_trips_rendered_calls(calls, ascii_only):
    action = PARSERS["hermes"].parse(as_hermes(calls, ascii_only), turn=0)
    assert [(c.name, c.arguments) for c in action.calls] == calls
    assert not action.errors
    assert action.message["content"] == ""
    check_invariants(action, turn=0)


@settings(STABLE, max_examples=40)
@given(calls_made)
def test_llama3_parse_round_trips_rendered_calls(calls):
    text = "; ".join(json.dumps({"name": n, "parameters": a}) for n, a in calls)
    action = PARSERS["llama3"].parse(text, turn=0)
    assert [(c.name, c.arguments) for c in action.calls] == calls
    assert not action.errors


@settings(STABLE, max_examples=40)
@given(st.dictionaries(st.from_regex(r"v_[a-z0-9]{1,5}", fullmatch=True), json_values, min_size=1, max_size=3))
def test_pythonic_parse_round_trips_rendered_arguments(arguments):
    text = f"[f({', '.join(f'{k}={v!r}' for k, v in arguments.items())}), g()]"
    action = PARSERS["pythonic"].parse(text, turn=0)
    assert [(c.name, c.arguments) for c in action.calls] == [("f", arguments), ("g", {})]
    assert not action.errors


WELL_FORMED = [
    "The answer is 4.",
    "<think>\nplan\n</think>\n\n" + block('{"name": "f", "arguments": {"q": "東京", "n": [1, -2.5e3, null]}}'),
    block('{"name": "f", "arguments": {"a": {"b": "c"}}}') + "\n" + block('{"name": "g", "arguments": {}}'),
    '<|python_tag|>{"name": "f", "parameters": {"a": "b"}}; {"name": "g", "parameters": {}}',
    '[f(a=1, b="x", c=[True, {"k": None}]), g()]',
    "<think>plan</think>\n<search>who wrote it?</search>",
    "<think>plan</think>\n<answer>Beijing</answer>",
]
INSERTS = [
    "<tool_call>",
    "</tool_call>",
    "<think>",
    "</think>",
    "<search>",
    "</search>",
    "<answer>",
    "</answer>",
    "<|python_tag|>",
    "<|python_start|>",
    "```",
    "```json\n",
    "{",
    "}",
    "[",
    "]",
    "(",
    ")",
    ",",
    ";",
    ":",
    "'",
    '"',
    "\\",
    "\\u",
    "\\ud800",
    "None",
    "NaN",
    "-Infinity",
    "1e999",
    "0x",
    "*",
    "**",
    "=",
    "\0",
    "\x1b",
    "\r",
    "\n",
    "\u2028",
    "\ufeff",
    "é",
    "😀",
    "lambda: ",
    "{" * 80,
    nested(70),
    '{"a":' * 2_000,
    "[" * 100_000,
    "-" * 5_000,
]
mutation = st.tuples(
    st.sampled_from(["cut", "keep", "double", "insert", "insert", "swap"]),
    st.integers(0, 400),
    st.integers(0, 60),
    st.sampled_from(INSERTS) | text_values,
)
mutated = st.tuples(st.sampled_from(WELL_FORMED), st.lists(mutation, min_size=1, max_size=6))


def mutate(text, mutations):
    for kind, start, length, inserted in mutations:
        start %= len(text) + 1
        end = start + length
        match kind:
            case "cut":
                text = text[:start] + text[end:]
            case "keep":
                text = text[: start + 20]
            case "double":
                text = text[:end] + text[start:]
            case "insert":
                text = text[:start] + inserted + text[start:]
            case "swap":
                text = text[start:] + text[:start]
    return text


@pytest.mark.slow
@settings(STABLE, max_examples=150)
@given(mutated)
def test_no_parser_raises_on_mutated_outputs(case):
    text = mutate(*case)
    for parser in PARSERS.values():
        action = parser.parse(text, turn=5)
        check_invariants(action, turn=5)
        if not text.strip():
            assert action.message == {"role": "assistant", "content": ""}
            assert not action.errors


def test_an_error_counts_characters_from_the_start_of_the_json():
    with pytest.raises(MalformedCall, match="broken at character 5, '1}'"):
        decode_prefix('text {"a" 1}', 5)
