"""The words that options of parts may be; the first is the default."""

from __future__ import annotations

from typing import Literal

GRANULARITIES: tuple[Literal["token", "trajectory"], ...] = ("token", "trajectory")
LEVELS: tuple[Literal["token", "sequence", "geometric"], ...] = ("token", "sequence", "geometric")
CRITERIA: tuple[Literal["geometric", "largest", "sequence", "token"], ...] = (
    "geometric",
    "largest",
    "sequence",
    "token",
)
MEASURES: tuple[Literal["ratio", "k2", "k3"], ...] = ("ratio", "k2", "k3")
IMPORTANCES: tuple[Literal["none", "ratio"], ...] = ("none", "ratio")
SPREADS: tuple[Literal["group", "batch"], ...] = ("group", "batch")
COUNTS: tuple[Literal["varying", "nonzero"], ...] = ("varying", "nonzero")
DIVERGENCES: tuple[Literal["tv", "kl"], ...] = ("tv", "kl")
SCALES: tuple[Literal["std", "none"], ...] = ("std", "none")
