"""Presets equal their papers: the gradient of each minus that of GRPO is the term that its paper adds or changes.

One fixed batch goes the real way: advantages, the records, `objective`. What is expected is a closed form of
the gradient with respect to each log-probability, in plain loops with the papers' numbers, and reads nothing
of the library. Each field in which a preset differs from `grpo` is then set back, and the term is missed.
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import cache, cached_property
from pathlib import Path

import pytest
import torch
from torch import Tensor

import algorithms_oracle as oracle
import algorithms_oracle_advantages as slow
import algorithms_oracle_losses as slow_losses
from algorithm_parts import ADVANTAGES, TOKEN_ADVANTAGES
from ludus.algorithms import losses
from ludus.algorithms.advantages.running_baselines import RoleBaselines
from ludus.algorithms.algorithm import Algorithm
from ludus.algorithms.kl import KLS, penalised_rewards
from ludus.algorithms.objective import Normalizer, objective
from ludus.algorithms.spec.resolve import PRESETS, resolve
from ludus.algorithms.tensors import Outcomes, TokenBatch
from ludus.config.sections.algorithm import AlgorithmConfig
from ludus.errors import ConfigError

EXACT, MISSED = 1e-10, 1e-6
BUDGET = 40
"""The token budget of a trajectory: the C of the aggregation `constant`."""
SEED = 3

SAMPLING = {
    "group_size": ("test_run.py", "test_the_ledger_adds_up_at_every_step_and_agrees_with_the_rollouts"),
    "filter_zero_variance": ("test_selection.py", "test_zero_variance_reason_precedes_the_variance_filter"),
    "max_resample_rounds": ("test_selection.py", "test_resample_rounds_replace_zero_variance_groups"),
    "top_variance_fraction": ("test_selection.py", "test_highest_variance_groups_are_kept_and_dropped_ones_counted"),
    "variance_filter": ("test_selection.py", "test_top_p_keeps_groups_holding_that_share_of_deviation"),
    "greso": ("test_greso_loop.py", "test_greso_run_skips_tasks_and_resumes_with_its_streaks"),
    "overlong_mask": ("test_selection.py", "test_truncated_sample_counts_in_the_baseline_but_is_masked"),
    "overlong_buffer": ("test_credit.py", "test_soft_overlong_penalty_reduces_rewards_near_the_limit"),
    "overlong_measure": ("test_credit.py", "test_soft_overlong_penalty_reduces_rewards_near_the_limit"),
    "minibatches": ("test_inactive.py", "test_presets_with_ratio_losses_use_several_updates_or_warn"),
    "overlong_length": ("test_credit.py", "test_overlong_limit_is_configured_or_derived_from_token_limits"),
    "entropy_target": ("test_entropy_target.py", "test_the_coefficient_is_proportional_to_the_gap_below_the_target"),
}
"""Fields that act before the gradient: on what is sampled, kept, rewarded or weighted; the test of each."""
TEXT = ("name", "summary", "source")
IN_GRADIENT = (
    *("advantage", "loss", "aggregation", "clip_low", "clip_high", "dual_clip", "kl", "kl_coef", "kl_placement"),
    *("correction", "tis_cap", "std_ddof", "entropy_coef", "opsm_delta", "options"),
)
UNREAD = {
    "clip_high": {
        *("rloo", "remax", "reinforce", "opo", "maxrl", "rae", "coderl", "gpg"),
        *("sapo", "dppo", "gtpo", "kl_cov", "distill", "rloo_ppo", "sdpo", "sdft"),
    },
    "aggregation": {"gspo"},
    "advantage": {"distill", "sdft"},
}
"""Fields that differ from `grpo` where the loss does not read them: losses without a clip, the one term a
trajectory of GSPO, distillation without a reward (the policy gradient of SDPO has the weight 0); and a product of
ratios, none of which lies between 1.2 and 1.28 here."""


@dataclass(frozen=True)
class Case:
    """The batch. `b` has the rewards, turns and values; off the mask it holds NaN and infinities."""

    b: slow.TurnBatch
    logprobs: Tensor
    old: Tensor
    behavior: Tensor
    ref: Tensor
    teacher: Tensor
    prm: Tensor
    token_ids: Tensor
    observed: Tensor
    expert: list[bool]
    proposer: list[bool]

    @cached_property
    def positive(self) -> list[bool]:
        return [reward > 0 for reward in self.b.rewards.tolist()]

    @cached_property
    def columns(self) -> list[list[int]]:
        """The columns of the action tokens of each row."""
        return [self.b.columns(i) for i in range(len(self.b.mask))]

    @cached_property
    def cells(self) -> list[tuple[int, int]]:
        return [(i, t) for i, columns in enumerate(self.columns) for t in columns]

    @cached_property
    def num_rows(self) -> int:
        return sum(bool(columns) for columns in self.columns)

    @cached_property
    def gaps(self) -> list[list[float]]:
        return (self.logprobs - self.old).tolist()

    def gap(self, i: int, t: int) -> float:
        return self.gaps[i][t]

    def ratio(self, i: int, t: int) -> float:
        return math.exp(max(-20.0, min(20.0, self.gap(i, t))))

    def mean_gap(self, i: int) -> float:
        return sum(self.gap(i, t) for t in self.columns[i]) / len(self.columns[i])


REWARDS_BY_GROUP = {
    7: (1.0, 0.3, 0.0, 0.3, 0.9, 0.0),
    -3: (0.0, 0.2, 0.8, 0.0, 0.4),
    100: (1.0, 0.7, 0.0, 0.6, 0.3),
    0: (0.3, 0.1 + 0.2, 0.3, 0.3),
    5: (-0.5, 0.1, -0.2, 0.4),
}
"""One success in five, groups in which most succeed, one of equal rewards, one whose mean is below 0."""


def make_case() -> Case:
    """24 trajectories of 0 to 4 turns in five groups, shuffled; two have more than 20 action tokens."""
    generator = torch.Generator().manual_seed(SEED)

    def integer(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=generator))

    pairs = [(name, reward) for name, rewards in REWARDS_BY_GROUP.items() for reward in rewards]
    pairs = [pairs[k] for k in torch.randperm(len(pairs), generator=generator).tolist()]
    rows = []
    for _ in pairs:
        row = [(False, integer(1, 2))]
        for _ in range(integer(1, 4)):
            row += [(True, integer(1, 4)), (False, integer(1, 2))]
        rows.append(row)
    rows[2] = [(False, 2), (True, 13), (False, 1), (True, 11)]
    rows[9] = [(False, 1), (True, 7), (False, 2), (True, 12), (False, 1), (True, 6)]
    rows[14] = [(False, 3)]
    width = max(sum(length for _, length in row) for row in rows) + 1
    names, rewards = [name for name, _ in pairs], [reward for _, reward in pairs]
    b = slow.turn_batch(rows, width, names, rewards, SEED, ended="all")
    shape = b.mask.shape

    def noise(scale: float) -> Tensor:
        return scale * torch.randn(shape, generator=generator, dtype=torch.float64)

    def near(values: Tensor, scale: float) -> Tensor:
        return (values + noise(scale)).clamp(max=-0.02)

    def poisoned(values: Tensor) -> Tensor:
        return torch.where(b.mask, values, torch.nan)

    old = -noise(1.3).abs() - 0.03
    ref = near(old, 0.3)
    observed = torch.zeros(shape, dtype=torch.bool)
    for i, row in enumerate(rows):
        first, end = row[0][1], sum(length for _, length in row)
        observed[i, first:end] = ~b.mask[i, first:end]
    greedy = {name: 0.1 * k + 0.05 for k, name in enumerate(REWARDS_BY_GROUP)}
    return Case(
        b=replace(b, kl=old - ref, greedy=torch.tensor([greedy[n] for n in names], dtype=torch.float64)),
        logprobs=near(old, 0.35),
        old=poisoned(old),
        behavior=poisoned(near(old, 0.5)),
        ref=poisoned(ref),
        teacher=poisoned(near(old, 0.8)),
        prm=poisoned(near(old, 2.0)),
        token_ids=torch.randint(4, shape, generator=generator),
        observed=observed,
        expert=[i in (3, 9, 17) for i in range(len(rows))],
        proposer=[names.index(name) == i for i, name in enumerate(names)],
    )


CASE = make_case()
WON = replace(CASE, b=replace(CASE.b, rewards=(CASE.b.rewards > 0.5).double()))
"""The same batch with rewards of 0 and 1, which pass@k is for."""


def case_of(name: str) -> Case:
    return WON if name == "pass_at_k" else CASE


# The real way.


def real_outcomes(case: Case, algorithm: Algorithm) -> Outcomes:
    """What a step knows of the batch; a KL in the reward is that of its start."""
    b, kl, rewards = case.b, None, case.b.rewards
    if algorithm.kl_coef > 0 and algorithm.kl_placement == "reward":
        kl = KLS[algorithm.kl](logprobs=case.old, ref_logprobs=case.ref)
        if algorithm.advantage not in TOKEN_ADVANTAGES:
            rewards = penalised_rewards(rewards=rewards, kl=kl, mask=b.mask, coef=algorithm.kl_coef)
    baselines = b.greedy
    if algorithm.advantage == "rae":
        roles = [("world", "proposer" if proposer else "solver") for proposer in case.proposer]
        baselines = RoleBaselines().read(roles, rewards)
    return Outcomes(
        rewards=rewards,
        group=b.group,
        mask=b.mask,
        turn=b.turn,
        turn_rewards=b.turn_rewards,
        kl=kl,
        values=b.values,
        baselines=baselines,
        anchors=b.anchors,
        nodes=slow.nodes_of(b),
        proposer=torch.tensor(case.proposer),
        proposals=b.group,
        outcome_probs=b.probs,
        prm_logprobs=case.prm,
        ref_logprobs=case.ref,
    )


def real_choice(case: Case, algorithm: Algorithm, advantages: Tensor) -> Tensor | None:
    if algorithm.loss not in ("clip_cov", "kl_cov"):
        return None
    given = {"old_logprobs": case.old, "advantages": advantages, "mask": case.b.mask}
    covariance = losses.token_covariance(**given, means=losses.CovarianceMeans.of(**given))
    if algorithm.loss == "kl_cov":
        return losses.select_kl_cov(covariance=covariance, mask=case.b.mask)
    return losses.select_clip_cov(covariance=covariance, mask=case.b.mask, seed=SEED)


def real_gradient(case: Case, algorithm: Algorithm) -> Tensor:
    """The gradient of the loss with respect to the log-probabilities, [N, L].

    The vocabulary has two words, so that the entropy of all of it follows from the log-probability of one.
    """
    mask = case.b.mask
    advantages = ADVANTAGES[algorithm.advantage](real_outcomes(case, algorithm), algorithm)
    if algorithm.loss == "gtpo":
        weights = losses.conflict_weights(
            token_ids=case.token_ids, group=case.b.group, advantages=advantages, mask=mask
        )
        advantages = advantages * weights
    leaf = case.logprobs.clone().requires_grad_()
    other = torch.log1p(-leaf.exp())
    batch = TokenBatch(
        logprobs=leaf,
        old_logprobs=case.old,
        behavior_logprobs=case.behavior,
        advantages=advantages,
        mask=mask,
        ref_logprobs=case.ref,
        entropy=-(leaf.exp() * leaf + other.exp() * other),
        chosen=real_choice(case, algorithm, advantages),
        teacher_logprobs=case.teacher,
        teacher_kl=two_word_divergence(leaf, case.teacher.nan_to_num(nan=-1.0)),
        observed=case.observed,
        positive=torch.tensor(case.positive),
        expert=torch.tensor(case.expert),
    )
    normaliser = replace(
        Normalizer.of(mask, BUDGET),
        observed=int(case.observed.sum()),
        positive=int(mask[torch.tensor(case.positive)].sum()),
    )
    loss, _ = objective(batch, algorithm, normaliser)
    (gradient,) = torch.autograd.grad(loss, leaf)
    return gradient


def two_word_divergence(logprobs: Tensor, teacher: Tensor) -> Tensor:
    """The Jensen-Shannon divergence of two distributions over two words, by the log-probability of one."""
    p, q = torch.stack([logprobs.exp(), -logprobs.expm1()]), torch.stack([teacher.exp(), -teacher.expm1()])
    return ((p * torch.log(2 * p / (p + q)) + q * torch.log(2 * q / (p + q))) / 2).sum(0)


# What the papers say. A slope is the derivative of a token's loss by its log-probability, a share what that
# token counts in the mean over the batch, an addition a gradient beside the policy's.

Slope = Callable[[int, int], float]
Share = Callable[[Case, int], float]


def token_mean(case: Case, i: int) -> float:
    return 1 / len(case.cells)


def seq_mean(case: Case, i: int) -> float:
    return 1 / (case.num_rows * len(case.columns[i]))


def seq_sum(case: Case, i: int) -> float:
    return 1 / case.num_rows


def constant(case: Case, i: int) -> float:
    return 1 / (case.num_rows * BUDGET)


def cut(ratio: float, a: float, low: float, high: float) -> bool:
    """Whether PPO's minimum takes the clipped side, which has no gradient."""
    return (a > 0 and ratio > 1 + high) or (a < 0 and ratio < 1 - low)


