"""From a batch and an algorithm to the arguments of each advantage: the functions of `spec.advantages`."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ludus.algorithms.advantages import gae_tokens, gae_turns, group_relative, off_policy, optimal, turns
from ludus.algorithms.batch import Outcomes
from ludus.algorithms.spec.algorithm import Algorithm
from ludus.algorithms.spec.words import COUNTS, SCALES, SPREADS


def _turns(outcomes: Outcomes) -> tuple[Tensor, Tensor]:
    """Turn indices and turn rewards. Raises ValueError where the batch has none."""
    if outcomes.turn is None or outcomes.turn_rewards is None:
        raise ValueError("this advantage needs the rewards of turns, and the batch has none")
    return outcomes.turn, outcomes.turn_rewards


def turn_grpo(o: Outcomes, a: Algorithm) -> Tensor:
    """Call `turns.turn_grpo`."""
    turn, turn_rewards = _turns(o)
    return turns.turn_grpo(
        rewards=o.rewards,
        turn_rewards=turn_rewards,
        turn=turn,
        group=o.group,
        mask=o.mask,
        turn_weight=a.number("advantage", "turn_weight"),
        outcome_weight=a.number("advantage", "outcome_weight"),
        ddof=a.std_ddof,
    )


def turn_return(o: Outcomes, a: Algorithm) -> Tensor:
    """Call `turns.turn_return`."""
    turn, turn_rewards = _turns(o)
    return turns.turn_return(
        rewards=o.rewards,
        turn_rewards=turn_rewards,
        turn=turn,
        group=o.group,
        mask=o.mask,
        gamma=a.number("advantage", "gamma"),
        ddof=a.std_ddof,
    )


def turn_return_hybrid(o: Outcomes, a: Algorithm) -> Tensor:
    """Call `turns.turn_return_hybrid`."""
    turn, turn_rewards = _turns(o)
    return turns.turn_return_hybrid(
        rewards=o.rewards,
        turn_rewards=turn_rewards,
        turn=turn,
        group=o.group,
        mask=o.mask,
        gamma=a.number("advantage", "gamma"),
        outcome_weight=a.number("advantage", "outcome_weight"),
        ddof=a.std_ddof,
    )


def gigpo(o: Outcomes, a: Algorithm) -> Tensor:
    """Call `turns.gigpo`."""
    turn, turn_rewards = _turns(o)
    if o.anchors is None:
        raise ValueError("gigpo needs the anchors of turns, and the batch has none")
    return turns.gigpo(
        rewards=o.rewards,
        anchors=o.anchors,
        turn=turn,
        group=o.group,
        mask=o.mask,
        turn_rewards=with_outcome(turn_rewards=turn_rewards, rewards=o.rewards, turn=turn, mask=o.mask),
        gamma=a.number("advantage", "gamma"),
        weight=a.number("advantage", "weight"),
        scale=a.word("advantage", "scale", SCALES),
        ddof=a.std_ddof,
    )


def siblings(o: Outcomes, a: Algorithm) -> Tensor:
    """Call `turns.siblings`."""
    if o.nodes is None:
        raise ValueError("siblings needs the actions that paths share, and the batch has none")
    return turns.siblings(
        rewards=o.rewards,
        nodes=o.nodes,
        turn=o.turn,
        group=o.group,
        mask=o.mask,
        scale=a.word("advantage", "scale", SCALES),
        ddof=a.std_ddof,
    )


def with_outcome(*, turn_rewards: Tensor, rewards: Tensor, turn: Tensor, mask: Tensor) -> Tensor:
    """`turn_rewards` [N, K] with `rewards` [N] added to each row's last turn."""
    last = torch.where(mask.bool(), turn, -1).amax(1)
    columns = torch.arange(turn_rewards.shape[1], device=last.device)
    return turn_rewards + torch.where(columns == last[:, None], rewards[:, None].to(last.device), 0.0)


def hierarchical(o: Outcomes, a: Algorithm) -> Tensor:
    """Call `group_relative.hierarchical`."""
    if o.proposer is None or o.proposals is None:
        raise ValueError("hierarchical needs the roles of the trajectories, and the batch has none")
    return group_relative.hierarchical(
        rewards=o.rewards, group=o.proposals, proposer=o.proposer, mask=o.mask, ddof=a.std_ddof
    )


def _baselines(o: Outcomes) -> Tensor:
    """The baseline of each row. Raises ValueError where the batch has none."""
    if o.baselines is None:
        raise ValueError("this advantage needs a baseline for each trajectory, and the batch has none")
    return o.baselines


def _values(o: Outcomes) -> Tensor:
    """The critic's values; 0 where there are none yet."""
    return torch.zeros(o.mask.shape, dtype=torch.float64) if o.values is None else o.values


