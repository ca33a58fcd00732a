"""Non-finite numbers are rejected at input with an error that names the trajectory."""

from __future__ import annotations

import copy
import math
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ludus.algorithms.spec.resolve import PRESETS
from ludus.errors import LearnerError
from ludus.training.batches.rows import FiniteChecks, microbatches
from ludus.training.credit.advantages import Estimates, assign_credit, with_estimates
from ludus.training.learner.learner import CachedLogprobs, LearnerSettings
from ludus.training.learner.logprobs import LogprobScorer
from tests.training.credit.test_credit import group
from tests.training.learner.test_learner import learner, random_rows, tiny_model

ODD = pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])


def with_trajectory(change, **episode):
    """A group whose third member has another trajectory."""
    members = group()
    members[2] = replace(members[2], trajectory=change(members[2].trajectory), **episode)
    return members


def with_logprob(trajectory, odd):
    segments = list(trajectory.segments)
    segments[1] = replace(segments[1], logprobs=(-1.0, odd, -1.0))
    return replace(trajectory, segments=tuple(segments))


CHANGES = {
    "reward": lambda t, odd: replace(t, reward=odd),
    "reward of a turn": lambda t, odd: replace(t, turn_rewards=(0.0, odd)),
    "recorded log-probability": with_logprob,
}


@ODD
@pytest.mark.parametrize("what", CHANGES)
def test_non_finite_episode_value_raises(what, odd):
    members = with_trajectory(lambda t: CHANGES[what](t, odd))
    with pytest.raises(LearnerError, match=f"An? {what} of sample 2 of task t is {odd}"):
        assign_credit([members], PRESETS["grpo"])


def test_nan_reward_of_a_greedy_episode_raises():
    members = with_trajectory(lambda t: replace(t, reward=math.nan), greedy=True)
    with pytest.raises(LearnerError, match="A reward of sample 2 of task t is nan"):
        assign_credit([members], PRESETS["remax"])


@ODD
@pytest.mark.parametrize("field", ["kl", "values", "outcome_probs", "prm_logprobs", "ref_logprobs", "old_logprobs"])
def test_non_finite_model_estimate_raises(field, odd):
    algorithm = PRESETS["ppo"]
    credits = assign_credit([group()], algorithm)
    tables = [torch.zeros(len(credit.advantages)) for credit in credits]
    tables[2][1] = odd
    with pytest.raises(LearnerError, match=f"of sample 2 of task t is {odd}"):
        with_estimates(credits, algorithm, 0, Estimates(**{field: tables}))


def named_rows():
    return [replace(row, name=f"sample {i} of task t") for i, row in enumerate(random_rows())]


def first_trained(row):
    return row.trains.index(True)


def refused(one, rows, message, known=None):
    """Refused by name, in any partition, without a change to the weights."""
    before = copy.deepcopy(one.scorer.model.state_dict())
    for size in (10**6, 1):
        one.budget.tokens = size
        with pytest.raises(LearnerError, match=message):
            one.gradient(rows, known)
    with pytest.raises(LearnerError):
        one.train(rows, seed=0)
    assert all(torch.equal(before[n], t) for n, t in one.scorer.model.state_dict().items())


@ODD
@pytest.mark.parametrize(("field", "what"), [("advantages", "advantage"), ("behavior", "recorded log-probability")])
def test_non_finite_row_value_is_rejected(field, what, odd):
    rows = named_rows()
    values = list(getattr(rows[3], field))
    values[first_trained(rows[3])] = odd
    rows[3] = replace(rows[3], **{field: tuple(values)})
    refused(learner(tiny_model()), rows, f"An? {what} of sample 3 of task t is {odd}")


@ODD
def test_non_finite_cached_logprob_raises(odd):
    rows = named_rows()
    proximal = [torch.tensor(row.behavior, dtype=torch.float64) for row in rows]
    proximal[3][first_trained(rows[3])] = odd
    one = learner(tiny_model(), settings=LearnerSettings(microbatch_tokens=64))
    with pytest.raises(LearnerError, match=f"start of the step of sample 3 of task t is {odd}"):
        one.gradient(rows, CachedLogprobs(proximal))


def with_odd_token(model, token):
    """The model, with no number for a token in its input and in its output."""
    with torch.no_grad():
        model.get_input_embeddings().weight[token] = torch.nan
    return model


def test_nan_logprob_of_policy_reference_or_teacher_raises():
    rows = named_rows()[:1]
    broken = with_odd_token(tiny_model(), 0)
    with pytest.raises(LearnerError, match="A log-probability of sample 0 of task t is nan"):
        learner(broken).gradient(rows)
    for name, preset in (("reference", "grpo"), ("teacher", "distill")):
        one = learner(tiny_model(), PRESETS[preset], scorers={name: LogprobScorer(broken)})
        with pytest.raises(LearnerError, match=f"under the {name} of sample 0 of task t is nan"):
            one.gradient(rows)


def test_non_finite_values_of_untrained_tokens_are_ignored():
    rows = named_rows()
    one = learner(tiny_model())
    expected, _ = one.gradient(rows)
    odd = [
        replace(
            row,
            advantages=tuple(a if t else math.nan for a, t in zip(row.advantages, row.trains, strict=True)),
            behavior=tuple(b if t else -math.inf for b, t in zip(row.behavior, row.trains, strict=True)),
        )
        for row in rows
    ]
    assert one.gradient(odd)[0].loss == expected.loss


class SynchronizationCounter(TorchDispatchMode):
    """Counts what has to wait for the device that computes."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function.name() in ("aten::_local_scalar_dense", "aten::nonzero")
        return function(*args, **(kwargs or {}))


def seen(*, odd_at=None, odd=math.nan):
    """A watch that has seen the microbatches of a batch, and how many reads that took."""
    watch, rows = FiniteChecks(), named_rows()
    parts = microbatches(rows, 40, torch.device("cpu"), torch.float64)
    assert len(parts) > 2
    tables = [torch.zeros(part.tokens.shape, dtype=torch.float64) for part in parts]
    for part, table in zip(parts, tables, strict=True):
        if odd_at in part.index:
            table[part.index.index(odd_at), first_trained(rows[odd_at])] = odd
        table[~part.trains] = math.inf
    with SynchronizationCounter() as reads:
        for part, table in zip(parts, tables, strict=True):
            given = {"entropy": torch.zeros_like(table), "log-probability": table, "KL": None}
            watch.add_values(part, part.trains, given)
    return watch, reads.count


def test_finite_check_synchronizes_once_per_step():
    watch, reads = seen()
    assert reads == 0
    with SynchronizationCounter() as looks:
        assert watch.fault == ""
    assert looks.count == 1


@ODD
@pytest.mark.parametrize("row", range(9))
def test_row_of_a_non_finite_logprob_is_reported(row, odd):
    watch, reads = seen(odd_at=row, odd=odd)
    assert reads == 0
    assert watch.fault == f"A log-probability of sample {row} of task t is {odd}."
    watch.clear()
    assert watch.fault == ""


def test_overflowing_loss_is_rejected_and_leaves_weights_unchanged():
    rows = [replace(row, advantages=(1e308,) * len(row.tokens)) for row in named_rows()]
    refused(learner(tiny_model(), PRESETS["rloo"]), rows, "The loss is -?(inf|nan)")
