"""Partial rollouts: a step ends at its token budget, and unfinished episodes continue in the next one."""

from __future__ import annotations

import asyncio
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from ludus.algorithms.spec.resolve import algorithm_of
from ludus.config.load import load_config
from ludus.diagnostics.trackers import read_metrics
from ludus.engines.base import Request
from ludus.engines.embedded.engine import LocalEngine
from ludus.errors import ConfigError
from ludus.rollouts.partial import PartialRollouts
from ludus.rollouts.rollout_files import read_rollouts, rollouts_path
from ludus.rollouts.scheduler import episode_name
from ludus.training.rl.validate import check_partial, unused_settings
from ludus.training.run.run_dir import write_manifest
from ludus.types import SamplingParams
from small_runs import lasting_files
from small_worlds import RecordingWorld, call, make_requests, make_scheduler, scripted, tokenizer
from tests.engines.test_engine_features import build, with_engine
from tiny_run import cold_start, ludus, make_recipe

STEPS, TOKENS, BOUND = 4, 120, 2
PLAIN = {"training.learning_rate": 1e-9}
"""Weights that do not change what is sampled: with them an interrupted episode equals a whole one."""


def run(tiny_run: Path, folder: Path, mode: str = "sync", **changes) -> Path:
    folder.mkdir(exist_ok=True)
    given = {
        "training.mode": mode,
        "training.steps": STEPS,
        "training.checkpoint_every": 2,
        "staleness.max_staleness": BOUND,
        "rollout.partial.tokens": TOKENS,
        "evaluation.every": 99,
        "evaluation.tasks": 2,
        "env.check": "false",
        "run.dir": folder / "run",
    } | {key.replace("__", "."): value for key, value in changes.items()}
    flat = [str(word) for key, value in given.items() for word in (f"--{key}", value)]
    said = ludus("train", make_recipe(folder), "--model", cold_start(tiny_run), *flat)
    assert said.code == 0, said
    return folder / "run"


def records(run: Path, steps: int = STEPS):
    return [(step, r) for step in range(1, steps + 1) for r in read_rollouts(rollouts_path(run, step))]


def segments(run: Path) -> dict:
    """Tokens and log-probabilities of every rollout, by its key."""
    return {r.key: [(s.kind, s.tokens, s.logprobs) for s in r.trajectory.segments] for _, r in records(run)}


def metrics(run: Path) -> list[dict[str, float]]:
    return [row.metrics for row in read_metrics(run / "metrics.jsonl")]


def test_a_free_slot_starts_a_pending_episode_while_others_run():
    requests, search = make_requests(4, step=1), call("echo", text="Paris")
    texts = {episode_name(request.key): ["Paris"] for request in requests}
    texts[episode_name(requests[0].key)] = [search] * 6 + ["Paris"]
    scheduler = make_scheduler(scripted(texts), RecordingWorld(), concurrency=2)
    ended = []
    rollouts = PartialRollouts(scheduler, on_done=lambda episode: ended.append(episode.task.id))
    rollouts.begin_step(1, last=False)
    asyncio.run(rollouts.run([requests]))
    assert ended == ["t001", "t002", "t003", "t000"]


@pytest.fixture(scope="module")
def partial(tiny_run, tmp_path_factory) -> Path:
    return run(tiny_run, tmp_path_factory.mktemp("partial"))


@pytest.mark.slow
def test_a_step_samples_no_more_than_its_budget_unless_a_group_is_due(partial):
    rows = metrics(partial)
    assert rows[0]["partial/tokens"] <= TOKENS
    assert rows[0]["partial/waiting"] > 0
    assert rows[1]["partial/continued"] == rows[0]["partial/waiting"]
    assert rows[-1]["partial/waiting"] == 0  # the last step plays every episode to its end
    trained = sum(r.trajectory.num_action_tokens for _, r in records(partial))
    assert sum(row["partial/tokens"] for row in rows) == trained


def test_tokens_record_their_weight_version_and_mixed_versions_train(partial):
    mixed = 0
    for step, record in records(partial):
        versions = [v for s in record.trajectory.segments for v in s.versions]
        assert versions == sorted(versions)
        assert all(0 <= step - 1 - v <= BOUND for v in versions)
        mixed += len(set(versions)) > 1
    assert mixed
    rows = metrics(partial)
    assert max(row["staleness/max"] for row in rows) == BOUND
    assert min(row.get("is/ess", 1.0) for row in rows) < 0.9999


