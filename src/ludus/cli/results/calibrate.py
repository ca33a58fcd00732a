"""`ludus rewards calibrate`: turn rewards from the saved rollouts of a run."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from ludus.algorithms.algorithm import Algorithm
from ludus.algorithms.spec.resolve import algorithm_of
from ludus.cli.results.rewards import find_tasks
from ludus.cli.ui.fitted_table import FittedTable, TableColumn, make_table
from ludus.cli.ui.terminal import print_line, print_text
from ludus.config.schema import Config
from ludus.config.sections.rewards import RewardsConfig
from ludus.envs.base import World
from ludus.envs.registry import build_world
from ludus.errors import UserError
from ludus.evaluation.stats import cohens_kappa
from ludus.rewards.base import success
from ludus.rewards.registry import training_parts
from ludus.rollouts.reward_executor import ProcessRewardExecutor
from ludus.rollouts.rollout_files import read_rollouts
from ludus.rollouts.scheduler import Episode
from ludus.training.credit import turn_rewards
from ludus.training.credit.advantages import BASELINE
from ludus.training.credit.turn_rewards import Alignment, EventRewards
from ludus.types import Task, Trajectory


def print_calibration(console: Console, config: Config, files: Sequence[Path], threshold: float) -> None:
    """Print turn events, their correlation with success, their alignment, and the resulting settings."""
    world = build_world(config.env, config.rollout, config.sandbox)
    groups = recorded_groups(config, world, files)
    parts = training_parts(config.rewards, world.rewards)
    attempts = [(one.trajectory, success(parts, one.trajectory)) for group in groups for one in group]
    if not attempts:
        raise UserError("The run has no completed rollouts.", "Inspect it with `ludus show`.")
    weights = [config.rewards.weights.get(p.name, p.weight) for p in parts if p.outcome]
    found = turn_rewards.calibrate(attempts, config.rollout.max_turns, min(w for w in weights if w > 0), threshold)
    algorithm = turn_rewards.calibration_algorithm(algorithm_of(config))
    rounds = turn_rewards.align(groups, found.rewards, algorithm)
    console.print(_tier_table(found, rounds[0]))
    num, verifier = sum(won for _, won in attempts), next(p.name for p in parts if p.outcome)
    print_text(console, f"{num} of {len(attempts)} attempts succeeded. Reward = {found.scale:.3g} * correlation.")
    print_text(console, "\n".join(agreement_lines([one for one, _ in attempts], verifier)))
    if config.rewards.turns:
        misaligned = turn_rewards.measure(groups, config.rewards.turns, algorithm).misaligned
        state = f"misaligned on these attempts: {', '.join(misaligned)}" if misaligned else "aligned on these attempts"
        print_text(console, f"The rewards.turns of the run are {state}.")
    _print_rounds(console, rounds, algorithm)
    if not found.rewards:
        print_text(console, "No event separates success from failure.")


def agreement_lines(trajectories: Sequence[Trajectory], verifier: str) -> list[str]:
    """Return Cohen's kappa with the verifier for each other reward part with both decisions 0 and 1, as text."""
    rows = [one.rewards for one in trajectories if verifier in one.rewards]
    lines = []
    for name in sorted({name for row in rows for name in row} - {verifier}):
        pairs = [(row[name], row[verifier] >= 1) for row in rows if name in row]
        decisions = [value == 1 for value, _ in pairs]
        if {value for value, _ in pairs} != {0.0, 1.0}:
            continue
        found = cohens_kappa(decisions, [won for _, won in pairs])
        both, only, others, neither = found.counts
        kappa = f"{found.estimate:.2f} [{found.low:.2f}, {found.high:.2f}]"
        counts = f"accepted by both {both}, only {name} {only}, only {verifier} {others}, neither {neither}"
        lines.append(f"Agreement of {name} with {verifier}: kappa {kappa} ({counts}).")
    return lines


def recorded_groups(config: Config, world: World, files: Sequence[Path]) -> list[list[Episode]]:
    """Return the completed rollouts by step and task, with their turn progress and without `rewards.turns`."""
    removed = {event: -reward for event, reward in config.rewards.turns.items()}
    groups: dict[tuple[str, int, str], list[Episode]] = {}
    for file in files:
        for record in read_rollouts(file):
            one = record.trajectory
            if one.failure is not None or record.reason == BASELINE:
                continue
            if file.parent.name == "rollouts":
                one = turn_rewards.with_turn_rewards(one, removed)
            group = groups.setdefault((str(file), record.step, record.group), [])
            group.append(Episode(record.key, Task(record.group, (), None), one))
    found = iter(_verified(config, world, [episode for group in groups.values() for episode in group]))
    return [[next(found) for _ in group] for group in groups.values()]


def _verified(config: Config, world: World, episodes: Sequence[Episode]) -> list[Episode]:
    """Return the episodes with the results of the world's turn verifier, computed unless recorded."""
    if world.turn_verifier is None:
        return list(episodes)
    tasks = find_tasks(world, {episode.task.id for episode in episodes})
    verifier_config = config.model_copy(update={"rewards": RewardsConfig(turn_verifier_weight=1.0)})
    scoring = ProcessRewardExecutor.of(verifier_config)

    async def one(episode: Episode) -> Episode:
        trajectory, task = episode.trajectory, tasks.get(episode.task.id)
        if trajectory.turn_progress or task is None:
            return episode
        verified_trajectory = await scoring.with_added(world, task, trajectory)
        return replace(episode, trajectory=replace(trajectory, turn_progress=verified_trajectory.turn_progress))

    async def verified() -> list[Episode]:
        return await asyncio.gather(*map(one, episodes))

    return asyncio.run(verified())


def _tier_table(found: EventRewards, first: Alignment) -> FittedTable:
    columns = (found.found.in_success, found.found.in_failure, found.found.correlation, found.found.reward)
    rows = []
    for (event, count), *row in zip(found.counts.items(), *(c.tolist() for c in columns), strict=True):
        won, lost, correlation, reward = row
        aligned = "no" if event in first.misaligned else "yes" if reward else ""
        numbers = (f"{won:.0%}", f"{lost:.0%}", f"{correlation:+.2f}", f"{reward:+.4f}")
        rows.append((event, count, *numbers, f"{first.advantages.get(event, 0.0):+.3f}", aligned))
    shares = (TableColumn("in successes", 2), TableColumn("in failures", 2), TableColumn("correlation", 1))
    titles = ("event", TableColumn("turns", 1), *shares, "reward", TableColumn("advantage", 1), "aligned")
    return make_table(titles, rows)


def _print_rounds(console: Console, rounds: Sequence[Alignment], algorithm: Algorithm) -> None:
    removed = False
    for number, one in enumerate(rounds, start=1):
        if one.misaligned:
            events = f"with the advantage {algorithm.advantage}, {', '.join(one.misaligned)}"
            print_text(console, f"Round {number}: {events} would get the opposite sign; the reward is removed.")
            removed = True
    if rounds[-1].rewards:
        print_text(console, f"All rewards below are aligned with the advantage {algorithm.advantage}.")
    elif removed:
        print_text(console, "No aligned reward remains.")
    for event, reward in rounds[-1].rewards.items():
        print_line(console, f"--rewards.turns.{event} {reward:.4g}")
