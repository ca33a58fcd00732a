"""Write docs/reference/ from docstrings: python -m generators.api_reference [--out FOLDER]."""

from __future__ import annotations

import argparse
import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
MODULES = (
    *("types", "errors", "plugins", "tools.base", "rewards.base", "rewards.extract", "sandbox.base"),
    *("envs.base", "envs.tool_env", "envs.tool_world", "engines.base", "rollouts.rollout_files"),
    *("algorithms.tensors", "algorithms.algorithm", "algorithms.kl"),
    *("algorithms.advantages.group_relative", "algorithms.advantages.turns", "algorithms.advantages.gae"),
    *("algorithms.losses.clipped", "algorithms.losses.sequence"),
    *("algorithms.corrections", "algorithms.objective", "algorithms.preference", "diagnostics.trackers"),
)
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def page(module: str) -> str:
    """Return the page of a module."""
    tree = ast.parse((ROOT / "src/ludus" / f"{module.replace('.', '/')}.py").read_text("utf-8"))
    lines = [f"# ludus.{module}", "", ast.get_docstring(tree) or "", ""]
    for node in tree.body:
        if isinstance(node, Definition) and not node.name.startswith("_"):
            lines += described(node, "##")
    return "\n".join(lines).rstrip() + "\n"


def described(node: Definition, level: str) -> Iterator[str]:
    """Yield the heading, signature, docstring and fields of a definition, and the same of the methods of a class."""
    yield from (f"{level} {node.name}", "", "```text", signature(node), "```", "")
    if text := ast.get_docstring(node):
        yield from (text, "")
    own = [item for item in node.body if isinstance(item, ast.AnnAssign)] if isinstance(node, ast.ClassDef) else []
    if fields := [ast.unparse(item) for item in own if not ast.unparse(item.target).startswith("_")]:
        yield from ("```text", *fields, "```", "")
    for inner in node.body if isinstance(node, ast.ClassDef) else ():
        if isinstance(inner, Definition) and not inner.name.startswith("_") and ast.get_docstring(inner):
            yield from described(inner, f"{level}#")


def signature(node: Definition) -> str:
    """Return the first line of a definition, with all its parameters; a property and a coroutine are marked."""
    if isinstance(node, ast.ClassDef):
        bases = ", ".join(map(ast.unparse, node.bases))
        return f"class {node.name}({bases})" if bases else f"class {node.name}"
    returned = ast.unparse(node.returns) if node.returns else ""
    if any(ast.unparse(one).endswith("property") for one in node.decorator_list):
        return f"property {node.name}: {returned}"
    kind = "async " if isinstance(node, ast.AsyncFunctionDef) else ""
    return f"{kind}{node.name}({ast.unparse(node.args)}){f' -> {returned}' if returned else ''}"


def pages() -> dict[str, str]:
    """Return all pages by file name, the index included."""
    found = {f"{module}.md": page(module) for module in MODULES}
    index = ["# API reference", "", "Made from the docstrings by `make docs`.", ""]
    index += [f"- [ludus.{module}]({module}.md)" for module in sorted(MODULES)]
    return {"README.md": "\n".join(index) + "\n", **found}


def main() -> None:
    """Write the pages."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "docs/reference", help="folder of the pages")
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    for name, text in pages().items():
        (out / name).write_text(text, "utf-8")


if __name__ == "__main__":
    main()
