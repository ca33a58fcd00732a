"""`ludus rewards judge`: calibrate the LLM judge of the settings against the verifier, on the rollouts of a run."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from ludus.cli.results.rewards import find_tasks
from ludus.cli.ui.fitted_table import FittedTable, TableColumn, make_table
from ludus.cli.ui.terminal import print_text
from ludus.config.schema import Config
from ludus.config.sections.parts.judges import POLICY_JUDGE
from ludus.envs.registry import build_world
from ludus.errors import UserError
from ludus.judges.calibration import Calibration, VerifiedEpisode, calibrate
from ludus.rewards.base import success
from ludus.rollouts.rollout_files import read_rollouts
from ludus.training.collection.rewards.judging import check_judge, load_judge, make_judge


def print_judge(console: Console, args: argparse.Namespace, config: Config, files: Sequence[Path]) -> None:
    """Calibrate the judge, print the result, and write it to `--out` if that is set. Raises UserError."""
    settings = config.rewards.judge
    if not settings.is_on:
        raise UserError("No judge is configured.", "Set --rewards.judge.models.")
    if args.texts < 1:
        raise UserError(f"--texts is {args.texts}.", "Set 1 or more.")
    world = build_world(config.env, config.rollout, config.sandbox)
    free = settings.model_copy(update={"calibration": None})
    config = config.model_copy(update={"rewards": config.rewards.model_copy(update={"judge": free})})
    check_judge(config, world, world.rewards)
    records = [one for file in files for one in read_rollouts(file) if one.trajectory.failure is None][: args.texts]
    tasks = find_tasks(world, {record.group for record in records})
    groups: dict[tuple[int, str], list[VerifiedEpisode]] = {}
    for record in records:
        if record.group in tasks:
            won = success(world.rewards, record.trajectory)
            episode = VerifiedEpisode(tasks[record.group], record.trajectory, won)
            groups.setdefault((record.step, record.group), []).append(episode)
    if not groups:
        raise UserError("The run has no completed rollouts of these tasks.", "Inspect it with `ludus show`.")
    policy = load_judge(str(args.run[0]), config) if POLICY_JUDGE in free.models else None
    judge = make_judge(config, world, None, policy)
    assert judge is not None

    async def calibrated() -> Calibration:
        try:
            return await calibrate(judge.grader, list(groups.values()))
        finally:
            await judge.close()
            if policy is not None:
                await policy[0].close()

    found = asyncio.run(calibrated())
    console.print(calibration_table(found))
    if found.injections:
        console.print(injection_table(found))
    if args.out is not None:
        found.write(args.out)
        print_text(
            console, f"--rewards.judge.calibration {args.out} --rewards.judge.min_kappa {max(0.0, found.kappa):.2f}"
        )


def calibration_table(found: Calibration) -> FittedTable:
    """Return the table of agreement and biases."""
    low, high = found.interval
    rows: list[tuple[str, str]] = [
        ("judged texts", f"{found.num_judged} of {found.num}"),
        ("Cohen's kappa with the verifier", f"{found.kappa:.2f} [{low:.2f}, {high:.2f}]"),
        ("agreement", f"{found.agreement:.0%}"),
    ]
    optional = {
        "AUC": found.auc,
        "correlation with length, within a verdict": found.length_bias,
        "pairs whose winner depends on the order": found.position_flips,
        "result of the first text of a pair": found.first_wins,
        "deviation of repeated values": found.repeat_std,
        "kappa with the rules of the world's rubric": found.leaf_kappa,
    }
    rows += [(name, f"{value:.2f}") for name, value in optional.items() if value is not None]
    return make_table(("measure", "value"), rows, f"Judge {', '.join(found.judges)}")


def injection_table(found: Calibration) -> FittedTable:
    """Return the table of the effects of injections on rejected texts, also in deviations of repeated values."""
    std = found.repeat_std
    rows = [
        (name, f"{effect:+.2f}", f"{effect / std:+.1f}" if std else "")
        for name, effect in sorted(found.injections.items(), key=lambda pair: -pair[1])
    ]
    return make_table(("injection", "change", TableColumn("in deviations", 1)), rows, "Values of rejected texts")
