"""Per-tensor digests of weights, and what a server's digests prove about the weights that were sent.

A digest is the SHA-256 of a tensor's raw bytes, under the tensor's name, as vLLM's `weight_checker` gives it.
vLLM fuses some tensors and pads the vocabulary; the digests that are expected follow it there. On a CPU it
repacks linear weights and drops the originals, whose digest is then that of nothing and proves nothing.
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
    """How many of a server's tensors are proved equal to those sent, which differ, how many say nothing."""

    proved: int
    wrong: tuple[str, ...]
    silent: int


def tensor_digest(tensor: torch.Tensor) -> str:
    """SHA-256 of the tensor's bytes, row by row, as hexadecimal text."""
    import torch

    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return hashlib.sha256(flat.view(torch.uint8).numpy().data).hexdigest()


def compare_digests(theirs: Mapping[str, str], sent: Mapping[str, torch.Tensor]) -> WeightProof:
    """Hold a server's digests against the tensors that it was sent, under any of the usual precisions.

    Names may begin with a worker's (`dp0:pp0:pcp0:tp0:`); where there are several workers each holds a part
    of the tensors, and nothing is proved.
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
    """The tensor of that name, put together from its parts where the server fuses them."""
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
