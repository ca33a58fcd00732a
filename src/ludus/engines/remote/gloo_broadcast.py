"""Broadcast weights from the trainer to its servers over a dedicated gloo process group, without files.

A delta may be sent instead of all weights: only the changed elements and their indices, or nothing for an
unchanged tensor. Both sides compare a digest of the data sent.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Annotated, cast

from pydantic import BaseModel, Field

from ludus.engines.base import first_line
from ludus.errors import EngineError, SyncError

if TYPE_CHECKING:
    import torch
    from torch._C._distributed_c10d import TCPStore
    from torch.distributed import ProcessGroup

_INDICES, _VALUES = "@places", "@values"
_EMBEDDINGS, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
TRAINER = 0


class TransferAddress(BaseModel):
    """Address at which a server joins the group, and its rank among `count` members."""

    host: str = Field(min_length=1, max_length=253, pattern=r"^[0-9A-Za-z.:%_-]+$")
    port: int = Field(ge=1, le=65535)
    rank: int = Field(ge=1, le=65535)
    count: int = Field(ge=2, le=65536)
    timeout_s: float = Field(gt=0, le=86_400)


class TensorSpec(BaseModel):
    """Name, dtype and shape of a tensor to be sent."""

    name: str = Field(max_length=1000)
    dtype: str = Field(max_length=100)
    shape: list[Annotated[int, Field(ge=0, lt=2**40)]] = Field(max_length=16)


class WeightManifest(BaseModel):
    """The tensors to be sent, in order. `base` is the version that a delta applies to, None if all weights are sent."""

    version: int = Field(ge=-1, lt=10**18)
    base: int | None = Field(ge=-1, lt=10**18)
    digest: str = Field(max_length=200)
    tensors: list[TensorSpec]


@dataclass
class WeightTransferGroup:
    """Handle of one member of the group."""

    store: TCPStore
    group: ProcessGroup

    def broadcast(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Send or receive the tensors one by one. Raises EngineError on a lost connection or timeout."""
        from torch.distributed import BroadcastOptions

        options = BroadcastOptions()
        options.rootRank = TRAINER
        try:
            for tensor in tensors.values():
                self.group.broadcast([tensor], options).wait()
        except RuntimeError as error:
            raise EngineError(f"The weight broadcast failed: {first_line(error)}.") from error


def open_store(host: str, timeout_s: float) -> TCPStore:
    """Open the store, without access control, at a free port of `host`, or of all interfaces if that is not local."""
    from torch._C._distributed_c10d import TCPStore

    limit = timedelta(seconds=timeout_s)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, 0), family=family)
    except OSError:
        return TCPStore("0.0.0.0", 0, is_master=True, timeout=limit, wait_for_workers=False)
    port = listener.getsockname()[1]
    return TCPStore(host, port, None, True, limit, wait_for_workers=False, master_listen_fd=listener.detach())


def connect_store(place: TransferAddress) -> TCPStore:
    """Connect to the trainer's store. Raises EngineError if it is unreachable."""
    from torch._C._distributed_c10d import TCPStore

    limit = timedelta(seconds=place.timeout_s)
    try:
        return TCPStore(place.host, place.port, is_master=False, timeout=limit, wait_for_workers=False)
    except RuntimeError as error:
        raise EngineError(
            f"The trainer's store at {place.host}:{place.port} is unreachable: {first_line(error)}.",
            "Set engine.broadcast_host to an address at which servers can reach the trainer.",
        ) from error


def join_group(store: TCPStore, rank: int, count: int, timeout_s: float, address: str) -> WeightTransferGroup:
    """Form the group; the others reach this member at `address`. Raises EngineError if a member does not join."""
    from torch.distributed import ProcessGroupGloo

    options = vars(ProcessGroupGloo)["_Options"]()
    options._timeout = timedelta(seconds=timeout_s)
    try:
        options._devices = [ProcessGroupGloo.create_device(hostname=address)]
    except RuntimeError:
        options._devices = [ProcessGroupGloo.create_default_device()]
    try:
        group = ProcessGroupGloo(store, rank, count, options)
        return WeightTransferGroup(store, cast("ProcessGroup", group))
    except RuntimeError as error:
        raise EngineError(f"The weight transfer group could not be formed: {first_line(error)}.") from error


