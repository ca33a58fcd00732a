"""Full-distribution KL, its places and granularity, schedules, controllers and the guard."""

import math
from dataclasses import asdict

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import algorithms_oracle as oracle
from ludus.algorithms import kl
from ludus.algorithms.kl import AdaptiveKLController, KLGuard, PIDKLController, Schedule
from ludus.algorithms.objective import aggregate
from ludus.config.schema import Config
from ludus.errors import LearnerError
from tables.kl_series import SERIES

quick = settings(max_examples=20, deadline=None, derandomize=True)
LOGITS = st.lists(st.tuples(st.floats(-8, 8), st.floats(-8, 8)), min_size=1, max_size=6)


def shares(logits, temperature):
    weights = [math.exp(x / temperature) for x in logits]
    return [w / sum(weights) for w in weights]


@quick
@given(pairs=LOGITS, temperature=st.sampled_from([0.5, 1.0, 1.7]))
def test_full_kl_equals_the_loop(pairs, temperature):
    logits = torch.tensor(pairs, dtype=torch.float64).T
    p, q = (shares(row, temperature) for row in logits.tolist())
    given = {"logits": logits[0], "ref_logits": logits[1], "temperature": temperature}
    reverse = sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
    forward = sum(b * math.log(b / a) for a, b in zip(p, q, strict=True))
    assert kl.full_reverse(**given).item() == pytest.approx(reverse, abs=1e-10)
    assert kl.full_forward(**given).item() == pytest.approx(forward, abs=1e-10)


def test_full_kl_gradients_pieces_and_forbidden_tokens():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(5, 4, generator=generator, dtype=torch.float64)
    ref = torch.randn(5, 4, generator=generator, dtype=torch.float64)
    for function in (kl.full_reverse, kl.full_forward):
        assert torch.autograd.gradcheck(
            lambda x, f=function: f(logits=x, ref_logits=ref, temperature=0.7), logits.requires_grad_()
        )
        whole = function(logits=logits, ref_logits=ref)
        pieces = [function(logits=a, ref_logits=b) for a, b in zip(logits.split(2), ref.split(2), strict=True)]
        assert torch.equal(torch.cat(pieces), whole)
    forbidden = torch.tensor([0.0, 0.0, -torch.inf], dtype=torch.float64, requires_grad=True)
    uniform = torch.zeros(3, dtype=torch.float64)
    reverse = kl.full_reverse(logits=forbidden, ref_logits=uniform)
    assert reverse.item() == pytest.approx(math.log(1.5), abs=1e-12)
    (gradient,) = torch.autograd.grad(reverse, forbidden)
    torch.testing.assert_close(gradient, torch.zeros(3, dtype=torch.float64), **oracle.TOLERANCE)
    assert kl.full_forward(logits=forbidden, ref_logits=uniform).item() == math.inf
    assert kl.full_reverse(logits=uniform, ref_logits=forbidden.detach()).item() == math.inf
    with pytest.raises(ValueError, match="differ in shape"):
        kl.full_reverse(logits=logits, ref_logits=ref[:, :3])


def test_k1_and_k3_estimators_are_unbiased_for_reverse_kl():
    """The exact expectation under the policy: k1 and k3 are the reverse KL."""
    generator = torch.Generator().manual_seed(2)
    policy, ref = (torch.randn(6, generator=generator, dtype=torch.float64).log_softmax(0) for _ in range(2))
    exact = kl.full_reverse(logits=policy, ref_logits=ref).item()
    for estimate in (kl.k1, kl.k3, kl.k3_k2grad):
        mean = (policy.exp() * estimate(logprobs=policy, ref_logprobs=ref)).sum().item()
        assert mean == pytest.approx(exact, abs=1e-12)
    gap = kl.abs(logprobs=policy, ref_logprobs=ref)
    assert torch.equal(gap, torch.abs(policy - ref))


@quick
@given(batch=oracle.batches())
def test_trajectory_kl_in_the_loss_is_the_sum_over_each_trajectory(batch):
    leaf = batch.logprobs.clone().requires_grad_()
    tokens = kl.k2(logprobs=torch.where(batch.mask, leaf, 0.0), ref_logprobs=batch.clean(batch.ref))
    total = kl.trajectory_kl(kl=tokens, mask=batch.mask)
    expected = [
        sum(((batch.logprobs[i, t] - batch.ref[i, t]) ** 2 / 2).item() for t, m in enumerate(row) if m)
        for i, row in enumerate(batch.mask.tolist())
    ]
    assert total.tolist() == pytest.approx(expected, abs=1e-10)
    mean = aggregate(loss=total, mask=batch.mask)
    (gradient,) = torch.autograd.grad(mean, leaf)
    num = max(int(batch.mask.any(1).sum()), 1)
    torch.testing.assert_close(gradient, batch.clean(batch.logprobs - batch.ref) / num, **oracle.TOLERANCE)


def test_schedules_match_expected_values():
    linear, cosine = (Schedule(kind, 0.4, 0.1, 10) for kind in ("linear", "cosine"))
    assert [linear.at(s) for s in (0, 5, 10, 99)] == pytest.approx([0.4, 0.25, 0.1, 0.1])
    assert [cosine.at(s) for s in (0, 5, 10, 99)] == pytest.approx([0.4, 0.25, 0.1, 0.1])
    quarter = 0.1 + 0.3 * (1 + math.sqrt(0.5)) / 2
    assert cosine.at(2.5) == pytest.approx(quarter)
    assert Schedule("constant", 0.4, 0.1).at(10**6) == 0.4


