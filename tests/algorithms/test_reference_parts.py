"""Parts of other systems against slow references and by hand."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import algorithms_oracle as oracle
import algorithms_oracle_losses as slow
from ludus.algorithms import advantages, aggregate, corrections, kl, losses
from ludus.algorithms.algorithm import PartOptions
from ludus.algorithms.objective import Normalizer, objective
from ludus.algorithms.spec.resolve import PRESETS, resolve
from ludus.algorithms.tensors import TokenBatch
from ludus.config.sections.algorithm import AlgorithmConfig
from ludus.errors import ConfigError

quick = settings(max_examples=15, deadline=None, derandomize=True)
BATCHES = oracle.batches()


def same(actual, expected):
    torch.testing.assert_close(actual, expected, **oracle.TOLERANCE)


def off_policy(batch):
    return {"old_logprobs": batch.old, "behavior_logprobs": batch.behavior, "mask": batch.mask}


def tokens(batch, weight):
    return oracle.tokens(batch.mask, lambda i, t: torch.tensor(weight(i, t), dtype=torch.float64))


@quick
@given(batch=BATCHES, level=st.sampled_from(["token", "sequence", "geometric"]))
def test_tis_is_bounded_from_below(batch, level):
    found = corrections.tis(**off_policy(batch), cap=1.2, low=0.9, level=level)
    same(found, tokens(batch, lambda i, t: max(0.9, min(1.2, slow.ratio_of(batch, i, t, level)))))


@quick
@given(batch=BATCHES, by=st.sampled_from(["token", "sequence", "geometric"]), veto=st.sampled_from([0, 0.6]))
def test_rejection_with_a_veto_matches_the_loop(batch, by, veto):
    def keep(i, t):
        row = [slow.ratio_of(batch, i, u, "token") for u in slow.actions(batch.mask, i)]
        return float(0.8 <= slow.ratio_of(batch, i, t, by) <= 1.3 and min(row) >= veto)

    found = corrections.reject_sequence(**off_policy(batch), low=0.8, high=1.3, by=by, veto=veto)
    same(found, tokens(batch, keep))


DISTANCES = {"k2": lambda g: g * g / 2, "k3": lambda g: math.exp(g) - 1 - g}
SUMMARIES = {"geometric": lambda row: sum(row) / len(row), "sequence": sum, "largest": max}


@quick
@given(
    batch=BATCHES,
    measure=st.sampled_from(list(DISTANCES)),
    by=st.sampled_from(["token", *SUMMARIES]),
    high=st.sampled_from([0.001, 0.02, 0.3]),
)
def test_rejection_by_divergence_estimators_matches_the_loop(batch, measure, by, high):
    def distance(i, t):
        return DISTANCES[measure](float(batch.old[i, t] - batch.behavior[i, t]))

    def keep(i, t):
        row = [distance(i, u) for u in slow.actions(batch.mask, i)]
        return float((distance(i, t) if by == "token" else SUMMARIES[by](row)) <= high)

    found = corrections.reject_sequence(**off_policy(batch), high=high, by=by, measure=measure)
    same(found, tokens(batch, keep))


@quick
@given(batch=BATCHES, bound=st.sampled_from([1e-9, 0.01, 0.04, 0.3, 99.0]))
def test_m2po_masks_the_fewest_tokens_with_largest_second_moments(batch, bound):
    found = corrections.m2po(**off_policy(batch), bound=bound)
    cells = [(i, t) for i, t in batch.mask.nonzero().tolist()]
    moments = {c: float(batch.old[c] - batch.behavior[c]) ** 2 for c in cells}
    left = sorted(cells, key=lambda c: -moments[c])
    while len(left) > 1 and sum(moments[c] for c in left) / len(left) >= bound:
        left.pop(0)
    assert not found[~batch.mask].any()
    kept = sorted(moments[c] for c in cells if found[c])
    assert kept == pytest.approx(sorted(moments[c] for c in left), abs=1e-14)


def test_m2po_matches_hand_computed_masks():
    """Squares 1, 0.04, 0.01 and 0: the mean of all is 0.2625, of the last three 0.0167."""
    old = torch.tensor([[1.0, torch.nan, 0.2], [-0.1, 0.0, 5.0]], dtype=torch.float64)
    mask = torch.tensor([[1, 0, 1], [1, 1, 0]])
    given = {"old_logprobs": old, "behavior_logprobs": torch.zeros(2, 3).double(), "mask": mask}
    assert corrections.m2po(**given).tolist() == [[0, 0, 1], [1, 1, 0]]
    assert corrections.m2po(**given, bound=0.3).tolist() == mask.tolist()
    assert corrections.m2po(**given, bound=0.01).tolist() == [[0, 0, 0], [1, 1, 0]]
    assert corrections.m2po(**given | {"mask": 0 * mask}).sum() == 0


@quick
@given(batch=BATCHES, delta=st.sampled_from([0.0, 0.1]))
def test_opsm_masks_failed_trajectories_with_lower_probability(batch, delta):
    found = corrections.opsm(
        logprobs=batch.logprobs, old_logprobs=batch.behavior, advantages=batch.advantages, mask=batch.mask, delta=delta
    )

    def keep(i, t):
        gap = float(slow.log_gap(batch.behavior, batch.logprobs, batch.mask, i, mean=True))
        return float(not (float(batch.advantages[i, t]) < 0 and gap > delta))

    same(found, tokens(batch, keep))


def batch_of_tokens(batch, leaf):
    return TokenBatch(leaf, batch.old, batch.behavior, batch.advantages, batch.mask, ref_logprobs=batch.ref)


def gradient_of(value, leaf):
    (found,) = torch.autograd.grad(value, leaf, allow_unused=True)
    return torch.zeros_like(leaf) if found is None else found


@quick
@given(batch=BATCHES, loss=st.sampled_from(["ppo_clip", "gspo", "ppo_sequence"]))
def test_objective_drops_policy_loss_where_opsm_masks(batch, loss):
    algorithm = replace(PRESETS["grpo"], loss=loss, opsm_delta=0.05, kl_coef=0.0)
    counts = Normalizer.of(batch.mask)
    leaf = batch.logprobs.clone().requires_grad_()
    given = batch_of_tokens(batch, leaf)
    value = objective(given, algorithm, counts)[0]
    scores = batch.advantages
    if loss != "ppo_clip":
        scores = losses.trajectory_mean(scores, batch.mask)[:, None].expand(batch.mask.shape)
    keep = corrections.opsm(logprobs=leaf, old_logprobs=batch.behavior, advantages=scores, mask=batch.mask, delta=0.05)
    names = {"logprobs": leaf, "old_logprobs": batch.old, "advantages": batch.advantages}
    found = getattr(losses, loss)(**names, mask=batch.mask, eps_low=0.2, eps_high=0.28)
    if found.ndim == 1:
        expected = (found * keep.amax(1)).sum() / max(counts.trajectories, 1)
    else:
        expected = (found * keep).sum() / max(counts.tokens, 1)
    same(value.detach(), expected.detach())
    same(gradient_of(value, leaf), gradient_of(expected, leaf))


@quick
@given(batch=BATCHES, estimator=st.sampled_from(["k1", "k2", "k3", "abs"]))
def test_importance_weighted_kl_and_gradient_match_loop_reference(batch, estimator):
    def weigh(lp, i, t):
        value = oracle.kl_token(estimator, lp[i, t], batch.ref[i, t])
        return torch.exp(lp[i, t] - batch.old[i, t]) * value

    results = []
    for ours in (True, False):
        leaf = batch.logprobs.clone().requires_grad_()
        if ours:
            own, ref = (torch.where(batch.mask, x, 0.0) for x in (leaf, batch.ref))
            term = kl.KLS[estimator](logprobs=own, ref_logprobs=ref)
            term = kl.importance_weighted(kl=term, logprobs=leaf, old_logprobs=batch.old, mask=batch.mask)
        else:
            term = oracle.tokens(batch.mask, lambda i, t, lp=leaf: weigh(lp, i, t))
        results.append((term.detach(), gradient_of(term.sum() + 0 * leaf[batch.mask].sum(), leaf)))
    same(*results)


def test_importance_weighted_k3_has_the_gradient_of_reverse_kl():
    """Exactly, over a vocabulary of three: the expectation of the gradient over tokens of the old policy."""
    logits = torch.tensor([0.3, -0.2, 0.9], dtype=torch.float64, requires_grad=True)
    old = torch.log_softmax(torch.tensor([0.1, 0.4, -0.3], dtype=torch.float64), 0)
    ref = torch.log_softmax(torch.tensor([-0.5, 0.2, 0.6], dtype=torch.float64), 0)
    lp = torch.log_softmax(logits, 0)
    (exact,) = torch.autograd.grad((lp.exp() * (lp - ref)).sum(), logits, retain_graph=True)
    mask = torch.ones(1, 3)
    term = kl.k3(logprobs=lp, ref_logprobs=ref)[None]
    found = kl.importance_weighted(kl=term, logprobs=lp[None], old_logprobs=old[None], mask=mask)
    (weighted,) = torch.autograd.grad((old.exp() * found[0]).sum(), logits, retain_graph=True)
    same(weighted, exact)
    (plain,) = torch.autograd.grad((old.exp() * term[0]).sum(), logits)
    assert (plain - exact).abs().max() > 1e-2


def test_importance_in_the_settings_reaches_the_loss():
    batch = oracle.make_batch(torch.ones(2, 3, dtype=torch.bool), torch.zeros(2).long(), torch.ones(2), 1)
    given = batch_of_tokens(batch, batch.logprobs)
    counts = Normalizer.of(batch.mask)
    base = replace(PRESETS["grpo"], kl_coef=0.5)
    ratio = replace(base, options=PartOptions(kl={"importance": "ratio"}))
    gap = objective(given, ratio, counts)[0] - objective(given, base, counts)[0]
    term = kl.k3(logprobs=batch.logprobs, ref_logprobs=batch.ref)
    same(gap, 0.5 * (((batch.logprobs - batch.old).exp() - 1) * term).mean())


@quick
@given(batch=BATCHES)
def test_ppo_sequence_loss_and_gradient_match_loop_reference(batch):
    results = []
    for ours in (True, False):
        leaf = batch.logprobs.clone().requires_grad_()
        if ours:
            names = {"logprobs": leaf, "old_logprobs": batch.old, "advantages": batch.advantages}
            loss = losses.ppo_sequence(**names, mask=batch.mask, eps_low=0.2, eps_high=0.3)
        else:
            rows = []
            for i in range(len(batch.mask)):
                gap = slow.log_gap(leaf, batch.old, batch.mask, i, mean=False)
                ratio, score = torch.exp(gap), slow.advantage(batch, i)
                rows.append(-slow.least(ratio * score, oracle.clamp(ratio, 0.8, 1.3) * score))
            loss = torch.stack(rows)
        results.append((loss.detach(), gradient_of(loss.sum() + 0 * leaf[batch.mask].sum(), leaf)))
    same(*results)


@quick
@given(batch=BATCHES)
def test_luspo_is_gspo_times_the_length(batch):
    scores = torch.where(batch.mask, losses.trajectory_mean(batch.advantages, batch.mask)[:, None], 0.0)
    results = []
    for ours in (True, False):
        leaf = batch.logprobs.clone().requires_grad_()
        names = {"logprobs": leaf, "old_logprobs": batch.old, "advantages": scores, "mask": batch.mask}
        if ours:
            given = TokenBatch(leaf, batch.old, batch.behavior, scores, batch.mask)
            value = objective(given, PRESETS["luspo"], Normalizer.of(batch.mask))[0]
        else:
            lengths = batch.mask.sum(1)
            value = (losses.gspo(**names) * lengths).sum() / max(int((lengths > 0).sum()), 1)
        results.append((value.detach(), gradient_of(value + 0 * leaf[batch.mask].sum(), leaf)))
    same(*results)


@quick
@given(batch=BATCHES, ddof=st.sampled_from([0, 1]))
def test_grpo_with_batch_standard_deviation_matches_the_loop(batch, ddof):
    rewards = batch.rewards.tolist()
    mean = sum(rewards) / len(rewards)
    std = math.sqrt(sum((r - mean) ** 2 for r in rewards) / max(len(rewards) - ddof, 1))
    centred = oracle.advantage_scores("dr_grpo", batch)
    found = advantages.grpo(
        rewards=batch.rewards, group=batch.group, mask=batch.mask, ddof=ddof, eps=1e-4, std_over="batch"
    )
    same(found, oracle.per_token([a / (std + 1e-4) for a in centred], batch.mask))


@quick
@given(batch=BATCHES, counted=st.sampled_from(["varying", "nonzero"]))
def test_gpg_scales_by_the_rows_counted_as_informative(batch, counted):
    groups, rewards = oracle.groups(batch), batch.rewards.tolist()
    if counted == "nonzero":
        rows = sum(r != 0 for r in rewards)
    else:
        rows = sum(len(own) for own in groups.values() if len({round(rewards[i], 9) for i in own}) > 1)
    factor = len(rewards) / max(rows, 1)
    centred = oracle.advantage_scores("dr_grpo", batch)
    found = advantages.gpg(rewards=batch.rewards, group=batch.group, mask=batch.mask, counted=counted)
    same(found, oracle.per_token([factor * a for a in centred], batch.mask))


def baseline_loop(batch, squares, weights, zero_tail):
    """The advantages of `optimal_token_baseline`, one token after the other."""
    found = torch.zeros(batch.mask.shape, dtype=torch.float64)
    where = [slow.actions(batch.mask, i) for i in range(len(batch.mask))]

    def energy(i, n):
        columns = where[i][: n + 1]
        terms = [1 - 2 * math.exp(float(batch.old[i, t])) + float(squares[i, t]) for t in columns]
        return sum(x * float(weights[i, t]) ** 2 for x, t in zip(terms, columns, strict=True))

    for own in oracle.groups(batch).values():
        second = sorted(len(where[i]) for i in own)[-2]
        for i in own:
            for n, t in enumerate(where[i]):
                others = [j for j in own if n < len(where[j])]
                total = sum(energy(j, n) for j in others)
                base = sum(energy(j, n) * float(batch.rewards[j]) for j in others) / total
                if zero_tail and n >= second:
                    base = 0.0
                found[i, t] = float(batch.rewards[i]) - base
    return found


@quick
@given(batch=BATCHES, zero_tail=st.booleans(), weighted=st.booleans())
def test_the_optimal_token_baseline_equals_the_loop(batch, zero_tail, weighted):
    generator = torch.Generator().manual_seed(7)
    old = -0.1 - 2 * torch.rand(batch.mask.shape, generator=generator, dtype=torch.float64)
    squares = old.exp() ** 2 + 0.3 * torch.rand(batch.mask.shape, generator=generator, dtype=torch.float64)
    weights = torch.ones_like(old)
    if weighted:
        weights = 0.5 + torch.rand(batch.mask.shape, generator=generator, dtype=torch.float64)
    batch = replace(batch, old=old)
    found = advantages.optimal_token_baseline(
        rewards=batch.rewards,
        group=batch.group,
        mask=batch.mask,
        old_logprobs=old,
        sum_pi_squared=squares,
        weights=weights if weighted else None,
        zero_tail=zero_tail,
    )
    expected = baseline_loop(batch, squares, weights, zero_tail)
    torch.testing.assert_close(found, expected, atol=1e-9, rtol=1e-9)


def test_optimal_token_baseline_matches_hand_computed_values():
    """Rewards 1 and 0, equal weights; the second row is longer by a token, and has a turn reward."""
    given = {
        "rewards": torch.tensor([1.0, 0.0], dtype=torch.float64),
        "group": torch.tensor([0, 0]),
        "mask": torch.tensor([[1, 0, 1, 0], [1, 1, 0, 1]]),
    }
    plain = advantages.optimal_token_baseline(**given)
    assert plain.tolist() == [[0.5, 0, 0.5, 0], [-0.5, -0.5, 0, 0]]
    turns = {
        "turn": torch.tensor([[0, 0, 1, 0], [0, 0, 0, 1]]),
        "turn_rewards": torch.tensor([[0.0, 0.0], [0.0, 4.0]], dtype=torch.float64),
    }
    tail = advantages.optimal_token_baseline(**given, **turns)
    assert tail.tolist() == [[-1.5, 0, -1.5, 0], [1.5, 1.5, 0, 4.0]]
    whole = advantages.optimal_token_baseline(**given, **turns, zero_tail=False)
    assert whole.tolist() == [[-1.5, 0, -1.5, 0], [1.5, 1.5, 0, 0.0]]
    certain = {"old_logprobs": torch.zeros(2, 4), "sum_pi_squared": torch.ones(2, 4)}
    assert advantages.optimal_token_baseline(**given, **certain).tolist() == [[1, 0, 1, 0], [0, 0, 0, 0]]


REFUSED = [
    ({"preset": "gpg", "filter_zero_variance": True}, "gpg scales"),
    ({"kl": "full_reverse", "kl_coef": 0.1, "options": {"kl": {"importance": "ratio"}}}, "whole distrib"),
    ({"kl_placement": "reward", "kl_coef": 0.1, "options": {"kl": {"importance": "ratio"}}}, "acts in the"),
    ({"options": {"kl": {"importance": "ratio"}}}, "would have no effect"),
    ({"correction": "tis", "options": {"correction": {"low": 3.0}}}, "at most algorithm.tis_cap, which is 2"),
    ({"correction": "m2po", "options": {"correction": {"bound": 0}}}, "must be above 0"),
    ({"correction": "reject_sequence", "options": {"correction": {"by": "turn"}}}, "is not known"),
    (
        {"correction": "reject_sequence", "options": {"correction": {"measure": "k3", "low": 0.1}}},
        "with measure k3 only high has an effect",
    ),
    ({"preset": "distill", "opsm_delta": 0.1}, "reads a teacher"),
    ({"loss": "ppo_sequence", "correction": "tis"}, "one term per trajectory"),
    ({"loss": "ppo_sequence", "dual_clip": 3.0}, "no second clip"),
]


@pytest.mark.parametrize(("changes", "said"), REFUSED)
def test_incompatible_or_ineffective_settings_raise_config_error(changes, said):
    with pytest.raises(ConfigError, match=said):
        resolve(AlgorithmConfig(**changes))


def test_compatible_setting_combinations_are_accepted():
    for taken in (
        {"preset": "dppo", "correction": "m2po", "opsm_delta": 1e-4},
        {"preset": "gspo", "correction": "reject_sequence", "options": {"correction": {"by": "token"}}},
        {"correction": "reject_sequence", "options": {"correction": {"measure": "k3", "high": 0.01}}},
        {"preset": "rloo_ppo", "correction": "tis", "options": {"correction": {"level": "sequence"}}},
        {"kl_coef": 0.1, "options": {"kl": {"importance": "ratio"}, "advantage": {"std_over": "batch"}}},
    ):
        resolve(AlgorithmConfig(**taken))


def test_cispo_on_behavior_logprobs_equals_verl_bypass_mode():
    """verl's bypass mode: `-min(exp(lp - beh), c) A lp`, the weight without gradient."""
    lp, beh = torch.randn(2, 2, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    scores, mask = torch.tensor([[1.0], [-2.0]]).double().expand(2, 3), torch.ones(2, 3)
    found = losses.cispo(logprobs=lp, old_logprobs=beh, advantages=scores, mask=mask, eps_low=1.0, eps_high=1.0)
    same(found, -(lp - beh).exp().clamp(max=2.0) * scores * lp)
    assert aggregate(loss=found, mask=mask).isfinite()
