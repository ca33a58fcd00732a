"""Advantages: map the rewards of a whole batch to one number per action token.

Every function takes its tensors by keyword and returns [N, L]: `rewards` [N] (or `turn_rewards` [N, K] with `turn`
[N, L]), `group` [N] integers, `mask` [N, L], and its own inputs. The result is 0 off the mask, also for NaN
inputs. They compute in float64, and raise ValueError, naming the row, for a non-finite number at a used position, and
for a group with one member if members are compared. Equal rewards of a group result in exactly 0, also if they differ
by rounding.

| module | inputs |
|---|---|
| `group_relative` | trajectories of a group or a batch; a greedy trajectory |
| `turns` | turns of a group, without a critic |
| `gae` | rewards and values over action tokens or turns, also off policy |
| `process_rewards` | rewards of a second model |
| `running_baselines` | statistics over several steps |
| `calibration` | per-turn reward tiers, from recorded rollouts |

To add an advantage, write a decorated function in a new or existing module of this package
(`algorithm.AdvantageSpec`). The package exports the public names of all modules.
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
"""Critic targets that are not selectable as advantages."""


def advantages_that_need(need: Need) -> list[str]:
    """Return the names of the built-in advantages with a need."""
    return [name for name, spec in ADVANTAGES.items() if spec.has(need)]
