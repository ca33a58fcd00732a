"""The section `model`: the policy."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator

from ludus.config.sections.section import Section


def check_role_names(setting: str, roles: Sequence[str]) -> None:
    """Raise ValueError for a name that is not that of a role without its kind."""
    if invalid := [role for role in roles if not re.fullmatch(r"[\w-]+", role)]:
        allowed = "a role has letters, digits, - and _ only (solver, not solver:code or solver/0)"
        raise ValueError(f"{setting} has {invalid[0]!r}, but {allowed}")


def multiplies_bfloat16(
    processor: Path = Path("/proc/cpuinfo"), gpu: Path = Path("/dev/nvidia0"), *, on_gpu: bool = True
) -> bool:
    """Return whether the machine has a GPU (ignored unless `on_gpu`) or a CPU with matrix products in bfloat16, by
    the files that tell."""
    on_cpu = processor.is_file() and " amx_bf16" in processor.read_text(encoding="utf-8")
    return on_cpu or (on_gpu and gpu.exists())


class LoraConfig(Section):
    """Low-rank adapters (needs the `lora` extra); the base weights are frozen."""

    rank: int = Field(16, ge=1)
    """Rank of the update of each layer."""
    alpha: float = Field(32.0, gt=0)
    """The update is scaled by alpha / rank."""
    target_modules: list[str] | Literal["all-linear"] = "all-linear"
    """Names of the linear layers with an adapter, or all-linear."""
    first_block: int = Field(0, ge=0)
    """Index of the first transformer block with adapters; the learner has no backward pass below it."""
    roles: list[str] = Field([])
    """Roles of agents with their own adapter, which only their tokens train; all other roles share one."""

    @model_validator(mode="after")
    def _roles_are_names(self) -> Self:
        if twice := [role for role, count in Counter(self.roles).items() if count > 1]:
            raise ValueError(f"model.lora.roles has {twice[0]!r} twice")
        check_role_names("model.lora.roles", self.roles)
        return self


class ModelInitConfig(Section):
    """The architecture of the small model that is created if no checkpoint is given."""

    vocab_size: int = Field(2048, ge=300)
    """Maximum vocabulary size of its tokenizer, which is trained first; every byte and special token has an entry."""
    hidden_size: int = Field(128, ge=8)
    """Width of the residual stream."""
    intermediate_size: int = Field(384, ge=8)
    """Width of the feed-forward layers."""
    num_layers: int = Field(4, ge=1)
    """Number of transformer blocks."""
    num_heads: int = Field(4, ge=1)
    """Attention heads; hidden_size must be an even multiple."""
    num_kv_heads: int = Field(4, ge=1)
    """Key-value heads; must divide num_heads."""
    context_tokens: int = Field(1024, ge=64)
    """Longest sequence, in tokens."""
    initializer_range: float = Field(0.02, gt=0, le=1)
    """Standard deviation of the random weights. 0.02 is made for wide models; narrow ones learn faster with about
    1 / sqrt(hidden_size)."""

    @model_validator(mode="after")
    def _heads_divide(self) -> Self:
        size, heads, kv_heads = self.hidden_size, self.num_heads, self.num_kv_heads
        if size % (2 * heads):
            part = f"model.init.num_heads ({heads})"
            raise ValueError(f"model.init.hidden_size ({size}) must be an even multiple of {part}")
        if heads % kv_heads:
            part = f"model.init.num_kv_heads ({kv_heads})"
            raise ValueError(f"model.init.num_heads ({heads}) must be a multiple of {part}")
        return self


class ModelConfig(Section):
    """The policy."""

    path: str | None = None
    """A checkpoint folder or model name; if unset, the cold start of the recipe, which ships with the package."""
    from_scratch: bool = False
    """Create tokenizer and model and run the cold start first, instead of loading a checkpoint."""
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    """Data type of the weights; `auto` is bfloat16 on a GPU or a CPU that multiplies matrices in it (AMX), otherwise
    float32."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of model and engine; `auto` is the GPU if there is one."""
    lora: LoraConfig | None = None
    """Train low-rank adapters; if unset, all weights are trained."""
    master_weights: bool = True
    """With bfloat16 weights, let the optimizer update a float32 copy; otherwise small updates are lost to rounding."""
    activation_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory for a third more compute."""
    roles: dict[str, str] = Field({})
    """Checkpoint folders or names of separate models by role of agents, each with its own engine and optimizer; all
    other roles share the policy."""
    frozen_roles: list[str] = Field([])
    """Roles of model.roles whose models sample and are not trained."""
    init: ModelInitConfig = ModelInitConfig()

    @model_validator(mode="before")
    @classmethod
    def _choose_dtype(cls, values: object) -> object:
        if not isinstance(values, dict) or values.get("dtype") != "auto":
            return values
        fast = multiplies_bfloat16(on_gpu=values.get("device") != "cpu")
        return values | {"dtype": "bfloat16" if fast else "float32"}

    @model_validator(mode="after")
    def _roles_are_names(self) -> Self:
        check_role_names("model.roles", list(self.roles))
        if self.roles and self.lora is not None:
            raise ValueError("model.roles (separate models) and model.lora (adapters) are mutually exclusive")
        if unknown := [role for role in self.frozen_roles if role not in self.roles]:
            raise ValueError(f"model.frozen_roles has {unknown[0]!r}, which is not in model.roles")
        return self

    @model_validator(mode="after")
    def _one_origin(self) -> Self:
        if self.from_scratch and self.path is not None:
            raise ValueError(
                f'model.path ("{self.path}") and model.from_scratch (true) are mutually exclusive: '
                "the model is either loaded or created"
            )
        return self
