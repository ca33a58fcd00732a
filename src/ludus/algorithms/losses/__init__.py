"""Policy losses per token or per trajectory, before aggregation, and auxiliary losses.

Every function takes padded tensors [N, L] by keyword and returns [N, L], 0 where `mask` is 0, or [N] if its docstring
says so. The gradient flows through `logprobs` only. Masked positions are ignored, also if NaN or infinite.
Statistics of the whole batch (a token selection, weights, a count) are arguments computed once, so that microbatches
add up to the same gradient.

Losses on pairs (such as `dpo`) are defined in `algorithms.preference`, with other shapes, and exported here as well.
To add a loss, write a decorated function in a new or existing module of this package (`algorithm.LossSpec`).
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
