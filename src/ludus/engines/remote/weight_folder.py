"""Shared folder for weights between trainer and server: by default temporary, in shared memory if there is room."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from ludus.engines.temporary import TemporaryFolder, remove_abandoned
from ludus.errors import StorageError

if TYPE_CHECKING:
    import torch

SHARED_MEMORY = Path("/dev/shm")
_PREFIX = "ludus-weights-"
_COPIES = 2  # the weights in use and the next


@dataclass
class WeightFolder:
    """Folders for weights under `root`, or under a temporary folder, which `close` removes."""

    root: str = ""
    shared_memory: Path = SHARED_MEMORY
    _own: TemporaryFolder | None = field(init=False, default=None)

    def folder(self, name: str, num_bytes: int) -> Path:
        """Return the path `name`, not yet created, for `num_bytes` of weights. Raises StorageError."""
        if self.root:
            return (Path(self.root) / name).absolute()
        if self._own is None:
            try:
                self._own = self._make(_COPIES * num_bytes)
            except OSError as error:
                raise write_error(Path(tempfile.gettempdir()), error) from error
        return self._own.path / name

    def close(self) -> None:
        """Remove the temporary folder. A later `folder` recreates it."""
        if self._own is not None:
            self._own.close()
        self._own = None

    def _make(self, num_bytes: int) -> TemporaryFolder:
        parent = self.shared_memory
        remove_abandoned(_PREFIX, parent)
        shared = os.access(parent, os.W_OK | os.X_OK) and shutil.disk_usage(parent).free >= num_bytes
        return TemporaryFolder(_PREFIX, parent if shared else None)


def save_weights(folder: Path, state: Mapping[str, torch.Tensor]) -> None:
    """Write tensors to `model.safetensors`. Raises StorageError."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        folder.mkdir(parents=True, exist_ok=True)
        plain = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in state.items()}
        save_file(plain, folder / "model.safetensors", metadata={"format": "pt"})
    except (OSError, SafetensorError) as error:
        raise write_error(folder, error) from error


def read_weights(folder: Path) -> dict[str, torch.Tensor]:
    """Read the tensors of `save_weights`. Raises StorageError."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(folder / "model.safetensors")
    except (OSError, SafetensorError) as error:
        raise StorageError(
            f"The weights for the server cannot be read from {folder}: {error}.",
            "They were removed or changed: check engine.weights_folder.",
        ) from error


def write_error(folder: Path, error: Exception) -> StorageError:
    """Return the error for weights that cannot be written."""
    return StorageError(
        f"The weights for the server cannot be written to {folder}: {error}.",
        "Set engine.weights_folder to a folder with free space that the server can also access.",
    )
