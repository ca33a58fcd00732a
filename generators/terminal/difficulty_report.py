"""The difficulty report: how many tasks differ, and how many are solved without skill.

*No tool* ends the episode at once. *Majority* runs the commands that solve the most similar training task of the
same topic.
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import cache

from generators.terminal.freeze import WORDS

from ludus.sandbox import Sandbox, open_sandbox
from ludus.tools.workspace import LIMITS
from ludus.worlds.terminal.checks import SessionState
from ludus.worlds.terminal.splits import LEVELS, TOPICS
from ludus.worlds.terminal.task import TerminalTask, start_services
from ludus.worlds.terminal.world import SETTLE_S

Splits = Mapping[str, Sequence[TerminalTask]]


def form_of(words: str) -> str:
    """Return a text or a script without drawn names, words of files, and numbers."""
    plain = _drawn().sub("W", words)
    plain = re.sub(r"\b[0-9a-f]{7,40}\b", "N", plain)
    plain = re.sub(r"-?\d+(?:[.:-]\d+)*", "N", plain)
    plain = re.sub(r"\bW(?:[-._]W)*\b", "W", plain)
    return re.sub(r"\b([\w'\";,=:$/-]+)(?:[ ,]+\1\b)+", r"\1", " ".join(plain.split()))


@cache
def _drawn() -> re.Pattern[str]:
    words = sorted(set(WORDS), key=lambda word: (-len(word), word))
    return re.compile(rf"(?<![A-Za-z])(?:{'|'.join(words)})(?![A-Za-z])", re.I)


def shape_of(task: TerminalTask) -> str:
    """Return the solution without names and numbers."""
    return form_of("\n".join(task.steps))


def distinct(tasks: Iterable[TerminalTask]) -> tuple[int, int, int]:
    """Return the numbers of tasks, of different instructions, and of different solutions."""
    all_ = list(tasks)
    return len(all_), len({form_of(j.text) for j in all_}), len({shape_of(j) for j in all_})


def nearest(task: TerminalTask, train: Sequence[TerminalTask]) -> TerminalTask:
    """Return the training task, of the same topic if there is one, that shares the most words with this one."""
    words = Counter(form_of(task.text).split())
    pool = [one for one in train if one.topic == task.topic] or train
    return max(pool, key=lambda one: (Counter(form_of(one.text).split()) & words).total())


async def solves(task: TerminalTask, steps: Sequence[str], sandbox: Sandbox) -> bool:
    """Return whether these commands solve the task."""
    session = await sandbox.session("shell", files=task.start.files, limits=LIMITS)
    try:
        await session.restore(task.start)
        started = await start_services(session, task.services, task.after_start) if task.services else {}
        for step in steps:
            await session.run(step)
        if task.services:
            await asyncio.sleep(SETTLE_S)
        processes = await session.processes() if task.services else ()
        found = await session.snapshot()
    finally:
        await session.close()
    return all((await task.grade(SessionState(found.files, found.executable, started, processes), sandbox)).values())


async def majority(splits: Splits, split: str) -> tuple[int, int]:
    """Return how many tasks of a split *majority* solves, and how many there are."""
    sandbox, tasks = open_sandbox(), splits[split]
    try:
        solved = [await solves(task, nearest(task, splits["train"]).steps, sandbox) for task in tasks]
    finally:
        await sandbox.close()
    return sum(solved), len(tasks)


def report(splits: Splits) -> str:
    """Return tables of the tasks by topic and level, of different ones, of splits and baselines; takes a minute."""
    solved, num = asyncio.run(majority(splits, "test"))
    return f"{tables(splits)}\nmajority: test {solved} of {num}\n"


def tables(splits: Splits) -> str:
    """Return the report without *majority*, which has to run commands."""
    tasks = [task for found in splits.values() for task in found]
    by_topic: dict[str, Counter[int]] = defaultdict(Counter)
    for task in tasks:
        by_topic[task.topic][task.level] += 1
    lines = ["topic     " + "".join(f"{f'level {level}':>9}" for level in LEVELS)]
    counts = {topic: "".join(f"{by_topic[topic][level]:9}" for level in LEVELS) for topic in (*TOPICS, "pairs")}
    lines += [f"{topic:10}{row}" for topic, row in counts.items()]
    lines += ["", "level  tasks  requests  solutions"]
    for level in LEVELS:
        num, forms, shapes = distinct(task for task in tasks if task.level == level)
        lines.append(f"{level:5}  {num:5}  {forms:8}  {shapes:9}")
    lines += ["", ", ".join(f"{split} {len(found)}" for split, found in splits.items()), ""]
    idle = {split: sum(not task.suite.fail_to_pass for task in found) for split, found in splits.items()}
    lines.append("no tool: " + ", ".join(f"{split} {n} of {len(splits[split])}" for split, n in idle.items()))
    return "\n".join(lines)
