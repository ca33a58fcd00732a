"""Turn-level advantages without a critic: each turn is normalised over comparable turns of its group.

`turn` [N, L] integers counts from 0 on action tokens (None: each run of action tokens is a turn); `turn_rewards` [N, K]
is read up to a row's last turn. A *normalised* number is `(x - mean) / (std + eps)` over the compared numbers
(`scale="none"`: `x - mean`), with the `ddof` of `grpo`, exactly 0 if they are equal up to rounding or if there is only
one. A member reaches a turn if it has an action token in it. All return [N, L] in the widest float type of the rewards.
They raise ValueError for wrong shapes, non-finite numbers (naming the row), and groups of one row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ludus.algorithms.advantages.action_tokens import Turns, reverse_scan, rewards_of_turns, turns_of
from ludus.algorithms.algorithm import FRACTION, NOT_NEGATIVE, AdvantageSpec, Need, Option
from ludus.algorithms.tensors import Tensor, float_dtype, groups_to_compare, reward_rtol, select, torch

Scale = Literal["std", "none"]
SCALES = ("std", "none")
COMPARES_TURNS = {Need.GROUP, Need.STD, Need.TURN_REWARDS, Need.OPTIONAL_TURN_REWARDS, Need.ADVANTAGE_OF_EQUAL_REWARDS}


@dataclass(frozen=True, slots=True)
class _Normaliser:
    """Normalisation within groups; relative differences up to `noise` count as 0."""

    ddof: int
    eps: float
    scale: Scale
    noise: float

    def __call__(self, values: Tensor, ids: Tensor) -> Tensor:
        """Return `values` [P], normalised over entries with equal rows of `ids` [P, D]."""
        if not values.numel():
            return values
        unique, index = torch.unique(ids, dim=0, return_inverse=True)
        empty = torch.zeros(len(unique), dtype=torch.float64, device=values.device)
        count = empty.scatter_add(0, index, torch.ones_like(values))
        centred = values - (empty.scatter_add(0, index, values) / count)[index]
        highest = empty.scatter_reduce(0, index, values, "amax", include_self=False)
        lowest = empty.scatter_reduce(0, index, values, "amin", include_self=False)
        size = torch.maximum(highest.abs(), lowest.abs()).clamp(min=1.0)
        equal = (highest - lowest <= self.noise * size) | (count == 1)
        if self.scale == "std":
            squares = empty.scatter_add(0, index, centred.square())
            centred = centred / ((squares / (count - self.ddof).clamp(min=1)).sqrt() + self.eps)[index]
        return torch.where(equal[index], 0.0, centred)

    def rows(self, values: Tensor, group: Tensor) -> Tensor:
        """Return `values` [N], normalised within each group."""
        return self(values, group[:, None])

    def per_turn(self, values: Tensor, group: Tensor, turns: Turns) -> Tensor:
        """Return `values` [N, K], each turn normalised over the group's members that reached it."""
        number = torch.arange(values.shape[1], device=values.device).expand(values.shape)
        return self.cells(values, torch.stack([group[:, None].expand(values.shape), number], -1), turns.reached)

    def cells(self, values: Tensor, ids: Tensor, mask: Tensor) -> Tensor:
        """Return `values` [N, K], normalised over entries of `mask` [N, K] with equal `ids` [N, K, D]; 0 elsewhere."""
        normalised = torch.zeros_like(values)
        normalised[mask] = self(values[mask], ids[mask])
        return normalised


@AdvantageSpec(
    help="turn rewards and outcomes, each compared in the group",
    needs=COMPARES_TURNS,
    options={
        "turn_weight": Option("weight of the turn-level term", NOT_NEGATIVE),
        "outcome_weight": Option("weight of the outcome", NOT_NEGATIVE),
    },
)
def turn_grpo(
    *,
    rewards: Tensor,
    turn_rewards: Tensor,
    group: Tensor,
    mask: Tensor,
    turn: Tensor | None = None,
    turn_weight: float = 1.0,
    outcome_weight: float = 1.0,
    ddof: int = 1,
    eps: float = 1e-6,
) -> Tensor:
    """Return turn reward plus outcome, each normalised in the group, arXiv:2505.11821 (MT-GRPO).

    Turn `k` of trajectory `i` gets `turn_weight norm(r[:, k])_i + outcome_weight norm(rewards)_i`; its
    last turn gets only the outcome term. Turn `k` is compared over all members that reached it, including those
    for which it is the last; the term is 0 if only one member reached it. Weights 1 as in the paper. (arXiv:2604.02869
    writes the first term as the sum over the remaining turns.)
    """
    outcome = _checked_rewards(rewards, group, mask)
    ids = group.to(mask.device)
    turns, of_turns = rewards_of_turns(mask, turn, turn_rewards, None)
    norm = _Normaliser(ddof, eps, "std", _rounding_error(rewards))
    norm_turns = _Normaliser(ddof, eps, "std", _rounding_error(turn_rewards))
    advantage = turn_weight * norm_turns.per_turn(of_turns, ids, turns)
    advantage = torch.where(turns.last, 0.0, advantage) + outcome_weight * norm.rows(outcome, ids)[:, None]
    return _expand_to_tokens(turns, advantage, rewards, turn_rewards)