def ppo(low: float, high: float) -> Callable[[Case, Tensor], Slope]:
    def of(case: Case, advantages: Tensor) -> Slope:
        def slope(i: int, t: int) -> float:
            ratio, a = case.ratio(i, t), float(advantages[i, t])
            return 0.0 if cut(ratio, a, low, high) else -ratio * a

        return slope

    return of


def reinforce(case: Case, advantages: Tensor) -> Slope:
    return lambda i, t: -float(advantages[i, t])


def gspo(case: Case, advantages: Tensor) -> Slope:
    """The derivative of a row's term is `-s A / n` for each of its tokens: `1 / n` is in the share."""

    def slope(i: int, t: int) -> float:
        ratio, a = math.exp(case.mean_gap(i)), float(advantages[i, t])
        return 0.0 if cut(ratio, a, 3e-4, 4e-4) else -ratio * a

    return slope


def ppo_sequence(case: Case, advantages: Tensor) -> Slope:
    """The derivative of a row's term is `-s A` for each of its tokens, `s` the product of their ratios."""

    def slope(i: int, t: int) -> float:
        total = sum(case.gap(i, u) for u in case.columns[i])
        ratio, a = math.exp(max(-20.0, min(20.0, total))), float(advantages[i, t])
        return 0.0 if cut(ratio, a, 0.2, 0.2) else -ratio * a

    return slope


