"""The notebooks of `examples/notebooks` run, with small numbers, inside an event loop as in a kernel."""

from __future__ import annotations

import ast
import asyncio
import inspect
import json
import re
from pathlib import Path

import pytest

NOTEBOOKS = sorted((Path(__file__).parent.parent / "examples" / "notebooks").glob("*.ipynb"))
SMALL = {"STEPS": 1, "SFT_STEPS": 2, "TASKS": 2, "SEEDS": 2}
TABLES = {
    "training": {"prompts_per_step": 2},
    "algorithm": {"group_size": 2},
    "evaluation": {"tasks_during": 2},
    "run": {"threads": 1},
}


def cells(path: Path) -> list[str]:
    notebook = json.loads(path.read_text("utf-8"))
    sources = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    names = r"^((?:{0})(?:, (?:{0}))*) = .*$".format("|".join(SMALL))
    return [
        re.sub(names, lambda m: f"{m[1]} = {', '.join(str(SMALL[n]) for n in m[1].split(', '))}", source, flags=re.M)
        for source in sources
    ]


def test_three_notebooks_have_a_small_step_count_for_tests():
    assert len(NOTEBOOKS) == 3
    for path in NOTEBOOKS:
        assert re.search(r"STEPS\b.* = .*\b1\b.*\b2\b", "\n".join(cells(path)))


@pytest.mark.pages
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path, tmp_path, monkeypatch):
    from ludus import api

    monkeypatch.chdir(tmp_path)
    configuration = api.configuration

    def small(source=None, **settings):
        merged = {name: {**TABLES.get(name, {}), **dict(table)} for name, table in settings.items() if name != "model"}
        rest = {name: table for name, table in TABLES.items() if name not in merged}
        return configuration(source, **rest, **merged, **({"model": settings["model"]} if "model" in settings else {}))

    monkeypatch.setattr(api, "configuration", small)
    scope = {"__name__": "__main__"}

    async def kernel():
        for cell in cells(path):
            code = compile(cell, path.name, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
            result = eval(code, scope)
            if inspect.isawaitable(result):
                await result

    asyncio.run(kernel())
