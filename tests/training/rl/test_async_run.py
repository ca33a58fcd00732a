"""Small asynchronous runs: no token is too old, no episode is lost, and faults are reported."""

from __future__ import annotations

import asyncio
import gzip
import json
import threading
from collections import Counter
from contextlib import suppress
from pathlib import Path

import pytest
import torch

import ledger_total
from ludus.algorithms.spec.resolve import PRESETS, algorithm_of
from ludus.cli.ui.progress import format_idle
from ludus.config.load import load_config
from ludus.config.schema import Config
from ludus.config.sections.rollout import RolloutConfig
from ludus.config.sections.training import StalenessConfig
from ludus.diagnostics.trackers import read_metrics
from ludus.envs.base import TaskOrder
from ludus.errors import StorageError, WorldError
from ludus.rewards.registry import NAMED, RegisteredReward
from ludus.rollouts.ledger import AccountingError, Ledger, RolloutKey, RolloutOutcome
from ludus.rollouts.rollout_files import read_rollouts, rollouts_path
from ludus.rollouts.scheduler import Episode, FailureBudget
from ludus.training.collection.filters import ESS, ess_guard, ess_warning, mask_over_age, staleness_metrics
from ludus.training.collection.prompt_stream import PromptStream
from ludus.training.collection.rollout_collector import RolloutCollector
from ludus.training.credit.advantages import TrainingSample, training_rows
from ludus.training.rl import build, validate
from ludus.training.rl.async_trainer import AsyncTrainer
from ludus.training.rl.train_step import LearnerThread, TrainStep
from ludus.training.run.checkpoint import checkpoint_path
from ludus.training.run.run_dir import list_checkpoints
from ludus.types import Segment, StopReason, Task, Trajectory
from small_runs import lasting_files
from small_worlds import RecordingWorld, make_requests, make_scheduler, scripted
from tiny_run import cold_start, ludus, make_recipe, refused
from waiting import until

STEPS = 6
BOUND = 2


def words(tiny_run, folder: Path, mode: str, **changes) -> list[str]:
    given = {
        "training.mode": mode,
        "training.steps": STEPS,
        "training.checkpoint_every": 2,
        "staleness.max_staleness": BOUND,
        "evaluation.every": 99,
        "evaluation.tasks": 2,
        "run.dir": folder / "run",
    } | {key.replace("__", "."): value for key, value in changes.items()}
    flat = [str(word) for key, value in given.items() for word in (f"--{key}", value)]
    return ["train", str(make_recipe(folder)), "--model", str(cold_start(tiny_run)), *flat]


def run(tiny_run, folder: Path, mode: str, **changes) -> Path:
    folder.mkdir(exist_ok=True)
    said = ludus(*words(tiny_run, folder, mode, **changes))
    assert said.code == 0, said
    return folder / "run"


def records(run: Path, steps: int = STEPS):
    return [(step, r) for step in range(1, steps + 1) for r in read_rollouts(rollouts_path(run, step))]


@pytest.fixture(scope="module")
def threads_before() -> set[threading.Thread]:
    """Those of other tests: engines that were never closed."""
    return set(threading.enumerate())


@pytest.fixture(scope="module")
def streamed(tiny_run, threads_before, tmp_path_factory) -> Path:
    return run(tiny_run, tmp_path_factory.mktemp("streamed"), "async")


def test_every_action_token_has_a_version_within_the_bound(streamed):
    every = records(streamed)
    for step, record in every:
        for segment in record.trajectory.segments:
            if segment.kind == "action":
                assert len(segment.versions) == len(segment.tokens)
                assert all(0 <= step - 1 - version <= BOUND for version in segment.versions)
    ages = {step - 1 - v for step, r in every for s in r.trajectory.segments for v in s.versions}
    assert max(ages) > 0  # it was not in step


def test_no_episode_is_lost_or_trained_twice(streamed):
    every = records(streamed)
    assert len({record.key for _, record in every}) == len(every) == STEPS * 9
    for row in read_metrics(streamed / "metrics.jsonl"):
        ended = [row.metrics[f"ledger/{name}"] for name in ("trained", "masked", "dropped", "failed")]
        assert row.metrics["ledger/started"] == sum(ended) == 9
        groups = Counter(record.group for step, record in every if step == row.step)
        assert all(count % 3 == 0 for count in groups.values())


