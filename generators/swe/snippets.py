"""Self-contained snippets that show a bug: made from a broken test, run with the bug and without it.

A snippet has the imports, constants and helpers of the test module that it uses, the statements of the test before an
assertion, and the expression that the assertion tests; `self.x` becomes `x`. It is kept if it runs without the bug,
with only the package and the standard library, and has another outcome with the bug. Hence no name of its text is
undefined.
"""

from __future__ import annotations

import ast
import builtins
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from ludus.sandbox.base import MIB, Limits, Sandbox
from ludus.worlds.swe.masking import asserted, definers, functions_of, is_given, raising
from ludus.worlds.swe.repository import RepositoryLayout

_MOST_LINES: Final = 16
_MOST_SNIPPETS: Final = 48
_MOST_ROWS: Final = 6
_LONGEST: Final = 220
_BUILTINS: Final = frozenset(vars(builtins))
_LIMITS: Final = Limits(
    wall_s=60, cpu_s=60, memory_bytes=512 * MIB, disk_bytes=64 * MIB, output_bytes=4 * MIB, files_out=0
)
_DRIVER: Final = """
import json, os, signal, sys

order = json.load(open("order.json"))
top, found = os.getcwd(), []
for tree in ("bug", "right"):
    for lines, last in order["snippets"]:
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            signal.alarm(5)
            os.chdir(os.path.join(top, tree))
            sys.path[:] = [os.path.join(top, tree, root) for root in order["roots"]] + [
                path for path in sys.path if path not in ("", top)
            ]
            sink = os.open(os.devnull, os.O_RDWR)
            for fd in (0, 1, 2):
                os.dup2(sink, fd)
            names = {"__name__": "__main__"}
            try:
                exec(compile(lines, "snippet", "exec"), names)
                said = ["value", repr(eval(compile(last, "snippet", "eval"), names)) if last else "no error"]
            except BaseException as error:
                said = ["error", type(error).__name__ + ": " + " ".join(str(error).split())]
            os.write(write, json.dumps(said).encode()[:60000])
            os._exit(0)
        os.close(write)
        with os.fdopen(read, "rb") as file:
            text = file.read()
        os.waitpid(child, 0)
        found.append(json.loads(text) if text else ["none", ""])
print(json.dumps(found))
"""
_TWICE: Final = """
import os, subprocess, sys

for seed in "12":
    given = {**os.environ, "PYTHONHASHSEED": seed}
    words = [sys.executable or "python3", "driver.py"]
    done = subprocess.run(words, env=given, capture_output=True, text=True)
    print(done.stdout.strip())
"""
"""Two runs with different hash seeds, to drop outcomes that depend on the order of a set."""


@dataclass(frozen=True, slots=True)
class Snippet:
    """Statements, and an expression whose value counts; empty if only an error counts.

    `raises`: right code ends with an error.
    """

    lines: str
    last: str
    raises: bool = False

    @property
    def text(self) -> str:
        """The statements and the expression."""
        return "\n".join(part for part in (self.lines, self.last) if part)


@dataclass(frozen=True, slots=True)
class SnippetOutcome:
    """A snippet and its outcomes with the bug (`got`) and without (`due`): a kind (`value`, `error`) and a text."""

    snippet: Snippet
    got: tuple[str, str]
    due: tuple[str, str]


