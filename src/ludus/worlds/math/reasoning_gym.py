"""Problems of the package reasoning-gym (the extra `gym`), which also grades the answers.

Some of its generators store no answer, reject their own answer, raise, or accept any text. Each generator is
therefore tested before use.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from ludus.envs.task_files import SPLITS
from ludus.errors import ConfigError, UserError
from ludus.rewards.extract import candidates
from ludus.types import Task
from ludus.worlds.math.grader import GymTruth, opening

_FULL = 0.99
"""Minimum score of a right answer."""
_TRIED = 5
"""Number of problems on which a generator is tested."""
_APART = 10_000_019
"""Distance between the seeds of splits; problem i of seed s is usually problem 0 of seed s + i."""
_SEEDS = 2**31
_WRONG = ("", "no idea", "The answer is unknown", "-987654321", "?")


class Dataset(Protocol):
    """Interface of a generator of the package."""

    def __getitem__(self, index: int) -> dict[str, object]: ...

    def score_answer(self, answer: str | None, entry: dict[str, object]) -> float: ...


@dataclass(frozen=True)
class GymGrader:
    """Grades answers to one problem."""

    dataset: Dataset
    entry: Mapping[str, object]

    def accepts(self, answer: str) -> bool:
        """Return whether the text or the answer extracted from it has the full score. Exceptions count as wrong."""
        return any(self._score(one) >= _FULL for one in dict.fromkeys((answer.strip(), *candidates(answer)[:1])))

    def _score(self, answer: str) -> float:
        try:
            return float(self.dataset.score_answer(answer, dict(self.entry)))
        except Exception:  # boundary: third-party code may raise on any answer
            return 0.0


def gym_tasks(names: Sequence[str], sizes: Mapping[str, int], seed: int) -> dict[str, tuple[Task, ...]]:
    """Return the tasks of each split, generators in turn; no question is in two splits.

    Raises UserError if the package is missing, ConfigError if a generator is unknown or fails its test.
    """
    taken: set[str] = set()
    found: dict[str, tuple[Task, ...]] = {}
    for split in SPLITS:
        found[split] = _tasks(names, split, sizes[split], seed, taken)
        taken |= {task.prompt[-1]["content"] for task in found[split]}
    return found


def _tasks(names: Sequence[str], split: str, num: int, seed: int, taken: set[str]) -> tuple[Task, ...]:
    each = -(-num // len(names))
    columns = [_of_one(name, split, each, seed, taken) for name in names]
    return tuple(task for row in zip(*columns, strict=False) for task in row)[:num]


def _of_one(name: str, split: str, num: int, seed: int, taken: set[str]) -> list[Task]:
    made = 3 * num + _TRIED
    dataset = _dataset(name, made, _APART * (len(SPLITS) * seed + SPLITS.index(split)) % _SEEDS)
    tasks: list[Task] = []
    seen = set(taken)
    for index in range(made):
        entry = dataset[index]
        question = str(entry["question"])
        if index < _TRIED:
            _test(name, dataset, entry)
        grader = GymGrader(dataset, entry)
        if question in seen or entry["answer"] is None or len(tasks) == num:
            continue
        seen.add(question)
        tags = {"split": split, "family": name}
        truth = GymTruth(grader, str(entry["answer"]))
        tasks.append(Task(f"{split}:{name}:{index}", opening(question), truth, tags, seed=index))
    return tasks


def _dataset(name: str, size: int, seed: int) -> Dataset:
    if importlib.util.find_spec("reasoning_gym") is None:
        raise UserError(
            "env.settings.gym needs the package reasoning-gym.", "Install it with: pip install 'ludus[gym]'"
        )
    package = importlib.import_module("reasoning_gym")
    factory = importlib.import_module("reasoning_gym.factory")
    if name not in vars(factory)["DATASETS"]:
        raise ConfigError(f"reasoning-gym has no generator {name!r} (env.settings.gym).", "See its gallery.")
    made: Dataset = package.create_dataset(name, size=size, seed=seed)
    return made


def _test(name: str, dataset: Dataset, entry: Mapping[str, object]) -> None:
    grader = GymGrader(dataset, entry)
    if entry["answer"] is None:
        raise ConfigError(f"The generator {name!r} stores no answers.", "Remove it from env.settings.gym.")
    if not grader.accepts(str(entry["answer"])):
        raise ConfigError(f"The generator {name!r} rejects its own answer.", "Remove it from env.settings.gym.")
    accepted = [text for text in _WRONG if grader.accepts(text) and text != entry["answer"]]
    if accepted:
        raise ConfigError(
            f"The generator {name!r} accepts {accepted[0]!r} instead of {str(entry['answer'])[:40]!r}.",
            "Remove it from env.settings.gym.",
        )
