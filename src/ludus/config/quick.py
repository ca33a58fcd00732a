"""Lower the settings of a run for --quick, by the table `recipes/quick.toml`."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from importlib import resources

from ludus.config.changes import ChangedSetting
from ludus.config.load import apply_overrides
from ludus.config.pipeline import StageKind
from ludus.config.schema import Config


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
