"""Checkpoints, written atomically and verified on resume.

A checkpoint is a folder in Hugging Face layout, which `from_pretrained` loads, with `trainer/` in it: the
optimizer's moments (safetensors, or shards if the weights are sharded), the trainer state (JSON) and a
manifest with size and SHA-256 of each file. It is written under a temporary name, synced to disk and renamed, so that
a folder `step-N` is always complete. Shards are written by all ranks and can be read by any number of ranks, or by a
process without a group.
"""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch
from pydantic import ConfigDict, TypeAdapter
from safetensors import SafetensorError

from ludus.algorithms.kl import KLState
from ludus.config.schema import AlarmAction, AlarmsConfig
from ludus.engines.base import DEFAULT, ROLE_ADAPTER
from ludus.engines.models.loading import save_model
from ludus.engines.models.lora import ADAPTER_FILE
from ludus.errors import StorageError, UserError
from ludus.rollouts.ledger import AccountingError, LedgerState
from ludus.rollouts.rollout_files import fsync
from ludus.training.distributed.collectives import full_state_dict, is_sharded, local_shard
from ludus.training.learner.optimizer import Optimizer
from ludus.training.run.run_dir import damaged, list_checkpoints, write_manifest

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


SHARDS = "shards"
"""Name of the folder in `trainer/`."""
SHARD_BYTES = 64 * 2**20
"""Size above which a rank starts another file: torch holds a file in memory up to three times while it writes it."""


