"""`ludus rewards auc`: reward models on rollouts of later policies and of other splits."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from ludus.cli.ui.fitted_table import TableColumn, make_table
from ludus.cli.ui.terminal import print_text
from ludus.errors import UserError
from ludus.evaluation.stats import Estimate
from ludus.training.reward_model.later_policies import bin_auc, held_out_auc, load_single, relation, rollout_bins
from ludus.training.run.run_dir import RunFolder


def print_auc(console: Console, runs: Sequence[Path], models: Sequence[Path], every: int) -> None:
    """Print a table of the AUC of each model by run, and training steps or evaluation, and how they are related."""
    if not models:
        raise UserError("`ludus rewards auc` needs a reward model.", "Pass --model FOLDER, once for each.")
    if every < 1:
        raise UserError(f"--every is {every}.", "Set 1 or more.")
    rows: list[Sequence[object]] = []
    notes: list[str] = []
    own: list[str] = []
    for run in map(RunFolder, runs):
        config = run.load_config()
        max_tokens = config.training.microbatch_tokens
        loaded = [load_single(model, run) for model in models]
        own = own or [_shown(held_out_auc(one, path, max_tokens)) for one, path in zip(loaded, models, strict=True)]
        for one in rollout_bins(run, every):
            areas = [_shown(bin_auc(model, one, max_tokens)) for model in loaded]
            rows.append((one.run, one.where, len(one.records), f"{one.success:.1%}", *areas))
        related = [(model.name, relation(model, run, config)) for model in models]
        notes += [f"{run.path.name}: the reward model {name} {text}." for name, text in related if text]
    rows.insert(0, ("", "held-out examples of each model's training", None, None, *own))
    numbers = (TableColumn("rollouts", 1, right=True), TableColumn("success", right=True))
    columns: list[str | TableColumn] = ["run", "rollouts of", *numbers]
    columns += [f"AUC {model.name}" for model in models]
    console.print(make_table(columns, rows, "AUC of reward models, with 95 % intervals over tasks"))
    for note in notes:
        print_text(console, note)


def _shown(found: Estimate | None) -> str:
    return "-" if found is None else f"{found.mean:.3f} [{found.interval.low:.3f}, {found.interval.high:.3f}]"
