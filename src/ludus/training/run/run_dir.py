"""The run folder: all files of a run. Read without torch.

config.toml            the resolved configuration
run.json               kind (as in `Kind`), recipe, versions, git state, seed, command, digests of own files
files/                 copies of the user's own Python files that the settings name, without what they import
log.txt                one merged log of all processes
metrics.jsonl          one line per step; identical in a repeated run
timings.jsonl          seconds and rates; they differ between runs
alarms.jsonl           one line per alarm when it begins: step, name, action, cause, evidence, remedy
rollouts/              step-000001.jsonl.gz, one trajectory per line
notes.jsonl            the notes of a task, or of all, after each step that changed them (rollout.notes)
judge.jsonl            replies of LLM judges, the cache of a resumed run, and the number of failures (rewards.judge)
opponents/             step-000010.safetensors, trained weights of past versions (rollout.opponents)
evaluations/           step-000010-test-greedy.json and its rollouts
probes/                reports of `ludus probe --run`
pairs.jsonl.gz         preference training: pairs with reference log-probabilities
examples.jsonl.gz      reward models: training and held-out examples
checkpoints/           step-000010/, in Hugging Face layout, with trainer state
lock                   locked while a process writes here
"""

from __future__ import annotations

import fcntl
import hashlib
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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import zip_longest
from pathlib import Path
from typing import Any, Literal, TypedDict, cast, get_args

from ludus.config.load import load_config
from ludus.config.schema import Config
from ludus.config.toml import flat_settings, to_toml
from ludus.errors import LudusError, StorageError, UserError
from ludus.plugins import is_file_reference
from ludus.rollouts.rollout_files import replaced_file

PACKAGES = ("ludus", "torch", "transformers", "tokenizers", "safetensors", "numpy", "bm25s", "peft")

Kind = Literal["rl", "sft", "preference", "reward-model", "rft", "eval", "sessions"]
"""Command that created the run folder; "rl" is `ludus train`, "sessions" `ludus serve --record`."""

MANIFEST = "manifest.json"
"""File in a checkpoint's trainer folder with size and SHA-256 of each file of the checkpoint."""
FOLDER = "files"
"""Folder of the copies of the user's own files."""
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
        self.opponents = path / "opponents"

    def load_config(self, overrides: Sequence[str] = ()) -> Config:
        """Return the run's configuration with overrides. Raises as `check`."""
        self.check()
        return load_config(self.config, overrides)

    def check(self) -> None:
        """Raise UserError if this is not a run folder, StorageError if its configuration is empty or lacks settings."""
        if not self.path.exists():
            raise UserError(f"{self.path} does not exist.", "Check the path; runs are under runs/.")
        if not self.config.is_file():
            raise UserError(f"{self.path} is not a run folder: it has no config.toml.", "Name the folder of a run.")
        hint = "Restore it from a backup, or start a new run from a checkpoint's weights with --model."
        try:
            found = len(flat_settings(self.config.read_text("utf-8")))
        except (OSError, ValueError) as error:
            raise StorageError(f"{self.config} cannot be read: {error}.", hint) from error
        expected = _read_json(self.path / "run.json").get("settings", 1)
        if not isinstance(expected, int) or found < expected:
            raise StorageError(f"{self.config} has {found} of the {expected} settings of the run.", hint)


