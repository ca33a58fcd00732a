"""Recipes: one folder each, with `config.toml`, a README and `recipe.toml`, which holds measurements.

`starts_s` was measured once with `ludus train NAME` on two cores without other load; `memory_mb`, the peak until step
1, with `--run.threads 1`. `learns` is from the README of the recipe or of the project, or from docs/experiments/.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from ludus.errors import ConfigError, did_you_mean


@dataclass(frozen=True, slots=True)
class Recipe:
    """A published recipe. `title` is the first line of its README, or its name if the README is missing.

    `starts_s` is the time from the command to the first episodes of step 1, None if not measured; `needs` then states
    what the recipe requires. `memory_mb` is the peak memory until step 1, `learns` the measured effect of training.
    """

    name: str
    title: str
    folder: Path
    starts_s: int | None = None
    memory_mb: int | None = None
    learns: str = "not measured"
    needs: str = ""
    cold_start_of: str = ""
    """The recipe whose cold start it shares; if empty, its own."""

    @property
    def config(self) -> Path:
        """Its configuration file."""
        return self.folder / "config.toml"

    @property
    def cold_start(self) -> Path:
        """The folder of its packaged cold start, which may not exist."""
        folder = self.folder.parent / self.cold_start_of if self.cold_start_of else self.folder
        return folder / "cold_start"


def list_recipes() -> list[Recipe]:
    """Return the recipes that ship with the package, sorted by name."""
    shelf = Path(str(resources.files("ludus.recipes")))
    folders = sorted(file.parent for file in shelf.glob("*/config.toml"))
    found = []
    for folder in folders:
        file, readme = folder / "recipe.toml", folder / "README.md"
        measured = tomllib.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
        lines = readme.read_text(encoding="utf-8").splitlines() if readme.is_file() else []
        titles = filter(None, (line.strip("# ").strip() for line in lines))
        found.append(Recipe(folder.name, next(titles, folder.name), folder, **measured))
    return found


def recipe_folder(name: str) -> Path:
    """Return the folder of the recipe `name`. Raises ConfigError with the nearest names if the recipe is unknown."""
    recipes = {recipe.name: recipe.folder for recipe in list_recipes()}
    if name in recipes:
        return recipes[name]
    known = f"{did_you_mean(name, recipes, cutoff=0.5)}Known: {', '.join(recipes)}."
    yours = "A file of yours is a path that ends in .toml, or in .py if it defines a world."
    raise ConfigError(f'Unknown recipe "{name}".', f"{known} {yours}")
