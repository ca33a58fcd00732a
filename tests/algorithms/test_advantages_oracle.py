"""Every advantage against a slow reference on random ragged batches, and properties of all advantages."""

from dataclasses import fields, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import algorithms_oracle_advantages as oracle
from algorithm_parts import ADVANTAGE_OPTIONS, ADVANTAGES, FUNCTIONS
from algorithms_oracle import TOLERANCE
from ludus.algorithms import advantages as adv
from ludus.algorithms.advantages.running_baselines import RoleBaselines
from ludus.algorithms.algorithm import PartOptions, parameters_of
from ludus.algorithms.spec.resolve import PRESETS
from ludus.algorithms.tensors import Outcomes

quick = settings(max_examples=15, deadline=None, derandomize=True)
HOWS = st.sampled_from(["rewards", "turns", "both"])
RATES = st.sampled_from([1.0, 0.9, 0.0])
CHANCES = torch.rand(4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
ROLES = [("chess", "white"), ("chess", "black"), ("go", "white")]


def role_list(b):
    return [ROLES[i % 3] for i in range(len(b.mask))]


def critic(b):
    return {"values": b.values, "bootstrap_values": b.bootstrap}


def sampled(b):
    return {"old_logprobs": b.old, "behavior_logprobs": b.behavior}


PLAIN = [
    *("grpo", "dr_grpo", "gpg", "rloo", "opo", "raw", "reinforce_pp_baseline"),
    *("reinforce_pp", "maxrl", "best_of_group"),
]
CALLS = {name: lambda b: {} for name in PLAIN} | {
    "optimal_token_baseline": lambda b: {"old_logprobs": -b.old.abs(), "sum_pi_squared": b.probs},
    "remax": lambda b: {"greedy_rewards": b.greedy},
    "gae": critic,
    "vapo": critic,
    "step_gae": lambda b: critic(b) | {"turn": b.turn},
    "turn_gae": lambda b: critic(b) | {"turn": b.turn},
    "turn_grpo": lambda b: {"turn": b.turn, "turn_rewards": b.turn_rewards},
    "turn_return": lambda b: {"turn": b.turn, "turn_rewards": b.turn_rewards},
    "turn_return_hybrid": lambda b: {"turn": b.turn, "turn_rewards": b.turn_rewards},
    "gigpo": lambda b: {"turn": b.turn, "turn_rewards": b.turn_rewards, "anchors": b.anchors},
    "siblings": lambda b: {"turn": b.turn, "nodes": oracle.nodes_of(b)},
    "rae": lambda b: {"roles": role_list(b), "baselines": adv.RoleBaselines()},
    "hierarchical": lambda b: {"proposer": torch.isin(b.group, b.group[:1])},
    "pass_at_k": lambda b: {"k": 2},
    "prime": lambda b: {"prm_logprobs": b.old, "ref_logprobs": b.behavior},
    "coderl": lambda b: {"greedy_rewards": b.greedy, "outcome_probs": b.probs},
    "vtrace": lambda b: critic(b) | sampled(b),
    "retrace": lambda b: critic(b) | sampled(b),
}


def call(name, b, **changes):
    """The function with everything it can take from the batch."""
    rewards = (b.rewards > 0.2).double() if name == "pass_at_k" else b.rewards
    arguments = {"rewards": rewards, "group": b.group, "mask": b.mask} | CALLS[name](b)
    return FUNCTIONS[name](**(arguments | changes))


def same(actual, expected):
    torch.testing.assert_close(actual, expected, **TOLERANCE)


def test_every_advantage_function_is_called_by_these_tests():
    assert set(CALLS) == set(FUNCTIONS)


@quick
@given(b=oracle.turn_batches(), how=HOWS, gamma=RATES, lam=RATES, kl_coef=st.sampled_from([0.0, 0.3]))
def test_gae_equals_the_loop(b, how, gamma, lam, kl_coef):
    arguments = oracle.given(b, how, kl_coef)
    found = adv.gae(**arguments, **critic(b), gamma=gamma, lam=lam)
    same(found, oracle.gae(b, how, kl_coef, gamma, [lam] * len(b.mask)))
    targets = adv.value_targets(advantages=found, values=b.values, mask=b.mask)
    same(targets, found + torch.where(b.mask, b.values, 0.0))


@quick
@given(b=oracle.turn_batches(), how=HOWS, gamma=RATES, alpha=st.sampled_from([0.05, 0.4]))
def test_vapo_equals_the_loop(b, how, gamma, alpha):
    found = adv.vapo(**oracle.given(b, how), **critic(b), gamma=gamma, alpha=alpha)
    same(found, oracle.gae(b, how, 0.0, gamma, oracle.vapo_lam(b, alpha)))


@quick
@given(b=oracle.turn_batches(), how=HOWS, gamma=RATES, ddof=st.sampled_from([0, 1]), kl=st.booleans())
def test_reinforce_pp_equals_the_loop(b, how, gamma, ddof, kl):
    found = adv.reinforce_pp(**oracle.given(b, how, 0.3 * kl), gamma=gamma, ddof=ddof)
    same(found, oracle.reinforce_pp(b, how, 0.3 * kl, gamma, ddof))


@quick
@given(b=oracle.turn_batches(), how=HOWS, gamma=RATES, lam=RATES, kl=st.booleans())
def test_step_gae_equals_the_loop(b, how, gamma, lam, kl):
    arguments = oracle.given(b, how, 0.3 * kl) | {"turn": b.turn}
    found = adv.step_gae(**arguments, **critic(b), gamma=gamma, lam=lam)
    expected = oracle.step_gae(b, how, 0.3 * kl, gamma, lam) if kl else oracle.step_gae(b, how, 0.0, gamma, lam)
    same(found, expected)


@quick
@given(b=oracle.turn_batches(), how=HOWS, rates=st.tuples(RATES, RATES, RATES, RATES), kl=st.booleans())
def test_turn_gae_equals_the_loop(b, how, rates, kl):
    names = ("gamma_turn", "lam_turn", "gamma_token", "lam_token")
    arguments = oracle.given(b, how, 0.3 * kl) | {"turn": b.turn} | dict(zip(names, rates, strict=True))
    same(adv.turn_gae(**arguments, **critic(b)), oracle.turn_gae(b, how, 0.3 * kl, rates))


@quick
@given(b=oracle.turn_batches(), weights=st.sampled_from([(1.0, 1.0), (0.5, 2.0)]), ddof=st.sampled_from([0, 1]))
def test_turn_grpo_equals_the_loop(b, weights, ddof):
    found = call("turn_grpo", b, turn_weight=weights[0], outcome_weight=weights[1], ddof=ddof)
    same(found, oracle.turn_grpo(b, weights, ddof))


@quick
@given(b=oracle.turn_batches(), how=HOWS, gamma=RATES, ddof=st.sampled_from([0, 1]))
def test_turn_return_equals_the_loop(b, how, gamma, ddof):
    arguments = oracle.given(b, how) | {"turn": b.turn, "group": b.group}
    same(adv.turn_return(**arguments, gamma=gamma, ddof=ddof), oracle.turn_return(b, how, gamma, ddof))


@quick
@given(b=oracle.turn_batches(), gamma=RATES, damping=st.sampled_from([0.0, 0.3]), ddof=st.sampled_from([0, 1]))
def test_turn_return_hybrid_equals_the_loop(b, gamma, damping, ddof):
    found = call("turn_return_hybrid", b, gamma=gamma, outcome_weight=damping, ddof=ddof)
    same(found, oracle.turn_return_hybrid(b, gamma, damping, ddof))


@quick
@given(b=oracle.turn_batches(), turns=st.booleans(), gamma=RATES, weight=st.sampled_from([1.0, 0.5]), std=st.booleans())
def test_gigpo_equals_the_loop(b, turns, gamma, weight, std):
    changes = {} if turns else {"turn_rewards": None}
    found = call("gigpo", b, gamma=gamma, weight=weight, scale="std" if std else "none", **changes)
    same(found, oracle.gigpo(b, "turns" if turns else "rewards", gamma, weight, std))


@quick
@given(b=oracle.turn_batches(), std=st.booleans())
def test_siblings_equals_the_loop(b, std):
    same(call("siblings", b, scale="std" if std else "none"), oracle.siblings(b, std))


@quick
@given(b=oracle.turn_batches(), how=HOWS, gamma=RATES, bars=st.sampled_from([(1.0, 1.0), (2.0, 0.5)]))
def test_vtrace_equals_the_loop(b, how, gamma, bars):
    arguments = oracle.given(b, how) | critic(b) | sampled(b)
    numbers = {"gamma": gamma, "rho_bar": bars[0], "c_bar": bars[1]}
    expected, targets = oracle.vtrace(b, how, gamma, *bars)
    same(adv.vtrace(**arguments, **numbers), expected)
    same(adv.vtrace_targets(**arguments, **numbers), targets)


@quick
@given(b=oracle.turn_batches(), how=HOWS, gamma=RATES, lam=RATES)
def test_retrace_equals_the_loop(b, how, gamma, lam):
    arguments = oracle.given(b, how) | critic(b) | sampled(b)
    same(adv.retrace(**arguments, gamma=gamma, lam=lam), oracle.retrace(b, how, gamma, lam))


@quick
@given(b=oracle.turn_batches(), beta=st.sampled_from([0.05, 2.0]), gamma=RATES)
def test_prime_equals_the_loop(b, beta, gamma):
    same(call("prime", b, beta=beta, gamma=gamma), oracle.prime(b, beta, gamma))


@quick
@given(b=oracle.turn_batches())
def test_trajectory_level_advantages_match_loop_reference(b):
    same(call("maxrl", b), oracle.maxrl(b))
    same(call("best_of_group", b), oracle.best_of_group(b))
    gain = (b.rewards - b.greedy).tolist()
    same(call("remax", b), oracle.whole(b, gain))
    same(call("coderl", b), oracle.whole(b, gain) * torch.where(b.mask, b.probs, 0.0))


@quick
@given(b=oracle.turn_batches([0.0, 1.0]), k=st.integers(1, 2))
def test_pass_at_k_equals_the_loop(b, k):
    same(call("pass_at_k", b, rewards=b.rewards, k=k), oracle.pass_at_k(b, k))


@quick
@given(b=oracle.turn_batches())
def test_the_role_average_equals_the_loop(b):
    start = adv.RoleBaselines(decay=0.8, initial=0.5, means={ROLES[1]: 2.0})
    means, scores = dict(start.means), []
    for role, reward in zip(role_list(b), b.rewards.tolist(), strict=True):
        before = means.get(role, 0.5)
        scores.append(reward - before)
        means[role] = 0.8 * before + 0.2 * reward
    same(call("rae", b, baselines=start), oracle.whole(b, scores))
    after = start.updated(role_list(b), b.rewards)
    assert after.means == pytest.approx(means, rel=1e-12)
    assert start.means == {ROLES[1]: 2.0}
    assert adv.RoleBaselines.from_json(after.to_json()) == after


@pytest.mark.parametrize("name", sorted(FUNCTIONS))
@settings(max_examples=4, deadline=None, derandomize=True)
@given(b=oracle.turn_batches(), data=st.data())
def test_advantages_are_zero_off_mask_and_invariant_to_order_and_padding(name, b, data):
    found = call(name, b)
    assert found.shape == b.mask.shape
    assert found.dtype == torch.float64
    assert (found[~b.mask] == 0).all()
    assert found.isfinite().all()
    order = torch.arange(len(b.mask))
    if name != "rae":
        order = torch.tensor(data.draw(st.permutations(range(len(b.mask)))))
    wider = {}
    for field in fields(b):
        tensor = getattr(b, field.name)[order]
        if tensor.shape == b.mask.shape and field.name not in ("turn_rewards", "anchors"):
            tensor = torch.cat([tensor.new_zeros(len(tensor), 2), tensor], 1)
        wider[field.name] = tensor
    changes = {"nodes": oracle.nodes_of(b)[order]} if name == "siblings" else {}  # drawn by position
    same(call(name, oracle.TurnBatch(**wider), **changes)[:, 2:], found[order])


@pytest.mark.parametrize("name", sorted(FUNCTIONS))
@pytest.mark.parametrize("bad", oracle.BAD)
def test_non_finite_reward_raises_with_its_index(name, bad):
    b = ONE
    rewards = b.rewards.clone()
    rewards[2] = bad
    with pytest.raises(ValueError, match=r"rewards\[2\] is (nan|inf|-inf)"):
        call(name, b, rewards=rewards)


@pytest.mark.parametrize("name", ["gae", "vapo", "step_gae", "turn_gae", "turn_grpo", "turn_return", "gigpo"])
@pytest.mark.parametrize("bad", oracle.BAD)
def test_non_finite_turn_reward_raises_with_its_index(name, bad):
    rewards = ONE.turn_rewards.clone()
    rewards[1, 0] = bad
    with pytest.raises(ValueError, match=r"turn_rewards\[1, 0\] is (nan|inf|-inf)"):
        call(name, ONE, turn_rewards=rewards, turn=ONE.turn)


@pytest.mark.parametrize("name", ["gae", "vapo", "step_gae", "turn_gae", "vtrace", "retrace"])
@pytest.mark.parametrize("bad", oracle.BAD)
def test_non_finite_value_raises_with_its_index(name, bad):
    values, bootstrap = ONE.values.clone(), ONE.bootstrap.clone()
    values[3, 1] = bootstrap[2] = bad
    with pytest.raises(ValueError, match=r"values\[3, 1\] is (nan|inf|-inf)"):
        call(name, ONE, values=values)
    with pytest.raises(ValueError, match=r"bootstrap_values\[2\] is (nan|inf|-inf)"):
        call(name, ONE, bootstrap_values=bootstrap)


@pytest.mark.parametrize("name", sorted(set(FUNCTIONS) - {"rae"}))
def test_shapes_that_do_not_fit_are_refused(name):
    with pytest.raises(ValueError, match=r"must be \[|has shape"):
        call(name, ONE, mask=ONE.mask[:3])
    with pytest.raises(ValueError, match=r"must be \["):
        call(name, ONE, rewards=ONE.rewards[:, None])
    with pytest.raises(ValueError, match="integers"):
        call(name, ONE, group=ONE.group.double())


TENSORS = {
    "values": ["gae", "vapo", "step_gae", "turn_gae", "vtrace", "retrace"],
    "turn": ["step_gae", "turn_gae", "turn_grpo", "turn_return", "turn_return_hybrid", "gigpo"],
    "old_logprobs": ["vtrace", "retrace"],
    "prm_logprobs": ["prime"],
    "outcome_probs": ["coderl"],
    "greedy_rewards": ["remax", "coderl"],
    "anchors": ["gigpo"],
    "nodes": ["siblings"],
    "proposer": ["hierarchical"],
}


@pytest.mark.parametrize(("tensor", "name"), [(t, n) for t, names in TENSORS.items() for n in names])
def test_another_tensor_of_the_wrong_shape_is_refused(tensor, name):
    given = CALLS[name](ONE)[tensor]
    with pytest.raises(ValueError, match=f"{tensor} must be"):
        call(name, ONE, **{tensor: given[:3]})


@pytest.mark.parametrize(
    "name",
    [
        *("maxrl", "best_of_group", "pass_at_k", "prime", "hierarchical"),
        *("turn_grpo", "turn_return", "turn_return_hybrid", "gigpo", "siblings"),
    ],
)
def test_single_row_group_is_rejected(name):
    with pytest.raises(ValueError, match=r"row \d is alone in its group"):
        call(name, ONE, group=torch.tensor([4, 4, 4, 8]))


def test_turns_that_do_not_count_up_are_refused():
    for bad in ([0, 0, 2], [1, 1, 2], [0, 1, 0], [-1, 0, 1]):
        with pytest.raises(ValueError, match="row 1: turns"):
            adv.token_rewards(mask=torch.ones(2, 3), turn=torch.tensor([[0, 0, 1], bad]), turn_rewards=torch.ones(2, 3))
    with pytest.raises(ValueError, match="row 1 has 3 turns, turn_rewards 2"):
        adv.token_rewards(
            mask=torch.ones(2, 3), turn=torch.tensor([[0, 0, 0], [0, 1, 2]]), turn_rewards=torch.ones(2, 2)
        )
    with pytest.raises(ValueError, match="rewards or turn_rewards"):
        adv.token_rewards(mask=torch.ones(2, 3))


@pytest.mark.parametrize("name", sorted(ADVANTAGES))
def test_registry_passes_the_arguments_each_advantage_function_takes(name):
    b = ONE
    algorithm = replace(PRESETS["grpo"], std_ddof=0, options=PartOptions(advantage=OWN.get(name, {})))
    outcomes = Outcomes(
        b.rewards,
        b.group,
        b.mask,
        b.turn,
        b.turn_rewards,
        values=b.values,
        bootstrap_values=b.bootstrap,
        baselines=RoleBaselines().read(ROLES, b.rewards) if name == "rae" else BASELINES,
        anchors=ANCHORS,
        nodes=oracle.nodes_of(b),
        proposer=PROPOSER,
        proposals=b.group,
        outcome_probs=CHANCES,
        prm_logprobs=b.values,
        ref_logprobs=-b.values.abs(),
        old_logprobs=b.old,
        behavior_logprobs=b.behavior,
        sum_pi_squared=CHANCES,
    )
    found = ADVANTAGES[name](outcomes, algorithm)
    takes = parameters_of(FUNCTIONS[name])
    given = {"rewards": b.rewards, "group": b.group, "mask": b.mask, "turn": b.turn}
    given |= {"turn_rewards": b.turn_rewards, "ddof": 0, "values": b.values, **OWN.get(name, {})}
    given |= {"nodes": oracle.nodes_of(b), "greedy_rewards": BASELINES, "anchors": ANCHORS, "proposer": PROPOSER}
    given["bootstrap_values"] = b.bootstrap
    given |= {"roles": ROLES, "baselines": RoleBaselines(), "outcome_probs": CHANCES}
    given |= {"prm_logprobs": b.values, "ref_logprobs": -b.values.abs()} | sampled(b)
    given["sum_pi_squared"] = CHANCES
    if name == "gigpo":
        last = torch.where(b.mask.bool(), b.turn, -1).amax(1)
        given["turn_rewards"] = b.turn_rewards.clone()
        given["turn_rewards"][torch.arange(len(last)), last] += b.rewards
    if name == "reinforce_pp":
        del given["turn"], given["turn_rewards"]
    same(found, FUNCTIONS[name](**{key: value for key, value in given.items() if key in takes}))


CHANCES = torch.rand(4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
ROLES = [("game", "first"), ("game", "second"), ("game", "first"), ("game", "second")]
ANCHORS = torch.tensor([[1, 2, 3, 8], [1, 3, 2, 8], [4, 5, 6, 8], [4, 4, 7, 8]])
PROPOSER = torch.tensor([True, True, False, False])
BASELINES = torch.tensor([0.5, 0.25, -1.0, 0.75], dtype=torch.float64)
OWN = {
    "gae": {"gamma": 0.9, "lam": 0.8, "lam_critic": 1.0, "whiten": 0, "bootstrap": 1},
    "step_gae": {"gamma": 0.9, "lam": 0.8, "whiten": 0, "bootstrap": 1},
    "turn_gae": {"gamma_turn": 0.9, "lam_turn": 0.8, "gamma_token": 0.7, "lam_token": 0.6, "whiten": 0, "bootstrap": 1},
    "vapo": {"gamma": 0.9, "alpha": 0.3, "lam_critic": 1.0, "whiten": 0, "bootstrap": 1},
    "vtrace": {"gamma": 0.9, "rho_bar": 1.5, "c_bar": 0.7, "whiten": 0, "bootstrap": 1},
    "retrace": {"gamma": 0.9, "lam": 0.8, "whiten": 0, "bootstrap": 1},
    "grpo": {"std_floor": 0.4, "std_over": "batch"},
    "gpg": {"counted": "nonzero"},
    "optimal_token_baseline": {"zero_tail": 0},
    "rae": {"decay": 0.95},
    "prime": {"beta": 0.3, "gamma": 0.8},
    "gigpo": {"gamma": 0.8, "weight": 0.5, "scale": "none"},
    "siblings": {"scale": "none"},
    "pass_at_k": {"k": 2},
    "reinforce_pp": {"gamma": 0.9},
    "turn_grpo": {"turn_weight": 0.5, "outcome_weight": 2.0},
    "turn_return": {"gamma": 0.8},
    "turn_return_hybrid": {"gamma": 0.7, "outcome_weight": 0.4},
}


def test_every_advantage_option_is_covered_by_these_tests():
    assert {name: set(options) for name, options in OWN.items()} == {
        name: set(options) for name, options in ADVANTAGE_OPTIONS.items() if options
    }


@pytest.mark.parametrize("name", sorted(FUNCTIONS))
def test_a_batch_without_action_tokens_or_rows_returns_zero(name):
    b = replace(ONE, mask=torch.zeros_like(ONE.mask))
    assert (call(name, b) == 0).all()
    if name != "rae":
        none = oracle.TurnBatch(**{f.name: getattr(ONE, f.name)[:0] for f in fields(ONE)})
        assert call(name, none).shape == (0, ONE.mask.shape[1])


def test_float32_inputs_return_float32_advantages():
    b = replace(ONE, rewards=ONE.rewards.float(), turn_rewards=ONE.turn_rewards.float(), values=ONE.values.float())
    for name in ("gae", "turn_return", "maxrl", "turn_gae"):
        assert call(name, b).dtype == torch.float32
        torch.testing.assert_close(call(name, b).double(), call(name, ONE), rtol=1e-4, atol=1e-5)


def test_advantages_do_not_require_grad():
    values = ONE.values.where(ONE.mask, 0.0).requires_grad_()
    for name in ("gae", "step_gae", "turn_gae", "vtrace", "retrace"):
        assert not call(name, ONE, values=values).requires_grad
    assert not call("prime", ONE, prm_logprobs=values).requires_grad


ONE = oracle.turn_batch(
    [
        [(False, 1), (True, 2), (False, 1), (True, 1)],
        [(True, 3), (False, 1), (True, 1)],
        [(False, 1), (True, 2)],
        [(True, 2), (True, 2), (False, 2), (True, 1)],
    ],
    width=8,
    group=[3, 3, -1, -1],
    rewards=[1.0, 0.0, 0.0, 1.0],
    seed=5,
)
"""Two groups of two: an observation first, in the middle, last, and turns without one between."""
