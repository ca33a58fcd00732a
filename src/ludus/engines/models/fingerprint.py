"""Digests of weights: of a whole model, computed identically by learner and engine, and of a server's tensors.

A server's digest is the SHA-256 of a tensor's raw bytes, as reported by vLLM's `weight_checker`. vLLM fuses some
tensors and pads the vocabulary, so the expected digests are computed likewise. On a CPU it repacks linear weights
and drops the originals; their digest is then that of an empty tensor and verifies nothing.
"""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import nn

    from ludus.engines.models.lora import LowRank

_FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
_VOCABULARY = ("embed_tokens.weight", "lm_head.weight")
_VOCABULARY_ROWS = 64
_CHUNK_BYTES = 2**26
_MAX_THREADS = 8
_EMPTY = hashlib.sha256().hexdigest()


def fingerprint_module(module: nn.Module) -> str:
    """Return a BLAKE2b digest (32 hex characters) of all named parameters, a tied one under its first name.

    A PEFT model has the digest of its base model with the adapters held separately; UserError if it is not LoRA.
    """
    from ludus.engines.models.lora import lora_layers

    return fingerprint_adapted(module, dict(lora_layers(module)))


def fingerprint_adapted(module: nn.Module, pairs: Mapping[str, LowRank]) -> str:
    """Return the digest of a model's own parameters with factors (see `lora_layers`) in their layers' precision."""
    return _fingerprint_parts(dict(module.named_parameters()), pairs)


def fingerprint_gathered(module: nn.Module, tensors: Mapping[str, torch.Tensor]) -> str:
    """Return `fingerprint_module` of a model whose gathered parameters are `tensors`, by its names."""
    from ludus.engines.models.lora import FACTOR, LowRank, factor_key, lora_layers

    found = ((match, tensor) for name, tensor in tensors.items() if (match := FACTOR.fullmatch(name)))
    factors = {(factor_key(match[1], match[3]), match[2]): tensor for match, tensor in found}
    pairs = {key: LowRank(factors[key, "A"], factors[key, "B"], pair.scaling) for key, pair in lora_layers(module)}
    return _fingerprint_parts(tensors, pairs)


def _fingerprint_parts(tensors: Mapping[str, torch.Tensor], pairs: Mapping[str, LowRank]) -> str:
    import torch

    plain = ((name.removeprefix("base_model.model."), p) for name, p in tensors.items() if ".lora_" not in name)
    base = {name.replace(".base_layer.", "."): p for name, p in plain}
    digest = fingerprint_tensors(base)
    if not pairs:
        return digest
    factors: dict[str, torch.Tensor] = {}
    for layer, pair in pairs.items():
        dtype = base[f"{layer.rpartition('/')[2]}.weight"].dtype
        factors[f"{layer}.lora_A"], factors[f"{layer}.lora_B"] = pair.down.to(dtype), pair.up.to(dtype)
        factors[f"{layer}.scaling"] = torch.tensor(pair.scaling, dtype=torch.float32)
    combined = f"{digest}+{fingerprint_tensors(factors)}"
    return hashlib.blake2b(combined.encode(), digest_size=16).hexdigest()


def fingerprint_tensors(tensors: Mapping[str, torch.Tensor]) -> str:
    """Return the digest of each tensor's name, dtype, shape and content, in order of name. That of a tensor without
    gradient is cached until its version counter or memory address changes."""
    ordered = sorted(tensors.items())
    digest = hashlib.blake2b(digest_size=16)
    for (name, tensor), content in zip(ordered, _content_digests([t for _, t in ordered]), strict=True):
        digest.update(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}|".encode())
        digest.update(content)
    return digest.hexdigest()


