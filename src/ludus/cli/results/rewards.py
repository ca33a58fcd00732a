"""Score saved rollouts again, derive turn rewards from them, or calibrate an LLM judge on them."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, groupby
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from ludus.cli.results.show import find_rollouts, record_filter
from ludus.cli.ui.fitted_table import FittedTable, TableColumn, make_table
from ludus.cli.ui.terminal import announce, load_libraries, make_console, print_text
from ludus.config.load import config_from_toml, load_config
from ludus.config.schema import Config
from ludus.config.sections.parts.terms import LEARNER_KINDS
from ludus.config.toml import to_toml
from ludus.envs.base import World
from ludus.envs.registry import build_world
from ludus.errors import ConfigError, UserError
from ludus.rewards.base import success
from ludus.rewards.registry import JUDGE_DEFAULT, JUDGE_PART, has_extra_rewards, preset_parts
from ludus.rollouts.reward_executor import ProcessRewardExecutor
from ludus.rollouts.rollout_files import RolloutRecord, read_rollouts
from ludus.rollouts.scheduler import Episode
from ludus.rollouts.trees import map_paths
from ludus.training.run.run_dir import RunFolder
from ludus.types import Task, Trajectory

if TYPE_CHECKING:
    from ludus.training.collection.rewards.reward_mixing import RewardMixer


_JUDGED = (JUDGE_PART, JUDGE_DEFAULT)
"""Parts of judges, which a replay takes from the rollouts."""


def run(args: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Print replayed or calibrated rewards, or the calibration of a judge."""
    if args.episodes < 0:
        raise UserError(f"--episodes is {args.episodes}.", "Set 0 or more.")
    if args.action in ("calibrate", "auc") and (args.config is not None or overrides):
        raise UserError(f"`ludus rewards {args.action}` takes no settings.", "It uses those of the run.")
    if args.action == "auc":
        load_libraries()
        from ludus.cli.results.reward_auc import print_auc

        print_auc(make_console(), args.run, args.model or (), args.every)
        return 0
    if len(args.run) > 1:
        raise UserError(f"`ludus rewards {args.action}` reads one run.", "Name one run folder.")
    folder = RunFolder(args.run[0])
    saved = folder.load_config()
    if args.action == "calibrate":
        load_libraries()
        from ludus.cli.results.calibrate import print_calibration

        print_calibration(make_console(), saved, chosen_files(args, folder), args.threshold)
        return 0
    config = _other_config(saved, args.config, overrides)
    if args.action == "judge":
        load_libraries()
        from ludus.cli.results.judge import print_judge

        print_judge(make_console(), args, config, chosen_files(args, folder))
        return 0
    now, before = config.rewards.judge, saved.rewards.judge
    if now.is_on and now.model_copy(update={"weight": before.weight}) != before:
        text = "A replay uses the recorded values of the judge, but the settings are of another one."
        raise ConfigError(text, "Change only rewards.judge.weight, or compare judges with `ludus rewards judge`.")
    announce("Scoring the saved rollouts ...")
    replay = rescore(saved, config, chosen_files(args, folder), record_filter(args, config))
    console = make_console()
    for text in summary(replay):
        print_text(console, text)
    if replay.rescored:
        console.print(parts_table(replay))
        console.print(_files_table(replay))
    if args.episodes > 0 and any(one.changed for one in replay.rescored):
        console.print(_changes_table(replay, args.episodes))
    return 0


def _other_config(saved: Config, file: Path | None, overrides: Sequence[str]) -> Config:
    """Return the run's configuration with the sections `rewards` and, if present, `env` of a file."""
    if file is not None:
        other = load_config(file)
        if not {"rewards", "env"} & other.model_fields_set:
            raise ConfigError(f"{file} has no section rewards and no section env.", "Add a table [rewards].")
        sections = {"rewards": other.rewards} | ({"env": other.env} if "env" in other.model_fields_set else {})
        saved = saved.model_copy(update=sections)
    return config_from_toml(to_toml(saved), "the run, the file and the command line", overrides)


def chosen_files(args: argparse.Namespace, folder: RunFolder) -> list[Path]:
    """Return the rollout files to read, oldest first. Raises UserError if there are none."""
    every = sorted(folder.evaluations.glob("*.jsonl.gz"))
    files = every if args.evaluations else find_rollouts(folder, args.step, args.evaluation)
    if not files:
        raise UserError("The run has no saved rollouts of this kind.", "run.save_rollouts may be off.")
    return files


@dataclass(frozen=True, slots=True)
class Rescored:
    """A stored rollout, the name of its file, and its trajectory with recomputed rewards."""

    file: str
    record: RolloutRecord
    now: Trajectory
    was_solved: bool
    is_solved: bool

    @property
    def changed(self) -> bool:
        """Whether the reward differs."""
        return self.record.trajectory.reward != self.now.reward


