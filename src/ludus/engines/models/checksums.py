"""Per-tensor digests of weights, to verify that a server holds the weights that were sent.

A digest is the SHA-256 of a tensor's raw bytes, as reported by vLLM's `weight_checker`. vLLM fuses some
tensors and pads the vocabulary, so the expected digests are computed likewise. On a CPU it repacks linear
weights and drops the originals; their digest is then that of an empty tensor and verifies nothing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
_VOCABULARY = ("embed_tokens.weight", "lm_head.weight")
_VOCABULARY_ROWS = 64
_EMPTY = hashlib.sha256().hexdigest()


@dataclass(frozen=True, slots=True)
class WeightProof:
    """Number of a server's tensors verified, names of those that differ, and number that could not be
    verified."""

    proved: int
    wrong: tuple[str, ...]
    silent: int


def tensor_digest(tensor: torch.Tensor) -> str:
    """Return the SHA-256 of the tensor's bytes in row-major order, as hexadecimal text."""
    import torch

    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return hashlib.sha256(flat.view(torch.uint8).numpy().data).hexdigest()


def compare_digests(theirs: Mapping[str, str], sent: Mapping[str, torch.Tensor]) -> WeightProof:
    """Compare a server's digests with the tensors sent, in any of the usual precisions.

    Names may have a worker's prefix (`dp0:pp0:pcp0:tp0:`). With several workers, each of which holds shards,
    nothing is verified.
    """
    workers = {name.rpartition(":")[0] for name in theirs}
    if len(workers) > 1:
        return WeightProof(0, (), len(theirs))
    proved, silent, wrong = 0, 0, []
    for full_name, digest in theirs.items():
        name = full_name.rpartition(":")[2]
        expected = _whole(name, sent)
        if expected is None or digest == _EMPTY:
            silent += 1
        elif any(tensor_digest(candidate) == digest for candidate in _candidates(name, expected)):
            proved += 1
        else:
            wrong.append(name)
    return WeightProof(proved, tuple(sorted(wrong)), silent)


def _whole(name: str, sent: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
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
