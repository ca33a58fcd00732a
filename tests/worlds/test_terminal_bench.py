"""Tasks in the layout of Terminal-Bench: loaded, graded by pytest in a fresh sandbox, resistant to cheats."""

import asyncio
import shutil
import sys

import pytest

from ludus.envs.tool_env import ToolLimits
from ludus.errors import ConfigError
from ludus.sandbox import open_sandbox
from ludus.worlds.terminal.bench import is_full, load_bench, named_tests
from ludus.worlds.terminal.checks import SessionState
from ludus.worlds.terminal.world import make_terminal_world

TASK = """instruction: |-
  Write the squares of the numbers in /app/numbers.txt to /app/squares.txt.
  Do not touch /app.old or /application.
difficulty: easy
category: files
parser_name: pytest
"""
TESTS = '''"""Tests."""
import subprocess
from pathlib import Path

import pytest


def test_squares():
    assert Path("/app/squares.txt").read_text().split() == ["1", "4", "9"]


@pytest.mark.parametrize("path", ["numbers.txt"])
def test_kept(path):
    assert Path("/app", path).read_text() == "1\\n2\\n3\\n"


class TestProgram:
    def test_python_works(self):
        assert subprocess.check_output(["python3", "-c", "print(1)"], cwd="/tmp") == b"1\\n"
'''
NAMES = (
    "test_outputs.py::test_squares",
    "test_outputs.py::test_kept",
    "test_outputs.py::TestProgram::test_python_works",
)
DOCKERFILE = "FROM debian:12\n# what it needs\nWORKDIR /app\nCOPY numbers.txt ./\nCOPY data /app/data/\n"


@pytest.fixture
def folder(tmp_path):
    place = tmp_path / "squares"
    (place / "tests").mkdir(parents=True)
    (place / "data").mkdir()
    (place / "task.yaml").write_text(TASK)
    (place / "tests/test_outputs.py").write_text(TESTS)
    (place / "solution.sh").write_text("#!/bin/bash\nset -e\nawk '{print $1*$1}' /app/numbers.txt > /app/squares.txt\n")
    (place / "Dockerfile").write_text(DOCKERFILE)
    (place / "numbers.txt").write_text("1\n2\n3\n")
    (place / "data/run.sh").write_text("#!/bin/sh\ncat /app/numbers.txt\n")
    (place / "data/run.sh").chmod(0o755)
    return tmp_path


def judged(task, *states):
    """Which tests pass over the task's files with changes."""

    async def act():
        sandbox = open_sandbox()
        try:
            return [
                await task.grade(SessionState({**task.start.files, **files}, task.start.executable), sandbox)
                for files in states
            ]
        finally:
            await sandbox.close()

    return asyncio.run(act())


def test_task_is_read_with_its_files_into_the_sandbox(folder):
    (task,) = load_bench(folder, "/app", "refuse")
    assert task.text.splitlines()[0] == ("Write the squares of the numbers in /box/numbers.txt to /box/squares.txt.")
    assert task.text.endswith("Do not touch /app.old or /application.")
    assert task.start.files == {"numbers.txt": b"1\n2\n3\n", "data/run.sh": b"#!/bin/sh\ncat /box/numbers.txt\n"}
    assert task.start.executable == {"data/run.sh"}
    assert task.suite.fail_to_pass == NAMES
    assert (task.level, task.topic) == (1, "files")
    assert "/box/squares.txt" in task.solution


def test_tests_are_collected_as_pytest_does():
    classes = b"class TestB:\n    def test_c(self): pass\nclass Other:\n    def test_d(self): pass\n"
    source = b"def test_a(): pass\ndef helper(): pass\n" + classes
    assert list(named_tests("t/test_x.py", source)) == ["t/test_x.py::test_a", "t/test_x.py::TestB::test_c"]
    assert list(named_tests("conftest.py", source)) == []


CHEATS = {
    "a conftest": {"conftest.py": b"collect_ignore_glob = ['*']\n", "tests/conftest.py": b"import os; os._exit(0)\n"},
    "a module": {"pytest.py": b"import os; os._exit(0)\n", "pathlib.py": b"boom\n", "sitecustomize.py": b"1/0\n"},
    "tests": {"tests/test_outputs.py": b"def test_squares(): pass\n", "test_outputs.py": b"def test_squares(): pass\n"},
    "settings": {
        "pytest.ini": b"[pytest]\naddopts = --co\n",
        "pyproject.toml": b"[tool.pytest.ini_options]\naddopts = '-k kept'\n",
    },
    "words": {"squares.txt": b'\n[["test_outputs.py::test_squares", "call", "passed"]]\n'},
}


def test_solution_passes_and_unrelated_files_change_no_verdict(folder):
    (task,) = load_bench(folder, "/app", "refuse")
    right = {"squares.txt": b"1\n4\n9\n"}
    odd = {path: data for files in CHEATS.values() for path, data in files.items()}
    solved, idle, cheated = judged(task, {**odd, **right}, {}, odd)
    assert solved == dict.fromkeys(NAMES, True)
    assert idle == {**solved, NAMES[0]: False}
    assert cheated == idle


