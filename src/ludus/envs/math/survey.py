"""What tasks are like: how many are really different, and what is solved without skill.

python -m ludus.envs.math.survey
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ludus.envs.math.grading import Solution, answer_text, is_right
from ludus.rewards.base import truth_of
from ludus.types import Task


@dataclass(frozen=True, slots=True)
class Variety:
    """Tasks, questions that differ without numbers and names, and solutions without numbers."""

    num_tasks: int
    num_forms: int
    num_shapes: int


def variety(tasks: Sequence[Task]) -> dict[str, Variety]:
    """The variety of each level."""
    by_level: dict[str, list[Solution]] = defaultdict(list)
    for task in tasks:
        by_level[task.tags["level"]].append(truth_of(task, Solution))
    return {
        level: Variety(len(all_), len({s.problem.form for s in all_}), len({s.problem.shape for s in all_}))
        for level, all_ in sorted(by_level.items())
    }


def majority_rate(train: Sequence[Task], tasks: Sequence[Task]) -> float:
    """Success of whoever gives the answer that is commonest in training among problems of the same kind and
    level (of the same level, where training lacks the kind)."""
    common = _commonest(train)
    return sum(_gives(task, common[_key(task)] or common[task.tags["level"]]) for task in tasks) / len(tasks)


def copied_rate(train: Sequence[Task], tasks: Sequence[Task]) -> float:
    """Success of whoever copies the number of the question that is most often right in training at its place
    (first, second, ..., last) for the same kind and level."""
    places: dict[str, Counter[int]] = defaultdict(Counter)
    for task in train:
        for place in range(-3, 3):
            places[_key(task)][place] += _gives(task, _number_at(task, place))
    return sum(_gives(task, _number_at(task, _best(places[_key(task)]))) for task in tasks) / len(tasks)


def _best(places: Counter[int]) -> int:
    return places.most_common(1)[0][0] if places else -1


def _commonest(train: Sequence[Task]) -> Mapping[str, str]:
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for task in train:
        answer = answer_text(truth_of(task, Solution).problem)
        counts[_key(task)][answer] += 1
        counts[task.tags["level"]][answer] += 1
    common: dict[str, str] = defaultdict(str)
    return common | {key: counter.most_common(1)[0][0] for key, counter in counts.items()}


def _key(task: Task) -> str:
    return f"{task.tags['kind']}/{task.tags['level']}"


def _number_at(task: Task, place: int) -> str:
    numbers: list[str] = re.findall(r"\d+", task.prompt[-1]["content"])
    return numbers[place] if -len(numbers) <= place < len(numbers) else ""


def _gives(task: Task, answer: str) -> bool:
    return bool(answer) and is_right(answer, truth_of(task, Solution).right)


def main() -> None:
    """Print the survey of the world with its default settings."""
    from ludus.envs.math.world import MathWorld

    world = MathWorld()
    print("split        level  tasks  questions  solutions")
    for split in world.splits:
        for level, found in variety(world.tasks(split)).items():
            counts = f"{found.num_tasks:5}  {found.num_forms:9}  {found.num_shapes:9}"
            print(f"{split:12} {level:5}  {counts}")
    train = world.tasks("train")
    print("\nsplit        majority  copied")
    for split in world.splits:
        tasks = world.tasks(split)
        print(f"{split:12} {majority_rate(train, tasks):8.1%}  {copied_rate(train, tasks):6.1%}")


if __name__ == "__main__":
    main()
