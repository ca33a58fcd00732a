"""DPO and related losses against hand-computed values and loops over action tokens."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import algorithms_oracle as oracle
from ludus.algorithms import preference

quick = settings(max_examples=15, deadline=None, derandomize=True)


def rows(*values):
    return torch.tensor(values, dtype=torch.float64)


def log_sigmoid(x):
    return -math.log1p(math.exp(-x)) if x > -30 else x


def hand():
    """Sums: chosen -3 against -4 (two tokens), rejected -2 against -1.5 (one); the rest is masked."""
    return {
        "chosen_logprobs": rows([-1.0, torch.nan, -2.0]),
        "ref_chosen_logprobs": rows([-1.5, 7.0, -2.5]),
        "chosen_mask": torch.tensor([[1, 0, 1]]),
        "rejected_logprobs": rows([-2.0, torch.inf]),
        "ref_rejected_logprobs": rows([-1.5, 0.0]),
        "rejected_mask": torch.tensor([[1, 0]]),
    }


def test_dpo_matches_hand_computed_values():
    """h = (-3 + 4) - (-2 + 1.5) = 1.5; beta h = 0.3."""
    assert preference.dpo(**hand(), beta=0.2).item() == pytest.approx(math.log(1 + math.exp(-0.3)), abs=1e-12)
    smooth = 0.9 * math.log(1 + math.exp(-0.3)) + 0.1 * math.log(1 + math.exp(0.3))
    ours = preference.dpo(**hand(), beta=0.2, label_smoothing=0.1)
    assert ours.item() == pytest.approx(smooth, abs=1e-12)
    robust = (0.9 * math.log(1 + math.exp(-0.3)) - 0.1 * math.log(1 + math.exp(0.3))) / 0.8
    ours = preference.dpo(**hand(), beta=0.2, label_smoothing=0.1, robust=True)
    assert ours.item() == pytest.approx(robust, abs=1e-12)


def test_simpo_matches_hand_computed_values():
    """Means -1.5 and -2: 2 * 0.5 - 0.3 = 0.7."""
    pair = {key: value for key, value in hand().items() if not key.startswith("ref")}
    ours = preference.simpo(**pair, beta=2.0, gamma=0.3)
    assert ours.item() == pytest.approx(math.log(1 + math.exp(-0.7)), abs=1e-12)


def test_ipo_matches_hand_computed_values():
    """Per token 0.5 + 0.5 = 1 against 1 / (2 * 0.25) = 2; summed 1.5."""
    assert preference.ipo(**hand(), beta=0.25).item() == pytest.approx(1.0, abs=1e-12)
    assert preference.ipo(**hand(), beta=0.25, per_token=False).item() == pytest.approx(0.25, abs=1e-12)


def test_kto_matches_hand_computed_values():
    """h = 1 and -0.5, z = 0.2, beta 0.5."""
    given = {
        "logprobs": rows([-1.0, -2.0, 0.0], [-2.0, 0.0, torch.nan]),
        "ref_logprobs": rows([-1.5, -2.5, 9.0], [-1.5, torch.inf, 0.0]),
        "mask": torch.tensor([[1, 1, 0], [1, 0, 0]]),
    }
    loss = preference.kto(
        **given, desirable=torch.tensor([True, False]), baseline=0.2, beta=0.5, undesirable_weight=3.0
    )
    expected = [1 - 1 / (1 + math.exp(-0.4)), 3 * (1 - 1 / (1 + math.exp(-0.35)))]
    assert loss.tolist() == pytest.approx(expected, abs=1e-12)
    assert preference.kto_baseline(**given).item() == pytest.approx(0.25, abs=1e-12)
    swapped = {**given, "logprobs": given["ref_logprobs"], "ref_logprobs": given["logprobs"]}
    assert preference.kto_baseline(**swapped).item() == 0


def up(x):
    return 1 / (1 + torch.exp(-x))


def exo_loop(c, r, b):
    won = up(b * (c - r))
    return won * torch.log(won / 0.99) + (1 - won) * torch.log((1 - won) / 0.01)


def nca_loop(c, r, b):
    return -torch.log(up(b * c)) - 0.5 * torch.log(up(-b * c)) - 0.5 * torch.log(up(-b * r))


def discopop_loop(c, r, b):
    x = b * (c - r)
    gate = up(x / 0.7)
    return -(1 - gate) * torch.log(up(x)) + gate * torch.exp(-x)


PAIR_LOOPS = {
    "hinge": ({}, lambda c, r, b: torch.clamp(1 - b * (c - r), min=0)),
    "exo": ({"label_smoothing": 0.01}, exo_loop),
    "nca": ({}, nca_loop),
    "sppo": ({}, lambda c, r, b: (c - 1 / (2 * b)) ** 2 + (r + 1 / (2 * b)) ** 2),
    "discopop": ({"tau": 0.7}, discopop_loop),
    "apo_zero": ({}, lambda c, r, b: 1 - up(b * c) + up(b * r)),
    "apo_down": ({}, lambda c, r, b: up(b * c) + 1 - up(b * (c - r))),
    "bco_pair": ({"delta": 0.2}, lambda c, r, b: -torch.log(up(b * c - 0.2)) - torch.log(up(0.2 - b * r))),
}
"""Losses of a pair from its two log-ratios and beta, as their sources write them."""


@quick
@given(
    batch=oracle.batches(),
    seed=st.integers(0, 99),
    beta=st.sampled_from([0.1, 1.5]),
    smoothing=st.sampled_from([0.0, 0.2]),
)
def test_pairs_equal_the_loop_with_gradients(batch, seed, beta, smoothing):
    other = oracle.make_batch(batch.mask.flip(1), batch.group, batch.rewards, seed)
    pair = {"rejected_logprobs": other.logprobs, "chosen_mask": batch.mask, "rejected_mask": other.mask}
    ref = {"ref_chosen_logprobs": batch.ref, "ref_rejected_logprobs": other.ref}
    num = [max(int(m.sum()), 1) for m in batch.mask]

    def total(values, mask, i):
        return sum((values[i, t] for t, m in enumerate(mask[i].tolist()) if m), torch.zeros(1).double()[0])

    def gaps(lp, i):
        chosen = total(lp, batch.mask, i) - total(batch.ref, batch.mask, i)
        return chosen, total(other.logprobs, other.mask, i) - total(other.ref, other.mask, i)

    def smooth(x):
        up, down = -torch.log(torch.sigmoid(x)), -torch.log(torch.sigmoid(-x))
        return (1 - smoothing) * up + smoothing * down

    def simpo(lp, i):
        chosen = total(lp, batch.mask, i) / num[i]
        return smooth(beta * (chosen - total(other.logprobs, other.mask, i) / num[i]) - 0.4)

    def dpo(lp, i):
        chosen, rejected = gaps(lp, i)
        return smooth(beta * (chosen - rejected))

    def ipo(lp, i):
        chosen, rejected = gaps(lp, i)
        return ((chosen - rejected) / num[i] - 1 / (2 * beta)) ** 2

    cases = [
        (lambda lp: preference.dpo(chosen_logprobs=lp, **pair, **ref, beta=beta, label_smoothing=smoothing), dpo),
        (
            lambda lp: preference.simpo(chosen_logprobs=lp, **pair, beta=beta, gamma=0.4, label_smoothing=smoothing),
            simpo,
        ),
        (lambda lp: preference.ipo(chosen_logprobs=lp, **pair, **ref, beta=beta), ipo),
    ]
    for name, (more, loop) in PAIR_LOOPS.items():
        function = getattr(preference, name)
        cases.append(
            (
                lambda lp, f=function, m=more: f(chosen_logprobs=lp, **pair, **ref, beta=beta, **m),
                lambda lp, i, f=loop: f(*gaps(lp, i), beta),
            )
        )
    for ours, loop in cases:
        results = []
        for function in (ours, lambda lp, f=loop: torch.stack([f(lp, i) for i in range(len(num))])):
            leaf = batch.logprobs.clone().requires_grad_()
            loss = function(leaf)
            anchor = 0 * torch.where(batch.mask, leaf, 0.0).sum()
            (gradient,) = torch.autograd.grad((loss * torch.arange(1.0, len(num) + 1)).sum() + anchor, leaf)
            results.append((loss.detach(), gradient))
        torch.testing.assert_close(results[0], results[1], **oracle.TOLERANCE)


def test_bco_pair_loss_is_sum_of_per_trajectory_losses():
    """Log-ratios 1 and -0.5, beta 0.5, delta 0.2."""
    pair = hand()
    wide = torch.tensor([[0.0, 0.0, 0.0]]).double()
    rejected = [torch.cat([pair[k], wide[:, :1].to(pair[k].dtype)], 1) for k in REJECTED]
    alone = [torch.cat([pair[k], r]) for k, r in zip(CHOSEN, rejected, strict=True)]
    given = dict(zip(("logprobs", "ref_logprobs", "mask"), alone, strict=True))
    loss = preference.bco(**given, desirable=torch.tensor([True, False]), delta=0.2, beta=0.5)
    assert loss.tolist() == pytest.approx([-log_sigmoid(0.3), -log_sigmoid(0.45)], abs=1e-12)
    both = preference.bco_pair(**pair, delta=torch.tensor(0.2, dtype=torch.float64), beta=0.5)
    assert both.item() == pytest.approx(float(loss.sum()), abs=1e-12)
    assert preference.implicit_rewards(**given, beta=0.5).tolist() == [0.5, -0.25]
    with pytest.raises(ValueError, match="desirable"):
        preference.bco(**given, desirable=torch.ones(3), delta=0.0)


CHOSEN = ("chosen_logprobs", "ref_chosen_logprobs", "chosen_mask")
REJECTED = ("rejected_logprobs", "ref_rejected_logprobs", "rejected_mask")


@pytest.mark.parametrize("name", [*PAIR_LOOPS])
@pytest.mark.parametrize("far", [-1e4, 1e4])
def test_far_margins_have_no_nan_in_value_or_gradient(name, far):
    leaf = rows([far, 0.0, far]).requires_grad_()
    rest = {k: v for k, v in hand().items() if k != "chosen_logprobs"}
    more = PAIR_LOOPS[name][0]
    (gradient,) = torch.autograd.grad(getattr(preference, name)(chosen_logprobs=leaf, **rest, **more), leaf)
    assert gradient.isfinite().all()
    assert not gradient[0, 1]


def test_far_margins_stay_finite_and_shapes_are_checked():
    with pytest.raises(ValueError, match="label_smoothing"):
        preference.exo(**hand(), label_smoothing=0.0)
    with pytest.raises(ValueError, match="tau"):
        preference.discopop(**hand(), tau=0.0)
    far = hand() | {"chosen_logprobs": rows([-1e5, 0.0, -1e5])}
    assert preference.dpo(**far, beta=1.0).item() == pytest.approx(2e5, rel=1e-3)
    with pytest.raises(ValueError, match="ref_logprobs has shape"):
        preference.dpo(**(hand() | {"ref_chosen_logprobs": rows([0.0])}))
    with pytest.raises(ValueError, match="label_smoothing"):
        preference.dpo(**hand(), label_smoothing=0.5, robust=True)
    with pytest.raises(ValueError, match="desirable"):
        preference.kto(
            logprobs=rows([0.0]), ref_logprobs=rows([0.0]), mask=torch.ones(1, 1), desirable=torch.ones(2), baseline=0.0
        )


def test_dpo_and_kto_pass_gradcheck():
    mask = torch.tensor([[1, 0, 1]])
    leaf, ref = rows([-1.0, -0.5, -2.0]).requires_grad_(), rows([-0.7, -0.2, -1.7])
    rest = {k: v for k, v in hand().items() if k not in ("chosen_logprobs", "chosen_mask")}
    assert torch.autograd.gradcheck(
        lambda x: preference.dpo(chosen_logprobs=x, chosen_mask=mask, **rest, label_smoothing=0.1), leaf
    )
    assert torch.autograd.gradcheck(
        lambda x: preference.kto(logprobs=x, ref_logprobs=ref, mask=mask, desirable=torch.ones(1), baseline=0.1), leaf
    )
