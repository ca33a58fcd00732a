"""Run a function in several processes of a gloo group and collect the results."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from torch import distributed


def in_processes(script: Path, name: str, count: int, *arguments: str) -> list:
    """Run `name(*arguments)` of a script in `count` processes; return their results by rank."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        command = [sys.executable, str(script), name, folder, str(count)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        processes = [
            subprocess.Popen([*command, str(rank), *arguments], stderr=subprocess.PIPE, env=environment)
            for rank in range(count)
        ]
        said = [process.communicate(timeout=300)[1].decode() for process in processes]
        for process, error in zip(processes, said, strict=True):
            assert process.returncode == 0, error
        return [pickle.loads((place / str(rank)).read_bytes()) for rank in range(count)]


def work(functions: dict) -> None:
    """Run the function for one rank, with the command line `SCRIPT NAME FOLDER COUNT RANK ARGUMENTS`."""
    name, folder, count, rank, *arguments = sys.argv[1:]
    store = f"file://{folder}/store"
    distributed.init_process_group("gloo", init_method=store, rank=int(rank), world_size=int(count))
    torch.set_num_threads(1)
    found = functions[name](*arguments)
    (Path(folder) / rank).write_bytes(pickle.dumps(found))
    distributed.destroy_process_group()
