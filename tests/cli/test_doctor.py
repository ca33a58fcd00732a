"""`ludus doctor`: its report here, and for missing, old or unreachable parts."""

import subprocess
import sys
from importlib import metadata

import pytest

from ludus.cli.commands.doctor import check_libraries, examine, locked_versions
from tiny_run import ludus


def test_a_healthy_machine_has_no_fault_and_a_model_that_works():
    said = ludus("doctor")
    assert said.code == 0, said.out
    assert "No faults: ready to train." in said.out
    assert "the shipped model: engine and learner agree to" in said.out


def test_what_the_tests_pass_with_is_what_is_installed_here():
    assert metadata.version("transformers") == locked_versions()["transformers"]
    assert locked_versions()["torch"] == "2.13.0"


@pytest.mark.parametrize(
    ("requirement", "tested", "state", "words"),
    [
        ("no-such-package>=1.0", {}, "fault", "pip install 'no-such-package>=1.0'"),
        ("numpy>=1000.1", {}, "fault", "older than 1000.1"),
        ("numpy>=1.0", {"numpy": "1.0.0"}, "note", "the tests pass with 1.0.0"),
        ("numpy>=1.0", {"numpy": metadata.version("numpy")}, "fine", "the versions"),
        ("no-such-package>=1.0; extra == 'lora'", {}, "fine", "the versions"),
    ],
)
def test_libraries(requirement, tested, state, words):
    (finding,) = check_libraries([requirement], tested)
    assert finding.state == state
    assert words in finding.text


def test_a_server_that_does_not_answer_is_a_fault(tmp_path):
    said = ludus("doctor", "--engine", "http://127.0.0.1:9")
    assert said.code == 1
    assert "fault  engine http://127.0.0.1:9:" in said.out


def test_a_server_says_what_it_serves(served, tmp_path):
    *_, last = examine(tmp_path / "not" / "there", served.url)
    assert last.state == "fine", last
    assert "context 768 tokens" in last.text


def test_the_check_of_the_machine_starts_without_numerical_libraries():
    code = "import sys, ludus.cli.commands.doctor; sys.exit(int('numpy' in sys.modules or 'scipy' in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
