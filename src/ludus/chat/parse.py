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
from collections.abc import Mapping, Sequence
from typing import cast

from ludus.chat.parse_json import (
    HERMES,
    MalformedCall,
    ParsedDraft,
    ToolCallParser,
    check_plain,
    read_llama3,
    strip_fence,
    whole_text_parser,
)
from ludus.chat.parse_marked import MARKED
from ludus.chat.parse_tags import TAGS
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
_WHOLE = (whole_text_parser("llama3", read_llama3), whole_text_parser("pythonic", read_pythonic))
PARSERS: Mapping[str, ToolCallParser] = {parser.name: parser for parser in (HERMES, *_WHOLE, *TAGS, *MARKED)}
"""The parsers by name."""


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