async def show(
    sandbox: Sandbox,
    trees: tuple[Mapping[str, bytes], Mapping[str, bytes]],
    layout: RepositoryLayout,
    broken: Sequence[str],
) -> SnippetOutcome | None:
    """Return the shortest snippet that shows the bug, or None. `trees` are with and without the bug."""
    made: set[Snippet] = set()
    for file, names in _by_file(broken).items():
        made.update(snippets_of(trees[1][file].decode("utf-8"), names))
    snippets = sorted(made, key=lambda one: (len(one.text), one.text))[:_MOST_SNIPPETS]
    if not snippets:
        return None
    held = {f"bug/{path}": data for path, data in trees[0].items()}
    held |= {f"right/{path}": data for path, data in trees[1].items()}
    order = {"roots": list(layout.roots), "snippets": [[one.lines, one.last] for one in snippets]}
    held |= {"order.json": json.dumps(order).encode(), "driver.py": _DRIVER.encode()}
    outcome = await sandbox.run(_TWICE, files=held, limits=_LIMITS)
    try:
        lines = [json.loads(line) for line in outcome.text.splitlines()]
        first, again = ([(str(kind), str(words)) for kind, words in line] for line in lines)
    except ValueError:
        return None
    num = len(snippets)
    for i, one in enumerate(snippets):
        got, due = first[i], first[num + i]
        stable = (got, due) == (again[i], again[num + i])
        wanted = "error" if one.raises else "value"
        if stable and got != due and due[0] == wanted and _fits(got) and _fits(due):
            return SnippetOutcome(one, got, due)
    return None


