"""The presets: algorithms of the field by name, read from `presets.toml` next to this file. No torch."""

from __future__ import annotations

import tomllib
from importlib import resources

from ludus.algorithms.algorithm import Algorithm, PartOptions


def _presets() -> dict[str, Algorithm]:
    text = resources.files(__package__).joinpath("presets.toml").read_text("utf-8")
    return {
        name: Algorithm(name=name, **fields | {"options": PartOptions(**fields.get("options", {}))})
        for name, fields in tomllib.loads(text).items()
    }


PRESETS: dict[str, Algorithm] = _presets()

TURN_LEVEL = PRESETS["turn_return_hybrid"]
"""The turn-level algorithm that turn rewards are calibrated for if the run has none."""
