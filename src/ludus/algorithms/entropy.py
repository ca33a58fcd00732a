"""Entropy of the whole next-token distribution."""

from __future__ import annotations

import torch
from torch import Tensor


def entropy(*, logits: Tensor, temperature: float = 1.0) -> Tensor:
    """`-sum_v p log p` in nats of `softmax(logits / temperature)`; `logits` [..., V] gives [...].

    Half precision is computed and returned in float32. A logit of -inf (a forbidden token) counts 0, in the
    value and in the gradient.
    """
    wide = logits if logits.dtype in (torch.float32, torch.float64) else logits.float()
    logprobs = torch.log_softmax(wide / temperature, dim=-1)
    finite = torch.where(logprobs == -torch.inf, 0.0, logprobs)
    return -(logprobs.exp() * finite).sum(-1)
