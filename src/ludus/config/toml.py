"""Write a configuration as TOML text, and list the differences between two.

The `tomli-w` package was considered: it writes neither comments (`# key is none`) nor a list on one line, and both are
needed, the latter because values are also printed as words of a command line.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import date, time

from ludus.config.schema import Config
from ludus.config.sections.section import Section
from ludus.errors import ConfigError

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")


def to_toml(config: Config) -> str:
    """Return the resolved configuration with every setting, in the order of the schema.

    Settings that are None are listed in comments. Loading the text returns an equal configuration. Raises ConfigError
    if an open table contains a value that TOML cannot represent (None, an object).
    """
    return "\n".join("\n".join(_section(name, part)) for name, part in config if isinstance(part, Section))


def flat_settings(text: str) -> dict[str, str]:
    """Return the values in TOML text by dotted name, as on the command line. Raises ValueError for other text."""
    found: dict[str, str] = {}
    tables = [("", tomllib.loads(text))]
    for prefix, table in tables:
        for key, value in table.items():
            if isinstance(value, dict):
                tables.append((f"{prefix}{key}.", value))
            else:
                found[f"{prefix}{key}"] = value if isinstance(value, str) else toml_value(value)
    return found


def toml_value(value: object) -> str:
    """Return one value as TOML on one line. Raises ValueError for a value that TOML cannot represent."""
    match value:
        case bool():
            return "true" if value else "false"
        case int() | float():
            return repr(value)
        case str():
            return _quoted(value)
        case date() | time():
            return value.isoformat()
        case list() | tuple():
            return f"[{', '.join(toml_value(item) for item in value)}]"
        case Mapping():
            pairs = (f"{_key(str(key))} = {toml_value(item)}" for key, item in value.items())
            return f"{{{', '.join(pairs)}}}"
    raise ValueError(f"TOML cannot represent {value!r}")


def value_text(value: object) -> str:
    """Return the value of a setting for the command line: TOML, or `none` for None."""
    if isinstance(value, Mapping):
        value = {name: inner for name, inner in value.items() if inner is not None}
    return "none" if value is None else toml_value(value)


def _section(path: str, section: Section) -> Iterator[str]:
    yield f"[{path}]"
    tables: list[str] = []
    for name, value in section:
        if value is None:
            yield f"# {name} is none"
        elif isinstance(value, Section):
            tables += _section(f"{path}.{name}", value)
        elif isinstance(value, Mapping) and any(isinstance(inner, Section) for inner in value.values()):
            for key, inner in value.items():
                tables += _section(f"{path}.{name}.{_key(key)}", inner)
        elif isinstance(value, Mapping):
            tables += _table(f"{path}.{name}", value)
        else:
            yield f"{name} = {toml_value(value)}"
    yield ""
    yield from tables


def _table(path: str, table: Mapping[str, object]) -> Iterator[str]:
    yield f"[{path}]"
    for key, value in table.items():
        try:
            yield f"{_key(key)} = {toml_value(value)}"
        except ValueError as error:
            raise ConfigError(f"{path}.{key} cannot be written: {error}.") from None
    yield ""


def _key(key: str) -> str:
    return key if _BARE_KEY.fullmatch(key) else _quoted(key)


def _quoted(text: str) -> str:
    """Return a TOML string: JSON's escapes, and the delete character, which only TOML escapes."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


@dataclass(frozen=True, slots=True)
class ChangedSetting:
    """A setting with its values in two configurations."""

    key: str
    old: object
    new: object

    def __str__(self) -> str:
        return f"{self.key} {value_text(self.old)} -> {value_text(self.new)}"

    @property
    def conflict(self) -> str:
        """Text for an error: the old value must not change."""
        return f"{self.key} = {value_text(self.old)} (not {value_text(self.new)})"

    @property
    def words(self) -> tuple[str, str]:
        """The new value as words of a command line."""
        return f"--{self.key}", self.new if isinstance(self.new, str) else value_text(self.new)


def changes(old: Config, new: Config) -> list[ChangedSetting]:
    """Return the settings that differ, in schema order; a section missing on one side counts as one."""
    return list(_changes(old.model_dump(), new.model_dump(), ""))


def _changes(old: Mapping[str, object], new: Mapping[str, object], prefix: str) -> Iterator[ChangedSetting]:
    for name in dict.fromkeys([*old, *new]):
        before, after = old.get(name), new.get(name)
        if isinstance(before, Mapping) and isinstance(after, Mapping):
            yield from _changes(before, after, f"{prefix}{name}.")
        elif before != after:
            yield ChangedSetting(f"{prefix}{name}", before, after)