def join_as_server(place: TransferAddress) -> WeightTransferGroup:
    """Join the trainer's group as a server. Raises EngineError if the group cannot be formed."""
    store, address = connect_store(place), place.host
    family = socket.AF_INET6 if ":" in place.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe, suppress(OSError):  # sends nothing
        probe.connect((place.host, place.port))
        address = str(probe.getsockname()[0])  # this machine's on the route to the trainer
    return join_group(store, place.rank, place.count, place.timeout_s, address)


def receive_tensors(line: WeightTransferGroup, manifest: WeightManifest) -> dict[str, torch.Tensor]:
    """Receive the tensors of a manifest. Raises EngineError if the connection fails, SyncError if corrupt."""
    tensors = empty_tensors(manifest)
    line.broadcast(tensors)
    check_digest(manifest, tensors)
    return tensors


def with_lm_head(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Add the output head if it is tied to the embeddings; servers that tie them too ignore it."""
    tied = _EMBEDDINGS in state and _HEAD not in state
    return {**state, _HEAD: state[_EMBEDDINGS]} if tied else dict(state)


def weight_delta(state: Mapping[str, torch.Tensor], before: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the bitwise changes of `state` against `before` (same names and shapes), in the format sent."""
    import torch

    found: dict[str, torch.Tensor] = {}
    for name, tensor in state.items():
        flat, old = tensor.reshape(-1), before[name].reshape(-1)
        size = flat.element_size()
        changed = (flat.view(torch.uint8) != old.view(torch.uint8)).view(-1, size).any(1)
        indices = changed.nonzero()[:, 0]
        index_dtype = torch.int32 if flat.numel() < 1 << 31 else torch.int64
        if len(indices) * (size + index_dtype.itemsize) >= flat.numel() * size:
            found[name] = tensor
        elif len(indices):
            found[name + _INDICES] = indices.to(index_dtype)
            found[name + _VALUES] = flat[indices]
    return found


def apply_delta(sent: Mapping[str, torch.Tensor], own: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Reconstruct the changed tensors from a delta and the base tensors. Raises SyncError for an unknown name."""
    found: dict[str, torch.Tensor] = {}
    for name, tensor in sent.items():
        if name.endswith(_VALUES):
            continue
        plain = name.removesuffix(_INDICES)
        if plain not in own:
            raise SyncError(f"The weights do not match the engine's model: {plain}.")
        if plain == name:
            found[name] = tensor
            continue
        dense = own[plain].detach().cpu().clone()
        dense.view(-1)[tensor.long()] = sent[plain + _VALUES].to(dense.dtype)
        found[plain] = dense
    return found


def make_manifest(version: int, base: int | None, tensors: Mapping[str, torch.Tensor]) -> WeightManifest:
    """Return the manifest of the tensors to be sent."""
    from ludus.engines.models.fingerprint import fingerprint_tensors

    specs = [TensorSpec(name=n, dtype=_dtype_name(t.dtype), shape=list(t.shape)) for n, t in tensors.items()]
    return WeightManifest(version=version, base=base, digest=fingerprint_tensors(tensors), tensors=specs)


def empty_tensors(manifest: WeightManifest) -> dict[str, torch.Tensor]:
    """Allocate tensors to receive into. Raises SyncError for an unknown dtype."""
    import torch

    supported = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int32, torch.int64)
    dtypes = {_dtype_name(dtype): dtype for dtype in supported}
    unsupported = sorted({t.dtype for t in manifest.tensors} - dtypes.keys())
    if unsupported:
        raise SyncError(f"Weights cannot be sent as {unsupported[0]}.")
    return {t.name: torch.empty(t.shape, dtype=dtypes[t.dtype]) for t in manifest.tensors}


def check_digest(manifest: WeightManifest, tensors: Mapping[str, torch.Tensor]) -> None:
    """Raise SyncError if the received data differs from the data sent."""
    from ludus.engines.models.fingerprint import fingerprint_tensors

    digest = fingerprint_tensors(tensors)
    if digest != manifest.digest:
        raise SyncError(
            f"The weights of version {manifest.version} were corrupted in transit: received digest {digest[:12]}, "
            f"sent {manifest.digest[:12]}.",
            "No weights were changed.",
        )


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
