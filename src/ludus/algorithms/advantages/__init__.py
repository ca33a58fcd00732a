"""Advantages: map the rewards of a whole batch to one number per action token.

Every function takes its tensors by keyword, computes in float64 and returns [N, L], 0 off the mask (also for NaN
inputs): `rewards` [N] (or `turn_rewards` [N, K] with `turn` [N, L]), `group` [N] integers, `mask` [N, L], and its own
inputs. Equal rewards of a group, up to rounding, result in exactly 0. A non-finite number at a used position, and a
group of one if members are compared, raise a ValueError that names the row. The package exports all public names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from ludus.algorithms.algorithm import AdvantageSpec, Need, declared_in, modules_of, publish
from ludus.algorithms.tensors import Tensor

_MODULES = modules_of(__name__, __path__)
__all__ = publish(__name__, _MODULES)

if TYPE_CHECKING:

    def __getattr__(name: str) -> Callable[..., Tensor]: ...


ADVANTAGES: Mapping[str, AdvantageSpec] = {
    name: spec for name, spec in declared_in(AdvantageSpec, _MODULES).items() if spec.selectable
}
"""The values of `algorithm.advantage`."""


def advantages_that_need(need: Need) -> list[str]:
    """Return the names of the built-in advantages with a need."""
    return [name for name, spec in ADVANTAGES.items() if spec.has(need)]
