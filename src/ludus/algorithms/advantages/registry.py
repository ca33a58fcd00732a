"""The advantages by name: those that a configuration knows, and all there are."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ludus.algorithms.advantages.gae import coderl, gae, prime, reinforce_pp, vapo
from ludus.algorithms.advantages.group_relative import (
    best_of_group,
    dr_grpo,
    gpg,
    grpo,
    hierarchical,
    maxrl,
    opo,
    pass_at_k,
    raw,
    reinforce_pp_baseline,
    remax,
    rloo,
    whiten,
)
from ludus.algorithms.advantages.off_policy import retrace, vtrace, vtrace_targets
from ludus.algorithms.advantages.optimal import optimal_token_baseline
from ludus.algorithms.advantages.running_baselines import rae
from ludus.algorithms.advantages.turn_gae import step_gae, turn_gae
from ludus.algorithms.advantages.turns import (
    gigpo,
    siblings,
    turn_grpo,
    turn_return,
    turn_return_hybrid,
)
from ludus.algorithms.batch import Outcomes
from ludus.algorithms.spec.algorithm import COUNTS, SCALES, SPREADS, Algorithm, number, word

AdvantageFn = Callable[[Outcomes, Algorithm], Tensor]


def _turns(outcomes: Outcomes) -> tuple[Tensor, Tensor]:
    """Turn indices and turn rewards. Raises ValueError where the batch has none."""
    if outcomes.turn is None or outcomes.turn_rewards is None:
        raise ValueError("this advantage needs the rewards of turns, and the batch has none")
    return outcomes.turn, outcomes.turn_rewards


def _turn_grpo(o: Outcomes, a: Algorithm) -> Tensor:
    turn, turn_rewards = _turns(o)
    return turn_grpo(
        rewards=o.rewards,
        turn_rewards=turn_rewards,
        turn=turn,
        group=o.group,
        mask=o.mask,
        turn_weight=number(a.options.advantage, "turn_weight", 1.0),
        outcome_weight=number(a.options.advantage, "outcome_weight", 1.0),
        ddof=a.std_ddof,
    )


def _turn_return(o: Outcomes, a: Algorithm) -> Tensor:
    turn, turn_rewards = _turns(o)
    return turn_return(
        rewards=o.rewards,
        turn_rewards=turn_rewards,
        turn=turn,
        group=o.group,
        mask=o.mask,
        gamma=number(a.options.advantage, "gamma", 1.0),
        ddof=a.std_ddof,
    )


def _turn_return_hybrid(o: Outcomes, a: Algorithm) -> Tensor:
    turn, turn_rewards = _turns(o)
    return turn_return_hybrid(
        rewards=o.rewards,
        turn_rewards=turn_rewards,
        turn=turn,
        group=o.group,
        mask=o.mask,
        gamma=number(a.options.advantage, "gamma", 0.9),
        outcome_weight=number(a.options.advantage, "outcome_weight", 0.3),
        ddof=a.std_ddof,
    )


def _gigpo(o: Outcomes, a: Algorithm) -> Tensor:
    turn, turn_rewards = _turns(o)
    if o.anchors is None:
        raise ValueError("gigpo needs the anchors of turns, and the batch has none")
    return gigpo(
        rewards=o.rewards,
        anchors=o.anchors,
        turn=turn,
        group=o.group,
        mask=o.mask,
        turn_rewards=with_outcome(turn_rewards=turn_rewards, rewards=o.rewards, turn=turn, mask=o.mask),
        gamma=number(a.options.advantage, "gamma", 0.95),
        weight=number(a.options.advantage, "weight", 1.0),
        scale=word(a.options.advantage, "scale", SCALES),
        ddof=a.std_ddof,
    )


def _siblings(o: Outcomes, a: Algorithm) -> Tensor:
    if o.nodes is None:
        raise ValueError("siblings needs the actions that paths share, and the batch has none")
    return siblings(
        rewards=o.rewards,
        nodes=o.nodes,
        turn=o.turn,
        group=o.group,
        mask=o.mask,
        scale=word(a.options.advantage, "scale", SCALES),
        ddof=a.std_ddof,
    )


def with_outcome(*, turn_rewards: Tensor, rewards: Tensor, turn: Tensor, mask: Tensor) -> Tensor:
    """`turn_rewards` [N, K] with `rewards` [N] added to each row's last turn."""
    last = torch.where(mask.bool(), turn, -1).amax(1)
    columns = torch.arange(turn_rewards.shape[1], device=last.device)
    return turn_rewards + torch.where(columns == last[:, None], rewards[:, None].to(last.device), 0.0)


