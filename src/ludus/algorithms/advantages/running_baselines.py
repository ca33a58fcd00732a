"""Statistics over several steps: moving averages per role, moments per domain.

Both are frozen records: `updated` returns a new record; `to_json` and `from_json` round-trip exactly.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from ludus.algorithms.advantages.group_relative import remax
from ludus.algorithms.algorithm import FRACTION, AdvantageSpec, Need, Option
from ludus.algorithms.tensors import Tensor, check_group, float_dtype, numbers, per_action, reward_rtol, torch

RoleKey = tuple[str, str]
"""Names of an environment and of a role in it."""


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
        """Return the record as one line of JSON."""
        rows = [[*role, mean] for role, mean in sorted(self.means.items())]
        return json.dumps({"decay": self.decay, "initial": self.initial, "means": rows})

    @classmethod
    def from_json(cls, text: str) -> RoleBaselines:
        """Return the record from the output of `to_json`."""
        saved = json.loads(text)
        means = {(environment, role): mean for environment, role, mean in saved["means"]}
        return cls(saved["decay"], saved["initial"], means)


def rae(
    *, rewards: Tensor, roles: Sequence[RoleKey], baselines: RoleBaselines, mask: Tensor, group: Tensor | None = None
) -> Tensor:
    """Return `r - b(environment, role)`, arXiv:2506.24119 (SPIRAL, role-conditioned advantage), [N, L].

    `roles` [N] names each row's environment and role. Rows are added to the moving average in order, and the
    baseline of a row excludes its own reward (the paper's listing updates first, which scales the advantage by
    `decay`). `baselines` is not modified: pass `baselines.updated(roles, rewards)` to the next step. `decay` 0.95
    as in the paper. Raises ValueError for rewards that are not finite (naming the row) or a wrong shape.
    """
    check_group(group, mask)
    given = numbers("rewards", rewards, mask)
    before = baselines.read(roles, given).to(given.device)
    return per_action(given - before, mask, float_dtype(rewards))


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
        """Sample variance (`ddof` 1); 0 for fewer than two rewards."""
        return self.squares / (self.count - 1) if self.count > 1 else 0.0

    def with_values(self, values: Sequence[float]) -> Moments:
        """Merge the moments of `values`, at least one (Chan, Golub and LeVeque 1979)."""
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
    """Mean and variance of all rewards added so far, by domain."""

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
        """Return the record as one line of JSON."""
        rows = [[name, m.count, m.mean, m.squares] for name, m in sorted(self.moments.items())]
        return json.dumps(rows)

    @classmethod
    def from_json(cls, text: str) -> DomainMoments:
        """Return the record from the output of `to_json`."""
        return cls({name: Moments(*saved) for name, *saved in json.loads(text)})


def domain_normalised(*, rewards: Tensor, domains: Sequence[str], moments: DomainMoments, eps: float = 1e-8) -> Tensor:
    """Return `(r - mean_d) / sqrt(var_d + eps)`, [N] in the dtype of the rewards: one scale for several domains.

    Applied before grouping, for advantages that preserve the scale of rewards (`dr_grpo`, `rloo`, `gae`); no effect
    on advantages that divide by a group deviation. Add the rewards of the step first (`moments.updated`), so that the
    first step has statistics. In a domain with fewer than two rewards, or with equal rewards up to rounding, rewards
    are only centred; in a domain without rewards they are unchanged. Raises ValueError for rewards that are not finite
    (naming the row) or not [N]. Like the reward scaling of PPO (arXiv:2005.12729), with statistics by domain.
    """
    values = _values_of(domains, rewards, "domains")
    found = []
    for domain, value in zip(domains, values, strict=True):
        own = moments.moments.get(domain, Moments())
        noise = reward_rtol(rewards.dtype) * max(1.0, abs(own.mean))
        gap = value - own.mean if abs(value - own.mean) > noise else 0.0
        found.append(gap / (own.variance + eps) ** 0.5 if own.variance > noise**2 else gap)
    return torch.tensor(found, dtype=torch.float64).to(rewards.device, float_dtype(rewards))


def _values_of(keys: Sequence[object], rewards: Tensor, name: str) -> list[float]:
    if rewards.ndim != 1 or len(keys) != len(rewards):
        raise ValueError(f"{name} and rewards must be [N], not [{len(keys)}] and {list(rewards.shape)}")
    found: list[float] = numbers("rewards", rewards, rewards[:, None]).tolist()
    return found