def prime(o: Outcomes, a: Algorithm) -> Tensor:
    """Without a process reward model yet: that of the outcome alone."""
    none = torch.zeros(o.mask.shape, dtype=torch.float64)
    return gae_tokens.prime(
        rewards=o.rewards,
        group=o.group,
        prm_logprobs=none if o.prm_logprobs is None else o.prm_logprobs,
        ref_logprobs=none if o.ref_logprobs is None else o.ref_logprobs,
        mask=o.mask,
        beta=a.number("advantage", "beta"),
        gamma=a.number("advantage", "gamma"),
    )


def coderl(o: Outcomes, a: Algorithm) -> Tensor:
    """Without a critic yet: all tokens weigh 1."""
    ones = torch.ones(o.mask.shape, dtype=torch.float64)
    return gae_tokens.coderl(
        rewards=o.rewards,
        greedy_rewards=_baselines(o),
        outcome_probs=ones if o.outcome_probs is None else o.outcome_probs,
        mask=o.mask,
    )


def _kl_coef(o: Outcomes, a: Algorithm) -> float:
    return a.kl_coef if o.kl is not None else 0.0


def _whitened(found: Tensor, o: Outcomes, a: Algorithm) -> Tensor:
    """Over what trains of the batch, as PPO does, unless `whiten` is 0."""
    if a.number("advantage", "whiten") == 0:
        return found
    return group_relative.whiten(values=found, mask=o.mask, trains=o.trains, ddof=a.std_ddof)


def gae(o: Outcomes, a: Algorithm) -> Tensor:
    """Call `gae.gae`."""
    found = gae_tokens.gae(
        values=_values(o),
        bootstrap_values=o.bootstrap_values,
        mask=o.mask,
        rewards=o.rewards,
        turn_rewards=o.turn_rewards,
        turn=o.turn,
        kl=o.kl,
        kl_coef=_kl_coef(o, a),
        gamma=a.number("advantage", "gamma"),
        lam=a.number("advantage", "lam"),
    )
    return _whitened(found, o, a)


def step_gae(o: Outcomes, a: Algorithm) -> Tensor:
    """Call `turn_gae.step_gae`."""
    turn, turn_rewards = _turns(o)
    found = gae_turns.step_gae(
        values=_values(o),
        bootstrap_values=o.bootstrap_values,
        turn=turn,
        mask=o.mask,
        rewards=o.rewards,
        turn_rewards=turn_rewards,
        kl=o.kl,
        kl_coef=_kl_coef(o, a),
        gamma=a.number("advantage", "gamma"),
        lam=a.number("advantage", "lam"),
    )
    return _whitened(found, o, a)


def turn_gae(o: Outcomes, a: Algorithm) -> Tensor:
    """Call `turn_gae.turn_gae`."""
    turn, turn_rewards = _turns(o)
    found = gae_turns.turn_gae(
        values=_values(o),
        bootstrap_values=o.bootstrap_values,
        turn=turn,
        mask=o.mask,
        rewards=o.rewards,
        turn_rewards=turn_rewards,
        kl=o.kl,
        kl_coef=_kl_coef(o, a),
        gamma_turn=a.number("advantage", "gamma_turn"),
        lam_turn=a.number("advantage", "lam_turn"),
        gamma_token=a.number("advantage", "gamma_token"),
        lam_token=a.number("advantage", "lam_token"),
    )
    return _whitened(found, o, a)


def vapo(o: Outcomes, a: Algorithm) -> Tensor:
    """Call `gae.vapo`."""
    found = gae_tokens.vapo(
        values=_values(o),
        bootstrap_values=o.bootstrap_values,
        mask=o.mask,
        rewards=o.rewards,
        turn_rewards=o.turn_rewards,
        turn=o.turn,
        kl=o.kl,
        kl_coef=_kl_coef(o, a),
        gamma=a.number("advantage", "gamma"),
        alpha=a.number("advantage", "alpha"),
    )
    return _whitened(found, o, a)


def _both_policies(o: Outcomes) -> tuple[Tensor, Tensor]:
    """`old` and `beh`; equal ones where nobody has compared them yet."""
    if o.old_logprobs is None or o.behavior_logprobs is None:
        none = torch.zeros(o.mask.shape, dtype=torch.float64)
        return none, none
    return o.old_logprobs, o.behavior_logprobs


def _traced(o: Outcomes, a: Algorithm, function: Callable[..., Tensor], *options: str) -> Tensor:
    """A function of values and both policies, with those of its numbers that are set; all are 1 otherwise."""
    old, behavior = _both_policies(o)
    return function(
        values=_values(o),
        bootstrap_values=o.bootstrap_values,
        old_logprobs=old,
        behavior_logprobs=behavior,
        mask=o.mask,
        rewards=o.rewards,
        turn_rewards=o.turn_rewards,
        turn=o.turn,
        kl=o.kl,
        kl_coef=_kl_coef(o, a),
        **{name: a.number("advantage", name) for name in options},
    )


