"""Find evaluation tasks in the training tasks, training dialogues and training rollouts of a run."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice

from ludus.cli.ui.fitted_table import FittedTable, TableColumn, make_table, write_result_files
from ludus.cli.ui.terminal import announce, load_libraries, make_console, print_text
from ludus.config.schema import Config
from ludus.envs.base import World
from ludus.envs.registry import build_world
from ludus.errors import UserError
from ludus.evaluation.analysis import contamination
from ludus.evaluation.analysis.contamination import COPIED, NamedText, NgramIndex, SourceOverlap
from ludus.evaluation.comparison import newest_evaluations
from ludus.evaluation.evaluate import Evaluation, check_split
from ludus.evaluation.stats import rates_difference
from ludus.evaluation.tables import format_rate, format_success
from ludus.rollouts.rollout_files import read_rollouts
from ludus.training.run.run_dir import RunFolder, kind_of
from ludus.types import Task

MAX_SHOWN = 5
"""Number of tasks in the table of examples; files contain all."""


def run(args: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Print the tables; return 0 also if tasks are contaminated."""
    if min(args.ngrams) < 1 or args.dialogues < 0:
        raise UserError("--ngrams must be 1 or more and --dialogues 0 or more.", "Correct the number.")
    folder = RunFolder(args.run)
    config = folder.load_config()
    world, split = build_world(config.env, config.rollout), args.split or config.evaluation.splits[0]
    check_split(world, split, "--split")
    stored = newest_evaluations(folder.path).values() if any(folder.evaluations.glob("*.json")) else ()
    own = [one.result for one in stored if one.result.plan.split == split and not one.result.plan.policy]
    result = max(own, key=lambda one: (one.plan.step, len(one.task_ids), one.plan.samples), default=None)
    tasks = [task for task in world.tasks(split) if result is None or task.id in result.scores]
    if not tasks:
        raise UserError(f"The tasks of the evaluation are not in the split {split!r}.", "Was the world changed?")
    texts = list(map(contamination.task_text, tasks))
    indices = [NgramIndex(texts, n) for n in dict.fromkeys(args.ngrams)]
    found: list[SourceOverlap] = []
    for name, source in training_texts(folder, config, world, args.dialogues).items():
        announce(f"Reading {name} ...")
        overlaps = [SourceOverlap(index, name) for index in indices]
        for text in source:
            for overlap in overlaps:
                overlap.add(text)
        found += overlaps
    nearest = contamination.nearest_tasks(NgramIndex(texts, contamination.SIMILARITY_NGRAM), _task_texts(world))
    tables, console = [_source_table(split, found), _example_table(tasks, found, nearest)], make_console()
    for table in tables:
        console.print(table)
    for index in indices:
        if unchecked := int((index.sizes == 0).sum()):
            print_text(console, f"{unchecked} tasks have only {index.n}-grams of a template and were not checked.")
        print_text(console, _success_text(index.n, tasks, found, result))
    write_result_files(args, _contamination_data(tasks, found, nearest), tables)
    return 0


def training_texts(folder: RunFolder, config: Config, world: World, most: int) -> Mapping[str, Iterator[NamedText]]:
    """Return the sources of training texts by name; the dialogues only if the run or its model was tuned on them."""
    found = {"training tasks": _task_texts(world)}
    has_dialogues = config.sft.data or config.sft.sources or world.implements("demonstrations")
    if has_dialogues and (config.model.path is None or kind_of(folder) == "sft"):
        found["training dialogues"] = _dialogue_texts(config, world, most)
    if files := sorted(folder.rollouts.glob("step-*.jsonl.gz")):
        found["training rollouts"] = (
            NamedText(f"{file.name[:11]}, {record.trajectory.name}", contamination.dialogue_text(path.messages))
            for file in files
            for record in read_rollouts(file)
            for path in record.trajectory.attempts()
        )
    return found


def _task_texts(world: World) -> Iterator[NamedText]:
    return (NamedText(task.id, contamination.task_text(task)) for task in world.tasks("train"))


def _dialogue_texts(config: Config, world: World, most: int) -> Iterator[NamedText]:
    load_libraries()
    from ludus.training.datasets.files import FileText
    from ludus.training.datasets.sources import dialogues

    count = min(most, config.sft.steps * config.sft.batch_size)
    for number, (one, _) in enumerate(islice(dialogues(config, world), count), 1):
        text = one.text if isinstance(one, FileText) else contamination.dialogue_text(one.messages)
        yield NamedText(f"dialogue {number}", text)


def _source_table(split: str, found: Sequence[SourceOverlap]) -> FittedTable:
    rows = (
        (one.source, one.index.n, sum(s > 0 for s in one.shares), sum(s >= COPIED for s in one.shares), len(one.shares))
        for one in found
    )
    columns = ("found in", "n", "any n-gram", f"{COPIED:.0%} of them", TableColumn("tasks", 1))
    return make_table(columns, rows, f"{split}: evaluation tasks of which word n-grams occur in training")


def _example_table(
    tasks: Sequence[Task], found: Sequence[SourceOverlap], nearest: Sequence[tuple[float, str]]
) -> FittedTable:
    rows = []
    for i, (task, (similarity, name)) in enumerate(zip(tasks, nearest, strict=True)):
        share, example = max((one.shares[i], one.examples[i]) for one in found if one.index is found[0].index)
        rows.append((share, similarity, (task.id, f"{share:.0%}", example, f"{similarity:.2f}", name)))
    where, nearest_task = (TableColumn(name, 1, wrap=True) for name in ("in", "nearest training task"))
    columns = (TableColumn("task", wrap=True), f"{found[0].index.n}-grams found", where, "similarity", nearest_task)
    best = sorted(rows, key=lambda row: row[:2], reverse=True)[:MAX_SHOWN]
    return make_table(columns, [row[2] for row in best], "Tasks nearest to training texts")


def _success_text(n: int, tasks: Sequence[Task], found: Sequence[SourceOverlap], result: Evaluation | None) -> str:
    if result is None:
        return f"{n}-grams: the run has no evaluation of the split, so that success cannot be compared."
    shares = [max(one) for one in zip(*(one.shares for one in found if one.index.n == n), strict=True)]
    kinds = {task.id: "contaminated" if share else "clean" for task, share in zip(tasks, shares, strict=True)}
    marks = tuple({"kind": kinds[name]} if name in kinds else {} for name in result.task_ids)
    parts = replace(result, tags=marks).by_tag()["kind"]
    text = ", ".join(f"{format_success(one)} of {one.num_tasks} {kind} tasks" for kind, one in parts.items())
    if len(parts) == 2:
        clean, other = ((one.rate, one.interval) for one in parts.values())
        text += f"; difference {format_rate(*rates_difference(clean, other))}"
    return f"{n}-grams: success {text}."


def _contamination_data(
    tasks: Sequence[Task], found: Sequence[SourceOverlap], nearest: Sequence[tuple[float, str]]
) -> list[dict[str, object]]:
    data: list[dict[str, object]] = []
    for i, (task, (similarity, name)) in enumerate(zip(tasks, nearest, strict=True)):
        sources = [{"source": o.source, "n": o.index.n, "share": o.shares[i], "example": o.examples[i]} for o in found]
        data.append({"task": task.id, "found": sources, "similarity": similarity, "nearest": name})
    return data
