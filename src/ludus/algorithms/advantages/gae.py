"""Advantages with a critic: by token, by turn, and corrected for another behaviour policy.

`values` [N, L]: column `t` is V of the state before token `t`; `bootstrap_values` [N]: V after a row's last action
token, 0 (None: for every row) if the episode terminated. Rewards are placed by `token_rewards`. All return [N, L] in
the widest float type of rewards and values, without gradient; `group` is only validated. V-trace and Retrace contain
`w = exp(old_logprobs - behavior_logprobs)`, clamped: an additional correction would apply it twice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypedDict, Unpack

from ludus.algorithms.advantages.action_tokens import (
    ActionTokens,
    Turns,
    action_tokens,
    reverse_scan,
    rewards_of_turns,
    shift_left,
    token_rewards,
)
from ludus.algorithms.advantages.group_relative import whiten as whiten_tokens
from ludus.algorithms.algorithm import DEFAULTS_OF, FRACTION, POSITIVE, SWITCH, AdvantageSpec, Need, Option
from ludus.algorithms.tensors import (
    Tensor,
    check_group,
    check_shapes,
    clamped_ratio,
    float_dtype,
    numbers,
    select,
    torch,
)


class _Critic(TypedDict):
    values: Tensor
    mask: Tensor


class _OffPolicy(_Critic):
    old_logprobs: Tensor
    behavior_logprobs: Tensor


class CriticInputs(_Critic, total=False):
    """The inputs of every advantage with a critic."""

    rewards: Tensor | None
    turn_rewards: Tensor | None
    turn: Tensor | None
    bootstrap_values: Tensor | None
    group: Tensor | None
    kl: Tensor | None
    kl_coef: float


class OffPolicyInputs(_OffPolicy, CriticInputs):
    """The inputs of advantages that correct for the behaviour policy."""


DEFAULTS_OF[CriticInputs] = DEFAULTS_OF[OffPolicyInputs] = token_rewards

_CRITIC = {
    "whiten": Option("1: whiten over the batch", SWITCH, default=1.0),
    "bootstrap": Option("1: bootstrap the value of a truncated episode", SWITCH, default=0.0),
}
_GAMMA_LAM = {"gamma": Option("discount", FRACTION), "lam": Option("lambda of GAE", FRACTION)}
_LAM_CRITIC = Option("lambda of the critic's targets", FRACTION, default=1.0)
_VTRACE = {
    "gamma": Option("discount", FRACTION),
    "rho_bar": Option("upper bound of the ratio of a temporal difference", POSITIVE),
    "c_bar": Option("upper bound of the ratio of a trace", POSITIVE),
}
_OFF_POLICY = {Need.OPTIONAL_TURN_REWARDS, Need.CRITIC, Need.BATCH_STATISTICS, Need.TOKEN_KL, Need.BEHAVIOR_RATIO}


def _whitened(*, advantages: Tensor, mask: Tensor, ddof: int, whiten: bool, trains: Tensor | None = None) -> Tensor:
    """Whiten over the training tokens of the batch, as PPO does, if the option `whiten` is set."""
    return whiten_tokens(values=advantages, mask=mask, trains=trains, ddof=ddof) if whiten else advantages


def _above_values(*, advantages: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """Subtract the values from targets; `value_targets` adds them back."""
    return advantages - torch.where(mask.bool(), values, 0.0)


@AdvantageSpec(
    help="generalised advantage estimation over tokens",
    needs={Need.OPTIONAL_TURN_REWARDS, Need.CRITIC, Need.BATCH_STATISTICS, Need.TOKEN_KL},
    options=_GAMMA_LAM | {"lam_critic": _LAM_CRITIC} | _CRITIC,
    critic_targets="gae",
    finish=_whitened,
)
def gae(*, gamma: float = 1.0, lam: float | Tensor = 1.0, **inputs: Unpack[CriticInputs]) -> Tensor:
    """Return `A_t = delta_t + gamma lam A_next`, `delta_t = r_t + gamma V_next - V_t`, arXiv:1506.02438 (GAE).

    "Next" is the next action token: an observation is neither a step nor a discount. `gamma` and `lam` 1 as in verl and
    OpenRLHF; TRL takes `lam` 0.95. `lam` may be [N]. With `turn_rewards` this is MT-PPO (arXiv:2505.11821).
    """
    steps = _token_steps(inputs)
    mask, delta = steps.tokens.mask, steps.delta(gamma)
    per_row = torch.as_tensor(lam, dtype=torch.float64, device=mask.device)
    decay = gamma * (numbers("lam", per_row, mask)[:, None] if per_row.ndim else per_row)
    return steps.tokens.spread(reverse_scan(delta, decay.expand(delta.shape)), steps.dtype)


@AdvantageSpec(
    help="GAE with a length-adaptive lambda",
    needs={Need.OPTIONAL_TURN_REWARDS, Need.CRITIC, Need.PRETRAINED_CRITIC, Need.BATCH_STATISTICS, Need.TOKEN_KL},
    options={
        "gamma": Option("discount", FRACTION),
        "alpha": Option("lambda is 1 - 1 / (alpha * length)", POSITIVE),
        "lam_critic": _LAM_CRITIC,
    }
    | _CRITIC,
    critic_targets="gae",
    finish=_whitened,
)
def vapo(*, gamma: float = 1.0, alpha: float = 0.05, **inputs: Unpack[CriticInputs]) -> Tensor:
    """Return `gae` with `lam = 1 - 1 / (alpha n_i)` in [0, 1], `n_i` the row's action tokens, arXiv:2504.05118.

    The clamp applies below `1 / alpha` tokens (20): the paper's formula is negative there. This is the
    advantage of the policy; the critic uses `lam = 1`: `value_targets` of `gae(lam=1.0)`.
    """
    lengths = inputs["mask"].bool().sum(1).double()
    return gae(gamma=gamma, lam=(1 - 1 / (alpha * lengths.clamp(min=1))).clamp(0.0, 1.0), **inputs)


def value_targets(*, advantages: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """Return the targets of a critic, [N, L]: `A_t + V_t` on action tokens, 0 elsewhere, without gradient.

    For the advantages of `gae`, `step_gae` and `turn_gae`, before whitening. (`step_gae` uses V at the first
    action token of each turn only: train its critic there.) For V-trace see `vtrace_targets`.
    """
    check_shapes(mask, advantages=advantages, values=values)
    tokens = action_tokens(mask)
    total = tokens.take("advantages", advantages) + tokens.take("values", values)
    return tokens.spread(total, float_dtype(advantages, values))


@AdvantageSpec(
    help="GAE with a turn as the step",
    needs={Need.OPTIONAL_TURN_REWARDS, Need.CRITIC, Need.TURN_VALUES, Need.BATCH_STATISTICS, Need.TOKEN_KL},
    options=_GAMMA_LAM | _CRITIC,
    finish=_whitened,
)
def step_gae(*, gamma: float = 1.0, lam: float = 1.0, **inputs: Unpack[CriticInputs]) -> Tensor:
    """Return GAE with a turn as the step and one advantage for all its tokens, arXiv:2512.17008 (turn-PPO).

    With `V_k` the value at the first action token of turn `k`: `delta_k = r_k + gamma V_{k+1} - V_k`,
    `A_k = delta_k + gamma lam A_{k+1}`; turn rewards include the KL penalty of all tokens. `gamma` and `lam` 1;
    the paper's best are near 0.99 and 0.9.
    """
    turns, reward, penalty = _turn_steps(inputs)
    found = _over_turns(turns, reward - turns.sum_per_turn(penalty), inputs, (gamma, lam))
    return turns.tokens.spread(turns.spread(found), _dtype(inputs))


@AdvantageSpec(
    help="GAE within turns and between them",
    needs={Need.OPTIONAL_TURN_REWARDS, Need.CRITIC, Need.BATCH_STATISTICS, Need.TOKEN_KL},
    options={
        "gamma_turn": Option("discount between turns", FRACTION),
        "lam_turn": Option("lambda between turns", FRACTION),
        "gamma_token": Option("discount between the tokens of a turn", FRACTION),
        "lam_token": Option("lambda between the tokens of a turn", FRACTION),
    }
    | _CRITIC,
    finish=_whitened,
)
def turn_gae(
    *,
    gamma_turn: float = 1.0,
    lam_turn: float = 1.0,
    gamma_token: float = 1.0,
    lam_token: float = 1.0,
    **inputs: Unpack[CriticInputs],
) -> Tensor:
    """Return bi-level GAE: over turns first, then back through the tokens of each, arXiv:2510.16907 (VAGEN).

    Turns as in `step_gae`, with `gamma_turn` and `lam_turn`. The last token of turn `k` has `A_k`; an
    earlier one `gamma_token V_{t+1} - V_t + gamma_token lam_token A_{t+1}`. A turn's reward enters once, at
    the level of turns. The KL penalty of the last token of a turn is added to the turn reward, that of an
    earlier token to its own term. All four default to 1; VAGEN's example runs take `gamma_turn` 0.95.
    """
    turns, reward, penalty = _turn_steps(inputs)
    tokens = turns.tokens
    reward = reward - turns.sum_per_turn(select(penalty, turns.closes))
    of_turns = _over_turns(turns, reward, inputs, (gamma_turn, lam_turn))
    current, following = values_and_next(tokens, inputs["values"], inputs.get("bootstrap_values"))
    inside = gamma_token * following - current - penalty
    terms = torch.where(turns.closes, turns.spread(of_turns), select(inside, tokens.present))
    decay = select(torch.full_like(terms, gamma_token * lam_token), tokens.present & ~turns.closes)
    return tokens.spread(reverse_scan(terms, decay), _dtype(inputs))


@AdvantageSpec(
    help="V-trace", needs=_OFF_POLICY, options=_VTRACE | _CRITIC, critic_targets="vtrace_error", finish=_whitened
)
def vtrace(
    *, gamma: float = 1.0, rho_bar: float = 1.0, c_bar: float = 1.0, **inputs: Unpack[OffPolicyInputs]
) -> Tensor:
    """Return `A_t = rho_t (r_t + gamma v_next - V_t)`, arXiv:1802.01561 (IMPALA), [N, L].

    `rho = min(rho_bar, w)`, `c = min(c_bar, w)`; `v` are the `vtrace_targets`, and `v_next` after the last
    action token is the bootstrap. Both bounds 1 as in the paper. If `w = 1` it equals `gae(gamma, 1)`.
    """
    steps, weights = _token_steps(inputs), _weights(inputs)
    rho = weights.clamp(max=rho_bar)
    excess = reverse_scan(rho * steps.delta(gamma), gamma * weights.clamp(max=c_bar))
    ahead = steps.following + select(shift_left(excess, 0.0), steps.tokens.present)
    return steps.tokens.spread(rho * (steps.reward + gamma * ahead - steps.current), steps.dtype)


@AdvantageSpec(help="Retrace", needs=_OFF_POLICY, options=_GAMMA_LAM | _CRITIC, finish=_whitened)
def retrace(*, gamma: float = 1.0, lam: float = 1.0, **inputs: Unpack[OffPolicyInputs]) -> Tensor:
    """Return `A_t = sum_{s >= t} gamma^(s-t) (prod_{u=t+1..s} lam min(1, w_u)) delta_s`, arXiv:1606.02647 (Retrace).

    `delta_s = r_s + gamma V_next - V_s`; the temporal difference of token `t` itself is unweighted. `lam` 1 as in the
    paper. If `w >= 1` it equals `gae(gamma, lam)`.
    """
    steps, weights = _token_steps(inputs), _weights(inputs)
    found = reverse_scan(steps.delta(gamma), gamma * lam * shift_left(weights.clamp(max=1.0), 0.0))
    return steps.tokens.spread(found, steps.dtype)


@AdvantageSpec(
    name="vtrace_error",
    help="targets of V-trace minus the values",
    needs=_OFF_POLICY,
    options=_VTRACE | _CRITIC,
    finish=_above_values,
    selectable=False,
)
def vtrace_targets(
    *, gamma: float = 1.0, rho_bar: float = 1.0, c_bar: float = 1.0, **inputs: Unpack[OffPolicyInputs]
) -> Tensor:
    """Return `v_t = V_t + delta_t + gamma c_t (v_next - V_next)`, arXiv:1802.01561: the targets of V-trace's critic.

    `delta_t = rho_t (r_t + gamma V_next - V_t)`; `v_next = V_next` (the bootstrap) after the last action token.
    """
    steps, weights = _token_steps(inputs), _weights(inputs)
    excess = reverse_scan(weights.clamp(max=rho_bar) * steps.delta(gamma), gamma * weights.clamp(max=c_bar))
    return steps.tokens.spread(steps.current + excess, steps.dtype)


def values_and_next(tokens: ActionTokens, values: Tensor, bootstrap_values: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return V before each action token and before the next action token, both [N, T]."""
    current = tokens.take("values", values)
    return current, tokens.following(current, _bootstrap(current, bootstrap_values, tokens.mask))