def test_sampling_speed_of_a_stream_is_over_the_whole_step(streamed):
    sampled = Counter()
    for step, record in records(streamed):
        sampled[step] += record.trajectory.num_action_tokens
    for row in read_metrics(streamed / "timings.jsonl"):
        seconds = row.metrics["time/step_s"] - row.metrics.get("time/evaluate_s", 0.0)
        assert row.metrics["speed/sampled_tokens_per_s"] * seconds == pytest.approx(sampled[row.step])


def test_sampled_and_trained_metrics_match_the_rollouts(streamed):
    rows = [row.metrics for row in read_metrics(streamed / "metrics.jsonl")]
    assert sum(m["sampled/episodes"] for m in rows) == STEPS * 9
    for metrics in rows:
        shares = [metrics[f"staleness/age_{age}"] for age in range(BOUND + 1)]
        assert sum(shares) == pytest.approx(1 if metrics["trained/episodes"] else 0)
        assert metrics["staleness/max"] <= BOUND
        assert metrics["staleness/over_age_tokens"] == 0
    tokens = sum(m.get("sampled/action_tokens", 0.0) * m["sampled/episodes"] for m in rows)
    assert tokens == pytest.approx(sum(r.trajectory.num_action_tokens for _, r in records(streamed)))


def test_timings_report_idle_shares_and_queue_lengths(streamed):
    for row in read_metrics(streamed / "timings.jsonl"):
        assert 0 <= row.metrics["idle/learner"] <= 1
        assert 0 <= row.metrics["idle/engine"] <= 1
        assert row.metrics["queue/in_flight"] <= row.metrics["queue/in_flight_limit"] <= 32


def test_one_step_mode_is_deterministic_and_one_version_behind(tiny_run, tmp_path):
    folders = [run(tiny_run, tmp_path / name, "one_step", training__steps=3) for name in "ab"]
    first, second = map(lasting_files, folders)
    assert first.keys() == second.keys()
    assert [name for name in first if first[name] != second[name]] == []
    for step, record in records(folders[0], 3):
        versions = {v for s in record.trajectory.segments for v in s.versions}
        assert versions == {max(0, step - 2)}
    rows = read_metrics(folders[0] / "metrics.jsonl")
    assert [row.metrics["staleness/mean"] for row in rows] == [0.0, 1.0, 1.0]


@pytest.mark.slow
def test_run_recomputing_the_kv_cache_trains_every_episode(tiny_run, tmp_path, monkeypatch):
    plain, again = build.make_engine, []

    def counting(session):
        engine = plain(session)
        told = engine.stats

        def stats(reset=False):
            again.append(told(reset=False).recomputed_tokens)
            return told(reset=reset)

        engine.stats = stats
        return engine

    monkeypatch.setattr(build, "make_engine", counting)
    changes = {"staleness__kv_cache_on_update": "recompute", "staleness__max_staleness": BOUND, "training__steps": 4}
    folder = run(tiny_run, tmp_path / "prefill", "async", **changes)
    every = records(folder, 4)
    assert len({record.key for _, record in every}) == len(every) == 4 * 9
    for step, record in every:
        versions = [v for s in record.trajectory.segments for v in s.versions]
        assert versions == sorted(versions)
        assert all(0 <= step - 1 - version <= BOUND for version in versions)
    rows = read_metrics(folder / "metrics.jsonl")
    gaps = [row.metrics["sync/probe_gap"] for row in rows if "sync/probe_gap" in row.metrics]
    assert gaps
    assert max(gaps) < 1e-3
    assert max(again) > 0


def test_kv_cache_setting_without_effect_on_a_server_warns():
    asked = ["--training.mode", "async", *SERVED]
    assert any(
        "staleness.kv_cache_on_update has no effect" in text
        for text in validate.config_warnings(load_config("search", asked))
    )
    again = [*asked, "--staleness.kv_cache_on_update", "recompute"]
    assert not any(
        "staleness.kv_cache_on_update" in text for text in validate.config_warnings(load_config("search", again))
    )


@pytest.mark.slow
def test_weight_transfer_timeout_stops_the_run(tiny_run, tmp_path, monkeypatch):
    plain = build.make_engine

    def slow(session):
        engine = plain(session)
        load = engine.load_weights

        async def load_weights(version, state):
            await asyncio.sleep(60 if version == 1 else 0)
            await load(version, state)

        engine.load_weights = load_weights
        return engine

    monkeypatch.setattr(build, "make_engine", slow)
    said = refused(*words(tiny_run, tmp_path, "async", training__sync_timeout_s=5), code=6)
    assert "Sending weights 1 took longer than 5 s" in said
    assert "training.sync_timeout_s" in said


