"""Rubrics by name: data of the package, a TOML file, the world's of a task, or written by the judge."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Final

from ludus.errors import ConfigError, did_you_mean
from ludus.rewards.rubric import Rubric, rubric_of

TASK_RUBRIC: Final = "task"
WRITTEN_RUBRIC: Final = "written"


@cache
def packaged_rubrics() -> Mapping[str, Rubric]:
    """Return the rubrics of `rubrics.toml` by name."""
    tables = tomllib.loads(resources.files(__package__).joinpath("rubrics.toml").read_text("utf-8"))
    return {name: rubric_of(name, table) for name, table in tables.items()}


def load_rubric(name: str) -> Rubric:
    """Return a packaged rubric or that of a TOML file. Raises ConfigError."""
    if name in packaged_rubrics():
        return packaged_rubrics()[name]
    if not name.endswith(".toml"):
        known = [TASK_RUBRIC, WRITTEN_RUBRIC, *packaged_rubrics()]
        hint = f"{did_you_mean(name, known)}Rubrics: {', '.join(known)}, or a .toml file."
        raise ConfigError(f"Unknown rubric {name!r} (rewards.judge.rubrics).", hint)
    try:
        return rubric_of(Path(name).stem, tomllib.loads(Path(name).read_text("utf-8")))
    except (OSError, ValueError) as error:
        raise ConfigError(f"The rubric {name} cannot be read: {error}.", "See docs/use/judges.md.") from error
