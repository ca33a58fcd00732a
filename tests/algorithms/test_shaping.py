"""Length penalties, caps, composite rewards, GRESO and the entropy filter."""

import math
import re
from dataclasses import asdict, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import algorithms_oracle as oracle
from ludus.algorithms import filters, shaping
from ludus.algorithms.filters import GresoState, Visit
from ludus.algorithms.kl import Schedule
from ludus.config.sections.curriculum import GresoConfig
from ludus.errors import ConfigError

quick = settings(max_examples=40, deadline=None, derandomize=True)
PARTS = st.lists(st.tuples(*[st.sampled_from([0.0, 0.5, 1.0])] * 3), min_size=1, max_size=8)


def numbers(*values):
    return torch.tensor(values, dtype=torch.float64)


@quick
@given(lengths=st.lists(st.integers(0, 40), min_size=1, max_size=8), cache=st.integers(1, 20), target=st.floats(0, 30))
def test_length_terms_equal_the_loop(lengths, cache, target):
    tensor = torch.tensor(lengths)

    def overlong(n):
        if n <= 30 - cache:
            return 0.0
        return (30 - cache - n) / cache if n <= 30 else -1.0

    ours = shaping.soft_overlong(lengths=tensor, max_length=30, cache=cache)
    assert ours.tolist() == pytest.approx([overlong(n) for n in lengths], abs=1e-12)
    linear = shaping.length_linear(lengths=tensor, target=target, lam=0.1)
    assert linear.tolist() == pytest.approx([-0.1 * max(0, n - target) for n in lengths], abs=1e-12)
    held = shaping.length_linear(lengths=tensor, target=target, lam=0.1, cap=0.5)
    assert held.tolist() == pytest.approx([-min(0.5, 0.1 * max(0, n - target)) for n in lengths], abs=1e-12)
    sigmoid = shaping.length_sigmoid(
        rewards=torch.full((len(lengths),), 2.0, dtype=torch.float64), lengths=tensor, target=target, tau=3.0
    )
    expected = [2 / (1 + math.exp((n - target) / 3)) for n in lengths]
    assert sigmoid.tolist() == pytest.approx(expected, abs=1e-12)


def test_the_check_that_shaping_cannot_outweigh_the_outcome():
    small = [shaping.ShapingRange("overlong", -0.5, 0.0), shaping.ShapingRange("format", 0.0, 0.4)]
    shaping.check_shaping(outcome_gap=1.0, terms=small)
    for gap in (0.9, 0.5, math.nan):
        with pytest.raises(ConfigError, match="overlong, format"):
            shaping.check_shaping(outcome_gap=gap, terms=small)
    with pytest.raises(ConfigError, match="from 1 to -1"):
        shaping.check_shaping(outcome_gap=9.0, terms=[shaping.ShapingRange("odd", 1, -1)])
    fades = [shaping.ShapingRange("length", 0.2, 1.0, floor=0.2), shaping.ShapingRange("format", 0.0, 0.2)]
    with pytest.raises(ConfigError, match=re.escape("Set length.floor = 0.399.")):  # (1 - 0.399) + 0.2 = 0.9 * 0.89
        shaping.check_shaping(outcome_gap=0.89, terms=fades)
    with pytest.raises(ValueError, match="cache"):
        shaping.soft_overlong(lengths=torch.tensor([1]), max_length=10, cache=11)


def test_weighted_sum_and_gated_match_hand_computed_values():
    parts = torch.tensor([[1.0, 2.0, math.nan], [0.0, -1.0, 5.0]], dtype=torch.float64)
    assert shaping.weighted_sum(parts=parts, weights=[1.0, 0.5, 0.0]).tolist() == [2.0, -0.5]
    fading = [Schedule("constant", 1.0), Schedule("linear", 1.0, 0.0, 4), Schedule("constant", 0.0)]
    totals = [shaping.weighted_sum(parts=parts, weights=[f.at(s) for f in fading]).tolist() for s in (0, 2, 4)]
    assert totals == [[3.0, -1.0], [2.0, -0.5], [1.0, 0.0]]
    gated = shaping.gated(gate=parts[:, 0], rewards=numbers(7, 8), threshold=0.5, closed=-1.0)
    assert gated.tolist() == [7.0, -1.0]
    with pytest.raises(ValueError, match="parts must be"):
        shaping.weighted_sum(parts=parts, weights=[1.0])


def dominates(a, b):
    return all(x >= y for x, y in zip(a, b, strict=True)) and a != b


