"""Sharded checkpoints, written by all ranks with `torch.distributed.checkpoint`.

Any number of ranks can read them, also a process without a group; tensors are resharded.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING

import torch

from ludus.errors import StorageError
from ludus.training.distributed.fsdp import gathered
from ludus.untrusted.pickles import load_pickle

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.checkpoint.metadata import Metadata

    from ludus.training.learner.optimizer import Optimizer

SHARDS = "shards"
"""Name of the folder in `trainer/`."""


def save_shards(
    folder: Path, model: nn.Module, optimiser: Optimizer, parts: Mapping[str, Mapping[str, torch.Tensor]]
) -> dict[str, torch.Tensor]:
    """Write moments, weights and `parts`, one shard per rank; return the trained weights unsharded.

    Collective. Raises StorageError on all ranks if one cannot write.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.metadata import StorageMeta
    from torch.distributed.checkpoint.state_dict_saver import save

    class Writer(FileSystemWriter):
        """Writer without paths or random ids, so that equal tensors give equal files."""

        def storage_meta(self) -> StorageMeta:
            return StorageMeta()

    weights = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    every = {"model": weights, "optimiser": optimiser.state(), **parts}
    tensors = {f"{part}/{name}": t for part, named in every.items() for name, t in named.items()}
    try:
        with _quiet():
            save(tensors, storage_writer=Writer(folder))
    except CheckpointException as error:
        rank = min(error.failures)
        cause, _ = error.failures[rank]
        raise StorageError(
            f"Rank {rank} could not write its shards of the checkpoint to {folder}: {cause}.",
            "Free some space and resume; earlier checkpoints are unchanged.",
        ) from error
    found = gathered(model)
    return {name: found[name] for name in weights}


def load_shards(folder: Path, part: str, like: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors of a part, sharded as those of `like`, which are overwritten.

    Names missing in `like` are returned without data. Empty if there is no such part. Raises StorageError for
    damaged files, and for metadata with anything but tensors in files of this folder.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import load

    class Reader(FileSystemReader):
        """Reader that parses the metadata with a restricted unpickler."""

        def read_metadata(self, *args: object, **kwargs: object) -> Metadata:
            return _read_metadata(folder)

    try:
        known = _read_metadata(folder).state_dict_metadata
        names = [name.removeprefix(f"{part}/") for name in known if name.startswith(f"{part}/")]
        wanted: dict[str, torch.Tensor] = {f"{part}/{name}": like[name] for name in names if name in like}
        with _quiet():
            load(wanted, storage_reader=Reader(folder))
    except (OSError, EOFError, UnpicklingError, RuntimeError, CheckpointException) as error:
        raise StorageError(f"{folder} is broken: {error}.", "Remove its checkpoint, and resume.") from error
    return {name: wanted.get(f"{part}/{name}", torch.empty(0)) for name in names}


@cache
def _metadata_types() -> dict[str, object]:
    """Return the types that `torch.distributed.checkpoint` pickles for tensors, by dotted name."""
    from torch.distributed.checkpoint import filesystem, metadata
    from torch.serialization import _get_layout

    kinds: list[type] = [
        metadata.Metadata,
        metadata.MetadataIndex,
        metadata.StorageMeta,
        metadata.TensorStorageMetadata,
        metadata.TensorProperties,
        metadata.ChunkStorageMetadata,
        metadata._MEM_FORMAT_ENCODING,
        filesystem._StorageInfo,
    ]
    known: dict[str, object] = {f"{kind.__module__}.{kind.__name__}": kind for kind in kinds}
    known |= {f"torch.{name}": found for name, found in vars(torch).items() if isinstance(found, torch.dtype)}
    return known | {"torch.Size": torch.Size, "torch.serialization._get_layout": _get_layout}


def _read_metadata(folder: Path) -> Metadata:
    """Read the metadata. Raises UnpicklingError for contents that `save_shards` does not write."""
    from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata

    found = load_pickle((folder / ".metadata").read_bytes(), _metadata_types())
    if type(found) is not Metadata:
        raise UnpicklingError("it is not the metadata of a checkpoint")
    try:
        kinds = {type(entry) for entry in found.state_dict_metadata.values()}
        named = {str(place.relative_path) for place in found.storage_data.values()}
    except AttributeError as error:
        raise UnpicklingError(str(error)) from error
    if kinds - {TensorStorageMetadata}:  # torch would unpickle other kinds of entry without restrictions
        raise UnpicklingError("it lists something other than a tensor")
    if outside := named - {path.name for path in folder.iterdir()}:
        raise UnpicklingError(f"it names {min(outside)}, which is not a file in the folder")
    found.storage_meta = StorageMeta()
    return found


class _quiet(warnings.catch_warnings):
    """Suppress the warning about a missing process group."""

    def __enter__(self) -> None:
        super().__enter__()
        warnings.filterwarnings("ignore", module="torch.distributed.checkpoint")
