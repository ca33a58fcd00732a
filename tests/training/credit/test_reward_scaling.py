"""Effect of changing the outcomes from `r` to `a r + b` on each advantage and on the gradient of each preset.

A change of scale is one of the unit: whatever is measured in rewards (rewards of turns, values, baselines, a
penalty in the reward) changes with it. A shift is `b` more for every outcome: baselines that are outcomes
have it too, and a critic that knows of it expects the discounted `b`. The small numbers beside deviations
(1e-6, and 1e-8 in whitening) are no part of the laws: rewards are millions here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import algorithms_oracle as oracle
import algorithms_oracle_advantages as slow
from algorithm_parts import ADVANTAGES
from ludus.algorithms.advantages import grpo
from ludus.algorithms.algorithm import Algorithm, PartOptions
from ludus.algorithms.filters import variance_top, zero_variance
from ludus.algorithms.spec.resolve import PRESETS
from ludus.training.credit.advantages import assign_credit
from tests.algorithms.test_presets_exact import CASE, WON, Case, real_gradient, real_outcomes
from tests.training.credit.test_credit import group, table

UNIT, SCALE, SHIFT = 1e6, 4.0, 3e6
CLOSE = 1e-9
"""Of the largest number of a comparison."""


def made(name: str, **options: float | str) -> Algorithm:
    return replace(PRESETS["grpo"], advantage=name, options=PartOptions(advantage=options))


DISCOUNTS = {
    "gae": {"gamma": 0.9, "lam": 0.8},
    "step_gae": {"gamma": 0.9, "lam": 0.8},
    "turn_gae": {"gamma_turn": 0.9, "lam_turn": 0.8, "lam_token": 0.7},
    "vapo": {"gamma": 0.9},
    "vtrace": {"gamma": 0.9, "c_bar": 0.9},
    "retrace": {"gamma": 0.9, "lam": 0.8},
    "reinforce_pp": {"gamma": 0.9},
    "turn_return": {"gamma": 0.9},
}


def default(name: str) -> Algorithm:
    """The advantage with a discount, where it takes one."""
    return made(name, **DISCOUNTS.get(name, {}))


# The changes.


def to_the_end(case: Case, name: str) -> Callable[[int, int], int]:
    """Steps from an action token to its trajectory's last: turns where a step is a turn, tokens elsewhere."""

    def of(i: int, t: int) -> int:
        if name in ("step_gae", "turn_gae"):
            turns = case.b.turns(i)
            return next(len(turns) - 1 - k for k, own in enumerate(turns) if t in own)
        return len(case.columns[i]) - 1 - case.columns[i].index(t)

    return of


def over_actions(case: Case, value: Callable[[int, int], float]) -> Tensor:
    return case.b.dense(lambda i: {t: value(i, t) for t in case.columns[i]})


def worth(case: Case, algorithm: Algorithm) -> Tensor:
    """What 1 more at the end is worth before each action token, to a critic that knows of it, [N, L]."""
    options, steps = algorithm.options.advantage, to_the_end(case, algorithm.advantage)
    gamma = float(options.get("gamma_turn", options.get("gamma", 1.0)))
    return over_actions(case, lambda i, t: gamma ** steps(i, t))


def changed(case: Case, algorithm: Algorithm, a: float, b: float = 0.0, *, knows: bool = True) -> Case:
    """The batch with outcomes `a r + b`; `knows`: the critic is one that has learned them."""
    own = case.b
    values = own.values * a + (b * worth(case, algorithm) if knows else 0.0)
    moved = replace(
        own, rewards=own.rewards * a + b, turn_rewards=own.turn_rewards * a, values=values, greedy=own.greedy * a + b
    )
    return replace(case, b=moved)


def penalty_in_units(algorithm: Algorithm, a: float) -> Algorithm:
    return replace(algorithm, kl_coef=algorithm.kl_coef * (a if algorithm.kl_placement == "reward" else 1))


def advantages(algorithm: Algorithm, a: float = UNIT, b: float = 0.0, *, knows: bool = True) -> Tensor:
    case, own = changed(CASE, algorithm, a, b, knows=knows), penalty_in_units(algorithm, a)
    outcomes = replace(real_outcomes(case, own), old_logprobs=case.old, behavior_logprobs=case.behavior)
    return ADVANTAGES[algorithm.advantage](outcomes, own)