def _by_file(tests: Sequence[str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for test in tests:
        file, _, name = test.partition("[")[0].partition("::")
        found.setdefault(file, []).append(name)
    return found


def _fits(outcome: tuple[str, str]) -> bool:
    """Return whether an outcome fits an issue: short, and without an address."""
    kind, words = outcome
    return kind != "none" and 0 < len(words) <= _LONGEST and " at 0x" not in words and "\n" not in words


def snippets_of(source: str, names: Sequence[str]) -> Iterator[Snippet]:
    """Yield the snippets of some tests of a module, also ones that do not run."""
    module = ast.parse(source)
    classes = {one.name: one for one in module.body if isinstance(one, ast.ClassDef)}
    meant = definers(module, names)
    for name, node, _ in functions_of(module):
        for test in meant.get(name, ()):
            holders = [one.partition("::")[0] for one in dict.fromkeys((name, test)) if "::" in one]
            before = _held([classes[one] for one in holders if one in classes])
            for given in _rows(node):
                yield from _of_test(module, [*before, *given], node.body)


def _held(holders: Sequence[ast.ClassDef]) -> list[ast.stmt]:
    """Return the attributes and methods of the classes of a test, and the statements of `setUp`."""
    attributes: dict[str, ast.stmt] = {}
    done: list[ast.stmt] = []
    for one in (one for holder in holders for one in holder.body):
        if isinstance(one, ast.Assign):
            attributes[ast.unparse(one.targets[0])] = one
        elif isinstance(one, ast.FunctionDef) and one.name in ("setUp", "setup_method"):
            done = one.body
        elif isinstance(one, ast.FunctionDef) and not one.name.startswith("test") and one.args.args:
            alone = ast.parse(ast.unparse(one)).body[0]
            assert isinstance(alone, ast.FunctionDef)
            del alone.args.args[0]
            attributes[one.name] = alone
    return [*attributes.values(), *done]


def _rows(node: ast.FunctionDef) -> Iterator[list[ast.stmt]]:
    """Yield the parameters of a test as assignments, row by row; one empty row if it has none."""
    rows: list[list[ast.stmt]] = [[]]
    for call in node.decorator_list:
        match call:
            case ast.Call(func=ast.Attribute(attr="parametrize"), args=[names, ast.List(values), *_]):
                rows = [[*row, _bound(names, value)] for row in rows for value in values[:_MOST_ROWS]]
    yield from rows[:_MOST_ROWS]


def _bound(names: ast.expr, value: ast.expr) -> ast.stmt:
    parts = names.elts if isinstance(names, ast.List | ast.Tuple) else [names]
    left = ", ".join(str(one.value) for one in parts if isinstance(one, ast.Constant))
    row = ast.Tuple(value.args, ast.Load()) if isinstance(value, ast.Call) else value
    return ast.parse(f"{left} = {ast.unparse(row)}").body[0]


def _of_test(module: ast.Module, before: Sequence[ast.stmt], body: Sequence[ast.stmt]) -> Iterator[Snippet]:
    done = list(before)
    for statement in body:
        raised, test = raising(statement), asserted(statement)
        if raised is not None:
            yield from _made(module, [*done, *raised], None, raises=True)
        elif test is not None:
            for last in _subjects(test):
                yield from _made(module, done, last)
        elif not (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)):
            done.append(statement)
    yield from _made(module, done, None)


def _subjects(test: ast.expr) -> list[ast.expr]:
    """Return the tested expressions of an assertion: the sides of an equality, else all of it."""
    match test:
        case ast.Compare(left=left, ops=[ast.Eq() | ast.Is()], comparators=[right]):
            return [one for one in (left, right) if not is_given(one, ())]
        case ast.UnaryOp(op=ast.Not(), operand=inner):
            return [inner]
    return [test]


def _made(
    module: ast.Module, body: Sequence[ast.stmt], last: ast.expr | None, raises: bool = False
) -> Iterator[Snippet]:
    """Yield a snippet with the statements of the module that it needs, unless it is too long or needs a test class."""
    plain = ast.Module([*body, *([ast.Expr(last)] if last is not None else [])], [])
    tree = _RemoveSelf().visit(ast.parse(ast.unparse(plain)))
    read = _read(tree)
    idle = (ast.Pass, ast.FunctionDef)
    used = [one for one in tree.body if not isinstance(one, idle) or _binds(one) & read]
    tree.body = used
    needed = _needed(module, tree)
    text = ast.unparse(ast.Module([*needed, *(used if last is None else used[:-1])], []))
    final = "" if last is None else ast.unparse(used[-1])
    names = {one.id for one in ast.walk(tree) if isinstance(one, ast.Name)}
    if "self" not in names and text.count("\n") + 2 <= _MOST_LINES and (text or final):
        yield Snippet(text, final, raises)


class _RemoveSelf(ast.NodeTransformer):
    """Replace `self.x` by `x`, unless it is an assertion method of the test class."""

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        """Replace one attribute."""
        if isinstance(node.value, ast.Name) and node.value.id == "self" and not node.attr.startswith("assert"):
            return ast.copy_location(ast.Name(node.attr, node.ctx), node)
        self.generic_visit(node)
        return node


def _needed(module: ast.Module, tree: ast.AST) -> list[ast.stmt]:
    """Return the statements of a module that bind the names that some code reads, in their order."""
    chosen: set[int] = set()
    wanted = _read(tree)
    for _ in range(len(module.body)):
        new = [i for i, one in enumerate(module.body) if i not in chosen and _binds(one) & wanted]
        if not new:
            break
        chosen.update(new)
        for i in new:
            if not isinstance(module.body[i], ast.Import | ast.ImportFrom):
                wanted |= _read(module.body[i])
    bound = {name for i in chosen for name in _binds(module.body[i])}
    if wanted - bound - {one.id for one in ast.walk(tree) if isinstance(one, ast.Name) and not _is_read(one)}:
        chosen.update(i for i, one in enumerate(module.body) if "*" in _binds(one))
    return [_only(module.body[i], wanted | {"*"}) for i in sorted(chosen)]


def _read(tree: ast.AST) -> set[str]:
    return {one.id for one in ast.walk(tree) if isinstance(one, ast.Name)} - _BUILTINS


def _is_read(node: ast.Name) -> bool:
    return isinstance(node.ctx, ast.Load)


def _binds(node: ast.stmt) -> set[str]:
    if isinstance(node, ast.Import | ast.ImportFrom):
        return {(one.asname or one.name).partition(".")[0] for one in node.names}
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return {node.name}
    if isinstance(node, ast.Assign):
        return {one.id for target in node.targets for one in ast.walk(target) if isinstance(one, ast.Name)}
    return set()


def _only(node: ast.stmt, wanted: set[str]) -> ast.stmt:
    """Return an import with only the wanted names; other statements unchanged."""
    if isinstance(node, ast.ImportFrom | ast.Import):
        names = [one for one in node.names if (one.asname or one.name).partition(".")[0] in wanted]
        if isinstance(node, ast.ImportFrom):
            return ast.ImportFrom(node.module, names, node.level)
        return ast.Import(names)
    return node
