"""List the presets of `--algorithm.preset`, each with one line and its source."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict

from ludus.algorithms.advantages import ADVANTAGES
from ludus.algorithms.algorithm import KL_OPTIONS, Algorithm, Option, Part, PartSpec
from ludus.algorithms.corrections import CORRECTIONS
from ludus.algorithms.kl import KL_NAMES
from ludus.algorithms.losses import LOSSES
from ludus.algorithms.objective import AGGREGATIONS
from ludus.algorithms.spec.resolve import PRESETS, resolve
from ludus.cli.ui.fitted_table import TableColumn, make_table
from ludus.cli.ui.terminal import make_console, print_text
from ludus.config.sections.algorithm import AlgorithmConfig
from ludus.config.toml import value_text

PARTS: tuple[Part, ...] = ("advantage", "loss", "correction", "kl", "terms")


def run(args: argparse.Namespace, overrides: Sequence[str]) -> None:
    """Print the table, or one algorithm."""
    console = make_console()
    if args.name is not None:
        parts = [] if args.name in PRESETS else list(_describe_part(args.name))
        for line in parts or _describe(resolve(AlgorithmConfig(preset=args.name))):
            print_text(console, line)
        return
    details = (TableColumn("advantage", 1), TableColumn("loss", 3), TableColumn("mean over", 4))
    columns = ("preset", TableColumn("in one line", wrap=True), *details, TableColumn("source", 2, wrap=True))
    presets = PRESETS.values()
    rows = ((one.name, one.summary, one.advantage, one.loss, one.aggregation, one.source) for one in presets)
    console.print(make_table(columns, rows))
    known_parts = (
        ("advantage", ADVANTAGES, {one.advantage for one in presets}),
        ("loss", LOSSES, {one.loss for one in presets}),
        ("aggregation", AGGREGATIONS, {one.aggregation for one in presets}),
        ("kl", KL_NAMES, {one.kl for one in presets if one.kl_coef > 0}),
        ("correction", CORRECTIONS, {one.correction for one in presets}),
    )
    for part, known, used in known_parts:
        if unused := [name for name in known if name not in used]:
            print_text(console, f"Without a preset, for --algorithm.{part}: {', '.join(unused)}")
    print_text(console, "Show one: ludus algorithms NAME     Train with it: --algorithm.preset NAME")


def _describe(algorithm: Algorithm) -> Iterator[str]:
    yield f"{algorithm.name}: {algorithm.summary} ({algorithm.source})"
    for name, value in asdict(algorithm).items():
        if name not in ("name", "summary", "source", "options"):
            yield f"  algorithm.{name} = {value if isinstance(value, str) else value_text(value)}"
    for part in PARTS:
        values, known = algorithm.options_of(part)
        yield from _options(part, known, values)


def _describe_part(name: str) -> Iterator[str]:
    tables: dict[Part, Mapping[str, PartSpec]] = {"advantage": ADVANTAGES, "loss": LOSSES, "correction": CORRECTIONS}
    for part, specs in tables.items():
        if name in specs:
            yield f"{name} is a part of presets: --algorithm.{part} {name} ({specs[name].help})"
            yield from _options(part, specs[name].options, {})
    if name in KL_NAMES:
        yield f"{name} is a part of presets: --algorithm.kl {name}"
        yield from _options("kl", KL_OPTIONS, {})
    if name in AGGREGATIONS:
        yield f"{name} is a part of presets: --algorithm.aggregation {name}"


def _options(part: Part, known: Mapping[str, Option], values: Mapping[str, float | str]) -> Iterator[str]:
    for name, option in known.items():
        value = values.get(name, option.default)
        shown = value if isinstance(value, str) else f"{value:g} ({option.bounds})"
        yield f"  algorithm.options.{part}.{name} = {shown}: {option.help}"