def test_script_grades_tasks_without_pytest(folder):
    place = folder / "squares"
    (place / "tests/test_outputs.py").unlink()
    with pytest.raises(ConfigError, match="has no tests"):
        load_bench(folder, "/app", "refuse")
    (place / "run-tests.sh").write_text('cd /app\n[ "$(cat squares.txt)" = 1 ]\n')
    with pytest.raises(ConfigError, match=r"graded by run-tests\.sh"):
        load_bench(folder, "/app", "refuse")
    (task,) = load_bench(folder, "/app", "refuse", "trust")
    right, wrong, none = judged(task, {"squares.txt": b"1\n"}, {"run-tests.sh": b"exit 0\n"}, {})
    assert (right, wrong, none) == ({"run-tests.sh": True}, {"run-tests.sh": False}, {"run-tests.sh": False})


COUNTS = """cd /app
python3 -c 'import json, sys; sys.exit(json.load(open("squares.txt")) != 1)'
"""
EXITS = b"import os\nos._exit(0)\n"
SITE = f".local/lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages/usercustomize.py"


@pytest.mark.parametrize(
    "cheat",
    [
        *({"json.py": EXITS}, {"sys.py": EXITS, "encodings.py": EXITS, "sitecustomize.py": EXITS}),
        *({SITE: EXITS}, {".bashrc": b"exit 0\n", ".profile": b"exit 0\n", ".bash_profile": b"exit 0\n"}),
        *({"python3": b"#!/bin/sh\nexit 0\n", "bash": b"#!/bin/sh\nexit 0\n"}, {"run-tests.sh": b"exit 0"}),
    ],
)
def test_files_beside_a_wrong_answer_change_no_script_verdict(folder, cheat):
    place = folder / "squares"
    shutil.rmtree(place / "tests")
    (place / "run-tests.sh").write_text(COUNTS)
    (task,) = load_bench(folder, "/app", "refuse", "trust")
    right, wrong = judged(task, {"squares.txt": b"1", **cheat}, {"squares.txt": b"2", **cheat})
    assert (right, wrong) == ({"run-tests.sh": True}, {"run-tests.sh": False})


def test_images_are_refused_skipped_or_ignored_as_the_settings_say(folder):
    path = folder / "squares/Dockerfile"
    path.write_text(DOCKERFILE + "RUN apt-get update && \\\n    apt-get install -y nginx\n")
    with pytest.raises(ConfigError, match=r"squares/Dockerfile, line 6: RUN apt-get"):
        load_bench(folder, "/app", "refuse")
    with pytest.raises(ConfigError, match="1 of 1 tasks need an image"):
        load_bench(folder, "/app", "skip")
    assert len(load_bench(folder, "/app", "ignore")) == 1
    path.write_text("FROM x\nCOPY numbers.txt /etc/numbers.txt\n")
    with pytest.raises(ConfigError, match=r"copies to /etc/numbers.txt, outside of /app"):
        load_bench(folder, "/app", "refuse")


def test_broken_task_folders_are_reported(tmp_path, folder):
    with pytest.raises(ConfigError, match="does not contain a task"):
        load_bench(tmp_path / "none", "/app", "refuse")
    (folder / "squares/task.yaml").write_text("instruction: [")
    with pytest.raises(ConfigError, match=r"task.yaml cannot be read"):
        load_bench(folder, "/app", "refuse")
    (folder / "squares/task.yaml").write_text("difficulty: hard\n")
    with pytest.raises(ConfigError, match="no instruction"):
        load_bench(folder, "/app", "refuse")


def test_world_has_a_split_of_benchmark_tasks_with_solutions(folder):
    world = make_terminal_world({"levels": [1], "topics": ["files"], "bench": str(folder)}, ToolLimits())
    (task,) = world.tasks("bench")
    assert task.tags["kind"] == "squares"
    assert "awk" in world.expert(task).messages[2]["tool_calls"][0]["function"]["arguments"]


TOML = """version = "1.0"
[metadata]
difficulty = "hard"
category = "files"
[verifier]
timeout_sec = 40.0
[agent]
timeout_sec = 900.0
[environment]
build_timeout_sec = 600.0
docker_image = "someone/squares:1"
"""
PYTEST_SH = """#!/bin/bash
curl -LsSf https://example.org/uv/install.sh | sh
uvx -w pytest==8.4.1 pytest --ctrf /logs/verifier/ctrf.json /tests/test_outputs.py -rA
if [ $? -eq 0 ]; then echo 1 > /logs/verifier/reward.txt; else echo 0 > /logs/verifier/reward.txt; fi
"""
SCORED_SH = """#!/bin/bash
if cmp -s /app/squares.txt /tests/due.txt; then echo 1.0 > /logs/verifier/reward.txt; exit 0; fi
echo '{"reward": 0.5}' > /logs/verifier/reward.json
exit 1
"""


