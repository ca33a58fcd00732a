"""Make relative paths in settings absolute, so that a run finds its files from any working directory.

Paths in a .toml file are relative to the folder of the file, those on the command line to the working directory. A
name that is not a path there (a model of the hub, a recipe) is left unchanged, as are the paths of output (`run.dir`).
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from ludus.errors import UserError
from ludus.plugins import is_file_reference

_FILES = re.compile(
    r"(model|teacher|experts)\.path|model\.roles\.[^.]+|(sft|sft\.sources\.[^.]+|preference|reward_model)\.(data|run)|rewards\.(model|process\.subgoals)|preference\.model|evaluation\.select_by"
    r"|staleness\.replay\.sources|(engine|sandbox)\.token_file"
)
"""Settings that may be paths of files or folders to read."""
_WORLD = re.compile(r"env\.(mixture\.[^.]+\.)?settings\.|sft\.sources\.[^.]+\.settings\.")
"""Settings of worlds, where a text is a path if it looks like one and exists."""

_LONGEST = 1024


def resolve_paths(data: dict[str, object], folder: Path) -> None:
    """Replace relative paths in `data` by absolute ones, relative to `folder`."""
    for key, value in data.items():
        data[key] = _resolved_in(value, key, folder)


def check_model_folder(path: str) -> None:
    """Raise UserError for a model path that is a file, a run folder, or missing although it is not a model name."""
    looks_like_path = path.startswith((".", "/", "~")) or path.count("/") > 1
    if not path or (looks_like_path and not Path(path).is_dir()) or Path(path).is_file():
        raise UserError(f"The model folder {path!r} does not exist.", "Check the model path.")
    if (Path(path) / "config.toml").is_file():
        found = sorted(Path(path).glob("checkpoints/step-*"))
        hint = f"Use its newest checkpoint: {found[-1]}" if found else "It has no checkpoint yet."
        raise UserError(f"{path} is a run folder, not a model.", hint)


def _resolved_in(value: object, key: str, folder: Path) -> object:
    if isinstance(value, dict):
        return {name: _resolved_in(inner, f"{key}.{name}", folder) for name, inner in value.items()}
    if isinstance(value, list):
        return [_resolved_in(inner, key, folder) for inner in value]
    if not isinstance(value, str):
        return value
    of_world = _WORLD.match(key)
    if is_file_reference(value) and not of_world:
        path, colon, name = value.partition(":")
        return os.path.abspath(folder / path) + colon + name
    is_path = ("/" in value or Path(value).suffix) if of_world else _FILES.fullmatch(key)
    if is_path and value and len(value) < _LONGEST and (folder / value).exists():
        return os.path.abspath(folder / value)
    return value
