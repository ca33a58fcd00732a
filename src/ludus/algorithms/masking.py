"""What every function here does first: check shapes, and take the masked positions out of play.

`x * mask` keeps NaN and infinity alive (in the value or in the gradient); selecting before the arithmetic
does not.
"""

from __future__ import annotations

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Importance ratios are clamped to exp(+-20)."""


def select(values: Tensor, mask: Tensor) -> Tensor:
    """`values` [N, L] where `mask` [N, L] is set, 0 elsewhere; no gradient flows to the other positions."""
    return torch.where(mask.bool(), values, torch.zeros((), dtype=values.dtype, device=values.device))


def clamped_ratio(log_ratio: Tensor) -> Tensor:
    """`exp(log_ratio)` with the exponent clamped to +-20; any shape."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def check_shapes(mask: Tensor, **tensors: Tensor) -> None:
    """ValueError unless `mask` is [N, L] and every tensor has its shape (broadcasting hides mistakes)."""
    if mask.ndim != 2:
        raise ValueError(f"mask must be [N, L], not {list(mask.shape)}")
    for name, tensor in tensors.items():
        if tensor.shape != mask.shape:
            raise ValueError(f"{name} has shape {list(tensor.shape)}, mask {list(mask.shape)}")


def entropy(*, logits: Tensor, temperature: float = 1.0) -> Tensor:
    """`-sum_v p log p` in nats of `softmax(logits / temperature)`; `logits` [..., V] gives [...].

    Half precision is computed and returned in float32. A logit of -inf (a forbidden token) counts 0, in the
    value and in the gradient.
    """
    wide = logits if logits.dtype in (torch.float32, torch.float64) else logits.float()
    logprobs = torch.log_softmax(wide / temperature, dim=-1)
    finite = torch.where(logprobs == -torch.inf, 0.0, logprobs)
    return -(logprobs.exp() * finite).sum(-1)
