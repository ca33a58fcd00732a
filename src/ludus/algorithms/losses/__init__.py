"""Policy losses per token or per trajectory, before aggregation, and auxiliary losses.

Every function takes padded tensors [N, L] by keyword and returns [N, L], 0 where `mask` is 0 (also if the input is NaN
there), or [N] if its docstring says so. The gradient flows through `logprobs` only. Statistics of the whole batch are
arguments computed once, so that microbatches add up to the same gradient. Losses on pairs (`algorithms.preference`) are
exported here as well.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from ludus.algorithms import preference
from ludus.algorithms.algorithm import LossSpec, declared_in, modules_of, publish
from ludus.algorithms.tensors import Tensor

_MODULES = modules_of(__name__, __path__)
__all__ = publish(__name__, (*_MODULES, preference))

if TYPE_CHECKING:

    def __getattr__(name: str) -> Callable[..., Tensor]: ...


LOSSES: Mapping[str, LossSpec] = declared_in(LossSpec, _MODULES)
"""The values of `algorithm.loss`."""