def with_proofs_of_the_engine(monkeypatch, proof) -> None:
    """What the engine says of its weights is what `proof` makes of their digest and version."""
    plain = build.make_engine

    def made(session):
        engine, sent = plain(session), []
        load, digest = engine.load_weights, engine.fingerprint

        async def load_weights(version, state):
            sent.append(version)
            await load(version, state)

        async def fingerprint(*, adapter=None):
            return await proof(await digest(adapter=adapter), sent[-1])

        engine.load_weights, engine.fingerprint = load_weights, fingerprint
        return engine

    monkeypatch.setattr(build, "make_engine", made)


@pytest.mark.slow
def test_learner_continues_while_the_engine_verifies_its_weights(tiny_run, tmp_path, monkeypatch):
    rows = tmp_path / "run" / "metrics.jsonl"

    async def after_the_step(digest: str, version: int) -> str:
        while version == 1 and not rows.exists():  # it has the step's metrics, which come after the transfer
            await asyncio.sleep(0.01)
        return digest

    with_proofs_of_the_engine(monkeypatch, after_the_step)
    found = read_metrics(run(tiny_run, tmp_path, "async", training__sync_timeout_s=30) / "metrics.jsonl")
    assert sum("sync/probe_gap" in row.metrics for row in found) >= STEPS - 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("interruptible", "rests"), [("true", True), pytest.param("false", False, marks=pytest.mark.fault)]
)
def test_engine_is_throttled_by_waiting_batches_only_if_interruptible(
    interruptible, rests, tiny_run, tmp_path, monkeypatch
):
    """With a learner that takes until then."""
    plain, learn, told = build.make_engine, TrainStep.run, []

    def made(session):
        engine = plain(session)
        engine.throttle = told.append
        return engine

    async def slowly(*given):
        with suppress(TimeoutError):
            await until(lambda: not rests or any(told), 3)
        return await learn(*given)

    monkeypatch.setattr(build, "make_engine", made)
    monkeypatch.setattr(TrainStep, "run", slowly)
    run(tiny_run, tmp_path, "async", staleness__in_flight_weight_updates=interruptible)
    assert any(told) == rests
    assert not told or told[-1] == 0


@pytest.mark.slow
def test_engine_weight_mismatch_stops_the_run(tiny_run, tmp_path, monkeypatch):
    async def wrong(digest: str, version: int) -> str:
        return digest if version < 2 else "0" * len(digest)

    with_proofs_of_the_engine(monkeypatch, wrong)
    said = refused(*words(tiny_run, tmp_path, "async"), code=6)
    assert "weights are not those of version 2" in said


@pytest.mark.slow
def test_episodes_have_one_version_without_in_flight_updates(tiny_run, tmp_path):
    folder = run(tiny_run, tmp_path / "whole", "async", staleness__in_flight_weight_updates="false", training__steps=4)
    for _, record in records(folder, 4):
        assert len({v for s in record.trajectory.segments for v in s.versions}) == 1


@pytest.mark.fault
def test_episodes_dropped_by_a_smaller_bound_on_resume_are_counted(tiny_run, tmp_path):
    """Cut after step 4 and resumed in step: groups of version 3 and before are played anew."""
    folder = run(tiny_run, tmp_path / "cut", "async", training__steps=STEPS)
    text = (checkpoint_path(folder / "checkpoints", 4) / "trainer" / "stream.jsonl").read_text()
    lines = [json.loads(line) for line in text.splitlines()[1:]]
    late = sum(len(head["ended"]) for head in lines if "ended" in head and head["version"] < 4)
    assert late > 0
    (folder / "checkpoints" / f"step-{STEPS:06d}").rename(tmp_path / "gone")
    assert ludus("train", "--resume", folder, "--staleness.max_staleness", "0").code == 0
    rows = [row.metrics for row in read_metrics(folder / "metrics.jsonl")][4:]
    assert rows[0]["ledger/dropped/too_late"] == late
    for row in rows:
        ended = [row[f"ledger/{name}"] for name in ("trained", "masked", "dropped", "failed")]
        assert row["ledger/started"] == sum(ended)
        assert sum(ended) - row.get("ledger/dropped/too_late", 0) >= 9  # a batch of its own beside them


