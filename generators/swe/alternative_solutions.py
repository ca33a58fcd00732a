"""Right repairs other than the solver's: the same meaning in another text. They check the verifier."""

from __future__ import annotations

import ast
import difflib
from collections.abc import Iterator, Mapping

from ludus.worlds.swe.grader import SweProblem

_RESULT = "_outcome"


def other_repairs(problem: SweProblem) -> Iterator[Mapping[str, str]]:
    """Yield texts of the files that a fix changes: whole modules without comments, then rewritten changed statements.

    The second is left out if a changed statement is of a kind that is not rewritten here.
    """
    texts = {path: content.decode("utf-8") for path, content in problem.fixed.items()}
    if not all(path.endswith(".py") and _is_python(text) for path, text in texts.items()):
        return
    yield {path: ast.unparse(ast.parse(text)) + "\n" for path, text in texts.items()}
    restated = {path: restate(problem.text(path), text) for path, text in texts.items()}
    if all(restated[path] != text for path, text in texts.items()):
        yield restated


def _is_python(text: str) -> bool:
    try:
        ast.parse(text)
    except (SyntaxError, ValueError):
        return False
    return True


def restate(before: str, after: str) -> str:
    """Return the text `after` with each statement that `before` does not have rewritten."""
    lines = after.splitlines(keepends=True)
    statements = [node for node in ast.walk(ast.parse(after)) if isinstance(node, ast.stmt)]
    found = [_innermost(statements, line) for line in _changed(before, after)]
    chosen = {node.lineno: node for node in found if node is not None}
    for begin, node in sorted(chosen.items(), reverse=True):
        other, end = _rewritten(node), node.end_lineno or begin
        holds_another = any(begin < line <= end for line in chosen)
        if other and not holds_another and not lines[begin - 1][: node.col_offset].strip():
            margin = " " * node.col_offset
            text = "\n".join(ast.unparse(ast.fix_missing_locations(part)) for part in other)
            lines[begin - 1 : end] = [f"{margin}{line}\n" for line in text.split("\n")]
    return "".join(lines)


def _changed(before: str, after: str) -> list[int]:
    """Return the lines of `after`, counted from 1, that are new or precede a removed line."""
    matcher = difflib.SequenceMatcher(None, before.splitlines(), after.splitlines(), autojunk=False)
    found: list[int] = []
    for kind, _, _, begin, end in matcher.get_opcodes():
        if kind != "equal":
            found += range(begin + 1, end + 1) if end > begin else [max(begin, 1)]
    return found


def _innermost(statements: list[ast.stmt], line: int) -> ast.stmt | None:
    """Return the shortest statement that contains a line, if there is one."""
    around = [node for node in statements if node.lineno <= line <= (node.end_lineno or node.lineno)]
    return min(around, key=lambda node: (node.end_lineno or node.lineno) - node.lineno, default=None)


def _rewritten(node: ast.stmt) -> list[ast.stmt]:
    """Return statements with the same effect; none for a kind that is not rewritten."""
    name = ast.Name(_RESULT, ast.Store())
    kept = ast.Name(_RESULT, ast.Load())
    match node:
        case ast.If():
            negated = ast.UnaryOp(ast.Not(), node.test)
            return [ast.If(negated, node.orelse or [ast.Pass()], node.body)]
        case ast.Return(value=ast.expr() as value):
            return [ast.Assign([name], value), ast.Return(kept)]
        case ast.Assign(targets=[ast.Name() | ast.Attribute() as target]):
            return [ast.Assign([name], node.value), ast.Assign([target], kept)]
        case ast.Expr(value=ast.Call()):
            return [ast.Assign([name], node.value)]
    return []
