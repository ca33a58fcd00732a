"""The run log on a full disk."""

from __future__ import annotations

import logging

import pytest

from ludus.config import load_config
from ludus.errors import StorageError
from ludus.training.run.run_dir import lock_run, new_run


def test_unwritable_log_hides_no_error(tmp_path, capsys):
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
