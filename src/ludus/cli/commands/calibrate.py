"""`ludus rewards calibrate`: rewards of turns from the recorded attempts of a run."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from ludus.algorithms.spec.algorithm import Algorithm
from ludus.algorithms.spec.resolve import algorithm_of
from ludus.cli.rescore import find_tasks
from ludus.cli.ui.terminal import say
from ludus.config.schema import Config
from ludus.config.sections.rewards import RewardsConfig
from ludus.envs.base import World
from ludus.envs.registry import build_world
from ludus.errors import UserError
from ludus.rewards.base import success
from ludus.rollout.reward_executor import ProcessRewardExecutor
from ludus.rollout.rollout_files import read_rollouts
from ludus.rollout.scheduler import Episode
from ludus.training.collection.reward_mixing import parts_of
from ludus.training.credit.advantages import BASELINE
from ludus.training.credit.turn_rewards import (
    Alignment,
    EventRewards,
    align,
    calibrate,
    calibration_algorithm,
    measure,
    with_turn_rewards,
)
from ludus.types import Task


def print_calibration(console: Console, config: Config, files: Sequence[Path], threshold: float) -> None:
    """Print the events of turns, what they say of success, their alignment, and the settings that reward
    them."""
    world = build_world(config.env, config.rollout, config.sandbox)
    groups = recorded_groups(config, world, files)
    parts = parts_of(config, world)
    attempts = [(one.trajectory, success(parts, one.trajectory)) for group in groups for one in group]
    if not attempts:
        raise UserError("The run has no attempt that came to an end.", "Look at it with `ludus show`.")
    weights = [config.rewards.weights.get(p.name, p.weight) for p in parts if p.outcome]
    found = calibrate(attempts, config.rollout.max_turns, min(w for w in weights if w > 0), threshold)
    algorithm = calibration_algorithm(algorithm_of(config))
    rounds = align(groups, found.rewards, algorithm)
    console.print(tier_table(found, rounds[0]))
    num = sum(won for _, won in attempts)
    say(console, f"{num} of {len(attempts)} attempts succeeded. Rewards are {found.scale:.3g} correlations.")
    for line in [*_of_run(groups, config, algorithm), *_round_lines(rounds, algorithm)]:
        say(console, line)
    for event, reward in rounds[-1].rewards.items():
        say(console, f"--rewards.turns.{event} {reward:.4g}")
    if not found.rewards:
        say(console, "No event tells success from failure.")


def recorded_groups(config: Config, world: World, files: Sequence[Path]) -> list[list[Episode]]:
    """The recorded attempts that ended, by step and task, with the progress of their turns.

    Their turn rewards are those without `rewards.turns` of the run, which evaluations never have.
    """
    removed = {event: -reward for event, reward in config.rewards.turns.items()}
    groups: dict[tuple[str, int, str], list[Episode]] = {}
    for file in files:
        for record in read_rollouts(file):
            one = record.trajectory
            if one.failure is not None or record.reason == BASELINE:
                continue
            if file.parent.name == "rollouts":
                one = with_turn_rewards(one, removed)
            group = groups.setdefault((str(file), record.step, record.group), [])
            group.append(Episode(record.key, Task(record.group, (), None), one))
    found = iter(_verified(config, world, [episode for group in groups.values() for episode in group]))
    return [[next(found) for _ in group] for group in groups.values()]


def _verified(config: Config, world: World, episodes: Sequence[Episode]) -> list[Episode]:
    """With what the world's turn verifier finds, computed in a reward process where it is not recorded."""
    if world.turn_verifier is None:
        return list(episodes)
    tasks = find_tasks(world, {episode.task.id for episode in episodes})
    asked = config.model_copy(update={"rewards": RewardsConfig(turn_verifier_weight=1.0)})
    scoring = ProcessRewardExecutor.of(asked)

    async def one(episode: Episode) -> Episode:
        trajectory, task = episode.trajectory, tasks.get(episode.task.id)
        if trajectory.turn_progress or task is None:
            return episode
        judged = await scoring.with_added(world, task, trajectory)
        return replace(episode, trajectory=replace(trajectory, turn_progress=judged.turn_progress))

    async def every() -> list[Episode]:
        return await asyncio.gather(*map(one, episodes))

    return asyncio.run(every())


def tier_table(found: EventRewards, first: Alignment) -> Table:
    """Each event with its counts, its reward, and the mean advantage of its turns under these rewards."""
    table = Table(*("event", "turns", "in successes", "in failures", "correlation", "reward", "advantage", "aligned"))
    columns = (found.found.in_success, found.found.in_failure, found.found.correlation, found.found.reward)
    for (event, count), *row in zip(found.counts.items(), *(c.tolist() for c in columns), strict=True):
        won, lost, correlation, reward = row
        aligned = "no" if event in first.misaligned else "yes" if reward else ""
        numbers = (f"{won:.0%}", f"{lost:.0%}", f"{correlation:+.2f}", f"{reward:+.4f}")
        table.add_row(event, str(count), *numbers, f"{first.advantages.get(event, 0.0):+.3f}", aligned)
    return table


def _of_run(groups: Sequence[Sequence[Episode]], config: Config, algorithm: Algorithm) -> list[str]:
    """What became of the rewards that the run had."""
    if not config.rewards.turns:
        return []
    bad = measure(groups, config.rewards.turns, algorithm).misaligned
    told = f"misaligned on these attempts: {', '.join(bad)}" if bad else "aligned on these attempts"
    return [f"The rewards.turns of the run are {told}."]


def _round_lines(rounds: Sequence[Alignment], algorithm: Algorithm) -> list[str]:
    """What each round removed, and where it ended."""
    found = [
        f"Round {number}: the advantage {algorithm.advantage} pushes {', '.join(one.misaligned)} against "
        f"the sign of the reward, which is removed."
        for number, one in enumerate(rounds, start=1)
        if one.misaligned
    ]
    if rounds[-1].rewards:
        found.append(f"All rewards below are aligned with the advantage {algorithm.advantage}.")
    elif found:
        found.append("No reward of an event is left that is aligned.")
    return found
