"""Temporary folders of killed processes are removed when the next one of the same name is created."""

import os
import signal
import subprocess
import sys
import tempfile
from types import SimpleNamespace

import pytest
import torch

from ludus.engines.temporary import TemporaryFolder
from ludus.training.distributed.launcher import RankGroup

HOLDS = """
import sys, time
from pathlib import Path
from ludus.engines.temporary import TemporaryFolder
kept = TemporaryFolder("ludus-ranks-", Path(sys.argv[1]))
print("made", flush=True)
time.sleep(60)
"""


@pytest.fixture
def left(tmp_path):
    """A folder that a killed process has left."""
    process = subprocess.Popen([sys.executable, "-c", HOLDS, str(tmp_path)], stdout=subprocess.PIPE)
    process.stdout.readline()
    (folder,) = tmp_path.iterdir()
    TemporaryFolder("ludus-ranks-", tmp_path).close()
    assert folder.is_dir()  # as long as its process lives
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    assert folder.is_dir()
    return folder


def test_temporary_folder_of_a_killed_process_is_removed_by_the_next(left, tmp_path, monkeypatch):
    other = TemporaryFolder("ludus-other-", tmp_path)
    assert left.is_dir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    others = RankGroup()
    others.start(SimpleNamespace(world_size=1, timeout_s=1.0), torch.device("cpu"))
    assert not left.exists()
    assert others.folder.path.is_dir()
    for folder in (other, others.folder):
        folder.close()
        folder.close()
    assert list(tmp_path.iterdir()) == []
