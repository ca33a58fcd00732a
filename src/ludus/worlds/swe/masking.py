"""Masking of test modules: a masked test sends the values that it computed instead of comparing them.

`assert f(2) == 3` becomes `probe(0, f(2))`. The expected side is dropped if it is *given*, that is, made of literals
only; so are the variables, module constants and parameters that only dropped sides read. `with pytest.raises(E)`
becomes a probe of the type of the exception. Any other assertion becomes a probe of its truth value, negated by a
random bit per probe and run; an equality of two computed values also a probe of its truth for a third value. Code in
the process of the tests cannot read an expected value that has left the module from a frame, an object or a file. Tests
that are not named lose their bodies.
"""

from __future__ import annotations

import ast
import secrets
import tomllib
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Final

from ludus.worlds.swe.repository import package_text

_RAISES_NAMES: Final = frozenset({"raises", "assertRaises", "assertRaisesRegex"})
_BUILTINS: Final = frozenset({"list", "dict", "set", "frozenset", "tuple", "str", "bytes", "int", "float", "range"})
"""Built-in types: a call with given arguments is given."""
_LITERALS: Final = (
    *(ast.Constant, ast.List, ast.Tuple, ast.Set, ast.Dict, ast.UnaryOp, ast.BinOp, ast.Starred),
    *(ast.Subscript, ast.Slice, ast.JoinedStr, ast.FormattedValue, ast.Compare, ast.IfExp),
    *(ast.expr_context, ast.operator, ast.unaryop, ast.cmpop, ast.keyword),
)
_PASSES: Final = 3
"""Depth to which names that are bound to other names are blanked."""
_Column = list[tuple[list[ast.expr], int]]
"""Cells of one column of literal rows: a list and an index."""