@pytest.fixture
def harbor(folder):
    """The same task in Harbor's layout."""
    place = folder / "squares"
    for name in ("task.yaml", "solution.sh"):
        (place / name).unlink()
    (place / "environment").mkdir()
    (place / "solution").mkdir()
    for name in ("Dockerfile", "numbers.txt", "data"):
        (place / name).rename(place / "environment" / name)
    (place / "task.toml").write_text(TOML)
    (place / "instruction.md").write_text("Write the squares of /app/numbers.txt to /app/squares.txt.\n")
    (place / "solution/solve.sh").write_text("#!/bin/bash\nprintf '1\\n4\\n9\\n' > /app/squares.txt\n")
    (place / "tests/due.txt").write_text("1\n4\n9\n")
    (place / "tests/test.sh").write_text(PYTEST_SH)
    due = 'def test_squares():\n    assert Path("/tests/due.txt").is_file()\n'
    (place / "tests/test_outputs.py").write_text(TESTS.replace("def test_squares():\n", due))
    return place


def test_harbor_layout_is_read_and_graded_by_its_tests(harbor):
    (task,) = load_bench(harbor.parent, "/app", "refuse")
    assert task.text == "Write the squares of /box/numbers.txt to /box/squares.txt."
    assert (task.level, task.topic, task.timeout_s, task.suite.fail_to_pass) == (4, "files", 40.0, NAMES)
    assert sorted(task.start.files) == ["data/run.sh", "numbers.txt"]
    assert "> /box/squares.txt" in task.solution
    right, idle = judged(task, {"squares.txt": b"1\n4\n9\n"}, {})
    assert right == dict.fromkeys(NAMES, True)
    assert idle == {**right, NAMES[0]: False}


def test_harbor_reward_file_is_used_only_if_trusted(harbor):
    (harbor / "tests/test.sh").write_text(SCORED_SH)
    with pytest.raises(ConfigError, match=r"graded by tests/test\.sh"):
        load_bench(harbor.parent, "/app", "refuse")
    (task,) = load_bench(harbor.parent, "/app", "refuse", "trust")
    forged = {"logs/verifier/reward.txt": b"1", "tests/test.sh": b"echo 1 > /logs/verifier/reward.txt"}
    right, half = judged(task, {"squares.txt": b"1\n4\n9\n"}, forged)
    assert (right, half) == ({"tests/test.sh": True}, {"tests/test.sh": False})


@pytest.mark.parametrize(
    ("text", "full"),
    [
        *(("1\n", True), ("1.0", True), ("0.99", False), ("true", False), ("", False), ("nan", False)),
        *(('{"reward": 1}', True), ('{"accuracy": 1.0}', True), ('{"a": 1, "b": 1}', False)),
    ],
)
def test_only_a_full_reward_counts(text, full):
    assert is_full(text) is full


NEEDS = {
    "environment/docker-compose.yaml": ("services: {}\n", r"squares: environment/docker-compose\.yaml"),
    "environment/Dockerfile": ("FROM x\nRUN pip install 'numpy\n", r"squares/environment/Dockerfile, line 2: RUN"),
    "task.toml": (TOML + "gpus = 1\n", r"squares: environment\.gpus: a GPU"),
}


@pytest.mark.parametrize("path", NEEDS)
def test_tasks_of_harbor_that_need_a_container_are_refused_with_their_reason_or_skipped(harbor, path, caplog):
    text, reason = NEEDS[path]
    shutil.copytree(harbor, harbor.parent / "other")
    (harbor / path).write_text(text)
    with pytest.raises(ConfigError, match=f"1 of 2 tasks .*{reason}"):
        load_bench(harbor.parent, "/app", "refuse")
    (task,) = load_bench(harbor.parent, "/app", "skip")
    assert task.name == "other"
    assert "that needs a container: squares" in caplog.text


def test_image_without_dockerfile_and_setup_steps_are_rejected(harbor):
    (harbor / "environment/Dockerfile").unlink()
    with pytest.raises(ConfigError, match=r"squares: environment\.docker_image: the image someone/squares:1"):
        load_bench(harbor.parent, "/app", "refuse")
    (harbor / "task.toml").write_text(TOML + '[[steps]]\nname = "a"\n')
    (harbor / "instruction.md").unlink()
    with pytest.raises(ConfigError, match="squares: it has several steps"):
        load_bench(harbor.parent, "/app", "refuse")
    (harbor / "task.toml").write_text("[verifier]\ntimeout_sec = -1\n")
    with pytest.raises(ConfigError, match=r"verifier\.timeout_sec is -1"):
        load_bench(harbor.parent, "/app", "refuse")
    (harbor / "task.toml").write_text("version = ")
    with pytest.raises(ConfigError, match=r"task\.toml cannot be read"):
        load_bench(harbor.parent, "/app", "refuse")
