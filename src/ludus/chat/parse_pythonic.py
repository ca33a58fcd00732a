"""Parser of the tool-call format of Llama 3.2, Llama 4 and others: a list of calls, `[f(a=1, b="x"), g()]`.

The text is parsed with `ast` and never evaluated.
"""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

from ludus.chat.parse_json import MAX_DEPTH, MalformedCall, ParsedDraft, check_plain, parse_whole, strip_fence
from ludus.tools.base import ToolSchema
from ludus.types import JSON, Action

_MARKS = re.compile(r"^\s*<\|(?:python_tag|python_start)\|>|<\|python_end\|>\s*$")
_LIST_START = re.compile(r"\[\s*[A-Za-z_][\w.]*\s*\(")
_BARE_CALL = re.compile(r"[A-Za-z_][\w.]*\(\s*\w+\s*=.*\)", re.DOTALL)
_EXAMPLE = 'Write [name(argument="value")] and nothing else.'
_JSON_WORDS = {"true": "True", "false": "False", "null": "None"}


@dataclass(frozen=True, slots=True)
class PythonicParser:
    """Parser of a list of calls with literal keyword arguments; tuples become lists.

    Accepts a leading `<|python_tag|>` or `<|python_start|>`, a trailing `<|python_end|>`, and a Markdown
    fence around the whole text. A list that does not start with a call is content.

    Errors: a list that does not parse (one error for the whole list), positional, repeated or starred arguments,
    values that are not literals, items that are not calls, and a call outside a list.
    """

    name: str = "pythonic"

    def parse(self, text: str, *, turn: int, schemas: Sequence[ToolSchema] = ()) -> Action:
        """Return the message, the calls and the errors of turn `turn`. Never raises."""
        return parse_whole(text, turn, _fill)


def _fill(draft: ParsedDraft, text: str) -> None:
    inner, num_marks = _MARKS.subn("", text)
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
        arguments[keyword.arg] = _literal(keyword.value, MAX_DEPTH)
    return _dotted_name(item.func), check_plain(arguments)


def _dotted_name(func: ast.expr) -> str:
    parts: list[str] = []
    while isinstance(func, ast.Attribute):
        parts.append(func.attr)
        func = func.value
    if not isinstance(func, ast.Name):
        raise MalformedCall(f"The name of a tool is missing before the parenthesis. {_EXAMPLE}")
    return ".".join([func.id, *reversed(parts)])


def _literal(node: ast.expr, levels: int) -> JSON:
    """Return the JSON value of a literal. Raises MalformedCall for anything else."""
    if levels < 0:
        raise MalformedCall(f"The arguments nest deeper than {MAX_DEPTH} levels. Make them flatter.")
    match node:
        case ast.Constant(value=None | bool() | int() | float() | str() as value):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)) if not isinstance(
            value, bool
        ):
            return -value
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_literal(item, levels - 1) for item in items]
        case ast.Dict(keys=keys, values=values):
            return {_key(k): _literal(v, levels - 1) for k, v in zip(keys, values, strict=True)}
        case ast.Name(id=word) if word in _JSON_WORDS:
            raise MalformedCall(f"{word} is not Python. Write {_JSON_WORDS[word]}.")
    raise MalformedCall("A value is not a literal. Use strings in quotes, numbers, True, False, None, lists and dicts.")


def _key(node: ast.expr | None) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    raise MalformedCall("The keys of a dict in the arguments are strings in quotes.")
