"""Shared fixtures."""

import os
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


@pytest.fixture(scope="session")
def tiny_run(tmp_path_factory) -> Path:
    """The folder of a finished run (see `tiny_run.py`). Tests must copy it before they change it."""
    return make_run(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def served() -> Iterator[Served]:
    """`ludus serve --control` of the packaged cold start. Tests must leave it running, with the same weights."""
    with serving_model("--control") as server:
        yield server
