"""What tasks are like: how many are really different, and what is solved without skill.

*No tool* says that it is done. *Majority* runs, command by command, what solves the training task of the same
topic whose words are most like those of the task.
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import cache

from ludus.sandbox import Sandbox
from ludus.tools.workspace import LIMITS
from ludus.worlds.terminal.environment import SETTLE_S
from ludus.worlds.terminal.job import JobDraft, TerminalJob
from ludus.worlds.terminal.services import Running, start_services
from ludus.worlds.terminal.splits import LEVELS, TOPICS
from ludus.worlds.terminal.task_file import task_file

Splits = Mapping[str, Sequence[TerminalJob]]


def form_of(words: str) -> str:
    """A text or a script without what is drawn: names, words of files, and numbers."""
    plain = _drawn().sub("W", words)
    plain = re.sub(r"\b[0-9a-f]{7,40}\b", "N", plain)
    plain = re.sub(r"-?\d+(?:[.:-]\d+)*", "N", plain)
    plain = re.sub(r"\bW(?:[-._]W)*\b", "W", plain)
    return re.sub(r"\b([\w'\";,=:$/-]+)(?:[ ,]+\1\b)+", r"\1", " ".join(plain.split()))


@cache
def _drawn() -> re.Pattern[str]:
    return re.compile(rf"(?<![A-Za-z])(?:{'|'.join(task_file().words)})(?![A-Za-z])", re.I)


def shape_of(draft: JobDraft) -> str:
    """The solution without names and numbers."""
    return form_of("\n".join(draft.steps))


def distinct(jobs: Iterable[TerminalJob]) -> tuple[int, int, int]:
    """How many tasks, how many differ in their words, and how many in their solutions."""
    all_ = list(jobs)
    return len(all_), len({form_of(j.draft.text) for j in all_}), len({shape_of(j.draft) for j in all_})


def nearest(job: TerminalJob, train: Sequence[TerminalJob]) -> TerminalJob:
    """The training task, of the same topic where there is one, that shares most words with this one."""
    words = Counter(form_of(job.text).split())
    pool = [one for one in train if one.topic == job.topic] or train
    return max(pool, key=lambda one: (Counter(form_of(one.text).split()) & words).total())


async def solves(job: TerminalJob, steps: Sequence[str], sandbox: Sandbox) -> bool:
    """Whether these commands solve the task."""
    session = await sandbox.session("shell", files=job.start.files, limits=LIMITS)
    try:
        await session.restore(job.start)
        began = await start_services(session, job.services, job.afterwards) if job.services else {}
        for step in steps:
            await session.run(step)
        if job.services:
            await asyncio.sleep(SETTLE_S)
        state, running = await session.snapshot(), Running(began, await session.processes())
    finally:
        await session.close()
    return all((await job.grade(state, sandbox, running)).values())


async def rates(splits: Splits, split: str, sandbox: Sandbox) -> Mapping[str, tuple[int, int]]:
    """How many tasks of a split are solved by *no tool* and by *majority*, as (solved, tasks)."""
    jobs = splits[split]
    idle = [await solves(job, (), sandbox) for job in jobs]
    copied = [await solves(job, nearest(job, splits["train"]).draft.steps, sandbox) for job in jobs]
    return {"no tool": (sum(idle), len(jobs)), "majority": (sum(copied), len(jobs))}


def idle_line(splits: Splits) -> str:
    """What *no tool* solves: nothing has to be run to see whether all holds at the beginning."""
    solved = {split: sum(not job.suite.fail_to_pass for job in jobs) for split, jobs in splits.items()}
    return "no tool: " + ", ".join(f"{split} {num} of {len(splits[split])}" for split, num in solved.items())


def report(splits: Splits) -> str:
    """Tables of the tasks by topic and level, of what differs, and of the splits."""
    jobs = [job for found in splits.values() for job in found]
    by_topic: dict[str, Counter[int]] = defaultdict(Counter)
    for job in jobs:
        by_topic[job.topic][job.level] += 1
    lines = ["topic     " + "".join(f"{f'level {level}':>9}" for level in LEVELS)]
    lines += [
        f"{topic:10}" + "".join(f"{by_topic[topic][level]:9}" for level in LEVELS) for topic in (*TOPICS, "pairs")
    ]
    lines += ["", "level  tasks  requests  solutions"]
    for level in LEVELS:
        num, forms, shapes = distinct(job for job in jobs if job.level == level)
        lines.append(f"{level:5}  {num:5}  {forms:8}  {shapes:9}")
    lines += ["", ", ".join(f"{split} {len(found)}" for split, found in splits.items())]
    return "\n".join(lines)


def measured(splits: Splits, sandbox: Sandbox) -> list[str]:
    """What both baselines solve of `test`, by running them in a sandbox, which is closed then."""

    async def act() -> Mapping[str, tuple[int, int]]:
        try:
            return await rates(splits, "test", sandbox)
        finally:
            await sandbox.close()

    found = asyncio.run(act())
    return [f"{name}: {solved} of {num} tasks of the split test" for name, (solved, num) in found.items()]