def _hierarchical(o: Outcomes, a: Algorithm) -> Tensor:
    if o.proposer is None or o.proposals is None:
        raise ValueError("hierarchical needs the roles of the trajectories, and the batch has none")
    return hierarchical(
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


def _prime(o: Outcomes, a: Algorithm) -> Tensor:
    """Without a process reward model yet: that of the outcome alone."""
    none = torch.zeros(o.mask.shape, dtype=torch.float64)
    return prime(
        rewards=o.rewards,
        group=o.group,
        prm_logprobs=none if o.prm_logprobs is None else o.prm_logprobs,
        ref_logprobs=none if o.ref_logprobs is None else o.ref_logprobs,
        mask=o.mask,
        beta=number(a.options.advantage, "beta", 0.05),
        gamma=number(a.options.advantage, "gamma", 1.0),
    )


def _coderl(o: Outcomes, a: Algorithm) -> Tensor:
    """Without a critic yet: all tokens weigh 1."""
    ones = torch.ones(o.mask.shape, dtype=torch.float64)
    return coderl(
        rewards=o.rewards,
        greedy_rewards=_baselines(o),
        outcome_probs=ones if o.outcome_probs is None else o.outcome_probs,
        mask=o.mask,
    )


def _kl_coef(o: Outcomes, a: Algorithm) -> float:
    return a.kl_coef if o.kl is not None else 0.0


def _whitened(found: Tensor, o: Outcomes, a: Algorithm) -> Tensor:
    """Over what trains of the batch, as PPO does, unless `whiten` is 0."""
    if number(a.options.advantage, "whiten", 1.0) == 0:
        return found
    return whiten(values=found, mask=o.mask, trains=o.trains, ddof=a.std_ddof)


def _gae(o: Outcomes, a: Algorithm) -> Tensor:
    found = gae(
        values=_values(o),
        bootstrap_values=o.bootstrap_values,
        mask=o.mask,
        rewards=o.rewards,
        turn_rewards=o.turn_rewards,
        turn=o.turn,
        kl=o.kl,
        kl_coef=_kl_coef(o, a),
        gamma=number(a.options.advantage, "gamma", 1.0),
        lam=number(a.options.advantage, "lam", 1.0),
    )
    return _whitened(found, o, a)


def _step_gae(o: Outcomes, a: Algorithm) -> Tensor:
    turn, turn_rewards = _turns(o)
    found = step_gae(
        values=_values(o),
        bootstrap_values=o.bootstrap_values,
        turn=turn,
        mask=o.mask,
        rewards=o.rewards,
        turn_rewards=turn_rewards,
        kl=o.kl,
        kl_coef=_kl_coef(o, a),
        gamma=number(a.options.advantage, "gamma", 1.0),
        lam=number(a.options.advantage, "lam", 1.0),
    )
    return _whitened(found, o, a)


def _turn_gae(o: Outcomes, a: Algorithm) -> Tensor:
    turn, turn_rewards = _turns(o)
    found = turn_gae(
        values=_values(o),
        bootstrap_values=o.bootstrap_values,
        turn=turn,
        mask=o.mask,
        rewards=o.rewards,
        turn_rewards=turn_rewards,
        kl=o.kl,
        kl_coef=_kl_coef(o, a),
        gamma_turn=number(a.options.advantage, "gamma_turn", 1.0),
        lam_turn=number(a.options.advantage, "lam_turn", 1.0),
        gamma_token=number(a.options.advantage, "gamma_token", 1.0),
        lam_token=number(a.options.advantage, "lam_token", 1.0),
    )
    return _whitened(found, o, a)


def _vapo(o: Outcomes, a: Algorithm) -> Tensor:
    found = vapo(
        values=_values(o),
        bootstrap_values=o.bootstrap_values,
        mask=o.mask,
        rewards=o.rewards,
        turn_rewards=o.turn_rewards,
        turn=o.turn,
        kl=o.kl,
        kl_coef=_kl_coef(o, a),
        gamma=number(a.options.advantage, "gamma", 1.0),
        alpha=number(a.options.advantage, "alpha", 0.05),
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
        **{name: number(a.options.advantage, name, 1.0) for name in options},
    )


def _vtrace(o: Outcomes, a: Algorithm) -> Tensor:
    return _whitened(_traced(o, a, vtrace, "gamma", "rho_bar", "c_bar"), o, a)


def _vtrace_error(o: Outcomes, a: Algorithm) -> Tensor:
    """`v_t - V_t`: how far V-trace's targets are from the values."""
    return _traced(o, a, vtrace_targets, "gamma", "rho_bar", "c_bar") - torch.where(
        o.mask.bool(), _values(o), 0.0
    )


def _retrace(o: Outcomes, a: Algorithm) -> Tensor:
    return _whitened(_traced(o, a, retrace, "gamma", "lam"), o, a)


def _optimal_token_baseline(o: Outcomes, a: Algorithm) -> Tensor:
    """Without probabilities yet: all tokens weigh the same."""
    turn, turn_rewards = (None, None) if o.turn_rewards is None else _turns(o)
    return optimal_token_baseline(
        rewards=o.rewards,
        group=o.group,
        mask=o.mask,
        old_logprobs=o.old_logprobs,
        sum_pi_squared=o.sum_pi_squared,
        turn_rewards=turn_rewards,
        turn=turn,
        zero_tail=number(a.options.advantage, "zero_tail", 1.0) != 0,
    )


ADVANTAGES: dict[str, AdvantageFn] = {
    "vtrace": _vtrace,
    "retrace": _retrace,
    "gae": _gae,
    "step_gae": _step_gae,
    "turn_gae": _turn_gae,
    "vapo": _vapo,
    "grpo": lambda o, a: grpo(
        rewards=o.rewards,
        group=o.group,
        mask=o.mask,
        ddof=a.std_ddof,
        std_floor=number(a.options.advantage, "std_floor", 0.0),
        std_over=word(a.options.advantage, "std_over", SPREADS),
    ),
    "gpg": lambda o, a: gpg(
        rewards=o.rewards,
        group=o.group,
        mask=o.mask,
        counted=word(a.options.advantage, "counted", COUNTS),
    ),
    "optimal_token_baseline": _optimal_token_baseline,
    "dr_grpo": lambda o, a: dr_grpo(rewards=o.rewards, group=o.group, mask=o.mask),
    "rloo": lambda o, a: rloo(rewards=o.rewards, group=o.group, mask=o.mask),
    "remax": lambda o, a: remax(rewards=o.rewards, greedy_rewards=_baselines(o), mask=o.mask),
    "rae": lambda o, a: remax(rewards=o.rewards, greedy_rewards=_baselines(o), mask=o.mask),
    "hierarchical": _hierarchical,
    "gigpo": _gigpo,
    "siblings": _siblings,
    "prime": _prime,
    "coderl": _coderl,
    "opo": lambda o, a: opo(rewards=o.rewards, group=o.group, mask=o.mask),
    "maxrl": lambda o, a: maxrl(rewards=o.rewards, group=o.group, mask=o.mask),
    "best_of_group": lambda o, a: best_of_group(rewards=o.rewards, group=o.group, mask=o.mask),
    "pass_at_k": lambda o, a: pass_at_k(
        rewards=o.rewards, group=o.group, mask=o.mask, k=int(number(a.options.advantage, "k", 4))
    ),
    "reinforce_pp": lambda o, a: reinforce_pp(
        rewards=o.rewards,
        mask=o.mask,
        kl=o.kl,
        kl_coef=a.kl_coef if o.kl is not None else 0.0,
        gamma=number(a.options.advantage, "gamma", 1.0),
        trains=o.trains,
        ddof=a.std_ddof,
    ),
    "reinforce_pp_baseline": lambda o, a: reinforce_pp_baseline(
        rewards=o.rewards, group=o.group, mask=o.mask, trains=o.trains, ddof=a.std_ddof
    ),
    "turn_grpo": _turn_grpo,
    "turn_return": _turn_return,
    "turn_return_hybrid": _turn_return_hybrid,
    "raw": lambda o, a: raw(rewards=o.rewards, group=o.group, mask=o.mask),
}
"""What a configuration may name: where the arguments come from."""

VALUE_ERRORS: dict[str, AdvantageFn] = {"vtrace_error": _vtrace_error}
"""What a critic's targets add to its values, where that is not an advantage."""

FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "gpg": gpg,
    "optimal_token_baseline": optimal_token_baseline,
    "rloo": rloo,
    "remax": remax,
    "opo": opo,
    "reinforce_pp": reinforce_pp,
    "reinforce_pp_baseline": reinforce_pp_baseline,
    "raw": raw,
    "gae": gae,
    "step_gae": step_gae,
    "turn_gae": turn_gae,
    "vapo": vapo,
    "turn_grpo": turn_grpo,
    "turn_return": turn_return,
    "turn_return_hybrid": turn_return_hybrid,
    "gigpo": gigpo,
    "siblings": siblings,
    "maxrl": maxrl,
    "rae": rae,
    "hierarchical": hierarchical,
    "best_of_group": best_of_group,
    "pass_at_k": pass_at_k,
    "prime": prime,
    "coderl": coderl,
    "vtrace": vtrace,
    "retrace": retrace,
}
"""Every advantage as a pure function of tensors, keyword only, to [N, L]."""
