"""The shape of a program: its structure without identifiers, texts and numbers."""

from __future__ import annotations

import ast
import builtins
import hashlib


class _NormalizeNames(ast.NodeTransformer):
    """Replaces the program's own names and its constants by placeholders."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return node if node.id in vars(builtins) else ast.Name("n", ast.Load())

    def visit_Constant(self, node: ast.Constant) -> ast.expr:
        return ast.Constant(type(node.value).__name__)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.AST:
        plain = isinstance(node.op, ast.USub) and isinstance(node.operand, ast.Constant)
        return self.visit(node.operand) if plain else self.generic_visit(node)

    def visit_arg(self, node: ast.arg) -> ast.arg:
        del node
        return ast.arg("n")

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.name, node.decorator_list, node.returns = "n", [], None
        if ast.get_docstring(node) is not None:
            node.body = node.body[1:]
        return self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        node.annotation = ast.Name("n", ast.Load())
        return self.generic_visit(node)


def shape_of(source: str) -> str:
    """Return a digest of a program that ignores names, texts, numbers and annotations. Raise SyntaxError for
    invalid programs."""
    tree = _NormalizeNames().visit(ast.parse(source))
    return hashlib.sha256(ast.dump(tree).encode()).hexdigest()[:16]