@pytest.mark.fault
def test_resumed_run_keeps_every_finished_episode(streamed, tiny_run, tmp_path):
    """Cut after step 4: what was on its way there trains later, token for token, and under its own number."""
    folder = run(tiny_run, tmp_path / "cut", "async", training__steps=STEPS)
    checkpoint = checkpoint_path(folder / "checkpoints", 4)
    heads, waiting, lines = [], {}, (checkpoint / "trainer" / "stream.jsonl").read_text().splitlines()
    for line in map(json.loads, lines[1:]):
        if "group" in line and "ended" in line:
            heads.append(line["group"])
        else:
            sample = line["trajectory"]["sample"]
            waiting[line["step"], line["group"], sample] = line["trajectory"]["segments"]
    assert heads
    (folder / "checkpoints" / f"step-{STEPS:06d}").rename(tmp_path / "gone")
    assert ludus("train", "--resume", folder).code == 0
    every = records(folder)
    assert len({record.key for _, record in every}) == len(every) == STEPS * 9
    found = {(r.step, r.group, r.trajectory.sample): r for step, r in every if step > 4}
    for key, segments in waiting.items():
        kept = [list(s.tokens) for s in found[key].trajectory.segments]
        assert kept == [segment["tokens"] for segment in segments]
    total = json.loads((checkpoint_path(folder / "checkpoints", STEPS) / "trainer" / "state.json").read_text())
    assert total["ledger"]["total"]["started"] == STEPS * 9


@pytest.mark.fault
@pytest.mark.parametrize("mode", ["sync", "one_step"])
def test_finished_episodes_are_counted_as_late_when_leaving_async_mode(mode, tiny_run, tmp_path):
    folder = run(tiny_run, tmp_path / "left", "async")
    (folder / "checkpoints" / f"step-{STEPS:06d}").rename(tmp_path / "gone")
    text = (checkpoint_path(folder / "checkpoints", 4) / "trainer" / "stream.jsonl").read_text()
    ended = sum(len(json.loads(line)["ended"]) for line in text.splitlines()[1:] if '"ended"' in line)
    assert ended > 0
    assert ludus("train", "--resume", folder, "--training.mode", mode).code == 0
    rows = [row.metrics for row in read_metrics(folder / "metrics.jsonl")]
    assert rows[4]["ledger/dropped/too_late"] == ended
    assert rows[4]["ledger/started"] == 9 + ended
    assert rows[5]["ledger/started"] == 9


@pytest.mark.fault
def test_training_mode_can_change_on_resume(tiny_run, tmp_path):
    folder = run(tiny_run, tmp_path / "changing", "sync", training__steps=2)
    for steps, mode in ((4, "async"), (5, "one_step"), (6, "sync")):
        assert ludus("train", "--resume", folder, "--training.mode", mode, "--training.steps", steps).code == 0
    assert [row.step for row in read_metrics(folder / "metrics.jsonl")] == list(range(1, 7))


@pytest.mark.slow
def test_oversampling_keeps_the_first_members_and_counts_cancelled_ones(tiny_run, tmp_path):
    folder = run(tiny_run, tmp_path / "spare", "async", staleness__oversample=2, training__steps=3)
    rows = [row.metrics for row in read_metrics(folder / "metrics.jsonl")]
    assert len(records(folder, 3)) >= 3 * 9
    for step in (1, 2, 3):
        sizes = Counter(r.key.task_id for s, r in records(folder, 3) if s == step)
        assert set(sizes.values()) <= {3, 6, 9}
    assert sum(m["ledger/started"] for m in rows) > 3 * 9
    assert sum(m.get("ledger/dropped/cancelled", 0) for m in rows) > 0


@pytest.mark.slow
def test_group_failing_in_an_extra_reward_is_replaced(tiny_run, tmp_path, monkeypatch):
    def fails_for_some(task, trajectory):
        if task.id in ("train:apple", "train:plum"):
            raise ValueError("not this one")
        return 0.5

    monkeypatch.setitem(NAMED, "citation_support", RegisteredReward(lambda: fails_for_some))
    changes = {"rewards__extra__citation_support__weight": 0.1, "rollout__reward_processes": 0}
    changes |= {"rollout__max_failure_rate": 1.0, "training__steps": 3, "env__check": "false"}
    folder = run(tiny_run, tmp_path / "added", "async", **changes)
    for step in (1, 2, 3):
        found = read_rollouts(rollouts_path(folder, step))
        assert sum(record.trajectory.failure is None for record in found) == 9
    rows = [row.metrics for row in read_metrics(folder / "metrics.jsonl")]
    assert sum(metrics["ledger/failed"] for metrics in rows) > 0
    for _, record in records(folder, 3):
        assert record.outcome is RolloutOutcome.FAILED or record.trajectory.rewards["citation_support"] == 0.5


