"""Tensors of algorithms: the inputs of advantages and losses, rewards by comparison group, shape checks.

Configurations are checked without torch: modules of this package import `torch` (lazy) and `Tensor` (a name for
annotations) from here. `x * mask` propagates NaN and infinity, also in the gradient; `select` does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple, Self

if TYPE_CHECKING:
    import torch as torch
    from torch import Tensor as Tensor
else:

    class _Torch:
        """Lazy proxy of the module torch; caches each attribute."""

        def __getattr__(self, name: str) -> object:
            import torch

            value = torch.__getattribute__(name)
            setattr(self, name, value)
            return value

    torch, Tensor = _Torch(), "torch.Tensor"

MAX_LOG_RATIO = 20.0
"""Importance ratios are clamped to exp(+-20)."""


def select(values: Tensor, mask: Tensor) -> Tensor:
    """Return `values` [N, L] where `mask` [N, L] is set, else 0; no gradient flows to the other positions."""
    return torch.where(mask.bool(), values, torch.zeros((), dtype=values.dtype, device=values.device))


def clamped_ratio(log_ratio: Tensor) -> Tensor:
    """Return `exp(log_ratio)` with the exponent clamped to +-20; any shape."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def check_shapes(mask: Tensor, **tensors: Tensor) -> None:
    """Raise ValueError unless `mask` is [N, L] and every tensor has its shape (no broadcasting)."""
    if mask.ndim != 2:
        raise ValueError(f"mask must be [N, L], not {list(mask.shape)}")
    for name, tensor in tensors.items():
        if tensor.shape != mask.shape:
            raise ValueError(f"{name} has shape {list(tensor.shape)}, mask {list(mask.shape)}")


@dataclass(frozen=True, slots=True)
class GroupedRewards:
    """Rewards with their groups. `K` groups are numbered by ascending id.

    `rewards` [N] float64; `index` [N] the group number of each row; `member` [K, N] bool; `equal` [K] bool,
    set if the rewards of a group differ by rounding at most (a group with one member is equal).
    """

    rewards: Tensor
    index: Tensor
    member: Tensor
    equal: Tensor

    @property
    def sizes(self) -> Tensor:
        """Members of each group, [K] float64."""
        return self.member.sum(1).double()

    def sum(self, values: Tensor) -> Tensor:
        """Return the sum of `values` [N] over each group, [K]."""
        return torch.where(self.member, values, 0.0).sum(1)

    def mean(self) -> Tensor:
        """Return the mean reward of each group, [K]."""
        return self.sum(self.rewards) / self.sizes

    def std(self, ddof: int) -> Tensor:
        """Return the standard deviation of each group's rewards, [K]; 0 for a group of one."""
        squares = self.sum((self.rewards - self.mean()[self.index]) ** 2)
        return (squares / (self.sizes - ddof).clamp(min=1)).sqrt()

    def subtract(self, baseline: Tensor) -> Tensor:
        """Return `rewards` minus their group's `baseline` [K], [N]; exactly 0 in groups of equal rewards."""
        return torch.where(self.equal[self.index], 0.0, self.rewards - baseline[self.index])


def group_rewards(rewards: Tensor | Sequence[float], group: Tensor | Sequence[int]) -> GroupedRewards:
    """Group `rewards` [N] by the ids `group` [N] (any integers, in any order).

    Raises ValueError if a reward is not finite (naming the row) or the shapes do not fit.
    """
    given = torch.as_tensor(rewards, dtype=None if isinstance(rewards, torch.Tensor) else torch.float64).detach()
    ids = torch.as_tensor(group, device=given.device)
    if given.ndim != 1 or ids.shape != given.shape:
        raise ValueError(f"rewards and group must be [N], not {list(given.shape)} and {list(ids.shape)}")
    if ids.is_floating_point():
        raise ValueError("group must hold integers")
    values = _finite("rewards", given.double())
    unique, index = torch.unique(ids, return_inverse=True)
    member = index == torch.arange(len(unique), device=index.device)[:, None]
    return GroupedRewards(values, index, member, _equal(values, member, reward_rtol(given.dtype)))


def reward_rtol(dtype: torch.dtype) -> float:
    """Return the relative tolerance below which two rewards of `dtype` count as equal.

    64 epsilons of float64, or 4 of float32. Adjacent 16-bit floats are far apart and count as different, so 16-bit
    floats and integers (summed in float64) have the tolerance of float64.
    """
    if dtype == torch.float32:
        return 4 * torch.finfo(torch.float32).eps
    return 64 * torch.finfo(torch.float64).eps


def _equal(rewards: Tensor, member: Tensor, noise: float) -> Tensor:
    if not rewards.numel():
        return member.new_zeros(member.shape[0])
    highest = torch.where(member, rewards, -torch.inf).amax(1)
    lowest = torch.where(member, rewards, torch.inf).amin(1)
    scale = torch.maximum(highest.abs(), lowest.abs()).clamp(min=1.0)
    return highest - lowest <= noise * scale


def groups_to_compare(rewards: Tensor, group: Tensor, mask: Tensor) -> GroupedRewards:
    """Return `rewards` [N] by `group` [N]. Raises ValueError for a group of one, or rows unlike `mask`."""
    grouped = group_rewards(rewards, group)
    check_rows(len(grouped.rewards), mask)
    alone = (grouped.sizes == 1)[grouped.index].nonzero()
    if alone.numel():
        row = int(alone[0])
        raise ValueError(f"row {row} is alone in its group {int(group[row])}: a group needs at least two members")
    return grouped


