"""Settings from the command line, `--section.key value`, which override those of a file."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ludus.config.settings import Setting, find, is_inside, is_section, suggestion


@dataclass(frozen=True, slots=True)
class Override:
    """One setting of the command line. `text` is None for a bare `--key`."""

    key: str
    text: str | None


def apply_overrides(data: dict[str, object], words: Sequence[str]) -> list[str]:
    """Write the settings of a command line into `data`; the last one for a key takes precedence.

    A table is merged into the existing one. `none` removes a key, so that its default applies, except for a world's own
    settings, where it may be a choice (`ludus.envs.settings` reads it). Return one sentence for each word that is not a
    setting; values are validated later.
    """
    problems: list[str] = []
    for item in _pairs(words):
        problem = item if isinstance(item, str) else _apply(data, item)
        if problem:
            problems.append(problem)
    return problems


def unknown_key(key: str, shown: str) -> str:
    """Return the error message for an unknown key; `shown` is its value as text."""
    return f"{key} (= {shown}) is not a setting; {suggestion(key)}."


def _pairs(words: Sequence[str]) -> Iterator[Override | str]:
    """Pair keys with values; yield an error message for any other word."""
    rest = list(words)
    while rest:
        word = rest.pop(0)
        key, equals, text = word.removeprefix("--").partition("=")
        if not word.startswith("--") or not key:
            yield f'"{word}" does not name a setting; write --section.key value.'
        elif equals:
            yield Override(key, text)
        elif rest and not rest[0].startswith("--"):
            yield Override(key, rest.pop(0))
        else:
            yield Override(key, None)


def _apply(data: dict[str, object], override: Override) -> str:
    """Write one override into `data`. Return an error message, or "" on success."""
    key, setting = override.key, find(override.key)
    if setting is None and not is_section(key):
        return unknown_key(key, override.text if override.text is not None else "true")
    if override.text is None:
        if setting is None or bool not in setting.accepts:
            expected = f" ({setting.type_text})" if setting is not None else ""
            return f"{key} needs a value{expected}: write --{key} VALUE."
        _write(data, key, True)
        return ""
    _write(data, key, _value(override.text, setting, free=setting is not None and is_inside(key, setting)))
    return ""


def _value(text: str, setting: Setting | None, free: bool) -> object:
    """Return the value of a word for a setting; text that does not parse stays text, which validation rejects."""
    parsed = _parse(text)
    if free or setting is None:
        of_world = setting is not None and setting.key.endswith("settings")
        return None if text == "none" and not of_world else parsed if parsed is not None else text
    if text.lower() == "none" and type(None) in setting.accepts and text not in setting.choices:
        return None
    if str in setting.accepts and not isinstance(parsed, str) and type(parsed) not in setting.accepts:
        return text
    if parsed is None and float in setting.accepts:
        return _number(text)
    return parsed if parsed is not None else text


def _parse(text: str) -> object:
    """Return `text` as a TOML value; None if it is not one."""
    try:
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return None
    return parsed["value"] if len(parsed) == 1 else None


def _number(text: str) -> float | str:
    """Return a number in informal notation (`.5`, `1.`), otherwise the text."""
    try:
        return float(text)
    except ValueError:
        return text


def _write(data: dict[str, object], key: str, value: object) -> None:
    *path, leaf = key.split(".")
    table = data
    for name in path:
        inner = table.setdefault(name, {})
        if not isinstance(inner, dict):
            return
        table = inner
    old = table.get(leaf)
    if value is None:
        table.pop(leaf, None)
    elif isinstance(value, dict) and isinstance(old, dict):
        _merge(old, value)
    else:
        table[leaf] = value


def _merge(old: dict[str, object], new: dict[str, object]) -> None:
    for key, value in new.items():
        inner = old.get(key)
        if isinstance(inner, dict) and isinstance(value, dict):
            _merge(inner, value)
        else:
            old[key] = value
