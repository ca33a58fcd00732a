"""Write the tasks of the world `functions`: python -m generators.functions [--out F]."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path

from generators.archive import write_archive
from generators.functions.generate import DrawnTask, draw_tasks
from ludus.envs.task_archive import SPLITS
from ludus.worlds.functions.tasks import TaskRow

OUT = Path(__file__).parents[2] / "src/ludus/worlds/functions/data/tasks.zip"
LEVELS = (1, 2, 3, 4, 5)
FIRST: Mapping[str, int] = {"train": 2_000, "validation": 200, "test": 1_000, "composition": 1_000}
"""Tasks of each split that are drawn before more of them; the default settings have these or fewer."""
NUM: Mapping[str, int] = {
    "train": 12_500,
    "validation": 1_250,
    "test": 5_000,
    "composition": 5_000,
    "demonstrations": 30_000,
}
"""Tasks in the archive, a fifth of each level."""


def draw(num: Mapping[str, int]) -> Iterator[tuple[str, Sequence[DrawnTask]]]:
    """Yield the first tasks of each split, and of the demonstrations. No request occurs twice."""
    seen: set[str] = set()
    streams = {split: draw_tasks(split, LEVELS, seen, "0") for split in SPLITS}
    found = {split: list(islice(streams[split], FIRST[split])) for split in SPLITS}
    for split in reversed(SPLITS):
        found[split] += islice(streams[split], max(num[split] - FIRST[split], 0))
        yield split, found[split][: num[split]]
    yield "demonstrations", list(islice(draw_tasks("train", LEVELS, seen, "demonstrations"), num["demonstrations"]))


def members(num: Mapping[str, int] = NUM) -> dict[str, list[TaskRow]]:
    """Return the rows of the archive by split and level."""
    drawn = dict(draw(num))
    return {
        f"{name}/{level}": [task.row for task in tasks if task.level == level]
        for name, tasks in drawn.items()
        for level in LEVELS
    }


if __name__ == "__main__":
    write_archive(__doc__, OUT, members)
