"""Policy losses per token or per trajectory, to be aggregated, and the terms that are added to them.

Every function takes padded tensors [N, L] by keyword and returns [N, L], 0 where `mask` is 0, or [N] if its docstring
says so. The gradient flows through `logprobs` alone; all else is constant. Masked positions never matter, NaN and
infinity included. Statistics of the whole batch (a choice of tokens, weights, a count) are arguments that are
computed once, so that microbatches add up to the same gradient.

The losses on pairs (`dpo` and its kin) are in `algorithms.preference` and have its shapes; they are names of this
package too. A new loss is one decorated function in a module here (`algorithm.LossSpec`), a new or an old one.
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
