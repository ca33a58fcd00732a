"""The packages wandb, mlflow and trackio (`make trackers`): resumed and killed runs have each step once, and nothing
is sent over a network. Each run is a process, because the packages read their settings at import.
"""

import json
import os
import shutil
import signal
import sqlite3
import struct
import subprocess
import sys
from contextlib import closing

import pytest

from ludus.config import config_from_toml
from ludus.config.toml import to_toml
from ludus.diagnostics.trackers import make_tracker
from ludus.errors import StorageError

pytestmark = pytest.mark.trackers
NAMES = ("wandb", "mlflow", "trackio")
METRICS = ("reward/mean", "tools/a@b/calls")
PROGRAM = """
import os, sys, time
from pathlib import Path
from ludus.diagnostics.trackers import make_tracker
name, folder, end, *steps = sys.argv[1:]
tracker = make_tracker(name, Path(folder), 0)
for step in map(int, steps):
    tracker.log(step, {"reward/mean": step / 4, "tools/a@b/calls": float("inf")})
if end == "kill":
    time.sleep(3)
    os.kill(os.getpid(), 9)
if end == "close":
    tracker.close()
"""
SETTINGS = ("WANDB", "MLFLOW", "TRACKIO", "PYTEST", "CI")
"""Beginnings of variables that a run must not inherit: MLflow sends nothing if it believes to be under test."""


@pytest.fixture(params=NAMES)
def name(request):
    pytest.importorskip(request.param)
    return request.param


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "search-1").mkdir()
    (tmp_path / "search-1" / "config.toml").write_text(to_toml(config_from_toml("[run]\nseed = 7\n")))
    return tmp_path / "search-1"


def log_steps(name, folder, steps, *, end="close", before=(), **variables):
    """Log steps in a process with the tracker, and return its exit code."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith(SETTINGS)}
    environment |= {"TRACKIO_DIR": str(folder.parent / "trackio"), "HOME": str(folder.parent)} | variables
    command = [*before, sys.executable, "-c", PROGRAM, name, str(folder), end, *map(str, steps)]
    done = subprocess.run(command, env=environment, cwd=folder.parent, capture_output=True, text=True)
    assert done.returncode in (0, -signal.SIGKILL), done.stderr
    return done.returncode


def stored(name, folder):
    """Return what the package has: the ids of its runs, a setting, and the values of `reward/mean` with their steps."""
    return {"wandb": stored_wandb, "mlflow": stored_mlflow, "trackio": stored_trackio}[name](folder)


def wandb_records(data):
    """Split a transaction log (the log format of LevelDB) into its records."""
    from wandb.proto.wandb_internal_pb2 import Record

    at, payload = 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        _, size, kind = struct.unpack("<IHB", data[at : at + 7])
        payload += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):
            yield Record.FromString(payload)
            payload = b""


def stored_wandb(folder):
    ids, seeds, values = set(), set(), []
    for path in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        for record in wandb_records(path.read_bytes()):
            if record.HasField("run"):
                ids.add(record.run.run_id)
                (config,) = (item.value_json for item in record.run.config.update if item.key == "run")
                seeds.add('"seed":7' in config)
            if record.HasField("history"):
                row = {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
                assert set(METRICS) <= set(row)
                values.append((record.history.step.num, float(row["reward/mean"])))
    return ids, seeds == {True}, values


def stored_mlflow(folder, path=None):
    with closing(sqlite3.connect(path or folder / "mlflow" / "mlflow.db")) as database:
        ids = {row[0] for row in database.execute("SELECT run_uuid FROM runs WHERE status = 'FINISHED'")}
        ((seed,),) = database.execute("SELECT value FROM params WHERE key = 'run.seed'")
        keys = {row[0] for row in database.execute("SELECT key FROM metrics")}
        assert keys == {"reward/mean", "tools/a_b/calls"}
        rows = database.execute("SELECT step, value FROM metrics WHERE key = 'reward/mean' ORDER BY timestamp")
        return ids, seed == "7", rows.fetchall()


def stored_trackio(folder):
    program = (
        "import json; from trackio.sqlite_storage import SQLiteStorage as S; import trackio\n"
        "(run,) = trackio.Api().runs('ludus'); logs = S.get_logs('ludus', run.name)\n"
        "print(json.dumps([run.name, run.config['run']['seed'], [(r['step'], r['reward/mean']) for r in logs]]))"
    )
    environment = os.environ | {"TRACKIO_DIR": str(folder.parent / "trackio")}
    run = [sys.executable, "-c", program]
    done = subprocess.run(run, env=environment, capture_output=True, text=True, check=True)
    name, seed, values = json.loads(done.stdout.splitlines()[-1])
    return {name}, seed == 7, [tuple(pair) for pair in values]


@pytest.mark.parametrize("end", ["close", "exit", "kill"])
def test_a_resumed_run_has_each_step_once(name, folder, end):
    log_steps(name, folder, [0, 1, 2], end=end)
    log_steps(name, folder, [2, 3, 4])
    ids, has_config, values = stored(name, folder)
    assert len(ids) == 1
    assert has_config
    assert values == [(step, step / 4) for step in range(5)]


def test_two_runs_with_the_same_name_are_kept_apart(folder, tmp_path):
    pytest.importorskip("trackio")
    other = tmp_path / "elsewhere" / "search-1"
    shutil.copytree(folder, other)
    log_steps("trackio", folder, [0])
    log_steps("trackio", other, [0], TRACKIO_DIR=str(tmp_path / "trackio"))
    runs = [(path / "trackio" / "run.json").read_text() for path in (folder, other)]
    assert runs[0] != runs[1]


@pytest.mark.skipif(shutil.which("strace") is None, reason="strace shows the connections")
def test_tracker_opens_no_network_connections(name, folder, tmp_path):
    trace = tmp_path / "trace"
    log_steps(name, folder, [0, 1], before=("strace", "-f", "-e", "trace=connect", "-o", str(trace)))
    assert [line for line in trace.read_text().splitlines() if "AF_INET" in line] == []
    assert stored(name, folder)[2] == [(0, 0.0), (1, 0.25)]


def test_user_environment_variables_override_tracker_defaults(folder, tmp_path):
    pytest.importorskip("mlflow")
    pytest.importorskip("wandb")
    path = tmp_path / "server.db"
    log_steps("mlflow", folder, [0], MLFLOW_TRACKING_URI=f"sqlite:///{path}")
    assert stored_mlflow(folder, path)[2] == [(0, 0.0)]
    assert not (folder / "mlflow" / "mlflow.db").exists()
    log_steps("wandb", folder, [0], WANDB_MODE="disabled")
    assert not list(folder.glob("wandb/*run-*"))


def test_tracker_package_error_raises_storage_error(folder, monkeypatch):
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "unknown://server")
    with pytest.raises(StorageError, match=r"The tracker mlflow failed: .*unknown"):
        make_tracker("mlflow", folder)
