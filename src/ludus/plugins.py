"""Plug-ins: objects named in a setting as `path/to/file.py:name`, or by an installed entry point.

Kinds and their entry-point groups: `ludus.advantages`, `ludus.losses`, `ludus.corrections`, `ludus.rewards`,
`ludus.tools`, `ludus.worlds`, `ludus.engines`, `ludus.trackers`, `ludus.metrics`.
"""

from __future__ import annotations

import importlib.util
import inspect
import reprlib
import sys
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from importlib.metadata import entry_points
from numbers import Real
from operator import attrgetter
from pathlib import Path
from types import ModuleType

from ludus.errors import ConfigError, LudusError, UserError, did_you_mean

_FILE_MODULE = "ludus_plugin_"
_ENTRY_POINT_PACKAGES: set[str] = set()
_ARGUMENTS: Mapping[str, Sequence[str]] = {
    "worlds": ("settings", "limits"),
    "engines": ("session",),
    "trackers": ("folder", "resume_step"),
    "metrics": ("groups",),
}
"""The positional arguments with which plug-ins of a kind are called."""


def is_file_reference(name: str) -> bool:
    """Return whether `name` has the form `path/to/file.py:name`."""
    return name.partition(":")[0].endswith(".py")


def find_plugin(kind: str, name: str, setting: str, built_in: Iterable[str]) -> object:
    """Return the object that `name` refers to: `path/to/file.py:name`, or an entry point of `ludus.{kind}`.

    Raises ConfigError, naming `setting` and the `built_in` names, if there is none or if it does not accept the
    arguments of its kind, and UserError if the file is missing.
    """
    found = _object_in_file(name, setting) if is_file_reference(name) else _entry_point(kind, name, setting, built_in)
    if kind in _ARGUMENTS:
        check_signature(f"{setting} = {name}", found, _ARGUMENTS[kind])
    return found


def _object_in_file(name: str, setting: str) -> object:
    file, _, attribute = name.partition(":")
    path = Path(file)
    if not path.is_file():
        raise UserError(
            f"{path} does not exist.",
            f"{setting} takes the path of a Python file, in a .toml file relative to its folder, on the command line "
            "to the working directory.",
        )
    defined = vars(_import_file(path.resolve(), path))
    if not attribute:
        raise ConfigError(f"{setting}: {name} does not name an object.", f"Write {file}:name.")
    if attribute not in defined:
        raise ConfigError(f"{setting}: {file} does not define {attribute!r}.", "Write path/to/file.py:name.")
    found: object = defined[attribute]
    return found


def _entry_point(kind: str, name: str, setting: str, built_in: Iterable[str]) -> object:
    found = {point.name: point for point in entry_points(group=f"ludus.{kind}")}
    if name in found:
        with plugin_errors(f"The entry point {found[name].value} of {setting}"):
            loaded: object = found[name].load()
            _ENTRY_POINT_PACKAGES.add(found[name].module.partition(".")[0])
            return loaded
    known = [*built_in, *sorted(found)]
    choices = f"Choose from: {', '.join(known)}" if known else "None are built in"
    raise ConfigError(
        f"{setting} = {name!r} is not known.",
        f"{did_you_mean(name, known, cutoff=0.5)}{choices}; otherwise write path/to/file.py:name or the name of an "
        f"installed entry point of ludus.{kind} (an import path does not work).",
    )


def check_signature(plugin: str, found: object, arguments: Sequence[str]) -> None:
    """Raise ConfigError unless `found` can be called with these positional arguments; `plugin` is `SETTING = NAME`."""
    expected = f"a function of ({', '.join(arguments)})"
    if not callable(found):
        raise ConfigError(f"{plugin} is {describe_value(found)}; expected {expected}.", "See docs/extend/plugins.md.")
    try:
        signature = inspect.signature(found)
    except ValueError:  # some functions written in C have no signature
        return
    try:
        signature.bind(*arguments)
    except TypeError:
        takes = f"{plugin} has the parameters {signature}"
        raise ConfigError(f"{takes}; expected {expected}.", "See docs/extend/plugins.md.") from None


def result_error(plugin: str, found: str, expected: str) -> ConfigError:
    """Return the error of a plug-in (`SETTING = NAME`) that returned `found` instead of `expected`."""
    return ConfigError(f"{plugin} returned {found}; expected {expected}.", "See docs/extend/plugins.md.")


def check_result(plugin: str, found: object, protocol: type) -> None:
    """Raise ConfigError unless the result of a plug-in has all public members of a protocol."""
    members = [name for name in vars(protocol) if not name.startswith("_")]
    if missing := [name for name in members if not _has(found, name)]:
        lacks = f"{describe_value(found)} without {', '.join(missing)}"
        raise result_error(plugin, lacks, f"{protocol.__name__} with {', '.join(members)}")


def check_numbers(plugin: str, found: object) -> Mapping[str, float]:
    """Return `found`. Raises ConfigError, naming the plug-in, unless it is a mapping of names to numbers."""
    expected = "a mapping of names to numbers"
    if not isinstance(found, Mapping):
        raise result_error(plugin, describe_value(found), expected)
    for name, value in found.items():
        if not isinstance(name, str) or not isinstance(value, Real):
            raise result_error(plugin, f"{describe_value(value)} for {name!r}", expected)
    return found


def _has(found: object, name: str) -> bool:
    """Return whether an attribute exists, also through `__getattr__` of a wrapper."""
    try:
        attrgetter(name)(found)
    except AttributeError:
        return False
    return True


def describe_value(value: object) -> str:
    """Return a plain value shortened, or the type of another object, for messages."""
    plain = value is None or isinstance(value, str | bytes | int | float | list | tuple | dict | set)
    return reprlib.repr(value) if plain else f"a value of type {type(value).__name__}"


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