@dataclass(frozen=True)
class Replay:
    """The rescored rollouts, the number of failed ones, and the ids of tasks that are not in the world."""

    rescored: Sequence[Rescored]
    num_failed: int
    unknown: Sequence[str]


def rescore(saved: Config, config: Config, files: Sequence[Path], wanted: Callable[[RolloutRecord], bool]) -> Replay:
    """Score rollouts that were sampled with `saved` again, with the world and the section `rewards` of `config`.

    With `rewards.normalise_by` or `rewards.constraint` all earlier steps are scored as well, to reproduce the state.
    Raises UserError if a part needs the policy's logits.
    """
    if config.rewards.unsupervised.kind in LEARNER_KINDS:
        text = f"rewards.unsupervised.kind = {config.rewards.unsupervised.kind} needs the policy of each step."
        raise UserError(text, "Set another one: --rewards.unsupervised.kind none.")
    world = build_world(config.env, config.rollout, config.sandbox)
    mixer = _reward_mixer(config, world)
    before = preset_parts(saved.rewards.preset, build_world(saved.env, saved.rollout).rewards)
    settings, to_read = config.rewards, files
    has_state = settings.constraint.part or (settings.normalise_by and settings.normalise_over == "run")
    if has_state and files and _is_training_file(files[0]):
        to_read = [file for file in sorted(files[0].parent.glob("step-*.jsonl.gz")) if file <= files[-1]]
    read = {file: list(read_rollouts(file)) for file in to_read}
    tasks = find_tasks(world, {record.group for records in read.values() for record in records})
    scores = asyncio.run(_scores(config, world, tasks, read))
    rescored: list[Rescored] = []
    chosen: list[RolloutRecord] = []
    for file, records in read.items():
        known, scored = _known_records(records, tasks), scores[file]
        is_training = mixer is not None and _is_training_file(file)
        if mixer is not None and is_training:
            scored = _combined(mixer, tasks, known, scored)
        if file not in files:
            continue
        after = preset_parts(config.rewards.preset if is_training else None, world.rewards)
        chosen += filter(wanted, records)
        for record, now in zip(known, scored, strict=True):
            if wanted(record):
                # evaluations have no preset parts: without a recorded outcome all parts count
                recorded = [part for part in before if part.name in record.trajectory.rewards]
                parts = recorded if any(part.outcome for part in recorded) else before
                was_solved = success(parts, record.trajectory)
                name = file.name.removesuffix(".jsonl.gz")
                rescored.append(Rescored(name, record, now, was_solved, success(after, now)))
    finished = [record for record in chosen if record.trajectory.failure is None]
    unknown = {record.group for record in finished} - tasks.keys()
    return Replay(rescored, len(chosen) - len(finished), sorted(unknown))


def _is_training_file(file: Path) -> bool:
    return file.parent.name == "rollouts"


def find_tasks(world: World, ids: set[str]) -> dict[str, Task]:
    """Return tasks by id, reading as few splits as possible."""
    found: dict[str, Task] = {}
    for split in world.splits:
        if ids <= found.keys():
            break
        found |= {task.id: task for task in world.tasks(split) if task.id in ids}
    return found


def _reward_mixer(config: Config, world: World) -> RewardMixer | None:
    if config.rewards.is_default:
        return None
    from ludus.algorithms.algorithm import Need
    from ludus.algorithms.spec.resolve import resolve
    from ludus.training.collection.rewards.reward_mixing import build_reward_mixer
    from ludus.training.collection.rewards.reward_plan import check_reward_settings

    check_reward_settings(config, world)
    return build_reward_mixer(config, world, resolve(config.algorithm).advantage_spec.has(Need.OPTIONAL_TURN_REWARDS))


def _combined(
    mixer: RewardMixer, tasks: dict[str, Task], records: Sequence[RolloutRecord], scored: Sequence[Trajectory]
) -> list[Trajectory]:
    """Return the trajectories of one file with rewards combined as in training, in the order of the records."""
    found: dict[int, Trajectory] = {}
    steps = sorted(range(len(records)), key=lambda i: records[i].step)
    for step, members in groupby(steps, key=lambda i: records[i].step):
        groups: dict[str, dict[int, Episode]] = {}
        for i in members:
            group = groups.setdefault(records[i].group, {})
            group[i] = Episode(records[i].key, tasks[records[i].group], scored[i])
        combined = mixer.combine(step, [list(group.values()) for group in groups.values()])
        episodes = mixer.normalize_batch(list(chain(*combined)))
        found |= zip(chain(*groups.values()), (episode.trajectory for episode in episodes), strict=True)
    return [found[i] for i in range(len(records))]


def _known_records(records: Sequence[RolloutRecord], tasks: dict[str, Task]) -> list[RolloutRecord]:
    return [r for r in records if r.trajectory.failure is None and r.group in tasks]


