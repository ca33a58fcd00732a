"""Write the tables of the docs that list algorithms, parts and alarms: python -m generators.algorithm_tables [--check].

A table stands between `<!-- begin table: NAME -->` and `<!-- end table -->`. All are made from the specs and presets.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path

from ludus.algorithms.advantages import ADVANTAGES
from ludus.algorithms.algorithm import KL_OPTIONS, SETTING_PARAMETERS, TERM_OPTIONS, Algorithm, Need, Option, PartSpec
from ludus.algorithms.corrections import CORRECTIONS
from ludus.algorithms.kl import FULL_KL_NAMES
from ludus.algorithms.losses import LOSSES
from ludus.algorithms.spec.resolve import PRESETS
from ludus.algorithms.tensors import Outcomes, TokenBatch
from ludus.diagnostics.alarms import rules

ROOT = Path(__file__).parents[1]
PAGES = ("docs/understand/**/*.md", "docs/extend/*.md", "docs/use/read_a_run.md")
MARKED = re.compile(r"(<!-- begin table: (.+?) -->\n).*?(<!-- end table -->)", re.S)
"""The markers, and the name of the table between them."""


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    lines = [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |\n" for row in (head, *rows)]
    return "".join([lines[0], f"{'|---' * len(head)}|\n", *lines[1:]]).replace("|  |", "| |").replace("|  |", "| |")


def presets() -> str:
    """Return what each preset consists of, and what a step of it costs."""
    head = ("preset", "in one line", "advantage", "loss", "policy", "turn rewards", "KL", "updates", "passes a step")
    rows = [
        (
            f"`{one.name}`",
            one.summary,
            f"`{one.advantage}`",
            f"`{one.loss}`",
            policy(one),
            turn_rewards(one),
            f"{one.kl_placement}, {one.kl}, {one.kl_coef:g}" if one.kl_coef else "",
            str(one.minibatches),
            passes(one),
        )
        for one in PRESETS.values()
    ]
    return table(head, rows)


def policy(algorithm: Algorithm) -> str:
    """Return how far from the trained policy the rollouts of an algorithm may come from."""
    spec = algorithm.loss_spec
    if spec.has(Need.DEMONSTRATIONS):
        return "near, experts off"
    if spec.off_policy:
        return "off"
    return "near" if spec.ratio_part or spec.needs else "on"


def turn_rewards(algorithm: Algorithm) -> str:
    """Return whether the advantage reads rewards of turns."""
    if algorithm.advantage_spec.has(Need.TURN_REWARDS):
        return "yes"
    return "if there are any" if algorithm.advantage_spec.has(Need.OPTIONAL_TURN_REWARDS) else ""


def passes(algorithm: Algorithm) -> str:
    """Return the forward passes of a step before the backward one, and the other models that take part."""
    spec, loss = algorithm.advantage_spec, algorithm.loss_spec
    penalised = algorithm.kl_coef > 0 and algorithm.kl_placement != "loss" and algorithm.kl not in FULL_KL_NAMES
    compared = spec.has(Need.BEHAVIOR_RATIO) or spec.has(Need.DISTRIBUTIONS)
    extra = (
        penalised or compared,
        spec.has(Need.DISTRIBUTIONS),
        loss.has(Need.CONFLICT_WEIGHTS),
        loss.has(Need.TOKEN_CHOICE),
    )
    models = {
        "reference": algorithm.kl_coef > 0 or spec.has(Need.PROCESS_REWARD_MODEL),
        "critic": spec.has(Need.CRITIC) or spec.has(Need.OUTCOME_CRITIC),
        "process reward model": spec.has(Need.PROCESS_REWARD_MODEL),
        "teacher": loss.has(Need.TEACHER),
        "self-teacher": loss.has(Need.SELF_TEACHER),
        "a greedy episode per task": spec.has(Need.GREEDY_ROLLOUT),
    }
    return " + ".join([str(1 + sum(extra)), *(name for name, takes_part in models.items() if takes_part)])


def parts(specs: Mapping[str, PartSpec], modules: Sequence[str]) -> str:
    """Return the parts that are defined in some modules (all if none is named), with needs and options.

    Raises ValueError for an unknown module.
    """
    module_of = {name: one.function.__module__.rpartition(".")[2] for name, one in specs.items()}
    if odd := [name for name in modules if name not in module_of.values()]:
        known = ", ".join(sorted(set(module_of.values())))
        raise ValueError(f"no module {odd[0]!r} declares such a part; there are: {known}")
    chosen = [one for name, one in specs.items() if not modules or module_of[name] in modules]
    rows = [
        (f"`{one.name}`", one.help, ", ".join(f"`{need}`" for need in Need if one.has(need)), options(one.options))
        for one in chosen
    ]
    return table(("name", "what it is", "needs", "options (default)"), rows)


def options(known: Mapping[str, Option]) -> str:
    """Return options with their defaults."""
    return ", ".join(f"`{name}` ({shown(option)})" for name, option in known.items())


def shown(option: Option) -> str:
    """Return the default of an option."""
    return option.default if isinstance(option.default, str) else f"{option.default:.4g}"


def option_lines(known: Mapping[str, Option]) -> str:
    """Return one row per option: default, allowed values, help."""
    rows = [
        (f"`{name}`", shown(one), ", ".join(one.choices) or str(one.bounds), one.help) for name, one in known.items()
    ]
    return table(("option", "default", "allowed", "what it sets"), rows)


def of_functions(*names: str) -> str:
    """Return one row per option of the named parts. Raises ValueError for an unknown part."""
    known = {**ADVANTAGES, **LOSSES, **CORRECTIONS}
    if odd := [name for name in names if name not in known]:
        raise ValueError(f"{odd[0]!r} is not an advantage, loss or correction")
    rows = [
        (f"`{name}`", f"`{key}`", shown(one), ", ".join(one.choices) or str(one.bounds), one.help)
        for name in names
        for key, one in known[name].options.items()
    ]
    return table(("part", "option", "default", "allowed", "what it sets"), rows)


def parameters() -> str:
    """Return the names that a parameter of a part may have."""
    names = {
        "advantage": [one.name for one in fields(Outcomes)] + ["outcomes"],
        "loss, correction": [one.name for one in fields(TokenBatch)] + ["batch"],
        "any": [*SETTING_PARAMETERS, "algorithm"],
    }
    return table(("part", "parameters"), [(part, ", ".join(f"`{one}`" for one in own)) for part, own in names.items()])


def needs() -> str:
    """Return every need with its docstring."""
    (tree,) = ast.parse(inspect.getsource(Need)).body
    assert isinstance(tree, ast.ClassDef)
    rows = []
    for name, text in zip(tree.body, tree.body[1:], strict=False):
        if isinstance(name, ast.Assign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
            rows.append((f"`Need.{ast.unparse(name.targets[0])}`", " ".join(str(text.value.value).split())))
    return table(("need", "what the part reads or requires"), rows)


TABLES: Mapping[str, Callable[..., str]] = {
    "presets": presets,
    "advantages": lambda *modules: parts(ADVANTAGES, modules),
    "losses": lambda *modules: parts(LOSSES, modules),
    "corrections": lambda *modules: parts(CORRECTIONS, modules),
    "options": of_functions,
    "kl options": lambda: option_lines(KL_OPTIONS),
    "term options": lambda: option_lines(TERM_OPTIONS),
    "parameters": parameters,
    "needs": needs,
    "alarms": lambda: table(
        ("alarm", "cause", "remedy", "action"),
        [(f"`{name}`", rule.cause, rule.remedy, f"`{rule.action}`") for name, rule in rules().items()],
    ),
}


def filled(text: str) -> str:
    """Return a page with its tables made from the specs. Raises ValueError for a marker that names no table."""

    def made(match: re.Match[str]) -> str:
        name, *arguments = [match[2]] if match[2] in TABLES else match[2].split()
        if name not in TABLES:
            raise ValueError(f"<!-- begin table: {match[2]} -->: there are the tables {', '.join(TABLES)}")
        try:
            return match[1] + TABLES[name](*arguments) + match[3]
        except ValueError as error:
            raise ValueError(f"<!-- begin table: {match[2]} -->: {error}") from None

    return MARKED.sub(made, text)


def pages() -> dict[Path, str]:
    """Return every page that has a table, with its tables made from the specs."""
    files = [file for pattern in PAGES for file in sorted(ROOT.glob(pattern))]
    return {file: filled(text) for file in files if MARKED.search(text := file.read_text("utf-8"))}


def main() -> None:
    """Write the tables, or fail if one is stale."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a table is stale")
    check = parser.parse_args().check
    try:
        stale = {file: text for file, text in pages().items() if file.read_text("utf-8") != text}
    except ValueError as error:
        sys.exit(str(error))
    if check and stale:
        sys.exit(f"stale tables: {', '.join(file.relative_to(ROOT).as_posix() for file in stale)}")
    for file, text in stale.items():
        file.write_text(text, "utf-8")


if __name__ == "__main__":
    main()
