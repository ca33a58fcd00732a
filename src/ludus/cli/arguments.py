"""What the commands share in reading their arguments."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ludus.config.load import load_config
from ludus.config.schema import Config
from ludus.config.settings import find
from ludus.config.toml import flat_settings
from ludus.errors import UserError
from ludus.recipes import list_recipes

if TYPE_CHECKING:
    from ludus.training.run.run_dir import RunFolder


PRETRAINED = "pretrained.toml"
"""Beside the recipes, and in a recipe's folder: its settings for a pretrained model."""


def split_settings(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """The words of a command, and the settings among them (`--section.key VALUE`, `--section.key=VALUE`).

    A setting has a dot in its name and takes the next word, unless that is an option, or the setting is
    true or false and the word is neither.
    """
    words: list[str] = []
    settings: list[str] = []
    rest = list(argv)
    while rest:
        word = rest.pop(0)
        name, equals, _ = word.partition("=")
        if not name.startswith("--") or "." not in name or "/" in name:
            words.append(word)
            continue
        settings.append(word)
        if not equals and rest and not rest[0].startswith("--") and _takes(name[2:], rest[0]):
            settings.append(rest.pop(0))
    return words, settings


def _takes(key: str, word: str) -> bool:
    setting = find(key)
    is_switch = setting is not None and setting.accepts == frozenset({bool})
    return not is_switch or word.lower() in ("true", "false")


def no_settings(overrides: Sequence[str], command: str) -> None:
    """Raise UserError for words that a command without settings does not know."""
    if overrides:
        raise UserError(f"{overrides[0]} is no argument of `ludus {command}`.", f"See `ludus {command} --help`.")


def check_run(folder: RunFolder) -> None:
    """Raise UserError unless the folder is that of a run."""
    if folder.config.is_file():
        folder.check_config()
        return
    if not folder.path.exists():
        raise UserError(f"There is no run at {folder.path}.", "Check the path; runs lie under runs/.")
    raise UserError(
        f"{folder.path} is not a run folder: it has no config.toml.", "Give the folder that a run was written to."
    )


def run_config(folder: RunFolder, overrides: Sequence[str]) -> Config:
    """The configuration of a run, with settings laid over it."""
    check_run(folder)
    return load_config(folder.config, overrides)


def policy_config(folder: RunFolder, overrides: Sequence[str]) -> Config:
    """As `run_config`. Raises UserError for a run that trained no policy."""
    from ludus.training.run.run_dir import kind_of

    config = run_config(folder, overrides)
    if (folder.path / "run.json").is_file() and kind_of(folder) == "reward-model":
        raise UserError(
            f"{folder.path} trained a reward model, which judges and does not act.",
            "`ludus train` takes it as --rewards.model.",
        )
    return config


def model_settings(model: str | None, recipe: str | None = None) -> list[str]:
    """What the option --model means as settings: a given model is not made from scratch, and a recipe of the
    package has values for a pretrained one, which the checkpoint of a run is not."""
    if not model:
        return []
    words = ["--model.path", model, "--model.from_scratch", "false"]
    return words + ([] if is_own_checkpoint(Path(model)) else pretrained_settings(recipe))


def is_own_checkpoint(model: Path) -> bool:
    """Whether a model grew from nothing: a cold start of the package, or the checkpoint of a run that began
    from one or from scratch."""
    seen: set[Path] = set()
    path: Path | None = model
    while path is not None and path not in seen:
        seen.add(path)
        if any(recipe.folder in path.resolve().parents for recipe in list_recipes()):
            return True
        run = path.parent.parent / "config.toml"
        if path.parent.name != "checkpoints" or not run.is_file():
            return False
        given = load_config(run).model.path
        path = None if given is None else Path(given)
    return True


def pretrained_settings(recipe: str | None) -> list[str]:
    """The settings of a recipe of the package for a pretrained model; none for a file of one's own."""
    folders = [one.folder for one in list_recipes() if one.name == recipe]
    files = [file for folder in folders for file in (folder.parent / PRETRAINED, folder / PRETRAINED)]
    words: list[str] = []
    for file in files:
        if file.is_file():
            words += flat_settings(file.read_text("utf-8"))
    return words


def recipe_config(recipe: str | None, shortcuts: Sequence[str], overrides: Sequence[str]) -> Config:
    """The configuration of a recipe; `shortcuts` come before `overrides`."""
    if not recipe:
        raise UserError("Name a recipe.", "`ludus recipes` lists them.")
    return load_config(recipe, [*shortcuts, *overrides])


def recipe_stem(recipe: str) -> str:
    """The name of a recipe that is given by its name or as a file."""
    return Path(recipe).stem
