"""Shared fixtures."""

import fcntl
import gc
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from served import Served, serving_model
from tiny_run import make_run

# Child processes and the next run reuse compiled modules.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# The time of an example depends on the load of the machine.
settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy")


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Exclude the imported modules and the collected tests, millions of objects, from garbage collections, and make
    these rarer than by default.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(50_000, 20, 20)
        gc.enable()


@pytest.fixture(scope="session")
def tiny_run(tmp_path_factory) -> Path:
    """The folder of a finished run (see `tiny_run.py`), the same for all workers. Tests must copy it before they
    change it.
    """
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "tiny"
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "finished").exists():
            shutil.rmtree(folder / "run", ignore_errors=True)
            make_run(folder)
            (folder / "finished").touch()
    return folder / "run"


@pytest.fixture(scope="session")
def served() -> Iterator[Served]:
    """`ludus serve --control` of the packaged cold start. Tests must leave it running, with the same weights."""
    with serving_model("--control") as server:
        yield server
