"""Lower the settings of a run for --quick, by the table `recipes/quick.toml`."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources

from ludus.config.load import apply_overrides
from ludus.config.pipeline import StageKind
from ludus.config.schema import Config
from ludus.config.toml import value_text


@dataclass(frozen=True, slots=True)
class QuickCut:
    """A lowered setting; `old` is None if its value was none."""

    key: str
    old: object
    new: int

    @property
    def words(self) -> tuple[str, str]:
        return f"--{self.key}", str(self.new)


def quick_cuts(kind: StageKind, config: Config, overrides: Sequence[str]) -> list[QuickCut]:
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
                cuts.append(QuickCut(f"{section}.{name}", old, most))
    return cuts


def describe_cuts(cuts: Sequence[QuickCut]) -> str:
    """Return the line that names the lowered settings."""
    changes = ", ".join(f"{cut.key} {value_text(cut.old)} -> {cut.new}" for cut in cuts)
    return f"Quick: {changes or 'nothing to lower'}"
