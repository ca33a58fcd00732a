"""The progress bar of a rollout, and plain lines if the output is not a terminal."""

from __future__ import annotations

import asyncio
import io
import logging
import re
import sys
import time
from dataclasses import replace

import pytest
from rich.console import Console
from rich.progress import Progress, TextColumn

from ludus.cli.ui.progress import ProgressReporter
from ludus.cli.ui.run_summary import format_times, mean_timings
from ludus.cli.ui.terminal import PIPE_COLUMNS, bars, format_eta, silence_libraries
from ludus.config import load_config
from ludus.diagnostics.timings import StepTimings, episode_shares, scoring_hint, straggler_hint
from ludus.diagnostics.trackers import MetricsRow
from ludus.engines.base import EngineStats, Request
from ludus.engines.embedded.engine import LocalEngine
from ludus.rollouts.ledger import RolloutKey
from ludus.rollouts.reward_executor import scoring_concurrency
from ludus.rollouts.scheduler import Episode
from ludus.types import SamplingParams, StopReason, Task, Timings, Trajectory
from tests.engines.test_engine_batching import SMALL, build

DONE = EngineStats(
    steps=10,
    prefill_tokens=300,
    cached_tokens=700,
    decode_tokens=4000,
    evicted_pages=1234,
    model_s=1.5,
    sample_s=0.3,
    schedule_s=0.2,
    queue_steps=20,
    running_steps=64,
)


def test_engine_summary_shows_speed_batch_size_cache_and_evictions():
    said = "2,000 decode and 150 prefill tokens/s  6 running, 2 waiting  cache 70%"
    assert DONE.line() == f"{said}, 1,234 pages evicted"
    assert replace(DONE, evicted_pages=0).line() == said
    assert EngineStats().line() == ""


def episode(model_s, tools_s, scoring_s=0.0, grading_s=0.0):
    timings = Timings(model_s + tools_s, model_s, tools_s, scoring_s, grading_s)
    trajectory = Trajectory("t", 0, (), (), StopReason.ANSWERED, timings=timings)
    return Episode(RolloutKey(1, "t", 0), Task("t", (), None), trajectory)


def timed(config, *episodes, rollout_s=8.0):
    clock = StepTimings({"rollout": rollout_s, "train": 2.0, "evaluate": 90.0})
    return clock.metrics([one.trajectory for one in episodes], scoring_concurrency(config))


def test_step_timings_include_reward_time_and_scoring_hint_suggests_more_processes():
    config = load_config("search", ["--rollout.reward_processes", "2"])
    found = timed(config, episode(1.0, 1.0, 4.0, 3.0), episode(1.0, 1.0, 2.0, 5.0))
    assert found["episode/scoring_s"] == 3.0
    assert (found["scoring/total_s"], found["scoring/slowest_s"]) == (8.0, 5.0)
    assert found["scoring/busy"] == 8.0 / (2 * 10.0)
    assert episode_shares(found) == {"model": 0.2, "tools": 0.2, "scoring": 0.6}
    said = scoring_hint(found, config)
    assert "take 40% of the step (8 s, 2 at a time, the slowest 5 s)" in said
    assert "60% of its time" in said
    assert "Raise rollout.reward_processes (2)" in said
    told = format_times(mean_timings([MetricsRow(1, found), MetricsRow(2, found)]))
    assert told == (
        "Mean step time 100 s: rollout 8%, train 2%, evaluate 90%. Episode time: model 20%, tools 20%, rewards 60%."
    )
    assert scoring_hint(timed(config, episode(1.0, 1.0, 0.1, 8.0)), config) == ""
    assert scoring_hint(timed(config, episode(1.0, 1.0, 8.0, 0.1)), config) == ""
    assert scoring_hint(timed(config), config) == ""


