"""Settings from the command line, `--section.key value`, which override those of a file."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Sequence
from contextlib import suppress

from ludus.config.settings import Setting, find, is_inside, is_section, suggestion


def apply_overrides(data: dict[str, object], words: Sequence[str]) -> list[str]:
    """Write the settings of a command line into `data`; the last one for a key takes precedence.

    A table is merged into the existing one. `none` removes a key, so that its default applies, except for a world's own
    settings, where it may be a choice (`ludus.envs.settings` reads it). Return one sentence for each word that is not a
    setting; values are validated later.
    """
    return list(filter(None, (item if isinstance(item, str) else _apply(data, *item) for item in _pairs(words))))


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
        elif rest and not rest[0].startswith("--"):
            yield key, rest.pop(0)
        else:
            yield key, None


def _apply(data: dict[str, object], key: str, text: str | None) -> str:
    """Write one setting into `data`. Return an error message, or "" on success."""
    setting = find(key)
    if setting is None and not is_section(key):
        return unknown_key(key, text if text is not None else "true")
    value: object = True
    if text is not None:
        value = _value(text, setting, free=setting is not None and is_inside(key, setting))
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
