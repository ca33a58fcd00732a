"""Attention of ragged batches over paged keys and values, as transformers plugs it in.

All new tokens of all sequences stand in one row `[1, T]`. For each layer the new keys and values go into the
pages, then each token attends to its own sequence's pages up to its position. A compiled kernel does that on
a CPU in float32 if a compiler is at hand, else torch (`torch_attention`).
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import AttentionInterface

from ludus.engines.embedded.attention_c import Kernel
from ludus.engines.embedded.attention_torch import ScoreRule, TorchPass
from ludus.engines.embedded.kv_pool import PagePool
from ludus.errors import EngineError

NAME = "ludus_ragged"
"""The attention implementation's name in transformers."""


@dataclass(frozen=True, slots=True)
class RaggedPass:
    """Where the T new tokens of a forward pass belong.

    `slots` and `positions` `[T]` int32 name each token's row in `table` (-1: padding) and its place in its
    sequence; `table` `[S, M]` int32 holds the pages of each slot. `how` is what attends.
    """

    pool: PagePool
    slots: NDArray[np.int32]
    positions: NDArray[np.int32]
    table: NDArray[np.int32]
    how: Kernel | TorchPass


def ragged_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,  # noqa: ANN401 (what transformers hands on, model by model)
) -> tuple[Tensor, None]:
    """Attend `query` `[1, Hq, T, D]` to the pages, which take `key` and `value` `[1, H, T, D]` first.

    Gives `[1, T, Hq, D]`. `options` holds transformers' `scaling`, `sliding_window` and `softcap`, and
    `ragged`, the `RaggedPass`. Raises EngineError for kinds of attention that this is not.
    """
    ragged: RaggedPass | None = options.get("ragged")
    if ragged is None:
        raise EngineError("The model does not hand the engine's pass on to its attention.")
    if options.get("s_aux") is not None or attention_mask is not None:
        raise EngineError("The model's attention has sinks or a mask of its own.")
    layer: int = module.layer_idx  # type: ignore[assignment]
    scale = options.get("scaling") or query.shape[-1] ** -0.5
    window = options.get("sliding_window") or 0
    softcap = options.get("softcap") or 0.0
    new = (query[0], key[0], value[0])
    if isinstance(ragged.how, TorchPass):
        return ragged.how.attend(layer, new, ScoreRule(scale, window, softcap))[None], None
    keys, values = ragged.pool.keys[layer], ragged.pool.values[layer]
    return ragged.how.attend(ragged, keys, values, new, (scale, window, softcap))[None], None


def register() -> None:
    """Make the attention known to transformers under `NAME`."""
    warnings.filterwarnings("ignore", "Sparse CSR tensor support is in beta", UserWarning)
    AttentionInterface.register(NAME, ragged_attention)
