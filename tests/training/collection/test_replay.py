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


def test_the_first_in_train_first_and_each_as_often_as_it_may():
    replay = buffer(times=2)
    replay.add(group(1, 0))
    replay.add(group(2, 1))
    assert [draw(replay, step) for step in (3, 4, 5, 6, 7)] == [["t1"], ["t1"], ["t2"], ["t2"], []]
    assert counts(replay) == (0, 0, 2)


def test_the_most_varied_train_first_where_priority_is_asked_for():
    replay = buffer(order="priority")
    for number, rewards in enumerate(((0.0, 0.2), (0.0, 1.0), (0.0, 0.5), (0.5, 1.0))):
        replay.add(group(number, 0, rewards))
    assert [draw(replay, step) for step in (1, 2, 3, 4)] == [["t1"], ["t2"], ["t3"], ["t0"]]


def test_beyond_the_size_the_oldest_go_and_are_counted():
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


def test_what_did_not_train_and_what_was_replayed_is_not_kept():
    replay = buffer()
    replay.add(group(1, 0, outcome=RolloutOutcome.DROPPED))
    assert counts(replay) == (0, 0, 0)
    replay.add(group(2, 0))
    again = replay.draw(3, ALGORITHM, 9, 4)
    assert [(c.replayed, c.group, c.outcome) for c in again] == [(True, 4, RolloutOutcome.TRAINED)] * 2
    assert [c.advantage for c in again] == pytest.approx([-1.0, 1.0], rel=0.5)
    replay.add(again)
    assert counts(replay) == (0, 0, 1)


def test_the_share_says_how_many_are_replayed():
    def numbers(share, groups):
        return [ReplayBuffer(ReplayConfig(share=share), groups).num_at(step) for step in range(1, 13)]

    assert numbers(0.25, 6) == [2] * 12
    assert numbers(0.0, 6) == [0] * 12
    assert numbers(0.1, 3) == [0, 0, 1] * 4  # a third of a group a step, which no step rounds away
    assert sum(numbers(0.3, 4)) == int(12 * 4 * 0.3 / 0.7)


def test_a_checkpoint_keeps_the_buffer():
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


def test_a_group_without_the_baseline_that_it_would_be_compared_with_expires():
    replay = buffer()
    replay.add(group(1, 0))
    assert replay.draw(2, PRESETS["remax"], 9, 1) == []
    assert counts(replay) == (0, 1, 0)


def test_a_resumed_run_replays_nothing_oftener_than_it_now_may():
    replay, fewer = buffer(times=3), buffer(times=1)
    replay.add(group(1, 0))
    assert [draw(replay, step) for step in (2, 3)] == [["t1"], ["t1"]]
    fewer.restore(replay.to_text(), {"t1": Task("t1", (), None)})
    assert counts(fewer) == (0, 0, 1)


def test_a_resumed_run_keeps_no_more_groups_than_it_now_may():
    replay, smaller = buffer(), buffer(size=2)
    for number in (1, 2, 3):
        replay.add(group(number, number))
    smaller.restore(replay.to_text(), {f"t{number}": Task(f"t{number}", (), None) for number in (1, 2, 3)})
    assert counts(smaller) == (2, 1, 0)
    assert draw(smaller, 4) == ["t2"]


def test_the_ages_of_what_trains_are_known_in_every_mode():
    masked = [replace(credit, outcome=RolloutOutcome.MASKED) for credit in group(3, version=0)]
    credits = group(1, version=4) + group(2, version=2) + masked
    found = age_metrics(credits, 5)
    ages = [found.pop(f"staleness/age_{age}") for age in range(3)]
    assert (ages, found) == ([0.5, 0, 0.5], {"staleness/mean": 1.0, "staleness/max": 2.0})
    half = [replace(c, trains=(True,) + (False,) * (len(c.advantages) - 1)) for c in group(2, version=2)]
    assert age_metrics(group(1, version=4) + half, 5)["staleness/mean"] < 1.0
    assert age_metrics([], 5) == {"staleness/mean": 0.0, "staleness/max": 0.0, "staleness/age_0": 0.0}


def test_replayed_tokens_are_in_the_ages_and_not_in_what_was_sampled():
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
def test_old_tokens_are_not_replayed_without_a_correction(settings, refuses):
    config = load_config("search", [*OFF, "--staleness.replay.share", "0.5", *settings])
    if refuses:
        with pytest.raises(ConfigError, match=r"max_age \(4\) replays tokens beyond"):
            check_replay(config, algorithm_of(config))
    else:
        check_replay(config, algorithm_of(config))


def test_the_advantage_of_a_sample_is_the_mean_over_its_action_tokens():
    one = group(1, version=0)[0]
    means = [replace(one, advantages=given).advantage for given in (None, (), (2.0, 2.0), (1.0, 4.0, 1.0))]
    assert means == [None, 0.0, 2.0, 2.0]
