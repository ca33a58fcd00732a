"""The replay buffer: priority, eviction, and its state in checkpoints."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ludus.algorithms.spec.resolve import PRESETS, algorithm_of
from ludus.config.load import load_config
from ludus.config.sections.training import ReplayConfig, StalenessConfig
from ludus.errors import ConfigError, StorageError
from ludus.rollouts.ledger import RolloutKey, RolloutOutcome
from ludus.rollouts.scheduler import Episode
from ludus.training.collection.filters import age_metrics, staleness_metrics
from ludus.training.collection.replay_buffer import ReplayBuffer
from ludus.training.credit.advantages import TrainingSample
from ludus.training.rl.validate import check_replay
from ludus.types import Segment, StopReason, Task, Trajectory

ALGORITHM = algorithm_of(load_config("search", ["--training.mode", "async"]))
OFF = ["--training.mode", "async", "--algorithm.correction", "none"]


def group(number: int, version: int, rewards=(0.0, 1.0), outcome=RolloutOutcome.TRAINED) -> list[TrainingSample]:
    """The credits of a group whose tokens are of one version."""
    task = Task(f"t{number}", (), None)
    found = []
    for i, reward in enumerate(rewards):
        action = Segment("action", (5, 6), logprobs=(-1.0, -1.0), versions=(version, version))
        one = Trajectory(task.id, i, (action,), (), StopReason.ANSWERED, reward=reward)
        episode = Episode(RolloutKey(number, task.id, i), task, one)
        found.append(TrainingSample(episode, outcome, str(outcome), number, advantages=(1.0, 1.0)))
    return found


def buffer(**settings) -> ReplayBuffer:
    """One that replays a group beside each fresh one."""
    return ReplayBuffer(ReplayConfig(**({"share": 0.5, "max_age": 99} | settings)), groups_per_step=1)


def draw(replay: ReplayBuffer, step: int) -> list[str]:
    """The tasks that a step replays."""
    return list(dict.fromkeys(c.episode.task.id for c in replay.draw(step, ALGORITHM, 9, 1)))


def counts(replay: ReplayBuffer) -> tuple[float, float, float]:
    found = replay.metrics([])
    return found["replay/kept"], found["replay/expired"], found["replay/used"]


def test_oldest_groups_are_replayed_first_up_to_the_limit():
    replay = buffer(times=2)
    replay.add(group(1, 0))
    replay.add(group(2, 1))
    assert [draw(replay, step) for step in (3, 4, 5, 6, 7)] == [["t1"], ["t1"], ["t2"], ["t2"], []]
    assert counts(replay) == (0, 0, 2)


def test_priority_order_replays_highest_variance_first():
    replay = buffer(order="priority")
    for number, rewards in enumerate(((0.0, 0.2), (0.0, 1.0), (0.0, 0.5), (0.5, 1.0))):
        replay.add(group(number, 0, rewards))
    assert [draw(replay, step) for step in (1, 2, 3, 4)] == [["t1"], ["t2"], ["t3"], ["t0"]]


def test_only_groups_with_a_success_of_medium_confidence_enter_the_buffer():
    def scored(number, logprobs):
        found = group(number, 0)
        for i, sample in enumerate(found):
            one = sample.episode.trajectory
            action = replace(one.segments[0], logprobs=logprobs)
            played = replace(one, segments=(action,), rewards={"right": one.reward})
            found[i] = replace(sample, episode=replace(sample.episode, trajectory=played))
        return found

    replay = ReplayBuffer(ReplayConfig(share=0.5, max_age=99, confidence=[0.5, 0.95]), 1, "right")
    for number, logprobs in enumerate([(-0.01, -0.01), (-0.1, -0.3), (-0.6, -0.9), (-0.7, -0.7)]):
        replay.add(scored(number, logprobs))  # 0.99, 0.82, 0.47, 0.497
    failed = group(4, 0, (0.0, 0.0))
    replay.add(failed)
    assert [draw(replay, step) for step in (1, 2)] == [["t1"], []]


def test_full_buffer_evicts_and_counts_the_oldest_groups():
    replay = buffer(size=2)
    for number in range(5):
        replay.add(group(number, number))
    assert counts(replay) == (2, 3, 0)
    assert [draw(replay, 6), draw(replay, 7)] == [["t3"], ["t4"]]


def test_a_group_with_a_token_over_age_expires_and_is_counted():
    replay = buffer(max_age=3, times=9)
    replay.add(group(1, version=2))
    assert draw(replay, 6) == ["t1"]  # of age 3
    assert draw(replay, 7) == []
    assert counts(replay) == (0, 1, 0)


def test_dropped_and_replayed_groups_are_not_stored():
    replay = buffer()
    replay.add(group(1, 0, outcome=RolloutOutcome.DROPPED))
    assert counts(replay) == (0, 0, 0)
    replay.add(group(2, 0))
    again = replay.draw(3, ALGORITHM, 9, 4)
    assert [(c.replayed, c.group, c.outcome) for c in again] == [(True, 4, RolloutOutcome.TRAINED)] * 2
    assert [c.advantage for c in again] == pytest.approx([-1.0, 1.0], rel=0.5)
    replay.add(again)
    assert counts(replay) == (0, 0, 1)


def test_replay_share_determines_the_number_of_replayed_groups():
    def numbers(share, groups):
        return [ReplayBuffer(ReplayConfig(share=share), groups).num_at(step) for step in range(1, 13)]

    assert numbers(0.25, 6) == [2] * 12
    assert numbers(0.0, 6) == [0] * 12
    assert numbers(0.1, 3) == [0, 0, 1] * 4  # a third of a group a step, which no step rounds away
    assert sum(numbers(0.3, 4)) == int(12 * 4 * 0.3 / 0.7)


def test_restored_buffer_equals_the_saved_one():
    replay = buffer(times=2)
    for number in (1, 2, 3):
        replay.add(group(number, number))
    assert draw(replay, 4) == ["t1"]
    again = buffer(times=2)
    tasks = {f"t{number}": Task(f"t{number}", (), None) for number in (1, 2, 3)}
    again.restore(replay.to_text(), tasks)
    assert again.to_text() == replay.to_text() != ""
    for step in range(5, 11):
        one, other = (found.draw(step, ALGORITHM, 9, 1) for found in (replay, again))
        assert one == other
    assert counts(again) == (0, 0, 3)
    with pytest.raises(StorageError, match="cannot be read"):
        again.restore('{"task": "unknown", "replayed": 0, "greedy": []}', tasks)


def test_group_without_its_greedy_baseline_expires():
    replay = buffer()
    replay.add(group(1, 0))
    assert replay.draw(2, PRESETS["remax"], 9, 1) == []
    assert counts(replay) == (0, 1, 0)


def test_restored_buffer_applies_a_lower_replay_limit():
    replay, fewer = buffer(times=3), buffer(times=1)
    replay.add(group(1, 0))
    assert [draw(replay, step) for step in (2, 3)] == [["t1"], ["t1"]]
    fewer.restore(replay.to_text(), {"t1": Task("t1", (), None)})
    assert counts(fewer) == (0, 0, 1)


def test_restored_buffer_applies_a_smaller_size():
    replay, smaller = buffer(), buffer(size=2)
    for number in (1, 2, 3):
        replay.add(group(number, number))
    smaller.restore(replay.to_text(), {f"t{number}": Task(f"t{number}", (), None) for number in (1, 2, 3)})
    assert counts(smaller) == (2, 1, 0)
    assert draw(smaller, 4) == ["t2"]


def test_age_metrics_cover_only_trained_tokens():
    masked = [replace(credit, outcome=RolloutOutcome.MASKED) for credit in group(3, version=0)]
    credits = group(1, version=4) + group(2, version=2) + masked
    found = age_metrics(credits, 5)
    ages = [found.pop(f"staleness/age_{age}") for age in range(3)]
    assert (ages, found) == ([0.5, 0, 0.5], {"staleness/mean": 1.0, "staleness/max": 2.0})
    half = [replace(c, trains=(True,) + (False,) * (len(c.advantages) - 1)) for c in group(2, version=2)]
    assert age_metrics(group(1, version=4) + half, 5)["staleness/mean"] < 1.0
    assert age_metrics([], 5) == {"staleness/mean": 0.0, "staleness/max": 0.0, "staleness/age_0": 0.0}


def test_replayed_tokens_count_in_ages_but_not_as_new_episodes():
    replay = buffer(max_age=4)
    replay.add(group(1, version=0))
    credits = group(2, version=3) + replay.draw(5, ALGORITHM, 9, 1)
    config = StalenessConfig(max_staleness=2, replay=replay.config)
    found = staleness_metrics(credits, 5, config, [], "right")
    assert found["staleness/max"] == 4
    assert [found[f"staleness/age_{age}"] for age in range(5)] == [0, 0.5, 0, 0, 0.5]
    assert (found["staleness/over_age_tokens"], found["trained/episodes"]) == (4, 2)


@pytest.mark.parametrize(
    ("settings", "refuses"),
    [
        ([], True),
        (["--staleness.max_staleness", "4"], False),
        (["--staleness.replay.max_age", "2"], False),
        (["--algorithm.correction", "icepop"], False),
        (["--algorithm.loss", "dppo"], False),
        (["--staleness.replay.share", "0"], False),
    ],
)
def test_replaying_old_tokens_without_a_correction_raises(settings, refuses):
    config = load_config("search", [*OFF, "--staleness.replay.share", "0.5", *settings])
    if refuses:
        with pytest.raises(ConfigError, match=r"max_age \(4\) replays tokens beyond"):
            check_replay(config, algorithm_of(config))
    else:
        check_replay(config, algorithm_of(config))


def test_sample_advantage_is_the_mean_over_action_tokens():
    one = group(1, version=0)[0]
    means = [replace(one, advantages=given).advantage for given in (None, (), (2.0, 2.0), (1.0, 4.0, 1.0))]
    assert means == [None, 0.0, 2.0, 2.0]