def check_rows(num_rows: int, mask: Tensor) -> None:
    """Raise ValueError unless `mask` is [num_rows, L]."""
    if mask.ndim != 2 or mask.shape[0] != num_rows:
        raise ValueError(f"mask must be [{num_rows}, L], not {list(mask.shape)}")


def check_per_row(mask: Tensor, **tensors: Tensor) -> None:
    """Raise ValueError unless every tensor is [N], one value for each row of `mask`."""
    for name, tensor in tensors.items():
        if tensor.shape != mask.shape[:1]:
            raise ValueError(f"{name} must be [{mask.shape[0]}], not {list(tensor.shape)}")


def check_share(name: str, value: float) -> None:
    """Raise ValueError unless `value` is above 0 and at most 1."""
    if not 0 < value <= 1:
        raise ValueError(f"{name} must be above 0 and at most 1, not {value}")


def check_group(group: Tensor | None, mask: Tensor) -> None:
    """Raise ValueError unless `group` is None or [N] integers; for advantages without comparison groups."""
    if group is None:
        return
    check_per_row(mask, group=group)
    if group.is_floating_point():
        raise ValueError("group must hold integers")


def numbers(name: str, values: Tensor, mask: Tensor) -> Tensor:
    """Return `values` [N] in float64, on the device of `mask`, without gradient.

    Raises ValueError if they are not [N], or not finite (naming the row).
    """
    check_per_row(mask, **{name: values})
    return _finite(name, values.detach().to(mask.device).double())


def cells(name: str, values: Tensor, where: Tensor) -> Tensor:
    """Return `values` [N, X] in float64 where `where` [N, X] is set, 0 elsewhere, without gradient.

    Raises ValueError if the shapes differ, or a set position is not finite (naming the row).
    """
    if values.shape != where.shape:
        raise ValueError(f"{name} must be {list(where.shape)}, not {list(values.shape)}")
    return _finite(name, select(values.detach().to(where.device).double(), where))


def _finite(name: str, values: Tensor) -> Tensor:
    """Return `values`. Raises ValueError unless they are finite, naming the position."""
    bad = (~values.isfinite()).nonzero()
    if bad.numel():
        place = bad[0].tolist()
        raise ValueError(f"{name}{place} is {float(values[tuple(place)])}; {name} must be finite")
    return values


def per_action(scores: Tensor, mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `scores` [N] on every action token of its row, in `dtype`, [N, L]."""
    return select(scores.to(mask.device, dtype)[:, None].expand(mask.shape), mask)


def float_dtype(*tensors: Tensor | None) -> torch.dtype:
    """Return the widest float type among the tensors; float32 if none is a float."""
    found = [t.dtype for t in tensors if t is not None and t.is_floating_point()]
    widest = found[0] if found else torch.float32
    for dtype in found[1:]:
        widest = torch.promote_types(widest, dtype)
    return widest


@dataclass(frozen=True, slots=True)
class Outcomes:
    """The whole batch of one optimizer step, as input of advantages.

    Includes all finished members of a group, also those that a filter excludes from training: group statistics count
    them, batch statistics run over `trains`. Unavailable fields are None.

    - `rewards` [N], best float64; `group` [N] integer ids; `mask` [N, L], set on action tokens.
    - `trains` [N, L]: the action tokens used for training (None: all).
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
"""Default values of model estimates [N, L] that are not computed yet, for functions that require them."""


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """One microbatch, all [N, L] unless noted; column `t` belongs to token `t`. Raises ValueError on unequal shapes.

    Log-probabilities are natural, of the tempered distribution. Positions off the mask (NaN too) are ignored.

    - `logprobs` under the weights being trained (with gradient), `old_logprobs` under those at the start of the step,
      `behavior_logprobs` as recorded by the engine, `ref_logprobs` under the reference, `teacher_logprobs` under a
      teacher.
    - `mask`: the action tokens used for training.
    - `entropy` in nats, `full_kl` to the reference and `teacher_kl`: over the full vocabulary, with gradient.
    - `chosen` bool: the tokens selected by a covariance loss; `observed` bool: observation tokens.
    - `positive` [N] bool: successful trajectories; `expert` [N] bool: demonstrations, and attempts sampled with a hint.
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
        named = ("logprobs", "old_logprobs", "behavior_logprobs", "advantages", "ref_logprobs", "entropy")
        given = zip(named, attrgetter(*named)(self), strict=True)
        check_shapes(self.mask, **{name: one for name, one in given if one is not None})

    @property
    def own(self) -> Tensor:
        """`mask` without the tokens of `expert` rows, whose sampling distribution was not the policy's, [N, L]."""
        return self.mask if self.expert is None else self.mask.bool() & ~self.expert.bool()[:, None]


@dataclass(frozen=True, slots=True)
class SummedFields:
    """Sums over part of a batch: `+` adds the fields, and takes the maximum of those that end in `_max`.

    A field is None in the sum if it is None in either operand.
    """

    def __add__(self, other: Self) -> Self:
        names = [one.name for one in fields(self)]
        found: dict[str, object] = {}
        for name, one, two in zip(names, attrgetter(*names)(self), attrgetter(*names)(other), strict=True):
            if isinstance(one, dict):
                found[name] = {key: value + two[key] for key, value in one.items()}
            elif one is None or two is None:
                found[name] = None
            else:
                found[name] = max(one, two) if name.endswith("_max") else one + two
        return replace(self, **found)


class Cut(NamedTuple):
    """The tokens [N, L] bool whose policy gradient is clipped to 0.

    `high` (A > 0 and the ratio above the interval), `low` (A < 0 and the ratio below it), `dual` (A < 0 and
    the ratio above `dual_clip`).
    """

    low: Tensor
    high: Tensor
    dual: Tensor
