"""The catalogue of what was mined: issues are written, levels told, splits given by package.

A bug is a task if a snippet shows it by itself (`generators.swe.snippets`) and a masked value tells a forged
result (`ludus.worlds.swe.grader.grader`).
"""

from __future__ import annotations

import ast
import asyncio
import json
import random
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from email.parser import Parser
from pathlib import Path

from generators.swe.issues import symptom_of, write_issue
from generators.swe.mine import Found
from generators.swe.snippets import Shown, show
from pydantic import TypeAdapter

from ludus.sandbox import open_sandbox
from ludus.sandbox.base import Sandbox
from ludus.worlds.swe.catalogue import Bug, Package, load_catalogue, save_catalogue
from ludus.worlds.swe.grader.grader import tells_forgery
from ludus.worlds.swe.grader.test_runner import SECONDS
from ludus.worlds.swe.problems import Mined


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
        for number, one in enumerate(sorted(found, key=lambda one: (one.path, one.edit.start)), 1):
            bugs.append(_bug(package, one, f"{package.name}-{number:03}"))
    save_catalogue(catalogue, packages, bugs)
    return len(packages), asyncio.run(tell_all(catalogue, mined))


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


def _bug(package: Package, found: Found, name: str) -> Bug:
    return Bug(name, package.name, found.path, found.edit, found.broken, found.files, 0, "", "")


async def tell(sandbox: Sandbox, case: Mined) -> Bug | None:
    """A bug with its level and its issue; None for one that is no task.

    That is one that no snippet shows, or one whose broken tests compute the same masked values with it and
    without it, so that a forged result could not be told.
    """
    exam = case.problem().exam
    mended = {**exam.pristine, **exam.mended}
    shown = await show(sandbox, (exam.pristine, mended), exam.layout, exam.broken)
    if shown is None or not await tells_forgery(sandbox, exam):
        return None
    return told(case, shown)


def told(case: Mined, shown: Shown) -> Bug:
    """A bug with its level, and the issue that a snippet makes."""
    bug, exam = case.bug, case.problem().exam
    text = (exam.mended[bug.path]).decode("utf-8")
    parts = bug.edit.symbol.split(".")
    private = any(part.startswith("_") for part in parts)
    level = 3 if private else 1 if parts[-1] in shown.snippet.text else 2
    symptom = symptom_of(bug.package, shown, ".".join(parts[-2:]), _purpose(text, bug.edit.line))
    style, issue = write_issue(symptom, level == 1, random.Random(bug.id))
    return replace(bug, level=level, style=style, issue=issue)


async def tell_all(catalogue: Path, sources: Path, seconds: float = SECONDS) -> int:
    """Give all bugs of a catalogue their issues, and drop those that are no task; how many stay."""
    load_catalogue.cache_clear()
    held = load_catalogue(catalogue)
    sandbox = open_sandbox()
    try:
        cases = [Mined(bug, held.packages[bug.package], sources, seconds) for bug in held.bugs]
        found = [await tell(sandbox, case) for case in cases]
    finally:
        await sandbox.close()
    bugs = [bug for bug in found if bug is not None]
    named = {bug.package for bug in bugs}
    save_catalogue(catalogue, [one for one in held.packages.values() if one.name in named], bugs)
    load_catalogue.cache_clear()
    return len(bugs)


def _purpose(text: str, line: int) -> str:
    """The first sentence of the docstring of the function that begins at a line."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = min([node.lineno, *(one.lineno for one in node.decorator_list)])
            if first == line:
                said = " ".join((ast.get_docstring(node) or "").split("\n\n")[0].split())
                return said if len(said) <= 200 and ">>>" not in said else ""
    return ""
