"""Differences between configurations, and the settings that --quick lowers (`recipes/quick.toml`)."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources

from ludus.config.load import apply_overrides
from ludus.config.pipeline import StageKind
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


def quick_cuts(kind: StageKind, config: Config, overrides: Sequence[str]) -> list[ChangedSetting]:
    """Return the settings of a run that are lowered: those above the table, unless they are among `overrides`."""
    explicit: dict[str, object] = {}
    apply_overrides(explicit, overrides)
    table = tomllib.loads((resources.files("ludus.recipes") / "quick.toml").read_text("utf-8"))
    sections = ["training" if kind == "rl" else kind.replace("-", "_")]
    sections += ["evaluation"] * (kind in ("rl", "rft")) + ["sft"] * (kind == "rl" and config.model.from_scratch)
    values, cuts = config.model_dump(), []
    for section in sections:
        own = explicit.get(section)
        for name, most in table[section].items():
            old = values[section][name]
            if not (isinstance(own, dict) and name in own) and (old is None or old > most):
                cuts.append(ChangedSetting(f"{section}.{name}", old, most))
    return cuts


def describe_cuts(cuts: Sequence[ChangedSetting]) -> str:
    """Return the line that names the lowered settings."""
    return f"Quick: {', '.join(map(str, cuts)) or 'nothing to lower'}"
