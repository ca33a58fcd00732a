"""Plug-ins: objects named in a setting as `path/to/file.py:name`, or by an installed entry point.

Kinds and their entry-point groups: `ludus.advantages`, `ludus.losses`, `ludus.corrections`, `ludus.rewards`,
`ludus.tools`, `ludus.worlds`, `ludus.engines`, `ludus.trackers`, `ludus.metrics`.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType

from ludus.errors import ConfigError, LudusError, UserError, did_you_mean

_FILE_MODULE = "ludus_plugin_"
_ENTRY_POINT_PACKAGES: set[str] = set()


def is_file_reference(name: str) -> bool:
    """Return whether `name` has the form `path/to/file.py:name`."""
    return name.partition(":")[0].endswith(".py")


def find_plugin(kind: str, name: str, setting: str, built_in: Iterable[str]) -> object:
    """Return the object that `name` refers to: `path/to/file.py:name`, or an entry point of `ludus.{kind}`.

    Raises ConfigError, naming `setting` and the `built_in` names, if there is none, and UserError if the file
    is missing.
    """
    if is_file_reference(name):
        file, _, attribute = name.partition(":")
        defined = vars(_module(Path(file), setting))
        if not attribute:
            raise ConfigError(f"{setting}: {name} does not name an object.", f"Write {file}:name.")
        if attribute not in defined:
            raise ConfigError(f"{setting}: {file} does not define {attribute!r}.", "Write path/to/file.py:name.")
        return defined[attribute]
    found = {point.name: point for point in entry_points(group=f"ludus.{kind}")}
    if name in found:
        with plugin_errors(f"The entry point {found[name].value} of {setting}"):
            loaded: object = found[name].load()
            _ENTRY_POINT_PACKAGES.add(found[name].module.partition(".")[0])
            return loaded
    known = [*built_in, *sorted(found)]
    raise ConfigError(
        f"{setting} = {name!r} is not known.",
        f"{did_you_mean(name, known, cutoff=0.5)}There are: {', '.join(known)}; for an object in a"
        " file, write path/to/file.py:name.",
    )


def _module(path: Path, setting: str) -> ModuleType:
    """Import a Python file once. Raises UserError if it is missing, ConfigError if it raises."""
    if not path.is_file():
        raise UserError(
            f"{path} does not exist.",
            f"{setting} takes the path of a Python file, in a .toml file relative to its folder, on the command line "
            "to the working directory.",
        )
    return _import_file(path.resolve(), path)


@cache
def _import_file(resolved: Path, path: Path) -> ModuleType:
    name = f"{_FILE_MODULE}{path.stem}"
    spec = importlib.util.spec_from_file_location(name, resolved)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{path} cannot be imported.", "Is it a Python file?")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pydantic look up the module of a class
    with plugin_errors(str(path), resolved):
        spec.loader.exec_module(module)
    return module


@contextmanager
def plugin_errors(what: str, path: Path | None = None) -> Iterator[None]:
    """Raise ConfigError, naming `what` and the line in `path`, for an exception of a plug-in."""
    try:
        yield
    except LudusError:
        raise
    except SyntaxError as error:
        raise ConfigError(f"{error.filename}, line {error.lineno}: {error.msg}.", "Fix the file.") from error
    except Exception as error:  # boundary: foreign code; the cause and its line are in the message
        lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == str(path)]
        where = f"{what}, line {lines[-1]}" if lines else what
        raise ConfigError(f"{where}: {type(error).__name__}: {error}.", "Fix the file.") from error


def plugin_line(error: Exception) -> str:
    """Return the file and line of the last plug-in that `error` passed through; empty if there was none."""
    files = {
        module.__file__
        for name, module in list(sys.modules.items())
        if name.startswith(_FILE_MODULE) or name.partition(".")[0] in _ENTRY_POINT_PACKAGES
    }
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename in files]
    return f"{frames[-1].filename}, line {frames[-1].lineno}" if frames else ""


def import_object(path: str) -> object:
    """Return the object of an import path `module:name`."""
    module, _, name = path.partition(":")
    found: object = vars(importlib.import_module(module))[name]
    return found