@AdvantageSpec(
    help="returns of turns, compared in the group",
    needs=COMPARES_TURNS,
    options={"gamma": Option("discount", FRACTION)},
)
def turn_return(
    *,
    turn_rewards: Tensor | None = None,
    group: Tensor,
    mask: Tensor,
    turn: Tensor | None = None,
    rewards: Tensor | None = None,
    gamma: float = 1.0,
    ddof: int = 1,
    eps: float = 1e-6,
) -> Tensor:
    """Return `R[i, k] = sum_{j >= k} gamma^(j-k) r[i, j]`, normalised over the members that reached turn `k`.

    arXiv:2511.14846 (group turn policy optimisation, whose GTPO is not that of arXiv:2508.03772), which takes
    `gamma` below 1. `rewards` [N], if given, is added to the reward of each row's last turn.
    """
    turns, of_turns = rewards_of_turns(mask, turn, turn_rewards, rewards)
    _checked_rewards(torch.zeros(mask.shape[0]) if rewards is None else rewards, group, mask)
    returns = reverse_scan(of_turns, torch.full_like(of_turns, gamma))
    norm = _Normaliser(ddof, eps, "std", _rounding_error(turn_rewards, rewards))
    return _expand_to_tokens(turns, norm.per_turn(returns, group.to(mask.device), turns), turn_rewards, rewards)


@AdvantageSpec(
    help="returns of turns and the outcome, compared in the group",
    needs=COMPARES_TURNS,
    options={"gamma": Option("discount", FRACTION), "outcome_weight": Option("weight of the outcome", NOT_NEGATIVE)},
)
def turn_return_hybrid(
    *,
    rewards: Tensor,
    turn_rewards: Tensor,
    group: Tensor,
    mask: Tensor,
    turn: Tensor | None = None,
    gamma: float = 0.9,
    outcome_weight: float = 0.3,
    ddof: int = 1,
    eps: float = 1e-6,
) -> Tensor:
    """Return `norm_k(sum_{j=k..K-1} gamma^(j-k) r[i, j] + gamma^(K-k) o_i) + outcome_weight norm(o)_i`.

    The hybrid of arXiv:2604.02869, equation 2, with its damping 0.3 and `gamma` 0.9. `o` is `rewards`, `K` the row's
    own number of turns: the outcome is placed one step after the last turn. `norm_k` as in `turn_return`.
    """
    outcome = _checked_rewards(rewards, group, mask)
    turns, of_turns = rewards_of_turns(mask, turn, turn_rewards, None)
    ids = group.to(mask.device)
    terms = of_turns + gamma * select(outcome[:, None].expand(of_turns.shape), turns.last)
    returns = reverse_scan(terms, torch.full_like(terms, gamma))
    norm = _Normaliser(ddof, eps, "std", _rounding_error(turn_rewards, rewards))
    advantage = norm.per_turn(returns, ids, turns) + outcome_weight * norm.rows(outcome, ids)[:, None]
    return _expand_to_tokens(turns, advantage, turn_rewards, rewards)


def gigpo(
    *,
    rewards: Tensor,
    anchors: Tensor,
    group: Tensor,
    mask: Tensor,
    turn: Tensor | None = None,
    turn_rewards: Tensor | None = None,
    gamma: float = 0.95,
    weight: float = 1.0,
    scale: Scale = "std",
    ddof: int = 1,
    eps: float = 1e-6,
) -> Tensor:
    """Return `norm(r)_i + weight norm_over_equal_anchors(R[i, k])`, arXiv:2505.10978 (GiGPO).

    `anchors` [N, K] integers: the hash of the environment's state before each turn. Turns of one group with
    the same anchor are compared, also within a trajectory; the only turn with an anchor gets 0. `R`
    is the return of `turn_return` with `gamma`, from `turn_rewards` or, if None, from `rewards` on the
    last turn. `gamma` 0.95, `weight` 1 and both terms divided by the deviation, as in the paper;
    `scale="none"` only centres, which its example runs also use.
    """
    outcome = _checked_rewards(rewards, group, mask)
    turns, of_turns = rewards_of_turns(mask, turn, turn_rewards, rewards if turn_rewards is None else None)
    shape = of_turns.shape
    if anchors.ndim != 2 or anchors.shape[0] != shape[0] or anchors.shape[1] < shape[1]:
        raise ValueError(f"anchors must be {list(shape)}, not {list(anchors.shape)}")
    if anchors.is_floating_point():
        raise ValueError("anchors must hold integers")
    ids = group.to(mask.device).long()
    states = anchors[:, : shape[1]].to(mask.device).long()
    returns = reverse_scan(of_turns, torch.full_like(of_turns, gamma))
    norm = _Normaliser(ddof, eps, scale, _rounding_error(turn_rewards, rewards))
    local = norm.cells(returns, torch.stack([ids[:, None].expand(shape), states], -1), turns.reached)
    return _expand_to_tokens(turns, norm.rows(outcome, ids)[:, None] + weight * local, rewards, turn_rewards)


