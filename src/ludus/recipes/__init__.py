"""Recipes: one folder each, with `config.toml` and a README."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from ludus.errors import ConfigError, did_you_mean


@dataclass(frozen=True, slots=True)
class Recipe:
    """A published recipe. `title` is the first line of its README, or its name where there is none."""

    name: str
    title: str
    folder: Path

    @property
    def config(self) -> Path:
        """Its configuration file."""
        return self.folder / "config.toml"

    @property
    def cold_start(self) -> Path:
        """The folder of its packaged cold start, which may not exist."""
        return self.folder / "cold_start"


def list_recipes() -> list[Recipe]:
    """All recipes that ship with the package, by name."""
    shelf = Path(str(resources.files("ludus.recipes")))
    folders = sorted(file.parent for file in shelf.glob("*/config.toml"))
    return [Recipe(folder.name, _title(folder), folder) for folder in folders]


def recipe_folder(name: str) -> Path:
    """The folder of the recipe `name`. Raises ConfigError with the nearest names where there is none."""
    recipes = {recipe.name: recipe.folder for recipe in list_recipes()}
    if name in recipes:
        return recipes[name]
    guess = did_you_mean(name, recipes, cutoff=0.5)
    raise ConfigError(
        f'Unknown recipe "{name}".',
        f"{guess}Known: {', '.join(recipes)}. A file of your own is given by its path, ending in .toml.",
    )


def _title(folder: Path) -> str:
    readme = folder / "README.md"
    if not readme.is_file():
        return folder.name
    lines = (line.strip("# ").strip() for line in readme.read_text(encoding="utf-8").splitlines())
    return next((line for line in lines if line), folder.name)