def test_straggler_hint_reports_steps_waiting_for_few_long_episodes():
    config = load_config("search")
    normal = [episode(0.5, 0.5)] * 60
    found = timed(config, *normal, episode(4.0, 3.0))
    assert (found["episode/median_s"], found["episode/p99_s"]) == (1.0, 7.0)
    said = straggler_hint(found, config)
    assert "the slowest 1 % take 7 s or more, the median 1 s" in said
    assert straggler_hint(timed(config, *normal, episode(2.0, 3.0)), config) == ""
    assert straggler_hint(timed(config, *normal, episode(4.0, 3.0), rollout_s=23.0), config) == ""
    assert straggler_hint(timed(config, *normal, *normal, episode(4.0, 3.0)), config) == ""
    assert straggler_hint(timed(config), config) == ""
    assert straggler_hint(timed(config, *[episode(0.05, 0.05)] * 60, episode(0.6, 0.3), rollout_s=0.9), config) == ""
    assert straggler_hint(found, load_config("search", ["--training.mode", "async"])) == ""


def test_scoring_hint_on_a_cluster_names_the_reward_workers():
    words = ["--cluster.kind", "local", "--cluster.reward_workers", "2", "--cluster.scorings_per_worker", "2"]
    config = load_config("search", words)
    found = timed(config, episode(1.0, 0.0, 4.0, 20.0))
    assert "4 at a time" in scoring_hint(found, config)
    assert "Raise cluster.reward_workers (2)" in scoring_hint(found, config)
    assert scoring_concurrency(load_config("search", ["--cluster.kind", "local", "--cluster.workers", "3"])) == 3


def shown(progress):
    (task,) = [task for task in progress.tasks if task.description == "episodes"]
    return task.fields["numbers"]


def test_rollout_progress_bar_splits_time_between_tools_rewards_and_model():
    engine = LocalEngine(build(), settings=SMALL)
    with Progress(TextColumn("{task.fields[numbers]}"), console=Console(file=io.StringIO())) as progress:
        reporter = ProgressReporter(progress, steps=1)
        reporter.phase("episodes", 2, engine)
        asyncio.run(engine.generate(Request("e", (1, 2, 3), SamplingParams(max_new_tokens=5))))
        reporter.episode(episode(model_s=2.0, tools_s=1.0))
        reporter.episode(episode(model_s=1.0, tools_s=0.0))
        assert "decode and" in shown(progress)
        assert shown(progress).endswith("time: tools 25%, model 75%")
        reporter.phase("episodes", 2)
        reporter.episode(episode(model_s=1.0, tools_s=1.0))
        assert shown(progress) == "time: tools 50%, model 50%"
        reporter.episode(episode(model_s=1.0, tools_s=0.0, scoring_s=1.0))
        assert shown(progress) == "time: tools 25%, rewards 25%, model 50%"
    asyncio.run(engine.close())


LONG = "  slow: search 2 times, to 1.2 s" * 6


def lines_of(file):
    """The lines of a file without ETAs."""
    return re.sub("  ETA [0-9:]+", "", file.getvalue()).splitlines()


def last_once_it_is(file, line):
    """The last line of a file once it is this one, or what it is after a minute."""
    deadline = time.monotonic() + 60
    while lines_of(file)[-1:] != [line] and time.monotonic() < deadline:
        time.sleep(0.01)
    return lines_of(file)[-1]


def test_piped_progress_prints_changed_lines_periodically_without_cut_parts():
    file = io.StringIO()
    with bars(Console(file=file, width=PIPE_COLUMNS), every_s=0.02) as progress:
        steps = progress.add_task("training", total=50, completed=2, resumed_at=2, numbers="")
        line = "training 2/50"
        assert last_once_it_is(file, line) == line
        phase = progress.add_task("step 3: episodes", total=24, numbers="")
        progress.update(phase, advance=7, numbers=LONG.strip())
        line = f"training 2/50  |  step 3: episodes 7/24{LONG[: len(LONG) // 3]}"
        assert last_once_it_is(file, line) == line
        before = lines_of(file)
        time.sleep(0.1)
        assert lines_of(file) == before
        progress.remove_task(phase)
        progress.add_task("step 3: learning", total=None, numbers="")
        line = "training 2/50  |  step 3: learning"
        assert last_once_it_is(file, line) == line
        progress.update(steps, completed=3, numbers="reward 0.5")
    assert lines_of(file)[-1] == "training 3/50  reward 0.5  |  step 3: learning"
    assert all(line.startswith("training ") for line in lines_of(file))
    assert all(len(line) < PIPE_COLUMNS for line in file.getvalue().splitlines())


