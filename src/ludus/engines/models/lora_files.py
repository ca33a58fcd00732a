"""LoRA adapters on disk in PEFT's format: `adapter_config.json` and `adapter_model.safetensors`."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import BaseModel, Field, ValidationError

from ludus.errors import SyncError, UserError

if TYPE_CHECKING:
    import torch

_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    """A loaded adapter: its factors, named as in PEFT; `scaling` is alpha over rank."""

    state: Mapping[str, torch.Tensor]
    scaling: float
    rank: int


class _Config(BaseModel):
    """Fields of PEFT's configuration that determine how the factors are applied."""

    peft_type: str
    r: int = Field(ge=1)
    lora_alpha: float
    use_rslora: bool = False
    use_dora: bool = False
    lora_bias: bool = False
    fan_in_fan_out: bool = False
    bias: str = "none"
    modules_to_save: list[str] | None = None
    rank_pattern: dict[str, int] = {}
    alpha_pattern: dict[str, float] = {}

    @property
    def scaling(self) -> float:
        """Factor applied to the product of the two matrices."""
        return self.lora_alpha / (math.sqrt(self.r) if self.use_rslora else self.r)

    @property
    def is_plain(self) -> bool:
        """Whether the adapter is plain LoRA with a single rank and scaling."""
        more = (self.use_dora, self.lora_bias, self.fan_in_fan_out, self.bias != "none")
        return self.peft_type == "LORA" and not any(
            (*more, self.modules_to_save, self.rank_pattern, self.alpha_pattern)
        )


def write_adapter(folder: Path, state: Mapping[str, torch.Tensor], scaling: float) -> int:
    """Write factors, named as in PEFT; return their rank. Raises SyncError if they do not fit, OSError."""
    from safetensors.torch import save_file

    from ludus.engines.models.lora import FACTOR

    stored: dict[str, torch.Tensor] = {}
    ranks, targets = set(), set()
    for name, tensor in state.items():
        match = FACTOR.fullmatch(name)
        if match is None:
            raise SyncError(f"{name} is not a factor of a LoRA adapter.")
        layer, factor = match.groups()
        targets.add(layer.rpartition(".")[2])
        ranks.add(tensor.shape[0] if factor == "A" else tensor.shape[1])
        plain = tensor.detach().cpu().contiguous().clone()
        stored[f"base_model.model.{layer}.lora_{factor}.weight"] = plain
    if len(ranks) != 1:
        raise SyncError(f"An adapter must have a single rank; this one has {sorted(ranks) or 'no tensors'}.")
    (rank,) = ranks
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": scaling * rank,
        "target_modules": sorted(targets),
        "bias": "none",
        "lora_dropout": 0.0,
        "inference_mode": True,
    }
    folder.mkdir(parents=True, exist_ok=True)
    save_file(stored, folder / _WEIGHTS, metadata={"format": "pt"})
    (folder / _CONFIG).write_text(json.dumps(config, indent=1) + "\n", "utf-8")
    return rank


def read_adapter(folder: Path) -> AdapterFiles:
    """Read an adapter from a folder. Raises UserError if it is missing, broken, inconsistent, or not plain LoRA."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        config = _Config.model_validate_json((folder / _CONFIG).read_bytes())
        state = load_file(folder / _WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise UserError(
            f"The adapter at {folder} cannot be read: {error}.",
            f"The folder must hold {_CONFIG} and {_WEIGHTS}, as written by PEFT.",
        ) from error
    except ValidationError as error:
        where = ".".join(map(str, error.errors()[0]["loc"]))
        raise UserError(
            f"{folder / _CONFIG} is not a valid adapter configuration (at {where or 'the top'})."
        ) from error
    if not config.is_plain:
        raise UserError(
            f"The adapter at {folder} is not plain LoRA of a single rank.",
            "DoRA, biases, saved modules, and rank or alpha patterns are not supported.",
        )
    for name, tensor in state.items():
        rank = tensor.shape[0] if ".lora_A." in name else tensor.shape[-1]
        if tensor.ndim != 2 or rank != config.r:
            raise UserError(
                f"The adapter at {folder} declares rank {config.r}, but {name} has shape {tuple(tensor.shape)}."
            )
    return AdapterFiles(state, config.scaling, config.r)