@pytest.mark.fault
def test_groups_started_before_resume_keep_their_members(tiny_run, tmp_path):
    folder = run(tiny_run, tmp_path / "spare", "async", staleness__oversample=2)
    (folder / "checkpoints" / f"step-{STEPS:06d}").rename(tmp_path / "gone")
    text = (checkpoint_path(folder / "checkpoints", 4) / "trainer" / "stream.jsonl").read_text()
    heads = [json.loads(line) for line in text.splitlines()[1:] if '"ended"' in line]
    assert max(place for head in heads for place in head["ended"]) >= 2
    fewer = ("--staleness.oversample", "0", "--algorithm.group_size", "2")
    assert ludus("train", "--resume", folder, *fewer).code == 0
    rows = [row.metrics for row in read_metrics(folder / "metrics.jsonl")]
    assert len(rows) == STEPS
    assert not any("ledger/dropped/too_late" in metrics for metrics in rows)


@pytest.mark.slow
def test_zero_variance_groups_are_replaced_while_streaming(tiny_run, tmp_path):
    changes = {"algorithm__preset": "dapo", "algorithm__greso": "true", "training__prompts_per_step": 2}
    folder = run(tiny_run, tmp_path / "dapo", "async", algorithm__max_resample_rounds=1, training__steps=4, **changes)
    rows = [row.metrics for row in read_metrics(folder / "metrics.jsonl")]
    assert sum(m.get("ledger/dropped/zero_variance", 0) for m in rows) > 0
    for row in rows:  # a step has its groups, and one round of others at most
        assert 6 <= row["ledger/started"] <= 12
        assert row["ledger/started"] == row["ledger/trained"] + row["ledger/dropped"] + row["ledger/masked"]
    played = [(record.key.step, record.group) for _, record in records(folder, 4)]
    assert set(Counter(played).values()) == {3}


@pytest.mark.slow
def test_replayed_groups_train_but_are_not_counted_as_episodes(tiny_run, tmp_path):
    changes = {"staleness__replay__share": 0.5, "staleness__replay__max_age": 4}
    folder = run(tiny_run, tmp_path / "again", "async", **changes)
    rows = [row.metrics for row in read_metrics(folder / "metrics.jsonl")]
    assert sum(m["replay/trained"] for m in rows) > 0
    for m in rows:
        assert m["ledger/started"] == 9
        assert m.get("batch/trained_rows", 0) == m["ledger/trained"] + m["replay/trained"]
        assert m["staleness/max"] <= 4
    assert len({record.key for _, record in records(folder)}) == STEPS * 9
    assert ludus("train", "--resume", folder, "--training.steps", STEPS + 1).code == 0
    last = list(read_metrics(folder / "metrics.jsonl"))[-1].metrics
    assert last["replay/groups"] == min(3, rows[-1]["replay/kept"] - last["replay/expired"]) > 0


def test_no_thread_remains_after_a_run(streamed, threads_before):
    names = [thread.name for thread in threading.enumerate() if thread not in threads_before]
    assert not [name for name in names if name.startswith(("ludus-learner", "ludus-engine"))]


@pytest.mark.fault
def test_full_disk_stops_the_run_which_can_resume_later(tiny_run, tmp_path):
    folder = run(tiny_run, tmp_path / "full", "async", training__steps=2)
    timings = folder / "timings.jsonl"
    timings.unlink()
    timings.symlink_to("/dev/full")
    said = refused("train", "--resume", folder, "--training.steps", "4")
    assert "No space left on device" in said
    assert f"ludus train --resume {folder}" in said
    timings.unlink()
    assert ludus("train", "--resume", folder).code == 0
    assert [row.step for row in read_metrics(folder / "metrics.jsonl")] == [1, 2, 3, 4]


HANGING = """
import asyncio
import tiny_world
from dataclasses import dataclass, fields
from ludus.envs.tool_world import ToolWorld

@dataclass
class HangingEngine:
    inner: object
    def __getattr__(self, name):
        return getattr(self.inner, name)
    async def step(self, action):
        await asyncio.sleep(1e6)

class Prices(ToolWorld):
    def environment(self, task):
        found = super().environment(task)
        return HangingEngine(found) if task.id.endswith(":apple") else found

def make_world(settings, limits):
    world = tiny_world.make_world(settings, limits)
    return Prices(**{f.name: getattr(world, f.name) for f in fields(world) if f.init})
"""


