"""Advantages by hand-computed values: invariances, equalities, masks and rounding."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import algorithms_oracle_advantages as oracle
from algorithm_parts import FUNCTIONS
from algorithms_oracle import TOLERANCE
from ludus.algorithms import advantages as adv

quick = settings(max_examples=12, deadline=None, derandomize=True)


def float64(*values):
    return torch.tensor(values, dtype=torch.float64)


def same(actual, expected):
    torch.testing.assert_close(actual, expected, **TOLERANCE)


def critic(b):
    return {"values": b.values, "bootstrap_values": b.bootstrap, "mask": b.mask}


GROUP = torch.tensor([5, 5, 5, 5])
EACH = torch.ones(4, 1)

# Two turns of two tokens and one, an observation before and between; the second row stops after one turn.
MASK = torch.tensor([[0, 1, 1, 0, 1], [0, 1, 0, 0, 0]])
TURN = torch.tensor([[9, 0, 0, 9, 1], [9, 0, 9, 9, 9]])
VALUES = float64([7, 1, 2, 7, 3], [7, 4, 7, 7, 7])


def test_gae_matches_hand_computed_values():
    found = adv.gae(
        rewards=float64(10, 20), values=VALUES, mask=MASK, bootstrap_values=float64(0, 8), gamma=0.5, lam=0.5
    )
    # Row 0, from the end: 10 - 3; 0.5 * 3 - 2 + 0.25 * 7; 0.5 * 2 - 1 + 0.25 * 1.25. Row 1: 20 + 4 - 4.
    same(found, float64([0, 0.3125, 1.25, 0, 7], [0, 20, 0, 0, 0]))
    same(
        adv.value_targets(advantages=found, values=VALUES, mask=MASK),
        float64([0, 1.3125, 3.25, 0, 10], [0, 24, 0, 0, 0]),
    )


def test_token_rewards_places_rewards_at_turn_ends_and_kl_per_token():
    found = adv.token_rewards(
        rewards=float64(10, 20),
        turn_rewards=float64([1, 2], [3, torch.nan]),
        turn=TURN,
        mask=MASK,
        kl=float64([torch.nan, 1, 2, torch.inf, 3], [0, 4, 0, 0, 0]),
        kl_coef=0.5,
    )
    same(found, float64([0, -0.5, 0, 0, 10.5], [0, 21, 0, 0, 0]))


def test_step_and_turn_gae_match_hand_computed_values():
    arguments = {
        "rewards": float64(10, 20),
        "turn_rewards": float64([1, 0], [0, 0]),
        "turn": TURN,
        "values": VALUES,
        "mask": MASK,
    }
    # Turn 1: 10 - 3 = 7. Turn 0: 1 + 0.5 * 3 - 1 + 0.25 * 7 = 3.25. Row 1: 20 - 4.
    found = adv.step_gae(**arguments, gamma=0.5, lam=0.5)
    same(found, float64([0, 3.25, 3.25, 0, 7], [0, 16, 0, 0, 0]))
    # The first token of turn 0: 0.1 * 2 - 1 + 0.1 * 0.2 * 3.25.
    found = adv.turn_gae(**arguments, gamma_turn=0.5, lam_turn=0.5, gamma_token=0.1, lam_token=0.2)
    same(found, float64([0, -0.735, 3.25, 0, 7], [0, 16, 0, 0, 0]))


def test_vapo_clamps_short_rows_and_adapts_long_ones():
    mask, values = torch.ones(2, 40), torch.zeros(2, 40, dtype=torch.float64)
    mask[0, 10:] = 0
    found = adv.vapo(rewards=float64(1, 1), values=values, mask=mask)
    assert found[0, 9] == 1
    assert (found[0, :9] == 0).all()
    same(found[1], 0.5 ** torch.arange(39, -1, -1).double())


def test_turn_grpo_matches_hand_computed_values():
    mask = torch.tensor([[1, 1, 0, 1], [1, 0, 1, 0], [1, 0, 0, 0]])
    turn = torch.tensor([[0, 0, 5, 1], [0, 5, 1, 5], [0, 5, 5, 5]])
    found = adv.turn_grpo(
        rewards=float64(1, 0, 0),
        turn_rewards=float64([3, 0], [1, 0], [2, 0]),
        turn=turn,
        group=torch.tensor([1, 1, 1]),
        mask=mask,
        turn_weight=2.0,
        eps=0.0,
    )
    high, low = 2 / 3 * 3**0.5, -1 / 3 * 3**0.5
    same(found, float64([2 + high, 2 + high, 0, high], [-2 + low, 0, low, 0], [low, 0, 0, 0]))


def test_turn_return_and_hybrid_match_hand_computed_values():
    mask, turn = torch.ones(2, 2), torch.tensor([[0, 1], [0, 0]])
    arguments = {"turn_rewards": float64([1, 4], [1, 9]), "turn": turn, "group": GROUP[:2], "mask": mask}
    # Turn 0: 1 + 0.5 * 4 against 1. Turn 1 was reached by one alone.
    half = 2 / 8**0.5
    same(adv.turn_return(**arguments, gamma=0.5, eps=0.0)[0], float64(0.5**0.5, 0))
    # Turn 0: 3 + 0.25 * 0 against 1 + 0.5 * 4: equal, so that the outcome's 0.3 is all there is.
    found = adv.turn_return_hybrid(**arguments, rewards=float64(0, 4), gamma=0.5, eps=0.0)
    same(found, 0.3 * half * float64([-1, -1], [1, 1]))


def test_gigpo_matches_hand_computed_values():
    mask = torch.ones(2, 2)
    arguments = {
        "rewards": float64(1, 0),
        "turn": torch.tensor([[0, 1], [0, 1]]),
        "group": GROUP[:2],
        "mask": mask,
        "gamma": 0.5,
        "scale": "none",
    }
    # Returns 0.5, 1 and 0, 0. All start in state 1; then 1 again, and 2, where nobody else was.
    found = adv.gigpo(**arguments, anchors=torch.tensor([[1, 1], [1, 2]]), weight=2.0)
    same(found, float64([0.5 + 2 * 0, 0.5 + 2 * 0.5], [-0.5 + 2 * -0.5, -0.5]))
    apart = adv.gigpo(**arguments | {"group": torch.tensor([0, 0])}, anchors=torch.tensor([[1, 2], [3, 4]]))
    same(apart, float64([0.5, 0.5], [-0.5, -0.5]))


def test_equal_anchors_of_two_groups_are_not_compared():
    found = adv.gigpo(
        rewards=float64(1, 1, 0, 0),
        turn=torch.zeros(4, 1).long(),
        group=torch.tensor([0, 0, 1, 1]),
        mask=EACH,
        anchors=torch.ones(4, 1).long(),
    )
    assert (found == 0).all()


def test_trajectory_level_advantages_match_hand_computed_values():
    ones = {"rewards": float64(1, 0, 0, 0), "group": GROUP, "mask": EACH}
    same(adv.maxrl(**ones), float64([3], [-1], [-1], [-1]))
    same(adv.remax(**ones, greedy_rewards=float64(1, 0, 0.5, -1)), float64([0], [0], [-0.5], [1]))
    same(adv.best_of_group(**ones | {"rewards": float64(3, 7, 5, 5)}), float64([0], [2], [0], [0]))
    assert (adv.best_of_group(**ones | {"rewards": float64(7, 7, 5, 5)}) == 0).all()
    # k = 2: three pairs of six hold the success: R = 1/2, s = 1/2; a failure: (1/2 - 2/3) / (1/2).
    same(adv.pass_at_k(**ones, k=2), float64([1], [-1 / 3], [-1 / 3], [-1 / 3]))
    same(adv.pass_at_k(**ones, k=1), adv.grpo(**ones, ddof=0, eps=0.0))
    weighted = adv.coderl(
        rewards=float64(1, 0),
        greedy_rewards=float64(0.5, 1),
        outcome_probs=float64([0.2, 1], [0.4, torch.nan]),
        mask=torch.tensor([[1, 1], [1, 0]]),
    )
    same(weighted, float64([0.1, 0.5], [-0.4, 0]))


def test_prime_matches_hand_computed_values():
    found = adv.prime(
        rewards=float64(1, 0),
        group=GROUP[:2],
        prm_logprobs=float64([-1, -2, -9], [-3, -9, -9]),
        ref_logprobs=float64([-2, -4, -9], [-7, -9, -9]),
        mask=torch.tensor([[1, 1, 0], [1, 0, 0]]),
        beta=0.5,
        gamma=0.5,
    )
    # q: 0.5, 1 and 2; baselines 2 and 0.75; rloo 1 and -1.
    same(found, float64([-1.5 + 0.5 * -1 + 1, -1 + 1, 0], [1.25 - 1, 0, 0]))


def test_vtrace_and_retrace_match_hand_computed_values():
    arguments = {
        "rewards": float64(1),
        "values": float64([0.5, 0.25]),
        "old_logprobs": float64([0.5, 2.0]).log(),
        "behavior_logprobs": float64([1.0, 1.0]).log(),
        "mask": torch.ones(1, 2),
    }
    # w = 0.5, 2. delta_1 = 0.75, v_1 = 1; delta_0 = 0.5 * -0.25, v_0 = 0.5 - 0.125 + 0.5 * 0.75.
    same(adv.vtrace(**arguments), float64([0.5 * (1 - 0.5), 0.75]))
    same(adv.vtrace_targets(**arguments), float64([0.75, 1]))
    same(adv.retrace(**arguments), float64([-0.25 + 0.75, 0.75]))


def test_hierarchical_compares_solvers_in_a_task_and_proposers_across():
    rewards = float64(1, 0, 0.2, 1, 1, 0.6)
    group = torch.tensor([3, 3, 3, 8, 8, 8])
    proposer = torch.tensor([False, False, True, False, False, True])
    found = adv.hierarchical(rewards=rewards, group=group, proposer=proposer, mask=torch.ones(6, 1))
    half = 0.5**0.5
    expected = float64(half, -half, -half, 0, 0, half)
    torch.testing.assert_close(found[:, 0], expected, rtol=0, atol=1e-5)
    ids = adv.role_groups(group=group, proposer=proposer)
    same(adv.grpo(rewards=rewards, group=ids, mask=torch.ones(6, 1)), found)
    apart = torch.tensor([0, 0, 1, 0, 0, 2])
    with pytest.raises(ValueError, match="row 2 is alone"):
        adv.hierarchical(rewards=rewards, group=group, proposer=proposer, mask=torch.ones(6, 1), proposer_group=apart)


def test_pass_at_k_and_coderl_reject_out_of_range_inputs():
    with pytest.raises(ValueError, match=r"rewards\[1\] is 0.5; pass_at_k needs 0 or 1"):
        adv.pass_at_k(rewards=float64(1, 0.5, 0, 0), group=GROUP, mask=EACH, k=2)
    for k in (0, 5):
        with pytest.raises(ValueError, match=r"k must be in \[1, 4\]"):
            adv.pass_at_k(rewards=float64(1, 0, 0, 0), group=GROUP, mask=EACH, k=k)
    with pytest.raises(ValueError, match="row 0 has"):
        adv.coderl(rewards=float64(1), greedy_rewards=float64(0), outcome_probs=float64([1.5]), mask=torch.ones(1, 1))


@quick
@given(b=oracle.turn_batches(), how=st.sampled_from(["rewards", "turns", "both"]))
def test_gae_with_gamma_and_lambda_one_is_return_minus_value(b, how):
    rewards = adv.token_rewards(**oracle.given(b, how))
    ahead = rewards.flip(1).cumsum(1).flip(1) + b.bootstrap[:, None]
    expected = torch.where(b.mask, ahead - b.values, 0.0)
    same(adv.gae(**oracle.given(b, how) | critic(b)), expected)


@quick
@given(b=oracle.turn_batches(), gamma=st.sampled_from([1.0, 0.9]), lam=st.sampled_from([1.0, 0.7]))
def test_on_policy_the_corrections_are_gae(b, gamma, lam):
    arguments = critic(b) | {"rewards": b.rewards, "old_logprobs": b.old, "behavior_logprobs": b.old, "gamma": gamma}
    plain = critic(b) | {"rewards": b.rewards, "gamma": gamma}
    same(adv.retrace(**arguments, lam=lam), adv.gae(**plain, lam=lam))
    same(adv.vtrace(**arguments), adv.gae(**plain))
    targets = adv.value_targets(advantages=adv.gae(**plain), values=b.values, mask=b.mask)
    same(adv.vtrace_targets(**arguments), targets)


@quick
@given(b=oracle.turn_batches())
def test_three_gae_variants_are_equal_for_turns_of_one_token(b):
    """Where each turn is a token, a turn is a step; in one turn the reward is the last token's."""
    each = torch.where(b.mask, b.mask.cumsum(1) - 1, -3)
    numbers = critic(b) | {"rewards": b.rewards}
    token = adv.gae(**numbers, gamma=0.9, lam=0.8)
    same(adv.step_gae(**numbers, turn=each, gamma=0.9, lam=0.8), token)
    same(adv.turn_gae(**numbers, turn=each, gamma_turn=0.9, lam_turn=0.8, gamma_token=0.1, lam_token=0.2), token)


