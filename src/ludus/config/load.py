"""Load a `Config` from a recipe or TOML file and the command line, and report all mistakes at once."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from ludus.config.paths import resolve_paths
from ludus.config.schema import Config
from ludus.config.settings import BOUNDS, Setting, find, first_under, is_section, suggestion
from ludus.config.toml import toml_value
from ludus.errors import ConfigError
from ludus.plugins import is_file_reference
from ludus.recipes import list_recipes, recipe_folder

_MAX_VALUE_CHARS = 60
"""Maximum characters of a value in an error message."""


def load_config(
    source: str | Path | None, overrides: Sequence[str] = (), *, overrides_origin: str = "the command line"
) -> Config:
    """Return the configuration of a run.

    `source` is a recipe name, a path to a `.toml` file, a world file (`.py`), which is `env.name` of the defaults, or
    None for the defaults. `overrides` are words of a command
    line: `--algorithm.group_size 16`, `--algorithm.group_size=16`, a bare `--model.from_scratch` for true, `none` for
    None; lists and tables are written as TOML. `overrides_origin` names their origin in errors. Relative paths become
    absolute: those of a file from its folder, others from the working directory.

    Raises ConfigError with one sentence per mistake.
    """
    data: dict[str, object] = {}
    places = [overrides_origin] if overrides else []
    if source is not None and is_file_reference(str(source)):
        data["env"] = {"name": str(source)}
        places.insert(0, str(source))
    elif source is not None:
        is_file = isinstance(source, Path) or source.endswith(".toml") or "/" in source
        path = Path(source) if is_file else recipe_folder(str(source)) / "config.toml"
        places.insert(0, str(path) if is_file else f"the recipe {source}")
        data = _parse(_read(path), places[0])
        resolve_paths(data, path.parent)
    return _completed(data, overrides, " and ".join(places))


def config_from_toml(text: str, origin: str = "the text", overrides: Sequence[str] = ()) -> Config:
    """Return the configuration in `text`; `origin` names it in errors. Raises ConfigError."""
    return _completed(_parse(text, origin), overrides, origin)


def _read(path: Path) -> str:
    if path.is_dir():
        raise ConfigError(f"{path} is a folder, not a configuration file.", "Name the .toml file in it.")
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        is_recipe = any(recipe.name == path.stem for recipe in list_recipes())
        of_recipe = f'To use the recipe of that name, write "{path.stem}".'
        hint = of_recipe if is_recipe else "Check the path; `ludus recipes` lists the recipes."
        raise ConfigError(f"The file {path} does not exist.", hint) from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not UTF-8 text, as TOML requires.") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.") from error


def _parse(text: str, origin: str) -> dict[str, object]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        reason, _, place = str(error).removesuffix(")").partition(" (at ")
        where = place if place.startswith("line ") else f"line {len(text.splitlines())}"
        raise ConfigError(f"{origin}, {where}: {reason}.") from None


def _completed(data: dict[str, object], overrides: Sequence[str], origin: str) -> Config:
    problems = apply_overrides(data, overrides)
    resolve_paths(data, Path.cwd())
    try:
        config = Config.model_validate(data, strict=True)
    except ValidationError as error:
        found = [sentence for details in error.errors() for sentence in _sentences(data, details)]
        problems = [*problems, *dict.fromkeys(found)]
    if problems:
        raise ConfigError("\n".join(problems), f"The settings come from {origin}." if origin else "")
    return config


def _sentences(data: dict[str, object], details: ErrorDetails) -> Iterator[str]:
    """Yield an error message for each invalid key."""
    path = [str(part) for part in details["loc"]]
    if details["type"] == "extra_forbidden":
        yield from _unknown(".".join(path), details["input"])
        return
    if details["type"] == "value_error":
        yield f"{details['ctx']['error']}."
        return
    key = next((key for n in range(len(path), 0, -1) if find(key := ".".join(path[:n]))), "")
    setting = find(key)
    if setting is None:
        key, shown = ".".join(path), _show(details["input"])
        under = first_under(key)
        is_choice = isinstance(details["input"], str) and under is not None and str in under.accepts
        example = f" such as {under.key}{f' = {shown}' if is_choice else ''}" if under else ""
        yield f"{key} is {shown}, but must be a section of settings{example}."
        return
    bound = "a finite number" if details["type"] == "finite_number" else ""
    bound += "".join(f"{BOUNDS[name]} {value}" for name, value in details.get("ctx", {}).items() if name in BOUNDS)
    expected = bound or setting.type_text
    if details["type"] == "literal_error" and setting.is_open:
        expected = f"one of {details['ctx']['expected']}"
    value: object = data
    for name in key.split("."):
        value = value[name] if isinstance(value, dict) else value
    yield f"{key} is {_show(value)}, but must be {expected}."


def _unknown(key: str, value: object) -> Iterator[str]:
    """Yield an error message for an unknown key, or for each key of an unknown table."""
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            yield from _unknown(f"{key}.{name}", inner)
    else:
        yield unknown_key(key, _show(value))


def _show(value: object) -> str:
    text = toml_value(value)
    return text if len(text) <= _MAX_VALUE_CHARS else f"{text[:_MAX_VALUE_CHARS]}..."


def apply_overrides(data: dict[str, object], words: Sequence[str]) -> list[str]:
    """Write the settings of a command line into `data`; the last one for a key takes precedence.

    A table is merged into the existing one. `none` removes a key, so that its default applies, except for a world's own
    settings, where it may be a choice (`ludus.envs.settings` reads it). Return one sentence for each word that is not a
    setting; values are validated later.
    """
    return list(filter(None, (item if isinstance(item, str) else _apply(data, *item) for item in _pairs(words))))


def setting_words(table: Mapping[str, object], prefix: str = "", none: str | None = None) -> list[str]:
    """Return a table of settings as words of a command line: `--section.key`, `value`; None or `none` unset a setting.

    Other text is quoted, so that a number in it stays text.
    """
    words: list[str] = []
    for key, value in table.items():
        if isinstance(value, Mapping) and find(f"{prefix}{key}") is None:
            words += setting_words(value, f"{prefix}{key}.", none)
        else:
            text = str(value) if isinstance(value, Path) else value
            words += [f"--{prefix}{key}", "none" if text in (None, none) else toml_value(text)]
    return words


def unknown_key(key: str, shown: str) -> str:
    """Return the error message for an unknown key; `shown` is its value as text."""
    return f"{key} (= {shown}) is not a setting; {suggestion(key)}."


def _pairs(words: Sequence[str]) -> Iterator[tuple[str, str | None] | str]:
    """Yield pairs of key and value, which is None for a bare `--key`, or an error message for any other word."""
    rest = list(words)
    while rest:
        word = rest.pop(0)
        key, equals, text = word.removeprefix("--").partition("=")
        if not word.startswith("--") or not key:
            yield f'"{word}" does not name a setting; write --section.key value.'
        elif equals:
            yield key, text
        else:
            yield key, rest.pop(0) if rest and not rest[0].startswith("--") else None


def _apply(data: dict[str, object], key: str, text: str | None) -> str:
    """Write one setting into `data`. Return an error message, or "" on success."""
    setting = find(key)
    if setting is None and not is_section(key):
        return unknown_key(key, text if text is not None else "true")
    value: object = True
    if text is not None:
        inside_table = setting is not None and key.count(".") > setting.key.count(".")
        value = _value(text, setting, free=inside_table)
    elif setting is None or bool not in setting.accepts:
        expected = f" ({setting.type_text})" if setting is not None else ""
        return f"{key} needs a value{expected}: write --{key} VALUE."
    _write(data, key.split("."), value)
    return ""


def _value(text: str, setting: Setting | None, free: bool) -> object:
    """Return the value of a word for a setting; text that does not parse stays text, which validation rejects."""
    parsed: object = None
    with suppress(tomllib.TOMLDecodeError):
        table = tomllib.loads(f"value = {text}")
        parsed = table["value"] if len(table) == 1 else None
    if free or setting is None:
        of_world = setting is not None and setting.key.endswith("settings")
        return None if text == "none" and not of_world else parsed if parsed is not None else text
    if text.lower() == "none" and type(None) in setting.accepts and text not in setting.choices:
        return None
    if str in setting.accepts and not isinstance(parsed, str) and type(parsed) not in setting.accepts:
        return text
    if parsed is None and float in setting.accepts:
        with suppress(ValueError):
            return float(text)  # informal notation: `.5`, `1.`
    return parsed if parsed is not None else text


def _write(table: dict[str, object], path: Sequence[str], value: object) -> None:
    """Set a value; a table is merged into the existing one, None removes the key."""
    name, *rest = path
    old = table.setdefault(name, {}) if rest else table.get(name)
    if rest:
        if isinstance(old, dict):
            _write(old, rest, value)
    elif value is None:
        table.pop(name, None)
    elif isinstance(value, dict) and isinstance(old, dict):
        for key, inner in value.items():
            _write(old, [key], inner)
    else:
        table[name] = value
