"""Tests that must fail, in each way that pytest and unittest know: what passes all passes these too."""

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
