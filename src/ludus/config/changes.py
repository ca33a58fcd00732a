"""Differences between configurations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ludus.config.schema import Config
from ludus.config.toml import value_text


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