async def _scores(
    config: Config, world: World, tasks: dict[str, Task], read: Mapping[Path, Sequence[RolloutRecord]]
) -> dict[Path, list[Trajectory]]:
    """Return the known rollouts of each file with the rewards of the world and, for training steps, added parts."""
    scoring, adds = ProcessRewardExecutor.of(config), has_extra_rewards(config.rewards)
    judged = (*_JUDGED, config.rewards.judge.rule)

    def kept(trajectory: Trajectory) -> dict[str, float]:
        return {name: value for name, value in trajectory.rewards.items() if name in judged}

    async def rescored(record: RolloutRecord, is_training: bool) -> Trajectory:
        task = tasks[record.group]

        async def rescored_path(trajectory: Trajectory) -> Trajectory:
            blank = replace(trajectory, rewards={}, reward=0.0)
            found = await scoring.scored(world, None, task, blank)
            found = replace(found, rewards={**kept(trajectory), **found.rewards})
            return await scoring.with_added(world, task, found) if is_training else found

        return await map_paths(record.trajectory, rescored_path)

    found = {}
    for file, records in read.items():
        is_training = adds and _is_training_file(file)
        found[file] = await asyncio.gather(*(rescored(r, is_training) for r in _known_records(records, tasks)))
    return found


def summary(replay: Replay) -> list[str]:
    """Describe the result in sentences."""
    changed = sum(one.changed for one in replay.rescored)
    parts = sum(not o.changed and dict(o.record.trajectory.rewards) != dict(o.now.rewards) for o in replay.rescored)
    counts = [f"{changed} have a changed reward"] if changed or parts else []
    counts += [f"{parts} more have changed parts and the same reward"] if parts else []
    what = ", ".join(counts) or "all rewards are unchanged, bit for bit"
    words = [f"{len(replay.rescored)} rollouts scored again: {what}."]
    lost = sum(one.was_solved and not one.is_solved for one in replay.rescored)
    won = sum(one.is_solved and not one.was_solved for one in replay.rescored)
    if lost or won:
        words.append(f"Success changed in {lost + won}: {won} succeed now that failed, {lost} fail now that succeeded.")
    if replay.num_failed:
        words.append(f"{replay.num_failed} more had an infrastructure failure and have no rewards.")
    if replay.unknown:
        words.append(f"{len(replay.unknown)} tasks are no longer in the world, for example {replay.unknown[0]}.")
    return words


def parts_table(replay: Replay) -> FittedTable:
    """Return a table of the mean reward and parts, as saved and now; a missing part counts as changed and as 0."""
    both = [(one.record.trajectory, one.now) for one in replay.rescored]
    names = dict.fromkeys(name for before, now in both for name in (*before.rewards, *now.rewards))
    named: list[tuple[str, list[tuple[float | None, float | None]]]]
    named = [(name, [(a.rewards.get(name), b.rewards.get(name)) for a, b in both]) for name in names]
    named.append(("reward", [(a.reward, b.reward) for a, b in both]))
    rows = []
    for name, pairs in named:
        sides = list(zip(*pairs, strict=True))
        means = ["none" if {*side} == {None} else f"{fmean(v or 0.0 for v in side):.4f}" for side in sides]
        rows.append((name, *means, sum(a != b for a, b in pairs)))
    columns = ("part", "mean as saved", "mean now", "changed rollouts")
    return make_table(columns, rows, "Rewards as saved and as scored now")


def _files_table(replay: Replay) -> FittedTable:
    rows: list[tuple[object, ...]] = []
    for (file, split), members in groupby(replay.rescored, key=lambda o: (o.file, o.now.tags.get("split"))):
        found = list(members)
        rewards = (fmean(one.record.trajectory.reward for one in found), fmean(one.now.reward for one in found))
        solved = (fmean(one.was_solved for one in found), fmean(one.is_solved for one in found))
        numbers = (f"{number:.4f}" for number in (*rewards, *solved))
        rows.append((file, split, len(found), *numbers, sum(one.was_solved != one.is_solved for one in found)))
    shown = (TableColumn("rollouts", 1), TableColumn("reward as saved", 2), TableColumn("reward now", 2))
    columns = ("file", "split", *shown, "success as saved", "success now", TableColumn("success changed", 1))
    return make_table(columns, rows, "By step or evaluation")


def _changes_table(replay: Replay, num: int) -> FittedTable:
    changed = [one for one in replay.rescored if one.changed]
    changed.sort(key=lambda one: -abs(one.now.reward - one.record.trajectory.reward))
    rows: list[tuple[object, ...]] = []
    for one in changed[:num]:
        answer = one.now.answer if len(one.now.answer) <= 80 else f"{one.now.answer[:77]}..."
        before = one.record.trajectory
        row = (one.record.step, one.record.group, before.sample, answer)
        rows.append((*row, f"{before.reward:g}", f"{one.now.reward:g}"))
    text = TableColumn("answer", wrap=True)
    columns = (TableColumn("step", 1), "task", TableColumn("sample", 1), text, "reward as saved", "reward now")
    return make_table(columns, rows, "Largest changes of the reward")
