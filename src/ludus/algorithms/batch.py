"""Records of tensors: the inputs of advantages and losses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ludus.algorithms.tensors import Tensor, check_shapes


@dataclass(frozen=True, slots=True)
class Outcomes:
    """The whole batch of one optimiser step, as input of advantages.

    All finished members of a group belong here, also those that a filter keeps from training: group statistics count
    them, batch statistics run over `trains`. Fields that are not known are None.

    - `rewards` [N], best float64; `group` [N] integer ids; `mask` [N, L], set on action tokens.
    - `trains` [N, L]: the action tokens that train (None: all).
    - `turn` [N, L]: the turn of each action token, from 0 without gaps; `turn_rewards` [N, K].
    - `kl` [N, L]: per token to the reference, for the placement `reward` of advantages that work on tokens.
    - `values` [N, L]: V of the state before each token, by a critic; `bootstrap_values` [N]: V of the state after the
      last token of truncated rows, 0 for others.
    - `baselines` [N]: the reward of the greedy episode of the task, or the moving average of the role.
    - `anchors` [N, K] integers, equal for turns that began in the same state; `nodes` [N, K] integers, equal for rows
      that share the action of a turn.
    - `proposer` [N] bool: the row proposed a task; `proposals` [N] integers: the proposal that it worked on.
    - `outcome_probs` [N, L]: a critic's probability of the actual outcome; `prm_logprobs` and `ref_logprobs` [N, L]
      of a process reward model and its reference.
    - `old_logprobs` and `behavior_logprobs` [N, L] as in `TokenBatch`; `sum_pi_squared` [N, L]: the sum of squared
      probabilities of the distribution before each token.
    """

    rewards: Tensor
    group: Tensor
    mask: Tensor
    turn: Tensor | None = None
    turn_rewards: Tensor | None = None
    kl: Tensor | None = None
    values: Tensor | None = None
    bootstrap_values: Tensor | None = None
    baselines: Tensor | None = None
    anchors: Tensor | None = None
    nodes: Tensor | None = None
    proposer: Tensor | None = None
    proposals: Tensor | None = None
    outcome_probs: Tensor | None = None
    prm_logprobs: Tensor | None = None
    ref_logprobs: Tensor | None = None
    old_logprobs: Tensor | None = None
    behavior_logprobs: Tensor | None = None
    sum_pi_squared: Tensor | None = None
    trains: Tensor | None = None


NEUTRAL = {
    "values": 0.0,
    "prm_logprobs": 0.0,
    "ref_logprobs": 0.0,
    "outcome_probs": 1.0,
    "old_logprobs": 0.0,
    "behavior_logprobs": 0.0,
}
"""What functions that require an estimate [N, L] get before a model has computed it."""


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """One microbatch, all [N, L] unless noted; column `t` belongs to token `t`. Raises ValueError on unequal shapes.

    Log-probabilities are natural, of the tempered distribution. Positions off the mask (NaN too) do not matter.

    - `logprobs` under the weights being trained (with gradient), `old_logprobs` under those at the start of the step,
      `behavior_logprobs` as the engine recorded them, `ref_logprobs` under the reference, `teacher_logprobs` under a
      teacher.
    - `mask`: the action tokens that train.
    - `entropy` in nats, `full_kl` to the reference and `teacher_kl`: over the full vocabulary, with gradient.
    - `chosen` bool: the tokens that a covariance loss treats apart; `observed` bool: tokens that the environment wrote.
    - `positive` [N] bool: successful trajectories; `expert` [N] bool: demonstrations.
    """

    logprobs: Tensor
    old_logprobs: Tensor
    behavior_logprobs: Tensor
    advantages: Tensor
    mask: Tensor
    ref_logprobs: Tensor | None = None
    entropy: Tensor | None = None
    chosen: Tensor | None = None
    teacher_logprobs: Tensor | None = None
    full_kl: Tensor | None = None
    teacher_kl: Tensor | None = None
    observed: Tensor | None = None
    positive: Tensor | None = None
    expert: Tensor | None = None

    def __post_init__(self) -> None:
        check_shapes(
            self.mask,
            logprobs=self.logprobs,
            old_logprobs=self.old_logprobs,
            behavior_logprobs=self.behavior_logprobs,
            advantages=self.advantages,
        )
        if self.ref_logprobs is not None:
            check_shapes(self.mask, ref_logprobs=self.ref_logprobs)
        if self.entropy is not None:
            check_shapes(self.mask, entropy=self.entropy)


class Cut(NamedTuple):
    """The tokens [N, L] bool whose policy gradient a clip cuts off.

    `high` (A > 0 and the ratio above the interval), `low` (A < 0 and the ratio below it), `dual` (A < 0 and
    the ratio above `dual_clip`).
    """

    low: Tensor
    high: Tensor
    dual: Tensor