def save_shards(
    folder: Path, model: nn.Module, optimizer: Optimizer, parts: Mapping[str, Mapping[str, torch.Tensor]]
) -> dict[str, torch.Tensor]:
    """Write moments, weights and `parts` on all ranks; return the unsharded weights. Raises StorageError on all."""
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    weights = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    tensors_by_name = {"model": weights, "optimizer": optimizer.state_dict(), **parts}
    tensors = {f"{part}/{name}": t for part, by_name in tensors_by_name.items() for name, t in by_name.items()}
    starts = accumulate((local_shard(t).nbytes for t in tensors.values()), initial=0)
    files = {name: 1 + start // SHARD_BYTES for name, start in zip(tensors, starts, strict=False)}
    try:
        with _quiet():
            save(tensors, storage_writer=HuggingFaceStorageWriter(str(folder), files, save_distributed=True))
    except CheckpointException as error:
        rank = min(error.failures)
        cause, _ = error.failures[rank]
        text = f"Rank {rank} could not write its shards of the checkpoint to {folder}: {cause}."
        raise StorageError(text, "Free some space and resume; earlier checkpoints are unchanged.") from error
    unsharded = full_state_dict(model)
    return {name: unsharded[name] for name in weights}


def _sort_metadata(file: Path) -> None:
    """Sort the metadata of a safetensors file, which has a random order, so that equal shards are equal files."""
    with file.open("r+b") as stream:
        size = int.from_bytes(stream.read(8), "little")
        header = json.loads(stream.read(size))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        stream.seek(8)
        stream.write(json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode().ljust(size))


def load_shards(folder: Path, part: str, like: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors of a part, with the sharding of `like`, whose tensors are overwritten.

    Names missing in `like` are returned without data. Empty if the part is missing. Raises StorageError for
    damaged files.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata
    from torch.distributed.checkpoint.state_dict_loader import load

    try:
        reader = HuggingFaceStorageReader(str(folder))
        known = reader.read_metadata().state_dict_metadata
        if not known:
            raise ValueError("it has no tensors")
        names = [name.removeprefix(f"{part}/") for name in known if name.startswith(f"{part}/")]
        wanted: dict[str, torch.Tensor] = {f"{part}/{name}": like[name] for name in names if name in like}
        for name, tensor in wanted.items():
            stored = known[name]
            chunks = stored.chunks if isinstance(stored, TensorStorageMetadata) else []
            if sum(chunk.sizes.numel() for chunk in chunks) != tensor.numel():
                raise ValueError(f"it lacks a part of {name}")
        with _quiet():
            load(wanted, storage_reader=reader)
    except (OSError, SafetensorError, ValueError, KeyError, TypeError, CheckpointException) as error:
        raise StorageError(f"{folder} is broken: {error}.", "Remove its checkpoint, and resume.") from error
    return {name: wanted.get(f"{part}/{name}", torch.empty(0)) for name in names}


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress the warning about a missing process group."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="torch.distributed.checkpoint")
        yield


MIN_LEARNING_RATE = 0.01
"""Smallest factor of the learning rate."""
MAX_KL = 100.0
"""Largest factor of the KL coefficient."""


@dataclass(frozen=True, slots=True)
class Adjustments:
    """Factors by which alarms have changed the learning rate and the KL coefficient, and the steps of the changes."""

    learning_rate: float = 1.0
    kl: float = 1.0
    learning_rate_step: int | None = None
    kl_step: int | None = None

    def after(self, action: AlarmAction, step: int, settings: AlarmsConfig) -> Adjustments:
        """Return the factors after an alarm's action; unchanged within `cooldown_steps` of the last change."""
        lowers, after = action == "lower_learning_rate", self
        last = self.learning_rate_step if lowers else self.kl_step
        if last is not None and step - last < settings.cooldown_steps:
            return self
        if lowers:
            factor = max(MIN_LEARNING_RATE, self.learning_rate * settings.learning_rate_factor)
            after = replace(self, learning_rate=factor, learning_rate_step=step)
        elif action == "raise_kl":
            after = replace(self, kl=min(MAX_KL, self.kl * settings.kl_factor), kl_step=step)
        return self if (after.learning_rate, after.kl) == (self.learning_rate, self.kl) else after


@dataclass(frozen=True, slots=True)
class TrainerState:
    """State of a resumed run other than weights and optimizer moments.

    All randomness is a function of seed and step, so no generator state is needed. `algorithm_state` and
    `reward_moments` are serialized. `reference_digests` are those of models outside the checkpoint. `warmup_steps`
    counts critic-only steps. `mode` is `training.mode`, empty for other kinds of training.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    step: int
    optimizer_steps: int
    ledger: LedgerState
    value_model_steps: int = 0
    algorithm_state: str = ""
    reward_moments: str = ""
    kl: KLState = field(default_factory=KLState)
    adjustments: Adjustments = field(default_factory=Adjustments)
    reference_digests: Mapping[str, str] = field(default_factory=dict)
    warmup_steps: int | None = None
    mode: str = ""


@dataclass(frozen=True, slots=True)
class Extra:
    """Additional checkpoint contents by name: tensors of value models, text files, and models of roles."""

    parts: Mapping[str, Mapping[str, torch.Tensor]] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    models: Mapping[str, PreTrainedModel] = field(default_factory=dict)


def checkpoint_path(checkpoints: Path, step: int) -> Path:
    """Return the checkpoint folder of a step."""
    return checkpoints / f"step-{step:06d}"


def save_checkpoint(
    checkpoints: Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    optimizer: Optimizer,
    state: TrainerState,
    extra: Extra = Extra(),
) -> Path:
    """Write a checkpoint. Raises StorageError on failure; earlier checkpoints are unchanged."""
    final = checkpoint_path(checkpoints, state.step)
    temporary = final.with_name(f".{final.name}.tmp")
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        (temporary / "trainer").mkdir(parents=True)
        trainer = temporary / "trainer"
        if is_sharded(model):
            with optimizer.ranks.call_on_ranks("save", trainer / SHARDS):
                weights = save_shards(trainer / SHARDS, model, optimizer, extra.parts)
            for file in (trainer / SHARDS).iterdir():
                _sort_metadata(file)
            save_model(model, tokenizer, temporary, weights)
        else:
            save_model(model, tokenizer, temporary)
            _save_tensors(trainer / "optimizer.safetensors", optimizer.state_dict())
            for name, tensors in extra.parts.items():
                _save_tensors(trainer / f"{name}.safetensors", tensors)
        for name, other in extra.models.items():
            save_model(other, tokenizer, temporary / name)
        for name, text in extra.files.items():
            (trainer / name).write_text(text, "utf-8")
        (trainer / "state.json").write_text(json.dumps(asdict(state), indent=1) + "\n", "utf-8")
        write_manifest(temporary)
        for file in filter(Path.is_file, temporary.rglob("*")):
            fsync(file)
        if final.exists():
            shutil.rmtree(final)
        temporary.rename(final)
        fsync(checkpoints)
    except (OSError, SafetensorError) as error:
        hint = "Free some space and resume; earlier checkpoints are unchanged."
        raise StorageError(f"Cannot write the checkpoint {final}: {error}.", hint) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return final


def load_trainer(folder: Path, optimizer: Optimizer) -> TrainerState:
    """Restore the moments and return the state. Raises UserError if they do not fit, StorageError if damaged."""
    state = read_state(folder)
    try:
        moments = _read_part(folder, "optimizer", optimizer.zero_state_dict())
    except OSError as error:
        raise damaged(folder, f"the optimizer's moments cannot be read ({error})") from error
    optimizer.load_state_dict(moments, state.optimizer_steps)
    return state


def read_state(folder: Path) -> TrainerState:
    """Return the trainer state of a checkpoint. Raises StorageError if it is damaged or incomplete."""
    try:
        state = TypeAdapter(TrainerState).validate_json((folder / "trainer" / "state.json").read_text("utf-8"))
    except (OSError, ValueError, AccountingError) as error:
        cause = " ".join(str(error).split("\n")[:2])
        raise damaged(folder, f"trainer/state.json has no state to resume from ({cause})") from error
    if checkpoint_path(folder.parent, state.step).name != folder.name:
        raise damaged(folder, f"trainer/state.json is of step {state.step}")
    return state


def load_part(
    folder: Path, name: str, like: Mapping[str, torch.Tensor] = MappingProxyType({})
) -> dict[str, torch.Tensor]:
    """Load the tensors of a value model, sharded as `like`. Raises UserError if the checkpoint has none."""
    trainer = folder / "trainer"
    known = (trainer / SHARDS).is_dir() or (trainer / f"{name}.safetensors").is_file()
    tensors = _read_part(folder, name, like) if known else {}
    if not tensors:
        raise UserError(f"{folder} has no {name}.", "Resume with the run's original algorithm.")
    return tensors


def _read_part(folder: Path, name: str, like: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Load the tensors of a part; if they were saved sharded, they are resharded as `like`."""
    trainer = folder / "trainer"
    if (trainer / SHARDS).is_dir():
        return load_shards(trainer / SHARDS, name, like)
    return _read_tensors(trainer / f"{name}.safetensors")


def load_text(folder: Path, name: str) -> str | None:
    """Return a text file of a checkpoint, or None. Raises StorageError if it cannot be read."""
    path = folder / "trainer" / name
    try:
        return path.read_text("utf-8") if path.is_file() else None
    except (OSError, UnicodeDecodeError) as error:
        raise StorageError(f"{path} cannot be read: {error}.", "Remove its checkpoint, and resume.") from error


def load_weights(folder: Path, model: PreTrainedModel) -> None:
    """Copy the weights into `model`. Raises UserError if it does not fit, StorageError if a file is damaged."""
    stored: dict[str, torch.Tensor] = {}
    if not (folder / ADAPTER_FILE).is_file():
        for part in sorted(folder.glob("model*.safetensors")):
            stored |= _read_tensors(part)
        _check_fits(folder, dict(model.named_parameters()), stored)
        model.load_state_dict(stored, strict=False)
        model.tie_weights()
        return
    from peft import PeftModel, get_peft_model_state_dict, set_peft_model_state_dict

    names = [DEFAULT, *(path.name for path in sorted(folder.glob(f"{ROLE_ADAPTER}*")))]
    if not isinstance(model, PeftModel) or {*names} != {*model.peft_config}:
        hint = "Resume with the run's original model.lora."
        raise UserError(f"The checkpoint {folder} has the adapters {', '.join(names)}, and the model has others.", hint)
    for name in names:
        stored = _read_tensors((folder if name == DEFAULT else folder / name) / ADAPTER_FILE)
        _check_fits(folder, get_peft_model_state_dict(model, adapter_name=name), stored)
        set_peft_model_state_dict(model, stored, adapter_name=name)


def _read_tensors(path: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except SafetensorError as error:
        raise StorageError(f"{path} is broken: {error}.", "Remove its checkpoint, and resume.") from error


def _check_fits(folder: Path, model: Mapping[str, torch.Tensor], stored: Mapping[str, torch.Tensor]) -> None:
    sizes = {name: tuple(p.shape) for name, p in model.items()}
    stored_sizes = {name: tuple(tensor.shape) for name, tensor in stored.items()}
    for name in sorted(sizes.keys() | stored_sizes.keys()):
        if sizes.get(name) != stored_sizes.get(name):
            raise UserError(
                f"The checkpoint {folder} has a different architecture: {name} is {stored_sizes.get(name, 'missing')} "
                f"there and {sizes.get(name, 'not')} in the model.",
                "Resume with the model the run was started with.",
            )


def prune(checkpoints: Path, keep: int) -> None:
    """Remove all but the newest `keep` checkpoints, and remains of interrupted saves."""
    for _, path in list_checkpoints(checkpoints)[:-keep]:
        path.rename(path.with_name(f".{path.name}.old"))
    for leftover in [*checkpoints.glob(".step-*.tmp"), *checkpoints.glob(".step-*.old")]:
        shutil.rmtree(leftover, ignore_errors=True)


def _save_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    from safetensors.torch import save_file

    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