def cispo(case: Case, advantages: Tensor) -> Slope:
    return lambda i, t: -min(case.ratio(i, t), 1.28) * float(advantages[i, t])


def gmpo(case: Case, advantages: Tensor) -> Slope:
    def slope(i: int, t: int) -> float:
        a = float(advantages[i, t])
        gaps = [case.gap(i, u) for u in case.columns[i]]
        kept = [min(gap, 0.4) if a > 0 else max(gap, -0.4) for gap in gaps]
        out = case.gap(i, t) > 0.4 if a > 0 else case.gap(i, t) < -0.4
        return 0.0 if out else -a * math.exp(sum(kept) / len(kept))

    return slope


def sapo(case: Case, advantages: Tensor) -> Slope:
    def slope(i: int, t: int) -> float:
        ratio, a = case.ratio(i, t), float(advantages[i, t])
        gate = 1 / (1 + math.exp(-(1.0 if a > 0 else 1.05) * (ratio - 1)))
        return -4 * a * gate * (1 - gate) * ratio

    return slope


def dppo(case: Case, advantages: Tensor) -> Slope:
    def slope(i: int, t: int) -> float:
        a = float(advantages[i, t])
        p, b = math.exp(float(case.logprobs[i, t])), math.exp(float(case.behavior[i, t]))
        outward = (a > 0 and p > b) or (a < 0 and p < b)
        return 0.0 if outward and abs(p - b) > 0.2 else -(p / b) * a

    return slope


