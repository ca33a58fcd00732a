"""List the algorithms: what `--algorithm.preset` takes, each with one line, its source and its settings.

NAME shows one of them whole, its parts and the numbers that each part has to itself; or a part alone.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict

from rich.table import Table

from ludus.algorithms.spec.algorithm import (
    ADVANTAGE_OPTIONS,
    AGGREGATION_NAMES,
    CORRECTION_OPTIONS,
    KL_OPTIONS,
    LOSS_OPTIONS,
    TERM_NAMES,
    Algorithm,
)
from ludus.algorithms.spec.bounds import BOUNDS
from ludus.algorithms.spec.defaults import default_of
from ludus.algorithms.spec.presets import PRESETS
from ludus.algorithms.spec.resolve import resolve
from ludus.cli.arguments import no_settings
from ludus.cli.ui.terminal import make_console, say
from ludus.config.sections.algorithm import AlgorithmConfig
from ludus.config.toml import value_text


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's own arguments."""
    parser.add_argument("name", nargs="?", metavar="NAME", help="show this one whole, or this part of one")


def run(args: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Print the table, or one algorithm."""
    no_settings(overrides, "algorithms")
    console = make_console()
    if args.name is not None:
        parts = [] if args.name in PRESETS else list(describe_part(args.name))
        for line in parts or describe(resolve(AlgorithmConfig(preset=args.name))):
            say(console, line)
        return 0
    table = Table()
    for column in ("preset", "in one line", "advantage", "loss", "mean over", "source"):
        table.add_column(column, no_wrap=column == "preset")
    for one in PRESETS.values():
        table.add_row(one.name, one.summary, one.advantage, one.loss, one.aggregation, one.source)
    console.print(table)
    for part, names in without_preset():
        say(console, f"Without a preset, for --algorithm.{part}: {', '.join(names)}")
    say(console, "One of them whole: ludus algorithms NAME     Train with it: --algorithm.preset NAME")
    return 0


def without_preset() -> Iterator[tuple[str, list[str]]]:
    """The parts that no preset has, by the setting that takes them."""
    presets = PRESETS.values()
    parts = (
        ("advantage", ADVANTAGE_OPTIONS, {one.advantage for one in presets}),
        ("loss", LOSS_OPTIONS, {one.loss for one in presets}),
        ("aggregation", AGGREGATION_NAMES, {one.aggregation for one in presets}),
        ("kl", KL_OPTIONS, {one.kl for one in presets if one.kl_coef > 0}),
        ("correction", CORRECTION_OPTIONS, {one.correction for one in presets}),
    )
    for part, known, used in parts:
        if left := [name for name in known if name not in used]:
            yield part, left


def describe(algorithm: Algorithm) -> Iterator[str]:
    """Its settings, a line each, and what may be set besides."""
    yield f"{algorithm.name}: {algorithm.summary} ({algorithm.source})"
    for name, value in asdict(algorithm).items():
        if name not in ("name", "summary", "source", "options"):
            yield f"  algorithm.{name} = {value if isinstance(value, str) else value_text(value)}"
    parts = (
        ("advantage", algorithm.advantage, ADVANTAGE_OPTIONS, algorithm.options.advantage),
        ("loss", algorithm.loss, LOSS_OPTIONS, algorithm.options.loss),
        ("correction", algorithm.correction, CORRECTION_OPTIONS, algorithm.options.correction),
        ("kl", algorithm.kl, KL_OPTIONS, algorithm.options.kl),
        ("terms", "", {"": TERM_NAMES}, algorithm.options.terms),
    )
    for part, name, known, given in parts:
        yield from _options(part, name, known, given)


def describe_part(name: str) -> Iterator[str]:
    """The settings that take a name which is no preset, and what may be set of each."""
    with_options: dict[str, Mapping[str, Sequence[str]]] = {
        "advantage": ADVANTAGE_OPTIONS,
        "loss": LOSS_OPTIONS,
        "correction": CORRECTION_OPTIONS,
        "kl": KL_OPTIONS,
        "aggregation": dict.fromkeys(AGGREGATION_NAMES, ()),
    }
    for part, known in with_options.items():
        if name in known:
            yield f"{name} is no preset, but a part of one: --algorithm.{part} {name}"
            yield from _options(part, name, known, {})


def _options(
    part: str, name: str, known: Mapping[str, Sequence[str]], given: Mapping[str, float | str]
) -> Iterator[str]:
    """The settings of a part, a line each: those `given`, and the defaults of the others."""
    for option in known[name]:
        value = given.get(option, default_of(part, name, option))
        shown = value if isinstance(value, str) else f"{value:g} ({BOUNDS[part][option]})"
        yield f"  algorithm.options.{part}.{option} = {shown}"
