"""Turns as samples: rows of turns, and their gradient against a loop over turns."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ludus.algorithms.spec.resolve import PRESETS
from ludus.training.batches.rows import row_of_trajectory, transitions_of
from ludus.training.credit.advantages import assign_credit, training_rows
from ludus.training.learner.logprobs import model_precision
from ludus.types import Segment, StopReason, Trajectory
from tests.training.batches.test_branches import PROMPT, chain, episodes, tree
from tests.training.learner.test_learner import learner, tiny_model


def turns(sample, reward, *lengths):
    """An attempt with an action of each length, observations between them."""
    segments = [Segment("prompt", PROMPT)]
    for turn, length in enumerate(lengths):
        tokens = tuple(4 + (sample + 3 * turn + i) % 14 for i in range(length))
        segments.append(Segment("action", tokens, turn, logprobs=(-1.0,) * length, versions=(0,) * length))
        if turn + 1 < len(lengths):
            segments.append(Segment("observation", (30, 31 + turn), turn))
    return Trajectory("t", sample, tuple(segments), (), StopReason.ANSWERED, reward=reward, turn_rewards=(0.1, 0.3))


def test_transition_row_keeps_context_and_trains_only_its_action():
    one = turns(0, 1.0, 2, 3)
    row = row_of_trajectory(one, (0.5, 0.5, 2.0, 2.0, 2.0))
    first, second = transitions_of(row, one)
    assert first.tokens == row.tokens[:12]
    assert second.tokens == row.tokens
    assert [i for i, own in enumerate(first.trains) if own] == [10, 11]
    assert [i for i, own in enumerate(second.trains) if own] == [14, 15, 16]
    assert second.advantages == (0.0,) * 14 + (2.0,) * 3
    assert second.behavior == (0.0,) * 14 + (-1.0,) * 3
    assert second.sampled == second.trains
    assert second.name == row.name


def test_trained_observations_occur_in_one_row_only():
    one = replace(turns(0, 1.0, 2, 3), segments=(*turns(0, 1.0, 2, 3).segments, Segment("observation", (9,), 1)))
    row = row_of_trajectory(one, 1.0, mask_observations=False)
    found = transitions_of(row, one)
    assert sum(sum(part.trains) for part in found) == sum(row.trains) == 8
    assert sum(sum(part.observed) for part in found) == sum(row.observed) == 3
    assert found[-1].tokens == row.tokens


def test_each_turn_of_a_tree_is_one_row():
    row = row_of_trajectory(tree(), tuple(range(1, 11)))
    found = transitions_of(row, tree())
    trained = [[t for t, own in zip(part.tokens, part.trains, strict=True) if own] for part in found]
    assert trained == [[4, 5], [8, 9, 10], [8, 12], [11], [14, 15]]
    assert [len(part.tokens) for part in found] == [12, 17, 16, 15, 18]
    assert all(-1 not in part.tokens for part in found)


def loop(model, credits, aggregation):
    """The loss by turns: each with the model on its own context, one after the other."""
    losses, counts = [], []
    for credit in credits:
        one = credit.episode.trajectory
        given, place = iter(credit.advantages), 0
        for segment in one.segments:
            start, place = place, place + len(segment.tokens)
            if segment.kind != "action":
                continue
            ids = torch.tensor([one.token_ids[:place]])
            table = torch.log_softmax(model(input_ids=ids).logits[0], -1)
            own = [table[i - 1, one.token_ids[i]] * next(given) for i in range(start, place)]
            losses.append(-torch.stack(own).sum())
            counts.append(len(own))
    if aggregation == "token_mean":
        return sum(losses) / sum(counts)
    return sum(loss / count for loss, count in zip(losses, counts, strict=True)) / len(losses)


@pytest.mark.parametrize("aggregation", ["token_mean", "seq_mean_token_mean"])
def test_the_gradient_is_that_of_a_loop_over_turns(aggregation):
    model = tiny_model()
    algorithm = replace(PRESETS["turn_return"], aggregation=aggregation, loss="reinforce", kl_coef=0.0)
    attempts = [turns(0, 1.0, 2, 3), turns(1, 0.0, 4, 1), turns(2, 0.0, 1, 2, 5)]
    credits = assign_credit([episodes(*attempts)], algorithm)
    with model_precision(model):
        total = loop(model, credits, aggregation)
        expected = torch.autograd.grad(total, list(model.parameters()))
    rows = training_rows(credits, mask_observations=True, transitions=True)
    assert len(rows) == 7
    one = learner(model, algorithm)
    statistics, trained = one.gradient(rows)
    assert trained == 18
    assert statistics.loss == pytest.approx(total.item(), abs=1e-12)
    for p, wanted in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(p.grad, wanted, atol=1e-12, rtol=0)
    found = [p.grad.clone() for p in model.parameters()]
    model.zero_grad(set_to_none=True)
    one.gradient(training_rows(credits, mask_observations=True))
    gap = max(float((p.grad - g).abs().max()) for p, g in zip(model.parameters(), found, strict=True))
    assert (gap < 1e-9) == (aggregation == "token_mean")  # over tokens, how rows are cut does not count


def test_token_mean_gradient_of_tree_is_unchanged_by_splitting_into_transitions():
    model, algorithm = tiny_model(), replace(PRESETS["rloo"], aggregation="token_mean")
    credits = assign_credit([episodes(tree(), chain(1, 0.2))], algorithm)
    one, grads = learner(model, algorithm), []
    for transitions in (False, True):
        one.gradient(training_rows(credits, mask_observations=True, transitions=transitions))
        grads.append([p.grad.clone() for p in model.parameters()])
        model.zero_grad(set_to_none=True)
    for whole, cut in zip(*grads, strict=True):
        torch.testing.assert_close(whole, cut, atol=1e-12, rtol=0)
