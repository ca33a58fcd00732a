"""Turn-level advantages without a critic: each turn is normalised over comparable turns of its group.

`turn` [N, L] counts from 0 on action tokens (None: each run of action tokens is a turn); `turn_rewards` [N, K] is read
up to a row's last turn. A *normalised* number is `(x - mean) / (std + eps)` over the compared numbers (`scale="none"`:
`x - mean`), with the `ddof` of `grpo`, exactly 0 if they are equal up to rounding or there is only one. A member
reaches a turn if it has an action token in it. All return [N, L] in the widest float type of the rewards.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypedDict, Unpack

from ludus.algorithms.advantages.action_tokens import Turns, reverse_scan, rewards_of_turns, turns_of
from ludus.algorithms.algorithm import DEFAULTS_OF, FRACTION, NOT_NEGATIVE, AdvantageSpec, Need, Option
from ludus.algorithms.tensors import Tensor, float_dtype, groups_to_compare, reward_rtol, select, torch

Scale = Literal["std", "none"]
SCALES = ("std", "none")
COMPARES_TURNS = {Need.GROUP, Need.STD, Need.TURN_REWARDS, Need.OPTIONAL_TURN_REWARDS, Need.ADVANTAGE_OF_EQUAL_REWARDS}


class _GroupInputs(TypedDict):
    group: Tensor
    mask: Tensor


class TurnInputs(_GroupInputs, total=False):
    """The inputs of every advantage on turns; `ddof` is 1 and `eps` 1e-6 unless given."""

    turn: Tensor | None
    ddof: int
    eps: float


@dataclass(frozen=True, slots=True)
class _Inputs:
    """The values of `TurnInputs`."""

    group: Tensor
    mask: Tensor
    turn: Tensor | None = None
    ddof: int = 1
    eps: float = 1e-6

    @property
    def ids(self) -> Tensor:
        """The groups [N] on the device of the mask."""
        return self.group.to(self.mask.device).long()

    def checked(self, rewards: Tensor) -> Tensor:
        """Return the rewards [N] in float64 on the device of the mask, validated as by `grpo`."""
        return groups_to_compare(rewards, self.group, self.mask).rewards.to(self.mask.device)

    def norm(self, *rewards: Tensor | None, scale: Scale = "std") -> _Normaliser:
        """Return the normalisation within groups, up to the rounding error of the rewards."""
        noise = max((reward_rtol(t.dtype) for t in rewards if t is not None), default=0.0)
        return _Normaliser(self.ddof, self.eps, scale, noise)


DEFAULTS_OF[TurnInputs] = _Inputs


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
    turn_weight: float = 1.0,
    outcome_weight: float = 1.0,
    **inputs: Unpack[TurnInputs],
) -> Tensor:
    """Return turn reward plus outcome, each normalised in the group, arXiv:2505.11821 (MT-GRPO).

    Turn `k` of trajectory `i` gets `turn_weight norm(r[:, k])_i + outcome_weight norm(rewards)_i`; its
    last turn gets only the outcome term. Turn `k` is compared over all members that reached it, including those
    for which it is the last; the term is 0 if only one member reached it. Weights 1 as in the paper. (arXiv:2604.02869
    writes the first term as the sum over the remaining turns.)
    """
    given = _Inputs(**inputs)
    outcome = given.checked(rewards)
    turns, of_turns = rewards_of_turns(given.mask, given.turn, turn_rewards, None)
    advantage = turn_weight * given.norm(turn_rewards).per_turn(of_turns, given.ids, turns)
    of_outcome = outcome_weight * given.norm(rewards).rows(outcome, given.ids)
    advantage = torch.where(turns.last, 0.0, advantage) + of_outcome[:, None]
    return _expand_to_tokens(turns, advantage, rewards, turn_rewards)


@AdvantageSpec(
    help="returns of turns, compared in the group",
    needs=COMPARES_TURNS,
    options={"gamma": Option("discount", FRACTION)},
)
def turn_return(
    *,
    turn_rewards: Tensor | None = None,
    rewards: Tensor | None = None,
    gamma: float = 1.0,
    **inputs: Unpack[TurnInputs],
) -> Tensor:
    """Return `R[i, k] = sum_{j >= k} gamma^(j-k) r[i, j]`, normalised over the members that reached turn `k`.

    arXiv:2511.14846 (group turn policy optimisation, whose GTPO is not that of arXiv:2508.03772), which takes
    `gamma` below 1. `rewards` [N], if given, is added to the reward of each row's last turn.
    """
    given = _Inputs(**inputs)
    turns, of_turns = rewards_of_turns(given.mask, given.turn, turn_rewards, rewards)
    given.checked(torch.zeros(given.mask.shape[0]) if rewards is None else rewards)
    returns = reverse_scan(of_turns, torch.full_like(of_turns, gamma))
    advantage = given.norm(turn_rewards, rewards).per_turn(returns, given.ids, turns)
    return _expand_to_tokens(turns, advantage, turn_rewards, rewards)


@AdvantageSpec(
    help="returns of turns and the outcome, compared in the group",
    needs=COMPARES_TURNS,
    options={"gamma": Option("discount", FRACTION), "outcome_weight": Option("weight of the outcome", NOT_NEGATIVE)},
)
def turn_return_hybrid(
    *,
    rewards: Tensor,
    turn_rewards: Tensor,
    gamma: float = 0.9,
    outcome_weight: float = 0.3,
    **inputs: Unpack[TurnInputs],
) -> Tensor:
    """Return `norm_k(sum_{j=k..K-1} gamma^(j-k) r[i, j] + gamma^(K-k) o_i) + outcome_weight norm(o)_i`.

    The hybrid of arXiv:2604.02869, equation 2, with its damping 0.3 and `gamma` 0.9. `o` is `rewards`, `K` the row's
    own number of turns: the outcome is placed one step after the last turn. `norm_k` as in `turn_return`.
    """
    given = _Inputs(**inputs)
    outcome = given.checked(rewards)
    turns, of_turns = rewards_of_turns(given.mask, given.turn, turn_rewards, None)
    terms = of_turns + gamma * select(outcome[:, None].expand(of_turns.shape), turns.last)
    returns = reverse_scan(terms, torch.full_like(terms, gamma))
    norm, ids = given.norm(turn_rewards, rewards), given.ids
    advantage = norm.per_turn(returns, ids, turns) + outcome_weight * norm.rows(outcome, ids)[:, None]
    return _expand_to_tokens(turns, advantage, turn_rewards, rewards)


def gigpo(
    *,
    rewards: Tensor,
    anchors: Tensor,
    turn_rewards: Tensor | None = None,
    gamma: float = 0.95,
    weight: float = 1.0,
    scale: Scale = "std",
    **inputs: Unpack[TurnInputs],
) -> Tensor:
    """Return `norm(r)_i + weight norm_over_equal_anchors(R[i, k])`, arXiv:2505.10978 (GiGPO).

    `anchors` [N, K] integers: the hash of the environment's state before each turn. Turns of one group with
    the same anchor are compared, also within a trajectory; the only turn with an anchor gets 0. `R`
    is the return of `turn_return` with `gamma`, from `turn_rewards` or, if None, from `rewards` on the
    last turn. `gamma` 0.95, `weight` 1 and both terms divided by the deviation, as in the paper;
    `scale="none"` only centres, which its example runs also use.
    """
    given = _Inputs(**inputs)
    outcome, ids = given.checked(rewards), given.ids
    only = rewards if turn_rewards is None else None
    turns, of_turns = rewards_of_turns(given.mask, given.turn, turn_rewards, only)
    states = _ids("anchors", anchors, of_turns)
    returns = reverse_scan(of_turns, torch.full_like(of_turns, gamma))
    norm = given.norm(turn_rewards, rewards, scale=scale)
    local = norm.cells(returns, torch.stack([ids[:, None].expand(states.shape), states], -1), turns.reached)
    return _expand_to_tokens(turns, norm.rows(outcome, ids)[:, None] + weight * local, rewards, turn_rewards)


class _StateInputs(_GroupInputs):
    turn: Tensor
    anchors: Tensor
    gamma: float
    weight: float
    scale: Scale
    ddof: int


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
def _gigpo(*, rewards: Tensor, turn_rewards: Tensor, **inputs: Unpack[_StateInputs]) -> Tensor:
    """Call `gigpo` with the reward added to that of each row's last turn."""
    last = turns_of(inputs["turn"], inputs["mask"], turn_rewards.shape[1]).last
    outcome = torch.where(last, rewards[:, None].to(last.device), 0.0)
    return gigpo(rewards=rewards, turn_rewards=turn_rewards + outcome, **inputs)


