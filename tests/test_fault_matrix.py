"""A few trials of each kind of fault (`make faults-matrix` has many), and errors that the trials must detect."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fault_kinds import KINDS
from fault_matrix import Trial, table
from fault_runs import async_faults, ledger_faults, sync_faults, waiting
from soak import Sample, grown

HERE = Path(__file__).parent


@pytest.mark.fault
@pytest.mark.parametrize("kind", KINDS)
def test_run_with_injected_fault_continues_or_stops_and_resumes(kind, tmp_path):
    command = [sys.executable, str(HERE / "fault_matrix.py"), "--kinds", kind, "--moments", "2"]
    out = tmp_path / "trials.jsonl"
    ended = subprocess.run([*command, "--out", str(out)], capture_output=True, text=True, timeout=3000)
    if f"{kind}: left out" in ended.stdout:
        pytest.skip(ended.stdout)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    trials = [json.loads(line) for line in out.read_text().splitlines()]
    assert [trial["wrong"] for trial in trials] == [[]] * 4
    assert len({trial["way"] for trial in trials}) == 2


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Runs of the harness in both modes, made in another process, because it forks."""
    work = tmp_path_factory.mktemp("whole")
    program = (
        "import sys; from pathlib import Path; from fault_runs import *\n"
        "work = Path(sys.argv[1]); cold_start(work)\n"
        "for mode in ('sync', 'async'):\n"
        "    process = fork(train_words(work, work / mode, {'training.mode': mode}), work / 'said')\n"
        "    assert process.wait() == 0, process.reason()\n"
    )
    subprocess.run([sys.executable, "-c", program, str(work)], env=environment(), check=True)
    return work


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])}


def rewritten(folder: Path, name: str, change) -> bytes:
    """Change the lines of a file; return its former content."""
    path = folder / name
    before = path.read_bytes()
    text = gzip.decompress(before) if name.endswith(".gz") else before
    lines = change(text.decode().splitlines(keepends=True))
    changed = "".join(lines).encode()
    path.write_bytes(gzip.compress(changed) if name.endswith(".gz") else changed)
    return before


@pytest.mark.fault
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_ledger_check_finds_lost_and_twice_trained_episodes(whole, mode):
    folder = whole / mode
    assert ledger_faults(folder) == []
    name = "rollouts/step-000002.jsonl.gz"
    for change, words in ((lambda x: x[1:], "a group is incomplete"), (lambda x: [*x, x[0]], "episodes twice")):
        before = rewritten(folder, name, change)
        assert any(words in found for found in ledger_faults(folder))
        (folder / name).write_bytes(before)
    before = rewritten(folder, "metrics.jsonl", lambda x: x[:-1])
    assert any("steps [1" in found for found in ledger_faults(folder))
    (folder / "metrics.jsonl").write_bytes(before)


@pytest.mark.fault
def test_checks_find_differing_files_and_episodes_lost_on_resume(whole):
    sync, streamed = whole / "sync", whole / "async"
    assert sync_faults(sync, sync) == async_faults(streamed, waiting(streamed)) == []
    assert sync_faults(streamed, sync)
    assert "1 of 1 ended episodes" in async_faults(streamed, {(1, "train:none", 0): [[1]]})[0]


def test_growth_is_measured_per_process_after_warmup():
    def series(pid, per_s, seconds):
        every = range(0, seconds, 5)
        return [Sample("engine", pid, age, 500 + min(age, 60) + per_s * max(0, age - 60), 4, 9) for age in every]

    found = grown([*series(1, 0.01, 600), *series(2, 9.0, 100)])  # the second one does not live long enough
    assert found["engine"]["rss_mb"] == pytest.approx(6.0)
    assert (found["engine"]["threads"], found["engine"]["processes"]) == (0, 1)


def test_table_counts_run_outcomes():
    trials = [
        Trial("learner", "sync", "killed", 1.0, 2, -9),
        Trial("full disk", "sync", "full", 1.0, 2, 2, wrong=["lost"]),
        Trial("full disk", "sync", "full", 1.0, 2, 0, failed=3.0),
    ]
    assert table(trials)[2:] == [
        "| learner: killed | sync | 1 | 0 | 1 (killed) | 0 | 0 |",
        "| full disk: full | sync | 2 | 1 | 1 (2) | 3 | 1 |",
    ]
