"""Print a recipe's resolved configuration as TOML, or list all settings."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from ludus.algorithms.algorithm import Algorithm, Need
from ludus.algorithms.spec.resolve import algorithm_of, check_binary_rewards
from ludus.cli.arguments import model_settings
from ludus.cli.ui.terminal import make_console, print_text
from ludus.config.load import load_config
from ludus.config.schema import Config
from ludus.config.settings import is_section, list_settings, suggestion
from ludus.config.toml import to_toml, value_text
from ludus.envs.base import World
from ludus.envs.registry import build_world
from ludus.errors import ConfigError, LudusError
from ludus.rewards.registry import added_parts, check_names, training_parts
from ludus.training.run.preflight import check_plugins


def run(args: argparse.Namespace, overrides: Sequence[str]) -> None:
    """Print configuration or settings. Raises ConfigError for an invalid algorithm, plug-in or reward."""
    in_folder = Path(args.recipe or "") / "config.toml"
    source = in_folder if args.recipe and in_folder.is_file() else args.recipe
    config = load_config(source, [*model_settings(args.model, args.recipe), *overrides])
    if args.keys is not None:
        print_text(make_console(), "\n".join(_key_lines(args.keys, config)))
        return
    algorithm = algorithm_of(config)
    check_plugins(config)
    unchecked = _check_rewards(config, algorithm)
    print(to_toml(config))
    print("\n".join(_algorithm_lines(algorithm, config)))
    if unchecked:
        print(f"# the world cannot be built here, so the rewards are not checked: {unchecked}")


def _check_rewards(config: Config, algorithm: Algorithm) -> str:
    """Raise ConfigError for an unusable world or rewards; return why the world cannot be built here, or ""."""
    added_parts(config.rewards)
    try:
        world = build_world(config.env, config.rollout, config.sandbox)
    except ConfigError:
        raise
    except LudusError as error:
        return str(error)
    check_reward_parts(config, algorithm, world)
    return ""


def check_reward_parts(config: Config, algorithm: Algorithm, world: World) -> None:
    """Raise ConfigError for unknown reward parts and for rewards that the advantage does not accept."""
    if config.rewards.is_default and not algorithm.advantage_spec.has(Need.BINARY_REWARDS):
        return
    parts = training_parts(config.rewards, world.rewards)
    check_names(config.rewards, parts)
    check_binary_rewards(algorithm, config.rewards, parts)


def _algorithm_lines(algorithm: Algorithm, config: Config) -> Iterator[str]:
    yield f"# algorithm as resolved: {algorithm.name} ({algorithm.source})"
    chosen = config.algorithm.model_dump(exclude_none=True)
    fields = {n: v for n, v in asdict(algorithm).items() if n not in ("name", "summary", "source", "options")}
    groups = [("", fields, chosen)]
    groups += [(f"options.{p}.", options, chosen["options"][p]) for p, options in asdict(algorithm.options).items()]
    for prefix, values, explicit in groups:
        for name, value in values.items():
            yield f"#   {prefix}{name} = {value_text(value)}   ({'setting' if name in explicit else 'from the preset'})"


def _key_lines(section: str, config: Config) -> Iterator[str]:
    if section and not is_section(section):
        raise ConfigError(f"Unknown section {section!r}.", f"{suggestion(section)}.".capitalize())
    values = config.model_dump()
    for setting in list_settings():
        if section and not setting.key.startswith(f"{section}."):
            continue
        value: object = values
        for name in setting.key.split("."):
            value = value.get(name, setting.default) if isinstance(value, dict) else setting.default
        limits = f", {setting.bounds}" if setting.bounds else ""
        shown, default = value_text(value), value_text(setting.default)
        other = f"; the default is {default}" if shown != default else ""
        yield f"{setting.key} = {shown}   # {setting.type_text}{limits}{other}"
        yield f"    {' '.join(setting.doc.split())}"
