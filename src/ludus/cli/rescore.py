"""Rewards replayed on saved rollouts: the world's parts, and the `rewards` section where they trained.

Rollouts of training steps go through the section as they did in training, step by step; those of evaluations
never do. Shared by `ludus show --rescore` and `ludus rewards replay`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, groupby
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table

from ludus.config.schema import Config
from ludus.envs.base import World
from ludus.envs.registry import build_world
from ludus.rewards.base import Reward, success
from ludus.rewards.presets import training_parts
from ludus.rewards.registry import judges_more
from ludus.rollout.reward_executor import ProcessRewardExecutor
from ludus.rollout.rollout_files import RolloutRecord, read_rollouts
from ludus.rollout.trees import map_paths
from ludus.types import Task, Trajectory

if TYPE_CHECKING:
    from ludus.training.collection.reward_mixing import RewardMixer


@dataclass(frozen=True, slots=True)
class Rescored:
    """A stored rollout, the name of its file, and its trajectory with rewards made anew."""

    place: str
    record: RolloutRecord
    now: Trajectory
    was_solved: bool
    is_solved: bool

    @property
    def changed(self) -> bool:
        """Whether the reward differs."""
        return self.record.trajectory.reward != self.now.reward

    @property
    def parts_changed(self) -> bool:
        """Whether a part differs, is new or is gone."""
        return dict(self.record.trajectory.rewards) != dict(self.now.rewards)

    @property
    def distance(self) -> float:
        """By how much the reward differs."""
        return abs(self.now.reward - self.record.trajectory.reward)


@dataclass(frozen=True)
class Replay:
    """All that were scored again; `num_failed` have no rewards, `unknown` are of tasks the world lacks."""

    rescored: Sequence[Rescored]
    num_failed: int
    unknown: Sequence[str]


def rescore(saved: Config, config: Config, files: Sequence[Path], wanted: Callable[[RolloutRecord], bool]) -> Replay:
    """Score the wanted rollouts of some files again, with the world and the section `rewards` of `config`.

    `saved` is the configuration that they were made with. With `rewards.normalise_by` the steps before those
    of the files are gone through as well. What the clock measured is 0 in rollouts. Raises WorldError where a
    reward raises, UserError for settings that do not fit.
    """
    world = build_world(config.env, config.rollout, config.sandbox)
    combiner = _combiner(config, world)
    before = training_parts(saved.rewards.preset, build_world(saved.env, saved.rollout).rewards)
    read = {file: list(read_rollouts(file)) for file in _with_earlier(files, config)}
    tasks = find_tasks(world, {record.group for records in read.values() for record in records})
    scores = asyncio.run(_scores(config, world, tasks, read))
    rescored: list[Rescored] = []
    chosen: list[RolloutRecord] = []
    for file, records in read.items():
        known, scored = _known_records(records, tasks), scores[file]
        trains = combiner is not None and _is_of_a_step(file)
        if combiner is not None and trains:
            scored = _combined(combiner, tasks, known, scored)
        if file not in files:
            continue
        after = training_parts(config.rewards.preset if trains else None, world.rewards)
        chosen += filter(wanted, records)
        rescored += [
            _compared(file, record, now, before, after)
            for record, now in zip(known, scored, strict=True)
            if wanted(record)
        ]
    finished = [record for record in chosen if record.trajectory.failure is None]
    unknown = {record.group for record in finished} - tasks.keys()
    return Replay(rescored, len(chosen) - len(finished), sorted(unknown))


def _with_earlier(files: Sequence[Path], config: Config) -> Sequence[Path]:
    """The files, after those of the steps before them where a scale is carried from step to step."""
    scale = config.rewards
    carried = scale.normalise_by is not None and scale.normalise_over == "run"
    if not carried or not files or not _is_of_a_step(files[0]):
        return files
    return [file for file in sorted(files[0].parent.glob("step-*.jsonl.gz")) if file <= files[-1]]


def _is_of_a_step(file: Path) -> bool:
    return file.parent.name == "rollouts"


def find_tasks(world: World, ids: set[str]) -> dict[str, Task]:
    """Tasks by id, from as few splits as hold them all."""
    found: dict[str, Task] = {}
    for split in world.splits:
        if ids <= found.keys():
            break
        found |= {task.id: task for task in world.tasks(split) if task.id in ids}
    return found


def _combiner(config: Config, world: World) -> RewardMixer | None:
    if config.rewards.is_default:
        return None
    from ludus.algorithms.spec.resolve import resolve
    from ludus.training.collection.reward_mixing import check_reward_settings, combiner_of, reads_turns

    check_reward_settings(config, world)
    return combiner_of(config, world, reads_turns(resolve(config.algorithm)))


def _combined(
    combiner: RewardMixer, tasks: dict[str, Task], records: Sequence[RolloutRecord], scored: Sequence[Trajectory]
) -> list[Trajectory]:
    """The rewards of one file's rollouts as training combines them, in the order of the records."""
    from ludus.rollout.scheduler import Episode

    found: dict[int, Trajectory] = {}
    steps = sorted(range(len(records)), key=lambda i: records[i].step)
    for step, members in groupby(steps, key=lambda i: records[i].step):
        groups: dict[str, list[int]] = {}
        for i in members:
            groups.setdefault(records[i].group, []).append(i)
        episodes = [
            [Episode(records[i].key, tasks[records[i].group], scored[i]) for i in places] for places in groups.values()
        ]
        combined = combiner.over_batch(list(chain(*combiner.combine(step, episodes))))
        for i, episode in zip(chain(*groups.values()), combined, strict=True):
            found[i] = episode.trajectory
    return [found[i] for i in range(len(records))]


