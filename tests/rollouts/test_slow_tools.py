"""Whole asynchronous runs with one slow kind of task: which of its episodes are trained and which are masked."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from ludus.config.load import load_config
from ludus.diagnostics.trackers import read_metrics
from ludus.rollouts.rollout_files import read_rollouts, rollouts_path
from ludus.training.collection.filters import ages
from ludus.training.rl.build import train
from ludus.training.run.run_dir import lock_run, new_run
from ludus.training.run.session import open_session
from small_runs import RecordingReporter
from tests.training.rl.test_async_run import words
from tiny_world import FRUITS

SLOW = """
import asyncio
import time
from dataclasses import dataclass
from pathlib import Path

import tiny_world
from ludus.types import Message, StepResult

METRICS = Path({metrics!r})


def steps():
    return METRICS.read_text().count("\\n") if METRICS.exists() else 0


async def slow(seconds, turn):
    {wait}


@dataclass
class Environment:
    inner: object
    is_slow: bool
    since: float = 0.0
    turn: int = 0

    def __getattr__(self, name):
        return getattr(self.inner, name)

    async def start(self, task):
        found = await self.inner.start(task)
        self.since, self.turn = time.monotonic(), 0
        return found

    async def step(self, action):
        took = time.monotonic() - self.since
        if self.is_slow:
            await slow(took, self.turn)
        self.turn += 1
        found = await self.inner.step(action)
        if {asks_again} and self.is_slow and found.done and self.turn == 1:
            found = StepResult((Message(role="user", content="Go on."),))
        self.since = time.monotonic()
        return found


def make_world(settings, limits):
    inner = tiny_world.make_world(settings, limits)

    class World(type(inner)):
        def environment(self, task):
            return Environment(super().environment(task), {which})

    object.__setattr__(inner, "__class__", World)  # a frozen dataclass
    return inner
