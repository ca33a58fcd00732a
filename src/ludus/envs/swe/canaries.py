"""Tests that must fail: whoever makes everything pass makes these pass too.

Fixed ones fail in each way that pytest and unittest know. Twisted ones are the hidden tests themselves with
another expectation: under right code they fail, under code whose results are equal to everything they pass.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator
from typing import Final

CONTROL: Final = "test_control"
CANARIES: Final = """
import unittest

import pytest


def test_control():
    assert 1 == 1


def test_equal():
    assert 1 == 2


def test_false():
    assert not [0]


def test_raises():
    with pytest.raises(ValueError):
        pass


def test_raised():
    raise RuntimeError("as it should be")


def test_failed():
    pytest.fail("as it should be")


def test_close():
    assert 1.0 == pytest.approx(2.0)


@pytest.fixture
def broken():
    raise RuntimeError("as it should be")


def test_fixture(broken):
    pass


class TestUnittest(unittest.TestCase):
    def test_equal(self):
        self.assertEqual(1, 2)

    def test_true(self):
        self.assertTrue(0)

    def test_false(self):
        self.assertFalse(1)

    def test_in(self):
        self.assertIn(1, [2])

    def test_is(self):
        self.assertIs(None, 1)

    def test_list(self):
        self.assertListEqual([1], [2])

    def test_close(self):
        self.assertAlmostEqual(1.0, 2.0)

    def test_raises(self):
        with self.assertRaises(ValueError):
            pass
"""
_EQUALITY: Final = frozenset(
    f"assert{kind}"
    for kind in ("Equal", "Equals", "ListEqual", "DictEqual", "TupleEqual", "SetEqual", "SequenceEqual")
)
_MARK: Final = "another value than the right one"


def functions_of(tree: ast.Module) -> Iterator[tuple[str, ast.FunctionDef, list[ast.stmt]]]:
    """The test functions of a module, by their place in it, each with the block that holds it."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            yield node.name, node, tree.body
        elif isinstance(node, ast.ClassDef):
            for inner in node.body:
                if isinstance(inner, ast.FunctionDef):
                    yield f"{node.name}::{inner.name}", inner, node.body


def definers(tree: ast.Module, names: Collection[str]) -> dict[str, tuple[str, ...]]:
    """Which of some tests, named as pytest does, each test function of a module is.

    A test that a class inherits is the function of that name in another class of the module.
    """
    own = [name for name, _, _ in functions_of(tree)]
    found: dict[str, list[str]] = {}
    for name in names:
        last = name.rpartition("::")[2]
        bases = [one for one in own if one.endswith(f"::{last}")] if "::" in name else []
        for one in [name] if name in own else bases:
            found.setdefault(one, []).append(name)
    return {one: tuple(who) for one, who in found.items()}


def fixed_names() -> tuple[str, ...]:
    """The fixed canaries by their place in the module, the control left out."""
    names = [name for name, _, _ in functions_of(ast.parse(CANARIES)) if "test_" in name]
    return tuple(name for name in names if name != CONTROL)


def twisted(source: str, names: Collection[str]) -> tuple[str, tuple[str, ...]]:
    """A test module whose tests of these names expect something else, and which of them do so."""
    tree = ast.parse(source)
    meant = definers(tree, names)
    done: list[str] = []
    for name, node, _ in functions_of(tree):
        twist = _Twist()
        if name in meant:
            twist.visit(node)
        if twist.count:
            done += meant[name]
    return ast.unparse(ast.fix_missing_locations(tree)), tuple(done)


class _Twist(ast.NodeTransformer):
    """Changes what equalities expect. `count` is how many."""

    def __init__(self) -> None:
        self.count = 0

    def visit_Assert(self, node: ast.Assert) -> ast.Assert:
        """`assert a == b`: another b."""
        match node.test:
            case ast.Compare(left=left, ops=[ast.Eq()], comparators=[right]):
                node.test = ast.Compare(*self._pair(left, right))
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        """`self.assertEqual(a, b)`: another b."""
        match node:
            case ast.Call(func=ast.Attribute(attr=name), args=[left, right, *rest]) if name in _EQUALITY:
                one, _, (other,) = self._pair(left, right)
                node.args = [one, other, *rest]
                return node
        return self.generic_visit(node)

    def _pair(self, left: ast.expr, right: ast.expr) -> tuple[ast.expr, list[ast.cmpop], list[ast.expr]]:
        self.count += 1
        if _is_literal(left) and not _is_literal(right):
            return _other(left), [ast.Eq()], [right]
        return left, [ast.Eq()], [_other(right)]


def _is_literal(node: ast.expr) -> bool:
    if isinstance(node, ast.List | ast.Tuple | ast.Set):
        return all(map(_is_literal, node.elts))
    if isinstance(node, ast.Dict):
        return all(map(_is_literal, node.values))
    return isinstance(node, ast.Constant | ast.UnaryOp)


def _other(node: ast.expr) -> ast.expr:
    """Another value; one of the same form where a form is written down."""
    if isinstance(node, ast.List | ast.Tuple) and node.elts:
        elements: list[ast.expr] = [_other(one) for one in node.elts]
        return (
            ast.List(elements, ast.Load()) if isinstance(node, ast.List) else ast.Tuple(elements, ast.Load())
        )
    if isinstance(node, ast.Dict) and node.values:
        return ast.Dict(node.keys, [_other(one) for one in node.values])
    return ast.Tuple([ast.Constant(_MARK), node], ast.Load())


def without_tests(source: str, names: Collection[str]) -> str:
    """A test module without some of its functions; a class that loses all of them says `pass`."""
    lines, tree = source.splitlines(keepends=True), ast.parse(source)
    gone = definers(tree, names)
    for name, node, block in reversed(list(functions_of(tree))):
        if name not in gone:
            continue
        start = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)]) - 1
        first = node is next(one for one in block if isinstance(one, ast.FunctionDef))
        bare = first and all(_goes(one, name, gone) for one in block)
        kept = [" " * node.col_offset + "pass\n"] if bare else []
        lines[start : node.end_lineno] = kept
    return "".join(lines)


def _goes(statement: ast.stmt, name: str, names: Collection[str]) -> bool:
    prefix = name.rpartition("::")[0]
    if not prefix or not isinstance(statement, ast.FunctionDef):
        return False
    return f"{prefix}::{statement.name}" in names
