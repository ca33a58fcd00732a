"""Pure tensor functions: advantages, losses, aggregation, KL, corrections, filters; presets by name.

An algorithm is data (`algorithm.Algorithm`). A new part is one function in the module of its kind, one line
in that module's registry, and its name in `algorithm`, which does not import torch. No function sees a model.

`import ludus.algorithms` is enough to call `ludus.algorithms.advantages.grpo` and its like: the modules of
`FUNCTIONS`, which import torch, are read when they are first named.
"""

from __future__ import annotations

import importlib
from types import ModuleType

FUNCTIONS = ("advantages", "aggregate", "corrections", "filters", "kl", "losses", "preference", "shaping")


def __getattr__(name: str) -> ModuleType:
    """A module of functions, imported. Raises AttributeError for another name."""
    if name in FUNCTIONS:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