def test_short_piped_run_prints_only_its_last_line_and_unwrapped_alarms():
    file = io.StringIO()
    with bars(Console(file=file, width=PIPE_COLUMNS)) as progress:
        reporter = ProgressReporter(progress, steps=2)
        reporter.alarm(LONG)
        reporter.step(1, {"reward/mean": 0.25}, {})
        reporter.step(2, {"reward/mean": 0.5, "success/mean": 1.0}, {})
    assert lines_of(file) == [f"! {LONG}", "training 2/2  reward 0.500  success 100%  0 tokens/s"]


def test_transient_progress_in_a_pipe_prints_no_line():
    file = io.StringIO()
    with bars(Console(file=file, width=PIPE_COLUMNS), transient=True) as progress:
        progress.add_task("agent 1", total=2, numbers="")
    assert file.getvalue() == ""


@pytest.mark.parametrize("width", [60, 80, 140])
def test_progress_bar_at_any_width_omits_only_complete_numbers(width):
    parts = ("reward 0.550", "success 50%", "held-out 61%", "1,234 tokens/s", "idle: learner 60%")
    console = Console(file=io.StringIO(), width=width, force_terminal=True)
    with bars(console) as progress:
        steps = progress.add_task("training", total=100, completed=10, resumed_at=10, numbers="")
        progress.update(steps, completed=12, numbers="  ".join(parts))
        progress.add_task("step 12: evaluation, composition", total=250, numbers=DONE.line())
    shown = io.StringIO()
    Console(file=shown, width=width, force_terminal=True).print(progress.get_renderable())
    training, evaluation = re.sub(r"\x1b\[[0-9;]*m", "", shown.getvalue()).splitlines()
    assert re.match(r"training +[━╸╺]+ +12/100 +ETA [0-9:]+", training)
    assert re.match(r"step 12: evaluation, composition +━+ +0/250 +ETA -:--", evaluation)
    numbers = training.partition("ETA ")[2].split(" ", 1)[1].strip()
    assert "  ".join(parts).startswith(numbers)
    assert numbers == "" or numbers.split("  ")[-1] in parts
    assert ("held-out 61%" in numbers) == (width == 140)


@pytest.mark.parametrize("width", [45, 60])
def test_narrow_terminal_shortens_the_task_name_but_not_counts_or_eta(width):
    with bars(Console(file=io.StringIO(), width=width, force_terminal=True)) as progress:
        progress.add_task("step 1234: waiting for episodes of the step", total=12000, completed=11000, numbers="a  b")
        shown = io.StringIO()
        Console(file=shown, width=width, force_terminal=True).print(progress.get_renderable())
    (line,) = re.sub(r"\x1b\[[0-9;]*m", "", shown.getvalue()).splitlines()
    assert re.match(r"step 1234(: waiting for)? +[━╸╺]+ +11000/12000 +ETA [-:0-9]+", line)


def test_task_without_total_shows_elapsed_time_and_slow_task_its_eta():
    clock = iter([0.0, *[100.0] * 9])
    with Progress(disable=True, get_time=lambda: next(clock)) as progress:
        steps = progress.add_task("training", total=50, completed=10, resumed_at=10, numbers="")
        progress.update(steps, completed=11)
        assert format_eta(progress.tasks[0]) == "ETA 1:05:00"
        endless = progress.add_task("step 1: training", total=None, numbers="")
        assert format_eta(progress.tasks[endless]) == "0:00 elapsed"


def test_warnings_and_log_messages_of_libraries_are_printed_above_the_bars(capfd):
    logger = logging.getLogger("some_library")
    logger.addHandler(logging.StreamHandler(sys.stderr))
    logger.addHandler(logging.lastResort)  # its stream cannot be set
    silence_libraries()
    file = io.StringIO()
    with bars(Console(file=file, width=80, force_terminal=True)) as progress:
        progress.add_task("training", total=2, numbers="")
        logger.warning("the tokenizer is slow")
        print("a dtype is deprecated", file=sys.stderr)  # as Python prints warnings
    assert "the tokenizer is slow\n" in file.getvalue()
    assert "a dtype is deprecated" in file.getvalue()
    assert capfd.readouterr().err == ""
