"""What is left of a program when identifiers, texts and numbers are blotted out."""

from __future__ import annotations

import ast
import builtins
import hashlib


class _Blot(ast.NodeTransformer):
    """Names of the program's own and constants become the same for all."""

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
    """The shape of a program as a short text: equal ones differ in names, texts, numbers and annotations at
    most. Raises SyntaxError for what is no program."""
    tree = _Blot().visit(ast.parse(source))
    return hashlib.sha256(ast.dump(tree).encode()).hexdigest()[:16]