def gradient(name: str, a: float = UNIT, b: float = 0.0) -> Tensor:
    case = changed(CASE, PRESETS[name], a, b)
    return real_gradient(case, penalty_in_units(PRESETS[name], a))


def agree(found: Tensor, expected: Tensor) -> bool:
    return float((found - expected).abs().max()) <= CLOSE * max(1.0, float(expected.abs().max()))


# Scale: `same`, `linear` (a times as much), `affine` (what reads no reward stays, the rest is linear).

SCALES = {
    **dict.fromkeys(("grpo", "hierarchical", "reinforce_pp", "reinforce_pp_baseline", "maxrl"), "same"),
    **dict.fromkeys(("turn_grpo", "turn_return", "turn_return_hybrid", "gigpo", "siblings"), "same"),
    **dict.fromkeys(("gae", "step_gae", "turn_gae", "vapo", "vtrace", "retrace"), "same"),
    **dict.fromkeys(("dr_grpo", "rloo", "opo", "best_of_group", "remax", "rae", "coderl", "raw"), "linear"),
    **dict.fromkeys(("gpg", "optimal_token_baseline"), "linear"),
    "prime": "affine",
    "pass_at_k": "refused",
}


def scaled(law: str, of: Callable[[float], Tensor]) -> bool:
    """Whether a function of the unit keeps the law, and no simpler one."""
    nothing, once, more = of(0.0), of(UNIT), of(SCALE * UNIT)
    if law == "same":
        return agree(more, once)
    kept = agree(more - nothing, SCALE * (once - nothing))
    return kept and bool((nothing == 0).all()) == (law == "linear")


@pytest.mark.parametrize("name", [name for name, law in SCALES.items() if law != "refused"])
def test_reward_scale_changes_advantages_as_listed(name):
    assert scaled(SCALES[name], lambda a: advantages(default(name), a))


@pytest.mark.parametrize("name", ["gae", "step_gae", "turn_gae", "vapo", "vtrace", "retrace"])
def test_reward_scale_changes_unwhitened_advantages_linearly(name):
    own = made(name, **DISCOUNTS[name], whiten=0.0)
    assert scaled("linear", lambda a: advantages(own, a))


def test_reward_scale_changes_centred_gigpo_advantages_linearly():
    assert scaled("linear", lambda a: advantages(made("gigpo", scale="none"), a))


def test_std_floor_scales_with_the_rewards():
    b = CASE.b
    given = {"group": b.group, "mask": b.mask, "eps": 0.0}
    floored = grpo(rewards=b.rewards, std_floor=0.6, **given)
    assert agree(grpo(rewards=b.rewards * SCALE, std_floor=0.6 * SCALE, **given), floored)
    assert not agree(grpo(rewards=b.rewards * SCALE, std_floor=0.6, **given), floored)


# Shift: `same`, or what it becomes.


def moved(case: Case, algorithm: Algorithm) -> Tensor:
    """Without a baseline each advantage has the shift."""
    return advantages(algorithm) + SHIFT * case.b.mask


def moved_past_the_others(case: Case, algorithm: Algorithm) -> Tensor:
    """Tokens past the end of all other attempts of the group have no baseline."""
    found = advantages(algorithm)
    for members in case.b.members():
        second = sorted(len(case.columns[i]) for i in members)[-2]
        for i in members:
            found[i, case.columns[i][second:]] += SHIFT
    return found


def forgotten(case: Case, algorithm: Algorithm) -> Tensor:
    """The average of a role began at 0 and has seen the shift as often as that role was there."""
    left, found = {True: 1.0, False: 1.0}, []
    for role in case.proposer:
        found.append(SHIFT * left[role])
        left[role] *= 0.95
    return advantages(algorithm) + slow.whole(case.b, found)


