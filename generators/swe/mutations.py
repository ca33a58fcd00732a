"""Bugs to put into a module: small edits of its text, located by its syntax tree.

Every kind (`kinds` in the world's `data/names.toml`) is a mistake that people make. `is_sound` returns whether the
edited module still compiles and its tree has changed.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from ludus.worlds.swe.tasks import Edit


@dataclass(frozen=True)
class SourceFile:
    """The text of a module, and the offset of each of its lines."""

    text: str
    starts: tuple[int, ...]
    lines: tuple[str, ...]

    @classmethod
    def of(cls, text: str) -> SourceFile:
        """Return the source of a text."""
        lines = tuple(text.splitlines(keepends=True))
        starts = [0]
        for line in lines:
            starts.append(starts[-1] + len(line))
        return cls(text, tuple(starts), lines)

    def place(self, line: int, column: int) -> int:
        """Return the offset of a line, counted from 1, and a column in bytes of UTF-8."""
        if line > len(self.lines):
            return len(self.text)
        return self.starts[line - 1] + len(self.lines[line - 1].encode()[:column].decode("utf-8", "ignore"))

    def span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        """Return the offsets of the start and the end of a node."""
        end_line, end_column = node.end_lineno or node.lineno, node.end_col_offset or 0
        return self.place(node.lineno, node.col_offset), self.place(end_line, end_column)

    def text_of(self, node: ast.expr | ast.stmt) -> str:
        """Return the text of a node."""
        start, end = self.span(node)
        return self.text[start:end]


Change = tuple[str, int, int, str]
"""Kind, start, end, and the new text."""
Finder = Callable[[SourceFile, ast.AST], Iterator[Change]]

_BOUNDARY: Final[Mapping[type[ast.cmpop], str]] = {ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">"}
_OPPOSITE: Final[Mapping[type[ast.cmpop], str]] = {
    ast.Eq: "!=",
    ast.NotEq: "==",
    ast.Is: "is not",
    ast.IsNot: "is",
    ast.In: "not in",
    ast.NotIn: "in",
}
_WORDS: Final[Mapping[type[ast.cmpop], str]] = {
    ast.Lt: "<",
    ast.LtE: "<=",
    ast.Gt: ">",
    ast.GtE: ">=",
    ast.Eq: "==",
    ast.NotEq: "!=",
    ast.Is: "is",
    ast.IsNot: "is not",
    ast.In: "in",
    ast.NotIn: "not in",
}
_OPERATORS: Final[Mapping[type[ast.operator], tuple[str, str]]] = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "+"),
    ast.Div: ("/", "//"),
    ast.FloorDiv: ("//", "/"),
    ast.Mod: ("%", "//"),
    ast.BitAnd: ("&", "|"),
    ast.BitOr: ("|", "&"),
    ast.LShift: ("<<", ">>"),
    ast.RShift: (">>", "<<"),
}
_NAMES: Final[Mapping[str, str]] = {
    "lower": "upper",
    "upper": "lower",
    "startswith": "endswith",
    "endswith": "startswith",
    "lstrip": "rstrip",
    "rstrip": "lstrip",
    "strip": "rstrip",
    "find": "rfind",
    "rfind": "find",
    "index": "rindex",
    "split": "rsplit",
    "rsplit": "split",
    "partition": "rpartition",
    "rpartition": "partition",
    "min": "max",
    "max": "min",
    "any": "all",
    "all": "any",
    "keys": "values",
    "values": "keys",
    "items": "keys",
    "append": "extend",
    "extend": "append",
    "floor": "ceil",
    "ceil": "floor",
    "ljust": "rjust",
    "rjust": "ljust",
    "issubset": "issuperset",
    "union": "intersection",
    "intersection": "union",
    "popleft": "pop",
    "appendleft": "append",
    "start": "end",
    "end": "start",
    "sum": "len",
    "first": "last",
    "last": "first",
    "left": "right",
    "right": "left",
    "isdigit": "isalpha",
    "isalpha": "isdigit",
    "islower": "isupper",
    "isupper": "islower",
}


def _between(source: SourceFile, left: ast.expr, right: ast.expr, word: str) -> tuple[int, int] | None:
    """Return the span of an operator between two operands; None if it is ambiguous."""
    start, end = source.span(left)[1], source.span(right)[0]
    gap = source.text[start:end]
    if "#" in gap or gap.count(word) != 1:
        return None
    at = start + gap.index(word)
    return at, at + len(word)


def comparisons(source: SourceFile, node: ast.AST) -> Iterator[Change]:
    """Yield `<` for `<=`, `!=` for `==`, `not in` for `in`."""
    match node:
        case ast.Compare(left=left, ops=[op], comparators=[right]):
            word = _WORDS[type(op)]
            place = _between(source, left, right, word)
            if place and type(op) in _BOUNDARY:
                yield "boundary", *place, _BOUNDARY[type(op)]
            elif place and type(op) in _OPPOSITE:
                yield "comparison", *place, _OPPOSITE[type(op)]


def operators(source: SourceFile, node: ast.AST) -> Iterator[Change]:
    """Yield another arithmetic operator."""
    match node:
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            word, other = _OPERATORS[type(op)]
            text = isinstance(left, ast.Constant | ast.JoinedStr) and isinstance(op, ast.Mod)
            place = _between(source, left, right, word)
            if place and not text:
                yield "operator", *place, other


def booleans(source: SourceFile, node: ast.AST) -> Iterator[Change]:
    """Yield `or` for `and`, and vice versa."""
    match node:
        case ast.BoolOp(op=op, values=[left, right, *_]):
            word, other = ("and", "or") if isinstance(op, ast.And) else ("or", "and")
            place = _between(source, left, right, word)
            if place:
                yield "boolean", *place, other


def conditions(source: SourceFile, node: ast.AST) -> Iterator[Change]:
    """Yield a negated condition."""
    match node:
        case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test):
            start, end = source.span(test)
            text = source.text[start:end]
            if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
                yield "condition", start, end, source.text_of(test.operand)
            elif isinstance(test, ast.Name | ast.Attribute | ast.Call | ast.Subscript):
                yield "condition", start, end, f"not {text}"


def numbers(source: SourceFile, node: ast.AST) -> Iterator[Change]:
    """Yield a number of an expression, plus or minus one."""
    inner: list[ast.expr] = []
    match node:
        case ast.BinOp(left=left, right=right):
            inner = [left, right]
        case ast.Compare(comparators=[right]):
            inner = [right]
        case ast.Subscript(slice=index):
            inner = [index.operand] if isinstance(index, ast.UnaryOp) else [index]
        case ast.Call(func=ast.Name(id="range"), args=given):
            inner = list(given)
    for one in inner:
        if isinstance(one, ast.Constant) and type(one.value) is int and 0 <= one.value <= 64:
            start, end = source.span(one)
            if source.text[start:end] == str(one.value):
                yield "off_by_one", start, end, str(one.value + 1)
                if one.value > 1:
                    yield "off_by_one", start, end, str(one.value - 1)


def slices(source: SourceFile, node: ast.AST) -> Iterator[Change]:
    """Yield a bound of a slice, off by one."""
    match node:
        case ast.Slice(lower=lower, upper=upper):
            for bound, sign in ((lower, "+"), (upper, "-")):
                if isinstance(bound, ast.Name | ast.Attribute):
                    start, end = source.span(bound)
                    yield "slice", start, end, f"{source.text[start:end]} {sign} 1"
                elif isinstance(bound, ast.Constant) and type(bound.value) is int:
                    start, end = source.span(bound)
                    yield "slice", start, end, str(bound.value + 1)


def arguments(source: SourceFile, node: ast.AST) -> Iterator[Change]:
    """Yield the first two arguments of a call, swapped."""
    match node:
        case ast.Call(args=[first, second, *_]) if not isinstance(second, ast.Starred):
            (start, middle), (begin, end) = source.span(first), source.span(second)
            one, two = source.text[start:middle], source.text[begin:end]
            if one != two and "\n" not in source.text[start:end] and not isinstance(first, ast.Starred):
                called = ast.unparse(node.func)
                if called not in ("isinstance", "issubclass", "hasattr", "getattr", "setattr", "super"):
                    yield "arguments", start, end, f"{two}{source.text[middle:begin]}{one}"


def names(source: SourceFile, node: ast.AST) -> Iterator[Change]:
    """Yield a method or function of the opposite meaning."""
    match node:
        case ast.Call(func=ast.Attribute(attr=name) as func) if name in _NAMES:
            end = source.span(func)[1]
            yield "name", end - len(name), end, _NAMES[name]
        case ast.Call(func=ast.Name(id=name) as func) if name in _NAMES:
            yield "name", *source.span(func), _NAMES[name]


def defaults(source: SourceFile, node: ast.AST) -> Iterator[Change]:
    """Yield another default of a parameter."""
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return
    for default in (*node.args.defaults, *node.args.kw_defaults):
        if isinstance(default, ast.Constant):
            other = _other(default.value)
            if other:
                yield "default", *source.span(default), other


def constants(source: SourceFile, node: ast.AST) -> Iterator[Change]:
    """Yield True for False, or another number, of an argument, assignment or return."""
    inner: list[ast.expr | None] = []
    match node:
        case ast.Return(value=value) | ast.Assign(value=value) | ast.keyword(value=value):
            inner = [value]
        case ast.Call(args=given):
            inner = list(given)
    for one in inner:
        if isinstance(one, ast.Constant) and isinstance(one.value, bool | int):
            yield "constant", *source.span(one), _other(one.value)


def _other(value: object) -> str:
    """Return a constant to replace another one; empty if there is none."""
    match value:
        case bool():
            return str(not value)
        case int():
            return str(value + 1)
        case " ":
            return repr("")
        case "":
            return repr(" ")
    return ""


def statements(source: SourceFile, node: ast.AST) -> Iterator[Change]:
    """Yield a removed guard, last branch or statement, or a loop that continues instead of ending."""
    for block in (node.__dict__.get(name) for name in ("body", "orelse", "finalbody")):
        if not isinstance(block, list) or not block or not isinstance(block[0], ast.stmt):
            continue
        for statement in block:
            yield from _lost(source, statement, alone=len(block) == 1)
    match node:
        case ast.Break():
            yield "loop", *source.span(node), "continue"
        case ast.Continue():
            yield "loop", *source.span(node), "break"


def _lost(source: SourceFile, statement: ast.stmt, alone: bool) -> Iterator[Change]:
    lines = source.starts[statement.lineno - 1], source.starts[statement.end_lineno or statement.lineno]
    whole = not source.text[lines[0] : source.span(statement)[0]].strip() and not alone
    match statement:
        case ast.If(body=[*_, ast.Return() | ast.Continue() | ast.Raise()], orelse=[]) if whole:
            if not source.text[lines[0] :].lstrip().startswith("elif"):
                yield "guard", *lines, ""
        case ast.If(body=[*_, last], orelse=[first, *_]):
            after = source.starts[(last.end_lineno or last.lineno)]
            if "else" in source.text[after : source.span(first)[0]]:
                yield "branch", after, source.starts[statement.end_lineno or statement.lineno], ""
        case ast.AugAssign() | ast.Expr(value=ast.Call()) if whole:
            yield "statement", *lines, ""
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]) if whole:
            yield "statement", *lines, ""


FINDERS: Final[tuple[Finder, ...]] = (
    *(comparisons, operators, booleans, conditions, numbers, slices),
    *(arguments, names, defaults, constants, statements),
)


def edits(text: str) -> Iterator[Edit]:
    """Yield all bugs of the functions of a module in the order of the tree, also unsound ones."""
    tree = ast.parse(text)
    source = SourceFile.of(text)
    for symbol, function in _functions(tree, ""):
        line = min([function.lineno, *(one.lineno for one in function.decorator_list)])
        for node in _own(function):
            for finder in FINDERS:
                for kind, start, end, new in finder(source, node):
                    yield Edit(kind, start, text[start:end], new, symbol, line)


def _functions(node: ast.AST, prefix: str) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            name = f"{prefix}{child.name}"
            if not isinstance(child, ast.ClassDef):
                yield name, child
            yield from _functions(child, f"{name}.")
        else:
            yield from _functions(child, prefix)


def _own(function: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[ast.AST]:
    """Yield the nodes of a function except those of inner functions, assertions and raised errors."""
    waiting: list[ast.AST] = [function]
    while waiting:
        node = waiting.pop(0)
        yield node
        for child in ast.iter_child_nodes(node):
            apart = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda)
            if not apart and not isinstance(child, ast.Assert | ast.Raise | ast.JoinedStr):
                waiting.append(child)


def is_sound(edit: Edit, text: str) -> bool:
    """Return whether the edited module compiles and differs."""
    try:
        after = ast.parse(edit.apply(text))
    except (SyntaxError, ValueError):
        return False
    return ast.dump(after) != ast.dump(ast.parse(text))