@dataclass(frozen=True, slots=True)
class _TokenSteps:
    """Action tokens with their rewards, V before each (`current`) and before the next (`following`), all [N, T]."""

    tokens: ActionTokens
    reward: Tensor
    current: Tensor
    following: Tensor
    dtype: torch.dtype

    def delta(self, gamma: float) -> Tensor:
        """Return the temporal differences, [N, T]."""
        return self.reward + gamma * self.following - self.current


def _check(inputs: CriticInputs) -> None:
    """Raise TypeError for an unknown input, ValueError for `group` of a wrong shape."""
    if unknown := inputs.keys() - OffPolicyInputs.__annotations__.keys():
        raise TypeError(f"unexpected keyword arguments: {', '.join(sorted(unknown))}")
    check_group(inputs.get("group"), inputs["mask"])


def _token_steps(inputs: CriticInputs) -> _TokenSteps:
    _check(inputs)
    placed = token_rewards(
        mask=inputs["mask"],
        rewards=inputs.get("rewards"),
        turn_rewards=inputs.get("turn_rewards"),
        turn=inputs.get("turn"),
        kl=inputs.get("kl"),
        kl_coef=inputs.get("kl_coef", 0.0),
    )
    tokens = action_tokens(inputs["mask"])
    current, following = values_and_next(tokens, inputs["values"], inputs.get("bootstrap_values"))
    return _TokenSteps(tokens, tokens.take("rewards", placed), current, following, _dtype(inputs))


