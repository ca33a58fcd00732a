"""The docs: every Python block and command runs, every link resolves, every list is complete.

The blocks of a page run in order and share a namespace and a working folder, which contains the examples and a
tiny finished run of the search recipe, `runs/search-1`. The test appends tiny budgets to each command, and replaces
models that are not on disk by the packaged cold start, and server URLs by a server of the tests.
"""

from __future__ import annotations

import ast
import gzip
import io
import json
import re
import shlex
import shutil
import sys
import textwrap
import tomllib
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest
import torch
from generators import api_reference

from chat_server import Reply, say, serving
from ludus.cli.main import main
from ludus.config import config_from_toml, list_settings, load_config
from ludus.config.settings import find, is_section
from ludus.training.run.preflight import model_path
from ludus.worlds.search import world as search_world
from ludus.worlds.search.world import SearchWorld
from tests.test_house import ORDER

ROOT = Path(__file__).parent.parent
PAGES = sorted(
    file.relative_to(ROOT).as_posix()
    for pattern in ("docs/**/*.md", "README.md", "src/ludus/recipes/*/README.md")
    for file in ROOT.glob(pattern)
)
LONGER = """algorithm judges library plugins environment learner mixtures quick_start reproducibility
reward_models rewards behavior async_training cluster planning server stages evaluation several_agents turns
bring_your_environment tree_search exploration process_rewards agents tools"""
LONG = {page for page in PAGES if Path(page).stem in LONGER.split() or "/recipes/" in page}
"""Pages with slow commands, which only `make pages` runs. The other checks cover all pages."""
FENCE = re.compile(r"^( *)```([^\n`]*)\n(.*?)^\1```$", re.M | re.S)
TOP_FOLDERS = "src|tests|docs|examples|benchmarks"

EVALUATION = {
    "evaluation.tasks": "3",
    "evaluation.temperatures": "[0.0]",
    "evaluation.splits": '["test"]',
    "run.threads": "1",
}
TRAINING = EVALUATION | {
    "evaluation.tasks_during": "2",
    "rollout.max_turns": "3",
    "rollout.max_tokens_per_turn": "40",
    "evaluation.every": "1",
    "training.steps": "1",
    "training.prompts_per_step": "2",
    "algorithm.group_size": "2",
    "rollout.concurrency": "16",
    "env.check": "false",
}
SCRATCH = {
    "model.init.vocab_size": "400",
    "model.init.hidden_size": "32",
    "model.init.intermediate_size": "32",
    "model.init.num_layers": "1",
    "model.init.num_heads": "2",
    "model.init.num_kv_heads": "2",
    "sft.steps": "1",
    "sft.batch_size": "2",
}
ROUNDS = {"rft.rounds": "1", "rft.tasks_per_round": "6", "rft.samples": "4", "rft.batch_size": "4"}
PREFERENCE = {"preference.steps": "1", "preference.batch_size": "2", "run.threads": "1"}
REWARD_MODEL = {"reward_model.steps": "1", "reward_model.batch_size": "2", "run.threads": "1"}
BUDGETS = {
    "train": TRAINING,
    "train --resume": TRAINING | {"training.steps": "4"},
    "train --from-scratch": TRAINING | SCRATCH,
    "train guess": TRAINING | SCRATCH,
    "train code": TRAINING | SCRATCH | {"env.settings.tasks": "60", "evaluation.tasks": "1"},
    "train functions": TRAINING | SCRATCH | {"env.settings.num_tasks": "60"},
    "train sql": TRAINING | SCRATCH | {"env.settings.tasks": "60"},
    "train terminal": TRAINING | SCRATCH | {"env.settings.per_shape": "10"},
    "train math": TRAINING | SCRATCH | {"env.settings.num_tasks": "60"},
    "train mixed": TRAINING | SCRATCH | {"env.mixture.math.settings.num_tasks": "60"},
    "rl": TRAINING,
    "eval": EVALUATION,
    "rft": TRAINING | ROUNDS,
    "rft --resume": TRAINING | ROUNDS | {"rft.rounds": "2"},
    "preference": PREFERENCE,
    "reward-model": REWARD_MODEL,
    "preference --resume": PREFERENCE,
    "pipeline": TRAINING | ROUNDS | PREFERENCE,
    "sft": SCRATCH | {"run.threads": "1"},
}
"""Settings appended to a command, by its name and, for some, an argument."""
TYPED = "In which country is Paris?\n"
"""Input of `ludus chat`."""


