"""Build the catalogue of mined bugs: write issues, determine levels, assign packages to splits.

A bug is a task if a snippet shows it (`generators.swe.snippets`) and a masked value differs with the bug, so that the
grader detects a forged result (`ludus.worlds.swe.grader`).
"""

from __future__ import annotations

import ast
import asyncio
import json
import random
import tarfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from email.parser import Parser
from pathlib import Path

from generators.swe.difficulty_report import survey
from generators.swe.issues import symptom_of, write_issue
from generators.swe.mine import MinedBug
from generators.swe.snippets import show
from pydantic import TypeAdapter

from ludus.sandbox import open_sandbox
from ludus.sandbox.base import Sandbox
from ludus.worlds.swe.grader import SECONDS, SweProblem, other_values, reference, run_masked
from ludus.worlds.swe.tasks import Bug, Catalogue, Package, case_of, load_catalogue


def assemble(mined: Path, catalogue: Path, splits: Mapping[str, Sequence[str]]) -> tuple[int, int]:
    """Write the catalogue of all packages in `mined`, which also has the archives; return the numbers of packages and
    tasks.

    `splits` names the packages of each split; the others are for training.
    """
    packages, bugs = [], []
    for file in sorted(mined.glob("*.jsonl")):
        head, *rows = file.read_text("utf-8").splitlines()
        facts = json.loads(head)
        found = [TypeAdapter(MinedBug).validate_json(row) for row in rows]
        if not found:
            continue
        package = _package(mined, facts, splits)
        packages.append(package)
        for number, one in enumerate(sorted(found, key=lambda one: (one.path, one.edit.start)), 1):
            bugs.append(_bug(package, one, f"{package.name}-{number:03}"))
    save_catalogue(catalogue, packages, bugs)
    return len(packages), asyncio.run(describe_all(catalogue, mined))


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
    """Return the metadata of a source distribution."""
    with tarfile.open(archive) as tar:
        name = next(one for one in tar.getnames() if one.count("/") == 1 and one.endswith("/PKG-INFO"))
        content = tar.extractfile(name)
        return dict(Parser().parsestr(content.read().decode("utf-8") if content else ""))


def _bug(package: Package, found: MinedBug, name: str) -> Bug:
    return Bug(name, package.name, found.path, found.edit, found.broken, found.files, 0, "", "")


async def describe(sandbox: Sandbox, bug: Bug, problem: SweProblem) -> Bug | None:
    """Return a bug with its level and its issue; None if no snippet shows it or a forged result would be undetected."""
    fixed = {**problem.pristine, **problem.fixed}
    shown = await show(sandbox, (problem.pristine, fixed), problem.layout, problem.broken)
    if shown is None or not await detects_forgery(sandbox, problem):
        return None
    parts = bug.edit.symbol.split(".")
    private = any(part.startswith("_") for part in parts)
    level = 3 if private else 1 if parts[-1] in shown.snippet.text else 2
    purpose = _purpose(problem.fixed[bug.path].decode("utf-8"), bug.edit.line)
    symptom = symptom_of(bug.package, shown, ".".join(parts[-2:]), purpose)
    style, issue = write_issue(symptom, level == 1, random.Random(bug.id))
    return replace(bug, level=level, style=style, issue=issue)


async def detects_forgery(sandbox: Sandbox, problem: SweProblem) -> bool:
    """Return whether a masked value differs with the bug, so that the grader detects a forged result."""
    known = await reference(sandbox, problem)
    run = await run_masked(sandbox, problem, problem.pristine, None)
    return bool(other_values(known.values, run.values))


async def describe_all(catalogue: Path, sources: Path, seconds: float = SECONDS) -> int:
    """Write the issues of all bugs of a catalogue and drop those that are not tasks; return the number of tasks."""
    load_catalogue.cache_clear()
    held = load_catalogue(catalogue)
    sandbox = open_sandbox()
    bugs = []
    try:
        for bug in held.bugs:
            problem = case_of(bug, held.packages[bug.package], sources, seconds).load()
            bugs += [one] if (one := await describe(sandbox, bug, problem)) is not None else []
    finally:
        await sandbox.close()
    named = {bug.package for bug in bugs}
    save_catalogue(catalogue, [one for one in held.packages.values() if one.name in named], bugs)
    load_catalogue.cache_clear()
    return len(bugs)


def save_catalogue(folder: Path, packages: Sequence[Package], bugs: Sequence[Bug]) -> None:
    """Write a catalogue and its survey."""
    folder.mkdir(parents=True, exist_ok=True)
    _write(folder / "packages.jsonl", map(asdict, packages))
    _write(folder / "tasks.jsonl", map(asdict, bugs))
    text = survey(Catalogue({one.name: one for one in packages}, tuple(bugs)))
    (folder / "survey.txt").write_text(f"{text}\n", "utf-8")


def _write(path: Path, rows: Iterable[dict[str, object]]) -> None:
    lines = [json.dumps(row, ensure_ascii=False, separators=(",", ":")) + "\n" for row in rows]
    path.write_text("".join(lines), "utf-8")


def _purpose(text: str, line: int) -> str:
    """Return the first paragraph of the docstring of the function that begins at a line; empty if it is long."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = min([node.lineno, *(one.lineno for one in node.decorator_list)])
            if first == line:
                text = " ".join((ast.get_docstring(node) or "").split("\n\n")[0].split())
                return text if len(text) <= 200 and ">>>" not in text else ""
    return ""