def _turn_steps(inputs: CriticInputs) -> tuple[Turns, Tensor, Tensor]:
    """Return the turns, their rewards [N, K], and the KL penalty of each action token [N, T]."""
    _check(inputs)
    mask, kl = inputs["mask"], inputs.get("kl")
    turns, reward = rewards_of_turns(mask, inputs.get("turn"), inputs.get("turn_rewards"), inputs.get("rewards"))
    none = torch.zeros_like(turns.index, dtype=torch.float64)
    return turns, reward, none if kl is None else inputs.get("kl_coef", 0.0) * turns.tokens.take("kl", kl)


def _dtype(inputs: CriticInputs) -> torch.dtype:
    return float_dtype(inputs.get("rewards"), inputs.get("turn_rewards"), inputs["values"])


def _over_turns(turns: Turns, reward: Tensor, inputs: CriticInputs, gamma_and_lam: tuple[float, float]) -> Tensor:
    """Return GAE with a turn as the step, [N, K]; 0 for turns not reached."""
    gamma, lam = gamma_and_lam
    current = turns.at_turn_start(turns.tokens.take("values", inputs["values"]))
    after = _bootstrap(current, inputs.get("bootstrap_values"), turns.tokens.mask)
    following = torch.where(turns.last, after[:, None], shift_left(current, 0.0))
    delta = select(reward + gamma * following - current, turns.reached)
    return reverse_scan(delta, torch.full_like(delta, gamma * lam))


def _bootstrap(current: Tensor, values: Tensor | None, mask: Tensor) -> Tensor:
    """Return V after the last action token of each row, [N]."""
    return current.new_zeros(current.shape[0]) if values is None else numbers("bootstrap_values", values, mask)


def _weights(inputs: OffPolicyInputs) -> Tensor:
    """Return `w` at the action tokens, [N, T], 0 past the end of a row."""
    tokens = action_tokens(inputs["mask"])
    old = tokens.take("old_logprobs", inputs["old_logprobs"])
    behavior = tokens.take("behavior_logprobs", inputs["behavior_logprobs"])
    return select(clamped_ratio(old - behavior), tokens.present)
