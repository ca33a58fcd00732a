"""Problems of the package reasoning-gym (the extra `gym`), which also judges their answers.

Not all of its generators can be trusted: some store no answer, some refuse their own, some raise, and some
pay for any text. Each generator is tried before it is used.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from ludus.errors import ConfigError, UserError
from ludus.rewards.extract import candidates
from ludus.types import Task
from ludus.worlds.math.grader import Foreign, opening

SPLITS = ("train", "validation", "test")
_FULL = 0.99
"""The score from which an answer counts as right."""
_TRIED = 5
"""Problems on which a generator is tried."""
_APART = 10_000_019
"""Between the seeds of two splits: problem i of seed s is as a rule problem 0 of seed s + i."""
_SEEDS = 2**31
_WRONG = ("", "no idea", "The answer is unknown", "-987654321", "?")


class Dataset(Protocol):
    """What a generator of the package is."""

    def __getitem__(self, index: int) -> dict[str, object]: ...

    def score_answer(self, answer: str | None, entry: dict[str, object]) -> float: ...


@dataclass(frozen=True)
class GymJudge:
    """Judges answers to one problem."""

    dataset: Dataset
    entry: Mapping[str, object]

    def accepts(self, answer: str) -> bool:
        """Whether the answer, or what it gives as one, has the full score; what raises has not."""
        return any(self._score(one) >= _FULL for one in dict.fromkeys((answer.strip(), *candidates(answer)[:1])))

    def _score(self, answer: str) -> float:
        try:
            return float(self.dataset.score_answer(answer, dict(self.entry)))
        except Exception:  # boundary: foreign code that chokes on the text of an answer
            return 0.0


def gym_tasks(names: Sequence[str], sizes: Mapping[str, int], seed: int) -> dict[str, tuple[Task, ...]]:
    """So many tasks of each split, of the generators in turn; no question is in two splits.

    Raises UserError without the package, ConfigError for a generator that is unknown or cannot be trusted.
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
            _try(name, dataset, entry)
        judge = GymJudge(dataset, entry)
        if question in seen or entry["answer"] is None or len(tasks) == num:
            continue
        seen.add(question)
        tags = {"split": split, "family": name}
        truth = Foreign(judge, str(entry["answer"]))
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


def _try(name: str, dataset: Dataset, entry: Mapping[str, object]) -> None:
    judge = GymJudge(dataset, entry)
    if entry["answer"] is None:
        raise ConfigError(f"The generator {name!r} stores no answers.", "Leave it out of env.settings.gym.")
    if not judge.accepts(str(entry["answer"])):
        raise ConfigError(f"The generator {name!r} refuses its own answer.", "Leave it out of env.settings.gym.")
    paid = [text for text in _WRONG if judge.accepts(text) and text != entry["answer"]]
    if paid:
        raise ConfigError(
            f"The generator {name!r} pays for {paid[0]!r} instead of {str(entry['answer'])[:40]!r}.",
            "Leave it out of env.settings.gym.",
        )