def signs(case: Case, advantages: Tensor) -> list[int]:
    rows = range(len(case.b.mask))
    totals = [sum(float(advantages[i, t]) for t in case.columns[i]) for i in rows]
    return [(total > 0) - (total < 0) for total in totals]


def conflict_table(case: Case, advantages: Tensor) -> Tensor:
    ids = [[int(case.token_ids[i, t]) for t in case.columns[i]] for i in range(len(case.b.mask))]
    return slow.lay(case.b, slow_losses.conflicts(ids, signs(case, advantages), case.b.group.tolist(), contiguous=True))


def gtpo(case: Case, advantages: Tensor) -> Slope:
    weights = conflict_table(case, advantages)
    return lambda i, t: -float(weights[i, t]) * case.ratio(i, t) * float(advantages[i, t])


def covariances(case: Case, advantages: Tensor) -> dict[tuple[int, int], float]:
    cells = case.cells
    mean_old = sum(float(case.old[c]) for c in cells) / len(cells)
    mean_a = sum(float(advantages[c]) for c in cells) / len(cells)
    return {c: (float(case.old[c]) - mean_old) * (float(advantages[c]) - mean_a) for c in cells}


def golden(number: int) -> int:
    """SplitMix64 (Steele et al. 2014) in whole numbers: the draw of Clip-Cov's tokens is seeded."""
    whole = 2**64
    number = (number + 0x9E3779B97F4A7C15) % whole
    number = (number ^ number >> 30) * 0xBF58476D1CE4E5B9 % whole
    number = (number ^ number >> 27) * 0x94D049BB133111EB % whole
    return number ^ number >> 31


def drawn(case: Case, advantages: Tensor) -> tuple[int, int]:
    """The token of the band 1 to 5 with the lowest ticket: 2e-4 of a small batch is one token."""
    band = [c for c, covariance in covariances(case, advantages).items() if 1 < covariance < 5]

    def ticket(cell: tuple[int, int]) -> int:
        number = golden(golden(cell[0] + 1_000_003 * SEED) + cell[1])
        return number - 2**64 if number >= 2**63 else number

    return min(band, key=ticket)


def clip_cov(case: Case, advantages: Tensor) -> Slope:
    chosen, clipped = drawn(case, advantages), ppo(0.2, 0.2)(case, advantages)
    return lambda i, t: 0.0 if (i, t) == chosen else clipped(i, t)


