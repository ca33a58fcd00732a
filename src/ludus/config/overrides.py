"""Settings from the command line: `--section.key value`, laid over what a file said."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ludus.config.settings import Setting, find, is_section, suggestion


@dataclass(frozen=True, slots=True)
class Override:
    """One setting of the command line. `text` is None for a bare `--key`."""

    key: str
    text: str | None


def apply_overrides(data: dict[str, object], words: Sequence[str]) -> list[str]:
    """Write the settings of a command line into `data`, in order: the last one for a key holds.

    A table is merged into the one that is there. `none` takes a key out, so that its default holds; a
    world's own setting keeps the word, which may be one of its choices (`ludus.envs.settings` reads it).
    Returns one sentence for each word that is no setting; values are checked later, with the whole.
    """
    problems: list[str] = []
    for item in _pairs(words):
        problem = item if isinstance(item, str) else _apply(data, item)
        if problem:
            problems.append(problem)
    return problems


def unknown_key(key: str, shown: str) -> str:
    """The sentence for a key that does not exist; `shown` is its value as text."""
    return f"{key} (= {shown}) is not a setting; {suggestion(key)}."


def _pairs(words: Sequence[str]) -> Iterator[Override | str]:
    """Pair keys with values; a word that is neither comes out as a sentence."""
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
    """Write one override into `data`. Returns a sentence if it cannot be, otherwise nothing."""
    key, setting = override.key, find(override.key)
    if setting is None and not is_section(key):
        return unknown_key(key, override.text if override.text is not None else "true")
    if override.text is None:
        if setting is None or bool not in setting.accepts:
            expected = f" ({setting.type_text})" if setting is not None else ""
            return f"{key} needs a value{expected}: write --{key} VALUE."
        _write(data, key, True)
        return ""
    _write(data, key, _value(override.text, setting, free=setting is not None and setting.holds(key)))
    return ""


def _value(text: str, setting: Setting | None, free: bool) -> object:
    """The value that a word means to a setting; text that does not fit stays text, to be refused later."""
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
    """`text` as a TOML value; None where it is none."""
    try:
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return None
    return parsed["value"] if len(parsed) == 1 else None


def _number(text: str) -> float | str:
    """A number as people write it (`.5`, `1.`), otherwise the text."""
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