def over_another_mean(case: Case, algorithm: Algorithm) -> Tensor:
    """The difference to the mean is divided by the mean with the shift in it."""
    b, scores = case.b, [0.0] * len(case.b.mask)
    for members in b.members():
        rewards = [UNIT * float(b.rewards[i]) for i in members]
        mean = sum(rewards) / len(rewards)
        for i, reward in zip(members, rewards, strict=True):
            scores[i] = (reward - mean) / (mean + SHIFT)
    return slow.whole(b, scores)


def returns_of_tokens(case: Case, algorithm: Algorithm) -> Tensor:
    """The discounted shift joins each return before all are whitened."""
    b = changed(case, algorithm, UNIT).b
    rows = [slow.discounted(row, 0.9) for row in slow.placed(b, "rewards", 0.0)]
    raised = slow.lay(b, [[x + SHIFT * 0.9 ** (len(r) - 1 - j) for j, x in enumerate(r)] for r in rows])
    return oracle.whitened(raised, b.mask, 1)


Cell = tuple[int, int]


def normalised(values: dict[Cell, float], key: Callable[[int, int], tuple[int, ...]]) -> dict[Cell, float]:
    """Cells with one key among each other; a difference by rounding alone is none."""
    sets: dict[tuple[int, ...], list[Cell]] = {}
    for cell in values:
        sets.setdefault(key(*cell), []).append(cell)
    found = dict.fromkeys(values, 0.0)
    for own in sets.values():
        xs = torch.tensor([values[cell] for cell in own], dtype=torch.float64)
        if len(own) > 1 and float(xs.max() - xs.min()) > 1e-9 * float(xs.abs().max()):
            found |= dict(zip(own, ((xs - xs.mean()) / xs.std()).tolist(), strict=True))
    return found


def compared(
    case: Case, gamma: float, behind: int, weight: float, key: Callable[[int, int], tuple[int, ...]]
) -> Tensor:
    """Returns of turns, with the discounted outcome and the shift `behind` the last turn, by `key`.

    `weight` is that of the outcome among its group, which does not feel a shift of all.
    """
    b = case.b
    values, outcomes = {}, {(i, 0): float(x) for i, x in enumerate(b.rewards)}
    for i, row in enumerate(slow.of_turns(b, "turns")):
        end = UNIT * float(b.rewards[i]) + SHIFT
        for k, x in enumerate(slow.discounted(row, gamma)):
            values[i, k] = UNIT * x + gamma ** (len(row) - 1 - k + behind) * end
    of_turns, of_outcome = normalised(values, key), normalised(outcomes, lambda i, _: (int(b.group[i]),))
    return b.dense(
        lambda i: {t: of_turns[i, k] + weight * of_outcome[i, 0] for k, own in enumerate(b.turns(i)) for t in own}
    )


def compared_by_turn(case: Case, algorithm: Algorithm) -> Tensor:
    """Attempts of another number of turns are another number of discounts away from the shift."""
    return compared(case, 0.9, 0, 0.0, lambda i, k: (int(case.b.group[i]), k))


def compared_by_turn_and_outcome(case: Case, algorithm: Algorithm) -> Tensor:
    """As by turn, the outcome a step behind; the outcome's own term does not feel it."""
    return compared(case, 0.9, 1, 0.3, lambda i, k: (int(case.b.group[i]), k))


def compared_by_state(case: Case, algorithm: Algorithm) -> Tensor:
    """Turns from one state may be another number of discounts away from it."""
    return compared(case, 0.95, 0, 1.0, lambda i, k: (int(case.b.group[i]), int(case.b.anchors[i, k])))


Becomes = Callable[[Case, Algorithm], Tensor]
SHIFTS: dict[str, str | Becomes] = {
    **dict.fromkeys(("grpo", "dr_grpo", "rloo", "opo", "best_of_group", "hierarchical", "siblings"), "same"),
    "gpg": "same",
    "optimal_token_baseline": moved_past_the_others,
    **dict.fromkeys(("reinforce_pp_baseline", "turn_grpo", "remax", "coderl", "prime"), "same"),
    **dict.fromkeys(("gae", "step_gae", "turn_gae", "vapo", "vtrace", "retrace"), "same"),
    "raw": moved,
    "rae": forgotten,
    "maxrl": over_another_mean,
    "reinforce_pp": returns_of_tokens,
    "turn_return": compared_by_turn,
    "turn_return_hybrid": compared_by_turn_and_outcome,
    "gigpo": compared_by_state,
    "pass_at_k": "refused",
}