@quick
@given(b=oracle.turn_batches([0.3, 0.1 + 0.2, 0.3]))
def test_equal_rewards_give_exactly_zero(b):
    flat = torch.full_like(b.turn_rewards, 0.7)
    ids = {"rewards": b.rewards, "group": b.group, "mask": b.mask}
    assert (adv.maxrl(**ids) == 0).all()
    assert (adv.best_of_group(**ids) == 0).all()
    assert (adv.reinforce_pp(rewards=b.rewards, mask=b.mask) == 0).all()
    assert (adv.turn_grpo(**ids, turn_rewards=flat, turn=b.turn) == 0).all()
    same_turns = torch.zeros_like(b.turn)
    assert (adv.turn_return(**ids, turn_rewards=flat, turn=same_turns) == 0).all()
    assert (adv.turn_return_hybrid(**ids, turn_rewards=flat, turn=same_turns) == 0).all()
    assert (adv.gigpo(**ids, turn=same_turns, anchors=torch.zeros_like(flat).long()) == 0).all()


def test_mean_within_rounding_of_zero_is_not_a_divisor():
    rewards = float64(0.1, 0.2, -0.3, 0.0)
    assert 0 < float(rewards.sum()) < 1e-16
    assert (adv.maxrl(rewards=rewards, group=GROUP, mask=EACH) == 0).all()


