"""A pipeline: a TOML file that lists training stages in order.

[[stage]]
kind = "sft"            # sft, rft, preference, reward-model or rl
recipe = "search"       # as on the command line
settings.sft.steps = 500

Relative paths in the file are relative to its folder.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Literal, get_args

from ludus.config.load import apply_overrides, setting_words
from ludus.config.paths import resolve_paths
from ludus.config.schema import Config
from ludus.config.toml import ChangedSetting
from ludus.errors import ConfigError, nearest_names

StageKind = Literal["sft", "rft", "preference", "reward-model", "rl"]

KINDS: Mapping[str, StageKind] = {kind: kind for kind in get_args(StageKind)}
_KEYS = ("kind", "recipe", "settings")


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage; `settings` are words of a command line, `before` the earlier stages, `number` counts from 1."""

    number: int
    kind: StageKind
    recipe: str
    settings: tuple[str, ...]
    before: tuple[Stage, ...] = ()

    @property
    def name(self) -> str:
        """The name of its run folder."""
        return f"{self.number:02d}-{self.kind}"


def load_pipeline(path: Path) -> tuple[Stage, ...]:
    """Return the stages of a file, in order. Raises ConfigError with one sentence per mistake."""
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}.", "Check the path.") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not TOML: {error}.") from None
    unknown = [f"{key} is not a key of a pipeline; the only one is [[stage]]." for key in data if key != "stage"]
    tables = data.get("stage", [])
    if not isinstance(tables, list) or not tables:
        raise ConfigError("\n".join([*unknown, f"{path} has no stages."]), "Add a [[stage]] table for each, in order.")
    problems = unknown + [error for i, table in enumerate(tables, start=1) for error in _find_errors(table, i)]
    if problems:
        raise ConfigError("\n".join(problems), f"The stages come from {path}.")
    stages: tuple[Stage, ...] = ()
    for number, table in enumerate(tables, start=1):
        resolve_paths(table.setdefault("settings", {}), path.parent)
        words, recipe = tuple(setting_words(table["settings"], none="none")), table["recipe"]
        recipe = str(path.parent / recipe) if recipe.endswith(".toml") else recipe
        stages += (Stage(number, KINDS[table["kind"]], recipe, words, stages),)
    return stages


def _find_errors(table: object, number: int) -> Iterator[str]:
    if not isinstance(table, dict):
        yield f"Stage {number} is not a table."
        return
    for key in table.keys() - set(_KEYS):
        near = nearest_names(key, _KEYS)
        guess = f"did you mean {' or '.join(near)}?" if near else f"a stage has {', '.join(_KEYS)}."
        yield f"Stage {number} has the unknown key {key}; {guess}"
    if table.get("kind") not in KINDS:
        yield f"Stage {number} has the kind {table.get('kind')!r}, but it must be one of {', '.join(KINDS)}."
    if not isinstance(table.get("recipe"), str):
        yield f"Stage {number} has no recipe."
    settings = table.get("settings", {})
    if not isinstance(settings, dict):
        yield f"Stage {number} has settings that are not a table."
    elif number > 1 and isinstance(model := settings.get("model", {}), dict):
        for key in sorted(model.keys() & {"path", "from_scratch"}):
            yield f"Stage {number} sets model.{key}, but it starts from the checkpoint of the previous stage."


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