def functions_of(tree: ast.Module) -> Iterator[tuple[str, ast.FunctionDef, list[ast.stmt]]]:
    """Yield the functions of a module and of its classes: pytest's name, node, enclosing block."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            yield node.name, node, tree.body
        elif isinstance(node, ast.ClassDef):
            inner = [one for one in node.body if isinstance(one, ast.FunctionDef)]
            yield from ((f"{node.name}::{one.name}", one, node.body) for one in inner)


def definers(tree: ast.Module, names: Collection[str]) -> dict[str, tuple[str, ...]]:
    """Return the named tests by the function that defines them.

    A test that a class inherits is defined by the function of that name in another class of the module.
    """
    own = [name for name, _, _ in functions_of(tree)]
    found: dict[str, tuple[str, ...]] = {}
    for name in names:
        last = name.rpartition("::")[2]
        bases = [one for one in own if one.endswith(f"::{last}")] if "::" in name else []
        for one in [name] if name in own else bases:
            found[one] = (*found.get(one, ()), name)
    return found


def without_tests(source: str, names: Collection[str]) -> str:
    """Return a test module without some of its tests; a class without remaining statements gets `pass`."""
    lines, tree = source.splitlines(keepends=True), ast.parse(source)
    gone = definers(tree, names)
    for name, node, block in reversed(list(functions_of(tree))):
        if name not in gone:
            continue
        start = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)]) - 1
        prefix = name.rpartition("::")[0]
        removed = [isinstance(one, ast.FunctionDef) and f"{prefix}::{one.name}" in gone for one in block]
        bare = bool(prefix) and node is block[0] and all(removed)
        lines[start : node.end_lineno] = [" " * node.col_offset + "pass\n"] if bare else []
    return "".join(lines)


def masked(source: str, names: Collection[str], probe: str) -> tuple[str, frozenset[int]]:
    """Return a module with these tests masked, and the probes that send a negated truth value.

    `probe` is the name that the masked tests call.
    """
    tree = ast.parse(source)
    selected = definers(tree, names)
    module_names = _given_names(tree.body, frozenset())
    mask = _Mask(probe)
    tests = []
    for name, node, _ in functions_of(tree):
        if name in selected:
            tests.append(node)
        elif node.name.startswith("test"):
            node.body = [ast.Pass()]
    for node in tests:
        columns = [(name, column) for name, column in _columns(node) if column]
        literal = {name for name, column in columns if all(is_given(cells[i], ()) for cells, i in column)}
        mask.given = _given_names(node.body, module_names | literal)
        mask.generic_visit(node)
    others = [one for one in tree.body if not isinstance(one, ast.FunctionDef)]
    for _ in range(_PASSES):
        names_read = {one.id for one in ast.walk(tree) if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Load)}
        read = names_read | {one.attr for one in ast.walk(tree) if isinstance(one, ast.Attribute)}  # as by `getattr`
        for block in (others, *([node, *node.body] for node in tests)):
            _blank_unread(block, read)
    return ast.unparse(ast.fix_missing_locations(tree)), frozenset(mask.negated)


class _Mask(ast.NodeTransformer):
    """Replace assertions with probes. `given` are the literal names in scope."""

    def __init__(self, probe: str) -> None:
        self.probe, self.given = probe, frozenset[str]()
        self.negated: set[int] = set()
        self.count = 0

    def visit(self, node: ast.AST) -> ast.AST | list[ast.stmt]:
        """Replace the statements inside a node, then the node if it is a statement; skip classes."""
        if isinstance(node, ast.expr | ast.ClassDef):
            return node
        self.generic_visit(node)
        return self._replaced(node) if isinstance(node, ast.stmt) else node

    def _replaced(self, node: ast.stmt) -> list[ast.stmt]:
        raised, test = raising(node), asserted(node)
        if raised is not None:  # the probe sends the name of the exception's type, or None if nothing was raised
            caught = self._probe("type(_raised).__name__")
            self.count -= 1
            handler = ast.ExceptHandler(ast.Name("Exception", ast.Load()), "_raised", [caught])
            return [ast.Try(raised, [handler], [self._probe("None")], [])]
        match test:
            case None:
                return [node]
            case ast.BoolOp(ast.And(), parts) if isinstance(node, ast.Assert):
                return [new for part in parts for new in self._replaced(ast.Assert(part))]
            case ast.Compare(left, [ast.Eq() | ast.Is() as operator], [right]):
                for value, side in ((left, right), (right, left)):
                    if is_given(side, self.given) and (not is_given(value, self.given) or not _names(side)):
                        return [self._probe(ast.unparse(value))]
                if isinstance(operator, ast.Eq):
                    both = f"(_left := {ast.unparse(left)}) == (_right := {ast.unparse(right)})"
                    return [self._truth_probe(both), self._truth_probe("_left == ('another value', _right)")]
        return [self._truth_probe(ast.unparse(test))]

    def _truth_probe(self, test: str) -> ast.stmt:
        if not secrets.randbelow(2):
            return self._probe(f"bool({test})")
        self.negated.add(self.count)
        return self._probe(f"not ({test})")

    def _probe(self, value: str) -> ast.stmt:
        self.count += 1
        return ast.parse(f"{self.probe}({self.count - 1}, {value})").body[0]


def raising(node: ast.stmt) -> list[ast.stmt] | None:
    """Return the body of a `pytest.raises` statement, or None for other statements."""
    match node:
        case ast.With(items=[ast.withitem(ast.Call(func=ast.Attribute(attr=name)), None)], body=body):
            return body if name in _RAISES_NAMES else None
        case ast.Expr(ast.Call(func=ast.Attribute(attr=name), args=[_, called, *given], keywords=named)):
            if name in _RAISES_NAMES and not isinstance(called, ast.Constant):
                return [ast.Expr(ast.Call(called, given, named))]
    return None


@cache
def _assertions() -> Mapping[str, str]:
    return tomllib.loads(package_text("data/assertions.toml"))


def asserted(node: ast.stmt) -> ast.expr | None:
    """Return the expression that a statement asserts; None if it asserts none or its form is unsupported."""
    match node:
        case ast.Assert(test=test):
            return test
        case ast.Expr(ast.Call(func=ast.Attribute(attr=name), args=[left, *rest])) if name in _assertions():
            match ast.parse(_assertions()[name], mode="eval").body:
                case ast.Compare(ops=ops, comparators=[ast.Constant() as right]):
                    return ast.Compare(left, ops, [right])
                case ast.Compare(ops=ops):
                    return ast.Compare(left, ops, rest[:1]) if rest else None
                case ast.UnaryOp(op=op):
                    return ast.UnaryOp(op, left)
            return left
    return None


def is_given(node: ast.AST, given: Collection[str]) -> bool:
    """Return whether an expression consists of literals, built-in types and given names only."""
    if isinstance(node, ast.Name):
        return node.id in given
    if isinstance(node, ast.Call):
        parts = [*node.args, *(one.value for one in node.keywords)]
        if isinstance(node.func, ast.Attribute):
            parts.append(node.func.value)
        elif not (isinstance(node.func, ast.Name) and node.func.id in _BUILTINS):
            return False
        return all(is_given(one, given) for one in parts)
    if isinstance(node, ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp):
        targets = [name for one in node.generators for name in _names(one.target)]
        parts = [node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt]
        parts += [part for one in node.generators for part in (one.iter, *one.ifs)]
        return all(is_given(one, {*given, *targets}) for one in parts)
    return isinstance(node, _LITERALS) and all(is_given(one, given) for one in ast.iter_child_nodes(node))


def _given_names(body: Sequence[ast.stmt], known: frozenset[str]) -> frozenset[str]:
    """Return the names, in a block and its enclosing blocks, whose bindings are all given."""
    bound = Counter(name for one in body for name in _bound_names(one))
    given = {name for name in known if name not in bound}
    for statement in _statements(body, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        match statement:
            case ast.Assign(targets=[target], value=value) | ast.For(target=target, iter=value):
                if is_given(value, given):
                    names = (one.id for one in ast.walk(target) if isinstance(one, ast.Name))
                    given |= {name for name in names if bound[name] == 1}
    return frozenset(given)


def _bound_names(statement: ast.stmt) -> Iterator[str]:
    for node in ast.walk(statement):
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            yield node.id
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.alias):
            yield (node.asname or node.name).partition(".")[0]


def _statements(body: Iterable[ast.stmt], closed: tuple[type[ast.stmt], ...]) -> Iterator[ast.stmt]:
    """Yield the statements of a block and of the blocks in it, but not those inside statements of `closed` types."""
    for statement in body:
        yield statement
        if not isinstance(statement, closed):
            for name in ("body", "orelse"):
                yield from _statements(statement.__dict__.get(name, ()), closed)


def _columns(node: ast.stmt) -> Iterator[tuple[str, _Column]]:
    """Yield the targets of a loop, or the parameters of a test (`pytest.mark.parametrize`), with their cells."""
    calls = node.decorator_list if isinstance(node, ast.FunctionDef) else [node]
    for call in calls:
        names: list[str] = []
        match call:
            case ast.Call(ast.Attribute(attr="parametrize"), [ast.Constant(str(text)), rows, *_]):
                names = [name.strip() for name in text.split(",") if name.strip()]
            case ast.Call(ast.Attribute(attr="parametrize"), [ast.Tuple() | ast.List() as many, rows, *_]):
                names = [str(one.value) for one in many.elts if isinstance(one, ast.Constant)]
            case ast.For(ast.Tuple(targets), rows):
                names = [one.id if isinstance(one, ast.Name) else "" for one in targets]
        yield from ((name, _column(rows, i, len(names))) for i, name in enumerate(names) if name)


def _column(values: ast.expr, place: int, width: int) -> _Column:
    """Return the cells of one column of literal rows; empty for rows of another form."""
    if not isinstance(values, ast.List | ast.Tuple | ast.Set):
        return []
    if width == 1:
        return [(values.elts, i) for i in range(len(values.elts))]
    kinds = ast.List | ast.Tuple | ast.Call
    rows = [one.args if isinstance(one, ast.Call) else one.elts for one in values.elts if isinstance(one, kinds)]
    return [(row, place) for row in rows] if [len(row) for row in rows] == [width] * len(values.elts) else []


def _blank_unread(body: Iterable[ast.stmt], read: Collection[str]) -> None:
    """Replace given values that are bound to unread names with None."""
    for statement in _statements(body, (ast.FunctionDef, ast.ClassDef)):
        match statement:
            case ast.Assign(targets=[ast.Name(id=name)]) if name not in read and is_given(statement.value, read):
                statement.value = ast.Constant(None)
        for cells, place in (cell for name, column in _columns(statement) if name not in read for cell in column):
            cells[place] = ast.Constant(None)


def _names(node: ast.expr) -> set[str]:
    return {one.id for one in ast.walk(node) if isinstance(one, ast.Name) and one.id not in _BUILTINS}
