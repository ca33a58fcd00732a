"""Ragged-batch attention over paged keys and values, as a transformers attention implementation.

All new tokens of all sequences form one row `[1, T]`. Each layer writes the new keys and values to the pages;
each token then attends to its sequence's pages up to its position. This uses a compiled kernel on a CPU in
float32 if a compiler is available, otherwise torch (`attention_torch`).
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
"""Name of the attention implementation in transformers."""


@dataclass(frozen=True, slots=True)
class RaggedPass:
    """Layout of the T new tokens of a forward pass.

    `slots` and `positions` `[T]` int32 are each token's row in `table` (-1: padding) and position in its
    sequence; `table` `[S, M]` int32 holds the pages of each slot. `how` computes the attention.
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
    **options: Any,  # noqa: ANN401 (options of transformers, per model)
) -> tuple[Tensor, None]:
    """Store `key` and `value` `[1, H, T, D]` in the pages and attend from `query` `[1, Hq, T, D]`.

    Returns `[1, T, Hq, D]`. `options` holds transformers' `scaling`, `sliding_window` and `softcap`, and
    `ragged`, the `RaggedPass`. Raises EngineError for an unsupported kind of attention.
    """
    ragged: RaggedPass | None = options.get("ragged")
    if ragged is None:
        raise EngineError("The model does not pass the engine's `ragged` argument to its attention.")
    if options.get("s_aux") is not None or attention_mask is not None:
        raise EngineError("The model's attention has sinks or its own mask.")
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
    """Register the attention with transformers under `NAME`."""
    warnings.filterwarnings("ignore", "Sparse CSR tensor support is in beta", UserWarning)
    AttentionInterface.register(NAME, ragged_attention)
