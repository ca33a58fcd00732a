"""Advantages with a second model trained on outcomes: implicit process rewards, outcome probabilities."""

from __future__ import annotations

from ludus.algorithms.advantages.action_tokens import action_tokens, reverse_scan
from ludus.algorithms.advantages.group_relative import rloo
from ludus.algorithms.algorithm import FRACTION, POSITIVE, AdvantageSpec, Need, Option
from ludus.algorithms.tensors import Tensor, check_group, float_dtype, groups_to_compare, numbers, select, torch


@AdvantageSpec(
    help="leave-one-out of outcomes and implicit process rewards",
    needs={Need.GROUP, Need.PROCESS_REWARD_MODEL},
    options={"beta": Option("scale of the implicit process reward", POSITIVE), "gamma": Option("discount", FRACTION)},
)
def prime(
    *,
    rewards: Tensor,
    group: Tensor,
    prm_logprobs: Tensor,
    ref_logprobs: Tensor,
    mask: Tensor,
    beta: float = 0.05,
    gamma: float = 1.0,
) -> Tensor:
    """Return implicit process rewards with the outcome, arXiv:2502.01456 (PRIME).

    With `q_t = beta (prm_logprobs - ref_logprobs)_t` and `b_i` the mean, over the other members of the group,
    of their mean `q` over action tokens (members without action tokens are excluded; 0 if none remain):
    `A_t = sum_{s >= t} gamma^(s - t) (q_s - b_i) + rloo(rewards)`. `beta` 0.05 and `gamma` 1 as in the paper.
    """
    grouped = groups_to_compare(rewards, group, mask)
    tokens = action_tokens(mask)
    ratio = tokens.take("prm_logprobs", prm_logprobs) - tokens.take("ref_logprobs", ref_logprobs)
    q = beta * ratio.to(grouped.rewards.device)
    lengths = tokens.present.sum(1).double().to(q.device)
    own = q.sum(1) / lengths.clamp(min=1)
    counts = (lengths > 0).double()
    others = grouped.sum(counts)[grouped.index] - counts
    baseline = (grouped.sum(own)[grouped.index] - own) / others.clamp(min=1)
    terms = select((q - baseline[:, None]).to(mask.device), tokens.present)
    dtype = float_dtype(rewards)
    dense = tokens.spread(reverse_scan(terms, torch.full_like(terms, gamma)), torch.float64)
    return (dense + rloo(rewards=grouped.rewards, group=group, mask=mask)).to(dtype)


@AdvantageSpec(
    help="rewards minus that of a greedy rollout, weighted by an outcome critic",
    needs={Need.GREEDY_ROLLOUT, Need.OUTCOME_CRITIC, Need.ADVANTAGE_OF_EQUAL_REWARDS},
    reads={"greedy_rewards": "baselines"},
)
def coderl(
    *, rewards: Tensor, greedy_rewards: Tensor, outcome_probs: Tensor, mask: Tensor, group: Tensor | None = None
) -> Tensor:
    """Return `q_t (r - r(greedy))`, arXiv:2207.01780 (CodeRL).

    `outcome_probs` [N, L]: at each token, the critic's probability of the actual test outcome
    (compile error, runtime error, failed or passed). `greedy_rewards` [N] as in `remax`. Raises ValueError for a
    probability outside [0, 1] (naming the row).
    """
    check_group(group, mask)
    tokens = action_tokens(mask)
    weights = tokens.take("outcome_probs", outcome_probs)
    bad = ((weights < 0) | (weights > 1)).nonzero()
    if bad.numel():
        row, index = bad[0].tolist()
        raise ValueError(f"outcome_probs of row {row} has {float(weights[row, index])}; they must be in [0, 1]")
    gain = numbers("rewards", rewards, mask) - numbers("greedy_rewards", greedy_rewards, mask)
    return tokens.spread(weights * gain[:, None], float_dtype(rewards, outcome_probs))