def kl_cov(case: Case, advantages: Tensor) -> Slope:
    found = covariances(case, advantages)
    chosen = max(found, key=lambda c: found[c])

    def slope(i: int, t: int) -> float:
        away = math.copysign(1.0, case.gap(i, t)) if (i, t) == chosen else 0.0
        return -case.ratio(i, t) * float(advantages[i, t]) + away

    return slope


def distill(case: Case, advantages: Tensor) -> Slope:
    return lambda i, t: case.ratio(i, t) * float(case.logprobs[i, t] - case.teacher[i, t])


def self_distillation(case: Case, advantages: Tensor) -> Slope:
    """The slope of the divergence over two words, times the ratio up to 2."""

    def slope(i: int, t: int) -> float:
        p, q = math.exp(float(case.logprobs[i, t])), math.exp(float(case.teacher[i, t]))
        same, other = math.log(2 * p / (p + q)), math.log(2 * (1 - p) / (2 - p - q))
        return min(case.ratio(i, t), 2.0) * p * (same - other) / 2

    return slope


def mixed_policy(case: Case, advantages: Tensor) -> Slope:
    own = ppo(0.2, 0.2)(case, advantages)

    def slope(i: int, t: int) -> float:
        p = math.exp(float(case.logprobs[i, t]))
        return -0.1 * p / (p + 0.1) ** 2 * float(advantages[i, t]) if case.expert[i] else own(i, t)

    return slope


Addition = Callable[[Case, Share], Tensor]


def kl_loss(name: str, coef: float) -> Addition:
    def of(case: Case, share: Share) -> Tensor:
        def slope(i: int, t: int) -> float:
            d = float(case.logprobs[i, t] - case.ref[i, t])
            return {"k2": d, "k3": 1 - math.exp(-d)}[name]

        return case.b.dense(lambda i: {t: coef * share(case, i) * slope(i, t) for t in case.columns[i]})

    return of


def entropy_bonus(coef: float) -> Addition:
    """`dH / d log p = p log((1 - p) / p)` where there are two words."""

    def of(case: Case, share: Share) -> Tensor:
        def slope(i: int, t: int) -> float:
            p = math.exp(float(case.logprobs[i, t]))
            return p * math.log((1 - p) / p)

        return case.b.dense(lambda i: {t: -coef * share(case, i) * slope(i, t) for t in case.columns[i]})

    return of


def likelihood(coef: float, of_tokens: Callable[[Case], list[tuple[int, int]]]) -> Addition:
    def of(case: Case, share: Share) -> Tensor:
        cells, found = of_tokens(case), torch.zeros(case.b.mask.shape, dtype=torch.float64)
        for cell in cells:
            found[cell] = -coef / len(cells)
        return found

    return of


def positive_tokens(case: Case) -> list[tuple[int, int]]:
    return [(i, t) for i, t in case.cells if case.positive[i]]


def observed_tokens(case: Case) -> list[tuple[int, int]]:
    return [(i, t) for i, row in enumerate(case.observed.tolist()) for t, seen in enumerate(row) if seen]


def groups(name: str, ddof: int = 1) -> Callable[[Case], Tensor]:
    return lambda case: oracle.advantages(name, case.b, ddof)


def scaled_by_what_teaches(case: Case) -> Tensor:
    """`r - mean_g`, times all rows by those of groups with rewards that differ."""
    rows = list(zip(case.b.group.tolist(), case.b.rewards.tolist(), strict=True))
    teach = 0
    for group, _ in rows:
        own = [reward for other, reward in rows if other == group]
        teach += max(own) - min(own) > 1e-9
    return groups("dr_grpo")(case) * len(rows) / teach


def token_baseline(case: Case) -> Tensor:
    """Returns minus their mean over the group at the same place, where all places weigh the same; past the
    end of all others nothing is taken off."""
    returns = [slow.discounted(row, 1.0) for row in slow.placed(case.b, "both", 0.0)]
    found = [list(row) for row in returns]
    for members in case.b.members():
        second = sorted(len(returns[i]) for i in members)[-2]
        for i in members:
            for n in range(min(second, len(returns[i]))):
                own = [returns[j][n] for j in members if n < len(returns[j])]
                found[i][n] -= sum(own) / len(own)
    return slow.lay(case.b, found)


def against(baseline: Callable[[Case], list[float]]) -> Callable[[Case], Tensor]:
    def of(case: Case) -> Tensor:
        pairs = zip(case.b.rewards.tolist(), baseline(case), strict=True)
        return slow.whole(case.b, [reward - base for reward, base in pairs])

    return of


def greedy(case: Case) -> list[float]:
    return [float(x) for x in case.b.greedy]


