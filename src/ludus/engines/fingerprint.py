"""A digest of weights, the same function for learner and engine."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import nn


def fingerprint_module(module: nn.Module) -> str:
    """A BLAKE2b digest (32 hex characters) of all named parameters, equal exactly for equal weights.

    A tied parameter counts once, under its first name; buffers do not count.
    """
    return fingerprint_tensors(dict(module.named_parameters()))


def fingerprint_tensors(tensors: Mapping[str, torch.Tensor]) -> str:
    """The digest of name, dtype, shape and raw bytes of each tensor, in the order of their names."""
    digest = hashlib.blake2b(digest_size=16)
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}|".encode())
        digest.update(_raw_bytes(tensor))
    return digest.hexdigest()


def _raw_bytes(tensor: torch.Tensor) -> memoryview:
    import torch

    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data