def test_every_advantage_has_a_scale_and_shift_rule():
    assert set(SCALES) == set(SHIFTS) == set(ADVANTAGES)


@pytest.mark.parametrize("name", [name for name, law in SHIFTS.items() if law != "refused"])
def test_reward_shift_changes_advantages_as_listed(name):
    law, own = SHIFTS[name], default(name)
    before, after = advantages(own), advantages(own, b=SHIFT)
    if isinstance(law, str):
        assert agree(after, before)
    else:
        assert not agree(after, before)
        assert agree(after, law(CASE, own))


@pytest.mark.parametrize("name", ["reinforce_pp", "turn_return", "gigpo", "turn_return_hybrid"])
def test_undiscounted_returns_are_invariant_to_a_reward_shift(name):
    own = made(name, gamma=1.0)
    assert agree(advantages(own, b=SHIFT), advantages(own))


def test_turn_grpo_is_invariant_to_a_turn_reward_shift():
    own, outcomes = made("turn_grpo"), real_outcomes(CASE, made("turn_grpo"))
    raised = replace(outcomes, turn_rewards=outcomes.turn_rewards + 0.5)
    assert agree(ADVANTAGES["turn_grpo"](raised, own), ADVANTAGES["turn_grpo"](outcomes, own))


@pytest.mark.parametrize(("a", "b"), [(2.0, 0.0), (1.0, 1.0)])
def test_pass_at_k_with_non_binary_rewards_raises(a, b):
    own = made("pass_at_k", k=4)
    outcomes = real_outcomes(WON, own)
    with pytest.raises(ValueError, match="needs 0 or 1"):
        ADVANTAGES["pass_at_k"](replace(outcomes, rewards=outcomes.rewards * a + b), own)


# A critic that has not heard of the shift: what of it reaches each token.


def product(factors: list[float]) -> float:
    return float(torch.tensor(factors, dtype=torch.float64).prod())


def reached(name: str, i: int, t: int) -> float:
    """The part of the shift in the advantage of a token, from the last one backwards."""
    columns, turns = CASE.columns[i], CASE.b.turns(i)
    both = replace(CASE.b, old=CASE.old, behavior=CASE.behavior)
    after, w = columns[columns.index(t) + 1 :], dict(zip(columns, slow.ratios(both, i), strict=True))
    match name:
        case "gae":
            return (0.9 * 0.8) ** len(after)
        case "vapo":
            return (0.9 * slow.vapo_lam(CASE.b)[i]) ** len(after)
        case "retrace":
            return product([0.9 * 0.8 * min(1.0, w[u]) for u in after])
        case "vtrace":
            rho = {u: min(1.0, w[u]) for u in columns}
            ahead = product([0.9 * min(0.9, w[u]) for u in after[:-1]]) * rho[columns[-1]]
            return rho[t] * 0.9 * ahead if after else rho[t]
    k = next(k for k, own in enumerate(turns) if t in own)
    high = (0.9 * 0.8) ** (len(turns) - 1 - k)
    return high * 0.7 ** (len(turns[k]) - 1 - turns[k].index(t)) if name == "turn_gae" else high


@pytest.mark.parametrize("name", ["gae", "step_gae", "turn_gae", "vapo", "vtrace", "retrace"])
def test_unadjusted_critic_passes_a_reward_shift_to_the_advantages(name):
    own = made(name, **DISCOUNTS[name], whiten=0.0)
    expected = advantages(own) + SHIFT * over_actions(CASE, lambda i, t: reached(name, i, t))
    assert agree(advantages(own, b=SHIFT, knows=False), expected)


@pytest.mark.parametrize("name", ["remax", "coderl"])
def test_fixed_baseline_passes_a_reward_shift_to_the_advantages(name):
    own = made(name)
    outcomes = real_outcomes(CASE, own)
    found = ADVANTAGES[name](replace(outcomes, rewards=outcomes.rewards + 2.0), own)
    weight = CASE.b.probs if name == "coderl" else torch.ones(CASE.b.mask.shape, dtype=torch.float64)
    difference = torch.where(CASE.b.mask, 2.0 * weight, 0.0)
    assert agree(found - ADVANTAGES[name](outcomes, own), difference)