def test_rounding_differences_in_returns_yield_zero_advantage():
    """The same rewards summed in another order differ by rounding; normalised, that would be about 1."""
    rewards = float64([0.1, 0.2, 0.3], [0.3, 0.2, 0.1])
    turn = torch.tensor([[0, 1, 2], [0, 1, 2]])
    found = adv.turn_return(turn_rewards=rewards, turn=turn, group=GROUP[:2], mask=torch.ones(2, 3))
    assert rewards.flip(1).cumsum(1)[0, 2] != rewards.flip(1).cumsum(1)[1, 2]
    assert (found[:, 0] == 0).all()
    assert (found[:, 1] != 0).all()


@pytest.mark.parametrize("name", ["reinforce_pp", "gae", "step_gae", "turn_gae", "vtrace", "retrace", "turn_return"])
def test_advantages_skip_observation_tokens(name):
    """The reward of the end reaches the turns before the first observation whole, with `gamma` 1."""
    mask, turn = torch.tensor([[1, 0, 0, 1, 0, 1]] * 2), torch.tensor([[0, 0, 0, 1, 1, 2]] * 2)
    zero = torch.zeros(mask.shape, dtype=torch.float64)
    more = {} if name in ("reinforce_pp", "turn_return") else {"values": zero}
    more |= {"old_logprobs": zero, "behavior_logprobs": zero} if name in ("vtrace", "retrace") else {}
    more |= {"turn": turn} if "turn" in name or name == "step_gae" else {}
    found = FUNCTIONS[name](rewards=float64(1, 0), group=GROUP[:2], mask=mask, **more)
    assert (found[0, mask[0].bool()] == found[0, 5]).all()
    assert found[0, 0] > found[1, 0]