def new_run(config: Config, name: str, kind: Kind, recipe: str | None = None, policy: str | None = None) -> RunFolder:
    """Create the folder of a new run and write its configuration and manifest.

    `recipe` is the recipe argument, `policy` the digest of the weights that sample all of its rollouts. Uses `run.dir`,
    or the next free `runs/NAME-N`. Raises UserError if the folder exists and is not empty.
    """
    check_new(config)
    free = (path for n in itertools.count(1) if not (path := Path("runs") / f"{name}-{n}").exists())
    path = Path(config.run.dir) if config.run.dir else next(free)
    text = to_toml(config)
    manifest = {
        "kind": kind,
        "recipe": recipe,
        "policy": policy,
        "settings": len(flat_settings(text)),
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
        text = f"Cannot create the run folder {path}: {error.strerror}."
        raise StorageError(text, "Choose another with --run.dir.") from error
    return RunFolder(path)


def sessions_folder(config: Config, policy: str) -> RunFolder:
    """Return the folder `run.dir` for sessions of a policy, created if it is missing.

    Raises UserError if it is another kind of run, or has sessions of other weights.
    """
    folder = RunFolder(Path(config.run.dir or ""))
    if not folder.config.is_file():
        return new_run(config, "sessions", "sessions", policy=policy)
    folder.check()
    if kind_of(folder) != "sessions" or _read_json(folder.path / "run.json").get("policy") != policy:
        text = f"{folder.path} is not a folder with sessions of these weights."
        raise UserError(text, "Name a new folder with --record.")
    return folder


def policy_path(folder: RunFolder) -> Path | None:
    """Return the newest checkpoint of a run, otherwise the model that it started from if that is a local folder."""
    if found := list_checkpoints(folder.checkpoints):
        return found[-1][1]
    path = folder.load_config().model.path
    return Path(path) if path is not None and Path(path).is_dir() else None


def check_new(config: Config) -> None:
    """Raise UserError if the configured folder of a new run exists and is not empty."""
    path = Path(config.run.dir or "")
    if config.run.dir and path.exists() and (not path.is_dir() or any(path.iterdir())):
        other = "Choose another with --run.dir"
        if (path / "config.toml").is_file():
            other += f", or resume the existing run: {resume_command(RunFolder(path))}"
        raise UserError(f"The run folder {path} exists and is not empty.", other)


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
        settings = min(len(flat_settings(text)), len(flat_settings(folder.config.read_text("utf-8"))))
        data = _read_json(manifest) | {"settings": settings}
        _write_json(manifest, data)  # the smaller number first, so that `check` passes if killed in between
        _write(folder.config, text)
        _write_json(manifest, data | {"settings": len(flat_settings(text))})


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
        hint = "Wait for the first one (training.checkpoint_every), or name a model."
        raise UserError(f"The run {folder.path} has no checkpoint yet.", hint)
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
            hint = "Wait for it to end, or use another folder."
            raise UserError(f"The run folder {folder.path} is in use by another process.", hint) from None
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


def write_manifest(folder: Path) -> None:
    """Write the manifest of all files in a checkpoint."""
    entries = {
        path.relative_to(folder).as_posix(): {"bytes": path.stat().st_size, "sha256": _digest(path)}
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
    (folder / "trainer" / MANIFEST).write_text(json.dumps({"files": entries}, indent=1) + "\n", "utf-8")


def check_manifest(folder: Path) -> None:
    """Raise StorageError, with file and hint, if a checkpoint differs from its manifest."""
    path = folder / "trainer" / MANIFEST
    try:
        files = json.loads(path.read_text("utf-8"))["files"]
        expected = {str(name): (int(file["bytes"]), str(file["sha256"])) for name, file in files.items()}
    except FileNotFoundError:
        raise damaged(folder, f"trainer/{MANIFEST} is missing") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise damaged(folder, f"trainer/{MANIFEST} cannot be read ({type(error).__name__})") from error
    for name, (size, digest) in expected.items():
        file = folder / name
        if not file.is_file():
            raise damaged(folder, f"{name} is missing")
        if file.stat().st_size != size:
            raise damaged(folder, f"{name} has {file.stat().st_size} bytes instead of {size}")
        if _digest(file) != digest:
            raise damaged(folder, f"{name} has changed since it was written")


def damaged(folder: Path, what: str) -> StorageError:
    """Return the error for a damaged checkpoint."""
    previous = sorted(path.name for path in folder.parent.glob("step-*") if path.name < folder.name)
    remedy = f"resume from {previous[-1]}" if previous else "restart the run from its first step"
    hint = f"Remove that folder, and --resume will {remedy}."
    return StorageError(f"The checkpoint {folder} is damaged: {what}.", hint)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class OwnFile(TypedDict):
    """A file in the manifest of a run: the setting that names it, the digest of its content, and its copy's path."""

    setting: str
    sha256: str
    copy: str


def own_files(config: Config) -> dict[str, str]:
    """Return the Python files that a configuration names, each with the first setting that names it."""
    found: dict[str, str] = {}
    for key, text in _texts(config.model_dump(), ""):
        if is_file_reference(text):
            found.setdefault(text.partition(":")[0], key)
    return found


def copy_files(config: Config, folder: Path) -> dict[str, OwnFile]:
    """Copy the files of a configuration into `folder` and return their manifest by path."""
    manifest: dict[str, OwnFile] = {}
    existing = [(path, setting) for path, setting in own_files(config).items() if Path(path).is_file()]
    for number, (path, setting) in enumerate(existing, start=1):
        copy = f"{FOLDER}/{number}-{Path(path).name}"
        (folder / FOLDER).mkdir(exist_ok=True)
        shutil.copyfile(path, folder / copy)
        manifest[path] = OwnFile(setting=setting, sha256=_digest(folder / copy), copy=copy)
    return manifest


def changed_files(folder: Path, config: Config) -> list[str]:
    """Return a warning for each own file that has changed since the run began, among those that `config` still names.

    Raises UserError if the file belongs to the world (`env`), which a resumed run must keep.
    """
    manifest: Mapping[str, OwnFile] = _read_json(folder / "run.json").get("files", {})
    warnings, named = [], own_files(config)
    for path, file in manifest.items():
        is_missing = not Path(path).is_file()
        if path not in named or (not is_missing and _digest(Path(path)) == file["sha256"]):
            continue
        where, change = f"{path} ({file['setting']})", "does not exist any more"
        if not is_missing:
            change = f"has changed since the run began: {_first_change(folder, path, file)}"
        if is_missing or file["setting"].startswith("env."):
            hint = f"Restore it from {folder / file['copy']}, or start a new run from a checkpoint with --model."
            raise UserError(f"{where} {change}.", hint)
        warnings.append(f"{where} {change}. The run continues with the new file.")
    return warnings


def _first_change(folder: Path, path: str, file: OwnFile) -> str:
    """Describe the first changed line, and the number of changed lines."""
    copy = folder / file["copy"]
    old = copy.read_text("utf-8", "replace").splitlines() if copy.is_file() else []
    new = Path(path).read_text("utf-8", "replace").splitlines()
    for number, (before, after) in enumerate(zip_longest(old, new, fillvalue=""), start=1):
        if before != after:
            return f"line {number} is {after.strip()!r}, and was {before.strip()!r}"
    return "only line ends differ"


def _texts(value: object, key: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _texts(inner, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list):
        for inner in value:
            yield from _texts(inner, key)
    elif isinstance(value, str):
        yield key, value
