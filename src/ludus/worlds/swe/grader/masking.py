"""Test modules without their expected values: a test sends what it computed, and the host compares.

`assert f(2) == 3` becomes `probe(0, f(2))`. The expected side is dropped where it is *given*, that is made of
literals alone, and so are the variables, module constants and parameters that nothing but dropped sides read.
`with pytest.raises(E)` becomes a probe of what is raised, any other assertion one of its truth, which is
negated by a coin that is thrown for each probe and run; an equality of computed values, also one of its truth
for another value. A probe is *closed* if all of its expected side has
left the module: then no code in the process of the tests can read what is expected, from no frame, object or
file. Tests that were not named lose their bodies.
"""

from __future__ import annotations

import ast
import secrets
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from ludus.worlds.swe.grader.leak_tests import definers, functions_of

_EQUALITIES: Final = ("", "List", "Dict", "Tuple", "Set", "Sequence", "MultiLine")
_COMPARISONS: Final[Mapping[str, type[ast.cmpop]]] = {
    **{f"assert{kind}Equal": ast.Eq for kind in _EQUALITIES},
    "assertEquals": ast.Eq,
    "assertNotEqual": ast.NotEq,
    "assertIs": ast.Is,
    "assertIsNot": ast.IsNot,
    "assertIn": ast.In,
    "assertNotIn": ast.NotIn,
    "assertGreater": ast.Gt,
    "assertLess": ast.Lt,
    "assertGreaterEqual": ast.GtE,
    "assertLessEqual": ast.LtE,
}
_RAISING: Final = frozenset({"raises", "assertRaises", "assertRaisesRegex"})
_MAKERS: Final = frozenset({"list", "dict", "set", "frozenset", "tuple", "str", "bytes", "int", "float", "range"})
"""Built-in types: a call of one with given arguments is given."""
_LITERALS: Final = (
    *(ast.Constant, ast.List, ast.Tuple, ast.Set, ast.Dict, ast.UnaryOp, ast.BinOp, ast.Starred),
    *(ast.Subscript, ast.Slice, ast.JoinedStr, ast.FormattedValue, ast.Compare, ast.IfExp),
)
_PASSES: Final = 3
"""Names of names of names are blanked, and no further."""
_PARTS: Final = (ast.expr_context, ast.operator, ast.unaryop, ast.cmpop, ast.keyword)


@dataclass(frozen=True, slots=True)
class Masked:
    """A masked module. By their number, `closed` are the probes whose expected values have left it.

    `negated` are those that send the contrary of a truth.
    """

    text: str
    closed: frozenset[int]
    negated: frozenset[int]


def masked(source: str, names: Collection[str], probe: str) -> Masked:
    """Mask the tests of these names. `probe` is the name that the masked tests call."""
    tree = ast.parse(source)
    meant = definers(tree, names)
    functions = [(name, node) for name, node, _ in functions_of(tree)]
    for name, node in functions:
        if name not in meant and node.name.startswith("test"):
            node.body = [ast.Pass()]
    world = _givens(tree.body, frozenset())
    mask = _Mask(probe)
    for name, node in functions:
        if name in meant:
            mask.given = _givens(node.body, world | _parameters(node))
            node.body = mask.block(node.body)
    gone: set[str] = set()
    for _ in range(_PASSES):
        read = _read(tree)
        for block in (tree.body, *(node.body for name, node in functions if name in meant)):
            gone |= set(_blank(block, read))
        for node in (node for name, node in functions if name in meant):
            gone |= set(_blank_parameters(node, read))
    gone -= _read(tree).keys()
    closed = frozenset(number for number, side in mask.dropped.items() if _names(side) <= gone)
    return Masked(ast.unparse(ast.fix_missing_locations(tree)), closed, frozenset(mask.negated))


