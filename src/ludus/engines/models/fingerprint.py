"""Digests of weights, computed identically by learner and engine."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import nn

    from ludus.engines.models.lora import LowRank


def fingerprint_module(module: nn.Module) -> str:
    """Return a BLAKE2b digest (32 hex characters) of all named parameters.

    A tied parameter counts once, under its first name; buffers are ignored. A PEFT model has the same digest
    as its base model with the adapter held separately. Raises UserError for a PEFT model with anything but
    plain LoRA.
    """
    from ludus.engines.models.lora import lora_layers

    return fingerprint_adapted(module, dict(lora_layers(module)))


def fingerprint_adapted(module: nn.Module, pairs: Mapping[str, LowRank]) -> str:
    """Return the digest of a model's own parameters combined with one adapter's factors by layer.

    Factors are converted to the precision of their layer, scalings to float32.
    """
    return _fingerprint_parts(dict(module.named_parameters()), pairs)


def fingerprint_gathered(module: nn.Module, tensors: Mapping[str, torch.Tensor]) -> str:
    """Return `fingerprint_module` of a model whose gathered parameters are `tensors`, by its names."""
    from ludus.engines.models.lora import FACTOR, LowRank, lora_layers

    factors = {match.groups(): t for name, t in tensors.items() if (match := FACTOR.fullmatch(name))}
    pairs = {
        layer: LowRank(factors[layer, "A"], factors[layer, "B"], pair.scaling) for layer, pair in lora_layers(module)
    }
    return _fingerprint_parts(tensors, pairs)


def _fingerprint_parts(tensors: Mapping[str, torch.Tensor], pairs: Mapping[str, LowRank]) -> str:
    import torch

    base = {_plain(name): p for name, p in tensors.items() if ".lora_" not in name}
    digest = fingerprint_tensors(base)
    if not pairs:
        return digest
    factors: dict[str, torch.Tensor] = {}
    for layer, pair in pairs.items():
        like = base[f"{layer}.weight"].dtype
        factors[f"{layer}.lora_A"], factors[f"{layer}.lora_B"] = pair.down.to(like), pair.up.to(like)
        factors[f"{layer}.scaling"] = torch.tensor(pair.scaling, dtype=torch.float32)
    both = f"{digest}+{fingerprint_tensors(factors)}"
    return hashlib.blake2b(both.encode(), digest_size=16).hexdigest()


def fingerprint_tensors(tensors: Mapping[str, torch.Tensor]) -> str:
    """Return the digest of each tensor's name, dtype, shape and content, in order of name.

    The digest of a tensor without gradient (such as a frozen base model) is cached until its version counter
    or memory address changes.
    """
    digest = hashlib.blake2b(digest_size=16)
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}|".encode())
        digest.update(_content(tensor))
    return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class _Known:
    """Digest of a tensor's content at one version of its memory."""

    version: int
    pointer: int
    digest: bytes


def _content(tensor: torch.Tensor) -> bytes:
    """Return the digest of a tensor's raw bytes."""
    if tensor.requires_grad or tensor.is_inference():
        return hashlib.blake2b(_raw_bytes(tensor)).digest()
    cache = _digests_of_frozen()
    state = (tensor._version, tensor.data_ptr())
    known = cache.get(tensor)
    if known is None or (known.version, known.pointer) != state:
        known = cache[tensor] = _Known(*state, hashlib.blake2b(_raw_bytes(tensor)).digest())
    return known.digest


@functools.cache
def _digests_of_frozen() -> MutableMapping[torch.Tensor, _Known]:
    """Return the cache of digests, whose entries are dropped with their tensors."""
    from torch.utils.weak import WeakIdKeyDictionary

    return WeakIdKeyDictionary()


def _plain(name: str) -> str:
    return name.removeprefix("base_model.model.").replace(".base_layer.", ".")


def _raw_bytes(tensor: torch.Tensor) -> memoryview:
    import torch

    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data