@quick
@given(b=oracle.turn_batches(), gap=st.integers(1, 3))
def test_longer_observations_do_not_change_advantages(b, gap):
    """Neither a discount nor a step: `gap` more columns before every token leave the numbers as they are."""

    def stretched(tensor, fill):
        wide = torch.full((len(tensor), tensor.shape[1] * (gap + 1)), fill, dtype=tensor.dtype)
        wide[:, gap :: gap + 1] = tensor
        return wide

    wide = replace(
        b,
        mask=stretched(b.mask, False),
        turn=stretched(b.turn, 77),
        values=stretched(b.values, torch.nan),
        old=stretched(b.old, torch.nan),
        behavior=stretched(b.behavior, torch.nan),
    )
    for function in (adv.gae, adv.step_gae, adv.retrace, adv.vtrace, adv.vapo):
        found = []
        for batch in (b, wide):
            more = {"turn": batch.turn} if function is adv.step_gae else {}
            if function in (adv.retrace, adv.vtrace):
                more = {"old_logprobs": batch.old, "behavior_logprobs": batch.behavior}
            found.append(function(**critic(batch), rewards=batch.rewards, gamma=0.9, **more))
        same(found[1][:, gap :: gap + 1], found[0])


def test_finished_episode_does_not_bootstrap():
    zero, mask = torch.zeros(2, 3, dtype=torch.float64), torch.ones(2, 3)
    found = adv.gae(rewards=float64(1, 1), values=zero, mask=mask, bootstrap_values=float64(0, 4), gamma=0.5)
    same(found, float64([0.25, 0.5, 1], [0.75, 1.5, 3]))
    same(adv.gae(rewards=float64(1, 1), values=zero, mask=mask, gamma=0.5)[1], found[0])


