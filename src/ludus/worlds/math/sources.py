"""Problems of a user's file, and of the package reasoning-gym (extra `gym`), which also grades the answers.

A file has JSON lines with a question and an answer. Some generators of reasoning-gym store no answer, reject their
own answer, raise, or accept any text. Each generator is therefore tested before use.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path

from ludus.envs.benchmarks import BENCHMARKS, BenchmarkName, own_record
from ludus.envs.task_files import SPLITS, Record, RecordError, load_tasks, split_by_hash, text_field
from ludus.errors import ConfigError, UserError
from ludus.rewards.truth_records import TYPES, question_text, read_truth
from ludus.types import Task
from ludus.worlds.math.grader import Dataset, GymTruth, opening

_HINT = f'A line is {{"question", "answer"}}, optionally with "split" and "type" ({", ".join(TYPES)}).'
_NUM_CHECKED = 5
"""Number of problems on which a generator is tested."""
_SEED_STRIDE = 10_000_019
"""Distance between the seeds of splits; problem i of seed s is usually problem 0 of seed s + i."""
_SEEDS = 2**31
_WRONG_ANSWERS = ("", "no idea", "The answer is unknown", "-987654321", "?")


def load_problems(path: Path, name: BenchmarkName = "own") -> dict[str, tuple[Task, ...]]:
    """Return the tasks of a file by split; `name` is the benchmark in whose published format it is.

    `answer` depends on the type (`ludus.rewards.truth_records`); a text with reasoning has its answer after
    "####" or in a box. Without "split", a hash of the question splits 8 : 1 : 1. Raises UserError, with the
    line, for an invalid record or (in the own format) a repeated question, and if a verifier needs an extra that is not
    installed.
    """
    if name == "own":
        return load_tasks(path, _record_task, _HINT, identity=lambda task: f"question {task.prompt[-1]['content']!r}")

    def read(record: Record, line: int) -> Task | None:
        own = own_record(name, record)
        return None if own is None else _record_task(own, line)

    hint = f"A row of {name} (env.settings.format) has {BENCHMARKS[name].fields}; see docs/use/data.md."
    return load_tasks(path, read, hint)


def _record_task(record: Record, line: int) -> Task:
    question = text_field(record, "question")
    if not question.strip():
        raise RecordError('"question" is empty')
    try:
        truth = read_truth(record)
    except ValueError as error:
        raise RecordError(str(error)) from None
    split = str(record.get("split", split_by_hash(question)))
    tags = {"split": split, "family": str(record.get("family", type(truth).__name__.lower()))}
    return Task(f"{split}:line-{line}", opening(question_text(question, truth), truth), truth, tags, seed=line)


def gym_tasks(names: Sequence[str], sizes: Mapping[str, int], seed: int) -> dict[str, tuple[Task, ...]]:
    """Return the tasks of each split, generators in turn; no question is in two splits.

    Raises UserError if the package is missing, ConfigError if a generator is unknown or fails its test.
    """
    taken: set[str] = set()
    found: dict[str, tuple[Task, ...]] = {}
    for split in SPLITS:
        each = -(-sizes[split] // len(names))
        columns = [_generator_tasks(name, split, each, seed, taken) for name in names]
        found[split] = tuple(task for row in zip(*columns, strict=False) for task in row)[: sizes[split]]
        taken |= {task.prompt[-1]["content"] for task in found[split]}
    return found


def _generator_tasks(name: str, split: str, num: int, seed: int, taken: set[str]) -> list[Task]:
    num_entries = 3 * num + _NUM_CHECKED
    dataset = _dataset(name, num_entries, _SEED_STRIDE * (len(SPLITS) * seed + SPLITS.index(split)) % _SEEDS)
    tasks: list[Task] = []
    seen = set(taken)
    for index in range(num_entries):
        entry = dataset[index]
        question = str(entry["question"])
        truth = GymTruth(dataset, entry)
        if index < _NUM_CHECKED:
            _check_generator(name, truth)
        if question in seen or entry["answer"] is None or len(tasks) == num:
            continue
        seen.add(question)
        tags = {"split": split, "family": name}
        tasks.append(Task(f"{split}:{name}:{index}", opening(question), truth, tags, seed=index))
    return tasks


def _dataset(name: str, size: int, seed: int) -> Dataset:
    if importlib.util.find_spec("reasoning_gym") is None:
        raise UserError("env.settings.gym needs the package reasoning-gym.", "Install it: pip install 'ludus[gym]'.")
    if name not in vars(importlib.import_module("reasoning_gym.factory"))["DATASETS"]:
        raise ConfigError(f"reasoning-gym has no generator {name!r} (env.settings.gym).", "See its gallery.")
    dataset: Dataset = importlib.import_module("reasoning_gym").create_dataset(name, size=size, seed=seed)
    return dataset


def _check_generator(name: str, truth: GymTruth) -> None:
    if truth.entry["answer"] is None:
        fault = "stores no answers"
    elif not truth.accepts(truth.answer):
        fault = "rejects its own answer"
    elif accepted := [text for text in _WRONG_ANSWERS if truth.accepts(text) and text != truth.entry["answer"]]:
        fault = f"accepts {accepted[0]!r} instead of {truth.answer[:40]!r}"
    else:
        return
    raise ConfigError(f"The generator {name!r} {fault}.", "Remove it from env.settings.gym.")
