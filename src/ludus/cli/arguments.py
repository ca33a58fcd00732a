"""Argument parsing that the commands share."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ludus.chat.tokenizer import chat_template
from ludus.config.load import load_config
from ludus.config.schema import Config
from ludus.config.settings import find
from ludus.config.toml import flat_settings
from ludus.errors import UserError
from ludus.plugins import is_file_reference
from ludus.recipes import list_recipes
from ludus.training.run.run_dir import RunFolder, kind_of

PRETRAINED = "pretrained.toml"
"""The settings of a recipe for a pretrained model, in the recipe's folder and in the folder of all recipes."""


def split_settings(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split the words of a command line into arguments and settings (`--section.key VALUE`, `--section.key=VALUE`).

    A setting has a dot in its name and takes the next word, unless that is an option, or the setting is a boolean and
    the word is neither true nor false.
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
        setting = find(name[2:])
        is_switch = setting is not None and setting.accepts == frozenset({bool})
        takes_next = not equals and rest and not rest[0].startswith("--")
        if takes_next and (not is_switch or rest[0].lower() in ("true", "false")):
            settings.append(rest.pop(0))
    return words, settings


def no_settings(overrides: Sequence[str], command: str) -> None:
    """Raise UserError if settings were passed to a command without settings."""
    if overrides:
        raise UserError(f"`ludus {command}` has no argument {overrides[0]}.", f"See `ludus {command} --help`.")


def raise_first(*checks: tuple[object, str, str]) -> None:
    """Raise UserError with message and hint of the first check whose condition is true."""
    for broken, message, hint in checks:
        if broken:
            raise UserError(message, hint)


def policy_config(folder: RunFolder, overrides: Sequence[str]) -> Config:
    """Return the configuration of a run with overrides. Raises UserError for a run of a reward model."""
    config = folder.load_config(overrides)
    if (folder.path / "run.json").is_file() and kind_of(folder) == "reward-model":
        text = f"{folder.path} is a run of a reward model, which cannot act."
        raise UserError(text, "Use it with `ludus train --rewards.model`.")
    return config


def model_settings(model: str | None, recipe: str | None = None) -> list[str]:
    """Return the settings of the option --model: the model is not created from scratch, and a recipe's values for a
    pretrained model apply unless it is a checkpoint of a run from scratch."""
    if not model:
        return []
    words = ["--model.path", model, "--model.from_scratch", "false"]
    if _is_own_checkpoint(Path(model)):
        return words
    folders = [one.folder for one in list_recipes() if one.name == recipe]
    files = [file for folder in folders for file in (folder.parent / PRETRAINED, folder / PRETRAINED)]
    found = (flat_settings(file.read_text("utf-8")) for file in files if file.is_file())
    return words + [word for settings in found for key, value in settings.items() for word in (f"--{key}", value)]


def _is_own_checkpoint(model: Path) -> bool:
    """Return whether a checkpoint has the package's chat template, which models trained from scratch have."""
    template = model / "chat_template.jinja"
    return template.is_file() and template.read_text("utf-8") == chat_template()


def recipe_config(recipe: str | None, shortcuts: Sequence[str], overrides: Sequence[str]) -> Config:
    """Return the configuration of a recipe; `overrides` take precedence over `shortcuts`."""
    if not recipe:
        raise UserError("Name a recipe.", "`ludus recipes` lists them.")
    return load_config(recipe, [*shortcuts, *overrides])


def is_recipe(name: str) -> bool:
    """Return whether the name is that of a recipe, or of a recipe or world file."""
    return name.endswith(".toml") or is_file_reference(name) or name in {one.name for one in list_recipes()}


def environment_config(name: str, overrides: Sequence[str]) -> Config:
    """Return the configuration of a recipe, a recipe file, or an environment by name or .py file."""
    return load_config(name, overrides) if is_recipe(name) else load_config(None, ["--env.name", name, *overrides])
