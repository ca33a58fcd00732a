"""Unmerged LoRA adapters on one model: each token of a pass uses one adapter or none.

Hooks on the linear layers add `y = W x + scaling * B (A x)` (Hu et al., arXiv:2106.09685) to the rows of
requests with that adapter. The base weights are unchanged, so no small update is lost to rounding.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from pydantic import BaseModel, Field, ValidationError
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.utils.hooks import RemovableHandle

from ludus.engines.base import DEFAULT, ROLE_ADAPTER
from ludus.errors import SyncError, UserError

if TYPE_CHECKING:
    from peft.tuners.tuners_utils import BaseTunerLayer
    from transformers import PreTrainedModel

FACTOR = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_([AB])(?:\.([^.]+))?\.weight")
"""Name of a factor in PEFT: its layer, A (down) or B (up), and the adapter if it is named."""


@dataclass(frozen=True, slots=True)
class LowRank:
    """The two factors of one layer: `down` `[rank, in]`, `up` `[out, rank]`."""

    down: Tensor
    up: Tensor
    scaling: float


class AdapterBank:
    """The adapters of one model, by name; a PEFT model's own are `DEFAULT` and those of roles. Raises UserError if they
    are not LoRA."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._pairs: dict[str, dict[str, LowRank]] = {}
        self._rounded: dict[str, tuple[int, dict[str, LowRank]]] = {}  # with their `_num_changes`
        self._active: list[tuple[Mapping[str, LowRank], Tensor | None]] = []
        self._hooks: dict[str, RemovableHandle] = {}
        self._model = model
        self.generation = 0
        """Changes if the factors of an adapter move to other memory."""
        linears = [(n, m) for n, m in model.named_modules() if isinstance(m, nn.Linear) and ".lora_" not in n]
        plain = {n.removeprefix("base_model.model.").removesuffix(".base_layer"): m for n, m in linears}
        self._layers: dict[str, nn.Linear] = {name: module for name, module in plain.items() if name != "lm_head"}
        own: dict[str, dict[str, LowRank]] = {}
        for key, pair in lora_layers(model):
            adapter, _, layer = key.rpartition("/")
            own.setdefault(adapter or DEFAULT, {})[layer] = pair
        for name, pairs in own.items():
            self._register(name, pairs)
            if any(pair.down.dtype != self._layers[layer].weight.dtype for layer, pair in pairs.items()):
                rounded = {layer: _to_layer(pair, self._layers[layer]) for layer, pair in pairs.items()}
                self._rounded[name] = _num_changes(pairs), rounded
        if own:
            model.disable_adapter_layers()
        self._own_roles = [name for name in own if name != DEFAULT]

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._pairs)

    def load(self, name: str, state: Mapping[str, Tensor], scaling: float) -> None:
        """Load an adapter or its new version, named as in PEFT; into the same memory if its shapes are the same.
        Raises SyncError if it does not fit."""
        factors: dict[str, dict[str, Tensor]] = {}
        for key, tensor in state.items():
            match = FACTOR.fullmatch(key)
            if match is None or match[1] not in self._layers:
                raise SyncError(f"The adapter {name} has a tensor that matches no supported linear layer: {key}.")
            factors.setdefault(match[1], {})[match[2]] = tensor
        pairs = {layer: _pair(name, layer, p, self._layers[layer], scaling) for layer, p in factors.items()}
        if not pairs:
            raise SyncError(f"The adapter {name} holds no tensors.")
        if not _copy_into(self._pairs.get(name, {}), pairs):
            self._register(name, pairs)

    def pairs(self, name: str) -> Mapping[str, LowRank]:
        """Return the factors of an adapter by layer; {} for "". Raises KeyError for an unknown adapter.

        Those of `DEFAULT` include those of the roles, as `lora_layers`.
        """
        if not name:
            return {}
        roles = self._own_roles if name == DEFAULT else ()
        return self._pairs[name] | {f"{role}/{at}": pair for role in roles for at, pair in self._pairs[role].items()}

    def unload(self, name: str) -> None:
        self._pairs.pop(name, None)
        self._rounded.pop(name, None)
        self.generation += 1

    def close(self) -> None:
        """Remove the hooks and re-enable a PEFT model's own adapter."""
        for hook in self._hooks.values():
            hook.remove()
        if is_peft(self._model):
            self._model.enable_adapter_layers()

    def select(self, names: Sequence[str], counts: Sequence[int], total: int, device: torch.device) -> None:
        """Set the adapter ("": none) of each span of `counts` tokens for the next pass."""
        used = dict.fromkeys(name for name in names if name)
        if len(used) == len(set(names)) == 1:
            self._active = [(self._factors(names[0]), None)]
            return
        self._active = []
        for name in used:
            mask = torch.zeros(total, 1, dtype=torch.bool)
            spans = [other == name for other, count in zip(names, counts, strict=True) for _ in range(count)]
            mask[: len(spans), 0] = torch.tensor(spans)
            self._active.append((self._factors(name), mask.to(device)))

    def _register(self, name: str, pairs: dict[str, LowRank]) -> None:
        for layer in pairs:
            if layer not in self._hooks:
                self._hooks[layer] = self._layers[layer].register_forward_hook(partial(self._add, layer))
        self._pairs[name] = pairs
        self._rounded.pop(name, None)
        self.generation += 1

    def _factors(self, name: str) -> Mapping[str, LowRank]:
        """Return an adapter's factors in the precision of its layers: a 16-bit model's own, which have 32 bits, are
        rounded again after a change, into the same memory."""
        pairs = self._pairs[name]
        if name not in self._rounded:
            return pairs
        changes, rounded = self._rounded[name]
        if changes != (now := _num_changes(pairs)):
            _copy_into(rounded, pairs)
            self._rounded[name] = now, rounded
        return rounded

    def _add(self, layer: str, module: nn.Module, args: tuple[Tensor, ...], y: Tensor) -> Tensor:
        """Return the layer's output with the adapters of this pass added (a forward hook)."""
        del module
        x = args[0]
        for pairs, mask in self._active:
            pair = pairs.get(layer)
            if pair is not None:
                hidden = linear(x, pair.down)
                hidden = hidden if mask is None else hidden * mask
                rows = y.view(-1, y.shape[-1])
                rows.addmm_(hidden.view(len(rows), -1), pair.up.t(), alpha=pair.scaling)
        return y