def role_average(case: Case) -> list[float]:
    """A moving average for each role from 0, weight 0.05 on the newest, read before it is updated."""
    means, found = {True: 0.0, False: 0.0}, []
    for role, reward in zip(case.proposer, case.b.rewards.tolist(), strict=True):
        found.append(means[role])
        means[role] = 0.95 * means[role] + 0.05 * reward
    return found


def role_groups(case: Case) -> Tensor:
    ids = [999 if p else g for p, g in zip(case.proposer, case.b.group.tolist(), strict=True)]
    b = replace(case.b, group=torch.tensor(ids))
    return slow.whole(b, slow.norm_groups(b, b.rewards.tolist()))


def outcome_critic(case: Case) -> Tensor:
    gain = against(greedy)(case)
    return case.b.dense(lambda i: {t: float(case.b.probs[i, t] * gain[i, t]) for t in case.columns[i]})


def whitened(advantages: Callable[[slow.TurnBatch], Tensor]) -> Callable[[Case], Tensor]:
    return lambda case: oracle.whitened(advantages(case.b), case.b.mask, 1)


def gae(lam: float, kl_coef: float = 0.0) -> Callable[[Case], Tensor]:
    return whitened(lambda b: slow.gae(b, "both", kl_coef, 1.0, [lam] * len(b.mask)))


def process_rewards(case: Case) -> Tensor:
    return slow.prime(replace(case.b, old=case.prm, behavior=case.ref), 0.05, 1.0)


GROUPS = groups("grpo")
CLIP, CLIP_HIGHER = ppo(0.2, 0.2), ppo(0.2, 0.28)


@dataclass(frozen=True)
class Paper:
    """What is GRPO's where it is not named."""

    advantage: Callable[[Case], Tensor] = GROUPS
    slope: Callable[[Case, Tensor], Slope] = CLIP_HIGHER
    share: Share = token_mean
    adds: tuple[Addition, ...] = ()


GRPO = Paper()
PAPERS = {
    "grpo": GRPO,
    "grpo_paper": Paper(groups("grpo", 0), CLIP, seq_mean, (kl_loss("k3", 0.04),)),
    "dapo": GRPO,  # test_dapo.py holds it against the GRPO of its paper, part by part
    "dr_grpo": Paper(groups("dr_grpo"), CLIP, constant),
    "rloo": Paper(groups("rloo"), reinforce, seq_sum),
    "rloo_ppo": Paper(groups("rloo"), ppo_sequence, seq_sum),
    "gpg": Paper(scaled_by_what_teaches, reinforce),
    "luspo": Paper(slope=gspo, share=seq_sum),
    "optimal_token_baseline": Paper(token_baseline, CLIP),
    "remax": Paper(against(greedy), reinforce, seq_sum),
    "reinforce": Paper(groups("raw"), reinforce, seq_sum),
    "reinforce_pp": Paper(lambda case: slow.reinforce_pp(case.b, "rewards", 0.01, 1.0, 1), CLIP),
    "reinforce_pp_baseline": Paper(groups("reinforce_pp_baseline"), CLIP, adds=(kl_loss("k2", 0.01),)),
    "gspo": Paper(slope=gspo, share=seq_mean),
    "gspo_token": Paper(slope=gspo, share=seq_mean),
    "cispo": Paper(slope=cispo),
    "gmpo": Paper(slope=gmpo, share=seq_mean),
    "sapo": Paper(slope=sapo, share=seq_mean),
    "dppo": Paper(slope=dppo),
    "gtpo": Paper(slope=gtpo),
    "clip_cov": Paper(slope=clip_cov),
    "kl_cov": Paper(slope=kl_cov),
    "opo": Paper(groups("opo"), reinforce),
    "maxrl": Paper(lambda case: slow.maxrl(case.b), reinforce),
    "best_of_group": Paper(lambda case: slow.best_of_group(case.b), CLIP),
    "pass_at_k": Paper(lambda case: slow.pass_at_k(case.b, 4), CLIP),
    "turn_grpo": Paper(lambda case: slow.turn_grpo(case.b, (1.0, 1.0), 1), CLIP, adds=(kl_loss("k3", 0.04),)),
    "turn_return": Paper(lambda case: slow.turn_return(case.b, "both", 0.9, 1), CLIP),
    "turn_return_hybrid": Paper(lambda case: slow.turn_return_hybrid(case.b, 0.9, 0.3, 1), CLIP),
    "ppo": Paper(gae(1.0), CLIP),
    "turn_ppo": Paper(whitened(lambda b: slow.turn_gae(b, "both", 0.0, (0.95, 1.0, 1.0, 1.0))), CLIP),
    "step_ppo": Paper(whitened(lambda b: slow.step_gae(b, "both", 0.0, 0.99, 0.9)), CLIP),
    "search_r1": Paper(gae(1.0, 0.001), CLIP),
    "starpo": Paper(gae(1.0, 0.001), CLIP, adds=(entropy_bonus(0.001),)),
    "starpo_s": Paper(gae(1.0), adds=(entropy_bonus(0.001),)),
    "gigpo": Paper(lambda case: slow.gigpo(case.b, "both", 0.95, 1.0, True), CLIP, adds=(kl_loss("k3", 0.01),)),
    "rae": Paper(against(role_average), reinforce, seq_sum),
    "hierarchical": Paper(role_groups, CLIP),
    "prime": Paper(process_rewards, CLIP),
    "coderl": Paper(outcome_critic, reinforce, seq_sum),
    "vapo": Paper(
        whitened(lambda b: slow.gae(b, "both", 0.0, 1.0, slow.vapo_lam(b))), adds=(likelihood(0.1, positive_tokens),)
    ),
    "echo": Paper(adds=(likelihood(0.05, observed_tokens),)),
    "distill": Paper(slope=distill),
    "sdpo": Paper(slope=self_distillation),
    "sdft": Paper(slope=self_distillation),
    "mixed_policy": Paper(groups("dr_grpo"), mixed_policy, constant, (entropy_bonus(0.01),)),
    "retool": Paper(gae(1.0), CLIP),
}