"""
THREE_STEPS = """aim, end = steps() + 3, time.monotonic() + {limit_s}
    while steps() < aim and time.monotonic() < end:
        await asyncio.sleep(0.01)"""
SOME_STEPS = THREE_STEPS.format(limit_s=1)
"""Wait for three steps of the learner; not for long, as it may wait for this episode, or be at its end."""
STEPS = 24
AT_FIRST = f"""if turn or not 0 < steps() <= {STEPS - 5}:
        return
    {THREE_STEPS.format(limit_s=60)}"""
"""Wait in the first turn alone, and have a second: tokens of one are old at the end, of the other young."""
TWENTY_TIMES = "await asyncio.sleep(20 * seconds)"


class PhaseRecorder(RecordingReporter):
    """A reporter that keeps what had ended when each step was done, and the total of each phase."""

    def __init__(self) -> None:
        super().__init__()
        self.ended = [[]]
        self.totals = []

    def phase(self, name, total, engine=None) -> None:
        self.totals.append((name, total))

    def episode(self, episode) -> None:
        self.ended[-1].append(episode.trajectory)

    def step(self, step, metrics, timings) -> None:
        self.ended.append([])


def run(tiny_run, folder: Path, wait: str, which: str, **changes) -> PhaseRecorder:
    world = folder / "slow.py"
    metrics = str(folder / "run" / "metrics.jsonl")
    world.write_text(SLOW.format(metrics=metrics, wait=wait, which=which, asks_again=wait == AT_FIRST))
    given = words(
        tiny_run,
        folder,
        "async",
        env__name=world,
        env__check="false",
        algorithm__filter_zero_variance="false",
        rollout__temperature=1.0,
        **changes,
    )
    given[2] = "--model.path"
    settings, reporter = load_config(given[1], given[2:]), PhaseRecorder()
    made = new_run(settings, "tiny", "rl")
    with lock_run(made):
        train(open_session(settings), made, reporter)
    return reporter


def action_tokens(trajectory, step, bound) -> tuple[int, int]:
    """How many action tokens a step trains, and how many of them are older than the bound."""
    every = ages(trajectory, step)
    return len(every), sum(age > bound for age in every)


APPLE = 'task.id.endswith(":apple")'


@pytest.mark.fault
def test_tokens_beyond_the_staleness_bound_are_masked_and_training_continues(tiny_run, tmp_path):
    steps, bound = STEPS, 1
    changes = {"staleness__on_stale": "mask", "staleness__max_staleness": bound, "training__steps": steps}
    reporter = run(tiny_run, tmp_path, AT_FIRST, APPLE, **changes)
    waits = [total for name, total in reporter.totals if "waiting for episodes" in name]
    assert waits == [None] * steps  # the episodes of several steps end in it
    rows = {row.step: row.metrics for row in read_metrics(tmp_path / "run" / "metrics.jsonl")}
    late, partly = 0, 0
    for step in range(1, steps + 1):
        trained = 0
        old = 0
        for record in read_rollouts(rollouts_path(tmp_path / "run", step)):
            every, over = action_tokens(record.trajectory, step, bound)
            assert (record.outcome, record.reason) == (
                ("masked", "over_age") if over == every else ("trained", "trained")
            )
            trained, old = trained + every - over, old + over
            partly += 0 < over < every
        assert rows[step]["batch/trained_tokens"] == trained
        assert rows[step]["staleness/over_age_tokens"] == old
        assert rows[step]["staleness/max"] <= bound
        late += old
    assert late > 0
    assert partly > 0


def share(trajectories, slow, tokens) -> float:
    """The share of the `slow` among the action tokens; `tokens` counts those of a trajectory."""
    counts = [(t.task_id.split(":")[1] in slow, tokens(t)) for t in trajectories]
    return sum(n for is_slow, n in counts if is_slow) / sum(n for _, n in counts)


FRUIT = 'task.tags["family"] == "fruit"'
FEW = 'task.id.split(":")[1] in ("apple", "pear", "plum", "fig")'


@pytest.mark.learning
@pytest.mark.parametrize(
    ("over_age", "wait", "which"), [("wait", TWENTY_TIMES, FRUIT), ("mask", SOME_STEPS, FEW)], ids=["wait", "mask"]
)
def test_slow_tasks_train_in_proportion_unless_stale_tokens_are_masked(over_age, wait, which, tiny_run, tmp_path):
    """In the middle third of a run, within the error of so many groups."""
    steps, bound = 36, 2
    middle = range(steps // 3 + 1, 2 * steps // 3 + 1)
    changes = {"staleness__on_stale": over_age, "staleness__max_staleness": bound, "training__steps": steps}
    reporter = run(tiny_run, tmp_path, wait, which, training__learning_rate=1e-5, **changes)
    sampled = [t for step in middle for t in reporter.ended[step - 1]]
    read = [(s, r.trajectory) for s in middle for r in read_rollouts(rollouts_path(tmp_path / "run", s))]
    in_time = {id(t): len(ages(t, s)) - action_tokens(t, s, bound)[1] for s, t in read}
    trained = [t for _, t in read]
    slow = FRUITS if over_age == "wait" else FRUITS[:4]
    share_sampled = share(sampled, slow, lambda t: t.num_action_tokens)
    share_trained = share(trained, slow, lambda t: in_time[id(t)])
    if over_age == "mask":
        assert share_trained < 0.75 * share_sampled
        return
    error = 2 * math.sqrt(2 * 0.25 / (3 * len(middle)))  # of a difference of shares, each of so many groups
    assert abs(share_sampled - share_trained) < error
    for length in (lambda t: t.num_action_tokens, lambda t: t.num_turns):
        one, other = [[length(t) for t in found] for found in (sampled, trained)]
        assert abs(mean(one) - mean(other)) <= 3 * math.hypot(of_mean(one), of_mean(other))


def mean(values) -> float:
    return sum(values) / len(values)


def of_mean(values) -> float:
    """The standard error of a mean."""
    middle = mean(values)
    return math.sqrt(sum((v - middle) ** 2 for v in values) / (len(values) - 1) / len(values))