def _content_digests(tensors: Sequence[torch.Tensor]) -> list[bytes]:
    """Return the digest of each tensor's raw bytes; of more than `_CHUNK_BYTES`, the digest of its chunks' digests."""
    cache = _frozen_digests()
    found = [None if t.requires_grad or t.is_inference() else cache.get(t) for t in tensors]
    digests = [entry[1] if entry and entry[0] == _state(t) else b"" for t, entry in zip(tensors, found, strict=True)]
    missing = [i for i, digest in enumerate(digests) if not digest]
    chunks = [_chunks(tensors[i]) for i in missing]
    flat = [chunk for each in chunks for chunk in each]
    if sum(chunk.nbytes for chunk in flat) < _CHUNK_BYTES:
        hashed: Iterator[bytes] = map(_hash, flat)
    else:
        with ThreadPoolExecutor(min(_MAX_THREADS, os.cpu_count() or 1)) as pool:
            hashed = pool.map(_hash, flat)
    for i, each in zip(missing, chunks, strict=True):
        parts = [next(hashed) for _ in each]
        digests[i] = parts[0] if len(parts) == 1 else hashlib.blake2b(b"".join(parts)).digest()
        if not (tensors[i].requires_grad or tensors[i].is_inference()):
            cache[tensors[i]] = _state(tensors[i]), digests[i]
    return digests


def _hash(chunk: torch.Tensor) -> bytes:
    return hashlib.blake2b(_raw_bytes(chunk)).digest()


def _chunks(tensor: torch.Tensor) -> Sequence[torch.Tensor]:
    """Return a tensor in parts of at most `_CHUNK_BYTES`, flat if there are several."""
    import torch

    each = _CHUNK_BYTES // tensor.element_size()
    return [tensor] if tensor.numel() <= each else torch.split(tensor.detach().reshape(-1), each)


def _state(tensor: torch.Tensor) -> tuple[int, int]:
    return tensor._version, tensor.data_ptr()


@functools.cache
def _frozen_digests() -> MutableMapping[torch.Tensor, tuple[tuple[int, int], bytes]]:
    """Return the cache: version and address of a tensor's memory, and the digest. Holds only weak references."""
    from torch.utils.weak import WeakIdKeyDictionary

    return WeakIdKeyDictionary()


def _raw_bytes(tensor: torch.Tensor) -> memoryview:
    import torch

    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data


@dataclass(frozen=True, slots=True)
class WeightProof:
    """Number of tensors of a server that agree, names of those that differ, and number that cannot be verified."""

    proved: int
    wrong: tuple[str, ...]
    silent: int


def tensor_digest(tensor: torch.Tensor) -> str:
    """Return the SHA-256 of the tensor's bytes in row-major order, as hexadecimal text."""
    return hashlib.sha256(_raw_bytes(tensor)).hexdigest()


def compare_digests(theirs: Mapping[str, str], sent: Mapping[str, torch.Tensor]) -> WeightProof:
    """Compare a server's digests with the tensors sent, in any of the usual precisions. Names may have a worker's
    prefix (`dp0:pp0:pcp0:tp0:`); with several workers, which hold shards, nothing is verified."""
    workers = {name.rpartition(":")[0] for name in theirs}
    if len(workers) > 1:
        return WeightProof(0, (), len(theirs))
    proved, silent, wrong = 0, 0, []
    for full_name, digest in theirs.items():
        name = full_name.rpartition(":")[2]
        expected = _expected_tensor(name, sent)
        if expected is None or digest == _EMPTY:
            silent += 1
        elif digest in map(tensor_digest, _candidates(name, expected)):
            proved += 1
        else:
            wrong.append(name)
    return WeightProof(proved, tuple(sorted(wrong)), silent)


def _expected_tensor(name: str, sent: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
    """Return the tensor of that name, concatenated from its parts if the server fuses them."""
    import torch

    if name in sent:
        return sent[name]
    for fused, parts in _FUSED.items():
        names = [name.replace(f".{fused}.", f".{part}.") for part in parts]
        if f".{fused}." in name and all(part in sent for part in names):
            return torch.cat([sent[part] for part in names])
    return None


def _candidates(name: str, tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    import torch

    for dtype in dict.fromkeys((tensor.dtype, torch.float32, torch.bfloat16, torch.float16)):
        cast = tensor.to(dtype)
        yield cast
        missing = -tensor.shape[0] % _VOCABULARY_ROWS
        if name.endswith(_VOCABULARY) and missing:
            yield torch.cat([cast, cast.new_zeros(missing, *cast.shape[1:])])