def _compared(
    file: Path, record: RolloutRecord, now: Trajectory, before: Sequence[Reward], after: Sequence[Reward]
) -> Rescored:
    was_solved = success(_known(before, record.trajectory), record.trajectory)
    return Rescored(file.name.removesuffix(".jsonl.gz"), record, now, was_solved, success(after, now))


def _known(parts: Sequence[Reward], trajectory: Trajectory) -> Sequence[Reward]:
    """The parts, or those of them that are on record where some are (an evaluation has no preset's)."""
    known = [part for part in parts if part.name in trajectory.rewards]
    return known if any(part.outcome for part in known) else parts


def _known_records(records: Sequence[RolloutRecord], tasks: dict[str, Task]) -> list[RolloutRecord]:
    return [r for r in records if r.trajectory.failure is None and r.group in tasks]


async def _scores(
    config: Config, world: World, tasks: dict[str, Task], read: Mapping[Path, Sequence[RolloutRecord]]
) -> dict[Path, list[Trajectory]]:
    """The known rollouts of each file with the rewards of the world, and of training steps with those that
    the settings add."""
    scoring, adds = ProcessRewardExecutor.of(config), judges_more(config.rewards)

    async def one(record: RolloutRecord, trains: bool) -> Trajectory:
        task = tasks[record.group]

        async def path(trajectory: Trajectory) -> Trajectory:
            blank = replace(trajectory, rewards={}, reward=0.0)
            found = await scoring.scored(world, None, task, blank)
            return await scoring.with_added(world, task, found) if trains else found

        return await map_paths(record.trajectory, path)

    found = {}
    for file, records in read.items():
        trains = adds and _is_of_a_step(file)
        found[file] = await asyncio.gather(*(one(r, trains) for r in _known_records(records, tasks)))
    return found


def replay_words(replay: Replay) -> list[str]:
    """The result in sentences."""
    changed = sum(one.changed for one in replay.rescored)
    parts = sum(one.parts_changed and not one.changed for one in replay.rescored)
    told = [f"{changed} have another reward now"] if changed or parts else []
    told += [f"{parts} more have other parts and the same reward"] if parts else []
    said = ", ".join(told) or "all rewards are as they were, bit for bit"
    words = [f"{len(replay.rescored)} rollouts scored again: {said}."]
    lost = sum(one.was_solved and not one.is_solved for one in replay.rescored)
    won = sum(one.is_solved and not one.was_solved for one in replay.rescored)
    if lost or won:
        words.append(f"Success changed in {lost + won}: {won} succeed now that did not, {lost} no longer do.")
    if replay.num_failed:
        words.append(f"{replay.num_failed} more failed in the infrastructure and have no rewards.")
    if replay.unknown:
        words.append(f"{len(replay.unknown)} tasks are not in the world any more, for example {replay.unknown[0]}.")
    return words


def replay_table(replay: Replay) -> Table:
    """The mean of the reward and of each part, before and now, and how many rollouts changed in it.

    A part that no rollout has has no mean; one that is new or gone has changed. A rollout that lacks a part
    that others have counts as 0 in its mean, as it does in the sum.
    """
    columns = ("part", "mean as saved", "mean now", "rollouts that changed in it")
    table = _table("Rewards as saved and as scored now", *columns)
    names = dict.fromkeys(
        name for one in replay.rescored for name in (*one.record.trajectory.rewards, *one.now.rewards)
    )
    for name in names:
        pairs = [(o.record.trajectory.rewards.get(name), o.now.rewards.get(name)) for o in replay.rescored]
        table.add_row(name, *_means(pairs), str(sum(a != b for a, b in pairs)))
    totals = [(one.record.trajectory.reward, one.now.reward) for one in replay.rescored]
    table.add_row("reward", *_means(totals), str(sum(a != b for a, b in totals)))
    return table


def _means(pairs: Sequence[tuple[float | None, float | None]]) -> list[str]:
    columns = list(zip(*pairs, strict=True))
    return [
        "none" if all(v is None for v in column) else f"{_mean(v or 0.0 for v in column):.4f}" for column in columns
    ]


def places_table(replay: Replay) -> Table:
    """Reward and success before and now by step or evaluation, and by split."""
    columns = ("split", "rollouts", "reward as saved", "reward now", "success as saved", "now", "success changed")
    table = _table("By step or evaluation", "rollouts of", *columns)
    for (place, split), members in groupby(replay.rescored, key=lambda one: (one.place, _split(one))):
        found = list(members)
        rewards = (_mean(one.record.trajectory.reward for one in found), _mean(one.now.reward for one in found))
        solved = (_mean(one.was_solved for one in found), _mean(one.is_solved for one in found))
        changed = sum(one.was_solved != one.is_solved for one in found)
        numbers = (f"{number:.4f}" for number in (*rewards, *solved))
        table.add_row(place, split, str(len(found)), *numbers, str(changed))
    return table


def _split(one: Rescored) -> str:
    return one.now.tags.get("split", "")


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return sum(found) / len(found)


def changed_table(replay: Replay, num: int) -> Table:
    """The rollouts whose reward changed most."""
    table = _table(
        "Rollouts with other rewards, the largest changes",
        *("step", "task", "sample", "answer", "reward as saved", "reward now"),
    )
    changed = sorted((one for one in replay.rescored if one.changed), key=lambda one: -one.distance)
    for one in changed[:num]:
        record = one.record
        answer = one.now.answer if len(one.now.answer) <= 80 else f"{one.now.answer[:77]}..."
        row = (str(record.step), record.group, str(record.trajectory.sample), answer)
        table.add_row(*row, f"{record.trajectory.reward:g}", f"{one.now.reward:g}")
    return table


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title)
    for column in columns:
        table.add_column(column)
    return table