def policy_gradient(case: Case, paper: Paper) -> Tensor:
    slope = paper.slope(case, paper.advantage(case))
    return case.b.dense(lambda i: {t: paper.share(case, i) * slope(i, t) for t in case.columns[i]})


@cache
def grpo_gradient(binary: bool) -> Tensor:
    return policy_gradient(WON if binary else CASE, GRPO)


@cache
def term_of(name: str) -> Tensor:
    """What the paper changes in the policy's gradient, and what it adds beside it, [N, L]."""
    case, paper = case_of(name), PAPERS[name]
    found = torch.zeros(case.b.mask.shape, dtype=torch.float64)
    parts = (paper.advantage, paper.slope, paper.share)
    if parts != (GRPO.advantage, GRPO.slope, GRPO.share):
        found = policy_gradient(case, paper) - grpo_gradient(case is WON)
    for add in paper.adds:
        found = found + add(case, paper.share)
    return found


def miss(name: str, algorithm: Algorithm) -> float:
    """The largest difference between this gradient minus GRPO's and the term of the preset."""
    case = case_of(name)
    gap = real_gradient(case, algorithm) - grpo_gradient(case is WON) - term_of(name)
    return float(gap.abs().max())


# Fields, and presets without them.


def differing(name: str) -> list[str]:
    """Fields in which a preset differs from `grpo`; an option is `options.part.key`."""
    preset, base, found = PRESETS[name], PRESETS["grpo"], []
    for one in (f.name for f in fields(Algorithm) if f.name not in TEXT):
        if one == "options":
            parts = [(f.name, getattr(preset.options, f.name)) for f in fields(preset.options)]
            found += [f"options.{part}.{key}" for part, own in parts for key in own]
        elif getattr(preset, one) != getattr(base, one):
            found.append(one)
    return found


def without(name: str, key: str) -> Algorithm:
    """The preset with that field as `grpo` has it. A k of 1 is what takes the k out of pass@k."""
    preset = PRESETS[name]
    if not key.startswith("options."):
        return replace(preset, **{key: getattr(PRESETS["grpo"], key)})
    _, part, option = key.split(".")
    own = {k: v for k, v in getattr(preset.options, part).items() if k != option}
    if (name, option) == ("pass_at_k", "k"):
        own = {"k": 1}
    return replace(preset, options=replace(preset.options, **{part: own}))


def acting() -> list[tuple[str, str]]:
    return [
        (name, key)
        for name in PRESETS
        for key in differing(name)
        if key not in SAMPLING and name not in UNREAD.get(key, ())
    ]


def test_every_preset_has_an_entry_and_every_entry_a_preset():
    assert set(PAPERS) == set(PRESETS)


def test_every_field_is_in_one_list():
    assert not set(SAMPLING) & set(IN_GRADIENT)
    assert {f.name for f in fields(Algorithm)} == {*TEXT, *SAMPLING, *IN_GRADIENT}
    differ = {key.split(".")[0] for name in PRESETS for key in differing(name)}
    assert differ <= {*SAMPLING, *IN_GRADIENT}