@pytest.mark.fault
def test_hanging_environment_delays_only_its_own_episodes(tiny_run, tmp_path):
    world = tmp_path / "hanging.py"
    world.write_text(HANGING)
    changes = {"rollout__environment_timeout_s": 1.5, "rollout__retries": 1, "rollout__max_failure_rate": 0.5}
    folder = run(tiny_run, tmp_path / "hangs", "async", env__name=world, env__check="false", **changes)
    rows = [row.metrics for row in read_metrics(folder / "metrics.jsonl")]
    reasons = {(r.group, r.outcome, r.reason) for _, r in records(folder)}
    failed = {group for group, outcome, _ in reasons if outcome == "failed"}
    assert failed == {"train:apple"}
    assert sum(m["trained/episodes"] + m["ledger/masked"] + m["ledger/dropped"] for m in rows) >= STEPS * 9
    assert sum(m["ledger/clock_limited"] for m in rows) > 0
    assert sum(m["ledger/failed"] for m in rows) == 2 * sum(r.outcome == "failed" for _, r in records(folder))


def chain(*versions: int, reward: float = 1.0) -> TrainingSample:
    ids = tuple(range(3, 3 + len(versions)))
    action = Segment("action", ids, logprobs=(-1.0,) * len(ids), versions=versions)
    one = Trajectory("t", 0, (Segment("prompt", (1, 2)), action), (), StopReason.ANSWERED, reward=reward)
    episode = Episode(RolloutKey(1, "t", 0), Task("t", (), None), one)
    return TrainingSample(episode, RolloutOutcome.TRAINED, "trained", advantages=(1.0,) * len(ids))


def test_tokens_over_age_are_masked_and_counted():
    old, mixed, new = chain(0, 0), chain(0, 2, 3), chain(3, 3)
    credits = mask_over_age([old, mixed, new], step=4, bound=1)
    assert [c.reason for c in credits] == ["over_age", "trained", "trained"]
    rows = training_rows(credits, mask_observations=True)
    assert rows[0].trains == (False, False, False, True, True)
    assert rows[1].trains == (False, False, True, True)
    config = StalenessConfig(max_staleness=1, on_stale="mask")
    metrics = staleness_metrics(credits, 4, config, [], "exact_match")
    assert (metrics["staleness/over_age_tokens"], metrics["staleness/max"]) == (3, 1)
    assert metrics["staleness/age_0"] == 0.75


def test_low_effective_sample_share_warns_then_stops():
    settings = StalenessConfig(min_ess=0.5, ess_patience=2)
    guard = ess_guard(Config(staleness=settings))
    assert ess_warning({ESS: 0.6}, settings) == ess_warning({}, settings) == ""
    assert "0.40, below staleness.min_ess" in ess_warning({ESS: 0.4}, settings)
    assert [guard.update({ESS: share}) for share in (0.6, 0.4, 0.6, 0.1)] == [""] * 4
    assert guard.update({}) == ""
    assert "2 steps in a row" in guard.update({ESS: 0.1})


def test_low_share_streak_continues_after_resume():
    low, whole = {ESS: 0.1}, {ESS: 0.9}
    for before, more in (([], 3), ([whole, low], 2), ([low, whole, low, low], 1), ([low, low, low], 3)):
        guard = ess_guard(Config(staleness=StalenessConfig(min_ess=0.5, ess_patience=3)))
        guard.restore(before)
        assert [guard.update(low) for _ in range(more - 1)] == [""] * (more - 1)
        assert "3 steps in a row" in guard.update(low)