@AdvantageSpec(
    name="gigpo",
    help="episode-level and state-level comparison",
    needs={Need.GROUP, Need.STD, Need.OPTIONAL_TURN_REWARDS, Need.STATE_KEYS, Need.ADVANTAGE_OF_EQUAL_REWARDS},
    options={
        "gamma": Option("discount", FRACTION, default=0.95),
        "weight": Option("weight of the step-level term", NOT_NEGATIVE, default=1.0),
        "scale": Option("divide by the standard deviation, or do not", choices=SCALES, default="std"),
    },
)
def _gigpo(
    *,
    rewards: Tensor,
    anchors: Tensor,
    group: Tensor,
    mask: Tensor,
    turn: Tensor,
    turn_rewards: Tensor,
    gamma: float,
    weight: float,
    scale: Scale,
    ddof: int,
) -> Tensor:
    """Call `gigpo` with the reward added to that of each row's last turn."""
    last = torch.where(mask.bool(), turn, -1).amax(1)
    columns = torch.arange(turn_rewards.shape[1], device=last.device)
    outcome = torch.where(columns == last[:, None], rewards[:, None].to(last.device), 0.0)
    return gigpo(
        rewards=rewards,
        anchors=anchors,
        group=group,
        mask=mask,
        turn=turn,
        turn_rewards=turn_rewards + outcome,
        gamma=gamma,
        weight=weight,
        scale=scale,
        ddof=ddof,
    )


@AdvantageSpec(
    help="branches of a fork compared with each other",
    needs={Need.GROUP, Need.STD, Need.BRANCHES},
    options={"scale": Option("divide by the standard deviation, or do not", choices=SCALES)},
)
def siblings(
    *,
    rewards: Tensor,
    nodes: Tensor,
    group: Tensor,
    mask: Tensor,
    turn: Tensor | None = None,
    scale: Scale = "std",
    ddof: int = 1,
    eps: float = 1e-6,
) -> Tensor:
    """Return the value of each branch, normalised over its siblings.

    Rows are paths of trees; `nodes` [N, K] integers, read up to a row's last turn, are equal if rows of a
    group share a turn's action. The value of an action is the mean of `rewards` over the rows through it. Its
    siblings are the distinct actions of the group with the same turns before them; those of first turns are
    all first actions of the group. An action without siblings belongs to the branch of the previous
    action and has its advantage; the only first action of a group has 0. Without shared actions this is `grpo`.
    """
    outcome = _checked_rewards(rewards, group, mask)
    turns = turns_of(turn, mask)
    shape = turns.reached.shape
    if nodes.ndim != 2 or nodes.shape[0] != shape[0] or nodes.shape[1] < shape[1]:
        raise ValueError(f"nodes must be {list(shape)}, not {list(nodes.shape)}")
    if nodes.is_floating_point():
        raise ValueError("nodes must hold integers")
    ids = group.to(mask.device).long()[:, None].expand(shape)
    own = torch.stack([ids, nodes[:, : shape[1]].to(mask.device).long()], -1)
    cells, index = torch.unique(own[turns.reached], dim=0, return_inverse=True)
    values = outcome[:, None].expand(shape)[turns.reached]
    empty = torch.zeros(len(cells), dtype=torch.float64, device=mask.device)
    values = empty.scatter_add(0, index, values) / empty.scatter_add(0, index, torch.ones_like(values))
    number = torch.full(shape, -1, device=mask.device)
    number[turns.reached] = index
    before = torch.cat([torch.full_like(number[:, :1], -1), number[:, :-1]], 1)
    parents = torch.empty(len(cells), 2, dtype=torch.int64, device=mask.device)
    parents[index] = torch.stack([ids, before], -1)[turns.reached]
    _, fork, sizes = torch.unique(parents, dim=0, return_inverse=True, return_counts=True)
    found = _Normaliser(ddof, eps, scale, _rounding_error(rewards))(values, fork[:, None])
    alone = sizes[fork] == 1
    advantage = torch.zeros(shape, dtype=torch.float64, device=mask.device)
    for k in range(shape[1]):
        reached = turns.reached[:, k]
        at = number[reached, k]
        inherited = advantage[reached, k - 1] if k else torch.zeros(len(at), dtype=torch.float64, device=mask.device)
        advantage[reached, k] = torch.where(alone[at], inherited, found[at])
    return _expand_to_tokens(turns, advantage, rewards)


def _checked_rewards(rewards: Tensor, group: Tensor, mask: Tensor) -> Tensor:
    """Return the rewards [N] in float64 on the device of the mask, validated as by `grpo`."""
    return groups_to_compare(rewards, group, mask).rewards.to(mask.device)


def _expand_to_tokens(turns: Turns, advantage: Tensor, *rewards: Tensor | None) -> Tensor:
    """Return `advantage` [N, K], expanded to the action tokens of each turn [N, L]."""
    return turns.tokens.spread(turns.spread(advantage), float_dtype(*rewards))


def _rounding_error(*rewards: Tensor | None) -> float:
    """Return the largest relative rounding error of the given dtypes."""
    return max((reward_rtol(t.dtype) for t in rewards if t is not None), default=0.0)
