"""Losses per token and per trajectory against slow references and by hand."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import algorithms_oracle as oracle
import algorithms_oracle_losses as slow
from ludus.algorithms import losses
from ludus.algorithms.objective import aggregate

quick = settings(max_examples=15, deadline=None, derandomize=True)
RANGES = st.sampled_from([(0.2, 0.2), (0.1, 0.4), (0.0, 0.0), (1.0, 0.28)])


def rows(*values):
    return torch.tensor(values, dtype=torch.float64)


def value_and_gradient(function, leaf_of, mask):
    """The terms, and the gradient of an uneven sum of them (even sums hide swapped tokens)."""
    leaf = leaf_of.clone().requires_grad_()
    loss = function(leaf)
    weights = torch.arange(1.0, loss.numel() + 1, dtype=torch.float64).reshape(loss.shape)
    anchor = 0 * torch.where(mask, leaf, 0.0).sum()
    (gradient,) = torch.autograd.grad((loss * weights).sum() + anchor, leaf)
    return loss.detach(), gradient


def assert_same(ours, loop, batch, leaf=None):
    leaf = batch.logprobs if leaf is None else leaf
    value, gradient = value_and_gradient(ours, leaf, batch.mask)
    expected, expected_gradient = value_and_gradient(loop, leaf, batch.mask)
    torch.testing.assert_close(value, expected, **oracle.TOLERANCE)
    torch.testing.assert_close(gradient, expected_gradient, **oracle.TOLERANCE)
    assert torch.equal(gradient[~batch.mask], torch.zeros_like(gradient[~batch.mask]))


def inputs(batch, **more):
    return {"old_logprobs": batch.old, "advantages": batch.advantages, "mask": batch.mask, **more}


@quick
@given(batch=oracle.batches(), bounds=RANGES)
def test_losses_of_the_trajectory_ratio_equal_the_loop(batch, bounds):
    low, high = bounds
    clip = {"eps_low": low, "eps_high": high}
    assert_same(
        lambda lp: losses.gspo(logprobs=lp, **inputs(batch), **clip), lambda lp: slow.gspo(lp, batch, low, high), batch
    )
    assert_same(
        lambda lp: losses.gspo_token(logprobs=lp, **inputs(batch), **clip),
        lambda lp: oracle.tokens(batch.mask, slow.gspo_token(lp, batch, low, high)),
        batch,
    )
    assert_same(
        lambda lp: losses.gmpo(logprobs=lp, **inputs(batch), **clip), lambda lp: slow.gmpo(lp, batch, low, high), batch
    )


@quick
@given(batch=oracle.batches(), bounds=RANGES)
def test_cispo_and_sapo_equal_the_loop(batch, bounds):
    low, high = bounds
    assert_same(
        lambda lp: losses.cispo(logprobs=lp, **inputs(batch), eps_low=low, eps_high=high),
        lambda lp: oracle.tokens(batch.mask, slow.cispo(lp, batch, low, high)),
        batch,
    )
    assert_same(
        lambda lp: losses.sapo(logprobs=lp, **inputs(batch), tau_pos=1 + low, tau_neg=1.05),
        lambda lp: oracle.tokens(batch.mask, slow.sapo(lp, batch, 1 + low, 1.05)),
        batch,
    )


@quick
@given(batch=oracle.batches(), kind=st.sampled_from(["tv", "kl"]), bound=st.sampled_from([0.02, 0.2, 1.0]))
def test_dppo_equals_the_loop(batch, kind, bound):
    given = {"behavior_logprobs": batch.behavior, "advantages": batch.advantages, "mask": batch.mask}
    logprobs = torch.where(batch.mask, batch.logprobs.clamp(max=-1e-3), batch.logprobs)
    given["behavior_logprobs"] = torch.where(batch.mask, batch.behavior.clamp(max=-2e-3), batch.behavior)
    other = oracle.Batch(**{**vars_of(batch), "behavior": given["behavior_logprobs"]})
    assert_same(
        lambda lp: losses.dppo(logprobs=lp, **given, bound=bound, divergence=kind),
        lambda lp: oracle.tokens(batch.mask, slow.dppo(lp, other, bound, kind)),
        batch,
        leaf=logprobs,
    )


def vars_of(batch):
    return {name: getattr(batch, name) for name in oracle.Batch.__dataclass_fields__}


@quick
@given(batch=oracle.batches(), gamma=st.sampled_from([0.1, 1.0]), seed=st.integers(0, 99))
def test_mixed_policy_equals_the_loop(batch, gamma, seed):
    expert = torch.rand(len(batch.mask), generator=torch.Generator().manual_seed(seed)) < 0.5
    old = torch.where(expert[:, None], torch.nan, batch.old)  # an expert's old log-probability is not read
    assert_same(
        lambda lp: losses.mixed_policy(
            logprobs=lp, **{**inputs(batch), "old_logprobs": old}, expert=expert, gamma=gamma
        ),
        lambda lp: oracle.tokens(batch.mask, slow.mixed(lp, batch, expert.tolist(), gamma)),
        batch,
    )
    by_token = losses.mixed_policy(
        logprobs=batch.logprobs, **inputs(batch), expert=expert[:, None].expand(batch.mask.shape), gamma=gamma
    )
    by_row = losses.mixed_policy(logprobs=batch.logprobs, **inputs(batch), expert=expert, gamma=gamma)
    assert torch.equal(by_token, by_row)


@quick
@given(batch=oracle.batches(), eps=st.sampled_from([None, 0.05, 0.5]))
def test_value_loss_equals_the_loop(batch, eps):
    assert_same(
        lambda v: losses.value_loss(values=v, old_values=batch.old, returns=batch.advantages, mask=batch.mask, eps=eps),
        lambda v: oracle.tokens(
            batch.mask,
            lambda i, t: slow.value_token(v[i, t], batch.old[i, t].item(), batch.advantages[i, t].item(), eps),
        ),
        batch,
    )


@quick
@given(batch=oracle.batches())
def test_distill_value_and_gradient_equal_the_teacher_logprob_gap(batch):
    plain = {"teacher_logprobs": batch.ref, "mask": batch.mask}
    value, gradient = value_and_gradient(lambda lp: losses.distill(logprobs=lp, **plain), batch.logprobs, batch.mask)
    gap = batch.clean(batch.logprobs - batch.ref)
    weights = torch.arange(1.0, gap.numel() + 1, dtype=torch.float64).reshape(gap.shape)
    torch.testing.assert_close(value, gap, **oracle.TOLERANCE)
    torch.testing.assert_close(gradient, gap * weights, **oracle.TOLERANCE)
    assert_same(
        lambda lp: losses.distill(logprobs=lp, **plain, old_logprobs=batch.old),
        lambda lp: oracle.tokens(
            batch.mask, lambda i, t: (lp[i, t] - batch.old[i, t]).exp() * (lp[i, t].detach() - batch.ref[i, t])
        ),
        batch,
    )


def test_expected_distill_gradient_equals_full_distribution_gradient():
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(4, generator=generator, dtype=torch.float64).requires_grad_()
    teacher = torch.randn(1, 1, 4, generator=generator, dtype=torch.float64)
    mask = torch.ones(1, 4)
    logprobs = logits.log_softmax(0)
    by_token = losses.distill(logprobs=logprobs[None], teacher_logprobs=teacher.log_softmax(-1)[0], mask=mask)
    expected = (logprobs.exp().detach() * by_token[0]).sum()
    full = losses.distill_full(logits=logits[None, None], teacher_logits=teacher, mask=mask[:, :1])
    (sampled,) = torch.autograd.grad(expected, logits, retain_graph=True)
    (exact,) = torch.autograd.grad(full.sum(), logits)
    torch.testing.assert_close(sampled, exact, **oracle.TOLERANCE)


@quick
@given(batch=oracle.batches(), contiguous=st.booleans(), seed=st.integers(0, 999))
def test_conflict_weights_equal_the_loop(batch, contiguous, seed):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(2, batch.mask.shape, generator=generator)
    signs = torch.randint(-1, 2, (len(batch.mask),), generator=generator)
    advantages = torch.where(batch.mask, signs[:, None] * 0.7, torch.nan).double()
    own = [[ids[i, t].item() for t in slow.actions(batch.mask, i)] for i in range(len(ids))]
    expected = slow.conflicts(own, signs.tolist(), batch.group.tolist(), contiguous)
    ours = losses.conflict_weights(
        token_ids=ids, group=batch.group, advantages=advantages, mask=batch.mask, contiguous=contiguous
    )
    assert [[ours[i, t].item() for t in slow.actions(batch.mask, i)] for i in range(len(ids))] == expected
    assert not ours[~batch.mask].any()
    assert_same(
        lambda lp: losses.gtpo(logprobs=lp, **inputs(batch), weights=ours),
        lambda lp: oracle.tokens(
            batch.mask, lambda i, t: -ours[i, t] * batch.advantages[i, t] * (lp[i, t] - batch.old[i, t]).exp()
        ),
        batch,
    )


def test_conflict_weights_match_hand_computed_values():
    """A shared beginning, a shared end at different lengths, an observation between, another group apart."""
    ids = torch.tensor([[5, 6, 9, 7, 8], [5, 9, 3, 8, 0], [5, 1, 1, 8, 8]])
    mask = torch.tensor([[1, 1, 0, 1, 1], [1, 0, 1, 1, 0], [1, 1, 0, 1, 1]])
    advantages = rows([1.0] * 5, [-1.0] * 5, [-1.0] * 5)
    weights = losses.conflict_weights(token_ids=ids, group=torch.tensor([0, 0, 1]), advantages=advantages, mask=mask)
    assert weights.tolist() == [[2, 1, 0, 1, 2], [0, 0, 1, 0, 0], [1, 1, 0, 1, 1]]


def test_gspo_with_one_action_token_is_ppo_clip():
    logprobs, old = (rows([-0.4, -9.0], [-1.0, -9.0], [-0.2, -3.0]), rows([-0.9, 1.0], [-0.9, 1.0], [-1.0, 0.0]))
    given = {
        "old_logprobs": old,
        "advantages": rows([1.0, 0.0], [-2.0, 0.0], [-0.5, 0.0]),
        "mask": torch.tensor([[1, 0]] * 3),
        "eps_low": 0.2,
        "eps_high": 0.28,
    }
    one = value_and_gradient(lambda lp: losses.gspo(logprobs=lp, **given), logprobs, given["mask"].bool())
    two = value_and_gradient(lambda lp: losses.ppo_clip(logprobs=lp, **given).sum(1), logprobs, given["mask"].bool())
    for ours, expected in zip(one, two, strict=True):
        torch.testing.assert_close(ours, expected, **oracle.TOLERANCE)


@quick
@given(batch=oracle.batches())
def test_gspo_token_with_one_advantage_a_trajectory_is_gspo(batch):
    scores = torch.linspace(-1, 1, len(batch.mask), dtype=torch.float64)[:, None].expand(batch.mask.shape)
    results = []
    for name in ("gspo", "gspo_token"):
        leaf = batch.logprobs.clone().requires_grad_()
        loss = getattr(losses, name)(
            logprobs=leaf, old_logprobs=batch.old, advantages=scores, mask=batch.mask, eps_low=0.1, eps_high=0.1
        )
        total = aggregate(loss=loss, mask=batch.mask, how="seq_mean_token_mean")
        results.append((total.detach(), torch.autograd.grad(total, leaf)[0]))
    torch.testing.assert_close(results[0], results[1], **oracle.TOLERANCE)


def test_cispo_keeps_the_gradient_that_ppo_clip_cuts_off():
    logprobs = rows([math.log(3.0)]).requires_grad_()
    given = {"old_logprobs": rows([0.0]), "advantages": rows([2.0]), "mask": torch.ones(1, 1)}
    (clipped,) = torch.autograd.grad(losses.ppo_clip(logprobs=logprobs, **given).sum(), logprobs)
    (kept,) = torch.autograd.grad(losses.cispo(logprobs=logprobs, **given).sum(), logprobs)
    assert clipped.item() == 0
    assert kept.item() == pytest.approx(-1.28 * 2, abs=1e-12)


def test_ratio_losses_have_reinforce_gradient_at_the_old_policy():
    logprobs = rows([-0.5, -2.0, -1.0])
    given = {"advantages": rows([1.5, -1.0, 0.3]), "mask": torch.tensor([[1, 1, 1]])}
    expected = -given["advantages"]
    for name in ("ppo_clip", "cispo", "sapo"):
        leaf = logprobs.clone().requires_grad_()
        loss = getattr(losses, name)(logprobs=leaf, old_logprobs=logprobs, **given)
        torch.testing.assert_close(torch.autograd.grad(loss.sum(), leaf)[0], expected, **oracle.TOLERANCE, msg=name)


def test_unfit_choices_and_weights_are_refused():
    given = {"logprobs": rows([0.0]), "old_logprobs": rows([0.0]), "advantages": rows([1.0])}
    given["mask"] = torch.ones(1, 1)
    wide = torch.ones(1, 2)
    for name, extra in (("clip_cov", "chosen"), ("kl_cov", "chosen"), ("gtpo", "weights"), ("mixed_policy", "expert")):
        with pytest.raises(ValueError, match=extra):
            getattr(losses, name)(**given, **{extra: wide})
    with pytest.raises(ValueError, match="expert"):
        losses.mixed_policy(**given, expert=torch.ones(3))
    with pytest.raises(ValueError, match="divergence"):
        losses.dppo(
            logprobs=rows([0.0]),
            behavior_logprobs=rows([0.0]),
            advantages=rows([1.0]),
            mask=given["mask"],
            divergence="js",
        )


def test_binary_kl_matches_its_limits_at_probability_one():
    certain, likely = rows(0.0), rows(math.log(0.5))
    assert losses.binary_kl(certain, certain).item() == 0
    assert losses.binary_kl(certain, likely).item() == math.inf
    assert losses.binary_kl(likely, certain).item() == pytest.approx(math.log(2), abs=1e-12)
    assert losses.binary_kl(certain + 1e-9, likely).item() == math.inf  # a log-probability above 0 by rounding


@pytest.mark.parametrize("name", ["gspo", "gspo_token", "gmpo", "cispo", "sapo", "ppo_clip"])
def test_a_ratio_is_clamped_in_log_space_and_shapes_are_checked(name):
    loss = getattr(losses, name)
    far = {"old_logprobs": rows([0.0]), "advantages": rows([-1.0]), "mask": torch.ones(1, 1)}
    assert math.isfinite(loss(logprobs=rows([900.0]), **far).item())
    assert math.isfinite(loss(logprobs=rows([-900.0]), **{**far, "advantages": rows([1.0])}).item())
    with pytest.raises(ValueError, match="advantages has shape"):
        loss(logprobs=rows([0.0]), **{**far, "advantages": rows([1.0, 2.0])})
    wrong = {"tau_pos": 0.0} if name == "sapo" else {"eps_low": -0.1}
    with pytest.raises(ValueError, match="must"):
        loss(logprobs=rows([0.0]), **far, **wrong)


def test_token_and_sequence_losses_pass_gradcheck():
    generator = torch.Generator().manual_seed(5)
    mask = torch.tensor([[0, 1, 1, 0, 1], [1, 0, 1, 1, 0]])
    lp, old, other, scores = (torch.randn(2, 5, generator=generator, dtype=torch.float64) for _ in range(4))
    lp, old, other = -lp.abs() - 0.1, -lp.abs() - 0.15 + 0.05 * old, -other.abs() - 0.1
    given = {"old_logprobs": old, "advantages": scores, "mask": mask}
    leaf = lp.requires_grad_()
    checks = [
        lambda x: losses.gspo(logprobs=x, **given, eps_low=0.5, eps_high=0.5),
        lambda x: losses.gmpo(logprobs=x, **given),
        lambda x: losses.sapo(logprobs=x, **given),
        lambda x: losses.dppo(logprobs=x, behavior_logprobs=other, advantages=scores, mask=mask, bound=0.05),
        lambda x: losses.mixed_policy(logprobs=x, **given, expert=torch.tensor([True, False])),
        lambda x: losses.kl_cov(logprobs=x, **given, chosen=mask.bool(), coef=0.7),
        lambda x: losses.clip_cov(logprobs=x, **given, chosen=torch.eye(2, 5).bool()),
        lambda x: losses.gtpo(logprobs=x, **given, weights=2 * mask.double()),
        lambda x: losses.value_loss(values=x, old_values=old, returns=scores, mask=mask),
        lambda x: losses.echo(logprobs=x, observations=1 - mask, coef=0.3),
        lambda x: losses.positive_nll(logprobs=x, positive=torch.tensor([True, False]), mask=mask),
    ]
    for check in checks:
        assert torch.autograd.gradcheck(check, leaf)
    logits = torch.randn(1, 2, 3, generator=generator, dtype=torch.float64, requires_grad=True)
    teacher = torch.randn(1, 2, 3, generator=generator, dtype=torch.float64)
    assert torch.autograd.gradcheck(
        lambda x: losses.distill_full(logits=x, teacher_logits=teacher, mask=torch.tensor([[0, 1]])), logits
    )
