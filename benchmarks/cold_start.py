"""The initial checkpoint of all arms of a comparison."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def cold_start(recipe: str, path: Path, words: tuple[str, ...] = ()) -> tuple[str, ...]:
    """Return the settings that start from a recipe's cold start in `path`; train it with `words` if missing.

    It is trained from scratch unless the words name a model.
    """
    if not (path / "done").is_file():
        command = [sys.executable, "-m", "ludus", "sft"]
        if (path / "config.toml").is_file():
            command += ["--resume", str(path)]
        else:
            fresh = () if "--model.path" in words else ("--from-scratch",)
            command += [recipe, *fresh, "--run.dir", str(path), "--run.threads", "1", *words]
        subprocess.run(command, check=True, stdout=sys.stderr)
        (path / "done").touch()
    newest = sorted((path / "checkpoints").glob("step-*"))[-1]
    return ("--model.path", str(newest), "--model.from_scratch", "false")
