"""Export the rollouts of a run to formats of other tools."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path

from ludus.cli.results.show import find_rollouts, record_filter
from ludus.cli.ui.terminal import make_console, print_line
from ludus.envs.registry import build_world
from ludus.errors import StorageError, UserError
from ludus.evaluation.exports import LogHeader, ScoredRecord, write_hf_dataset, write_inspect, write_sharegpt
from ludus.rewards.base import success
from ludus.rollouts.rollout_files import read_rollouts
from ludus.training.datasets.files import parse_record
from ludus.training.run.run_dir import RunFolder


def run(args: argparse.Namespace, overrides: Sequence[str]) -> None:
    """Write the rollouts to the targets."""
    folder = RunFolder(args.run)
    config = folder.load_config()
    targets = [path for path in (args.inspect, args.hf_dataset, args.sharegpt) if path is not None]
    if not targets:
        raise UserError("No target is given.", "Add --inspect, --hf-dataset or --sharegpt.")
    files, matches = chosen_files(args, folder), record_filter(args, config)
    rewards = build_world(config.env, config.rollout).rewards

    def records() -> Iterator[ScoredRecord]:
        found = (r for file in files for r in read_rollouts(file) if matches(r))
        first = next(found, None)
        if first is None:
            raise UserError("No rollout matches.", "Check --steps, --task, --failed and --solved.")
        for record in chain([first], found):
            yield ScoredRecord(record, success(rewards, record.trajectory))

    next(records())
    for path in targets:
        _prepare_target(path, args.overwrite)
    console = make_console()
    if args.inspect:
        created = datetime.fromtimestamp(folder.config.stat().st_mtime, UTC).isoformat()
        count = write_inspect(args.inspect, records(), LogHeader(config.env.name, "ludus/policy", created))
        print_line(console, f"{args.inspect}: {count:,} rollouts")
    if args.hf_dataset:
        print_line(console, f"{args.hf_dataset}: {write_hf_dataset(args.hf_dataset, records()):,} rollouts")
    if args.sharegpt:
        count = write_sharegpt(args.sharegpt, records(), parse_record)
        print_line(console, f"{args.sharegpt}: {count:,} rollouts; those that ShareGPT cannot represent are left out")


def chosen_files(args: argparse.Namespace, folder: RunFolder) -> list[Path]:
    """Return the rollout files to export. Raises UserError if --steps is invalid or there are none."""
    files = find_rollouts(folder, None, args.evaluation)
    if args.steps is not None:
        found = re.fullmatch(r"(\d*):(\d*)", args.steps)
        if found is None:
            raise UserError(f"--steps is {args.steps!r}.", "Give two steps, for example 1:10.")
        low, high = int(found[1] or 0), int(found[2] or 10**9)
        files = [file for file in files if low <= int(file.name[5:-9]) <= high]
    if not files:
        raise UserError("The run has no saved rollouts of these steps.", "run.save_rollouts may be off.")
    return files


def _prepare_target(path: Path, overwrite: bool) -> None:
    """Raise UserError if a target exists; with `overwrite`, remove Inspect logs of an earlier export."""
    try:
        exists = any(path.iterdir()) if path.is_dir() else path.exists()
        if exists and not overwrite:
            raise UserError(f"{path} exists.", "Choose another target, or add --overwrite.")
        for file in path.glob("part-*-steps-*.eval") if path.is_dir() else ():
            file.unlink()
    except OSError as error:
        raise StorageError(f"{path} cannot be written: {error.strerror}.", "Choose another target.") from error
