"""Show how the tasks of an evaluation or a training step were solved, with 95 % intervals over tasks."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from ludus.cli.results.rewards import find_tasks
from ludus.cli.results.show import find_rollouts
from ludus.cli.ui.fitted_table import FittedTable, TableColumn, make_table, write_result_files
from ludus.cli.ui.terminal import make_console, print_line
from ludus.envs.base import World
from ludus.envs.registry import build_world
from ludus.errors import UserError
from ludus.evaluation.analysis import behavior
from ludus.evaluation.analysis.behavior import RETRIEVAL_TOOLS, Amount, AttemptedTask, ByTask
from ludus.evaluation.comparison import StoredEvaluation, load_stored, newest_evaluations
from ludus.evaluation.tables import format_rate
from ludus.rewards.base import success
from ludus.rewards.exact_match import ExpectedAnswers
from ludus.rollouts.rollout_files import read_rollouts
from ludus.training.run.run_dir import RunFolder
from ludus.types import WORLD_TAG

Behavior = Mapping[str, ByTask]


def run(args: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Print the measures, or the comparison."""
    second = args.against.parent.parent if args.against and args.against.suffix == ".json" else args.against
    folders = [RunFolder(path) for path in (args.run, second) if path is not None]
    configs = [folder.load_config() for folder in folders]
    files, console = chosen_files(args, folders), make_console()
    found = []
    for letter, config, file in zip("AB", configs, files, strict=False):
        print_line(console, f"{f'{letter}: ' if args.against else ''}{file}")
        found.append(measure_file(file, build_world(config.env, config.rollout)))
    table = _behavior_table(found[0]) if len(found) == 1 else _change_table(*found)
    console.print(table)
    write_result_files(args, _behavior_data(found, files), [table])
    return 0


def chosen_files(args: argparse.Namespace, folders: Sequence[RunFolder]) -> list[Path]:
    """Return the rollout file of each run. Raises UserError if one is missing."""
    if args.step is not None:
        return [find_rollouts(folder, args.step, None)[0] for folder in folders]
    if args.evaluation is not None:
        first = find_rollouts(folders[0], None, args.evaluation)[0].name.removesuffix(".jsonl.gz")
    else:
        first = max(newest_evaluations(folders[0].path).values(), key=_precedence).name
    names = [first]
    if args.against is not None and args.against.suffix == ".json":
        names.append(args.against.stem)
    elif folders[1:]:
        plan = load_stored(folders[0].evaluations / f"{first}.json").result.plan
        others = newest_evaluations(folders[1].path)
        key = (plan.split, plan.temperature, plan.samples, plan.num_tasks)
        if key not in others:
            text = f"The second run has no evaluation with the split, sampling and number of tasks of {first}."
            raise UserError(text, f"It has {', '.join(one.name for one in others.values())}.")
        names.append(others[key].name)
    pairs = zip(folders, names, strict=True)
    return [find_rollouts(folder, None, name)[0] for folder, name in pairs]


def _precedence(stored: StoredEvaluation) -> tuple[bool, int, int, str, float]:
    plan = stored.result.plan
    return not plan.policy, plan.step, plan.num_tasks * plan.samples, plan.split, plan.temperature


def measure_file(file: Path, world: World) -> dict[str, ByTask]:
    """Return the measures of the episodes of a file except infrastructure failures; a tree is one episode per path."""
    tasks = find_tasks(world, {record.group for record in read_rollouts(file)})
    firsts = {task.tags.get(WORLD_TAG): task for task in tasks.values()}
    tools = {name: [tool.name for tool in world.environment(task).tools] for name, task in firsts.items()}
    retrieving = {name for name, own in tools.items() if any(word in tool for tool in own for word in RETRIEVAL_TOOLS)}

    def attempts() -> Iterator[AttemptedTask]:
        for record in read_rollouts(file):
            task = tasks.get(record.group)
            answers = tuple(task.truth.accepted) if task and isinstance(task.truth, ExpectedAnswers) else ()
            retrieves = task is not None and task.tags.get(WORLD_TAG) in retrieving
            if record.trajectory.failure is None:
                for path in record.trajectory.attempts():
                    yield AttemptedTask(path, success(world.rewards, path), answers, retrieves)

    return behavior.measure_behavior(attempts())


def _behavior_table(found: Behavior) -> FittedTable:
    means = [(name, behavior.mean_amount(name, values)) for name, values in found.items() if values]
    rows = [(name, format_amount(name, one), one.num_tasks, behavior.MEASURES[name]) for name, one in means]
    columns = ("measure", "mean", TableColumn("tasks", 1), TableColumn("counts", 2, wrap=True))
    return make_table(columns, rows, "Behavior, with 95 % intervals over tasks")


def _change_table(a: Behavior, b: Behavior) -> FittedTable:
    rows = []
    for name, change in _changes(a, b).items():
        means = (format_amount(name, behavior.mean_amount(name, one[name])) for one in (a, b))
        rows.append((name, *means, format_amount(name, change, sign="+"), change.num_tasks))
    columns = ("measure", TableColumn("A", 2), TableColumn("B", 2), "B - A", TableColumn("tasks", 1))
    return make_table(columns, rows, "Behavior, with 95 % intervals over tasks; differences over common tasks")


def _changes(a: Behavior, b: Behavior) -> dict[str, Amount]:
    changes = ((name, behavior.paired_change(name, a[name], b[name])) for name in behavior.MEASURES)
    return {name: change for name, change in changes if change is not None}


def format_amount(name: str, one: Amount, sign: str = "") -> str:
    """Format a mean with its interval: shares in per cent, amounts with one decimal."""
    kind = f"{sign},.1f" if name in behavior.AMOUNTS else f"{sign}.1%"
    return format(one.value, kind) if one.interval is None else format_rate(one.value, one.interval, kind)


def _behavior_data(found: Sequence[Behavior], files: Sequence[Path]) -> dict[str, object]:
    runs = []
    for own, file in zip(found, files, strict=True):
        known = {name: values for name, values in own.items() if values}
        means = {name: _data("mean", behavior.mean_amount(name, values)) for name, values in known.items()}
        measures = {name: means[name] | {"by_task": dict(values)} for name, values in known.items()}
        runs.append({"file": str(file), "measures": measures})
    data: dict[str, object] = {"runs": runs}
    if len(found) == 2:
        data["differences"] = {name: _data("difference", one) for name, one in _changes(*found).items()}
    return data


def _data(name: str, one: Amount) -> dict[str, object]:
    bounds = {"low": one.interval.low, "high": one.interval.high} if one.interval else {}
    return {name: one.value, **bounds, "tasks": one.num_tasks}