def test_standard_deviation_floor_bounds_advantages_of_near_equal_rewards():
    ones = {"rewards": float64(0, 0, 0, 0.01), "group": GROUP, "mask": EACH}
    assert adv.grpo(**ones)[3] > 1.4
    assert adv.grpo(**ones, std_floor=0.1)[3] == pytest.approx(0.075, abs=1e-5)


def test_rae_matches_hand_computed_values():
    roles = [("go", "black"), ("go", "white"), ("go", "black")]
    start = adv.RoleBaselines(decay=0.5)
    found = adv.rae(rewards=float64(1, -1, 1), roles=roles, baselines=start, mask=torch.ones(3, 1))
    same(found, float64([1], [-1], [0.5]))
    after = start.updated(roles, float64(1, -1, 1))
    assert after.means == {("go", "black"): 0.75, ("go", "white"): -0.5}
    again = adv.rae(
        rewards=float64(1), roles=roles[:1], baselines=adv.RoleBaselines.from_json(after.to_json()), mask=EACH[:1]
    )
    same(again, float64([0.25]))
    with pytest.raises(ValueError, match="roles and rewards must be"):
        adv.rae(rewards=float64(1, 2), roles=roles, baselines=start, mask=EACH[:2])


@quick
@given(
    steps=st.lists(
        st.lists(st.tuples(st.sampled_from(["math", "code"]), st.floats(-50, 50)), min_size=1, max_size=6),
        min_size=1,
        max_size=4,
    )
)
def test_domain_moments_match_mean_and_variance_of_all_values(steps):
    moments = adv.DomainMoments()
    for step in steps:
        moments = moments.updated([name for name, _ in step], float64(*(value for _, value in step)))
    entered = [pair for step in steps for pair in step]
    for domain, own in moments.moments.items():
        values = float64(*(value for name, value in entered if name == domain))
        assert own.count == len(values)
        assert own.mean == pytest.approx(float(values.mean()), rel=1e-10, abs=1e-10)
        if len(values) > 1:
            assert own.variance == pytest.approx(float(values.var()), rel=1e-9, abs=1e-9)
    assert adv.DomainMoments.from_json(moments.to_json()) == moments


def test_domain_normalisation_yields_equal_scales():
    domains = ["math", "math", "code", "code", "one"]
    rewards = float64(0, 2, 100, 300, 7)
    moments = adv.DomainMoments().updated(domains, rewards)
    half = 0.5**0.5
    found = adv.domain_normalised(rewards=rewards, domains=domains, moments=moments)
    torch.testing.assert_close(found, float64(-half, half, -half, half, 0), rtol=0, atol=1e-7)
    untouched = adv.domain_normalised(rewards=rewards[4:], domains=["new"], moments=moments)
    assert untouched.tolist() == [7.0]
    with pytest.raises(ValueError, match=r"rewards\[1\] is nan"):
        moments.updated(["math", "math"], float64(0, torch.nan))


