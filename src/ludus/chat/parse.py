"""Parse the model's text to an `Action`: one parser per tool-call format.

A parser takes the decoded text of one action, without the end-of-turn token, and returns an `Action`. Rules
for all parsers:

- A parser never raises. A malformed call becomes a `CallError` whose reason describes the correct form.
- Calls and errors are numbered together, in the order of the text: ids are `call_{turn}_{index}`,
  or the sampled id in formats that have one (Kimi K2).
- `message["content"]` is the text outside the well-formed calls, stripped. Malformed calls stay in it, so
  that the transcript is complete.
- Thinking is stored in `message["reasoning_content"]`; calls inside it are ignored (see `split_thinking`).
- Arguments are plain JSON: finite numbers, no lone surrogates, at most `MAX_DEPTH` levels. Their text in the
  message has unescaped Unicode and parses to the same values.
- Empty text yields an action with empty content, without calls or errors.

To add a format, add a parser and a line in `PARSERS`.
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import cast

from ludus.chat.parse_json import (
    CALL_CLOSE,
    CALL_OPEN,
    HERMES,
    THINK_CLOSE,
    THINK_OPEN,
    MalformedCall,
    ParsedDraft,
    ToolCallParser,
    call_of,
    check_plain,
    decode,
    read_llama3,
    strip_fence,
    whole_text_parser,
)
from ludus.tools.base import ToolSchema
from ludus.types import JSON

_PYTHON_MARKS = re.compile(r"^\s*<\|(?:python_tag|python_start)\|>|<\|python_end\|>\s*$")
_LIST_START = re.compile(r"\[\s*[A-Za-z_][\w.]*\s*\(")
_BARE_CALL = re.compile(r"[A-Za-z_][\w.]*\(\s*\w+\s*=.*\)", re.DOTALL)
_EXAMPLE = 'Write [name(argument="value")] and nothing else.'
_JSON_WORDS = {"true": "True", "false": "False", "null": "None"}
_NOT_LITERAL = "A value is not a literal. Use strings in quotes, numbers, True, False, None, lists and dicts."


def read_pythonic(draft: ParsedDraft, text: str, _: Sequence[ToolSchema]) -> None:
    """Read a list of calls with literal keyword arguments, `[f(a=1, b="x"), g()]` (Llama 3.2, Llama 4 and others), with
    `ast`, without evaluating it; tuples become lists.

    Accepts a leading `<|python_tag|>` or `<|python_start|>`, a trailing `<|python_end|>`, and a Markdown
    fence around the whole text. A list that does not start with a call is content.

    Errors: a list that does not parse (one error for the whole list), positional, repeated or starred arguments,
    values that are not literals, items that are not calls, and a call outside a list.
    """
    inner, num_marks = _PYTHON_MARKS.subn("", text)
    body = strip_fence(inner)
    if not num_marks and not _LIST_START.match(body):
        if _BARE_CALL.fullmatch(body):
            draft.add_error(body, f"The call stands outside a list. {_EXAMPLE}")
        else:
            draft.add_text(text)
        return
    try:
        items = _items(body)
    except MalformedCall as error:
        draft.add_error(body or text.strip(), error.reason)
        return
    for item in items:
        try:
            draft.add_call(*_call_of(item))
        except MalformedCall as error:
            draft.add_error(ast.get_source_segment(body, item) or body, error.reason)


def _items(body: str) -> list[ast.expr]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the model may write invalid escapes such as "\d"
            tree = ast.parse(body, mode="eval").body
    except SyntaxError as error:
        raise MalformedCall(f"This is not a Python list of calls ({error.msg}). {_EXAMPLE}") from None
    except (ValueError, RecursionError, MemoryError):
        raise MalformedCall(f"This is not a Python list of calls, or nests too deeply. {_EXAMPLE}") from None
    if not isinstance(tree, ast.List) or not tree.elts:
        raise MalformedCall(f"This is not a list of calls. {_EXAMPLE}")
    return tree.elts


def _call_of(item: ast.expr) -> tuple[str, dict[str, JSON]]:
    if not isinstance(item, ast.Call):
        raise MalformedCall(f"An item of the list is not a call. {_EXAMPLE}")
    if item.args:
        raise MalformedCall("An argument has no name. Write every argument as name=value.")
    arguments: dict[str, JSON] = {}
    for keyword in item.keywords:
        if keyword.arg is None:
            raise MalformedCall("** is not allowed. Write every argument as name=value.")
        if keyword.arg in arguments:
            raise MalformedCall(f"The argument {keyword.arg} is given twice. Give it once.")
        arguments[keyword.arg] = _literal(keyword.value)
    owner, names = item.func, []
    while isinstance(owner, ast.Attribute):
        names.append(owner.attr)
        owner = owner.value
    if not isinstance(owner, ast.Name):
        raise MalformedCall(f"The name of a tool is missing before the parenthesis. {_EXAMPLE}")
    return ".".join((owner.id, *reversed(names))), check_plain(arguments)


def _literal(node: ast.expr) -> JSON:
    """Return the JSON value of a literal. Raises MalformedCall for anything else."""
    for one in ast.walk(node):
        match one:
            case ast.Name(id=word) if word in _JSON_WORDS:
                raise MalformedCall(f"{word} is not Python. Write {_JSON_WORDS[word]}.")
            case ast.Dict(keys=keys):
                if not all(isinstance(key, ast.Constant) and isinstance(key.value, str) for key in keys):
                    raise MalformedCall("The keys of a dict in the arguments are strings in quotes.")
            case ast.UAdd():
                raise MalformedCall(_NOT_LITERAL)
    try:
        return cast(JSON, json.loads(json.dumps(ast.literal_eval(node))))
    except (ValueError, TypeError, RecursionError):
        raise MalformedCall(_NOT_LITERAL) from None


_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>(.*)</function>\s*", re.DOTALL)
_PARAMETER = re.compile(r"\s*<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>\s*", re.DOTALL)
_ARGUMENT = re.compile(r"\s*<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>\s*", re.DOTALL)
_KIMI_ID = re.compile(r"(?:functions\.)?([^:]+)(?::\d+)?")
_GEMMA_CALL = re.compile(r"\s*call:([^{]*)(\{.*\})\s*", re.DOTALL)
_GEMMA_KEY = re.compile(r"([{,]\s*)([^\s{}\[\],:\"]+)\s*:")
_GEMMA_QUOTE = '<|"|>'
_HARMONY_END = re.compile(r"<\|(?:end|call|return)\|>")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_CHANNEL = re.compile(r"<\|channel\|>(\w+)")


ReadCall = tuple[str, dict[str, JSON], str]
"""Name and arguments of a call, and its id, empty if the format has none."""


def _marked_parser(
    name: str,
    read_body: Callable[[str, Sequence[ToolSchema]], ReadCall],
    marks: tuple[str, str] = (CALL_OPEN, CALL_CLOSE),
    section: tuple[str, ...] = (),
    thinking: tuple[str, str] = (THINK_OPEN, THINK_CLOSE),
) -> ToolCallParser:
    """Create a parser of calls between two `marks`; `read_body` parses the text between them.

    Text around the calls is content, without the marks of `section`. A call that is not closed, or that `read_body`
    rejects, is an error.
    """
    opening, closing = marks

    def without_section(text: str) -> str:
        for mark in section:
            text = text.replace(mark, "")
        return text

    def read(draft: ParsedDraft, text: str, schemas: Sequence[ToolSchema]) -> None:
        before, *blocks = text.split(opening)
        draft.add_text(without_section(before))
        for block in blocks:
            body, closed, after = block.partition(closing)
            try:
                if not closed:
                    raise MalformedCall(f"The call is not closed. Write {closing} after it.")
                tool, arguments, call_id = read_body(body, schemas)
                check_plain({tool: None})
                draft.add_call(tool, check_plain(arguments), call_id)
            except MalformedCall as error:
                draft.add_error(f"{opening}{body}{closed}".strip(), error.reason)
            draft.add_text(without_section(after))

    def is_inside_call(text: str, at: int) -> bool:
        start = text.rfind(opening, 0, at)
        end = text.find(closing, at)
        following = text.find(opening, at)
        return start >= 0 and closing not in text[start:at] and end >= 0 and not 0 <= following < end

    return ToolCallParser(name, read, is_inside_call, thinking)


def _read_harmony(draft: ParsedDraft, text: str, _: Sequence[ToolSchema]) -> None:
    """Read the messages of gpt-oss in channels; `to=functions.NAME` in the header of one is a call.

    The channel `analysis` is thinking; `final`, and `commentary` without a recipient, are content.
    """
    thoughts = list[str]()
    for block in text.split("<|start|>"):
        header, mark, rest = block.partition("<|message|>")
        body, *after = _HARMONY_END.split(rest, maxsplit=1)
        recipient, channel = _RECIPIENT.search(header), _CHANNEL.search(header)
        if not mark:
            draft.add_text(block)
        elif recipient:
            call = {"name": recipient[1].removeprefix("functions.")}
            try:
                arguments = decode(body) if body.strip() else {}
                draft.add_call(*call_of(call | {"arguments": arguments}, "arguments"))
            except MalformedCall as error:
                draft.add_error(block.strip(), error.reason)
        elif channel and channel[1] == "analysis":
            thoughts.append(body.strip())
        else:
            draft.add_text(body)
        draft.add_text("".join(after))
    draft.reasoning = "\n".join(filter(None, thoughts)) if thoughts else None


def _read_qwen3_coder(body: str, schemas: Sequence[ToolSchema]) -> ReadCall:
    function = _FUNCTION.fullmatch(body)
    if not function:
        raise MalformedCall("The call is not <function=NAME> ... </function>.")
    name, inner = function[1].strip(), function[2]
    pairs = _read_pairs(_PARAMETER, inner, "Write each argument as <parameter=NAME>, its value and </parameter>.")
    return name, _typed(name, pairs, schemas), ""


def _read_glm(body: str, schemas: Sequence[ToolSchema]) -> ReadCall:
    name, key, rest = body.partition("<arg_key>")
    if not name.strip() or "<" in name:
        raise MalformedCall("The call has no name. Write the name of a tool directly after <tool_call>.")
    advice = "Write each argument as <arg_key>NAME</arg_key> and <arg_value>VALUE</arg_value>."
    return name.strip(), _typed(name.strip(), _read_pairs(_ARGUMENT, key + rest, advice), schemas), ""


def _read_pairs(pattern: re.Pattern[str], text: str, advice: str) -> list[tuple[str, str]]:
    pairs, position = [], 0
    while pair := pattern.match(text, position):
        pairs.append((pair[1].strip(), pair[2]))
        position = pair.end()
    if text[position:].strip():
        raise MalformedCall(f"The arguments cannot be read. {advice}")
    return pairs


def _typed(name: str, pairs: Sequence[tuple[str, str]], schemas: Sequence[ToolSchema]) -> dict[str, JSON]:
    """Return the arguments: text where the tool declares a string, otherwise JSON, or text if it is not JSON."""
    functions = [schema["function"] for schema in schemas if schema["function"]["name"] == name]
    declared = functions[0]["parameters"].get("properties", {}) if functions else {}
    arguments: dict[str, JSON] = dict(pairs)
    for key, text in pairs:
        with suppress(MalformedCall):
            arguments[key] = text if declared.get(key, {}).get("type") == "string" else cast("JSON", decode(text))
    return arguments


def _read_kimi(body: str, _: Sequence[ToolSchema]) -> ReadCall:
    call_id, mark, arguments = body.partition("<|tool_call_argument_begin|>")
    named = _KIMI_ID.fullmatch(call_id.strip())
    if not (mark and named):
        raise MalformedCall("Write functions.NAME:INDEX<|tool_call_argument_begin|> and a JSON object.")
    return *call_of({"name": named[1], "arguments": decode(arguments)}, "arguments"), call_id.strip()


def _read_deepseek(body: str, _: Sequence[ToolSchema]) -> ReadCall:
    """Read `function<sep>NAME` and fenced JSON (V3, R1), or `NAME<sep>` and JSON (V3.1)."""
    head, mark, rest = body.partition("<｜tool▁sep｜>")
    if not mark:
        raise MalformedCall("Write NAME<｜tool▁sep｜> and a JSON object.")
    name, arguments = head.strip(), rest
    if name == "function":
        name, arguments = rest.split("\n", 1) if "\n" in rest else (rest, "")
    return *call_of({"name": name.strip(), "arguments": decode(strip_fence(arguments))}, "arguments"), ""


def _read_gemma(body: str, _: Sequence[ToolSchema]) -> ReadCall:
    call = _GEMMA_CALL.fullmatch(body)
    if not call:
        raise MalformedCall("Write call:NAME{argument:value}.")
    return *call_of({"name": call[1].strip(), "arguments": decode(_gemma_json(call[2]))}, "arguments"), ""


def _gemma_json(text: str) -> str:
    """Return JSON for `{key:<|"|>text<|"|>,other:1}`."""
    parts = text.split(_GEMMA_QUOTE)
    structure = [_GEMMA_KEY.sub(r'\1"\2":', part) for part in parts[::2]]
    strings = [json.dumps(part, ensure_ascii=False) for part in parts[1::2]]
    return "".join(a + b for a, b in zip(structure, [*strings, ""], strict=False))


_MARKED = (
    _marked_parser("qwen3_coder", _read_qwen3_coder),
    _marked_parser("glm45", _read_glm),
    _marked_parser(
        "kimi_k2",
        _read_kimi,
        ("<|tool_call_begin|>", "<|tool_call_end|>"),
        ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    ),
    _marked_parser(
        "deepseek_v3",
        _read_deepseek,
        ("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"),
        ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    ),
    _marked_parser(
        "gemma4", _read_gemma, ("<|tool_call>", "<tool_call|>"), thinking=("<|channel>thought", "<channel|>")
    ),
    ToolCallParser("harmony", _read_harmony, thinking=None),
)


ANSWER = "answer"
"""Tag of the answer in all protocols."""
TO_ANSWER = f"Give the answer inside <{ANSWER}> and </{ANSWER}>."
_ADVICE = f"To answer, I write the answer between <{ANSWER}> and </{ANSWER}>."


@dataclass(frozen=True, slots=True)
class TagProtocol:
    """Protocol for base models in which a call is the `argument` of the `tool`, written between the tags `call`.

    Results are returned between the tags `result`; error messages refer to the argument as `label`. The prompt begins
    with `instructions`. If it `is_program`, its first line keeps its indentation, and a Markdown fence is removed.
    """

    name: str
    call: str
    result: str
    tool: str
    argument: str
    label: str
    advice: str
    instructions: str
    is_program: bool = False


SEARCH_R1 = TagProtocol(
    name="search_r1",
    call="search",
    result="information",
    tool="search",
    argument="query",
    label="query",
    advice="To search, I write the query between <search> and </search>.",
    instructions=(
        "Think inside <think> and </think>. To look something up, write <search> query </search>; what is "
        f"found comes back inside <information> and </information>. {TO_ANSWER}"
    ),
)
RETOOL = TagProtocol(
    name="retool",
    call="code",
    result="interpreter",
    tool="python",
    argument="code",
    label="program",
    advice="To run a program, I write it between <code> and </code>.",
    instructions=(
        "Think step by step. To run a Python program, write <code> program </code>; what it prints comes "
        f"back inside <interpreter> and </interpreter>. {TO_ANSWER}"
    ),
    is_program=True,
)


def _read_tags(protocol: TagProtocol, draft: ParsedDraft, rest: str, _: Sequence[ToolSchema]) -> None:
    """Read, for example, `<search>query</search>` as a call and `<answer>text</answer>` as the answer.

    After the thinking, only the first complete pair of tags counts, as in Search-R1. The content of an answer
    is the text between its tags. Closing tags are stop strings included in the text, so an unclosed tag is an
    error, as are a text without a pair and an empty call. An empty answer has empty content and is not an
    error.
    """
    whole = draft.whole.strip()
    if not whole:
        return
    advice = f"My action is not correct. {protocol.advice} {_ADVICE}"
    pairs = [pair for tag in (protocol.call, ANSWER) if (pair := _first_pair(rest, tag))]
    if not pairs:
        unclosed = _find_unclosed(whole, rest, protocol)
        draft.add_error(whole, f"The tag {unclosed} is not closed. {advice}" if unclosed else advice, content=rest)
        return
    start, end, tag = min(pairs)
    inner = rest[start + len(f"<{tag}>") : end - len(f"</{tag}>")]
    if tag == ANSWER:
        draft.add_text(inner)
        return
    draft.add_text(rest[:start])
    if given := _program(inner) if protocol.is_program else inner.strip():
        draft.add_call(protocol.tool, {protocol.argument: given})
    else:
        draft.add_error(rest[start:end], f"The {protocol.label} is empty. {advice}")
    draft.add_text(rest[end:])


def _program(text: str) -> str:
    inner = strip_fence(text)
    if inner != text.strip():
        return inner
    lines = text.rstrip().split("\n")
    while len(lines) > 1 and not lines[0].strip():
        del lines[0]
    return "\n".join(lines) if len(lines) > 1 else inner


def _first_pair(text: str, tag: str) -> tuple[int, int, str] | None:
    """Return start and end of the first opening tag with the next closing tag, and the tag."""
    start = text.find(f"<{tag}>")
    close = text.find(f"</{tag}>", start) if start >= 0 else -1
    return (start, close + len(f"</{tag}>"), tag) if close >= 0 else None


def _find_unclosed(whole: str, rest: str, protocol: TagProtocol) -> str:
    if whole.startswith(THINK_OPEN) and THINK_CLOSE not in whole:
        return THINK_OPEN
    return next((tag for tag in (f"<{protocol.call}>", f"<{ANSWER}>") if tag in rest), "")


_PYTHONIC_EXAMPLE = re.compile(r"\[\w+\(\w+\s*=|\bname \+ ['\"]\(['\"]")
_MARKS: Mapping[str, tuple[str, ...]] = {
    "qwen3_coder": ("<tool_call>", "<function=", "<parameter="),
    "glm45": ("<tool_call>", "<arg_key>"),
    "kimi_k2": ("<|tool_call_argument_begin|>",),
    "deepseek_v3": ("<｜tool▁call▁begin｜>",),
    "gemma4": ("<|tool_call>", "<tool_call|>"),
    "harmony": ("<|channel|>", "<|call|>"),
    "hermes": ("<tool_call>",),
}
_LLAMA3_MARKS = ("<|python_tag|>", '"parameters":')
_TAGGED = (ToolCallParser(one.name, partial(_read_tags, one)) for one in (SEARCH_R1, RETOOL))
_WHOLE = (whole_text_parser("llama3", read_llama3), whole_text_parser("pythonic", read_pythonic))
PARSERS: Mapping[str, ToolCallParser] = {parser.name: parser for parser in (HERMES, *_WHOLE, *_TAGGED, *_MARKED)}
"""The parsers by name: those of vLLM's option `--tool-call-parser`, except `harmony` (there `openai`) and the tag
protocols for base models, Search-R1's (Jin et al. 2025, arXiv:2503.09516) and ReTool's (Feng et al. 2025,
arXiv:2504.11536)."""


def detect(chat_template: str) -> str:
    """Return the name of the parser for the tool calls of a Jinja `chat_template`.

    The marks of a format mean that format; otherwise `<tool_call>` means hermes. A list of Python calls, as an
    example or as the template builds it, means pythonic; `<|python_tag|>` or a `"parameters":` key means llama3.
    The default is hermes.
    """
    for name, marks in _MARKS.items():
        if all(mark in chat_template for mark in marks):
            return name
    if _PYTHONIC_EXAMPLE.search(chat_template):
        return "pythonic"
    if any(mark in chat_template for mark in _LLAMA3_MARKS):
        return "llama3"
    return "hermes"
