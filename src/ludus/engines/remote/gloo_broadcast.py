"""Weights over a line between processes: the trainer sends, its servers receive, nothing touches a disk.

The line is a gloo group of its own, apart from any that the processes belong to otherwise. What is sent may
be a difference: of a tensor of which few elements changed, these alone with their places; of one that did
not change, nothing. Both sides hold the digest of what was sent against it.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Annotated, TypeVar, cast

from pydantic import BaseModel, Field

from ludus.errors import EngineError, SyncError

if TYPE_CHECKING:
    import torch
    from torch._C._distributed_c10d import TCPStore
    from torch.distributed import ProcessGroup

_PLACES, _VALUES = "@places", "@values"
_EMBEDDINGS, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
TRAINER = 0

Result = TypeVar("Result")


class TransferAddress(BaseModel):
    """Where a server joins the line, and as which of its `count` members."""

    host: str = Field(min_length=1, max_length=253, pattern=r"^[0-9A-Za-z.:%_-]+$")
    port: int = Field(ge=1, le=65535)
    rank: int = Field(ge=1, le=65535)
    count: int = Field(ge=2, le=65536)
    timeout_s: float = Field(gt=0, le=86_400)


class TensorSpec(BaseModel):
    """A tensor that will be sent."""

    name: str = Field(max_length=1000)
    dtype: str = Field(max_length=100)
    shape: list[Annotated[int, Field(ge=0, lt=2**40)]] = Field(max_length=16)


class WeightManifest(BaseModel):
    """What will be sent, in its order. `base` is the version that it is a difference to; None: all weights.

    `digest` is `fingerprint_tensors` of what is sent.
    """

    version: int = Field(ge=-1, lt=10**18)
    base: int | None = Field(ge=-1, lt=10**18)
    digest: str = Field(max_length=200)
    tensors: list[TensorSpec]


@dataclass
class WeightTransferGroup:
    """One end of it."""

    store: TCPStore
    group: ProcessGroup

    def broadcast(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Send, or fill, the tensors one by one. Raises EngineError where the line breaks or time is up."""
        from torch.distributed import BroadcastOptions

        options = BroadcastOptions()
        options.rootRank = TRAINER
        try:
            for tensor in tensors.values():
                self.group.broadcast([tensor], options).wait()
        except RuntimeError as error:
            raise EngineError(f"The line of weights broke: {_first_line(error)}.") from error


def open_store(host: str, timeout_s: float) -> TCPStore:
    """The meeting place of a line at a free port of `host`, of all addresses if that is not its own.

    A store has no access control: whoever reaches its address can use it.
    """
    from torch._C._distributed_c10d import TCPStore

    limit = timedelta(seconds=timeout_s)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, 0), family=family)
    except OSError:
        return TCPStore("0.0.0.0", 0, is_master=True, timeout=limit, wait_for_workers=False)
    port = listener.getsockname()[1]
    return TCPStore(host, port, None, True, limit, wait_for_workers=False, master_listen_fd=listener.detach())


def visit_store(place: TransferAddress) -> TCPStore:
    """The trainer's meeting place. Raises EngineError where it cannot be reached."""
    from torch._C._distributed_c10d import TCPStore

    limit = timedelta(seconds=place.timeout_s)
    try:
        return TCPStore(place.host, place.port, is_master=False, timeout=limit, wait_for_workers=False)
    except RuntimeError as error:
        raise EngineError(
            f"The trainer's line at {place.host}:{place.port} cannot be reached: {_first_line(error)}.",
            "Set engine.broadcast_host to an address of the trainer that its servers reach.",
        ) from error


