"""How a query weighs keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


class MaskShape(NamedTuple):
    """The last `queries` of `columns` positions, each seeing `window` (0: all), for heads of a `group`."""

    queries: int
    columns: int
    window: int
    group: int


def added_mask(shape: MaskShape, like: Tensor) -> Tensor:
    """What is added to scores `[group * queries, columns]`: -inf where a position may not look.

    The heads of a group stand below each other. Dtype and device are those of `like`.
    """
    at = torch.arange(shape.columns - shape.queries, shape.columns, device=like.device)[:, None]
    seen = torch.arange(shape.columns, device=like.device)[None]
    mask = seen <= at
    if shape.window:
        mask &= seen > at - shape.window
    added = like.new_zeros(mask.shape).masked_fill_(~mask, -torch.inf)
    return added.repeat(shape.group, 1)


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