@quick
@given(rows=PARTS, seed=st.integers(0, 99))
def test_pareto_equals_the_loop(rows, seed):
    group = torch.randint(2, (len(rows),), generator=torch.Generator().manual_seed(seed))
    ranks = [-1] * len(rows)
    for name in set(group.tolist()):
        left = [i for i in range(len(rows)) if group[i] == name]
        front = 0
        while left:
            best = [i for i in left if not any(dominates(rows[j], rows[i]) for j in left)]
            for i in best:
                ranks[i] = front
            left = [i for i in left if i not in best]
            front += 1
    parts = torch.tensor(rows, dtype=torch.float64)
    assert shaping.pareto_ranks(parts=parts, group=group).tolist() == ranks
    rewards = shaping.pareto(parts=parts, group=group)
    fronts = [1 + max(r for r, g in zip(ranks, group, strict=True) if g == own) for own in group]
    assert rewards.tolist() == pytest.approx([1 - r / n for r, n in zip(ranks, fronts, strict=True)], abs=1e-12)
    assert rewards.min() > 0
    assert rewards[torch.tensor(ranks) == 0].eq(1).all()
    assert shaping.dominance_violations(parts=parts, rewards=rewards, group=group) == []
    upside_down = shaping.dominance_violations(parts=parts, rewards=-rewards, group=group)
    pairs = [
        (i, j)
        for i in range(len(rows))
        for j in range(len(rows))
        if group[i] == group[j] and dominates(rows[i], rows[j])
    ]
    assert upside_down == pairs


def test_pareto_rejects_non_finite_rewards():
    with pytest.raises(ValueError, match=r"rewards\[1\] is nan"):
        shaping.pareto(parts=torch.tensor([[1.0], [math.nan]]), group=torch.tensor([0, 0]))


@quick
@given(batch=oracle.batches(), bound=st.sampled_from([0.3, math.log(2), 1.5]))
def test_entropy_bound_equals_the_loop(batch, bound):
    kept = filters.entropy_bound(entropy=batch.entropy, mask=batch.mask, bound=bound)
    expected = []
    for i, row in enumerate(batch.mask.tolist()):
        values = [batch.entropy[i, t].item() for t, m in enumerate(row) if m]
        expected.append(not values or sum(values) / len(values) <= bound)
    assert kept.tolist() == expected


VISITS = st.lists(
    st.lists(
        st.builds(Visit, st.sampled_from("abcd"), st.booleans(), st.sampled_from([0.0, 0.11, 0.5, 0.98])),
        max_size=5,
        unique_by=lambda v: v.task,
    ),
    max_size=8,
)


@quick
@given(steps=VISITS)
def test_greso_follows_the_visits_and_resumes(steps):
    state = GresoState()
    easy = hard = 0.5
    history = {name: [] for name in "abcd"}
    for number, visits in enumerate(steps):
        adapts = number > 1
        state = GresoState(**asdict(state)).update(visits, adapts=adapts)
        for visit in visits:
            history[visit.task].append(visit)
        if visits and adapts:
            zero = [v.success for v in visits if v.zero_variance]
            easy += -0.01 if sum(p >= 0.98 for p in zero) / len(visits) >= 0.25 / 3 else 0.01
            hard += -0.01 if sum(p <= 0.11 for p in zero) / len(visits) >= 0.25 * 2 / 3 else 0.01
            easy, hard = (min(max(p, 0.05), 0.95) for p in (easy, hard))
    for name, past in history.items():
        streak = 0
        while streak < len(past) and past[-1 - streak].zero_variance:
            streak += 1
        p = easy if past and past[-1].success >= 0.98 else hard
        expected = 1 - max(p**streak, 0.01) if streak else 0.0
        assert state.skip_probability(name) == pytest.approx(expected, abs=1e-12)


def test_greso_base_probabilities_stay_within_the_bounds():
    state = GresoState()
    for _ in range(60):
        state = state.update([Visit("a", True, 1.0)])  # always easy, never hard
    assert (state.p_easy, state.p_hard) == pytest.approx((0.05, 0.95))
    moved = GresoState(rule=GresoConfig(easy=0.4, hard=0.2, change=0.1)).update([Visit("a", True, 0.5)])
    assert (moved.p_easy, moved.p_hard) == pytest.approx((0.4, 0.6))


def test_greso_draws_are_seeded_and_keep_a_floor():
    state = replace(GresoState(), streaks={"stuck": -50, "fresh": 1})
    draws = [state.skips("stuck", seed=1, step=s) for s in range(2000)]
    assert draws == [state.skips("stuck", seed=1, step=s) for s in range(2000)]
    assert draws != [state.skips("stuck", seed=2, step=s) for s in range(2000)]
    assert sum(draws) / 2000 == pytest.approx(0.99, abs=0.01)
    assert sum(state.skips("fresh", seed=1, step=s) for s in range(2000)) / 2000 == pytest.approx(0.5, abs=0.04)
    assert not any(state.skips("new", seed=1, step=s) for s in range(200))


def test_rft_keeps_the_first_of_equal_verified_trajectories():
    keys = [("a", 1), ("a", 1), ("a", 2), ("a", 1), ("b", 1), ("b", 3)]
    kept = filters.rft(rewards=[0.0, 1.0, 1.0, 1.0, 1.0, 0.5], keys=keys)
    assert kept.tolist() == [False, True, True, False, True, False]
    with pytest.raises(ValueError, match="shorter"):
        filters.rft(rewards=[1.0], keys=[])