@quick
@given(kls=st.lists(st.floats(0, 5), max_size=12), num=st.integers(1, 64))
def test_adaptive_kl_equals_the_loop_and_resumes(kls, num):
    state, beta = AdaptiveKLController(coef=0.1, target=0.8, horizon=500.0), 0.1
    for value in kls:
        state = AdaptiveKLController(**asdict(state)).update(value, num)
        beta *= 1 + max(-0.2, min(0.2, value / 0.8 - 1)) * num / 500
        assert state.coef == pytest.approx(beta, rel=1e-12)


@quick
@given(kls=st.lists(st.floats(0, 0.5), max_size=12))
def test_pid_equals_the_loop_and_resumes(kls):
    """Far from its bounds the controller is the textbook sum."""
    state = PIDKLController(target=0.2, base=50.0, kp=2.0, ki=0.5, kd=1.0, max_coef=100.0)
    assert state.at() == 50.0
    errors = []
    for value in kls:
        state = PIDKLController(**asdict(state)).update(value)
        errors.append(value - 0.2)
        slope = errors[-1] - errors[-2] if len(errors) > 1 else 0.0
        expected = 50 + 2 * errors[-1] + 0.5 * sum(errors) + slope
        assert state.at() == pytest.approx(expected, abs=1e-10)


def test_pid_controller_respects_bounds_without_integral_windup():
    state = PIDKLController(target=0.1, base=0.0, kp=0.0, ki=1.0, max_coef=0.5)
    for _ in range(100):
        state = state.update(0.4)
    assert state.at() == 0.5
    assert state.integral <= 0.5
    state = state.update(0.0)
    assert state.at() < 0.5
    for _ in range(100):
        state = state.update(0.0)
    assert state.at() == 0.0


@pytest.mark.parametrize("control", [{"kind": "adaptive", "target": 1.0}, {"kind": "pid", "target": 1.0, "kp": 0.1}])
def test_kl_controllers_reject_non_finite_kl(control):
    with pytest.raises(LearnerError, match="is nan"):
        kl.kl_controller(Config(kl_control=control), 0.1).update(math.nan, 1)


HEALTHY = SERIES["search, seed 0"]


def pauses_in(series, guard):
    """The steps of a series that pause, counted from 1; the run goes on after each."""
    found = []
    for step, value in enumerate(series, start=1):
        found += [step] if guard.should_pause(value) else []
        guard = guard.update(value)
    return found


GUARD = KLGuard(expected=None, decay=0.9)


@pytest.mark.parametrize("name", SERIES)
def test_adaptive_kl_guard_pauses_no_recorded_run(name):
    assert pauses_in(SERIES[name], GUARD) == []


@pytest.mark.parametrize("name", SERIES)
@pytest.mark.parametrize(
    "planted",
    [lambda n: 1 + 3 * min(1.0, n / 5), lambda n: 4.0, lambda n: 1.3**n, lambda n: 1.6**n],
    ids=["ramp to 4", "jump to 4", "times 1.3", "times 1.6"],
)
def test_adaptive_kl_guard_pauses_a_jump_or_growth_within_ten_steps(name, planted):
    for begin in (25, 30):
        known = SERIES[name][:begin]
        level = math.fsum(known[-10:]) / 10
        series = [*known, *(level * planted(n) for n in range(1, 20))]
        assert begin < pauses_in(series, GUARD)[0] <= begin + 10


def test_adaptive_kl_guard_follows_steady_growth_and_a_new_level():
    assert pauses_in([0.001 * step for step in range(80)], GUARD) == []
    level = [*HEALTHY, *[0.2] * 40]
    assert pauses_in(level, GUARD)[-1] < 40  # resumed after each pause, it learns the new level


def test_kl_guard_pauses_above_twice_the_expected_value():
    fixed = KLGuard(expected=0.1)
    assert not fixed.should_pause(0.2)
    assert fixed.should_pause(0.2001)
    assert fixed.should_pause(math.nan)
    assert fixed.update(0.15) == fixed
    learning = KLGuard(expected=None, decay=0.5, warmup=7)
    for value in (0.01, 0.02, 0.03, 0.04, 0.05, 0.06, 0.07):
        assert not learning.should_pause(9.0)
        learning = KLGuard(**asdict(learning.update(value)))
    # Steps 1 and 2 have left the window of the last five: 0.015 on average, at step 1.5.
    assert (learning.expected, learning.expected_step) == pytest.approx((0.015, 1.5))
    # Step 8: the window is of the steps 4 to 8, the middle one is 6.
    assert learning.predicted == pytest.approx(0.015 * 6 / 1.5)
    edge = 5 * 2 * learning.predicted - (0.04 + 0.05 + 0.06 + 0.07)
    assert not learning.should_pause(edge - 1e-9)
    assert learning.should_pause(edge + 1e-9)
    assert learning.update(math.inf) == learning


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Schedule("linear", 1.0), "num_steps must be at least 1"),
        (lambda: Schedule("steep", 1.0), "kind = 'steep' is not one of"),
        (lambda: AdaptiveKLController(0.1, 0.0), "target and horizon"),
        (lambda: AdaptiveKLController(0.1, 0.01).update(math.nan, 8), "kl is nan"),
        (lambda: PIDKLController(0.1, 2.0, 1.0), "base must lie between 0 and max_coef"),
        (lambda: PIDKLController(0.1, 0.0, 1.0).update(math.inf), "kl is inf"),
        (lambda: KLGuard(None), "needs a decay"),
        (lambda: KLGuard(0.1, factor=0.0), "factor must be above 0"),
    ],
)
def test_controllers_refuse_invalid_numbers(make, message):
    with pytest.raises(ValueError, match=message):
        make()