def _pair(name: str, layer: str, parts: dict[str, Tensor], module: nn.Linear, scaling: float) -> LowRank:
    shape = tuple(module.weight.shape)
    if parts.keys() != {"A", "B"}:
        raise SyncError(f"The adapter {name} lacks one factor of {layer}.")
    down, up = parts["A"], parts["B"]
    if down.shape[1] != shape[1] or up.shape[0] != shape[0] or down.shape[0] != up.shape[1]:
        raise SyncError(
            f"The adapter {name} has {tuple(up.shape)} x {tuple(down.shape)} for {layer}, whose weight is {shape}."
        )
    return _to_layer(LowRank(down, up, scaling), module)


def _to_layer(pair: LowRank, layer: nn.Linear) -> LowRank:
    """Return a copy in the layer's precision, on its device."""
    down, up = (factor.detach().to(layer.weight, copy=True) for factor in (pair.down, pair.up))
    return LowRank(down, up, pair.scaling)


def _num_changes(pairs: Mapping[str, LowRank]) -> int:
    return sum(pair.down._version + pair.up._version for pair in pairs.values())


def _copy_into(memory: Mapping[str, LowRank], pairs: Mapping[str, LowRank]) -> bool:
    """Copy factors to those of the same layers; return False, without changes, if shapes or scaling differ."""
    if memory.keys() != pairs.keys():
        return False
    both = [(memory[layer], new) for layer, new in pairs.items()]
    if any(old.down.shape != new.down.shape or old.scaling != new.scaling for old, new in both):
        return False
    with torch.no_grad():
        for old, new in both:
            old.down.copy_(new.down)
            old.up.copy_(new.up)
    return True