def vtrace(o: Outcomes, a: Algorithm) -> Tensor:
    """Call `off_policy.vtrace`."""
    return _whitened(_traced(o, a, off_policy.vtrace, "gamma", "rho_bar", "c_bar"), o, a)


def vtrace_error(o: Outcomes, a: Algorithm) -> Tensor:
    """`v_t - V_t`: how far V-trace's targets are from the values."""
    return _traced(o, a, off_policy.vtrace_targets, "gamma", "rho_bar", "c_bar") - torch.where(
        o.mask.bool(), _values(o), 0.0
    )


def retrace(o: Outcomes, a: Algorithm) -> Tensor:
    """Call `off_policy.retrace`."""
    return _whitened(_traced(o, a, off_policy.retrace, "gamma", "lam"), o, a)


def optimal_token_baseline(o: Outcomes, a: Algorithm) -> Tensor:
    """Without probabilities yet: all tokens weigh the same."""
    turn, turn_rewards = (None, None) if o.turn_rewards is None else _turns(o)
    return optimal.optimal_token_baseline(
        rewards=o.rewards,
        group=o.group,
        mask=o.mask,
        old_logprobs=o.old_logprobs,
        sum_pi_squared=o.sum_pi_squared,
        turn_rewards=turn_rewards,
        turn=turn,
        zero_tail=a.number("advantage", "zero_tail") != 0,
    )


def grpo(o: Outcomes, a: Algorithm) -> Tensor:
    """Call `group_relative.grpo`."""
    return group_relative.grpo(
        rewards=o.rewards,
        group=o.group,
        mask=o.mask,
        ddof=a.std_ddof,
        std_floor=a.number("advantage", "std_floor"),
        std_over=a.word("advantage", "std_over", SPREADS),
    )


def gpg(o: Outcomes, a: Algorithm) -> Tensor:
    """Call `group_relative.gpg`."""
    return group_relative.gpg(
        rewards=o.rewards, group=o.group, mask=o.mask, counted=a.word("advantage", "counted", COUNTS)
    )


def dr_grpo(o: Outcomes, a: Algorithm) -> Tensor:
    """Call `group_relative.dr_grpo`."""
    return group_relative.dr_grpo(rewards=o.rewards, group=o.group, mask=o.mask)


def rloo(o: Outcomes, a: Algorithm) -> Tensor:
    """Call `group_relative.rloo`."""
    return group_relative.rloo(rewards=o.rewards, group=o.group, mask=o.mask)


def remax(o: Outcomes, a: Algorithm) -> Tensor:
    """Call `group_relative.remax`."""
    return group_relative.remax(rewards=o.rewards, greedy_rewards=_baselines(o), mask=o.mask)


def rae(o: Outcomes, a: Algorithm) -> Tensor:
    """Call `group_relative.remax`."""
    return group_relative.remax(rewards=o.rewards, greedy_rewards=_baselines(o), mask=o.mask)


def opo(o: Outcomes, a: Algorithm) -> Tensor:
    """Call `group_relative.opo`."""
    return group_relative.opo(rewards=o.rewards, group=o.group, mask=o.mask)


def maxrl(o: Outcomes, a: Algorithm) -> Tensor:
    """Call `group_relative.maxrl`."""
    return group_relative.maxrl(rewards=o.rewards, group=o.group, mask=o.mask)


def best_of_group(o: Outcomes, a: Algorithm) -> Tensor:
    """Call `group_relative.best_of_group`."""
    return group_relative.best_of_group(rewards=o.rewards, group=o.group, mask=o.mask)


def pass_at_k(o: Outcomes, a: Algorithm) -> Tensor:
    """Call `group_relative.pass_at_k`."""
    return group_relative.pass_at_k(rewards=o.rewards, group=o.group, mask=o.mask, k=int(a.number("advantage", "k")))


def reinforce_pp(o: Outcomes, a: Algorithm) -> Tensor:
    """Call `gae.reinforce_pp`."""
    return gae_tokens.reinforce_pp(
        rewards=o.rewards,
        mask=o.mask,
        kl=o.kl,
        kl_coef=a.kl_coef if o.kl is not None else 0.0,
        gamma=a.number("advantage", "gamma"),
        trains=o.trains,
        ddof=a.std_ddof,
    )


def reinforce_pp_baseline(o: Outcomes, a: Algorithm) -> Tensor:
    """Call `group_relative.reinforce_pp_baseline`."""
    return group_relative.reinforce_pp_baseline(
        rewards=o.rewards, group=o.group, mask=o.mask, trains=o.trains, ddof=a.std_ddof
    )


def raw(o: Outcomes, a: Algorithm) -> Tensor:
    """Call `group_relative.raw`."""
    return group_relative.raw(rewards=o.rewards, group=o.group, mask=o.mask)
