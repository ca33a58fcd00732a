"""First training from the replay buffer: groups beyond the staleness bound, and groups of other runs."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from ludus.config.load import load_config
from ludus.diagnostics.trackers import read_metrics
from ludus.errors import ConfigError
from ludus.rollouts.ledger import RolloutOutcome
from ludus.rollouts.rollout_files import read_rollouts, rollouts_path, write_rollouts
from ludus.training.collection.prompt_stream import PromptStream
from ludus.training.collection.replay_buffer import TO_REPLAY
from ludus.training.collection.rollout_collector import RolloutCollector
from ludus.training.rl.train_step import effective_share
from ludus.training.rl.validate import check_replay
from tests.training.collection.test_replay import ALGORITHM, buffer, counts, draw, group
from tests.training.rl.test_async_run import BOUND, records, run, words
from tiny_run import refused
from waiting import until

REPLAYS = {"staleness.replay.share": 0.5, "staleness.replay.max_age": 9}
GIVEN = {key.replace(".", "__"): value for key, value in REPLAYS.items()}


def test_stale_group_is_buffered_and_replayed():
    replay = buffer()
    late, young = group(1, version=0), group(2, version=3)
    found = replay.take_stale([*late, *young], step=4, bound=2)
    assert [(c.outcome, c.reason) for c in found[:2]] == [(RolloutOutcome.DROPPED, TO_REPLAY)] * 2
    assert found[2:] == young
    assert (replay.metrics([])["replay/late"], counts(replay)[0]) == (1, 1)
    assert draw(replay, 4) == ["t1"]


def test_stale_dropped_group_is_not_buffered():
    replay = buffer()
    gone = group(1, version=0, outcome=RolloutOutcome.DROPPED)
    assert replay.take_stale(gone, step=9, bound=2) == gone
    assert counts(replay) == (0, 0, 0)


def test_groups_of_other_runs_are_replayed_at_maximum_age():
    replay = buffer(max_age=3)
    replay.add_source("a/run", [[c.episode for c in group(1, version=70)]])
    text = replay.to_text()
    again = buffer(max_age=3)
    again.restore(text, {"t1": group(1, 0)[0].episode.task})
    for one in (replay, again):
        assert [s.source for s in one._chosen(40, ALGORITHM)] == ["a/run"]
        credits = one.draw(40, ALGORITHM, 9, 1)
        assert {v for c in credits for s in c.episode.trajectory.segments for v in s.versions} == {36}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("--staleness.on_stale", "replay"), "needs staleness.replay.share above 0"),
        (("--staleness.on_stale", "replay", "--staleness.replay.share", "0.5"), ""),
        (
            (
                "--staleness.replay.share=0.5",
                "--staleness.replay.max_age=2",
                '--staleness.replay.sources=["runs/a"]',
                "--algorithm.correction=none",
            ),
            "off-policy rollouts",
        ),
    ],
)
def test_replay_without_share_or_off_policy_correction_raises(given, message):
    words = ["--training.mode", "async", *given]
    if not message:
        check_replay(load_config("search", words), ALGORITHM)
        return
    with pytest.raises(ConfigError, match=message):
        check_replay(load_config("search", words), replace(ALGORITHM, correction="none"))


def adds_up(metrics: dict[str, float]) -> bool:
    ended = [metrics[f"ledger/{name}"] for name in ("trained", "masked", "dropped", "failed")]
    return metrics["ledger/started"] == sum(ended)


@pytest.mark.fault
def test_slow_group_does_not_block_and_is_replayed_later(tiny_run, tmp_path, monkeypatch):
    play, slow = PromptStream.run_one, []

    async def late(player, request):
        episode = await play(player, request)
        slow.append(request.key.task_id)
        if request.key.task_id == slow[0] and request.key.step == 1:
            await until(lambda: (player.collector.ledger.state().last_closed or 0) > BOUND, 60)
        return episode

    monkeypatch.setattr(PromptStream, "run_one", late)
    settings = GIVEN | {"staleness__on_stale": "replay", "algorithm__filter_zero_variance": "false"}
    folder = run(tiny_run, tmp_path, "async", training__steps=8, **settings)
    rows = [row.metrics for row in read_metrics(folder / "metrics.jsonl")]
    assert all(map(adds_up, rows))
    assert sum(row.get("ledger/dropped/to_replay", 0) for row in rows) >= 3
    assert rows[-1]["replay/late"] >= 1
    assert sum(row["staleness/over_age_tokens"] for row in rows) > 0
    trained = [r for _, r in records(folder, 8) if r.outcome is RolloutOutcome.TRAINED]
    assert len({r.key for r in trained}) == len(trained)


@pytest.mark.slow
def test_rollouts_of_other_runs_are_replayed_unless_too_off_policy(tiny_run, tmp_path):
    """From a run, from a checkpoint and from a file; those of another policy are refused in a sentence."""
    near, far = tmp_path / "near.jsonl.gz", tmp_path / "far.jsonl.gz"
    found = list(read_rollouts(rollouts_path(tiny_run, 1)))
    write_rollouts(near, found)
    write_rollouts(far, [replace(r, trajectory=elsewhere(r.trajectory)) for r in found])
    checkpoint = tiny_run / "checkpoints" / "step-000001"
    sources = f'["{near}", "{checkpoint}", "{tiny_run}"]'
    settings = GIVEN | {"training__steps": 2, "algorithm__filter_zero_variance": "false"}
    folder = run(tiny_run, tmp_path / "a", "async", staleness__replay__sources=sources, **settings)
    rows = [row.metrics for row in read_metrics(folder / "metrics.jsonl")]
    assert rows[0]["replay/groups"] == 3  # from the first step on
    assert rows[0]["replay/trained"] == 9
    assert all(map(adds_up, rows))
    for source, message in ((far, "too far off-policy"), (tmp_path / "a", "has no rollouts")):
        given = settings | {"staleness__replay__sources": f'["{source}"]', "run__dir": tmp_path / message}
        assert message in refused(*words(tiny_run, tmp_path, "async", **given))


def elsewhere(trajectory):
    """A trajectory that a policy has sampled to which every other token was all but impossible."""
    segments = tuple(
        replace(s, logprobs=tuple(-12.0 * (i % 7 == 0) - 0.1 for i in range(len(s.tokens))))
        if s.kind == "action"
        else s
        for s in trajectory.segments
    )
    return replace(trajectory, segments=segments)


def test_group_with_low_effective_sample_size_is_evicted_and_counted():
    class DriftedLearner:
        """A learner that finds the tokens of every other row a hundred times likelier."""

        def score(self, rows):
            gap = math.log(100)
            return [torch.tensor(row.behavior) + gap * (i % 2) for i, row in enumerate(rows)]

    replay = buffer()
    replay.add_source("a/run", [[c.episode for c in group(1, version=0)]])

    def share(episodes):
        return effective_share([one.trajectory for one in episodes], DriftedLearner())

    replay.evict_low_ess(1, ALGORITHM, share, 0.1)
    assert replay.metrics([])["replay/refused"] == 0
    replay.evict_low_ess(1, ALGORITHM, share, 0.9)
    assert replay.metrics([])["replay/refused"] == 1
    assert draw(replay, 1) == []


def sessions(run, file):
    """Write the rollouts of the first step of a run as recorded sessions without a task; return their rewards."""
    found = list(read_rollouts(rollouts_path(run, 1)))
    names = [f"session-000001-{i:06d}" for i in range(len(found))]
    write_rollouts(file, [replace(r, group=name) for name, r in zip(names, found, strict=True)])
    return [r.trajectory.reward for r in found]


def test_single_sessions_are_loaded_unless_the_advantage_needs_a_group(tiny_run, tmp_path):
    rewards = sessions(tiny_run, tmp_path / "sessions.jsonl.gz")
    replay = buffer(sources=[str(tmp_path / "sessions.jsonl.gz")])
    with pytest.raises(ConfigError, match="groups of two or more, of tasks in this world's train split, with"):
        replay.load_sources({}, 1000, lambda _: 1.0, 0.1)
    replay.load_sources({}, 1000, lambda _: 1.0, 0.1, min_group=1)
    assert replay.session_rewards() == rewards
    again = buffer()
    again.restore(replay.to_text(), {})
    assert again.session_rewards() == rewards
    write_rollouts(tmp_path / "held-out.jsonl.gz", [c.record for c in group(1, 0)])
    other = buffer(sources=[str(tmp_path / "held-out.jsonl.gz")])
    with pytest.raises(ConfigError, match="split or sessions without a task"):
        other.load_sources({}, 1000, lambda _: 1.0, 0.1, min_group=1)


@pytest.mark.slow
def test_sessions_are_compared_with_their_mean_reward_by_rae(tiny_run, tmp_path, monkeypatch):
    rewards = sessions(tiny_run, tmp_path / "sessions.jsonl.gz")
    replayed, before = [], RolloutCollector.replay_samples

    def noted(collector, samples):
        replayed.extend(found := before(collector, samples))
        return found

    monkeypatch.setattr(RolloutCollector, "replay_samples", noted)
    settings = GIVEN | {"training__steps": 2, "algorithm__filter_zero_variance": "false", "algorithm__preset": "rae"}
    sources = f'["{tmp_path / "sessions.jsonl.gz"}"]'
    run(tiny_run, tmp_path / "a", "async", staleness__replay__sources=sources, **settings)
    mean = math.fsum(rewards) / len(rewards)
    assert len(replayed) == 6
    expected = []
    for step in (rewards[:3], rewards[3:6]):
        average = mean
        for reward in step:
            expected.append(average)
            average = 0.95 * average + 0.05 * reward
    assert [sample.baselines[0] for sample in replayed] == pytest.approx(expected)
    gained = [reward - baseline for reward, baseline in zip(rewards, expected, strict=False)]
    assert [sample.advantage for sample in replayed] == pytest.approx(gained)
    assert len({sample.episode.task.id for sample in replayed}) == 6