def lora_layers(model: nn.Module) -> Iterator[tuple[str, LowRank]]:
    """Yield the factors of a PEFT model's adapter by layer, without copying them; nothing for a plain model. Those of a
    role's adapter have the name `ADAPTER/LAYER`. Raises UserError for anything but LoRA of linear layers."""
    if not is_peft(model):
        return
    from peft.tuners.lora import Linear
    from peft.tuners.tuners_utils import BaseTunerLayer

    for name, module in model.named_modules():
        if not isinstance(module, BaseTunerLayer):
            continue
        active = module.active_adapters
        plain = isinstance(module, Linear) and len(active) == 1 and not module.lora_variant
        if not plain or name.endswith("lm_head"):
            raise UserError(
                f"The embedded engine supports only plain LoRA of linear layers; {name} differs.",
                "Exclude the output layer from the targets; do not use DoRA or several active adapters.",
            )
        layer = name.removeprefix("base_model.model.")
        for adapter in (*active, *(one for one in module.lora_A if one.startswith(ROLE_ADAPTER))):
            down, up = module.lora_A[adapter].weight, module.lora_B[adapter].weight
            yield factor_key(layer, adapter), LowRank(down, up, float(module.scaling[adapter]))


def factor_key(layer: str, adapter: str | None) -> str:
    """Return the name of a layer's factors in `lora_layers`."""
    return f"{adapter}/{layer}" if adapter is not None and adapter.startswith(ROLE_ADAPTER) else layer


def role_adapters(model: PreTrainedModel) -> list[str]:
    """Return the names of the adapters of roles."""
    return [name for name in model.peft_config if name.startswith(ROLE_ADAPTER)] if is_peft(model) else []


def _adapted_layers(module: nn.Module) -> list[BaseTunerLayer]:
    if "peft" not in sys.modules:
        return []
    from peft.tuners.tuners_utils import BaseTunerLayer

    return [layer for layer in module.modules() if isinstance(layer, BaseTunerLayer)]


def adapters_in_use(module: nn.Module) -> Sequence[str]:
    """Return the active adapters of a PEFT model or a part of it; empty for a plain one."""
    return next((tuple(layer.active_adapters) for layer in _adapted_layers(module)), ())


@contextmanager
def use_adapter(module: nn.Module, *names: str) -> Iterator[None]:
    """Use an adapter of a PEFT model, or of a part of it, in the block; none without names. All stay trainable."""
    layers = _adapted_layers(module)
    before = [layer._active_adapter for layer in layers]
    for layer in layers:
        layer._active_adapter = [*names]
    try:
        yield
    finally:
        for layer, active in zip(layers, before, strict=True):
            layer._active_adapter = active


def is_peft(model: object) -> bool:
    """Return whether a model has PEFT adapters, without importing PEFT."""
    return "PeftModel" in {c.__name__ for c in type(model).__mro__}


_CONFIG, ADAPTER_FILE = "adapter_config.json", "adapter_model.safetensors"


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
        return self.lora_alpha / (math.sqrt(self.r) if self.use_rslora else self.r)


def write_adapter(folder: Path, state: Mapping[str, torch.Tensor], scaling: float) -> int:
    """Write factors, named as in PEFT; return their rank. Raises SyncError if they do not fit, OSError."""
    from safetensors.torch import save_file

    stored: dict[str, torch.Tensor] = {}
    ranks, targets = set(), set()
    for name, tensor in state.items():
        match = FACTOR.fullmatch(name)
        if match is None:
            raise SyncError(f"{name} is not a factor of a LoRA adapter.")
        layer, factor, _ = match.groups()
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
    save_file(stored, folder / ADAPTER_FILE, metadata={"format": "pt"})
    (folder / _CONFIG).write_text(json.dumps(config, indent=1) + "\n", "utf-8")
    return rank


def read_adapter(folder: Path) -> AdapterFiles:
    """Read an adapter from a folder. Raises UserError if it is missing, broken, inconsistent, or not plain LoRA."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        config = _Config.model_validate_json((folder / _CONFIG).read_bytes())
        state = load_file(folder / ADAPTER_FILE)
    except (OSError, SafetensorError) as error:
        raise UserError(
            f"The adapter at {folder} cannot be read: {error}.",
            f"The folder must hold {_CONFIG} and {ADAPTER_FILE}, as written by PEFT.",
        ) from error
    except ValidationError as error:
        field_path = ".".join(map(str, error.errors()[0]["loc"]))
        raise UserError(
            f"{folder / _CONFIG} is not a valid adapter configuration (at {field_path or 'the top level'})."
        ) from error
    variants = (config.use_dora, config.lora_bias, config.fan_in_fan_out, config.bias != "none", config.modules_to_save)
    if config.peft_type != "LORA" or any((*variants, config.rank_pattern, config.alpha_pattern)):
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