@dataclass(frozen=True)
class Block:
    """A fenced block of a page; `info` is the text after the fence, `line` the first line of the block's text."""

    page: str
    line: int
    info: str
    text: str

    @property
    def language(self) -> str:
        return self.info.split(" ")[0]

    @property
    def commands(self) -> list[str]:
        """The lines of a shell block, with continuation lines joined and without prompts."""
        text = self.text.replace("\\\n", " ")
        return [line.removeprefix("$ ") for line in text.splitlines()]


@cache
def read(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def blocks(page: str, *languages: str) -> list[Block]:
    text = read(page)
    found = [
        Block(page, text.count("\n", 0, m.start(3)) + 1, m[2], textwrap.dedent(m[3])) for m in FENCE.finditer(text)
    ]
    return [block for block in found if block.language in languages]


@pytest.fixture(scope="module")
def cold_start() -> str:
    return model_path(load_config("search"))


@pytest.fixture(scope="module", autouse=True)
def cheap_worlds():
    """Search worlds of equal settings share their index and their tasks."""
    plain = SearchWorld.tasks
    shared = cache(lambda settings, split: plain(SearchWorld(settings), split))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SearchWorld, "tasks", lambda world, split: shared(world.settings, split))
        patch.setattr(search_world, "PassageIndex", cache(search_world.PassageIndex))
        yield


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """A folder with a finished run of the recipe in which every group is trained."""
    folder = tmp_path_factory.mktemp("docs")
    settings = BUDGETS["train"] | {
        "run.dir": str(folder / "runs" / "search-1"),
        "training.steps": "3",
        "training.prompts_per_step": "6",
        "algorithm.filter_zero_variance": "false",
    }
    assert main(["train", "search", *words(settings)]) == 0
    return folder


def words(settings: dict[str, str]) -> list[str]:
    return [word for key, value in settings.items() for word in (f"--{key}", value)]


@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=[pytest.mark.pages] if page in LONG else []) for page in PAGES]
)
def test_code_blocks_of_each_page_run(page, finished, cold_start, tmp_path, monkeypatch, request):
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    namespace = ModuleType("page")
    monkeypatch.setitem(sys.modules, "page", namespace)
    for block in blocks(page, "python", "bash", "console"):
        if block.info == "python" and has_packages(block):
            code = "\n" * (block.line - 1) + block.text
            exec(compile(code, str(ROOT / page), "exec", dont_inherit=True), vars(namespace))
        elif block.language != "python":
            for command in block.commands:
                run_command(command, cold_start, request, monkeypatch)


def has_packages(block: Block) -> bool:
    """Whether the packages of the adapters that a block imports are installed."""
    names = re.findall(r"ludus\.worlds\.adapters\.(\w+)", block.text)
    java = shutil.which("java") or not {"scienceworld", "textworld_express"} & set(names)
    return bool(java) and all(find_spec({"openspiel": "pyspiel"}.get(name, name)) for name in names)


def run_command(line: str, cold_start: str, request: pytest.FixtureRequest, monkeypatch) -> None:
    if not line.startswith("ludus "):
        return
    _, *argv = shlex.split(line, comments=True)
    if argv[:2] == ["env", "serve"]:
        return  # it serves until it is stopped; test_remote_world.py runs it
    kind = next((f"{argv[0]} {word}" for word in argv if f"{argv[0]} {word}" in BUDGETS), argv[0])
    argv += words(BUDGETS.get(kind, {}))
    if argv[0] == "serve":
        argv.append("--check")
    if "--engine.url" in argv:
        argv[argv.index("--engine.url") + 1] = request.getfixturevalue("served").url
    for option, reply in (("--endpoint", "France"), ("--rewards.judge.url", '{"score": 5}')):
        if option not in argv:
            continue
        with serving(lambda _, reply=reply: Reply(say(reply))) as server:
            argv[argv.index(option) + 1] = server.url
            assert main(argv) == 0, line
        return
    if "--model" in argv and not Path(argv[argv.index("--model") + 1]).is_dir():
        argv[argv.index("--model") + 1] = cold_start
    monkeypatch.setattr(sys, "stdin", io.StringIO(TYPED))
    assert main(argv) == 0, line