@pytest.mark.fault
def test_ess_patience_counts_steps_across_resumes(tiny_run, tmp_path):
    bound = {"staleness__min_ess": 1, "staleness__ess_patience": 3, "training__checkpoint_every": 1}
    folder = run(tiny_run, tmp_path / "cut", "sync", training__steps=2, **bound)
    assert "paused after step 3" in refused("train", "--resume", folder, "--training.steps", "4", code=5)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_run_with_low_effective_sample_share_pauses_and_can_resume(mode, tiny_run, tmp_path):
    """Rounding alone keeps the share of a step below 1, also on policy."""
    bound = {"staleness.min_ess": 1, "staleness.ess_patience": 2, "training.checkpoint_every": 99, "training.steps": 4}
    flat = [str(word) for key, value in bound.items() for word in (f"--{key}", value)]
    said = refused(*words(tiny_run, tmp_path, mode), *flat, code=5)
    folder = tmp_path / "run"
    rows = [row for row in read_metrics(folder / "metrics.jsonl") if ESS in row.metrics]
    paused = rows[1].step
    assert [row.metrics[ESS] < 1 for row in rows] == [True, True]
    assert "below 1 for 2 steps in a row" in said
    assert f"paused after step {paused}" in said
    assert "staleness.min_ess" in said
    assert f"ludus train --resume {folder}" in said
    log = (folder / "log.txt").read_text()
    assert log.count("below staleness.min_ess = 1") == 2
    assert [step for step, _ in list_checkpoints(folder / "checkpoints")] == [paused]
    assert ludus("train", "--resume", folder, "--staleness.min_ess", "0").code == 0
    assert [row.step for row in read_metrics(folder / "metrics.jsonl")] == [1, 2, 3, 4]


SERVED = ["--engine.url", "http://127.0.0.1:1"]


@pytest.mark.parametrize(
    ("settings", "correction"),
    [
        ([], "none"),
        (SERVED, "none"),
        ([*SERVED, "--rollout.reproducible", "false"], "tis"),
        ([*SERVED, "--rollout.reproducible", "false", "--training.learner.old_logprobs", "engine"], "none"),
        (["--training.mode", "async"], "tis"),
        (["--training.mode", "one_step"], "tis"),
        (["--training.mode", "async", "--algorithm.correction", "icepop"], "icepop"),
        (["--training.mode", "async", "--algorithm.correction", "none"], "none"),
        (["--training.mode", "async", "--algorithm.loss", "dppo"], "none"),
        (["--training.mode", "async", "--algorithm.preset", "gspo"], "tis"),
    ],
)
def test_off_policy_training_is_corrected_by_default(settings, correction):
    assert algorithm_of(load_config("search", settings)).correction == correction


def test_spanning_ledger_counts_finished_and_carries_running_episodes():
    ledger = Ledger(spanning=True)
    early, late = RolloutKey(1, "a", 0), RolloutKey(1, "b", 0)
    ledger.start(early)
    ledger.start(late)
    ledger.finish(early, RolloutOutcome.TRAINED, "trained")
    counts = ledger.close(1, trained=1)
    assert (counts.started, counts.trained, ledger_total.running(ledger)) == (1, 1, 1)
    with pytest.raises(AccountingError, match="never started"):
        ledger.finish(early, RolloutOutcome.TRAINED, "trained")
    ledger.finish(late, RolloutOutcome.MASKED, "over_age")
    assert ledger.close(2, trained=0).by_reason == {"masked/over_age": 1}
    assert (ledger_total.total(ledger).started, ledger_total.running(ledger)) == (2, 0)


def test_spanning_ledger_state_includes_episodes_finished_since_last_step():
    ledger = Ledger(spanning=True)
    failed, running = RolloutKey(1, "a", 0), RolloutKey(1, "b", 0)
    ledger.close(1, trained=0)
    ledger.start(failed)
    ledger.start(running)
    ledger.finish(failed, RolloutOutcome.FAILED, "engine")
    counts = ledger_total.total(Ledger.restore(ledger.state(), spanning=True))
    assert (counts.started, counts.failed) == (1, 1)
    assert ledger_total.total(ledger).started == 2
    assert ledger.close(2, trained=0).failed == 1


def test_progress_line_shows_idle_shares_and_slow_tools():
    timings = {
        "idle/learner": 0.25,
        "idle/engine": 0.5,
        "queue/in_flight": 40.0,
        "queue/groups_ready": 3.0,
        "tools/look/stragglers": 2.0,
        "tools/look/slowest_s": 12.3,
        "tools/add/stragglers": 0.0,
    }
    assert format_idle({}, {"idle/learner": 0.25}) == "  idle: learner 25%"  # nobody knows of the engine
    line = format_idle({"staleness/mean": 1.23}, timings)
    for words_in_it in ("learner 25%", "engine 50%", "40 in flight", "3 groups", "age 1.2", "look 2 times, to 12.3"):
        assert words_in_it in line
    assert "add" not in line
    assert format_idle({}, {}) == ""
    assert format_idle({}, {"tools/look/stragglers": 1.0, "tools/look/slowest_s": 0.04}) == ""