def test_rewards_that_differ_by_rounding_are_equal_in_a_domain():
    rewards = torch.tensor([0.1 + 0.2, 0.3, 0.3, 0.1 + 0.2], dtype=torch.float64)
    moments = adv.DomainMoments().updated(["a"] * 4, rewards)
    found = adv.domain_normalised(rewards=rewards, domains=["a"] * 4, moments=moments)
    assert found.tolist() == [0.0] * 4
    single = rewards.float() + torch.tensor([0.0, 6e-8, 0.0, 6e-8])
    moments = adv.DomainMoments().updated(["a"] * 4, single)
    assert not adv.domain_normalised(rewards=single, domains=["a"] * 4, moments=moments).any()


def test_domain_normalisation_leaves_grpo_unchanged_and_equalises_rloo():
    domains, rewards = ["math"] * 2 + ["code"] * 2, float64(0, 2, 100, 300)
    moments = adv.DomainMoments().updated(domains, rewards)
    scaled = adv.domain_normalised(rewards=rewards, domains=domains, moments=moments)
    ids = {"group": torch.tensor([0, 0, 1, 1]), "mask": EACH}
    torch.testing.assert_close(adv.grpo(**ids, rewards=scaled), adv.grpo(**ids, rewards=rewards), rtol=1e-5, atol=1e-5)
    sizes = adv.rloo(**ids, rewards=scaled).abs()
    assert float(sizes.max() - sizes.min()) < 1e-6


def test_calibrate_tiers_computes_reward_from_correlation_with_success():
    # Tier 0 in every success alone; 1 everywhere; 2 in every failure; 3 in one of each; 4 nowhere.
    tiers = torch.tensor([[0, 1, 1], [0, 1, 3], [2, 1, -1], [1, 2, 3]])
    found = adv.calibrate_tiers(tiers=tiers, success=torch.tensor([1, 1, 0, 0]), num_tiers=5, alpha=0.5)
    same(found.correlation, float64(1, 0, -1, 0, 0))
    same(found.reward, float64(0.5, 0, -0.5, 0, 0))
    same(found.in_success, float64(1, 1, 0, 0.5, 0))
    same(found.in_failure, float64(0, 1, 1, 0.5, 0))


@quick
@given(data=st.lists(st.tuples(st.sets(st.integers(0, 2), max_size=3), st.booleans()), min_size=2, max_size=9))
def test_tier_correlation_is_the_point_biserial_coefficient(data):
    tiers = torch.tensor([[*sorted(own), *[-1] * (3 - len(own))] for own, _ in data])
    won = float64(*(float(w) for _, w in data))
    found = adv.calibrate_tiers(tiers=tiers, success=won, num_tiers=3, threshold=0.3)
    for tier in range(3):
        has = [tier in own for own, _ in data]
        expected = 0.0
        if len(set(has)) > 1 and len(set(won.tolist())) > 1:
            share = sum(has) / len(has)
            inside = [w for h, w in zip(has, won.tolist(), strict=True) if h]
            outside = [w for h, w in zip(has, won.tolist(), strict=True) if not h]
            gap = sum(inside) / len(inside) - sum(outside) / len(outside)
            expected = gap / float(won.std(correction=0)) * (share * (1 - share)) ** 0.5
        assert float(found.correlation[tier]) == pytest.approx(expected, abs=1e-10)
        assert float(found.reward[tier]) == pytest.approx(expected if abs(expected) > 0.3 else 0, abs=1e-10)


def test_tier_advantage_reveals_a_misaligned_reward():
    """A read-only call with a small positive reward, in a trajectory that fails, is pushed down."""
    ids = {"turn": torch.tensor([[0, 0, 1], [0, 1, 1]]), "mask": torch.ones(2, 3)}
    tiers = torch.tensor([[0, 1], [0, -1]])
    found = adv.tier_advantages(advantages=float64([2, 2, 4], [-3, 9, 9]), tiers=tiers, num_tiers=3, **ids)
    same(found, float64(-0.5, 4, 0))
    with pytest.raises(ValueError, match="row 0 has a tier index above 0"):
        adv.tier_advantages(advantages=float64([2, 2, 4], [1, 1, 1]), tiers=tiers, num_tiers=1, **ids)
    with pytest.raises(ValueError, match=r"success\[1\] is 0.5"):
        adv.calibrate_tiers(tiers=tiers, success=float64(1, 0.5), num_tiers=3)