@AdvantageSpec(
    help="comparison of the branches of each fork",
    needs={Need.GROUP, Need.STD, Need.BRANCHES},
    options={"scale": Option("divide by the standard deviation, or do not", choices=SCALES)},
)
def siblings(*, rewards: Tensor, nodes: Tensor, scale: Scale = "std", **inputs: Unpack[TurnInputs]) -> Tensor:
    """Return the value of each branch, normalised over its siblings.

    Rows are paths of trees; `nodes` [N, K] integers, read up to a row's last turn, are equal if rows of a
    group share a turn's action. The value of an action is the mean of `rewards` over the rows through it. Its
    siblings are the distinct actions of the group with the same turns before them; those of first turns are
    all first actions of the group. An action without siblings belongs to the branch of the previous
    action and has its advantage; the only first action of a group has 0. Without shared actions this is `grpo`.
    """
    given = _Inputs(**inputs)
    outcome, mask = given.checked(rewards), given.mask
    turns = turns_of(given.turn, mask)
    shape = turns.reached.shape
    ids = given.ids[:, None].expand(shape)
    own = torch.stack([ids, _ids("nodes", nodes, turns.reached)], -1)
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
    found = given.norm(rewards, scale=scale)(values, fork[:, None])
    alone = sizes[fork] == 1
    advantage = torch.zeros(shape, dtype=torch.float64, device=mask.device)
    for k in range(shape[1]):
        reached = turns.reached[:, k]
        at = number[reached, k]
        inherited = advantage[reached, k - 1] if k else torch.zeros(len(at), dtype=torch.float64, device=mask.device)
        advantage[reached, k] = torch.where(alone[at], inherited, found[at])
    return _expand_to_tokens(turns, advantage, rewards)


def _ids(name: str, values: Tensor, like: Tensor) -> Tensor:
    """Return the first K columns of `values`, for `like` [N, K]. Raises ValueError unless they are integers."""
    if values.ndim != 2 or values.shape[0] != like.shape[0] or values.shape[1] < like.shape[1]:
        raise ValueError(f"{name} must be {list(like.shape)}, not {list(values.shape)}")
    if values.is_floating_point():
        raise ValueError(f"{name} must hold integers")
    return values[:, : like.shape[1]].to(like.device).long()


def _expand_to_tokens(turns: Turns, advantage: Tensor, *rewards: Tensor | None) -> Tensor:
    """Return `advantage` [N, K], expanded to the action tokens of each turn [N, L]."""
    return turns.tokens.spread(turns.spread(advantage), float_dtype(*rewards))
