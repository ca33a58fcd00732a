"""Show a run: metric curves, outcomes of rollouts, alarms, evaluations and transcripts."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path

from rich.console import Console

from ludus.chat.render import Tokenizer
from ludus.cli.ui import run_summary as summary
from ludus.cli.ui.fitted_table import FittedTable, TableColumn, make_table
from ludus.cli.ui.run_summary import curve_table, find_curves, mean_timings, sparkline
from ludus.cli.ui.terminal import load_libraries, make_console, print_line, print_text
from ludus.cli.ui.transcripts import print_record
from ludus.config.schema import Config
from ludus.diagnostics.history import passed_gates
from ludus.diagnostics.trackers import METRICS_FILE, MetricsRow, read_metrics
from ludus.envs.registry import build_world
from ludus.errors import UserError
from ludus.evaluation.evaluate import load_evaluation
from ludus.evaluation.tables import format_sampling, format_success
from ludus.rewards.base import success
from ludus.rollouts.rollout_files import RolloutRecord, read_rollouts, rollouts_path
from ludus.rollouts.trees import has_rows
from ludus.training.run.run_dir import RunFolder


def run(args: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Print the run, or the chosen transcripts."""
    if args.step is not None and args.evaluation is not None:
        raise UserError("--step and --evaluation are mutually exclusive.", "Remove one of them.")
    if args.episodes < 0:
        raise UserError(f"--episodes is {args.episodes}.", "Set 0 or more.")
    folder = RunFolder(args.run)
    config = folder.load_config()
    console = make_console()
    is_part = args.step is not None or args.evaluation is not None or args.task is not None
    if not is_part:
        _print_overview(folder, config, console)
    if args.episodes > 0:
        print_episodes(args, folder, config, console, required=is_part or args.failed or args.solved)
    return 0


def _print_overview(folder: RunFolder, config: Config, console: Console) -> None:
    from ludus.diagnostics.timings import HINTS

    rows, timings = _metrics_rows(folder.metrics), _metrics_rows(folder.timings)
    print_line(console, f"{folder.path}: world {config.env.name}, {_method_and_steps(rows, config)}")
    losses = [row.metrics["loss/total"] for row in _metrics_rows(folder.path / "cold_start" / METRICS_FILE)]
    if losses:
        line = f"{losses[0]:.3g} {sparkline(losses)} {losses[-1]:.3g}"
        print_line(console, f"Cold start: {len(losses)} steps of fine-tuning, loss {line}")
    curves = find_curves([*rows, *timings])
    console.print(curve_table(curves, console.width) if curves else "No step has finished yet.")
    means = mean_timings(timings)
    for text in filter(None, [summary.format_ledger(rows), summary.explain_loss(rows), summary.format_times(means)]):
        print_text(console, text)
    for gate in passed_gates(((row.step, row.metrics) for row in rows), config.training.curriculum):
        print_text(console, f"Curriculum: {gate}; next stage: {gate.following}.")
    alarms = summary.format_alarms(rows, config.run.alarms.actions)
    for text in filter(None, [*alarms, *(hint(means, config) for hint in HINTS)]):
        print_text(console, f"! {text}", "yellow")
    if files := sorted(folder.evaluations.glob("*.json")):
        console.print(_evaluation_table(files))


def _method_and_steps(rows: Sequence[MetricsRow], config: Config) -> str:
    """Describe the training method and how many steps are done, by the names of the metrics."""
    methods = {
        "rft/kept": "rejection sampling",
        "forks/decisions": "preferences, loss forks",
        "preference/margin": f"preferences, loss {config.preference.loss}",
        "batch/scores": f"reward model, {config.reward_model.kind}",
        "reward/mean": f"algorithm {config.algorithm.preset}",
    }
    totals = {"rft/kept": f" of {config.rft.rounds} rounds", "reward/mean": f" of {config.training.steps} steps"}
    known = {name for row in rows for name in row.metrics}
    method = next((text for name, text in methods.items() if name in known), "no step of reinforcement learning")
    if not rows:
        return method
    total = next((text for name, text in totals.items() if name in rows[-1].metrics), " steps")
    return f"{method}, {rows[-1].step}{total}"


