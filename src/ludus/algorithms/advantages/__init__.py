"""Advantages: from the rewards of a whole batch to one number per action token.

Every function takes its tensors by keyword and returns [N, L]: `rewards` [N] (or `turn_rewards` [N, K] with `turn`
[N, L]), `group` [N] integers, `mask` [N, L], and what else it names. The result is 0 where the mask is 0, also
where an input is NaN. They compute in float64, and raise ValueError, naming the row, for a number that is read and not
finite, and for a group with one member if members are compared. Equal rewards of a group result in exactly 0, also if
they differ by rounding.

| module | compares or sums |
|---|---|
| `group_relative` | trajectories of a group or a batch; a greedy trajectory |
| `turns` | turns of a group, without a critic |
| `gae` | rewards and values over action tokens or turns, also off policy |
| `process_rewards` | rewards of a second model |
| `running_baselines` | statistics that outlive a step |
| `calibration` | per-turn reward tiers, from recorded rollouts |

A new advantage is one decorated function in a module here (`algorithm.AdvantageSpec`), a new or an old one. The public
names of all modules are names of this package.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from ludus.algorithms.algorithm import AdvantageSpec, Need, declared_in, modules_of, publish
from ludus.algorithms.tensors import Tensor

_MODULES = modules_of(__name__, __path__)
_SPECS = declared_in(AdvantageSpec, _MODULES)
__all__ = publish(__name__, _MODULES)

if TYPE_CHECKING:

    def __getattr__(name: str) -> Callable[..., Tensor]: ...


ADVANTAGES: Mapping[str, AdvantageSpec] = {name: spec for name, spec in _SPECS.items() if spec.selectable}
"""The values of `algorithm.advantage`."""
TARGETS: Mapping[str, AdvantageSpec] = {name: spec for name, spec in _SPECS.items() if not spec.selectable}
"""The targets of critics that are not selectable advantages."""


def advantages_that_need(need: Need) -> list[str]:
    """Return the names of the built-in advantages with a need."""
    return [name for name, spec in ADVANTAGES.items() if spec.has(need)]
