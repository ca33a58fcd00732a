"""The tensors that the functions of this package read, as records."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ludus.algorithms.tensors import Tensor, check_shapes


@dataclass(frozen=True, slots=True)
class Outcomes:
    """The whole batch of one optimiser step, as advantages see it.

    `rewards` [N] (float64 is best); `group` [N] integer ids; `mask` [N, L], set on action tokens. All
    finished members of a group belong here, also those that a filter keeps from training: statistics of a
    group count them, those of the batch are over `trains` [N, L] alone, the action tokens that train (None:
    all). Where they are known: `turn` [N, L] the turn of each action token, counted from 0 without gaps,
    `turn_rewards` [N, K], `kl` [N, L] per token to the reference, for the placement `reward` of advantages
    that work on tokens, `values` [N, L] of a critic, V of the state before each token (None: 0),
    `bootstrap_values` [N], V of the state after the last token of rows that were cut off (0 for others; None:
    all), and `baselines` [N], what the reward of each row is compared with where that is not its group: the
    greedy episode of its task, or the moving average of its role. `anchors` [N, K] integers are equal where
    turns began in the same state;
    `nodes` [N, K] integers are equal where rows share the action of a turn;
    `proposer` [N] bool and `proposals` [N] integers say whether a row proposed a task, and which one it
    worked on otherwise. `outcome_probs` [N, L] is a critic's probability of the outcome that came,
    `prm_logprobs` and `ref_logprobs` [N, L] are those of a process reward model and of its reference.
    `old_logprobs` and `behavior_logprobs` [N, L] are what `TokenBatch` calls so (None: taken as equal);
    `sum_pi_squared` [N, L] is the sum of squared probabilities of the distribution before each token.
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
    """One microbatch, all [N, L]; column `t` speaks of token `t` itself. Raises ValueError on unequal shapes.

    `logprobs` under the weights being trained (with gradient); `old_logprobs` under the weights at the start
    of the step; `behavior_logprobs` as the engine recorded them; `ref_logprobs` under the reference. Natural
    log, of the tempered distribution; `teacher_logprobs` under a teacher. `entropy` in nats, of the full
    vocabulary, and so are `full_kl` to the reference and `teacher_kl`, both with gradient. `mask` is set on
    the action tokens that train; what stands elsewhere (NaN too) does not matter. `chosen` [N, L] bool are
    the tokens that a loss of covariances treats apart; `observed` [N, L] bool those that the environment
    wrote, whose `logprobs` a term may read; `positive` [N] bool says which trajectories succeeded, `expert`
    [N] bool which are an expert's.
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
