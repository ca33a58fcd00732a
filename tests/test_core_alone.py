"""Ludus without extras: it trains and evaluates, and features that need an extra name it."""

import os
import re
import subprocess
import sys
from importlib import metadata

import pytest

from tiny_run import RECIPE

# At the start of every interpreter below: what the core does not require is not found.
BLOCK = """
import os, sys
class Core:
    def __init__(self, finder):
        self.finder = finder
        self.extras = frozenset(os.environ["LUDUS_TEST_EXTRAS"].split())
    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] in self.extras else self.finder.find_spec(name, path, target)
    def __getattr__(self, name):
        return getattr(self.finder, name)
sys.meta_path[:] = [Core(finder) for finder in sys.meta_path]
"""


def required() -> set[str]:
    """The distributions that a plain `pip install ludus` brings, Ludus among them."""
    found, waiting = set[str](), ["ludus"]
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        try:
            lines = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            continue
        found.add(name)
        plain = (line for line in lines if "extra ==" not in line)
        waiting += [re.split(r"[^\w.-]", line)[0].lower().replace("_", "-") for line in plain]
    return found


def extras() -> list[str]:
    """The modules that only other distributions have."""
    core = required()
    owners = metadata.packages_distributions()
    canonical = {name: {one.lower().replace("_", "-") for one in many} for name, many in owners.items()}
    return sorted(name for name, many in canonical.items() if not many & core)


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    """Runs `ludus` in a process where the extras are missing."""
    folder = tmp_path_factory.mktemp("bare")
    (folder / "sitecustomize.py").write_text(BLOCK)
    (folder / "tiny.toml").write_text(f"{RECIPE}\n[model]\nfrom_scratch = true\n")
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = os.environ | {"PYTHONPATH": path, "LUDUS_TEST_EXTRAS": " ".join(extras())}

    def run(*words):
        return subprocess.run(
            [sys.executable, "-m", "ludus", *words], cwd=folder, env=env, capture_output=True, text=True
        )

    return run


def test_blocked_modules_are_optional_extras_only():
    out = extras()
    assert {"peft", "starlette", "mcp", "jsonschema"} <= set(out)
    assert not {"torch", "transformers", "httpx", "bm25s", "ludus"} & set(out)


@pytest.mark.scale
def test_core_trains_and_evaluates_without_extras(bare):
    trained = bare("train", "tiny.toml", "--run.dir", "run", "--training.steps", "1")
    assert trained.returncode == 0, trained.stderr
    judged = bare("eval", "--run", "run")
    assert judged.returncode == 0, judged.stderr


@pytest.mark.pages
@pytest.mark.parametrize(
    ("words", "extra"),
    [
        (["serve", "run"], "serve"),
        (["sandbox", "serve"], "serve"),
        (["train", "tiny.toml", "--run.dir", "a", "--model.lora.rank", "4"], "lora"),
    ],
)
def test_error_names_the_missing_extra(bare, words, extra):
    said = bare(*words)
    assert said.returncode == 2, said.stdout + said.stderr
    assert f"ludus[{extra}]" in said.stderr
    assert "Traceback" not in said.stderr