def _metrics_rows(path: Path) -> list[MetricsRow]:
    return read_metrics(path) if path.is_file() else []


def _evaluation_table(files: Sequence[Path]) -> FittedTable:
    rows: list[tuple[object, ...]] = []
    for file in files:
        result = load_evaluation(file)
        plan, number = result.plan, len(result.task_ids)
        rows.append((file.stem, plan.step, plan.split, format_sampling(plan), number, format_success(result)))
    details = (TableColumn("step", 3), TableColumn("split", 2), TableColumn("sampling", 2), TableColumn("tasks", 1))
    columns = ("name", *details, "success")
    return make_table(columns, rows, "Evaluations, with 95 % intervals")


def print_episodes(
    args: argparse.Namespace, folder: RunFolder, config: Config, console: Console, *, required: bool
) -> None:
    """Print the first matching transcripts; with `required`, print a message if there are none."""
    files = find_rollouts(folder, args.step, args.evaluation)[-1:]
    matches = record_filter(args, config)
    found = list(islice((r for file in files for r in read_rollouts(file) if matches(r)), args.episodes))
    if not found:
        if required:
            print_line(console, "No rollout matches.")
        return
    needs_tokens = args.tokens or any(has_rows(record.trajectory) for record in found)
    tokenizer = _find_tokenizer(folder, console) if needs_tokens else None
    print_line(console, f"\nFrom {files[0].relative_to(folder.path)}:")
    for record in found:
        print_record(console, record, tokenizer, as_tokens=args.tokens)


def find_rollouts(folder: RunFolder, step: int | None, evaluation: str | None) -> list[Path]:
    """Return the rollout files of a step, an evaluation or all steps, oldest first. Raises UserError if missing."""
    if evaluation is not None:
        name = evaluation.removesuffix(".jsonl.gz").removesuffix(".json")
        path = folder.evaluations / f"{name}.jsonl.gz"
        if path.is_file():
            return [path]
        known = sorted(file.name.removesuffix(".jsonl.gz") for file in folder.evaluations.glob("*.jsonl.gz"))
        raise UserError(f"The run has no evaluation {name!r}.", f"It has {', '.join(known) or 'none'}.")
    files = sorted(folder.rollouts.glob("step-*.jsonl.gz"))
    if step is None:
        return files
    if rollouts_path(folder.path, step) not in files:
        steps = [int(file.name[5:-9]) for file in files]
        available = f"from step {steps[0]} to {steps[-1]}" if steps else "of no step (run.save_rollouts may be off)"
        raise UserError(f"The run has no rollouts of step {step}.", f"It has rollouts {available}.")
    return [rollouts_path(folder.path, step)]


def record_filter(args: argparse.Namespace, config: Config) -> Callable[[RolloutRecord], bool]:
    """Return the predicate for --task, --failed and --solved."""
    rewards = build_world(config.env, config.rollout).rewards if args.failed or args.solved else ()

    def matches(record: RolloutRecord) -> bool:
        if args.task is not None and record.group != args.task:
            return False
        return not rewards or success(rewards, record.trajectory) == args.solved

    return matches


def _find_tokenizer(folder: RunFolder, console: Console) -> Tokenizer | None:
    """Return the tokenizer of the policy; print a warning and return None if there is none."""
    load_libraries()
    from ludus.engines.models.loading import load_tokenizer
    from ludus.training.run.run_dir import policy_path

    path = policy_path(folder)
    if path is None:
        print_text(console, "The run has no checkpoint and thus no tokenizer: printing messages.", "yellow")
        return None
    tokenizer: Tokenizer = load_tokenizer(str(path))
    return tokenizer
