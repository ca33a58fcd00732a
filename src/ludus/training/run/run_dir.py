"""The run folder: all files of a run.

config.toml            the resolved configuration
run.json               kind (as in `Kind`), recipe, versions, git state, seed, command, digests of own files
files/                 copies of the user's own Python files that the settings name
log.txt                one merged log of all processes
metrics.jsonl          one line per step; identical in a repeated run
timings.jsonl          seconds and rates; they differ between runs
alarms.jsonl           one line per alarm when it begins: step, name, action, cause, evidence, remedy
rollouts/              step-000001.jsonl.gz, one trajectory per line
evaluations/           step-000010-test-greedy.json and its rollouts
probes/                reports of `ludus probe --run`
pairs.jsonl.gz         preference training: pairs with reference log-probabilities
examples.jsonl.gz      reward models: training and held-out examples
checkpoints/           step-000010/, in Hugging Face layout, with trainer state
lock                   locked while a process writes here
"""

from __future__ import annotations

import fcntl
import importlib.metadata
import itertools
import json
import logging
import platform
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal, cast, get_args

from ludus.config.load import config_from_toml
from ludus.config.schema import Config
from ludus.config.toml import num_settings, to_toml
from ludus.errors import LudusError, StorageError, UserError
from ludus.rollouts.rollout_files import replaced_file
from ludus.training.run.own_files import FOLDER, changed_files, copy_files

PACKAGES = ("ludus", "torch", "transformers", "tokenizers", "safetensors", "numpy", "bm25s", "peft")

Kind = Literal["rl", "sft", "preference", "reward-model", "rft", "eval"]
"""Command that created the run folder; "rl" is `ludus train`."""

_CHECKPOINT = re.compile(r"step-(\d{6,})")

log = logging.getLogger("ludus")


class RunFolder:
    """Run folder with the paths of its files, which are listed above."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.toml"
        self.metrics = path / "metrics.jsonl"
        self.timings = path / "timings.jsonl"
        self.alarms = path / "alarms.jsonl"
        self.checkpoints = path / "checkpoints"
        self.probes = path / "probes"
        self.evaluations = path / "evaluations"
        self.rollouts = path / "rollouts"

    def load_config(self) -> Config:
        """Return the run's configuration. Raises UserError if this is not a run folder."""
        if not self.config.is_file():
            raise UserError(f"{self.path} is not a run folder: it has no config.toml.", "Check the path.")
        self.check_config()
        return config_from_toml(self.config.read_text("utf-8"), str(self.config))

    def check_config(self) -> None:
        """Raise StorageError if the configuration is empty or lacks settings."""
        hint = "Restore it from a backup, or start a new run from a checkpoint's weights with --model."
        try:
            found = num_settings(self.config.read_text("utf-8"))
        except (OSError, ValueError) as error:
            raise StorageError(f"{self.config} cannot be read: {error}.", hint) from error
        expected = _read_json(self.path / "run.json").get("settings", 1)
        if not isinstance(expected, int) or found < expected:
            raise StorageError(f"{self.config} has {found} of the {expected} settings of the run.", hint)


def new_run(config: Config, name: str, kind: Kind, recipe: str | None = None) -> RunFolder:
    """Create the folder of a new run and write its configuration and manifest.

    `recipe` is the recipe argument. Uses `run.dir`, or the next free `runs/NAME-N`. Raises UserError if
    the folder exists and is not empty.
    """
    check_new(config)
    free = (path for n in itertools.count(1) if not (path := Path("runs") / f"{name}-{n}").exists())
    path = Path(config.run.dir) if config.run.dir else next(free)
    text = to_toml(config)
    manifest = {
        "kind": kind,
        "recipe": recipe,
        "settings": num_settings(text),
        "command": sys.argv,
        "seed": config.run.seed,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: _version(name) for name in PACKAGES},
        "git": _git_state(),
    }
    temporary = path.with_name(f".{path.name}.new")
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        _write(temporary / "config.toml", text)
        _write_json(temporary / "run.json", manifest | {"files": copy_files(config, temporary)})
        temporary.rename(path)
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise StorageError(
            f"Cannot create the run folder {path}: {error.strerror}.", "Choose another with --run.dir."
        ) from error
    return RunFolder(path)


def check_new(config: Config) -> None:
    """Raise UserError if the configured folder of a new run exists and is not empty."""
    path = Path(config.run.dir or "")
    if config.run.dir and path.exists() and (not path.is_dir() or any(path.iterdir())):
        other = "Choose another with --run.dir"
        if (path / "config.toml").is_file():
            other += f", or resume the existing run: {resume_command(RunFolder(path))}"
        raise UserError(f"The run folder {path} exists and is not empty.", other)


def file_warnings(folder: RunFolder, config: Config) -> list[str]:
    """Return a warning for each own Python file that differs from its copy in the run; raises as `changed_files`."""
    return changed_files(folder.path, _read_json(folder.path / "run.json").get("files", {}), config)