def address_towards(place: TransferAddress) -> str:
    """The address of this machine from which it reaches the trainer; nothing is sent."""
    with socket.socket(socket.AF_INET6 if ":" in place.host else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((place.host, place.port))
        except OSError:
            return place.host
        return str(probe.getsockname()[0])


def join_line(store: TCPStore, rank: int, count: int, timeout_s: float, address: str) -> WeightTransferGroup:
    """Wait for all members; they reach this one at `address`, or where its name leads if that is not its own.

    Raises EngineError where one does not come.
    """
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
        raise EngineError(f"The line of weights did not come about: {_first_line(error)}.") from error


def enter_line(place: TransferAddress) -> WeightTransferGroup:
    """A server's end of the trainer's line. Raises EngineError where the line does not come about."""
    store = visit_store(place)
    return join_line(store, place.rank, place.count, place.timeout_s, address_towards(place))


async def aside(work: Callable[[], Result]) -> Result:
    """Do something at a line on a thread of its own.

    Gloo hears no cancelling: one who waits in it for somebody that does not come goes on until its time is
    up. Nobody waits for such a thread, neither an event loop nor the process that ends.
    """
    future: Future[Result] = Future()
    future.set_running_or_notify_cancel()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # boundary: whoever awaits it raises the cause
            future.set_exception(error)

    threading.Thread(target=run, name="ludus-line", daemon=True).start()
    return await asyncio.wrap_future(future)


def take(line: WeightTransferGroup, manifest: WeightManifest) -> dict[str, torch.Tensor]:
    """What a manifest announced. Raises EngineError where the line breaks, SyncError for damage."""
    tensors = room_for(manifest)
    line.broadcast(tensors)
    check_digest(manifest, tensors)
    return tensors


def with_head(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The weights with the output head of a model that ties it to its embeddings, for a server that does not.

    A server that ties them as well passes over it.
    """
    tied = state.get(_EMBEDDINGS)
    return dict(state) if tied is None or _HEAD in state else {**state, _HEAD: tied}


def difference(
    state: Mapping[str, torch.Tensor], before: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """What of `state` is not as in `before` (the same names and shapes), bit for bit, as it is sent."""
    import torch

    found: dict[str, torch.Tensor] = {}
    for name, tensor in state.items():
        flat, old = tensor.reshape(-1), before[name].reshape(-1)
        size = flat.element_size()
        changed = (flat.view(torch.uint8) != old.view(torch.uint8)).view(-1, size).any(1)
        places = changed.nonzero()[:, 0]
        kind = torch.int32 if flat.numel() < 1 << 31 else torch.int64
        if len(places) * (size + kind.itemsize) >= flat.numel() * size:
            found[name] = tensor
        elif len(places):
            found[name + _PLACES] = places.to(kind)
            found[name + _VALUES] = flat[places]
    return found


def restored(sent: Mapping[str, torch.Tensor], own: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The changed tensors, whole, from what `difference` gave and the tensors that it is a difference to.

    Raises SyncError for a name that is not among them.
    """
    found: dict[str, torch.Tensor] = {}
    for name, tensor in sent.items():
        if name.endswith(_VALUES):
            continue
        plain = name.removesuffix(_PLACES)
        if plain not in own:
            raise SyncError(f"The weights do not belong to the engine's model: {plain}.")
        if plain == name:
            found[name] = tensor
            continue
        whole = own[plain].detach().cpu().clone()
        whole.view(-1)[tensor.long()] = sent[plain + _VALUES].to(whole.dtype)
        found[plain] = whole
    return found


def manifest_of(version: int, base: int | None, tensors: Mapping[str, torch.Tensor]) -> WeightManifest:
    """What a receiver has to know of tensors before they come."""
    from ludus.engines.models.fingerprint import fingerprint_tensors

    listed = [TensorSpec(name=n, dtype=_plain(t.dtype), shape=list(t.shape)) for n, t in tensors.items()]
    return WeightManifest(version=version, base=base, digest=fingerprint_tensors(tensors), tensors=listed)


def room_for(manifest: WeightManifest) -> dict[str, torch.Tensor]:
    """Tensors to fill. Raises SyncError for a format that is not known."""
    import torch

    known = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int32, torch.int64)
    formats = {_plain(dtype): dtype for dtype in known}
    odd = sorted({t.dtype for t in manifest.tensors} - formats.keys())
    if odd:
        raise SyncError(f"Weights cannot be sent as {odd[0]}.")
    return {t.name: torch.empty(t.shape, dtype=formats[t.dtype]) for t in manifest.tensors}


def check_digest(manifest: WeightManifest, tensors: Mapping[str, torch.Tensor]) -> None:
    """Raise SyncError where what came is not what was sent."""
    from ludus.engines.models.fingerprint import fingerprint_tensors

    found = fingerprint_tensors(tensors)
    if found != manifest.digest:
        raise SyncError(
            f"The weights of version {manifest.version} were damaged on their way: digest {found[:12]} came, "
            f"{manifest.digest[:12]} was sent.",
            "Nothing was taken from them.",
        )


def _plain(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _first_line(error: RuntimeError) -> str:
    return str(error).strip().splitlines()[0].rstrip(".")