def test_api_reference_matches_the_docstrings():
    written = {file.name: file.read_text("utf-8") for file in (ROOT / "docs" / "reference").glob("*.md")}
    stale = [name for name, text in api_reference.pages().items() if written.pop(name, "") != text]
    assert (stale, [*written]) == ([], []), "run make docs"


def test_the_api_reference_marks_properties_and_coroutines():
    text = "class A:\n    @property\n    def b(self) -> int: ...\n    async def c(self): ...\n    def d(self): ..."
    (definition,) = ast.parse(text).body
    signatures = [api_reference.signature(one) for one in definition.body]
    assert signatures == ["property b: int", "async c(self)", "d(self)"]


def test_the_architecture_page_lists_the_folders_in_their_order():
    rows = re.findall(r"^\| (`.*?`) \|", read("docs/understand/architecture.md"), re.M)
    listed = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    assert sorted(listed) == sorted(set(ORDER) - {"__main__"})
    folders = [name for name in ORDER if name in listed]
    assert [name for name in listed if name in ("sandbox", "chat", "engines", "envs", "worlds", "training", "cli")] == [
        name for name in folders if name in ("sandbox", "chat", "engines", "envs", "worlds", "training", "cli")
    ]


def test_expected_pages_and_code_blocks_exist():
    assert {"docs/README.md", "docs/start/quick_start.md", "docs/understand/task_to_gradient.md"} <= set(PAGES)
    assert sum(len(blocks(page, "python")) for page in PAGES) > 30


def test_code_fences_use_only_checked_languages():
    for page in PAGES:
        fences = [info.split(" ")[0] for _, info, _ in FENCE.findall(read(page))]
        assert read(page).count("```") == 2 * len(fences), page
        assert set(fences) <= {"python", "bash", "console", "toml", "json", "text", "mermaid"}, page


def test_make_and_python_commands_name_existing_targets_and_files():
    targets = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text("utf-8"), re.M))
    for page in PAGES:
        lines = [*read(page).splitlines(), *re.findall(r"`(make [^`]+)`", read(page))]
        for line in lines:
            match = re.match(r"(?:\s*\$ |\s*)(make|python3?|pytest) +(.+)", line)
            if match and match[1] == "make":
                assert shlex.split(match[2], comments=True)[0] in targets, (page, line)
            elif match and not line.lstrip().startswith(("python:", "python is")):
                files = [word for word in match[2].split() if word.endswith(".py")]
                assert all((ROOT / file).is_file() for file in files), (page, line)


def test_toml_blocks_are_configurations_and_json_blocks_parse():
    for page in PAGES:
        for block in blocks(page, "toml"):
            config_from_toml(block.text, f"{page}, line {block.line}")
        for block in blocks(page, "json"):
            for line in block.text.splitlines():
                json.loads(line)


def test_quoted_code_matches_the_source_file():
    for page in PAGES:
        for block in blocks(page, "python"):
            _, _, path = block.info.partition(" ")
            if path:
                file = [line.strip() for line in (ROOT / path).read_text("utf-8").splitlines()]
                piece = [line.strip() for line in block.text.strip().splitlines()]
                windows = (file[i : i + len(piece)] for i in range(len(file)))
                assert piece in windows, f"{page}, line {block.line}: not in {path}"


def test_links_and_code_references_resolve():
    for page in PAGES:
        text = FENCE.sub("", read(page))
        for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text):
            if "://" not in target:
                assert ((ROOT / page).parent / target).exists(), (page, target)
        for path, name in re.findall(rf"`((?:{TOP_FOLDERS})/[\w./-]*)(?:::(\w+))?`", text):
            assert (ROOT / path).exists(), (page, path)
            assert not name or name in names_in(ROOT / path), f"{page}: {path} defines no {name}"