def remove_unstarted(folder: RunFolder) -> bool:
    """Remove a new run without results; return whether it was removed."""
    initial = {"config.toml", "run.json", "lock", "log.txt", FOLDER}
    if any(path.name not in initial for path in folder.path.iterdir()):
        return False
    shutil.rmtree(folder.path)
    return True


def save_config(folder: RunFolder, config: Config) -> None:
    """Write the configuration of a resumed run if it has changed."""
    if folder.load_config() != config:
        text, manifest = to_toml(config), folder.path / "run.json"
        settings = min(num_settings(text), num_settings(folder.config.read_text("utf-8")))
        data = _read_json(manifest) | {"settings": settings}
        _write_json(manifest, data)  # the smaller number first, so that check_config passes if killed in between
        _write(folder.config, text)
        _write_json(manifest, data | {"settings": num_settings(text)})


def _write(path: Path, text: str) -> None:
    with replaced_file(path) as file:
        file.write(text.encode())


def _write_json(path: Path, data: Mapping[str, object]) -> None:
    _write(path, json.dumps(data, indent=1) + "\n")


def kind_of(folder: RunFolder) -> Kind:
    """Return the kind of a run. Raises StorageError if the manifest has no valid kind."""
    kind = _read_json(folder.path / "run.json").get("kind")
    if kind not in get_args(Kind):
        raise StorageError(f"{folder.path / 'run.json'} has no valid kind of run.")
    return cast(Kind, kind)


def recipe_of(folder: RunFolder) -> str | None:
    """Return the recipe argument that the run was started with, or None if unknown."""
    recipe = _read_json(folder.path / "run.json").get("recipe")
    return None if recipe is None else str(recipe)


def resume_command(folder: RunFolder) -> str:
    """Return the shell command that resumes a run."""
    kind = kind_of(folder)
    command = "train" if kind in ("rl", "eval") else kind
    return f"ludus {command} --resume {shlex.quote(str(folder.path))}"


class _RunLog(logging.FileHandler):
    """Log file handler that ignores its own errors, such as a full disk."""

    def handleError(self, record: logging.LogRecord) -> None: ...

    def close(self) -> None:
        with suppress(OSError):
            super().close()


def list_checkpoints(checkpoints: Path) -> list[tuple[int, Path]]:
    """Return complete checkpoints with their steps, oldest first."""
    if not checkpoints.is_dir():
        return []
    matches = ((_CHECKPOINT.fullmatch(path.name), path) for path in checkpoints.iterdir())
    return sorted((int(match.group(1)), path) for match, path in matches if match)


def latest_checkpoint(folder: RunFolder) -> tuple[int, Path]:
    """Return the step and the folder of the newest checkpoint. Raises UserError if there is none."""
    found = list_checkpoints(folder.checkpoints)
    if not found:
        raise UserError(
            f"The run {folder.path} has no checkpoint yet.",
            "Wait for the first one (training.checkpoint_every), or name a model.",
        )
    return found[-1]


def is_running(folder: RunFolder) -> bool:
    """Return whether a process holds the lock of the run."""
    try:
        with (folder.path / "lock").open("r") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return isinstance(error, BlockingIOError)
    return False


@contextmanager
def lock_run(folder: RunFolder) -> Iterator[None]:
    """Lock the folder and log to it. Raises UserError if another process holds the lock."""
    try:
        lock = (folder.path / "lock").open("w")
    except OSError as error:
        raise StorageError(f"Cannot write to {folder.path}: {error.strerror}.", "Choose another folder.") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"The run folder {folder.path} is in use by another process.",
                "Wait for it to end, or use another folder.",
            ) from None
        handler = attach_run_log(folder)
        try:
            yield
        except LudusError as error:
            log.error("%s failed: %s", error.part, error)
            raise
        except KeyboardInterrupt:
            log.warning("stopped by an interrupt")
            raise
        except Exception:
            log.exception("internal error of Ludus")
            raise
        finally:
            log.removeHandler(handler)
            handler.close()


def attach_run_log(folder: RunFolder, source: str = "") -> logging.Handler:
    """Append log records of this process to the run log, with the prefix `source`."""
    handler = _RunLog(folder.path / "log.txt", encoding="utf-8")
    prefix = f"{source}: " if source else ""
    handler.setFormatter(logging.Formatter(f"%(asctime)s %(levelname)s %(name)s: {prefix}%(message)s"))
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    return handler


def _read_json(path: Path) -> dict[str, Any]:
    """Return the object in a file; empty if the file is missing. Raises StorageError if it is invalid."""
    try:
        data = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise StorageError(f"{path} cannot be read: {error}.") from error
    return data if isinstance(data, dict) else {}


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _git_state() -> dict[str, object] | None:
    """Return the commit of the source tree and whether it has changes; None outside a repository."""

    def git(*arguments: str) -> str:
        here = Path(__file__).parent
        return subprocess.check_output(["git", *arguments], cwd=here, stderr=subprocess.PIPE, text=True, timeout=10)

    try:
        return {"commit": git("rev-parse", "HEAD").strip(), "changed": bool(git("status", "--porcelain").strip())}
    except (OSError, subprocess.SubprocessError):
        return None