class _Mask:
    """Replaces the assertions of tests. `dropped` has the expected side of each probe of a value.

    `given` are the names of the present test that are made of literals.
    """

    def __init__(self, probe: str) -> None:
        self.probe, self.given = probe, frozenset[str]()
        self.dropped: dict[int, ast.expr] = {}
        self.negated: set[int] = set()
        self.count = 0

    def block(self, body: Sequence[ast.stmt]) -> list[ast.stmt]:
        """The statements in the place of those of a block."""
        return [new for one in body for new in self.statement(one)]

    def statement(self, node: ast.stmt) -> list[ast.stmt]:
        """The statements in the place of one."""
        for name in ("body", "orelse", "finalbody"):
            block = node.__dict__.get(name)
            if block and not isinstance(node, ast.ClassDef):
                node.__dict__[name] = self.block(block)
        if isinstance(node, ast.Try):
            for handler in node.handlers:
                handler.body = self.block(handler.body)
        match node:
            case ast.Assert(ast.BoolOp(ast.And(), parts)):
                return self.block([ast.copy_location(ast.Assert(one), node) for one in parts])
        return [ast.copy_location(new, node) for new in self._replaced(node)]

    def _replaced(self, node: ast.stmt) -> list[ast.stmt]:
        raised = raising(node)
        if raised is not None:
            return [self._caught(raised)]
        test = asserted(node)
        match test:
            case None:
                return [node]
            case ast.Compare(left=left, ops=[ast.Eq() | ast.Is()], comparators=[right]):
                for value, side in ((left, right), (right, left)):
                    if is_given(side, self.given) and (not is_given(value, self.given) or not _names(side)):
                        self.dropped[self.count] = side
                        return [self._probed(value)]
        if isinstance(test, ast.Compare) and isinstance(test.ops[0], ast.Eq) and len(test.ops) == 1:
            another = ast.parse("_left == ('another value', _right)", mode="eval").body
            left = ast.NamedExpr(ast.Name("_left", ast.Store()), test.left)
            right = ast.NamedExpr(ast.Name("_right", ast.Store()), test.comparators[0])
            return [self._truth(ast.Compare(left, test.ops, [right])), self._truth(another)]
        return [self._truth(test)]

    def _truth(self, test: ast.expr) -> ast.stmt:
        if secrets.randbelow(2):
            self.negated.add(self.count)
            return self._probed(ast.UnaryOp(ast.Not(), test))
        return self._probed(ast.Call(ast.Name("bool", ast.Load()), [test], []))

    def _probed(self, value: ast.expr) -> ast.stmt:
        call = ast.Call(ast.Name(self.probe, ast.Load()), [ast.Constant(self.count), value], [])
        self.count += 1
        return ast.Expr(call)

    def _caught(self, body: list[ast.stmt]) -> ast.stmt:
        """A block whose exception is sent by the name of its type, and None where there is none."""
        name = ast.parse("type(_raised).__name__", mode="eval").body
        caught, self.count = self._probed(name), self.count - 1
        handler = ast.ExceptHandler(ast.Name("Exception", ast.Load()), "_raised", [caught])
        return ast.Try(body, [handler], [self._probed(ast.Constant(None))], [])


def raising(node: ast.stmt) -> list[ast.stmt] | None:
    """The statements that a statement says raise."""
    match node:
        case ast.With(items=[ast.withitem(ast.Call(func=ast.Attribute(attr=name)), None)], body=body):
            return body if name in _RAISING else None
        case ast.Expr(ast.Call(func=ast.Attribute(attr=name), args=[_, called, *given], keywords=named)):
            if name in _RAISING and not isinstance(called, ast.Constant):
                return [ast.Expr(ast.Call(called, given, named))]
    return None


def asserted(node: ast.stmt) -> ast.expr | None:
    """What a statement asserts; None for one that asserts nothing, or in a way that is not read."""
    match node:
        case ast.Assert(test=test):
            return test
        case ast.Expr(ast.Call(func=ast.Attribute(attr="assertTrue"), args=[test, *_])):
            return test
        case ast.Expr(ast.Call(func=ast.Attribute(attr="assertFalse"), args=[test, *_])):
            return ast.UnaryOp(ast.Not(), test)
        case ast.Expr(ast.Call(func=ast.Attribute(attr="assertIsNone"), args=[left, *_])):
            return ast.Compare(left, [ast.Is()], [ast.Constant(None)])
        case ast.Expr(ast.Call(func=ast.Attribute(attr=name), args=[left, right, *_])) if name in _COMPARISONS:
            return ast.Compare(left, [_COMPARISONS[name]()], [right])
    return None


def is_given(node: ast.AST, given: Collection[str]) -> bool:
    """Whether an expression is made of literals, built-in types and given names alone."""
    if isinstance(node, ast.Name):
        return node.id in given
    if isinstance(node, ast.Call):
        parts = [*node.args, *(one.value for one in node.keywords)]
        if isinstance(node.func, ast.Attribute):
            parts.append(node.func.value)
        elif not (isinstance(node.func, ast.Name) and node.func.id in _MAKERS):
            return False
        return all(is_given(one, given) for one in parts)
    if isinstance(node, ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp):
        targets = [name for one in node.generators for name in _names(one.target)]
        parts = [one.iter for one in node.generators]
        parts += [node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt]
        tests = [test for one in node.generators for test in one.ifs]
        return all(is_given(one, {*given, *targets}) for one in (*parts, *tests))
    if not isinstance(node, (*_LITERALS, *_PARTS)):
        return False
    return all(is_given(one, given) for one in ast.iter_child_nodes(node))