def test_each_group_trains_once_and_ledger_counts_balance_at_every_step(partial):
    every = records(partial)
    assert len({r.key for _, r in every}) == len(every) == STEPS * 9
    for step, row in enumerate(metrics(partial), start=1):
        ended = [row[f"ledger/{name}"] for name in ("trained", "masked", "dropped", "failed")]
        assert row["ledger/started"] == sum(ended) == sum(at == step for at, _ in every)
        assert row["ledger/clock_limited"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("lockstep", [False, pytest.param(True, marks=pytest.mark.fault)])
def test_interrupted_episode_equals_an_uninterrupted_one_under_the_same_weights(
    tiny_run, tmp_path, monkeypatch, lockstep
):
    """Randomness, stop tokens and histories go on as if nothing had happened, in the middle of an action."""
    if lockstep:
        monkeypatch.setattr(LocalEngine, "batch_invariant", property(lambda self: False))
    whole = run(tiny_run, tmp_path / "whole", rollout__partial__tokens=0, **PLAIN)
    parts = run(tiny_run, tmp_path / "parts", rollout__partial__tokens=70, **PLAIN)
    assert "partial/tokens" not in metrics(whole)[0]
    assert metrics(parts)[0]["partial/waiting"] > 0
    mine, theirs = segments(parts), segments(whole)
    assert mine.keys() == theirs.keys()
    for key, found in mine.items():
        assert [(kind, tokens) for kind, tokens, _ in found] == [(kind, t) for kind, t, _ in theirs[key]]
        for (_, _, ours), (_, _, logprobs) in zip(found, theirs[key], strict=True):
            assert ours == pytest.approx(logprobs, abs=1e-4)  # the weights did move by that little


def test_resumed_synchronous_run_equals_the_uninterrupted_run(tiny_run, partial, tmp_path):
    """What waits is in the checkpoint: its environments are made again, and its actions done again."""
    cut = Path(shutil.copytree(partial, tmp_path / "run"))
    text = (cut / "checkpoints/step-000002/trainer/waiting.jsonl").read_text()
    heads = [line for line in map(json.loads, text.splitlines()) if "ended" in line]
    assert any(head["begun"] for head in heads)
    assert any(head["ended"] for head in heads)
    shutil.rmtree(cut / f"checkpoints/step-{STEPS:06d}")
    assert ludus("train", "--resume", cut).code == 0
    before, after = lasting_files(partial), lasting_files(cut)
    assert [name for name in before if before[name] != after.get(name)] == []


@pytest.mark.fault
def test_episodes_of_a_nonreproducible_world_restart_after_resume_and_are_counted(tiny_run, partial, tmp_path):
    cut = Path(shutil.copytree(partial, tmp_path / "run"))
    path = cut / "checkpoints/step-000002/trainer/waiting.jsonl"
    lines, changed, begun = [json.loads(line) for line in path.read_text().splitlines()], 0, []
    for line in lines:
        begun = line.get("begun", begun)  # a group's record is followed by its rollouts
        if "trajectory" in line and line["trajectory"]["sample"] in begun:
            line["trajectory"]["segments"][0]["tokens"][0] += 1  # another prompt than the world shows
            changed += 1
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    (path.parent / "manifest.json").unlink()
    write_manifest(path.parent.parent)
    shutil.rmtree(cut / f"checkpoints/step-{STEPS:06d}")
    assert changed
    assert ludus("train", "--resume", cut).code == 0
    rows = metrics(cut)[2:]
    assert sum(row.get("ledger/failed/cannot_restore", 0) for row in rows) == changed
    for row in rows:
        ended = [row[f"ledger/{name}"] for name in ("trained", "masked", "dropped", "failed")]
        assert row["ledger/started"] == sum(ended)
    again = [r.attempt for _, r in records(cut) if r.attempt]
    assert again == [1] * changed


@pytest.mark.fault
def test_waiting_episodes_are_played_or_dropped_after_resume_without_a_budget(partial, tmp_path):
    for name, words in (("plain", ()), ("streams", ("--training.mode", "async"))):
        cut = Path(shutil.copytree(partial, tmp_path / name))
        shutil.rmtree(cut / f"checkpoints/step-{STEPS:06d}")
        assert ludus("train", "--resume", cut, "--rollout.partial.tokens", 0, *words).code == 0
        row = metrics(cut)[2]
        ended = [row[f"ledger/{key}"] for key in ("trained", "masked", "dropped", "failed")]
        assert row["ledger/started"] == sum(ended)
        if words:
            assert row["ledger/dropped/too_late"] > 0
        else:
            assert row["partial/waiting"] == 0
            assert {r.key for _, r in records(cut)} == {r.key for _, r in records(partial)}


@pytest.mark.fault
def test_one_step_mode_is_reproducible_and_respects_the_staleness_bound(tiny_run, tmp_path):
    first, second = (run(tiny_run, tmp_path / name, "one_step") for name in "ab")
    a, b = lasting_files(first), lasting_files(second)
    assert [name for name in a if a[name] != b.get(name)] == []
    ages = [step - 1 - v for step, r in records(first) for s in r.trajectory.segments for v in s.versions]
    assert min(ages) >= 0
    assert max(ages) == BOUND
    assert len({r.key for _, r in records(first)}) == STEPS * 9


@pytest.mark.slow
def test_time_budget_marks_the_step_as_clock_limited(tiny_run, tmp_path):
    rows = metrics(run(tiny_run, tmp_path / "a", rollout__partial__tokens=0, rollout__partial__seconds=1e-6))
    assert rows[0]["partial/waiting"] > 0  # on a machine that stalls some end before the clock is read
    assert rows[0]["ledger/clock_limited"] == 1
    assert rows[-1]["ledger/clock_limited"] == 0
    assert sum(row["ledger/started"] for row in rows) == STEPS * 9


def test_action_continued_in_another_request_equals_an_uninterrupted_one():
    """The same random numbers, and a stop string that begins in one part and ends in the next."""

    async def sample(engine, ids, num, **options):
        request = Request("", (1, 2, 3, *ids), SamplingParams(max_new_tokens=num, seed=5, **options))
        return ids + (await engine.generate(replace(request, begun=len(ids)))).tokens

    async def work(engine):
        ids = await sample(engine, (), 24)
        ends = next(i for i in range(4, 24) if is_new(tokenizer().decode(ids[i - 2 : i]), ids[: i - 1]))
        stop = (tokenizer().decode(ids[ends - 2 : ends]),)
        parts = [await sample(engine, ids[:begun], 24 - begun, stop=stop) for begun in (0, 1, ends - 1)]
        return ids, ends, parts, await sample(engine, ids[:7], 17)

    def is_new(text, before):
        return text.isascii() and len(text) > 1 and text not in tokenizer().decode(before)

    ids, ends, parts, rest = with_engine(build(), work, tokenizer())
    assert parts == [ids[:ends]] * 3
    assert rest == ids


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--staleness.max_staleness", "0"), "staleness.max_staleness to 1"),
        (("--training.mode", "one_step", "--staleness.max_staleness", "1"), "staleness.max_staleness to 2"),
        (("--cluster.kind", "local"), "training.mode = 'async'"),
    ],
)
def test_settings_incompatible_with_partial_rollouts_raise_config_error(words, message):
    config = load_config("search", ["--rollout.partial.tokens", "100", *words])
    with pytest.raises(ConfigError) as error:
        check_partial(config, object())
    assert message in str(error.value)


def test_mixed_versions_are_corrected_and_unused_settings_are_reported():
    given = ["--rollout.partial.tokens", "100", "--staleness.max_staleness", "3"]
    assert algorithm_of(load_config("search", given)).correction == "tis"
    assert algorithm_of(load_config("search", given[2:])).correction == "none"
    assert unused_settings(load_config("search", given)) == []
    assert "max_staleness" in unused_settings(load_config("search", given[2:]))[0]
    streams = unused_settings(load_config("search", ["--training.mode", "async", *given]))
    assert any("rollout.partial.tokens = 100 has no effect" in text for text in streams)
