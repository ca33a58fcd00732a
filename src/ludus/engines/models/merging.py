"""Merging of models that were trained apart from one base, by their weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, get_args

import torch
from torch import Tensor

MergeMethod = Literal["linear", "task_arithmetic", "ties"]
MERGE_METHODS: tuple[MergeMethod, ...] = get_args(MergeMethod)


def merge_tensors(
    tensors: Sequence[Tensor],
    weights: Sequence[float],
    method: MergeMethod = "linear",
    base: Tensor | None = None,
    density: float = 0.2,
) -> Tensor:
    """Return the merge of tensors of one shape, computed in float32, with the dtype of the first.

    - `linear`: mean with the `weights`, divided by their sum (model soups, arXiv:2203.05482).
    - `task_arithmetic`: `base + sum_i w_i (theta_i - base)` (arXiv:2212.04089).
    - `ties`: of each difference to the base the share `density` of largest magnitude stays; of these, weighted, each
      entry keeps those with the sign of their sum, and `base` plus their mean is the result (TIES, arXiv:2306.01708).
      A mean is over the kept entries, weighted.

    Raises ValueError for a method that needs a missing base.
    """
    scale = torch.tensor(list(weights)).view(-1, *[1] * tensors[0].ndim)
    stacked = torch.stack([tensor.float() for tensor in tensors])
    if method == "linear":
        return ((stacked * scale).sum(0) / scale.sum()).to(tensors[0].dtype)
    if base is None:
        raise ValueError(f"{method} needs a base model")
    changes = stacked - base.float()
    if method == "ties":
        changes = torch.stack([_largest(change, density) for change in changes])
        agrees = (changes * (changes * scale).sum(0)) > 0
        total = (agrees * scale).sum(0)
        merged = (changes * scale * agrees).sum(0) / torch.where(total > 0, total, 1.0)
    else:
        merged = (changes * scale).sum(0)
    return (base.float() + merged).to(tensors[0].dtype)


def _largest(change: Tensor, density: float) -> Tensor:
    """Return the tensor with all but its share `density` of largest magnitude set to 0, at least one entry."""
    kept = max(1, round(density * change.numel()))
    index = change.abs().flatten().topk(kept).indices
    mask = torch.zeros(change.numel(), dtype=torch.bool).index_fill_(0, index, True)
    return change * mask.view_as(change)


def merge_weights(
    models: Sequence[Mapping[str, Tensor]],
    weights: Sequence[float],
    method: MergeMethod = "linear",
    base: Mapping[str, Tensor] | None = None,
    density: float = 0.2,
) -> dict[str, Tensor]:
    """Return the merge of each tensor, by name. Raises ValueError if names or shapes differ."""
    for other in [*models[1:], *([] if base is None else [base])]:
        unlike = [n for n in sorted(models[0].keys() | other.keys()) if _shape(models[0], n) != _shape(other, n)]
        if unlike:
            raise ValueError(f"{unlike[0]} is {_shape(models[0], unlike[0])} and {_shape(other, unlike[0])}")
    return {
        name: merge_tensors(
            [model[name] for model in models], weights, method, None if base is None else base[name], density
        )
        for name in models[0]
    }


def _shape(model: Mapping[str, Tensor], name: str) -> str:
    return str(tuple(model[name].shape)) if name in model else "missing"
