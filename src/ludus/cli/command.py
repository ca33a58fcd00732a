"""The commands: `commands.toml` declares each with its help and arguments; its code is imported when it runs."""

from __future__ import annotations

import argparse
import importlib
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from ludus.cli.signals import exit_on_interrupt

_TYPES = {"int": int, "float": float, "path": Path}


@dataclass(frozen=True, slots=True)
class Command:
    """One command; `target` is a module, or `module:object`, with a function `run(args, overrides)`.

    Each of `arguments` holds the parameters of one call of `ArgumentParser.add_argument`, with `type` as a name.
    Arguments with the same number as `exclusive` are mutually exclusive. A command without `settings` accepts no
    --section.key.
    """

    name: str
    target: str
    summary: str
    description: str
    example_arguments: str = ""
    arguments: Sequence[Mapping[str, object]] = ()
    settings: bool = True

    @property
    def example(self) -> str:
        """An example of the command line."""
        return f"ludus {self.name} {self.example_arguments}".rstrip()

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add the arguments to a parser."""
        groups: dict[int, argparse._MutuallyExclusiveGroup] = {}
        for argument in self.arguments:
            options: dict[str, Any] = {
                name: tuple(value) if isinstance(value, list) else value for name, value in argument.items()
            }
            names, group = options.pop("name"), options.pop("exclusive", None)
            if "type" in options:
                options["type"] = _TYPES[options["type"]]
            if group is not None and group not in groups:
                groups[group] = parser.add_mutually_exclusive_group()
            target = parser if group is None else groups[group]
            target.add_argument(*([names] if isinstance(names, str) else names), **options)

    def run(self, args: argparse.Namespace, overrides: Sequence[str]) -> int:
        """Import the command and run it; return the exit code."""
        module, _, name = self.target.partition(":")
        with exit_on_interrupt():
            defined = vars(importlib.import_module(f"ludus.cli.{module}"))
        code: int | None = (defined[name].run if name else defined["run"])(args, overrides)
        return code or 0


@cache
def list_commands() -> Mapping[str, Command]:
    """Return the commands by name."""
    tables = tomllib.loads((resources.files("ludus.cli") / "commands.toml").read_text("utf-8"))
    return {name: Command(name, **table) for name, table in tables.items()}
