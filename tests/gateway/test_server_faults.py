"""Training against a server: equal to the embedded engine, and robust to a server that is killed."""

from __future__ import annotations

import json
import re
import subprocess
import time
from pathlib import Path

import httpx
import pytest

from ludus.cli.main import main
from served import COLD_START, start_server
from small_runs import lasting_files, start, words

ERROR_WITHIN_S = 60


def metrics(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.fault
def test_run_against_a_server_equals_the_run_of_the_embedded_engine(served, tmp_path):
    """Batch-invariant engines on both sides: all that is written is the same, bit for bit."""
    run = {"training__steps": "1", "evaluation__every": "1", "evaluation__tasks": "3"}
    here, there = tmp_path / "here", tmp_path / "there"
    assert main(["train", "search", *words(here, **run)]) == 0
    assert main(["train", "search", *words(there, engine__url=served.url, **run)]) == 0
    expected, found = lasting_files(here), lasting_files(there)
    assert found.keys() == expected.keys()
    assert [name for name in expected if found[name] != expected[name]] == []
    # The server goes back to the weights that other tests expect.
    rpc = {"method": "reload_weights", "kwargs": {"weights_path": str(COLD_START)}}
    httpx.post(f"{served.url}/collective_rpc", json=rpc, headers=served.headers).raise_for_status()


def decoded(url: str) -> float:
    text = httpx.get(f"{url}/metrics").text
    return float(re.search(r"^ludus_decode_tokens_total (\S+)", text, re.M)[1])


def wait_for_rollouts(url: str, run: subprocess.Popen[bytes], folder: Path, steps: int) -> None:
    """Until `steps` steps are done and the next one is being sampled."""
    deadline = time.monotonic() + 120
    while not (folder / "metrics.jsonl").is_file() or len(metrics(folder)) < steps:
        assert run.poll() is None, run.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.05)
    before = decoded(url)
    while decoded(url) < before + 20:
        assert run.poll() is None, run.communicate()[1]
        time.sleep(0.01)


RUN = {"training__steps": "6", "training__checkpoint_every": "1", "evaluation__every": "6"}


@pytest.mark.fault
def test_killed_server_is_reported_in_time_and_run_resumes_after_restart(tmp_path):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert main(["train", "search", *words(whole, **RUN)]) == 0
    server = start_server("--control")
    settings = words(cut, engine__url=server.url, engine__connect_timeout_s="3", **RUN)
    run = start("train", "search", *settings)
    wait_for_rollouts(server.url, run, cut, 2)
    killed = time.monotonic()
    server.kill()
    _, said = run.communicate(timeout=ERROR_WITHIN_S)
    assert time.monotonic() - killed < ERROR_WITHIN_S
    assert run.returncode in (3, 6)
    text = said.decode()
    assert f"{server.url} is unreachable" in text
    assert f"ludus train --resume {cut}" in text
    assert "Traceback" not in text
    assert "is unreachable" in (cut / "log.txt").read_text()

    again = start_server("--control", port=server.port)
    try:
        resumed = start("train", "--resume", str(cut))
        _, said = resumed.communicate(timeout=300)
        assert resumed.returncode == 0, said.decode()
    finally:
        again.kill()
    expected, found = lasting_files(whole), lasting_files(cut)
    assert [name for name in expected if found.get(name) != expected[name]] == []


@pytest.mark.fault
def test_a_server_that_returns_in_time_gets_its_weights_without_failures(tmp_path):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    short = RUN | {"training__steps": "3", "evaluation__every": "3"}
    assert main(["train", "search", *words(whole, **short)]) == 0
    server = start_server("--control")
    run = start("train", "search", *words(cut, engine__url=server.url, engine__connect_timeout_s="500", **short))
    wait_for_rollouts(server.url, run, cut, 1)
    server.kill()
    again = start_server("--control", port=server.port)
    try:
        _, said = run.communicate(timeout=300)
        assert run.returncode == 0, said.decode()
    finally:
        again.kill()
    assert "holds weights" in (cut / "log.txt").read_text()
    expected, found = lasting_files(whole), lasting_files(cut)
    assert [name for name in expected if found.get(name) != expected[name]] == []
