"""Statistics that outlive a step: moving averages per role, moments per domain.

Both are frozen records: `updated` returns the next one; `to_json` and `from_json` save and restore it exactly.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from ludus.algorithms.advantages.group_relative import remax
from ludus.algorithms.algorithm import FRACTION, AdvantageSpec, Need, Option
from ludus.algorithms.tensors import Tensor, check_group, float_dtype, numbers, on_actions, rounding, torch

RoleKey = tuple[str, str]
"""An environment and a role in it."""


@dataclass(frozen=True, slots=True)
class RoleBaselines:
    """A moving average of rewards per (environment, role).

    An average `b` starts at `initial`; a reward `r` updates it to `decay b + (1 - decay) r`.
    """

    decay: float = 0.95
    initial: float = 0.0
    means: Mapping[RoleKey, float] = field(default_factory=dict)

    def read(self, roles: Sequence[RoleKey], rewards: Tensor) -> Tensor:
        """Return the baseline of each row, [N] float64: the average before that row's reward is added."""
        return torch.tensor(self._run(roles, rewards)[0], dtype=torch.float64)

    def updated(self, roles: Sequence[RoleKey], rewards: Tensor) -> RoleBaselines:
        """Return the averages after adding `rewards` [N] in the order of the rows. Raises ValueError if not finite."""
        return replace(self, means=self._run(roles, rewards)[1])

    def _run(self, roles: Sequence[RoleKey], rewards: Tensor) -> tuple[list[float], dict[RoleKey, float]]:
        values = _values_of(roles, rewards, "roles")
        means, before = dict(self.means), []
        for role, reward in zip(roles, values, strict=True):
            before.append(means.get(role, self.initial))
            means[role] = self.decay * before[-1] + (1 - self.decay) * reward
        return before, means

    def to_json(self) -> str:
        """Return one line that `from_json` reads back to an equal record."""
        rows = [[*role, mean] for role, mean in sorted(self.means.items())]
        return json.dumps({"decay": self.decay, "initial": self.initial, "means": rows})

    @classmethod
    def from_json(cls, text: str) -> RoleBaselines:
        """Return the record that `to_json` wrote."""
        saved = json.loads(text)
        means = {(environment, role): mean for environment, role, mean in saved["means"]}
        return cls(saved["decay"], saved["initial"], means)


def rae(
    *, rewards: Tensor, roles: Sequence[RoleKey], baselines: RoleBaselines, mask: Tensor, group: Tensor | None = None
) -> Tensor:
    """Return `r - b(environment, role)`, arXiv:2506.24119 (SPIRAL, role-conditioned advantage), [N, L].

    `roles` [N] names each row's environment and role. Rows are added to the moving average in their order, and each
    reads it before its own reward is added (the paper's listing updates first, which shrinks the advantage by
    `decay`). `baselines` is not changed: `baselines.updated(roles, rewards)` is the next step's. `decay` 0.95
    as in the paper. Raises ValueError for rewards that are not finite (naming the row) or a wrong shape.
    """
    check_group(group, mask)
    given = numbers("rewards", rewards, mask)
    before = baselines.read(roles, given).to(given.device)
    return on_actions(given - before, mask, float_dtype(rewards))


@AdvantageSpec(
    name="rae",
    help="rewards minus the running average of the role",
    needs={Need.ROLE_BASELINES},
    options={"decay": Option("decay of the running average of a role", FRACTION, default=0.95)},
)
def _rae(*, rewards: Tensor, baselines: Tensor, mask: Tensor) -> Tensor:
    return remax(rewards=rewards, greedy_rewards=baselines, mask=mask)


@dataclass(frozen=True, slots=True)
class Moments:
    """Count, mean and sum of squared deviations of the rewards of one domain."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0

    @property
    def variance(self) -> float:
        """With `ddof` 1; 0 for fewer than two rewards."""
        return self.squares / (self.count - 1) if self.count > 1 else 0.0

    def with_values(self, values: Sequence[float]) -> Moments:
        """Return the moments joined with those of `values` (Chan, Golub and LeVeque 1979); at least one value."""
        count = self.count + len(values)
        mean = sum(values) / len(values)
        squares = sum((value - mean) ** 2 for value in values)
        gap = mean - self.mean
        return Moments(
            count,
            self.mean + gap * len(values) / count,
            self.squares + squares + gap**2 * self.count * len(values) / count,
        )


@dataclass(frozen=True, slots=True)
class DomainMoments:
    """The running mean and variance of the rewards of each domain, over all that were added."""

    moments: Mapping[str, Moments] = field(default_factory=dict)

    def updated(self, domains: Sequence[str], rewards: Tensor) -> DomainMoments:
        """Return the moments after adding `rewards` [N] of `domains` [N]. Raises ValueError if not finite."""
        values = _values_of(domains, rewards, "domains")
        found = dict(self.moments)
        for domain in dict.fromkeys(domains):
            mine = [value for name, value in zip(domains, values, strict=True) if name == domain]
            found[domain] = found.get(domain, Moments()).with_values(mine)
        return replace(self, moments=found)

    def to_json(self) -> str:
        """Return one line that `from_json` reads back to an equal record."""
        rows = [[name, m.count, m.mean, m.squares] for name, m in sorted(self.moments.items())]
        return json.dumps(rows)

    @classmethod
    def from_json(cls, text: str) -> DomainMoments:
        """Return the record that `to_json` wrote."""
        return cls({name: Moments(*saved) for name, *saved in json.loads(text)})


def domain_normalised(*, rewards: Tensor, domains: Sequence[str], moments: DomainMoments, eps: float = 1e-8) -> Tensor:
    """Return `(r - mean_d) / sqrt(var_d + eps)`, [N] in the dtype of the rewards: several tasks on one scale.

    Applied before grouping, for advantages that keep the scale of the rewards (`dr_grpo`, `rloo`, `gae`); it has no
    effect on one that divides by the deviation of its group. Add the step's own rewards first (`moments.updated`), so
    that the first step has statistics. In a domain with fewer than two rewards, or with equal ones up to rounding,
    rewards are only centred; in one without any they are unchanged. Raises ValueError for rewards that are not finite
    (naming the row) or not [N]. As the reward scaling of PPO (arXiv:2005.12729), with statistics by domain.
    """
    values = _values_of(domains, rewards, "domains")
    found = []
    for domain, value in zip(domains, values, strict=True):
        own = moments.moments.get(domain, Moments())
        noise = rounding(rewards.dtype) * max(1.0, abs(own.mean))
        gap = value - own.mean if abs(value - own.mean) > noise else 0.0
        found.append(gap / (own.variance + eps) ** 0.5 if own.variance > noise**2 else gap)
    return torch.tensor(found, dtype=torch.float64).to(rewards.device, float_dtype(rewards))


def _values_of(keys: Sequence[object], rewards: Tensor, name: str) -> list[float]:
    if rewards.ndim != 1 or len(keys) != len(rewards):
        raise ValueError(f"{name} and rewards must be [N], not [{len(keys)}] and {list(rewards.shape)}")
    found: list[float] = numbers("rewards", rewards, rewards[:, None]).tolist()
    return found