def test_sampling_fields_are_tested_elsewhere_and_leave_gradients_bit_identical():
    for file, test in SAMPLING.values():
        (path,) = Path(__file__).parents[1].rglob(file)
        text = path.read_text("utf-8")
        assert re.search(rf"^def {test}\(", text, re.MULTILINE), (file, test)
    for name in PRESETS:
        for key in set(differing(name)) & set(SAMPLING) - {"zero_variance"}:
            case = case_of(name)
            assert torch.equal(real_gradient(case, PRESETS[name]), real_gradient(case, without(name, key)))


def test_every_clip_gate_and_bound_is_active_on_some_tokens():
    """Beyond each bound on the side that cuts, beyond it on the other, and between the bounds of presets."""
    case, advantages = CASE, GRPO.advantage(CASE)
    of_tokens = [(case.ratio(*c), case.gap(*c), float(advantages[c])) for c in case.cells]
    for a_sign in (1, -1):
        ratios = [ratio for ratio, _, a in of_tokens if a * a_sign > 0]
        assert any(ratio > 1.28 for ratio in ratios)
        assert any(1.2 < ratio < 1.28 for ratio in ratios)
        assert any(0.8 < ratio < 1.2 for ratio in ratios)
        assert any(ratio < 0.8 for ratio in ratios)
        gaps = [gap for _, gap, a in of_tokens if a * a_sign > 0]
        assert min(gaps) < -0.4
        assert max(gaps) > 0.4
        assert any(0.2 < abs(gap) < 0.4 for gap in gaps)
        rows = [i for i, columns in enumerate(case.columns) if columns and signs(case, advantages)[i] == a_sign]
        assert any(case.mean_gap(i) > math.log(1 + 4e-4) for i in rows)
        assert any(case.mean_gap(i) < math.log(1 - 3e-4) for i in rows)
    trust = dppo(case, advantages)
    blocked = [float(advantages[c]) for c in case.cells if trust(*c) == 0 and advantages[c] != 0]
    assert min(blocked) < 0 < max(blocked)
    assert set(conflict_table(case, advantages)[case.b.mask].tolist()) == {0.0, 1.0, 2.0}
    assert len([c for c in covariances(case, advantages).values() if 1 < c < 5]) > 1
    chosen = drawn(case, advantages)
    assert CLIP(case, advantages)(*chosen) != 0
    assert any(case.expert[i] for i, _ in case.cells)
    lams = slow.vapo_lam(case.b)
    assert 0.0 in lams
    assert max(lams) > 0.1
    assert torch.isnan(case.old[~case.b.mask]).all()


@pytest.mark.parametrize("name", PAPERS)
def test_gradient_is_that_of_grpo_plus_the_additional_term(name):
    assert miss(name, PRESETS[name]) < EXACT


@pytest.mark.parametrize(("name", "key"), acting())
def test_missing_preset_field_changes_the_gradient(name, key):
    assert miss(name, without(name, key)) > MISSED


@pytest.mark.parametrize(("key", "name"), [(key, name) for key in UNREAD for name in sorted(UNREAD[key])])
def test_fields_unread_by_the_loss_leave_gradients_bit_identical(name, key):
    assert key in differing(name)
    case = case_of(name)
    assert torch.equal(real_gradient(case, PRESETS[name]), real_gradient(case, without(name, key)))


OTHER_VALUES = {
    "clip_low": (0.02, 0.9),
    "clip_high": (1e-4, 0.9),
    "dual_clip": (1.05,),
    "kl": ("abs",),
    "kl_coef": (0.3,),
    "correction": ("none", "tis", "icepop", "decoupled"),
    "tis_cap": (0.5,),
    "std_ddof": (0, 1),
    "entropy_coef": (0.3,),
    "aggregation": ("token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "constant"),
    "advantage": ("raw", "dr_grpo", "opo", "best_of_group", "reinforce_pp_baseline", "gae"),
}
ACCEPTING = [
    pytest.param(name, marks=pytest.mark.slow if number % 3 else [])
    for number, name in enumerate(name for name in PRESETS if name != "pass_at_k")
]


@pytest.mark.filterwarnings("ignore:k1 in the loss")
@pytest.mark.parametrize("name", ACCEPTING)
def test_every_accepted_setting_changes_the_gradient(name):
    """What a preset does not read is refused, with values of which one at least is felt on the batch."""
    case, preset = case_of(name), PRESETS[name]
    plain = real_gradient(case, preset)
    for key, values in OTHER_VALUES.items():
        found = []
        for value in values:
            if any(found):
                break
            if getattr(preset, key) == value:
                continue
            try:
                changed = resolve(AlgorithmConfig.model_validate({"preset": name, key: value}))
            except ConfigError:
                continue
            found.append(not torch.equal(real_gradient(case, changed), plain))
        assert not found or any(found), key
