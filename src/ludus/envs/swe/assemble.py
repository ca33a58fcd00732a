"""The catalogue of what was mined: issues are written, levels told, splits given by package."""

from __future__ import annotations

import ast
import json
import random
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from email.parser import Parser
from pathlib import Path
from typing import Final

from pydantic import TypeAdapter

from ludus.envs.swe.canaries import definers, functions_of
from ludus.envs.swe.catalogue import Bug, Package, save_catalogue
from ludus.envs.swe.issues import symptom_of, write_issue
from ludus.envs.swe.mine import Found
from ludus.envs.swe.sources import read_archive

_CONTEXT_LINES: Final = 8


def assemble(mined: Path, catalogue: Path, splits: Mapping[str, Sequence[str]]) -> tuple[int, int]:
    """Write the catalogue of all that lies in `mined`, archives beside it; how many packages and tasks.

    `splits` names the packages of each split; the others are for training.
    """
    packages, bugs = [], []
    for file in sorted(mined.glob("*.jsonl")):
        head, *rows = file.read_text("utf-8").splitlines()
        facts = json.loads(head)
        found = [TypeAdapter(Found).validate_json(row) for row in rows]
        if not found:
            continue
        package = _package(mined, facts, splits)
        packages.append(package)
        tree = read_archive(mined / package.archive, package.sha256)
        for number, one in enumerate(sorted(found, key=lambda one: (one.path, one.edit.start)), 1):
            bugs.append(_bug(package, tree, one, f"{package.name}-{number:03}"))
    save_catalogue(catalogue, packages, bugs)
    return len(packages), len(bugs)


def _package(folder: Path, facts: Mapping[str, object], splits: Mapping[str, Sequence[str]]) -> Package:
    archive, tests = str(facts["archive"]), facts["tests"]
    assert isinstance(tests, dict)
    about = _about(folder / archive)
    name = about["Name"].lower().replace("_", "-")
    split = next((split for split, names in splits.items() if name in names), "train")
    by_file: dict[str, dict[str, int]] = {}
    for test, cases in tests.items():
        file, _, rest = test.partition("::")
        by_file.setdefault(file, {})[rest] = cases
    digest, summary = str(facts["sha256"]), about.get("Summary", "")
    return Package(name, about["Version"], archive, digest, split, summary, by_file)


def _about(archive: Path) -> Mapping[str, str]:
    """The metadata of a source distribution."""
    with tarfile.open(archive) as tar:
        name = next(one for one in tar.getnames() if one.count("/") == 1 and one.endswith("/PKG-INFO"))
        content = tar.extractfile(name)
        return dict(Parser().parsestr(content.read().decode("utf-8") if content else ""))


def _bug(package: Package, tree: Mapping[str, bytes], found: Found, name: str) -> Bug:
    rng = random.Random(name)
    last = found.edit.symbol.rpartition(".")[2]
    direct = last in found.said.statement or last in _test_text(tree, found)
    private = any(part.startswith("_") for part in found.edit.symbol.split("."))
    level = 1 if direct and not private else 3 if private else 2
    subject = ".".join(found.edit.symbol.split(".")[-2:])
    purpose = _purpose(tree[found.path].decode("utf-8"), found.edit.line)
    said = replace(found.said, statement=_statement(tree, found))
    symptom = symptom_of(package.name, said, _context(tree, found), subject, purpose)
    style, issue = write_issue(symptom, level == 1, rng)
    return Bug(name, package.name, found.path, found.edit, found.broken, found.files, level, style, issue)


def _statement(tree: Mapping[str, bytes], found: Found) -> str:
    """The statement that failed, with its block where it has one."""
    head = "".join(found.said.statement.replace('"', "'").split())
    node = _test_node(tree, found) if head.endswith(":") else None
    for one in ast.walk(node) if node else ():
        if isinstance(one, ast.With):
            lines = ast.unparse(one).splitlines()
            if "".join(lines[0].replace('"', "'").split()) == head and len(lines) <= _CONTEXT_LINES:
                return "\n".join(lines)
    return found.said.statement


def _test_text(tree: Mapping[str, bytes], found: Found) -> str:
    node = _test_node(tree, found)
    return ast.unparse(node) if node else ""


def _test_node(tree: Mapping[str, bytes], found: Found) -> ast.FunctionDef | None:
    file, _, name = found.test.partition("::")
    module = ast.parse(tree[file])
    meant = definers(module, [name])
    return next((node for own, node, _ in functions_of(module) if own in meant), None)


def _purpose(text: str, line: int) -> str:
    """The first sentence of the docstring of the function that begins at a line."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = min([node.lineno, *(one.lineno for one in node.decorator_list)])
            if first == line:
                said = " ".join((ast.get_docstring(node) or "").split("\n\n")[0].split())
                return said if len(said) <= 200 and ">>>" not in said else ""
    return ""


def _context(tree: Mapping[str, bytes], found: Found) -> str:
    """What the failing statement needs of its test: the assignments before it of the names that it uses."""
    node = _test_node(tree, found)
    if node is None:
        return ""
    lines: list[str] = []
    for statement in _before(node.body, found.said.statement):
        if isinstance(statement, ast.Assign | ast.AugAssign | ast.FunctionDef | ast.Expr | ast.ClassDef):
            text = ast.unparse(statement)
            docstring = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
            if not docstring and not text.startswith("self.assert"):
                lines += text.split("\n")
    if not lines or len(lines) > _CONTEXT_LINES:
        return ""
    return "\n".join(lines)


def _before(body: Sequence[ast.stmt], statement: str) -> Iterator[ast.stmt]:
    """The statements of a block before the one that reads like this, or that holds it."""
    words = "".join(statement.replace('"', "'").split())
    for one in body:
        if words and words[:60] in "".join(ast.unparse(one).replace('"', "'").split()):
            return
        yield one
