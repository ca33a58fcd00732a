"""Starved tasks over several steps and a resume, and conflict tokens against the weights of GTPO."""

from __future__ import annotations

import random
import time

import pytest
import torch

from ludus.algorithms.losses.gtpo import conflict_weights
from ludus.algorithms.spec.resolve import PRESETS
from ludus.rollouts.ledger import RolloutKey, RolloutOutcome
from ludus.rollouts.scheduler import Episode
from ludus.training.collection.filters import AlgorithmState
from ludus.training.credit.advantages import TrainingSample
from ludus.training.rl.sample_metrics import conflict_share, count_untrained, starved_metrics
from ludus.types import Segment, StopReason, Task, Trajectory


def sample(task, advantage, group=0, *, tokens=(1, 2), outcome=RolloutOutcome.TRAINED):
    segments = (Segment("prompt", (9,)), Segment("action", tuple(tokens), 0))
    trajectory = Trajectory(task, 0, segments, (), StopReason.ANSWERED)
    episode = Episode(RolloutKey(1, task, 0), Task(task, (), None), trajectory)
    return TrainingSample(episode, outcome, "trained", group, (advantage,) * len(tokens))


def test_a_task_is_starved_after_three_groups_without_a_trained_token():
    dropped = RolloutOutcome.DROPPED
    step = [
        sample("good", 1.0, 0),
        sample("good", -1.0, 0),
        sample("equal", 0.0, 1),
        sample("hard", 0.5, 2, outcome=dropped),
    ]
    counts = {}
    for expected in (0.0, 0.0, 2 / 3):
        counts = count_untrained(counts, step)
        assert starved_metrics(counts, step)["tasks/starved"] == pytest.approx(expected)
    assert counts == {"equal": 3, "hard": 3}
    saved = AlgorithmState(untrained_counts=counts).to_json()
    assert AlgorithmState.start(PRESETS["grpo"], saved).untrained_counts == counts
    counts = count_untrained(counts, [sample("equal", 0.1, 0)])
    assert starved_metrics(counts, step[:2]) == {"tasks/starved": 0.0, "tasks/starved_in_run": 1.0}


def test_conflict_tokens_match_gtpo():
    """Random groups over three tokens, so that prefixes and suffixes are shared and overlap."""
    draw = random.Random(0)
    for _ in range(30):
        samples = [
            sample("t", draw.choice([-1.0, 1.0]), draw.randrange(2), tokens=draw.choices((1, 2), k=draw.randint(1, 6)))
            for _ in range(8)
        ]
        actions = [one.episode.trajectory.segments[1].tokens for one in samples]
        ids = torch.tensor([[*tokens, *[0] * (6 - len(tokens))] for tokens in actions])
        advantages = torch.tensor([[one.advantage] * 6 for one in samples])
        group = torch.tensor([one.group for one in samples])
        weights = conflict_weights(token_ids=ids, group=group, advantages=advantages, mask=ids > 0)
        expected = ((weights != 1) & (ids > 0)).sum() / (ids > 0).sum()
        assert conflict_share(samples) == pytest.approx(float(expected))
    assert conflict_share([sample("t", 1.0), sample("t", 1.0)]) == 0.0


def test_conflict_share_of_a_large_batch_reads_only_the_shared_tokens():
    """The metric is computed on the event loop at each step: seconds of work would delay the requests."""
    draw = random.Random(0)
    samples = [
        sample("t", draw.choice([-1.0, 1.0]), i // 8, tokens=(7, 8, *draw.choices(range(150_000), k=4094)))
        for i in range(256)
    ]
    begin = time.process_time()
    assert conflict_share(samples) == pytest.approx(2 / 4096, rel=0.1)
    assert time.process_time() - begin < 2.0  # about 0.1; 6 if all tokens of the batch are sorted
