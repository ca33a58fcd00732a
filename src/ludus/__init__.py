"""Ludus trains tool-using LLM agents by reinforcement learning.

As a library: `ludus.train`, `ludus.evaluate`, `ludus.rollout` and `ludus.load` (`ludus.api`). To read the code, start
with `ludus.types`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ludus.api import configuration as configuration
    from ludus.api import evaluate as evaluate
    from ludus.api import evaluate_async as evaluate_async
    from ludus.api import load as load
    from ludus.api import rollout as rollout
    from ludus.api import rollout_async as rollout_async
    from ludus.api import sft as sft
    from ludus.api import sft_async as sft_async
    from ludus.api import train as train
    from ludus.api import train_async as train_async

__version__ = "0.1.0"
__all__ = [
    "configuration",
    "evaluate",
    "evaluate_async",
    "load",
    "rollout",
    "rollout_async",
    "sft",
    "sft_async",
    "train",
    "train_async",
]


def __getattr__(name: str) -> object:
    """Import the functions of `ludus.api` when they are first used."""
    if name not in __all__:
        raise AttributeError(f"module 'ludus' has no attribute {name!r}")
    from ludus import api

    return vars(api)[name]


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