def _givens(body: Sequence[ast.stmt], known: frozenset[str]) -> frozenset[str]:
    """The names of a block, and of those around it, whose every binding is given."""
    bound = Counter(name for one in body for name in _bound(one))
    given = {name for name in known if name not in bound}
    for target, value in _assignments(body):
        if is_given(value, given):
            names = [one.id for one in ast.walk(target) if isinstance(one, ast.Name)]
            given |= {name for name in names if bound[name] == 1}
    return frozenset(given)


def _bound(statement: ast.stmt) -> Iterator[str]:
    for node in ast.walk(statement):
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            yield node.id
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.alias):
            yield (node.asname or node.name).partition(".")[0]


def _assignments(body: Sequence[ast.stmt]) -> Iterator[tuple[ast.expr, ast.expr]]:
    """What is bound in a block to what, loops over a list of rows too; not in functions inside it."""
    for statement in body:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
            yield statement.targets[0], statement.value
        if isinstance(statement, ast.For):
            yield statement.target, statement.iter
        for name in ("body", "orelse"):
            yield from _assignments(statement.__dict__.get(name, ()))


def _parametrised(node: ast.FunctionDef) -> Iterator[tuple[list[str], ast.Call]]:
    """The names of each `parametrize` of a test, and the call."""
    for call in node.decorator_list:
        match call:
            case ast.Call(func=ast.Attribute(attr="parametrize"), args=[ast.Constant(str(names)), _, *_]):
                yield [name.strip() for name in names.split(",") if name.strip()], call
            case ast.Call(func=ast.Attribute(attr="parametrize"), args=[ast.Tuple() | ast.List() as many, _, *_]):
                yield [str(one.value) for one in many.elts if isinstance(one, ast.Constant)], call


def _parameters(node: ast.FunctionDef) -> frozenset[str]:
    """The names that a test gets from rows of literals."""
    return frozenset(
        name
        for names, call in _parametrised(node)
        for i, name in enumerate(names)
        if (column := _column(call.args[1], i, len(names))) and all(is_given(one, ()) for one, _ in column)
    )


def _column(values: ast.expr, place: int, width: int) -> list[tuple[ast.expr, tuple[list[ast.expr], int]]]:
    """The cells of one column of rows that are written down, each with its list and place in it."""
    if not isinstance(values, ast.List | ast.Tuple | ast.Set):
        return []
    if width == 1:
        return [(one, (values.elts, i)) for i, one in enumerate(values.elts)]
    found = []
    for row in values.elts:
        cells = row.elts if isinstance(row, ast.List | ast.Tuple) else row.args if isinstance(row, ast.Call) else []
        if len(cells) != width:
            return []
        found.append((cells[place], (cells, place)))
    return found


def _blank_parameters(node: ast.FunctionDef, read: Mapping[str, int]) -> Iterator[str]:
    """Put None into the columns of a test's parameters that nothing reads; their names."""
    for names, call in _parametrised(node):
        for i, name in enumerate(names):
            if not read.get(name) and _empty(_column(call.args[1], i, len(names))):
                yield name


def _blank(body: Iterable[ast.stmt], read: Mapping[str, int]) -> Iterator[str]:
    """Put None where a given value is bound to a name that nothing reads; these names."""
    for statement in body:
        match statement:
            case ast.Assign(targets=[ast.Name(id=name)]) if not read.get(name) and is_given(statement.value, read):
                statement.value = ast.Constant(None)
                yield name
            case ast.For(target=ast.Tuple(elts=targets)):
                for i, target in enumerate(targets):
                    unread = isinstance(target, ast.Name) and not read.get(target.id)
                    if unread and _empty(_column(statement.iter, i, len(targets))):
                        yield from _names(target)
        if not isinstance(statement, ast.FunctionDef | ast.ClassDef):
            for part in ("body", "orelse"):
                yield from _blank(statement.__dict__.get(part, ()), read)


def _empty(column: Sequence[tuple[ast.expr, tuple[list[ast.expr], int]]]) -> bool:
    for _, (cells, place) in column:
        cells[place] = ast.Constant(None)
    return bool(column)


def _read(tree: ast.AST) -> Counter[str]:
    """How often each name is read; names that look-ups by text may reach count as well."""
    names = Counter(one.id for one in ast.walk(tree) if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Load))
    return names + Counter(one.attr for one in ast.walk(tree) if isinstance(one, ast.Attribute))


def _names(node: ast.expr) -> set[str]:
    return {one.id for one in ast.walk(node) if isinstance(one, ast.Name) and one.id not in _MAKERS}
