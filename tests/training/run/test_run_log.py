"""The run log on a full disk."""

from __future__ import annotations

import logging

import pytest

from ludus.config import load_config
from ludus.errors import StorageError
from ludus.training.run.run_dir import lock_run, new_run


def test_a_log_that_cannot_be_written_hides_nothing_and_says_nothing(tmp_path, capsys):
    folder = new_run(load_config("search", ["--run.dir", str(tmp_path / "run")]), "run", "rl", "search")
    (folder.path / "log.txt").unlink(missing_ok=True)
    (folder.path / "log.txt").symlink_to("/dev/full")

    before = list(logging.getLogger("ludus").handlers)

    def fail():
        with lock_run(folder):
            logging.getLogger("ludus.rl").warning("before")
            raise StorageError("There is no room for the rollouts.")

    with pytest.raises(StorageError, match="the rollouts"):
        fail()
    said = capsys.readouterr()
    assert "Traceback" not in said.err + said.out
    assert logging.getLogger("ludus").handlers == before
