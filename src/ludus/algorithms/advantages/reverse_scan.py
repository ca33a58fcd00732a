"""The action tokens of each row without the gaps between them, and sums that run back over them.

An observation is neither a step nor a discount: returns and temporal differences live on the subsequence of
action tokens. `ActionTokens` pushes it to the left of each row ([N, T], T the longest row) and back.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ludus.algorithms.advantages.rows import cells
from ludus.algorithms.masking import select


@dataclass(frozen=True, slots=True)
class ActionTokens:
    """Where the action tokens of `mask` [N, L] are.

    `columns` [N, T] int: the column of each row's t-th action token; `present` [N, T] bool: whether it has
    one.
    """

    mask: Tensor
    columns: Tensor
    present: Tensor

    @property
    def last(self) -> Tensor:
        """[N, T] bool, set on the last action token of each row."""
        return self.present & ~shifted(self.present, False)

    def take(self, name: str, values: Tensor) -> Tensor:
        """`values` [N, L] at the action tokens, [N, T] float64, 0 past the end of a row.

        What stands elsewhere (NaN too) is not read. ValueError for a wrong shape or a number not finite.
        """
        return cells(name, values, self.mask).gather(1, self.columns)

    def spread(self, values: Tensor, dtype: torch.dtype) -> Tensor:
        """The inverse: `values` [N, T] at their columns, [N, L] in `dtype`, 0 elsewhere."""
        empty = torch.zeros(self.mask.shape, dtype=torch.float64, device=self.mask.device)
        return empty.scatter(1, self.columns, select(values, self.present)).to(dtype)

    def following(self, values: Tensor, after: Tensor) -> Tensor:
        """`values` [N, T] of the next action token; `after` [N] at each row's last one."""
        return torch.where(self.last, after[:, None], select(shifted(values, 0.0), self.present))


def action_tokens(mask: Tensor) -> ActionTokens:
    """The action tokens of `mask` [N, L]. ValueError unless it has two axes."""
    if mask.ndim != 2:
        raise ValueError(f"mask must be [N, L], not {list(mask.shape)}")
    chosen = mask.bool()
    counts = chosen.sum(1)
    longest = int(counts.max()) if counts.numel() else 0
    columns = torch.sort((~chosen).long(), dim=1, stable=True).indices[:, :longest]
    return ActionTokens(chosen, columns, torch.arange(longest, device=mask.device) < counts[:, None])


def shifted(values: Tensor, fill: float | bool) -> Tensor:
    """`values` [N, X] of the next position; `fill` in the last column."""
    return torch.cat([values[:, 1:], torch.full_like(values[:, :1], fill)], 1)


def scan_back(terms: Tensor, decay: Tensor) -> Tensor:
    """`y_t = terms_t + decay_t y_{t+1}`, from the right; both [N, X], and so is the result."""
    found = torch.empty_like(terms)
    running = terms.new_zeros(terms.shape[0])
    for t in range(terms.shape[1] - 1, -1, -1):
        running = terms[:, t] + decay[:, t] * running
        found[:, t] = running
    return found
