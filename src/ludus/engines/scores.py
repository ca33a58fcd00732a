"""How a query weighs keys."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


@dataclass(frozen=True, slots=True)
class Scores:
    """The scale, the window (0: all) and the soft cap (0: none)."""

    scale: float
    window: int
    softcap: float

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        """`[N, H, Q, D]` of `query` over `key` and `value` `[N, H, L, D]`; `mask` says where it may look.

        A mask of truth values, or of numbers to add to the scores.
        """
        if not self.softcap:
            return scaled_dot_product_attention(query, key, value, mask, scale=self.scale)
        weights = self.softcap * torch.tanh(query @ key.transpose(-1, -2) * (self.scale / self.softcap))
        if mask is not None:
            weights = weights.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else weights + mask
        return weights.float().softmax(-1).to(value.dtype) @ value