def test_learner_thread_does_not_block_the_event_loop():
    async def both():
        thread, ticks, inside = LearnerThread(1), 0, threading.Event()

        def work():
            inside.set()
            assert let_go.wait(10)
            return torch.get_num_threads(), threading.current_thread().name

        let_go = threading.Event()
        task = asyncio.create_task(thread(work))
        while not inside.is_set() or ticks < 5:
            await asyncio.sleep(0.001)
            ticks += 1
        let_go.set()
        result = await task
        thread.close()
        return result, thread.busy_s

    (threads, name), busy_s = asyncio.run(both())
    assert (threads, name.startswith("ludus-learner")) == (1, True)
    assert busy_s > 0


@pytest.mark.slow
def test_learner_exception_stops_the_run(tiny_run, tmp_path, monkeypatch):
    folder = run(tiny_run, tmp_path / "broken", "async", training__steps=2)
    from ludus.training.learner.learner import Learner

    def fail(*arguments, **options):
        raise StorageError("The learner has no room.", "Make some.")

    with monkeypatch.context() as patch:
        patch.setattr(Learner, "train", fail)
        assert "The learner has no room" in refused("train", "--resume", folder, "--training.steps", "4")
    assert ludus("train", "--resume", folder).code == 0


def test_rollout_files_of_an_async_run_are_complete(streamed):
    for step in range(1, STEPS + 1):
        with gzip.open(rollouts_path(streamed, step)) as lines:
            assert len(lines.read().splitlines()) == 9


@pytest.mark.parametrize(("every", "stops"), [(10, False), (4, True)])
def test_failure_rate_counts_all_episodes_started_since_the_last_batch(every, stops):
    """Four steps' episodes begin while the learner is at one: one of ten fails for good, or one of four."""

    async def breaks(number):
        if number % every == 0:
            raise RuntimeError("it broke")

    world, limits = RecordingWorld(hooks={"start": breaks}), RolloutConfig(retries=0, max_failure_rate=0.2)
    scheduler = make_scheduler(scripted(["Paris"]), world, limits)
    collector = RolloutCollector(None, None, PRESETS["grpo"], None, scheduler.ledger)
    collector.scheduler = scheduler
    player = PromptStream(collector, TaskOrder([], 0), 10)
    player.budget = FailureBudget(10)

    async def play():
        return await asyncio.gather(*(player.run_one(request) for request in make_requests(40)))

    if stops:
        with pytest.raises(WorldError, match="episodes failed permanently"):
            asyncio.run(play())
    else:
        assert sum(episode.trajectory.failure is not None for episode in asyncio.run(play())) == 4


SLOW_TO_CLOSE = """
import asyncio
import tiny_world
from collections import defaultdict
from dataclasses import dataclass, fields
from ludus.envs.tool_world import ToolWorld

@dataclass(eq=False)
class SlowEngine:
    inner: object
    acted: list
    hangs: bool = False
    def __getattr__(self, name):
        return getattr(self.inner, name)
    async def step(self, action):
        if self not in self.acted:
            self.acted.append(self)
            self.hangs = len(self.acted) > 3
        if self.hangs:
            await asyncio.sleep(1e6)
        return await self.inner.step(action)
    async def close(self):
        await asyncio.sleep(2 * self.hangs)
        await self.inner.close()

ACTED = defaultdict(list)

class Prices(ToolWorld):
    def environment(self, task):
        found = super().environment(task)
        return SlowEngine(found, ACTED[task.id]) if task.id.startswith("train") else found

def make_world(settings, limits):
    world = tiny_world.make_world(settings, limits)
    return Prices(**{f.name: getattr(world, f.name) for f in fields(world) if f.init})
"""


@pytest.mark.fault
def test_members_cancelled_in_the_last_step_are_counted(tiny_run, tmp_path):
    """Three members of each group end; the other two hang, and their environments are slow to close."""
    world = tmp_path / "slow.py"
    world.write_text(SLOW_TO_CLOSE)
    changes = {"staleness__oversample": 2, "training__steps": 1, "env__name": world, "env__check": "false"}
    folder = run(tiny_run, tmp_path / "last", "async", **changes)
    (row,) = read_metrics(folder / "metrics.jsonl")
    assert row.metrics["ledger/started"] == 15
    assert row.metrics["ledger/dropped/cancelled"] == 6


def test_gap_of_a_background_check_is_kept_if_a_step_ends_meanwhile():
    trainer = AsyncTrainer(*[None] * 6)

    async def check():
        trainer.gaps = []  # as at the end of a step
        return 0.5

    asyncio.run(trainer._run_in_background(check))
    assert trainer.gaps == [0.5]
