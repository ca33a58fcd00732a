"""Settings of the model that is trained."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from ludus.config.sections.section import Section, Why


class LoraConfig(Section):
    """Low-rank adapters (needs the `lora` extra); the base weights stay frozen."""

    rank: int = Field(16, ge=1)
    """Size of the low-rank update of each layer."""
    alpha: float = Field(32.0, gt=0)
    """The update is scaled by alpha / rank."""
    target_modules: list[str] | Literal["all-linear"] = "all-linear"
    """Which linear layers carry an adapter, by name."""


class ScratchConfig(Section):
    """The shape of the small model that is made on the spot when no checkpoint is given."""

    vocab_size: Annotated[int, Why("every byte and the special tokens need an entry")] = Field(2048, ge=300)
    """Tokens of the tokenizer that is trained for it, at most."""
    hidden_size: int = Field(128, ge=8)
    """Width of the residual stream."""
    intermediate_size: int = Field(384, ge=8)
    """Width inside the feed-forward layers."""
    num_layers: int = Field(4, ge=1)
    """Transformer blocks."""
    num_heads: int = Field(4, ge=1)
    """Attention heads; they divide hidden_size."""
    num_kv_heads: int = Field(4, ge=1)
    """Heads of keys and values; they divide num_heads."""
    context_tokens: int = Field(1024, ge=64)
    """Longest sequence that the model takes."""

    @model_validator(mode="after")
    def _heads_divide(self) -> Self:
        if self.hidden_size % self.num_heads:
            raise ValueError(
                f"model.init.hidden_size ({self.hidden_size}) must be a multiple of "
                f"model.init.num_heads ({self.num_heads})"
            )
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"model.init.num_heads ({self.num_heads}) must be a multiple of "
                f"model.init.num_kv_heads ({self.num_kv_heads})"
            )
        return self


class ModelConfig(Section):
    """The policy."""

    path: str | None = None
    """A checkpoint folder or model name. None is the recipe's own cold start, shipped in the package."""
    from_scratch: bool = False
    """Make tokenizer and model and run the cold start first, instead of loading a checkpoint."""
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    """Number format of the weights."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where model and engine run; `auto` takes the GPU where there is one."""
    lora: LoraConfig | None = None
    """Train low-rank adapters of this shape; none trains all weights."""
    master_weights: bool = True
    """With bfloat16 weights the optimiser keeps a float32 copy and moves that; off, small updates vanish."""
    activation_checkpointing: bool = False
    """Compute each layer's inner states again in the backward pass: less memory, a third more work."""
    init: ScratchConfig = ScratchConfig()

    @model_validator(mode="after")
    def _one_origin(self) -> Self:
        if self.from_scratch and self.path is not None:
            raise ValueError(
                f'model.path ("{self.path}") and model.from_scratch (true) exclude each other: '
                "the model is either loaded or made"
            )
        return self