# Presets: the gradient. Losses are linear in a positive advantage and in a negative one.

SAME, LINEAR, AFFINE, OTHER, REFUSED = "same", "linear", "affine", "other", "refused"
PRESET_LAWS = {
    **dict.fromkeys(("grpo", "grpo_paper", "dapo", "hierarchical", "echo", "turn_grpo"), (SAME, SAME)),
    **dict.fromkeys(("gspo", "gspo_token", "cispo", "gmpo", "sapo", "dppo", "gtpo"), (SAME, SAME)),
    **dict.fromkeys(("clip_cov", "kl_cov", "reinforce_pp", "reinforce_pp_baseline"), (SAME, SAME)),
    **dict.fromkeys(("ppo", "turn_ppo", "step_ppo", "search_r1", "retool"), (SAME, SAME)),
    **dict.fromkeys(("starpo", "starpo_s"), (SAME, SAME)),
    **dict.fromkeys(("distill", "sdpo", "sdft"), (SAME, SAME)),  # read no reward
    **dict.fromkeys(("dr_grpo", "rloo", "opo", "best_of_group", "remax", "coderl"), (LINEAR, SAME)),
    **dict.fromkeys(("rloo_ppo", "gpg"), (LINEAR, SAME)),
    "luspo": (SAME, SAME),
    "optimal_token_baseline": (LINEAR, OTHER),
    "mixed_policy": (AFFINE, SAME),  # its entropy reads no reward
    **dict.fromkeys(("reinforce", "rae"), (LINEAR, OTHER)),
    **dict.fromkeys(("maxrl", "turn_return", "turn_return_hybrid", "gigpo"), (SAME, OTHER)),
    "vapo": (SAME, OTHER),  # another attempt is positive, and has its likelihood raised
    "prime": (OTHER, SAME),  # the sign of its two terms together says on which side to clip
    "pass_at_k": (REFUSED, REFUSED),
}


def test_every_preset_has_scale_and_shift_rules():
    assert set(PRESET_LAWS) == set(PRESETS)


@pytest.mark.parametrize("name", [name for name in PRESETS if name != "pass_at_k"])
def test_reward_scale_and_shift_change_preset_gradients_as_listed(name):
    scale, shift = PRESET_LAWS[name]
    if scale == OTHER:
        assert not any(scaled(law, lambda a: gradient(name, a)) for law in (SAME, LINEAR, AFFINE))
    else:
        assert scaled(scale, lambda a: gradient(name, a))
    assert agree(gradient(name, b=SHIFT), gradient(name)) == (shift == SAME)


def test_variance_filters_are_invariant_to_reward_scale_and_shift():
    rewards, ids = CASE.b.rewards, CASE.b.group
    for other in (rewards * SCALE, rewards + 2.0, rewards * 0.25 - 1.0):
        assert torch.equal(zero_variance(rewards=other, group=ids), zero_variance(rewards=rewards, group=ids))
        assert torch.equal(
            variance_top(rewards=other, group=ids, p=0.4), variance_top(rewards=rewards, group=ids, p=0.4)
        )


def test_overlong_penalty_does_not_scale_with_the_rewards():
    """From 0 to -1 whatever the rewards are: against larger ones it weighs less, and a shift is none."""

    def found(a: float, b: float, most: int) -> Tensor:
        members = [replace(e, trajectory=replace(e.trajectory, reward=a * e.trajectory.reward + b)) for e in group()]
        by_actions = replace(PRESETS["dapo"], overlong_measure="action_tokens")
        return table(assign_credit([members], by_actions, most))[0]

    longest = max(e.trajectory.num_action_tokens for e in group())
    for most, punished in ((longest * 10, False), (longest, True)):
        assert agree(found(1.0, 5.0, most), found(1.0, 0.0, most))
        far = float((found(100.0, 0.0, most) - found(1.0, 0.0, most)).abs().max())
        assert (far > 0.01) == punished
