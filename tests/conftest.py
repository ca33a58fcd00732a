"""Fixtures that several test files share."""

from pathlib import Path

import pytest

from tiny_run import make_run


@pytest.fixture(scope="session")
def tiny_run(tmp_path_factory) -> Path:
    """The folder of a finished run (see `tiny_run.py`). Read it; copy it to write into it."""
    return make_run(tmp_path_factory.mktemp("tiny"))
