"""Reference, teacher and old log-probabilities are computed once per step, with bit-identical weights."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
import torch

from ludus.algorithms.spec.resolve import PRESETS
from ludus.training.credit.advantages import assign_credit, training_rows
from ludus.training.learner.learner import CachedLogprobs, LearnerSettings
from ludus.training.learner.logprobs import LogprobScorer
from ludus.training.rl.train_step import filter_and_estimate
from tests.training.credit.test_credit import group, real_group
from tests.training.learner.test_learner import learner, random_rows, tiny_model


@dataclass
class CountingScorer:
    """A scorer, and the rows that it was asked for in each pass."""

    inner: LogprobScorer
    passes: list[int] = field(default_factory=list)

    def score(self, tokens, asked, entropy="none"):
        self.passes.append(len(tokens))
        return self.inner.score(tokens, asked, entropy)

    def distributions(self, tokens, asked):
        return self.inner.distributions(tokens, asked)


def weights(model):
    return [p.detach().clone() for p in model.parameters()]


def equal(left, right):
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


WITH_KL = replace(PRESETS["grpo"], kl_coef=0.3)


@pytest.mark.parametrize(("name", "algorithm"), [("reference", WITH_KL), ("teacher", PRESETS["distill"])])
def test_scores_cached_across_epochs_give_bitwise_equal_weights(name, algorithm):
    rows, epochs, found = random_rows(), 3, []
    for own in (True, False):
        model = tiny_model(torch.float32)
        other = CountingScorer(LogprobScorer(tiny_model(torch.float32, seed=1)))
        settings = LearnerSettings(microbatch_tokens=60, epochs=epochs)
        one = learner(model, algorithm, settings, {name: other})
        if own:
            one.train(rows, seed=0)
            assert sum(other.passes) == len(rows)
        else:
            known = CachedLogprobs(proximal=one.score(rows))
            for _ in range(epochs):
                one.gradient(rows, known)
                one.optimizer.step()
            assert sum(other.passes) == epochs * len(rows)
        found.append(weights(model))
    assert equal(*found)
    assert not equal(found[0], weights(tiny_model(torch.float32)))


def test_cached_scores_of_minibatches_differ_only_by_rounding():
    rows, found = random_rows(), []
    for epochs, minibatches in ((1, 3), (2, 3)):
        other = CountingScorer(LogprobScorer(tiny_model(seed=1)))
        one = learner(
            tiny_model(), WITH_KL, LearnerSettings(epochs=epochs, minibatches=minibatches), {"reference": other}
        )
        found.append(one.train(rows, seed=0)["policy/kl_reference"])
        assert sum(other.passes) == len(rows)
    model, other = tiny_model(), LogprobScorer(tiny_model(seed=1))
    one = learner(model, WITH_KL, LearnerSettings(epochs=2, minibatches=3), {"reference": other})
    known, kls = one._start(rows, 0), []
    plain = replace(known, others={})
    for index in ([0, 4, 7], [1, 2, 3, 5]):
        batch = [rows[i] for i in index]
        kls.append([one.gradient(batch, k.of(index))[0].kl_sum for k in (known, plain)])
        one.optimizer.zero_grad()
    for ours, asked in kls:
        assert ours == pytest.approx(asked, abs=1e-7)  # norms compute in float32


def step(kept: bool, **settings):
    """One step with a KL in the reward, where both models were asked before; weights and passes."""
    episodes, made = real_group()
    model, policy = made.scorer.model, CountingScorer(made.scorer)
    reference = CountingScorer(LogprobScorer(tiny_model(seed=1)))
    algorithm = replace(PRESETS["reinforce_pp"], correction="none")
    one = learner(model, algorithm, LearnerSettings(**settings), {"reference": reference})
    one.scorer.score = policy.score
    credits = filter_and_estimate(assign_credit([episodes], algorithm), one, 0)
    if not kept:
        one._kept.clear()
    one.train(training_rows(credits, mask_observations=True), seed=0)
    assert not one._kept
    return weights(model), sum(policy.passes), sum(reference.passes)


@pytest.mark.parametrize(("epochs", "policy", "reference"), [(1, (2, 2), (1, 2)), (2, (3, 4), (1, 2))])
def test_scores_of_the_advantage_computation_are_reused(epochs, policy, reference):
    rows = len(group())
    kept, again = step(True, epochs=epochs), step(False, epochs=epochs)
    assert equal(kept[0], again[0])
    assert (kept[1], again[1]) == tuple(n * rows for n in policy)
    assert (kept[2], again[2]) == tuple(n * rows for n in reference)


def test_only_kept_scores_of_the_same_rows_are_returned():
    rows, one = random_rows(3), learner(tiny_model())
    one.score(rows, keep=True)
    assert one._cached("", rows) is not None
    assert one._cached("reference", rows) is None
    assert one._cached("", rows[:2]) is None
    masked = replace(rows[0], trains=(False,) * len(rows[0].trains))
    assert one._cached("", [masked, *rows[1:]]) is None
    one.train(rows, seed=0)
    assert one._cached("", rows) is None
