"""The wheel works without the checkout."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TINY = {
    "training.steps": "1",
    "training.prompts_per_step": "2",
    "algorithm.group_size": "2",
    "evaluation.tasks": "2",
    "evaluation.tasks_during": "2",
    "run.threads": "1",
}

pytestmark = pytest.mark.pages


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """The wheel of a copy of the files that git tracks."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    archive = source / "tree.tar"
    subprocess.run(["git", "-C", ROOT, "archive", "-o", archive, "HEAD"], check=True)
    subprocess.run(["tar", "xf", archive, "-C", source], check=True)
    archive.unlink()
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", out, source]
    subprocess.run(pip, check=True, timeout=300)
    (found,) = out.glob("ludus-*.whl")
    return found


def test_wheel_has_licence_and_metadata_but_no_tests(wheel):
    with zipfile.ZipFile(wheel) as file:
        names = file.namelist()
        (metadata,) = (file.read(name).decode() for name in names if name.endswith(".dist-info/METADATA"))
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert "License-Expression: Apache-2.0" in metadata
    assert "Project-URL: Source" in metadata
    assert not [name for name in names if name.startswith(("tests/", "generators/", "benchmarks/"))]


def test_training_runs_from_the_wheel_in_a_new_environment(wheel, tmp_path):
    venv.create(tmp_path / "venv", with_pip=True)
    (packages,) = (tmp_path / "venv/lib").glob("python*/site-packages")
    # The dependencies are those of this environment; its own link to the checkout is not followed from here.
    (packages / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    python = tmp_path / "venv/bin/python"
    subprocess.run([python, "-m", "pip", "install", "--quiet", "--no-deps", wheel], check=True, timeout=300)
    clean = {"PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1", "HOME": str(tmp_path)}
    where = subprocess.run(
        [python, "-c", "import ludus; print(ludus.__file__)"], cwd=tmp_path, env=clean, capture_output=True, text=True
    )
    assert str(packages) in where.stdout
    words = [word for key, value in TINY.items() for word in (f"--{key}", value)]
    command = [tmp_path / "venv/bin/ludus", "train", "search", *words]
    done = subprocess.run(command, cwd=tmp_path, env=clean, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "runs/search-1/checkpoints/step-000001").is_dir()