def test_pages_named_in_the_package_exist():
    for file in sorted((ROOT / "src").rglob("*.py")):
        for page in re.findall(r"docs/[\w/]+\.md", file.read_text("utf-8")):
            assert (ROOT / page).is_file(), f"{file.relative_to(ROOT)} names {page}"


@cache
def names_in(path: Path) -> set[str]:
    tree = ast.parse(path.read_text("utf-8"))
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return {node.name for node in ast.walk(tree) if isinstance(node, kinds)}


def test_settings_named_in_pages_exist():
    sections = "|".join(dict.fromkeys(setting.key.split(".")[0] for setting in list_settings()))
    for page in PAGES:
        for key in re.findall(rf"`(?:--)?((?:{sections})\.[a-z_.]+)\b", read(page)):
            if not key.endswith((".py", ".json", ".toml", ".safetensors")):
                assert find(key) or is_section(key), f"{page}: {key}"


def test_every_extra_is_listed_with_the_same_install_hint():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
    assert {*extras} - {"dev"} <= {*first_cells("README.md"), "smollm2"}
    for file in [*(ROOT / "src").rglob("*.py"), *map(ROOT.joinpath, PAGES)]:
        text = file.read_text("utf-8")
        assert not re.search(r"pip install (-e )?'?\.\[", text), file
        hints = re.findall(r"^.*(?=pip install '?ludus\[)", text, re.M) if file.suffix == ".py" else []
        assert all(hint.endswith("Install it: ") for hint in hints if file.name != "doctor.py"), file


def first_cells(page: str) -> list[str]:
    """The names in the first cells of a page's tables."""
    cells = re.findall(r"^\| ((?:`[^`]+`(?:, )?)+) \|", read(page), re.M)
    return [name for cell in cells for name in re.findall(r"`([^`]+)`", cell)]


OF_ENGINES_ELSEWHERE = {"sync/engines", "sync/transfer_s"}
"""Metrics of remote engines, which no command of these pages starts."""


OF_SETTINGS = (
    *("collapse/", "constraint/", "entropy/coef", "exploration/", "judge/", "majority/", "reward_model/"),
    "tools/untested",
)
"""Beginnings of metrics that the run of these pages does not switch on."""


def test_documented_metrics_match_those_of_a_run(finished):
    named = [name for name in first_cells("docs/use/read_a_run.md") if "/" in name and "." not in name]
    patterns = {name: re.compile(re.sub(r"[A-Z]+", r"[^/]+", name)) for name in named if name[-1] != "/"}
    folder = finished / "runs" / "search-1"
    written = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    written += [json.loads(line) for line in (folder / "timings.jsonl").read_text().splitlines()]
    metrics = {name for row in written for name in row} - {"step"}
    assert [m for m in sorted(metrics) if not any(p.fullmatch(m) for p in patterns.values())] == []
    missed = {n for n, p in patterns.items() if not (n.startswith(OF_SETTINGS) or any(p.fullmatch(m) for m in metrics))}
    assert missed == OF_ENGINES_ELSEWHERE


def test_every_file_of_a_run_is_documented(finished):
    page = read("docs/use/read_a_run.md")
    for path in (finished / "runs" / "search-1").iterdir():
        assert f"`{path.name}{'/' if path.is_dir() else ''}`" in page, path.name


def keys_of(value: object) -> set[str]:
    if isinstance(value, list):
        return {key for item in value for key in keys_of(item)}
    if not isinstance(value, dict):
        return set()
    free = {"rewards", "tags", "parts", "by_family", "by_tag", "stop_reasons", "messages", "config", "packages"}
    return set(value) | {key for name, item in value.items() if name not in free for key in keys_of(item)}


def test_every_field_of_the_file_formats_is_documented(finished):
    page, folder = read("docs/use/read_a_run.md"), finished / "runs" / "search-1"
    with gzip.open(folder / "rollouts" / "step-000001.jsonl.gz", "rt") as lines:
        fields = keys_of([json.loads(line) for line in lines])
    fields |= keys_of(json.loads((folder / "evaluations" / "step-000003-test-greedy.json").read_text()))
    assert {"segments", "logprobs", "successes"} <= fields
    assert [name for name in sorted(fields) if f"`{name}`" not in page] == []
